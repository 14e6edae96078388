"""Checkpoints that others publish in FP8 are read code for code; others are refused by name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.errors import ModelNotFoundError, StorageNotComputeError
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.weights import tile_of
from finetune.precision.stored.frozen import FrozenMixin
from finetune.precision.stored.linear import iter_stored, requantize, store
from finetune.storage.checkpoint_formats import layout_of, tile_of_scale
from finetune.storage.loading import load_in_fp8, load_stored
from tests.published import FINE_GRAINED, compressed, publish

TOKENS = torch.arange(3, 15)[None]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 144,  # neither K nor N are multiples of 128
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 36,
}


def plain(kind: str = "llama", **more):
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **more}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **more}, tie_word_embeddings=True))
    with torch.no_grad():  # rows of very different size, so that scales matter
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(torch.logspace(-1, 1, len(module.weight))[:, None])
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e5m2])
def test_codes_of_another_type_are_refused(kind, tmp_path):
    publish(plain(), tmp_path, FINE_GRAINED, "block", scale="weight_scale_inv")
    name = "model.layers.0.mlp.up_proj.weight"
    for file in tmp_path.glob("*.safetensors"):
        if name in (tensors := load_file(file)):
            tensors[name] = tensors[name].float().to(kind)
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StorageNotComputeError, match=r"up_proj\.weight in"):
        load_in_fp8(tmp_path)


LAYOUTS = {
    "blocks": (FINE_GRAINED, "block", {"scale": "weight_scale_inv"}),
    "blocks bf16": (
        FINE_GRAINED,
        "block",
        {"scale": "weight_scale_inv", "scale_dtype": torch.bfloat16},
    ),
    "one": (
        {**FINE_GRAINED, "weight_block_size": None, "activation_scheme": "static"},
        "tensor",
        {
            "scale": "weight_scale_inv",
            "shape": lambda s: s.reshape(()),
            "extra": {"activation_scale": torch.tensor(0.5)},
        },
    ),
    "channel": (compressed("channel"), "row", {}),
    "tensor": (compressed("tensor"), "tensor", {"shape": lambda s: s.reshape(1)}),
    "block": (compressed("block", block_structure=[128, 128]), "block", {}),
    "static": (
        compressed("channel"),
        "row",
        {"extra": {"input_scale": torch.tensor([0.5])}},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_codes_are_the_published_ones_bit_for_bit(layout, kind, tmp_path):
    config, granularity, how = LAYOUTS[layout]
    model = plain(kind)
    written = publish(model, tmp_path, config, granularity, **how)
    stored = load_in_fp8(tmp_path)
    held = dict(iter_stored(stored))
    assert held.keys() == written.keys()
    for name, (bits, inverse) in written.items():
        assert torch.equal(held[name].weight, bits)
        assert torch.equal(held[name].weight_scale, inverse)
        assert held[name].weight_scale.dtype is torch.float32
        n, k = bits.shape
        assert held[name].stored_tile == tile_of(granularity, (n, k))
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in written:
            assert torch.equal(stored.get_parameter(name), parameter)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("layout", ["channel", "tensor", "block"])
def test_weights_are_those_that_compressed_tensors_reads(layout, tmp_path):
    config, granularity, how = LAYOUTS[layout]
    publish(plain(), tmp_path, config, granularity, **how)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=_dequantized("compressed-tensors"), dtype=torch.float32
    )
    ours = load_in_fp8(tmp_path, dtype=torch.float32)
    for name, module in iter_stored(ours):
        weight = theirs.get_submodule(name).weight
        torch.testing.assert_close(weight.float(), module.weight_in(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["blocks", "one"])
def test_weights_are_those_that_transformers_reads(layout, tmp_path):
    config, granularity, how = LAYOUTS[layout]
    # Its dequantization takes whole blocks only.
    model = plain(hidden_size=128, intermediate_size=256, head_dim=64)
    publish(model, tmp_path, config, granularity, **how)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=_dequantized("fp8"), dtype=torch.float32
    )
    ours = load_in_fp8(tmp_path, dtype=torch.float32)
    for name, module in iter_stored(ours):
        weight = theirs.get_submodule(name).weight
        torch.testing.assert_close(weight.float(), module.weight_in(), rtol=1e-6, atol=0)


def _dequantized(method):
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    return (CompressedTensorsConfig if method == "compressed-tensors" else FineGrainedFP8Config)(
        dequantize=True
    )


@pytest.mark.parametrize("layout", ["blocks bf16", "channel"])
def test_saved_in_our_own_layout_and_read_back(layout, tmp_path):
    config, granularity, how = LAYOUTS[layout]
    publish(plain(), tmp_path / "theirs", config, granularity, **how)
    stored = load_in_fp8(tmp_path / "theirs")
    stored.save_pretrained(tmp_path / "ours")
    names = set().union(*(load_file(f) for f in (tmp_path / "ours").glob("*.safetensors")))
    assert not [name for name in names if name.endswith("_inv")]
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "fp8_storage"
    assert saved["published"] is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    before, after = stored.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype is after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8))


def test_blocks_that_are_a_base_for_rows(tmp_path):
    config, granularity, how = LAYOUTS["blocks"]
    publish(plain(), tmp_path, config, granularity, **how)
    blocks, rows = load_in_fp8(tmp_path), load_in_fp8(tmp_path, "row")
    for name, module in iter_stored(rows):
        n, k = module.weight.shape
        assert module.stored_tile == (1, k)
        assert module.weight_scale.shape == (n, 1)
        source = dict(iter_stored(blocks))[name]
        same = nn.Linear(k, n, bias=False)
        with torch.no_grad():
            same.weight.copy_(source.weight_in(torch.float32))
        store(same, "row")
        assert torch.equal(same.weight, module.weight)
        assert torch.equal(same.weight_scale, module.weight_scale)
    assert list(rows.config.quantization_config.modules) == ["row"]


@pytest.mark.parametrize("layout", ["blocks", "channel", "tensor"])
def test_a_published_base_trains_adapters_in_fp8(layout, tmp_path, setup_backend):
    """From the published codes to FP8 GEMMs of a frozen base, with no weight in BF16 between."""
    config, granularity, how = LAYOUTS[layout]
    written = publish(plain(head_dim=32), tmp_path, config, granularity, **how)
    model = get_peft_model(load_in_fp8(tmp_path), LoraConfig(r=4, target_modules="all-linear"))
    accelerator = setup_backend("emulated", scaling="rowwise", frozen="fp8")
    model = accelerator.prepare(model.train())
    frozen = {
        name.removeprefix("base_model.model.").removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, FrozenMixin)
    }
    assert frozen.keys() == written.keys()
    for name, module in frozen.items():
        assert module.weight_scale.shape in ((len(module.weight), 1), (1, 1))
        assert torch.equal(module.weight, written[name][0]) == (layout != "blocks")
    loss = model(TOKENS, labels=TOKENS).loss
    accelerator.backward(loss)
    gradients = {n: p.grad for n, p in model.named_parameters() if "lora_B" in n}
    assert len(gradients) == 14
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())


def test_requantising_costs_one_more_rounding():
    torch.manual_seed(0)
    layer = nn.Linear(512, 384, bias=False)
    w = layer.weight.detach().clone()
    errors = {}
    for first in ("block", "row"):
        other = nn.Linear(512, 384, bias=False)
        other.load_state_dict({"weight": w})
        store(other, first)
        errors[first] = float((other.weight_in(torch.float32) - w).norm() / w.norm())
        if first == "block":
            requantize(other, "row")
            errors["both"] = float((other.weight_in(torch.float32) - w).norm() / w.norm())
    independent = (errors["block"] ** 2 + errors["row"] ** 2) ** 0.5
    assert errors["row"] < errors["both"] < 1.1 * independent


def test_one_scale_is_one_a_row_without_a_cast():
    layer = nn.Linear(272, 144, bias=False)
    store(layer, "tensor")
    bits, w = layer.weight, layer.weight_in()
    requantize(layer, "row")
    assert layer.weight is bits
    assert layer.weight_scale.shape == (144, 1)
    assert torch.equal(layer.weight_in(), w)


def test_layers_that_are_named_are_stored_and_no_others(tmp_path):
    config, granularity, how = LAYOUTS["blocks"]
    model = plain()
    publish(model, tmp_path, config, granularity, **how)
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "lm_head"]
    stored = load_stored(tmp_path, names, "row")
    assert {name for name, _ in iter_stored(stored)} == set(names)
    published = load_in_fp8(tmp_path)
    other = "model.layers.1.mlp.up_proj"
    weight = stored.get_submodule(other).weight
    assert weight.dtype is torch.bfloat16
    assert not weight.requires_grad
    assert torch.equal(weight, published.get_submodule(other).weight_in())
    head = nn.Linear(144, 64, bias=False, dtype=torch.bfloat16)
    head.weight.data.copy_(model.lm_head.weight)
    store(head, "row")
    assert torch.equal(stored.lm_head.weight, head.weight)
    assert stored(TOKENS).logits.isfinite().all()


def test_what_is_kept_of_published_codes_is_dequantized(tmp_path):
    config, granularity, how = LAYOUTS["channel"]
    publish(plain(), tmp_path, config, granularity, **how)
    stored = load_in_fp8(tmp_path, keep=["down_proj"])
    assert type(stored.model.layers[0].mlp.down_proj) is nn.Linear
    assert len(list(iter_stored(stored))) == 12


def test_it_says_that_activations_are_ignored(tmp_path, caplog):
    config, granularity, how = LAYOUTS["static"]
    publish(plain(), tmp_path, config, granularity, **how)
    with caplog.at_level(logging.WARNING):
        load_in_fp8(tmp_path)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "activations is compute" in said
    assert "UNEXPECTED" not in said


# ------------------------------------------------------------------------------------- refusals

OTHERS = {
    "bitsandbytes in 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq in 4 bits": {"quant_method": "gptq", "bits": 4},
    "group_0 is int8": compressed("channel", type="int"),
    "group_0 is float4": compressed("tensor_group", num_bits=4, group_size=16),
    "pack-quantized": {**compressed("channel"), "format": "pack-quantized"},
    "zero points": compressed("channel", symmetric=False),
    "reordered columns": compressed("group", group_size=32, actorder="group"),
    "status frozen": {**compressed("channel"), "quantization_status": "frozen"},
    "sparsity_config": {**compressed("channel"), "sparsity_config": {"format": "sparse-bitmask"}},
    "fp8 of format e5m2": {**FINE_GRAINED, "fmt": "e5m2"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_layouts_are_refused(what, tmp_path):
    publish(plain(), tmp_path, OTHERS[what], "row")
    with pytest.raises(StorageNotComputeError, match=what) as caught:
        load_in_fp8(tmp_path)
    assert "from_pretrained alone" in caught.value.fix


def test_codes_of_fp8_are_not_read_as_mxfp4(tmp_path):
    """Which is read (`test_mxfp4`); its codes are not of this type."""
    publish(plain(), tmp_path, {"quant_method": "mxfp4"}, "row")
    with pytest.raises(ModelNotFoundError, match="weights of type F8_E4M3") as caught:
        load_in_fp8(tmp_path)
    assert caught.value.why == "no quantization_config of config.json says how to read them"


def rewrite(folder, change):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_nan_are_refused(code, tmp_path):
    config, granularity, how = LAYOUTS["blocks"]
    publish(plain(), tmp_path, config, granularity, **how)

    def spoil(tensors):
        if f"{UP}.weight" in tensors:
            tensors[f"{UP}.weight"].view(torch.uint8)[-1, -1] = code

    rewrite(tmp_path, spoil)
    with pytest.raises(StorageNotComputeError, match=f"{UP}.* has 1 codes of NaN"):
        load_in_fp8(tmp_path)


def test_scales_that_are_not_finite_are_refused(tmp_path):
    config, granularity, how = LAYOUTS["channel"]
    publish(plain(), tmp_path, config, granularity, **how)

    def spoil(tensors):
        if f"{UP}.weight_scale" in tensors:
            tensors[f"{UP}.weight_scale"][3] = float("inf")

    rewrite(tmp_path, spoil)
    with pytest.raises(StorageNotComputeError, match=f"{UP}.*NaN or infinity"):
        load_in_fp8(tmp_path)


def test_scales_of_another_shape_are_refused(tmp_path):
    config, granularity, how = LAYOUTS["blocks"]
    publish(plain(), tmp_path, {**config, "weight_block_size": [64, 64]}, granularity, **how)
    with pytest.raises(StorageNotComputeError, match="do not fit its weight"):
        load_in_fp8(tmp_path)


def test_codes_without_scales_are_refused(tmp_path):
    config, granularity, how = LAYOUTS["channel"]
    publish(plain(), tmp_path, config, granularity, **how)
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{UP}.weight_scale", None))
    with pytest.raises(StorageNotComputeError, match=f"{UP}.weight without weight_scale"):
        load_in_fp8(tmp_path)


def test_codes_of_an_embedding_are_refused(tmp_path):
    config, granularity, how = LAYOUTS["channel"]
    publish(plain(), tmp_path, config, granularity, **how)

    def spoil(tensors):
        name = "model.embed_tokens.weight"
        if name in tensors:
            tensors[name] = tensors[name].to(E4M3.dtype)
            tensors["model.embed_tokens.weight_scale"] = torch.ones(64, 1)

    rewrite(tmp_path, spoil)
    with pytest.raises(StorageNotComputeError, match="of a Embedding"):
        load_in_fp8(tmp_path)


def test_codes_of_experts_in_one_parameter_are_refused(tmp_path):
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    more = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "num_experts": 4}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, **more))
    publish(model, tmp_path, compressed("channel"), "row")

    def split(tensors):  # as on the hub: one tensor for each expert
        for name in [n for n in tensors if n.endswith("experts.down_proj")]:
            for i, w in enumerate(tensors.pop(name)):
                tensors[f"{name.replace('down', f'{i}.down')}.weight"] = w.to(E4M3.dtype)
                tensors[f"{name.replace('down', f'{i}.down')}.weight_scale"] = torch.ones(len(w), 1)

    rewrite(tmp_path, split)
    with pytest.raises(StorageNotComputeError, match="experts in one parameter"):
        load_in_fp8(tmp_path)


def test_a_configuration_that_files_contradict_is_refused(tmp_path):
    publish(plain(), tmp_path, compressed("channel"), "row")

    def spoil(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            del tensors[name]
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(torch.bfloat16)

    rewrite(tmp_path, spoil)
    with pytest.raises(StorageNotComputeError, match="without E4M3 weights"):
        load_in_fp8(tmp_path)


def test_weights_that_our_own_configuration_calls_codes_are_not_cast(tmp_path):
    model = plain()
    model.save_pretrained(tmp_path / "plain")
    load_in_fp8(tmp_path / "plain").save_pretrained(tmp_path / "ours")
    rewrite(
        tmp_path / "ours",
        lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].to(torch.bfloat16)}),
    )
    with pytest.raises(StorageNotComputeError, match=f"{UP}.weight' is BF16"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize(
    ("scale", "block", "tile"),
    [
        ((2, 3), (128, 128), (128, 128)),
        ((200, 9), (1, 32), (1, 32)),
        ((200, 1), None, (1, 272)),
        ((200,), None, (1, 272)),
        ((1,), None, (200, 272)),
        ((), None, (200, 272)),
        ((1, 1), None, (200, 272)),
    ],
)
def test_a_tile_follows_from_the_shapes(scale, block, tile):
    assert tile_of_scale("x", (200, 272), scale, block) == tile


def test_groups_along_k_are_read(tmp_path):
    config = compressed("group", group_size=32)
    model = plain()
    assert layout_of(config).block == (1, 32)
    written = publish(model, tmp_path, config, "row")

    def regroup(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            n, k = written[name.removesuffix(".weight_scale")][0].shape
            tensors[name] = torch.rand(n, -(-k // 32)) + 0.5

    rewrite(tmp_path, regroup)
    stored = load_in_fp8(tmp_path)
    for name, module in iter_stored(stored):
        w = module.weight.view(E4M3.dtype).float()
        scale = module.weight_scale.repeat_interleave(32, 1)[:, : w.shape[1]]
        torch.testing.assert_close(module.weight_in(torch.float32), w * scale)
        assert module.weight_scale.shape[1] > 1, name
    stored.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.model.layers[0].mlp.up_proj.stored_tile == (1, 32)
