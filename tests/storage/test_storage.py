"""Weights held as FP8 codes: what they stand for, and that nothing corrupts them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from finetune.errors import StorageNotComputeError
from finetune.precision.numbers import weights
from finetune.precision.numbers.formats import E4M3, decode_bits
from finetune.precision.numbers.weights import dequantize_weight, quantize_weight, tile_of
from finetune.precision.stored.linear import StoredMixin, iter_stored, put, requantize, store

GRANULARITIES = ("row", "tensor", "block")


def weight(n: int = 200, k: int = 272) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, k, generator=generator) * torch.logspace(-6, 1, n)[:, None]


def test_bits_decode_to_what_torch_says():
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[(bits & 0x7F) != 0x7F]
    assert torch.equal(decode_bits(bits).float(), bits.view(E4M3.dtype).float())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_dequantized_is_code_times_scale_of_its_tile(granularity):
    w = weight()
    r, c = tile_of(granularity, tuple(w.shape))
    bits, inverse = quantize_weight(w, (r, c))
    assert bits.dtype is torch.uint8
    assert inverse.shape == (-(-w.shape[0] // r), -(-w.shape[1] // c))
    back = dequantize_weight(bits, inverse, (r, c))
    for i in range(0, w.shape[0], 37):
        for j in range(0, w.shape[1], 41):
            tile = w[i // r * r : (i // r + 1) * r, j // c * c : (j // c + 1) * c]
            scale = 448 / tile.abs().max()
            code = (w[i, j] * scale).to(E4M3.dtype).float()
            torch.testing.assert_close(back[i, j], code / scale, rtol=1e-6, atol=0)
    error = (back - w).abs()
    assert error.max() <= w.abs().max() / 16  # half a step of the largest binade


def test_rows_keep_small_channels_that_one_scale_flushes():
    w = weight()
    lost = {}
    for granularity in ("row", "tensor"):
        tile = tile_of(granularity, tuple(w.shape))
        back = dequantize_weight(*quantize_weight(w, tile), tile)
        lost[granularity] = float(((back == 0) & (w != 0)).float().mean())
    assert lost["row"] < 0.01 < 0.1 < lost["tensor"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nothing_hides_a_weight_that_is_not_finite(bad, granularity):
    w = weight()
    w[3, 5] = bad
    tile = tile_of(granularity, tuple(w.shape))
    back = dequantize_weight(*quantize_weight(w, tile), tile)
    assert not torch.isfinite(back[3, 5])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_forward_and_input_gradient_are_those_of_the_dequantized_weight(kind, granularity):
    torch.manual_seed(0)
    layer = nn.Linear(48, 32) if kind == "linear" else Conv1D(32, 48)
    plain = copy.deepcopy(layer)
    store(layer, granularity)
    w = layer.weight_in()
    assert w.shape == (32, 48)
    with torch.no_grad():
        plain.weight.copy_(w if kind == "linear" else w.t())
    x = torch.randn(3, 5, 48)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ya, yb = layer(a), plain(b)
    torch.testing.assert_close(ya, yb)
    g = torch.randn_like(ya)
    ya.backward(g)
    yb.backward(g)
    torch.testing.assert_close(a.grad, b.grad)
    assert layer.weight.grad is None


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_some_rows_at_a_time_are_the_whole(granularity, monkeypatch):
    w = weight(300, 272).bfloat16()
    tile = tile_of(granularity, tuple(w.shape))
    parts = quantize_weight(w, tile)
    monkeypatch.setitem(weights.SLAB, "cpu", 1000)
    for other, whole in zip(quantize_weight(w, tile), parts, strict=True):
        assert torch.equal(other, whole)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layers_on_the_meta_device_can_be_held(granularity):
    layer = nn.Linear(272, 200, device="meta")
    store(layer, granularity)
    assert layer.weight.shape == (200, 272)
    assert layer.weight_scale.is_meta


@pytest.mark.parametrize("old", [*GRANULARITIES, (64, 32), (1, 16)])
@pytest.mark.parametrize("new", GRANULARITIES)
def test_requantized_codes_are_the_cast_of_the_dequantized_weight(old, new, monkeypatch):
    layer = nn.Linear(272, 200, bias=False)
    layer.weight.data.copy_(weight())
    tile = tile_of(old, (200, 272)) if isinstance(old, str) else old
    put(layer, *quantize_weight(layer.weight.detach(), tile), tile, torch.float32)
    wanted = tile_of(new, (200, 272))
    bits, inverse = quantize_weight(layer.weight_in(), wanted)
    w = layer.weight_in()
    monkeypatch.setitem(weights.SLAB, "cpu", 1000)
    requantize(layer, new)
    assert layer.stored_tile == wanted
    if tile == wanted or (old, new) == ("tensor", "row"):  # nothing has to be cast
        assert torch.equal(layer.weight_in(), w)
    else:
        assert torch.equal(layer.weight, bits)
        assert torch.equal(layer.weight_scale, inverse)


def test_no_high_precision_copy_is_kept_for_backward():
    layer = nn.Linear(64, 64, bias=False)
    store(layer)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert {t.dtype for t in kept} == {torch.uint8, torch.float32}
    assert max(t.numel() for t in kept if t.dtype is torch.float32) == 64  # the scales


def test_a_stored_weight_cannot_train():
    layer = nn.Linear(64, 32)
    store(layer)
    with pytest.raises(RuntimeError, match="floating point"):
        layer.weight.requires_grad_(True)


def test_state_dicts_show_float8_and_load_back():
    layer, other = nn.Linear(64, 32), nn.Linear(64, 32)
    store(layer)
    store(other)
    state = layer.state_dict()
    assert state["weight"].dtype is E4M3.dtype
    assert state["weight_scale"].dtype is torch.float32
    other.load_state_dict(state)
    x = torch.randn(2, 64)
    assert torch.equal(layer(x), other(x))


def test_plain_weights_are_not_loaded_into_codes():
    layer = nn.Linear(64, 32)
    plain = layer.state_dict()
    store(layer)
    plain["weight_scale"] = layer.weight_scale.clone()
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"holds FP8 codes, and torch\.float32 was given"):
        layer.load_state_dict(plain)
    assert torch.equal(layer.weight, before)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def stored() -> LlamaForCausalLM:
    model = tiny()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            store(module)
    return model


@pytest.mark.parametrize("scale", [1.0, 0.02])  # below one it is nothing in the type of the codes
@pytest.mark.parametrize("safe", [False, True])
def test_peft_attaches_and_its_merge_corrupts_nothing(safe, scale):
    model = get_peft_model(stored(), LoraConfig(r=4, target_modules="all-linear"))
    adapters = {p.dtype for n, p in model.named_parameters() if "lora_" in n}
    assert adapters == {torch.float32}
    assert len(list(iter_stored(model))) == 14
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=scale)
    before = {n: m.weight.clone() for n, m in iter_stored(model)}
    # In place, or by assignment: the safe merge casts the adapter to the type of the codes.
    with pytest.raises(StorageNotComputeError, match="cannot be merged"):
        model.merge_and_unload(safe_merge=safe)
    after = dict(iter_stored(model))
    assert all(torch.equal(after[name].weight, bits) for name, bits in before.items())


def test_dora_starts_from_the_weights_that_codes_stand_for():
    model = get_peft_model(stored(), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, StoredMixin)
    norms = layer.base_layer.weight_in().norm(dim=1)
    magnitude = layer.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(magnitude, norms)
    x = torch.randn(2, 32)
    torch.testing.assert_close(layer(x), layer.base_layer(x))
