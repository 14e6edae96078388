"""`load_in_fp8`: storage by way of Transformers, its round trips, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from finetune import load_in_fp8
from finetune.errors import (
    ConfigError,
    ModelNotFoundError,
    PlanError,
    StorageNotComputeError,
)
from finetune.hardware.versions import concerns, installed
from finetune.precision.model.layers import linear_records
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.codes import Fp8Bits
from finetune.precision.stored.linear import iter_stored, storable, store
from finetune.storage.loading import build_stored, load_stored
from finetune.storage.quantizer import Fp8StorageConfig
from finetune.training.health.memory_meter import LiveTensors

TOKENS = torch.arange(3, 15)[None]
GRANULARITIES = ("row", "tensor", "block")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 80,
    "intermediate_size": 200,  # no multiple of 16: storage needs none
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
}


def llama(**more) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "pad_token_id": 0, **more}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    llama().save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def equal(a: nn.Module, b: nn.Module) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(
        x.dtype is b[n].dtype and torch.equal(x.view(torch.uint8), b[n].view(torch.uint8))
        for n, x in a.items()
    )


# ----------------------------------------------------------------------------------- what it holds


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_it_is_the_plain_model_with_its_linear_layers_held(folder, granularity):
    model = load_in_fp8(folder, granularity)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    linears = [n for n, m in plain.named_modules() if isinstance(m, nn.Linear)]
    assert [name for name, _ in iter_stored(model)] == [n for n in linears if n != "lm_head"]
    for name, _ in iter_stored(model):
        store(plain.get_submodule(name), granularity)
    assert equal(model, plain)
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits.detach())


def test_everything_is_frozen_and_in_evaluation_mode(folder):
    model = load_in_fp8(folder)
    assert not [n for n, p in model.named_parameters() if p.requires_grad]
    assert not model.training
    assert model.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["double", "bfloat16"])
@pytest.mark.parametrize("copied", [False, True])
def test_it_is_cast_as_any_model_and_its_codes_are_not(folder, name, copied):
    """What was dequantized for others kept its first type; Transformers refuses half and float."""
    model, as_before = load_in_fp8(folder), load_in_fp8(folder)
    cast = copy.deepcopy(model) if copied else model
    assert getattr(cast, name)() is cast
    wanted = getattr(torch.empty(0), name)().dtype
    assert cast.dtype is cast.lm_head.weight.dtype is wanted
    for (_, layer), (_, before) in zip(iter_stored(cast), iter_stored(as_before), strict=True):
        assert torch.equal(layer.weight, before.weight)
        assert torch.equal(layer.weight_scale, before.weight_scale)
        assert layer.dequantize().dtype is wanted
    torch.testing.assert_close(
        cast(TOKENS).logits.float(), as_before(TOKENS).logits.float(), rtol=0.05, atol=0.02
    )
    again = pickle.loads(pickle.dumps(cast))
    assert torch.equal(again(TOKENS).logits, cast(TOKENS).logits)


def test_the_policy_is_that_of_the_planner():
    for model in (llama(tie_word_embeddings=True), gpt2(), moe()):
        roles = {record.name: record.role for record in linear_records(model)}
        rows = plan(model, PrecisionConfig(compute="bf16")).layers
        assert roles == {row.name: row.role for row in rows if row.kind == "linear"}
        base = [name for name, role in roles.items() if role == "base"]
        assert storable(model) == base


def test_patterns_keep_layers(folder):
    model = load_in_fp8(folder, keep=["layers.1", "q_proj"])
    names = [name for name, _ in iter_stored(model)]
    assert names == [
        f"model.layers.0.{part}"
        for part in (
            *(f"self_attn.{x}_proj" for x in "kvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    ]
    assert model.model.layers[1].mlp.up_proj.weight.dtype is torch.bfloat16


def test_the_configuration_alone_does_it(folder):
    storage = Fp8StorageConfig("block")
    kwargs = {"quantization_config": storage, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    assert equal(model, load_in_fp8(folder, "block"))
    assert storage.modules is None  # the object that was given may serve another model


def test_named_layers_are_stored_and_no_others(folder):
    names = ["model.layers.0.mlp.up_proj", "lm_head"]
    model = load_stored(folder, names, "tensor")
    assert [name for name, _ in iter_stored(model)] == names
    with pytest.raises(PlanError, match=r"no linear layer of this model; did you mean '.*up_proj'"):
        load_stored(folder, ["model.layers.0.mlp.upp_proj"])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, **ends))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transposed_layers_and_biases(tmp_path, granularity):
    gpt2().save_pretrained(tmp_path / "plain")
    model = load_in_fp8(tmp_path / "plain", granularity, dtype=torch.float32)
    plain = gpt2().eval()
    for name, _ in iter_stored(model):
        store(plain.get_submodule(name), granularity)
    assert equal(model, plain)
    model.save_pretrained(tmp_path / "own")
    again = load_in_fp8(tmp_path / "own", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, plain(TOKENS).logits)


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_saved_and_reloaded_bit_for_bit(tmp_path, granularity, tied):
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "plain")
    model = load_in_fp8(tmp_path / "plain", granularity)
    model.save_pretrained(tmp_path / "own", max_shard_size="50KB")
    plainly = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.bfloat16)
    assert equal(model, plainly)
    assert equal(model, load_in_fp8(tmp_path / "own"))
    assert torch.equal(model(TOKENS).logits, plainly(TOKENS).logits)
    for name, module in iter_stored(plainly):
        assert isinstance(module.weight, Fp8Bits)
        assert module.stored_tile == model.get_submodule(name).stored_tile
    assert not any(p.requires_grad for p in plainly.parameters())
    plainly.save_pretrained(tmp_path / "twice")
    assert equal(model, load_in_fp8(tmp_path / "twice"))


def test_a_saved_model_takes_other_scales_when_asked(folder, tmp_path):
    load_in_fp8(folder, "block", keep=["down_proj"]).save_pretrained(tmp_path)
    model = load_in_fp8(tmp_path, "row", keep=["q_proj"])
    tiles = {name.rpartition(".")[2]: m.stored_tile for name, m in iter_stored(model)}
    parts = ("k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    assert tiles.keys() == set(parts)
    assert {rows for rows, _ in tiles.values()} == {1}
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert list(model.config.quantization_config.modules) == ["row"]


def test_a_saved_model_loads_without_its_head_and_with_another(folder, tmp_path):
    model = load_in_fp8(folder)
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert len(list(iter_stored(body))) == 14
    assert equal(body, model.model)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert len(list(iter_stored(classifier))) == 14
    assert classifier(TOKENS).logits.shape == (1, 3)


def test_dequantized_it_is_a_plain_model(folder, tmp_path):
    model = load_in_fp8(folder)
    logits = model(TOKENS).logits
    model.dequantize()
    assert not list(iter_stored(model))
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


# ---------------------------------------------------------------------------------------- its uses


def test_it_generates(folder):
    """Token by token, with a cache, the same as from forwards over the whole text."""
    model = load_in_fp8(folder, dtype=torch.float32)
    generation = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    tokens = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **generation)
    expected = TOKENS
    for _ in range(8):
        logits = model(expected, use_cache=False).logits[:, -1].detach()
        logits[:, model.generation_config.eos_token_id] = -torch.inf
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=-1)
    assert torch.equal(tokens, expected)
    assert len(expected[0, len(TOKENS[0]) :].unique()) > 1, "not the same token again and again"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_without_breaks(folder):
    model = load_in_fp8(folder, dtype=torch.float32)
    compiled = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 80)
    torch.testing.assert_close(compiled(x), model.model.layers[0].mlp(x))


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_maps(folder, device_map):
    assert equal(load_in_fp8(folder, device_map=device_map), load_in_fp8(folder))


def test_an_offloaded_model_is_refused(folder):
    device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ConfigError, match="cannot be offloaded"):
        load_in_fp8(folder, device_map=device_map)


# ---------------------------------------------------------------------------------------- training


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = torch.arange(i, i + 8) % 64
        return {"input_ids": row, "labels": row}


def trainer(model, tmp_path) -> Trainer:
    args = TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, learning_rate=1e-2, save_steps=2
    )
    return Trainer(model, args, train_dataset=Rows())


def test_a_trainer_without_adapters_is_refused(folder, tmp_path):
    with pytest.raises(StorageNotComputeError, match="cannot be trained") as caught:
        trainer(load_in_fp8(folder), tmp_path)
    assert "setup_fp8_mixed_precision_training()" in caught.value.fix


def test_thawing_all_is_refused(folder):
    with pytest.raises(StorageNotComputeError, match="setup_fp8_mixed_precision_training"):
        load_in_fp8(folder).requires_grad_(True)


@pytest.mark.slow
def test_adapters_train_and_are_ordinary_ones(folder, tmp_path):
    model = load_in_fp8(folder)
    codes = {n: m.weight.clone() for n, m in iter_stored(model)}
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
    model = get_peft_model(model, config)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert {n.split(".")[-2] for n in before if "lora_" not in n} == {"default"}  # the copied head
    trainer(model, tmp_path / "run").train()
    changed = [n for n, p in model.named_parameters() if n in before and not p.equal(before[n])]
    assert len([n for n in changed if "lora_B" in n]) == 14
    assert [n for n in changed if "modules_to_save" in n]
    base = model.get_base_model()
    stored = {n.replace(".base_layer", ""): m for n, m in iter_stored(base)}
    assert all(torch.equal(stored[n].weight, bits) for n, bits in codes.items())
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, _ in iter_stored(load_in_fp8(folder)):
        plain.get_submodule(name).weight.data.copy_(load_held(folder, name))
    over = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    model.eval()
    torch.testing.assert_close(over(TOKENS).logits, model(TOKENS).logits, rtol=0.05, atol=0.02)


def load_held(folder, name):
    return load_in_fp8(folder).get_submodule(name).weight_in()


def test_prompt_tuning_is_not_refused(folder, tmp_path):
    from peft import PromptTuningConfig

    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    moved, codes_moved = moved_in_training(get_peft_model(load_in_fp8(folder), prompts), tmp_path)
    assert moved == {"prompt_encoder.default.embedding.weight": True}
    assert not any(codes_moved.values())


def moved_in_training(model, tmp_path) -> tuple[dict[str, bool], dict[str, bool]]:
    """For each trainable parameter, and for each layer's codes, whether training changed it."""
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    codes = {name: module.weight.clone() for name, module in iter_stored(model)}
    assert codes
    trainer(model, tmp_path).train()
    after, stored = dict(model.named_parameters()), dict(iter_stored(model))
    moved = {name: not torch.equal(after[name], old) for name, old in before.items()}
    return moved, {name: not torch.equal(stored[name].weight, old) for name, old in codes.items()}


