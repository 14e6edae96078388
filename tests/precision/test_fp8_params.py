"""Weights kept as FP8 codes between steps: the same run bit for bit, one cast an update, never
stale."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torchao.float8 import float8_scaling_utils
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import GemmInputRole

from finetune.config.schema import PrecisionConfig
from finetune.precision import convert, planner
from finetune.precision.backends import torchao
from finetune.precision.backends.cached import (
    CachedBackend,
    Updates,
    WeightCache,
    compiled_once,
)
from finetune.precision.backends.torchao import quantize_weight
from finetune.precision.scaling import BlockwiseRule, MxRule, NvRule, RowwiseRule, TensorwiseRule
from finetune.training import session
from tests.conftest import batch, reads_a_master

RULES = (TensorwiseRule, RowwiseRule, BlockwiseRule, MxRule, NvRule)
ENGINES = ("emulated", "torchao")
TENSORWISE, AXISWISE = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE


def fp8(scaling: str = "tensorwise", backend: str = "emulated", **settings) -> PrecisionConfig:
    return PrecisionConfig.model_validate(
        {"compute": "fp8", "backend": backend, "emulation": "allow", "scaling": scaling} | settings
    )


def convert_to(model: nn.Module, precision: PrecisionConfig) -> convert.Conversion:
    """On FP8 units where the backend has them: CPUs have `torch._scaled_mm`."""
    convert.revert(model)
    return convert.apply(
        model, planner.plan(model, precision), hardware=precision.backend == "torchao"
    )


@pytest.fixture
def casts(monkeypatch):
    """Operands that were really cast, in order."""
    seen: list[str] = []

    def watch(rule: type) -> None:
        original = rule.cast

        def cast(self, operand, x, dim):
            seen.append(operand)
            return original(self, operand, x, dim)

        monkeypatch.setattr(rule, "cast", cast)

    for rule in RULES:
        watch(rule)
    theirs = float8_scaling_utils.hp_tensor_and_scale_to_float8

    def cast_by_torchao(x, scale, dtype, mm, role, axis):
        seen.append("w" if role is GemmInputRole.WEIGHT else role.value)
        return theirs(x, scale, dtype, mm, role, axis)

    def cast_ahead(*args, **kwargs):
        seen.append("w")
        return quantize_weight(*args, **kwargs)

    monkeypatch.setattr(float8_scaling_utils, "hp_tensor_and_scale_to_float8", cast_by_torchao)
    monkeypatch.setattr(torchao, "quantize_weight", cast_ahead)
    return seen


def losses(
    make_llama, scaling: str, backend: str, dtype: torch.dtype, *, held: bool
) -> list[float]:
    """Three optimizer steps of two micro-steps each."""
    session.install(fp8(scaling, backend, fp8_params=held))
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
    receipt = session.current().receipt()
    assert receipt.status == "proven"
    assert receipt.precision["effective"]["fp8_params"] is held
    session.uninstall()
    return found


@pytest.mark.parametrize(
    ("scaling", "dtype", "backend"),
    [
        ("tensorwise", torch.float32, "emulated"),
        ("tensorwise", torch.bfloat16, "torchao"),
        ("rowwise", torch.float32, "torchao"),
        ("nvfp4", torch.float32, "emulated"),
    ],
)
def test_trajectory_is_the_same_bit_for_bit(make_llama, scaling, dtype, backend) -> None:
    plain, held = (losses(make_llama, scaling, backend, dtype, held=h) for h in (False, True))
    assert plain == held
    assert len(set(plain)) == len(plain)


@pytest.mark.parametrize(
    ("backend", "scaling", "ways", "reentrant"),
    [
        ("emulated", "tensorwise", 1, False),
        ("emulated", "mxfp8", 2, True),
        ("torchao", "tensorwise", 1, True),
        ("torchao", "rowwise", 2, False),
    ],
)
def test_a_weight_is_cast_once_an_update(backend, scaling, ways, reentrant, casts) -> None:
    """In four micro-steps and their recomputations: for each dimension that is contracted."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

    def micro_step() -> None:
        x = torch.randn(16, 32, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).tanh().sum().backward()

    convert_to(model, fp8(scaling, backend, fp8_params=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        casts.clear()
        for _ in range(4):
            micro_step()
        assert casts.count("w") == 3 * ways
        assert casts.count("x") + casts.count("input") >= 3 * 8
        optimizer.step()
    convert_to(model, fp8(scaling, backend))
    casts.clear()
    micro_step()
    assert casts.count("w") >= 3 * 2, "once in each forward, or more"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # dynamo warns about parts of torch that it traces
@pytest.mark.parametrize(
    ("backend", "scaling", "ways"),
    [("emulated", "tensorwise", 1), ("torchao", "rowwise", 2)],
)
def test_compiled_layers_read_codes_alone(
    make_llama, monkeypatch, captured, backend, scaling, ways
) -> None:
    """One graph, which never reads a weight in high precision; one cast an update before it."""
    cast_ahead: list[int] = []
    get = WeightCache.get

    def counted(self, w, way, cast):
        return get(self, w, way, lambda w: (cast_ahead.append(1), cast(w))[1])

    monkeypatch.setattr(WeightCache, "get", counted)

    def run(held: bool) -> list[float]:
        torch._dynamo.reset()
        counters.clear()
        captured.clear()
        model = make_llama().train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        convert_to(model, fp8(scaling, backend, fp8_params=held)).compile_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for seed in range(8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch(rows=3, seed=seed), use_cache=False).loss
            loss.backward()
            found.append(loss.item())
            if seed % 4 == 3:
                optimizer.step()
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        return found

    plain = run(held=False)
    assert not cast_ahead
    assert any(map(reads_a_master, captured))
    assert run(held=True) == plain
    assert len(cast_ahead) == 2 * 14 * ways
    assert not any(map(reads_a_master, captured))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_compiled_cast_has_the_same_bits() -> None:
    """As they run on GPUs, by Inductor's kernels for a CPU here; each compilation takes seconds."""
    torch.manual_seed(0)
    cases = (((32, 64), TENSORWISE, False), ((32, 64), AXISWISE, True), ((48, 32), AXISWISE, False))
    for shape, granularity, dgrad in cases:  # the last one of any shape, as a second shape is
        w = torch.randn(shape, dtype=torch.bfloat16)
        given = w, torch.float8_e4m3fn, granularity, granularity is AXISWISE
        plain = quantize_weight(*given, for_dgrad=dgrad)
        fused = compiled_once(quantize_weight)(*given, for_dgrad=dgrad)
        for a, b in zip(plain, fused, strict=True):
            assert torch.equal(a.float(), b.float())
            assert a.stride() == b.stride()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("high", [(), ("fprop",), ("dgrad",), ("wgrad",)])
def test_torchao_multiplies_to_the_same_bits(scaling, high) -> None:
    """Outputs and gradients of layers, float32 masters of BF16 inputs too."""
    torch.manual_seed(0)
    if high == ("wgrad",) and scaling == "rowwise_with_gw_hp":
        pytest.skip("high by the scaling itself")
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48, bias=False))
    x = torch.randn(16, 64, requires_grad=True)
    found = []
    for held in (False, True):
        convert_to(model, fp8(scaling, "torchao", fp8_params=held, high_gemms=high))
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                y = model(x)
            found.append((y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])))
    for a, b in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, a, b))


