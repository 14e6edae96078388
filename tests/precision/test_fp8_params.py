"""Weights held in FP8 between steps: the same run bit for bit, one cast an update, never stale."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.config.schema import PrecisionConfig
from finetune.precision import convert, planner
from finetune.precision.backends import emulated
from finetune.precision.backends.emulated import CachedWeight, EmulatedBackend
from finetune.precision.formats import row_hashes
from finetune.precision.scaling import BlockwiseRule, MxRule, NvRule, RowwiseRule, TensorwiseRule
from finetune.training import session
from tests.conftest import batch

RULES = (TensorwiseRule, RowwiseRule, BlockwiseRule, MxRule, NvRule)


def fp8(scaling: str = "tensorwise", **settings) -> PrecisionConfig:
    return PrecisionConfig.model_validate(
        {"compute": "fp8", "backend": "emulated", "emulation": "allow", "scaling": scaling}
        | settings
    )


@pytest.fixture
def casts(monkeypatch):
    """Which operands were really cast, in order."""
    seen: list[tuple[str, int]] = []

    def watch(rule: type) -> None:
        original = rule.cast

        def cast(self, operand, x, dim):
            seen.append((operand, dim))
            return original(self, operand, x, dim)

        monkeypatch.setattr(rule, "cast", cast)

    for rule in RULES:
        watch(rule)
    return seen


def losses(make_llama, scaling: str, *, held: bool, dtype: torch.dtype) -> list[float]:
    """Three optimizer steps of two micro-steps each."""
    session.install(fp8(scaling, fp8_params=held))
    accelerator = Accelerator(cpu=True)
    model = make_llama().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for seed in range(6):
        loss = model(**batch(seed=seed)).loss
        accelerator.backward(loss)
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert session.current().receipt().status == "proven"
    session.uninstall()
    return found


@pytest.mark.parametrize(
    ("scaling", "dtype"),
    [
        ("tensorwise", torch.float32),
        ("tensorwise", torch.bfloat16),
        ("rowwise", torch.float32),
        ("nvfp4", torch.float32),
    ],
)
def test_trajectory_is_the_same_bit_for_bit(make_llama, scaling, dtype) -> None:
    plain, held = (losses(make_llama, scaling, held=h, dtype=dtype) for h in (False, True))
    assert plain == held
    assert len(set(plain)) == len(plain)


@pytest.mark.parametrize(("scaling", "ways"), [("tensorwise", 1), ("rowwise", 2), ("mxfp8", 2)])
def test_a_weight_is_cast_once_an_update(make_llama, scaling, ways, casts) -> None:
    """Once for each dimension that is contracted (K, and N in dgrad), however many micro-steps."""
    model = make_llama()
    convert.apply(model, planner.plan(model, fp8(scaling, fp8_params=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        casts.clear()
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
        assert sum(operand == "w" for operand, _ in casts) == 14 * ways
        assert sum(operand == "x" for operand, _ in casts) == 14 * 3 * ways
        optimizer.step()


def written(how: str, model: nn.Sequential, weight: nn.Parameter, new: torch.Tensor) -> None:
    """Give a weight another value in one of the ways that are met in practice."""
    match how:
        case "in place":
            with torch.no_grad():
                weight.copy_(new)
        case "through .data":  # merges of adapters, averages of weights, old optimizers
            weight.data.copy_(new)
        case "another storage, twice":  # the second may land where the first was
            weight.data = new * 2
            weight.data = new.clone()
        case "negated":
            weight.data.neg_()
        case "rows exchanged":
            weight.data.copy_(weight.data.flip(0))
        case "columns exchanged":
            weight.data.copy_(weight.data.flip(1))
        case "columns rotated":  # by whole words: their sum along each row stays
            weight.data.copy_(weight.data.roll(8, 1))
        case "state dict":
            model.load_state_dict({"0.weight": new})
        case "state dict, assigned":
            model.load_state_dict({"0.weight": new}, assign=True)
        case "another parameter":
            model[0].weight = nn.Parameter(new)
        case "optimizer":
            weight.grad = weight.detach() - new
            torch.optim.SGD([weight], lr=1.0).step()
        case "optimizer through .data":

            class Old(torch.optim.Optimizer):
                def step(self, closure=None):
                    for group in self.param_groups:
                        for p in group["params"]:
                            p.data.add_(p.grad.data, alpha=-group["lr"])

            weight.grad = weight.detach() - new
            Old([weight], {"lr": 1.0}).step()
        case "not a torch optimizer":
            weight.data.add_(new - weight.data)
        case "bitsandbytes":
            bnb = pytest.importorskip("bitsandbytes")
            weight.grad = torch.ones_like(weight)
            bnb.optim.AdamW8bit([weight], lr=0.1, min_8bit_size=1).step()
        case _:
            raise AssertionError(how)


WAYS = [
    "in place", "through .data", "another storage, twice", "negated", "rows exchanged",
    "columns exchanged", "columns rotated", "state dict", "state dict, assigned",
    "another parameter", "optimizer", "optimizer through .data", "not a torch optimizer",
    "bitsandbytes",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", WAYS)
def test_codes_are_never_stale(how, dtype) -> None:
    """Whoever writes the weight and however: the next call multiplies by the new one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False).to(dtype))
    convert.apply(model, planner.plan(model, fp8(fp8_params=True)))
    x = torch.randn(16, 64).to(dtype)
    before = model(x)
    weight = model[0].weight
    written(how, model, weight, torch.randn(32, 64).to(dtype))
    after = model(x)
    convert.revert(model)
    convert.apply(model, planner.plan(model, fp8()))
    assert torch.equal(after, model(x))
    assert not torch.equal(after, before)