@pytest.mark.skipif(
    any("add_adapter" in line for line in concerns(installed())),
    reason="these versions of transformers and peft are known to be bad together (tested.toml)",
)
def test_transformers_own_adapters_train(folder, tmp_path):
    model = load_in_fp8(folder)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    moved, codes_moved = moved_in_training(model, tmp_path)
    assert len(moved) == 2 * model.config.num_hidden_layers, "A and B of each layer's q_proj"
    assert all(moved.values())
    assert not any(codes_moved.values())


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "hint"), [("rows", "'row'"), ("blocks", "'block'"), ("per_tensor", "'tensor'")]
)
def test_an_unknown_granularity(folder, given, hint):
    with pytest.raises(ConfigError, match=f"no granularity.*did you mean {hint}"):
        load_in_fp8(folder, given)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ModelNotFoundError, match="there is no model in"):
        load_in_fp8(tmp_path / "missing")


def test_a_folder_without_weights(tmp_path):
    llama().config.save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match="could not be loaded"):
        load_in_fp8(tmp_path)


def test_a_model_that_lacks_layers(folder, tmp_path):
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers = 3
    for file in folder.glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config.save_pretrained(tmp_path)
    with pytest.raises(StorageNotComputeError, match="no weights for 7 layers") as caught:
        load_in_fp8(tmp_path)
    assert "model.layers.2." in caught.value.where


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.norm.weight"])
def test_weights_that_are_not_stored_in_fp8_are_not_drawn_by_chance(folder, tmp_path, lost):
    rewritten(folder, tmp_path, lambda tensors: tensors.pop(lost))
    with pytest.raises(ModelNotFoundError, match="lacks 1 of its weights") as caught:
        load_in_fp8(tmp_path)
    assert lost in caught.value.where
    with pytest.raises(ModelNotFoundError, match="lacks 1 of its weights"):
        load_stored(tmp_path, ["model.layers.0.mlp.up_proj"])


