"""Experts in one parameter: stored as FP8 codes, and adapters on them split from the base."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from finetune import get_receipt
from finetune.errors import StorageNotComputeError
from finetune.precision import constants, convert
from finetune.precision.cases.experts import (
    BatchedExpertsMixin,
    ExpertsMixin,
    FrozenExperts,
    PlainExpertsMixin,
    Routing,
    SplitMixin,
    quantize_stack,
    split_adapters,
    store_experts,
    stored_names,
)
from finetune.precision.engines.observers import Owner
from finetune.precision.model.layers import are_batched_experts, are_served_experts, experts_in
from finetune.precision.model.swap import swap
from finetune.precision.numbers.formats import E4M3, decode_bits
from finetune.precision.numbers.weights import (
    Arithmetic,
    FrozenLinear,
    cast_operand,
    dequantize_weight,
)
from finetune.precision.planner import plan
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import before_sharding
from finetune.storage.loading import build_stored, load_stored
from tests.families import config_of

ON_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FROZEN = PrecisionConfig(
    compute="fp8", backend="emulated", scaling="rowwise", frozen="fp8", emulation="allow"
)


def stored_stacks(model: Any) -> int:
    """Stacks of experts stored as FP8 codes."""
    return sum(len(stored_names(m)) for m in model.modules() if isinstance(m, ExpertsMixin))


def adapted(family: str, *, targets=ON_EXPERTS, dtype=torch.float32):
    torch.manual_seed(0)
    config = config_of(family)
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=targets)
    model = get_peft_model(model, lora).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros at first, which would hide every error
            torch.nn.init.normal_(p, std=0.02)
    return model


def tokens(seed: int = 0):
    ids = torch.randint(3, 1500, (2, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(model):
    for p in model.parameters():
        p.grad = None
    loss = model(**tokens()).loss
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {n: p.grad for n, p in named if p.grad is not None}


def furthest(ours, theirs) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


# ---------------------------------------------------------------------------------- split adapters


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # gpt-oss: [E, K, N], biases, own gate
def test_split_adapters_are_what_peft_computes(family) -> None:
    model = adapted(family)
    loss, theirs = step(model)
    assert sum("experts" in name for name in theirs) == 4
    split_adapters(model.modules())
    again, ours = step(model)
    assert again == pytest.approx(loss, rel=1e-6)
    assert furthest(ours, theirs) < 3e-6
    copied, _ = step(copy.deepcopy(model))
    assert copied == again
    with model.disable_adapter():
        assert model(**tokens()).loss.item() != pytest.approx(loss, rel=1e-4)
    model.merge_adapter()
    merged = model(**tokens()).loss.item()
    assert merged == pytest.approx(loss, rel=1e-5)


def test_files_of_split_adapters_are_peft_s_own(tmp_path) -> None:
    from safetensors.torch import load_file

    model = adapted("qwen3_moe")
    model.save_pretrained(tmp_path / "peft")
    split_adapters(model.modules())
    model.save_pretrained(tmp_path / "split")
    theirs, ours = (
        load_file(tmp_path / x / "adapter_model.safetensors") for x in ("peft", "split")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_nothing_of_the_size_of_a_stack_is_saved() -> None:
    model = adapted("qwen3_moe")
    stack = model.get_submodule("base_model.model.model.layers.0.mlp.experts").get_param().numel()

    def saved() -> int:
        made: dict[int, int] = {}
        own = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(x):
            if x.untyped_storage()._cdata not in own:
                made[x.untyped_storage()._cdata] = x.untyped_storage().nbytes() // 4
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(**tokens())
        return max(made.values())

    assert saved() >= stack, "PEFT's own: W + BA of all experts"
    split_adapters(model.modules())
    assert saved() < stack


# ------------------------------------------------------------------------------------ stored stacks


def routed(sizes: list[int]) -> Routing:
    ends = torch.tensor(sizes).cumsum(0).int()
    expert = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = torch.arange(sum(sizes))
    return Routing(rows, rows, expert, ends, sizes)


@pytest.mark.parametrize("tile", [(1, 48), (32, 48)], ids=["row", "tensor"])
@pytest.mark.parametrize("sizes", [[5, 0, 16, 3], [0, 0, 0, 8], [0, 0, 0, 0]])
def test_each_expert_is_a_frozen_linear_layer(tile, sizes) -> None:
    torch.manual_seed(1)
    stack = torch.randn(4, 32, 48) * torch.tensor([1.0, 10, 0.01, 3]).view(4, 1, 1)
    bits, inverse = quantize_stack(stack, tile)
    how, route = Arithmetic(tile, per_row=tile[0] == 1), routed(sizes)
    x = torch.randn(sum(sizes), 48, dtype=torch.bfloat16, requires_grad=True)
    xq = cast_operand(x.detach(), Arithmetic(tile)) if sum(sizes) else (x.detach(), x.detach())
    y = FrozenExperts.apply(x, *xq, bits, inverse, route, how, Owner("experts", []))
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    assert y.shape == (sum(sizes), 32)
    for e, (start, end) in enumerate(pairwise([0, *route.ends.tolist()])):
        if start == end:
            continue
        part = x.detach()[start:end].requires_grad_()
        own = xq[0][start:end], xq[1][start:end]
        one = FrozenLinear.apply(part, *own, bits[e], inverse[e], how)
        assert torch.equal(y[start:end], one)
        assert torch.equal(dx[start:end], torch.autograd.grad(one, part, g[start:end])[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stored_experts_compute_what_their_codes_say(family) -> None:
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()
    experts = model.model.layers[0].mlp.experts
    plain = copy.deepcopy(model)
    for name in ("gate_up_proj", "down_proj"):
        before = getattr(experts, name)
        store_experts(experts, name)
        codes, scale = experts.bits_of(name), getattr(experts, f"{name}_scale")
        assert getattr(experts, name).shape == before.shape, "as PEFT reads it"
        assert codes.is_contiguous()
        back = (decode_bits(codes).float() * scale).detach()
        other = plain.model.layers[0].mlp.experts
        setattr(other, name, torch.nn.Parameter(back.mT if experts.is_transposed else back))
    with torch.no_grad():
        ours, theirs = model(**tokens()).logits, plain(**tokens()).logits
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert model.state_dict()["model.layers.0.mlp.experts.down_proj"].dtype is E4M3.dtype
    assert torch.equal(again(**tokens()).logits, ours)
    half = again.to(torch.bfloat16).model.layers[0].mlp.experts
    assert half.down_proj.dtype is torch.uint8
    assert half.down_proj_scale.dtype is torch.float32


def test_a_converted_model_is_near_the_float32_one() -> None:
    plain = adapted("qwen3_moe")
    model = copy.deepcopy(plain)
    # With attention as it is, every token goes to the same experts.
    made = plan(model, FROZEN.model_copy(update={"keep": ("self_attn",)}))
    stored = [row for row in made.stored if row.kind == "parameter"]
    assert [row.reason for row in stored] == ["experts: frozen, stored in FP8 (per-row scale)"] * 2
    conversion = convert.apply(model, made)
    assert stored_stacks(model) == 2
    theirs, ours = step(plain), step(model)
    assert ours[0] == pytest.approx(theirs[0], abs=0.02)
    assert furthest(ours[1], theirs[1]) < 0.1
    model.eval()
    evaluated = model(**tokens()).loss.item()
    conversion.revert()
    assert model(**tokens()).loss.item() == evaluated, "reverting leaves storage and adapters"
    with pytest.raises(StorageNotComputeError, match="merged into weights stored in FP8"):
        model.merge_adapter()


@pytest.mark.parametrize(
    ("precision", "fused", "apart"),
    [
        (PrecisionConfig(compute="bf16"), True, True),
        (PrecisionConfig(compute="bf16"), False, False),
        (FROZEN, False, True),  # nothing is added to codes
    ],
)
def test_adapters_on_experts_are_apart_where_they_are_fused_or_the_base_is_codes(
    precision, fused, apart, monkeypatch
) -> None:
    monkeypatch.setattr(constants, "FUSED_ADAPTERS", fused)
    model = adapted("qwen3_moe")
    convert.apply(model, plan(model, precision))
    wrappers = [m for m in model.modules() if hasattr(m, "parameter_name")]
    assert len(wrappers) == 2
    assert [isinstance(wrapper, SplitMixin) for wrapper in wrappers] == [apart] * 2


def test_adapters_train_over_stored_experts(setup_backend) -> None:
    model = adapted("qwen3_moe")
    accelerator = setup_backend("emulated", scaling="rowwise", frozen="fp8")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(**tokens()).loss)
        optimizer.step()
        optimizer.zero_grad()
    receipt = get_receipt()
    assert receipt.status == "proven"
    rows = [row for row in receipt.layers if "experts" in row.name]
    assert {(r.role, r.fprop, r.dgrad, r.wgrad) for r in rows} == {
        ("base", "fp8", "fp8", "none"),
        ("adapter", "bf16", "bf16", "bf16"),
    }
    assert all(row.flops for row in rows)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_codes_from_the_start(family, tmp_path) -> None:
    """Of a checkpoint, which has a file entry for each expert, and of random weights."""
    plain = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / family)
    names = ["model.layers.0.self_attn.q_proj", *experts_in(plain)]
    loaded = load_stored(tmp_path / family, names)
    built = build_stored(plain.config, names)
    assert len(names) == 5
    for name, owner in experts_in(plain).items():
        module, _, local = name.rpartition(".")
        store_experts(owner, local)
        theirs = loaded.get_submodule(module)
        assert torch.equal(theirs.bits_of(local), owner.bits_of(local))
        assert torch.equal(getattr(theirs, f"{local}_scale"), getattr(owner, f"{local}_scale"))
        assert built.get_submodule(module).bits_of(local).dtype is torch.uint8
    for model in (loaded, built):
        assert stored_stacks(model) == 4
        assert torch.isfinite(model(**tokens()).loss)
        plain_stacks = [p for p in model.parameters() if p.dim() == 3 and p.is_floating_point()]
        assert not plain_stacks


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_dequantized_model_has_plain_experts_and_can_be_saved(family, tmp_path) -> None:
    """Codes in its files would be read back as weights, without their scales."""
    plain = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    model = load_stored(tmp_path / "plain", list(experts_in(plain)))
    stored = model(**tokens()).loss.item()
    model.dequantize()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(**tokens()).loss.item() == pytest.approx(stored, rel=1e-3)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again(**tokens()).loss.item() == pytest.approx(stored, rel=1e-3)


def test_other_numbers_are_not_loaded_into_codes() -> None:
    """They would be cut to bytes: mostly zeros."""
    plain = AutoModelForCausalLM.from_config(config_of("qwen3_moe"), dtype=torch.bfloat16)
    stored = build_stored(plain.config, list(experts_in(plain)))
    weights = plain.state_dict()
    with pytest.raises(RuntimeError, match="holds FP8 codes, and"):
        stored.load_state_dict(weights, strict=False)


def test_sharding_moves_bytes_and_leaves_scales_whole() -> None:
    """FSDP2's state dicts have no place for buffers."""
    plain = AutoModelForCausalLM.from_config(config_of("qwen3_moe"), dtype=torch.bfloat16)
    stored = build_stored(plain.config, ["model.layers.0.self_attn.q_proj", *experts_in(plain)])
    kinds = {v.dtype for n, v in stored.state_dict().items() if "experts" in n}
    assert kinds == {E4M3.dtype, torch.float32}
    before_sharding(stored)
    found = stored.state_dict()
    assert not [name for name in found if name.endswith("_scale")]
    assert {v.dtype for n, v in found.items() if "experts" in n} == {torch.uint8}


