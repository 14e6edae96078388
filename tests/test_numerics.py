"""FP8 numbers against independent references."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from finetune.config import PrecisionConfig
from finetune.precision import convert, planner
from finetune.precision.delayed import DelayedState
from finetune.precision.numerics import (
    E4M3,
    E5M2,
    Codes,
    amax,
    cast,
    dequantise,
    scale_from_amax,
    scaled_mm,
    snr_db,
)

ONE = torch.tensor(1.0)
ML = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_of_every_16_bit_number(dtype, source) -> None:
    """Bit-equal to ml_dtypes after saturation: subnormals, ties, infinities; NaN stays NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    codes = cast(x, ONE, dtype)
    limit = dtype.max
    nan = np.isnan(x.float().numpy())
    clipped = np.clip(np.where(nan, 0, x.float().numpy()), -limit, limit)
    expected = clipped.astype(ML[dtype])
    assert np.array_equal(codes.view(torch.uint8).numpy()[~nan], expected.view(np.uint8)[~nan])
    assert bool(codes.float().isnan()[torch.from_numpy(nan)].all())


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=64),
    dtype=st.sampled_from([E4M3, E5M2]),
)
def test_current_scaling_neither_overflows_nor_loses_digits(values, dtype) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    scale = scale_from_amax(amax(x), dtype)
    back = dequantise(cast(x, scale, dtype), scale)
    digits = {E4M3: 2.0**-4, E5M2: 2.0**-3}[dtype]  # half a unit in the last place, relative
    smallest = {E4M3: 2.0**-10, E5M2: 2.0**-17}[dtype]  # half the smallest subnormal
    bound = x.abs() * digits * 1.001 + smallest / scale
    assert bool(((back - x).abs() <= bound).all())
    assert bool(back.isfinite().all())


@given(exponent=st.integers(-60, 60), pow2=st.booleans())
def test_scale_puts_amax_at_the_maximum(exponent, pow2) -> None:
    value = (torch.tensor(1.5) * 2.0**exponent).clamp(min=1e-12)
    scale = scale_from_amax(value, E4M3, pow2=pow2)
    reached = float(value * scale)
    assert 224 < reached <= 448 if pow2 else reached == pytest.approx(448)
    assert not pow2 or float(scale.frexp().mantissa) == 0.5


def test_scaled_mm_is_exact_before_the_last_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(32, 64, generator=generator) for _ in range(2))
    xs, ws = scale_from_amax(amax(x), E4M3), scale_from_amax(amax(w), E4M3)
    xq, wq = (Codes(cast(t, s, E4M3).bfloat16(), 1 / s, E4M3) for t, s in ((x, xs), (w, ws)))
    exact = (xq.values.double() @ wq.values.double().t()) / (xs.double() * ws.double())
    ours = scaled_mm(xq, wq.t(), torch.float32).double()
    assert float((ours - exact).abs().max()) < 1e-5
    assert 25 < snr_db(x @ w.t(), ours) < 40


def test_nan_is_not_hidden() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    assert bool(amax(x).isnan())
    assert bool(cast(x, ONE, E4M3).float().isnan()[1])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_by_hand(algorithm) -> None:
    """Twelve micro-steps with a window of four, one operand watched, margin 1."""
    precision = PrecisionConfig(
        compute="fp8", scaling="delayed", margin=1, amax_history_len=4, amax_compute_algo=algorithm
    )
    state = DelayedState(1, precision)
    amaxes = [2.0, 8.0, 1.0, 1.0, 1.0, 1.0, 0.0, 4.0, float("inf"), 3.0, 0.5, 0.25]
    scales = []
    for value in amaxes:
        state.advance()
        scales.append(float(state.scale[0]))
        state.current[0] = value
    # Scale during step i comes from amaxes before i: 448 / (window · 2), kept at 0 and infinity.
    window = {
        # max of the last four; 1 is the scale before anything was seen
        "max": [None, 2, 8, 8, 8, 8, 1, 1, 4, 4, 4, 4],
        "most_recent": [None, 2, 8, 1, 1, 1, 1, 1, 4, 4, 3, 0.5],
    }[algorithm]
    expected = [1.0 if w is None else 448 / w / 2 for w in window]
    assert scales == pytest.approx(expected)


def run_linear(backend: str, scaling: str, fmt: str | None, *, frozen: bool = False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    model[0].weight.requires_grad_(not frozen)
    precision = PrecisionConfig(
        compute="fp8", backend=backend, scaling=scaling, format=fmt, emulation="allow"
    )
    convert.apply(model, planner.plan(model, precision))
    x = torch.randn(3, 16, 64, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad


@pytest.mark.parametrize(
    ("scaling", "fmt"), [("tensorwise", None), ("tensorwise", "e4m3"), ("rowwise", None)]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_emulation_equals_torchao(scaling, fmt, frozen) -> None:
    """Two independent implementations of the same rule: equal up to float32 accumulation."""
    ours = run_linear("emulated", scaling, fmt, frozen=frozen)
    theirs = run_linear("torchao", scaling, fmt, frozen=frozen)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fmt", ["hybrid", "e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "rowwise"])
def test_error_against_float32_is_that_of_the_format(scaling, fmt) -> None:
    """An FP8 layer is wrong by some percent: not by less (it is FP8), nor by more (it is right)."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    x = torch.randn(48, 64)
    reference = x @ linear.weight.t()
    model = nn.Sequential(linear)
    precision = PrecisionConfig(
        compute="fp8", backend="emulated", scaling=scaling, format=fmt, emulation="allow"
    )
    convert.apply(model, planner.plan(model, precision))
    model(x)
    model(x)  # delayed scaling has seen its amaxes now
    error = float(((model(x) - reference).norm() / reference.norm()).detach())
    low, high = (0.04, 0.12) if fmt == "e5m2" else (0.02, 0.06)
    assert low < error < high


def test_zero_and_tiny_inputs_stay_finite() -> None:
    for scaling in ("delayed", "tensorwise", "rowwise"):
        model = nn.Sequential(nn.Linear(32, 32))
        precision = PrecisionConfig(
            compute="fp8", backend="emulated", scaling=scaling, emulation="allow"
        )
        convert.apply(model, planner.plan(model, precision))
        for value in (0.0, 1e-30):
            x = torch.full((16, 32), value, requires_grad=True)
            y = model(x)
            y.sum().backward()
            assert bool(y.isfinite().all())
            assert bool(x.grad.isfinite().all())