def written(how: str, model: nn.Sequential, weight: nn.Parameter, new: torch.Tensor) -> None:
    """Give a weight another value in one of the ways that are met in practice."""
    match how:
        case "in place":
            with torch.no_grad():
                weight.copy_(new)
        case "another storage, twice":  # the second may land where the first was
            weight.data = new * 2
            weight.data = new.clone()
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
        case "bitsandbytes":
            bnb = pytest.importorskip("bitsandbytes")
            weight.grad = torch.ones_like(weight)
            bnb.optim.AdamW8bit([weight], lr=0.1, min_8bit_size=1).step()
        case _:
            raise AssertionError(how)


WAYS = [
    "in place", "another storage, twice", "state dict", "state dict, assigned",
    "another parameter", "optimizer", "optimizer through .data", "bitsandbytes",
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("emulated", torch.float32), ("emulated", torch.bfloat16), ("torchao", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("how", WAYS)
def test_codes_are_never_stale(backend, how, dtype) -> None:
    """Whoever writes the weight and however: the next call multiplies by the new one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False).to(dtype))
    convert_to(model, fp8(backend=backend, fp8_params=True))
    x = torch.randn(16, 64).to(dtype)
    before = model(x)
    weight = model[0].weight
    written(how, model, weight, torch.randn(32, 64).to(dtype))
    after = model(x)
    convert_to(model, fp8(backend=backend))
    assert torch.equal(after, model(x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_leaves_nothing_stale(backend, seed) -> None:
    """Writes, steps, evaluations and calls of parts at random, against casts at each use."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    scaling = chance.choice(["tensorwise", "rowwise"])
    models: list[Any] = []
    for held in (False, True):
        torch.manual_seed(seed)
        models.append(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))))
        convert_to(models[-1], fp8(scaling, backend, fp8_params=held, eval="fp8"))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(30):
        event = chance.choice(["forward", "backward", "part", "write", "step", "eval"])
        x, new, layer = torch.randn(16, 32), torch.randn(32, 32), chance.randrange(3)
        how = chance.choice(WAYS[:5])
        results = []
        for model, optimizer in zip(models, optimizers, strict=True):
            y = torch.zeros(())
            if event == "forward":
                y = model(x)
            elif event == "backward":
                optimizer.zero_grad()
                recomputed = checkpoint(model, x, use_reentrant=False)
                recomputed.tanh().mean().backward()
                y = torch.cat([p.grad for p in model.parameters()])
            elif event == "part":
                y = model[layer](x)
            elif event == "write":
                written(how, nn.Sequential(model[layer]), model[layer].weight, new.clone())
            elif event == "step":
                optimizer.step()
            else:
                # torchao's own function has no inference mode by row.
                with torch.inference_mode(scaling == "tensorwise"), torch.no_grad():
                    y = model.eval()(x)
                model.train()
            results.append(y)
        assert torch.equal(*results), event


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_stays_visible(backend, odd) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    with torch.no_grad():
        model[0].weight[3, 5] = odd
    convert_to(model, fp8(backend=backend, fp8_params=True))
    assert not model(torch.randn(16, 64)).isfinite().all()