def test_one_stack_trains_in_fp8_beside_one_that_is_stored() -> None:
    model = adapted("qwen3_moe", targets=["experts.gate_up_proj"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("down_proj"))
    made = plan(model, FROZEN)
    stored = {x.name.rpartition(".")[2]: x.stored for x in made.layers if x.kind == "parameter"}
    assert stored == {"gate_up_proj": "row", "down_proj": ""}
    convert.apply(model, made)
    _, found = step(model)
    assert sum(name.endswith("down_proj") for name in found) == 1
    assert all(torch.isfinite(g).all() and g.any() for g in found.values())


def test_a_stack_s_codes_are_those_of_its_matrices() -> None:
    stack = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(3))
    for tile in ((1, 48), (32, 48)):
        bits, inverse = quantize_stack(stack, tile)
        for e in range(3):
            back = dequantize_weight(bits[e], inverse[e], tile)
            assert (back - stack[e]).abs().max() < stack[e].abs().max() / 16


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "llama4"])
def test_our_forwards_of_plain_experts_give_the_bits_of_transformers(family) -> None:
    """Those that multiply in FP8, here where nothing is planned so."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16).train()
    plain, swapped = copy.deepcopy(model), 0
    for module in model.modules():
        for is_such, mixin in (
            (are_served_experts, PlainExpertsMixin),
            (are_batched_experts, BatchedExpertsMixin),
        ):
            if is_such(module):
                swap(module, mixin)
                swapped += 1
    assert swapped
    results = []
    for each in (model, plain):
        loss = each(**tokens()).loss
        loss.backward()
        results.append((loss, [p.grad for p in each.parameters() if p.grad is not None]))
    (loss, gradients), (expected, expected_gradients) = results
    assert torch.equal(loss, expected)
    assert len(gradients) == len(expected_gradients)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(one, other)