def test_one_weight_of_a_million_is_noticed() -> None:
    w = torch.randn(1024, 1024)
    bits = row_hashes(w)
    assert torch.equal(row_hashes(w.clone()), bits)
    w.data[517, 3] = torch.nextafter(w[517, 3], torch.tensor(9.0))
    assert not torch.equal(row_hashes(w), bits)
    for odd in (w[:, :3], w[5:7], w.t(), w.bfloat16()[:, 1:4], w.bfloat16()[3]):
        row_hashes(odd if odd.dim() == 2 else odd[None])  # any layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exchange_of_columns_is_noticed_where_no_sum_changes(dtype) -> None:
    """The rows and columns of an identity matrix all have the same sum."""
    w = torch.eye(64).to(dtype)
    exchanged = w.clone()
    exchanged[:, [0, 8]] = exchanged[:, [8, 0]]
    assert torch.equal(exchanged.sum(0), w.sum(0))
    assert torch.equal(exchanged.sum(1), w.sum(1))
    assert not torch.equal(row_hashes(exchanged), row_hashes(w))
    assert not torch.equal(row_hashes(exchanged.t()), row_hashes(w))


def test_what_is_held_are_fp8_bits() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    convert.apply(model, planner.plan(model, fp8("rowwise", fp8_params=True)))
    model(torch.randn(16, 64, requires_grad=True)).sum().backward()
    rule = model[0].fp8_rule
    assert isinstance(rule, CachedWeight)
    kinds = {codes.values.dtype for _, codes in rule._cached.values()}
    assert kinds == {torch.float8_e4m3fn}
    assert model[0].weight.dtype is torch.float32, "the optimizer's master"
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_the_count_of_updates_ends_with_its_owner() -> None:
    import gc

    from torch.optim import optimizer

    gc.collect()  # models of earlier tests that refer to themselves
    before = len(optimizer._global_optimizer_post_hooks)
    model = nn.Sequential(nn.Linear(64, 64))
    convert.apply(model, planner.plan(model, fp8(fp8_params=True)))
    assert len(optimizer._global_optimizer_post_hooks) == before + 1
    assert isinstance(convert.conversion_of(model).backend, EmulatedBackend)
    convert.revert(model)
    gc.collect()
    assert len(optimizer._global_optimizer_post_hooks) == before
    assert emulated.Updates().count == 0
