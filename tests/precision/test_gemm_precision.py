"""`high_gemms`: each of the three GEMMs in FP8 or high precision, as asked, and seen to be so."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from finetune import get_receipt, setup_fp8_mixed_precision_training
from finetune.errors import ConfigError
from finetune.precision import convert, planner
from finetune.precision.settings import PrecisionConfig
from tests.conftest import batch, emulated

GEMMS = ("fprop", "dgrad", "wgrad")
SUBSETS = [s for n in range(3) for s in itertools.combinations(GEMMS, n)]
EMULATED = ["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"]


def one_step(make_llama, backend: str, scaling: str, high: tuple[str, ...]):
    """Rows of the receipt of the decoder's layers, after one witnessed step."""
    accelerator = setup_fp8_mixed_precision_training(
        backend, scaling=scaling, high_gemms=high, emulation="allow", cpu=True
    )
    model = make_llama(num_hidden_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(**batch(length=24)).loss)
    optimizer.step()
    return [row for row in get_receipt().layers if row.role == "base"]


@pytest.mark.parametrize("high", [(), ("dgrad",), ("fprop", "wgrad")], ids="+".join)
@pytest.mark.parametrize(
    ("backend", "scaling"),
    [("emulated", "delayed"), ("emulated", "nvfp4"), ("torchao", "rowwise_with_gw_hp")],
)
def test_witness_sees_each_gemm_as_asked(make_llama, backend, scaling, high) -> None:
    kept = {*high, "wgrad"} if scaling == "rowwise_with_gw_hp" else {*high}
    if len(kept) == 3:
        with pytest.raises(ConfigError, match="nothing would run in FP8"):
            one_step(make_llama, backend, scaling, high)
        return
    rows = one_step(make_llama, backend, scaling, high)
    low = "fp4" if scaling == "nvfp4" else "fp8"
    expected = tuple("bf16" if gemm in kept else low for gemm in GEMMS)
    assert len(rows) == 7
    assert {(row.fprop, row.dgrad, row.wgrad) for row in rows} == {expected}


@pytest.mark.parametrize("high", [("fprop",), ("dgrad",)], ids="+".join)
@pytest.mark.parametrize("backend", ["emulated", "torchao"])
def test_frozen_weights_under_adapters_too(make_llama, backend, high) -> None:
    from peft import LoraConfig, get_peft_model

    def with_adapters(**shape):
        return get_peft_model(make_llama(**shape), LoraConfig(r=8, target_modules="all-linear"))

    rows = one_step(with_adapters, backend, "tensorwise", high)
    fprop, dgrad = ("bf16" if gemm in high else "fp8" for gemm in GEMMS[:2])
    # Nothing below the first block's projections trains: no gradient goes further down.
    assert {(row.fprop, row.wgrad) for row in rows} == {(fprop, "none")}
    assert {row.dgrad for row in rows} == {dgrad, "none"}


def results(p: PrecisionConfig | None, *, frozen: bool = False) -> dict[str, Tensor | None]:
    """Output and gradients of one layer under BF16 autocast; not converted without a precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    model[0].weight.requires_grad_(not frozen)
    if p is not None:
        convert.apply(model, planner.plan(model, p))
    x = torch.randn(40, 64, requires_grad=True)
    for _ in range(2):  # the second has delayed scales
        x.grad = model[0].weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).bfloat16())
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": model[0].weight.grad}


@pytest.mark.parametrize("high", [s for s in SUBSETS if s], ids="+".join)
@pytest.mark.parametrize(
    ("backend", "scaling"),
    [("emulated", s) for s in EMULATED] + [("torchao", s) for s in EMULATED[1:4]],
)
def test_what_is_kept_high_is_bf16_bit_for_bit(backend, scaling, high) -> None:
    """And what is not kept differs from it."""
    kept = {*high, "wgrad"} if scaling == "rowwise_with_gw_hp" else {*high}
    if len(kept) == 3:
        return
    p = emulated(backend=backend, scaling=scaling, high_gemms=high)
    ours, bf16 = results(p), results(None)
    for gemm in GEMMS:
        assert torch.equal(ours[gemm], bf16[gemm]) == (gemm in kept), gemm


@pytest.mark.parametrize("scaling", EMULATED)
def test_a_frozen_weight_has_no_wgrad(scaling) -> None:
    p = emulated(scaling=scaling)
    ours, trained = results(p, frozen=True), results(p)
    assert ours["wgrad"] is None
    assert torch.equal(ours["fprop"], trained["fprop"])
    if scaling != "nvfp4":  # stochastic rounding: other numbers were drawn in between
        assert torch.equal(ours["dgrad"], trained["dgrad"])


@pytest.mark.parametrize("scaling", ["tensorwise", "delayed", "nvfp4"])
def test_a_second_derivative_is_refused(scaling) -> None:
    """Rounding has none; a gradient penalty through it would be a wrong number."""
    model = nn.Sequential(nn.Linear(64, 32))
    convert.apply(model, planner.plan(model, emulated(scaling=scaling)))
    x = torch.randn(16, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.square().sum().backward()
