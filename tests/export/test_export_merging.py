"""Merging: for every kind of adapter, the saved model says what the model with the adapter says."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from finetune import load_recipe
from finetune.errors import ConfigError
from finetune.export.merge import merged
from finetune.export.parity import load_stock
from tests.families import config_of, folder_of

IDS = torch.arange(1, 33).view(2, 16)
TIED = "model.embed_tokens.weight", "lm_head.weight"
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed"),
    pytest.mark.filterwarnings("ignore:Adapter .default.. . LoRA tensor"),
]


@pytest.fixture(scope="module")
def config():
    return load_recipe("tiny_lora_bf16", check_train=False).config


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    )


def qwen2():
    """Has biases on q, k and v, and a head tied to the embedding."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, tie_word_embeddings=True, **sizes, **heads))


def saved(make, folder):
    """Random weights of a model, biases too."""
    torch.manual_seed(0)
    model = make()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def adapt(base, folder, dtype=torch.float32, **lora):
    """Save a trained-looking adapter of the model in a folder; returns the model under it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(folder)
    return adapted.eval()


def exported(base, adapter, out, config):
    """The merged model, as it comes back from its folder."""
    merged(base, config, adapter, "auto").save_pretrained(out)
    return AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()


ADAPTERS = {
    "rslora": {"target_modules": "all-linear", "r": 4, "use_rslora": True},
    "patterns": {
        "target_modules": "all-linear", "r": 4,
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32},
    },
    "dora": {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_dora": True},
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "biases": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"], "r": 4},
    "head": {"target_modules": ["lm_head", "v_proj"], "r": 4},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}  # fmt: skip
UNTIES = {"embedding", "head", "saved embedding", "saved head"}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_says_what_the_adapted_one_says(kind, config, tmp_path):
    """Also where the adapter changes one half of a tied pair: then the halves part."""
    base = saved(qwen2, tmp_path / "base")
    expected = adapt(base, tmp_path / "adapter", **ADAPTERS[kind])(IDS).logits
    ours = exported(base, tmp_path / "adapter", tmp_path / "out", config)
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    stock = AutoModelForCausalLM.from_pretrained(base)(IDS).logits
    assert not torch.allclose(stock, expected, atol=1e-3), "the adapter changes nothing"
    assert ours.config.tie_word_embeddings == (kind not in UNTIES)
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in held) == (kind in UNTIES)


def test_transposed_weights_of_gpt2_without_the_prefix(config, tmp_path):
    """The hub's GPT-2 stores `h.0...`, the model has `transformer.h.0...`."""
    base = saved(lambda: gpt2().transformer, tmp_path / "base")
    file = base / "config.json"
    named = {"architectures": ["GPT2LMHeadModel"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    targets = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    expected = adapt(base, tmp_path / "adapter", **targets)(IDS).logits
    ours = exported(base, tmp_path / "adapter", tmp_path / "out", config)
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_experts_are_stored_in_parts_as_they_were(config, tmp_path):
    """Mixtral stores each expert's weights apart; the model holds them in one parameter."""
    base = folder_of("mixtral", tmp_path)
    AutoModelForCausalLM.from_config(config_of("mixtral"), dtype=torch.float32).save_pretrained(
        base
    )
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    expected = adapt(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=names)
    ours = exported(base, tmp_path / "adapter", tmp_path / "out", config)
    torch.testing.assert_close(ours(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)
    stored, held = (load_file(f / "model.safetensors") for f in (base, tmp_path / "out"))
    assert stored.keys() == held.keys()
    assert any("experts.1.w2" in key for key in stored), "no longer stored in parts"


def test_weights_keep_their_type(config, make_llama, tmp_path):
    """In BF16, each weight is off by roundings of itself and of what is added."""
    base = saved(lambda: make_llama(vocab_size=64).bfloat16(), tmp_path / "base")
    lora = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"], "r": 4}
    adapt(base, tmp_path / "adapter", torch.bfloat16, **lora)
    exact = merged(base, config, tmp_path / "adapter", torch.float32).state_dict()
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    ours = exported(base, tmp_path / "adapter", tmp_path / "out", config).state_dict()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        size = before[name].float().abs() + exact[name].abs()
        assert ((tensor.float() - exact[name]).abs() <= 2**-7 * size + 1e-9).all(), name


@pytest.mark.parametrize("full", [False, True])
def test_settings_of_generation_are_saved_with_the_ends_of_the_run(full, config, tmp_path):
    """A file of Transformers' own, greedy with a temperature, which its strict check refuses."""
    base, adapter = saved(qwen2, tmp_path / "base"), tmp_path / "adapter"
    adapt(base, adapter, target_modules=["q_proj"])
    settings = {"do_sample": False, "temperature": 0.5, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(settings))
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    model = merged(base, config, None if full else adapter, "auto")
    model.save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["temperature"], written["eos_token_id"]) == (0.5, 2 if full else [2, 3])


# ------------------------------------------------------------------------------ nothing is dropped


def edit(adapter, change):
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize("part", ["lora_A", "lm_head"])
def test_what_an_adapter_lacks_is_not_drawn_by_chance(part, config, tmp_path):
    base, adapter = saved(qwen2, tmp_path / "base"), tmp_path / "adapter"
    adapt(base, adapter, target_modules=["q_proj"], modules_to_save=["lm_head"])
    edit(adapter, lambda held: held.pop(next(key for key in held if part in key)))
    with pytest.raises((UserWarning, KeyError), match=part):
        load_stock(base, config, adapter=adapter)


def test_what_cannot_be_merged_is_an_error(config, make_llama, tmp_path):
    base = saved(lambda: make_llama(vocab_size=64), tmp_path / "base")
    broken, biased = tmp_path / "broken", tmp_path / "biased"
    adapt(base, broken, target_modules=["q_proj"])
    edit(broken, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    adapt(base, biased, target_modules=["q_proj"], lora_bias=True)  # Llama's have no bias
    for adapter, why in ((broken, "NaN"), (biased, "bias")):
        with pytest.raises(ConfigError, match=rf"cannot be merged(.|\n)*{why}(.|\n)*--to adapter"):
            merged(base, config, adapter, "auto")
