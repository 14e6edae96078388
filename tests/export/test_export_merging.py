"""Merging: equal to PEFT's own, shard by shard, for every kind of adapter; nothing is dropped."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from finetune.errors import ConfigError
from finetune.export.merge import Merger
from finetune.export.shards import open_checkpoint, write_config, write_weights
from finetune.training.memory_meter import LiveTensors
from tests.conftest import slow_but

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    )


def qwen2():
    """Has biases on q, k and v, and a head tied to the embedding."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(model, folder, shard="20KB"):
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def adapt(model, folder, **lora):
    """Save a trained-looking adapter of a model; the model gets it too."""
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(folder)
    return adapted


def merge(base, adapter, out):
    out.mkdir()
    checkpoint = open_checkpoint(base)
    merger = Merger(checkpoint, adapter)
    write_weights(checkpoint, out, merger)
    write_config(checkpoint, out, untied=bool(merger.untied), quantization=None)
    return AutoModelForCausalLM.from_pretrained(out, dtype="auto")


def assert_same(ours, theirs, *, steps: float, before):
    """Equal tensors, up to roundings of the stored type (of W and of s·B·A, which may cancel)."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        expected = theirs[name]
        assert tensor.dtype == expected.dtype, name
        size = before[name].float().abs() + expected.float().abs()
        error = (tensor.float() - expected.float()).abs()
        bound = steps * torch.finfo(tensor.dtype).eps * size + 1e-9
        assert (error <= bound).all(), (name, float((error / bound).max()))


ADAPTERS = {
    "plain": {"target_modules": "all-linear", "r": 4, "lora_alpha": 8},
    "rslora": {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "target_modules": LINEAR,
        "r": 4,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
        "alpha_pattern": {"v_proj": 32, "layers.0.mlp.down_proj": 1},
    },
    "dora": {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_dora": True},
    "modules_to_save": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"], "r": 4},
    "head": {"target_modules": ["lm_head", "v_proj"], "r": 4},
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    "dtype",
    slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]),
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_are_pefts(kind, dtype, make_llama, tmp_path):
    base = save(make_llama(vocab_size=64).to(dtype), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    adapted = adapt(model, tmp_path / "adapter", **ADAPTERS[kind])
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    # PEFT rounds s·B·A to BF16 before it adds, and DoRA's norms too.
    assert_same(merged, adapted.merge_and_unload(), steps=2, before=before)
    changed = [n for n, t in merged.state_dict().items() if not torch.equal(t, before[n])]
    assert changed, "the adapter changed nothing, so that this test shows nothing"
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2


@pytest.mark.filterwarnings("ignore:Adapter .default.. . LoRA tensor")  # PEFT minds 1-D biases
@pytest.mark.parametrize("lora", [{"lora_bias": True}, {"bias": "all"}, {"bias": "lora_only"}, {}])
def test_biases(lora, tmp_path):
    base = save(qwen2(), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    before = copy.deepcopy(model.state_dict())
    adapted = adapt(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], **lora)
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    assert_same(merged, adapted.merge_and_unload(), steps=2, before=before)
    name = "model.layers.0.self_attn.q_proj.bias"
    moved = not torch.equal(merged.state_dict()[name], before[name])
    assert moved == bool(lora)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
@pytest.mark.filterwarnings("ignore:Adapter .default.. . LoRA tensor")
def test_a_bias_where_the_layer_has_none_is_an_error(make_llama, tmp_path):
    base = save(make_llama(vocab_size=64), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapt(model, tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ConfigError, match=r"no stored weight to go to(.|\n)*q_proj\.bias"):
        Merger(open_checkpoint(base), tmp_path / "adapter")


def test_transposed_weights_of_gpt2(tmp_path):
    base = save(gpt2(), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    before = copy.deepcopy(model.state_dict())
    targets = ["c_attn", "c_proj", "c_fc"]
    adapted = adapt(model, tmp_path / "adapter", target_modules=targets, fan_in_fan_out=True)
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    assert_same(merged, adapted.merge_and_unload(), steps=2, before=before)


def test_checkpoint_without_the_prefix(tmp_path):
    """The hub's GPT-2 stores `h.0...`, the model has `transformer.h.0...`."""
    save(gpt2().transformer, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = copy.deepcopy(model.state_dict())
    adapted = adapt(model, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    merged = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_same(merged, adapted.merge_and_unload(), steps=2, before=before)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("part", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("how", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("stored", ["once", "twice"])
def test_a_tied_pair_that_the_adapter_tears_apart(stored, part, how, tmp_path):
    base = save(qwen2(), tmp_path / "base", shard="10MB")
    if stored == "twice":
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    lora = {"target_modules": ["q_proj"]}
    lora[how] = [*lora.get(how, []), part]
    adapted = adapt(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", **lora)
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    ids = torch.arange(1, 33).view(2, 16)
    expected = adapted.eval()(ids).logits
    assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
    stock = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(stock(ids).logits, expected, atol=1e-3)
    assert not merged.config.tie_word_embeddings


def test_a_tied_pair_stays_one(tmp_path):
    base = save(qwen2(), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapt(model, tmp_path / "adapter", target_modules=["q_proj"])
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    assert merged.config.tie_word_embeddings
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]


def test_experts_in_parts_are_copied_and_attention_is_merged(tmp_path):
    """Mixtral stores each expert's weights apart; the model holds them in one parameter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    base = save(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    before = copy.deepcopy(model.state_dict())
    adapted = adapt(model, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    merged = merge(base, tmp_path / "adapter", tmp_path / "out")
    assert_same(merged, adapted.merge_and_unload(), steps=2, before=before)
    stored = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    assert any("experts.1.w2" in key for key in stored), "no longer stored in parts"


# ------------------------------------------------------------------------------ nothing is dropped


def test_adapters_on_experts_are_refused_where_weights_are_merged_one_by_one(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    base = save(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    on_experts = ["mlp.experts.down_proj"]
    adapt(model, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=on_experts)
    with pytest.raises(ConfigError, match=r"target_parameters(.|\n)*--to adapter"):
        Merger(open_checkpoint(base), tmp_path / "adapter")


@pytest.fixture
def llama_and_adapter(make_llama, tmp_path):
    base = save(make_llama(vocab_size=64), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapt(model, tmp_path / "adapter", target_modules=["q_proj"])
    return base, tmp_path / "adapter"


def edit(adapter, change):
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


def test_a_tensor_without_a_layer_is_an_error(llama_and_adapter, tmp_path):
    base, adapter = llama_and_adapter
    stray = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    edit(adapter, lambda tensors: tensors.update({stray: torch.ones(8, 64)}))
    with pytest.raises(ConfigError, match=r"no stored weight to go to(.|\n)*layers\.7"):
        Merger(open_checkpoint(base), adapter)


def test_a_layer_without_its_tensor_is_an_error(llama_and_adapter):
    base, adapter = llama_and_adapter
    edit(adapter, lambda tensors: tensors.popitem())
    with pytest.raises(ConfigError, match="lacks 1 tensors"):
        Merger(open_checkpoint(base), adapter)


def test_a_saved_module_without_its_tensor_is_an_error(make_llama, tmp_path):
    base = save(make_llama(vocab_size=64), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = tmp_path / "adapter"
    adapt(model, adapter, target_modules=["q_proj"], modules_to_save=["lm_head"])
    edit(adapter, lambda tensors: tensors.pop("base_model.model.lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lacks 1 tensors(.|\n)*lm_head"):
        Merger(open_checkpoint(base), adapter)


def test_a_layer_without_a_stored_weight_is_an_error(llama_and_adapter):
    base, adapter = llama_and_adapter
    name = "model.layers.1.self_attn.q_proj.weight"
    file = base / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"][name]
    file.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"no stored weight to go to(.|\n)*layers\.1\.self_attn"):
        Merger(open_checkpoint(base), adapter)


def test_an_adapter_of_another_width_is_an_error(llama_and_adapter, make_llama, tmp_path):
    _, adapter = llama_and_adapter
    other = save(make_llama(vocab_size=64, hidden_size=32), tmp_path / "other")
    with pytest.raises(ConfigError, match="size mismatch"):
        Merger(open_checkpoint(other), adapter)


def test_a_merged_weight_that_is_not_finite_is_an_error(llama_and_adapter, tmp_path):
    base, adapter = llama_and_adapter
    edit(adapter, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    with pytest.raises(ConfigError, match="not finite"):
        merge(base, adapter, tmp_path / "out")


def test_adapters_that_are_no_change_of_a_weight_are_refused(llama_and_adapter):
    base, adapter = llama_and_adapter
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["trainable_token_indices"] = [1, 2]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"cannot be merged(.|\n)*--to adapter"):
        Merger(open_checkpoint(base), adapter)


def test_nothing_is_merged_into_fp8(make_llama, tmp_path):
    base = save(make_llama(), tmp_path / "base", shard="10MB")
    file = base / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"F8_E4M3(.|\n)*step of FP8 is 6 %"):
        open_checkpoint(base)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantized \(fp8\)"):
        open_checkpoint(base)


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.slow
def test_never_more_than_a_shard_in_memory(make_llama, tmp_path):
    """Peak while merging: one shard as it is written, and the temporaries of its largest weight."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 12,
        "vocab_size": 64,
    }
    base = save(make_llama(**sizes).bfloat16(), tmp_path / "base", shard="500KB")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    adapt(model, tmp_path / "adapter", target_modules="all-linear", r=2)
    adapter = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    shards = [file.stat().st_size for file in base.glob("*.safetensors")]
    largest = max(p.numel() for p in model.parameters()) * 4
    del model
    (tmp_path / "out").mkdir()
    with LiveTensors() as memory:
        checkpoint = open_checkpoint(base)
        merger = Merger(checkpoint, tmp_path / "adapter")
        before = memory.bytes
        write_weights(checkpoint, tmp_path / "out", merger)
    assert before <= 1.3 * adapter
    assert memory.peak - before <= 1.05 * max(shards) + 4 * largest
    assert sum(shards) > 2 * (max(shards) + 4 * largest), "too small a model to show it"
    assert memory.peak > 0.9 * max(shards), "the meter sees nothing"