@pytest.mark.parametrize("backend", ENGINES)
def test_what_is_held_are_fp8_bits(backend) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    conversion = convert_to(model, fp8("rowwise", backend, fp8_params=True))
    y = model(torch.randn(16, 64, requires_grad=True))
    engine = conversion.backend
    assert isinstance(engine, CachedBackend)
    assert engine.cache is not None
    (entry,) = engine.cache._entries.values()
    tensors = [t for codes in entry.codes.values() for t in _tensors(codes)]
    assert sum(t.nbytes for t in tensors if t.numel() == 64 * 64) == 2 * 64 * 64
    node = y.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    saved = {t.data_ptr() for t in node.saved_tensors if t is not None}
    assert saved & {t.data_ptr() for t in tensors}, "backward keeps no copy"
    assert model[0].weight.dtype is torch.float32, "the optimizer's master"
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value for t in _tensors(each)] if isinstance(value, tuple) else []


@pytest.mark.slow
def test_the_count_of_updates_ends_with_its_owner() -> None:
    import gc

    from torch.optim import optimizer

    gc.collect()  # models of earlier tests that refer to themselves
    before = len(optimizer._global_optimizer_post_hooks)
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to(model, fp8(fp8_params=True))
    assert len(optimizer._global_optimizer_post_hooks) > before
    convert.revert(model)
    gc.collect()
    assert len(optimizer._global_optimizer_post_hooks) == before
    assert Updates().count == 0