def test_a_model_with_stored_experts_is_not_saved_as_if_they_were_weights(tmp_path):
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
    plain = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **experts))
    plain.save_pretrained(tmp_path / "plain")
    stack = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ConfigError, match="experts in one parameter cannot") as refused:
        load_stored(tmp_path / "plain", ["model.layers.0.mlp.experts.gate_up_proj"], "block")
    assert "granularity='row'" in refused.value.fix
    stored = load_stored(tmp_path / "plain", [stack, "model.layers.0.self_attn.q_proj"])
    with pytest.raises(StorageNotComputeError, match="experts stored in FP8") as caught:
        stored.save_pretrained(tmp_path / "saved")
    assert caught.value.where == stack
    stored.hf_quantizer.experts = []  # as versions before wrote it
    stored.save_pretrained(tmp_path / "saved")
    with pytest.raises(StorageNotComputeError, match=r"experts\..*in FP8"):
        load_in_fp8(tmp_path / "saved")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_codes_of_a_plain_checkpoint_are_no_weights(folder, tmp_path, kind):
    name = "model.layers.0.mlp.up_proj.weight"
    rewritten(folder, tmp_path, lambda tensors: tensors.update({name: tensors[name].to(kind)}))
    with pytest.raises(ModelNotFoundError, match="has weights of type") as caught:
        load_in_fp8(tmp_path)
    assert name in caught.value.where


def rewritten(folder, out, change) -> None:
    """Copy a model with its tensors changed, in one file."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    shutil.copyfile(folder / "config.json", out / "config.json")


def test_a_model_without_linear_layers(tmp_path):
    from finetune.storage.bdh import BdhConfig, BdhForCausalLM

    BdhForCausalLM(BdhConfig()).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="no linear layer to store"):
        load_in_fp8(tmp_path)


@pytest.mark.parametrize(
    ("keep", "said"), [("qproj", "matches no linear layer.*q_proj"), ("*", "no linear layer left")]
)
def test_patterns_that_keep_nothing_or_all(folder, keep, said):
    with pytest.raises(PlanError, match=said):
        load_in_fp8(folder, keep=keep)


@pytest.mark.parametrize("other", ["quantization_config", "load_in_4bit"])
def test_two_ways_to_hold_weights(folder, other):
    with pytest.raises(ConfigError, match=f"was given {other}"):
        load_in_fp8(folder, **{other: True})


def test_weights_that_are_not_finite(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(StorageNotComputeError, match=r"layers\.1\.mlp\.up_proj.*NaN or infinity"):
        load_in_fp8(tmp_path)


def moe() -> Qwen2MoeForCausalLM:
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **shape, num_experts=4, moe_intermediate_size=48, shared_expert_intermediate_size=48
        )
    )


def test_experts_in_one_parameter_stay_and_are_named(tmp_path):
    moe().save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match=r"% of this model are parameters of experts .*experts"):
        model = load_in_fp8(tmp_path / "plain")
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype is torch.bfloat16
    model.save_pretrained(tmp_path / "own")
    assert equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "own"))


# ------------------------------------------------------------------------------------------ memory


@pytest.fixture
def one_thread(monkeypatch):
    """The count of live bytes sees one thread."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A checkpoint of 13 MB in BF16, of which the decoder layers are nearly all."""
    path = tmp_path_factory.mktemp("larger")
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "head_dim": 64}
    llama(**sizes).to(torch.bfloat16).save_pretrained(path, max_shard_size="2MB")
    return path


def held_bytes(model) -> int:
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_base_is_never_held_twice(larger, granularity):
    with LiveTensors() as live:
        model = load_in_fp8(larger, granularity)
    final = held_bytes(model)
    plain = AutoModelForCausalLM.from_pretrained(larger, dtype=torch.bfloat16)
    assert final < 0.53 * held_bytes(plain)
    shard = max(file.stat().st_size for file in larger.glob("*.safetensors"))
    assert 0.9 * final < live.peak < 1.15 * final + shard


@pytest.mark.usefixtures("one_thread")
def test_a_saved_model_is_read_without_copies(larger, tmp_path):
    load_in_fp8(larger).save_pretrained(tmp_path)
    with LiveTensors() as live:
        model = load_in_fp8(tmp_path)
    assert live.peak < 1.05 * held_bytes(model)


def test_a_random_model_is_built_layer_by_layer(larger):
    plain = AutoModelForCausalLM.from_pretrained(larger, dtype=torch.bfloat16)
    names = storable(plain)
    with LiveTensors() as live:
        model = build_stored(plain.config, names)
    layer = sum(p.nbytes for p in plain.model.layers[0].parameters())
    assert live.peak < 1.15 * held_bytes(model) + layer


# ---------------------------------------------------------------------------------- random weights


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("make", [llama, lambda: llama(tie_word_embeddings=True), gpt2])
def test_a_random_model_is_what_from_config_makes_of_it(make, granularity, tmp_path):
    plain = make()
    names = storable(plain)
    torch.manual_seed(1)
    model = build_stored(plain.config, names, granularity, dtype=torch.float32).eval()
    assert [name for name, _ in iter_stored(model)] == names
    buffers = dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer)
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == plain.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            owner = name.removesuffix(".weight")
            drawn = model.get_parameter(name)
            if owner in names:
                drawn = model.get_submodule(owner).dequantize()
            if parameter.numel() > 1000:
                torch.testing.assert_close(drawn.std(), parameter.std(), rtol=0.1, atol=0)
            else:
                assert torch.equal(drawn, parameter)  # norms and biases
            parameter.copy_(drawn)
        plain.tie_weights()
        torch.testing.assert_close(model(TOKENS).logits, plain.eval()(TOKENS).logits)
    model.save_pretrained(tmp_path)
    assert equal(model, load_in_fp8(tmp_path, dtype=torch.float32))


def test_a_model_that_does_not_initialize_all_is_refused(monkeypatch):
    plain = llama()
    for model in (plain, plain.model):
        monkeypatch.setattr(type(model), "_init_weights", lambda _self, _module: None)
    with pytest.raises(PlanError, match="does not initialize all"):
        build_stored(plain.config, storable(plain))
