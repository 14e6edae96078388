"""Number formats against `ml_dtypes`, torch and float64: every 16-bit input, and hypothesis.

`ml_dtypes` casts as the formats' specifications read; ours saturates, as GPUs do on request. They
must give the same bits for every finite input below the point where `ml_dtypes` leaves the format
(E4M3 goes to NaN, E5M2 to infinity). Above it ours gives the largest number, and that is checked
too. E2M1 saturates in both. NaN keeps being NaN, which E2M1 does not have.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finetune.precision.numbers.formats import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    amax,
    cast,
    decode,
    floor_pow2,
    on_grid,
    round_to,
    snr_db,
)
from finetune.precision.numbers.gemm import Quantized, scaled_mm
from finetune.precision.numbers.scaling import cast_current
from finetune.precision.numbers.tiles import times_blocks

ONE = torch.tensor(1.0)
ML = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
}
by_format = pytest.mark.parametrize("fmt", ML, ids=lambda f: f.name)
by_source = pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)


def every(source: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit type: subnormals, infinities and NaNs among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)


def theirs(x: Tensor, kind) -> np.ndarray:
    """Bit patterns of `ml_dtypes`, from the values of `x`."""
    with np.errstate(all="ignore"):  # it says so when it leaves the format
        return x.float().numpy().astype(kind).view(np.uint8)


def grid(fmt: Format) -> Tensor:
    """All finite values of a format, ascending, float32; from `ml_dtypes`."""
    size = 16 if fmt is E2M1 else 256
    values = np.arange(size, dtype=np.uint8).view(ML[fmt]).astype(np.float32)
    return torch.from_numpy(np.unique(values[np.isfinite(values)]))


# ------------------------------------------------------------------------------ every 16-bit number


@by_source
@by_format
def test_cast_of_every_16_bit_number(fmt, source) -> None:
    """Bit-equal, sign of zero included; saturated where the format ends."""
    x = every(source)
    ours, wide = cast(x, ONE, fmt).view(torch.uint8), x.float()
    reference = theirs(x, ML[fmt])
    inside = torch.from_numpy(np.isfinite(reference.view(ML[fmt]).astype(np.float32)))
    inside &= ~wide.isnan()
    reference = torch.from_numpy(reference)
    assert torch.equal(ours[inside], reference[inside])
    beyond = ~inside & ~wide.isnan()
    # Halfway to what would be the next number: 464 is a tie that goes to 448, 61440 one that does
    # not go to 57344.
    ends = {E4M3: 464.0, E5M2: 61440.0, E2M1: torch.inf}[fmt]
    assert bool((wide[beyond].abs() >= ends).all())
    assert (int(beyond.sum()) > 200) == (fmt is not E2M1)
    largest = torch.from_numpy(theirs(torch.tensor([fmt.max, -fmt.max]), ML[fmt]))
    expected = torch.where(wide > 0, largest[0], largest[1])
    assert torch.equal(ours[beyond], expected[beyond])
    if fmt is E2M1:  # NVIDIA's conversion gives the largest number; ml_dtypes gives zero
        assert set(ours[wide.isnan()].tolist()) == {7, 15}
    else:
        assert bool(cast(x, ONE, fmt).float()[wide.isnan()].isnan().all())


@by_source
@by_format
def test_round_to_equals_cast_in_value(fmt, source) -> None:
    """The fast rounding is the cast, for all inputs; zero loses its sign and NaN stays NaN."""
    x = every(source).float()
    rounded = round_to(x.clone(), fmt)
    bits = cast(x, ONE, fmt).view(torch.uint8).numpy()
    values = torch.from_numpy(bits.view(ML[fmt]).astype(np.float32))
    nan = x.isnan()
    assert torch.equal(rounded[~nan], values[~nan])
    assert bool(rounded[nan].isnan().all())
    assert not bool(rounded[rounded == 0].signbit().any())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_decode_of_every_code(fmt) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    reference = codes.float()
    ours = decode(codes)
    nan = reference.isnan()
    assert torch.equal(ours[~nan], reference[~nan])
    assert torch.equal(ours[~nan].signbit(), reference[~nan].signbit())
    assert torch.equal(ours.isnan(), nan)
    finite = reference.isfinite()
    again = cast(ours[finite], ONE, fmt).view(torch.uint8)
    assert torch.equal(again, codes.view(torch.uint8)[finite])
    turned = codes.view(16, 16).t()
    assert torch.equal(decode(turned).nan_to_num(7), turned.float().nan_to_num(7))


@by_format
def test_on_grid(fmt) -> None:
    values = grid(fmt)
    assert on_grid(values.bfloat16(), fmt)
    assert on_grid(torch.tensor([fmt.max, torch.nan, -0.0]), fmt)
    between = (values[1:] + values[:-1]) / 2
    assert not any(on_grid(v, fmt) for v in between)
    assert not on_grid(torch.tensor([fmt.max * 2]), fmt)
    assert not on_grid(torch.tensor([0.0, torch.inf]), fmt)


# ------------------------------------------------------------------------------- any float32 number

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
formats = st.sampled_from([E4M3, E5M2, E2M1])


def rounded(values: list[float], fmt: Format, noise: Tensor | None = None) -> Tensor:
    return round_to(torch.tensor(values, dtype=torch.float32), fmt, noise)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=32), fmt=formats)
def test_round_to_gives_the_nearest_number(values, fmt) -> None:
    """Idempotent, odd, monotone, on the grid, nearest, ties to even: against the whole grid."""
    values.sort()
    ours = rounded(values, fmt)
    assert torch.equal(ours, round_to(ours.clone(), fmt))
    assert torch.equal(rounded([-v for v in values], fmt), -ours + 0.0)
    assert bool((ours.diff() >= 0).all())
    x = torch.tensor(values, dtype=torch.float64).clamp(-fmt.max, fmt.max)
    numbers = grid(fmt).double()
    distance = (x[:, None] - numbers).abs()
    assert torch.equal((ours.double() - x).abs(), distance.amin(1))
    ties = (distance == distance.amin(1, keepdim=True)).sum(1) == 2
    pattern = cast(ours, ONE, fmt).view(torch.uint8)
    assert not bool((pattern[ties] & 1).any()), "the even one of two"
    if bool(x.abs().max() <= fmt.max):
        free = round_to(torch.tensor(values).clamp(-fmt.max, fmt.max), fmt, saturate=False)
        assert torch.equal(free, ours)


@settings(max_examples=150, deadline=None)
@given(value=floats, fmt=formats, seed=st.integers(0, 2**31))
def test_stochastic_rounding_gives_one_of_the_two_neighbours(value, fmt, seed) -> None:
    noise = torch.rand(64, generator=torch.Generator().manual_seed(seed))
    noise[0], noise[1] = 0.0, 1 - 2.0**-24  # the ends of what torch.rand gives
    found = set(rounded([value] * 64, fmt, noise).tolist())
    numbers, x = grid(fmt), min(max(value, -fmt.max), fmt.max)
    below, above = float(numbers[numbers <= x].max()), float(numbers[numbers >= x].min())
    assert found <= {below, above}
    assert found == {x + 0.0} or x not in numbers, "a number of the format stays"


@by_format
def test_stochastic_rounding_moves_no_number_of_the_format(fmt) -> None:
    """Whatever the noise: 6 + 1 ulp would be off the grid of E2M1, and 448 that of E4M3."""
    for noise in (0.0, 0.5, 1 - 2.0**-23, 1 - 2.0**-24):
        numbers = grid(fmt)
        assert torch.equal(round_to(numbers.clone(), fmt, torch.full_like(numbers, noise)), numbers)


@by_format
def test_stochastic_rounding_is_unbiased(fmt) -> None:
    """Its mean is the number itself: within five standard errors, each of 200 numbers."""
    generator = torch.Generator().manual_seed(0)
    draws = 4000
    x = (torch.rand(200, 1, generator=generator) * 2 - 1) * 5.5
    noise = torch.rand(200, draws, generator=generator)
    samples = round_to(x.expand(200, draws).clone(), fmt, noise)
    numbers = grid(fmt)
    at = torch.searchsorted(numbers, x).clamp(1, len(numbers) - 1)
    low, high = numbers[at - 1], numbers[at]
    chance = (x - low) / (high - low)
    error = (high - low) * (chance * (1 - chance) / draws).sqrt()
    assert bool(((samples.mean(1, keepdim=True) - x).abs() <= 5 * error + 1e-6).all())
    nearest = round_to(x.clone(), fmt)
    assert bool(((nearest - x).abs() > 5 * error).any()), "rounding to nearest would not pass"


# ------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("pow2", [False, True])
def test_small_tensors_keep_their_digits(fmt, pow2) -> None:
    """As large ones do, down to where the inverse scale would be no normal number; zero is zero."""
    x = torch.linspace(0.1, 1.0, 64)[None]
    for size in (1.0, 1e-12, 1e-20, 1e-30):
        codes, inverse = cast_current(x * size, fmt, 1, pow2=pow2)
        assert torch.allclose(codes * inverse, x * size, rtol=2.0 ** -(fmt.mantissa + 1), atol=0)
    codes, inverse = cast_current(torch.zeros(1, 64), fmt, 1, pow2=pow2)
    assert not codes.any()
    assert float(inverse) == pytest.approx(2.0**-126)


def test_floor_pow2() -> None:
    x = torch.tensor([0.0, 2.0**-126, 1.0, 1.99, 2.0, 3e38, torch.inf])
    assert floor_pow2(x).tolist() == [0.0, 2.0**-126, 1.0, 1.0, 2.0, 2.0**127, torch.inf]
    assert float(floor_pow2(torch.tensor(torch.nan))) == torch.inf, "nothing stays finite under it"


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_amax(kind, dim) -> None:
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(0)).to(kind)
    x[3, 4] = -9.0
    expected = x.float().abs().max() if dim is None else x.float().abs().amax(dim, keepdim=True)
    for view in (x, x.t().contiguous().t()):
        assert torch.equal(amax(view, dim), expected)
    x[5, 6] = torch.inf
    assert float(amax(x, dim).max()) == torch.inf
    x[5, 6] = torch.nan
    assert bool(amax(x, dim).isnan().any()), "NaN is not hidden"


@by_format
def test_nan_and_infinity_are_not_hidden(fmt) -> None:
    x = torch.tensor([1.0, torch.nan, 2.0])
    assert bool(round_to(x.clone(), fmt)[1].isnan())
    assert bool(round_to(x.clone(), fmt, torch.zeros(3))[1].isnan())
    assert bool(round_to(torch.tensor([torch.inf]), fmt, saturate=False).isnan())
    assert float(round_to(torch.tensor([-torch.inf]), fmt)) == -fmt.max


# ---------------------------------------------------------------------------------- the scaled GEMM


def some_codes(rows: int, columns: int, fmt: Format, seed: int, **facts) -> Quantized:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * fmt.max / 4
    inverse = facts.pop("inverse", ONE)
    return Quantized(round_to(x, fmt).bfloat16(), inverse, fmt, **facts)


def bf16_steps(a: Tensor, b: Tensor) -> int:
    """How many BF16 numbers two tensors are apart at most."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E4M3, E5M2), (E2M1, E2M1)], ids=str)
@pytest.mark.parametrize("shape", [(16, 64, 8), (3, 17, 5), (64, 2048, 48)], ids=str)
def test_scaled_mm_against_float64(pair, shape) -> None:
    """Per tensor, per row and per block: float32 is exact up to accumulation, BF16 rounds once."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(5)
    rows, columns = (torch.rand(s, generator=generator) + 0.5 for s in ((m, 1), (1, n)))
    tiles = round_to(torch.rand(m, -(-k // 16), generator=generator) * 400 + 1, E4M3)
    kinds = [
        (some_codes(m, k, pair[0], 0, inverse=ONE * 0.3), ONE * 0.7),
        (some_codes(m, k, pair[0], 0, inverse=rows), columns),
        (some_codes(m, k, pair[0], 0, block=tiles, tile=(1, 16)), ONE * 0.7),
    ]
    for a, inverse in kinds:
        b = some_codes(n, k, pair[1], 1).t()._replace(inverse=inverse)
        exact = a.dequantize().double() @ b.dequantize().double()
        magnitude = a.dequantize().double().abs() @ b.dequantize().double().abs()
        error = (scaled_mm(a, b, torch.float32).double() - exact).abs()
        assert bool((error <= magnitude * 2.0**-21).all())  # dequantize() rounds each operand once
        kept = exact.abs() > magnitude * 2.0**-10  # what cancels has no digits to compare
        assert bool(kept.any())
        assert bf16_steps(scaled_mm(a, b, torch.bfloat16)[kept], exact.bfloat16()[kept]) <= 1


@pytest.mark.parametrize("k", [16, 256, 4096])
def test_a_product_in_bf16_is_one_ulp_away_at_most(k, monkeypatch) -> None:
    """Its sum is rounded before the scale and after it; under powers of two that is once."""
    monkeypatch.setattr("finetune.precision.numbers.gemm.has_bf16_units", lambda: True)
    a, b = some_codes(64, k, E4M3, 0, in_bf16=True), some_codes(48, k, E4M3, 1, in_bf16=True).t()
    exact = a.codes.double() @ b.codes.double()
    for scale in (0.0123, 0.77, 3.3e-5):
        inverse = torch.tensor(scale)
        fast = scaled_mm(a._replace(inverse=inverse), b, torch.bfloat16)
        right = (exact * inverse.double()).bfloat16()
        kept = exact.abs() > 1
        assert bf16_steps(fast[kept], right[kept]) == 1, "so far, and no further"
    # Few digits: every sum is exact in float32, whatever the order, and nothing else may differ.
    whole = [c._replace(codes=c.codes.clamp(-15, 15).round()) for c in (a, b)]
    for x, y in (whole, [c.t() for c in whole[::-1]]):
        x, y = x._replace(inverse=ONE / 64), y._replace(inverse=ONE / 2048)
        fast = scaled_mm(x, y, torch.bfloat16)
        exactly = scaled_mm(x._replace(in_bf16=False), y, torch.bfloat16)
        assert torch.equal(fast, exactly)
        assert torch.equal(exactly, (x.dequantize().double() @ y.dequantize().double()).bfloat16())


def test_times_blocks_pads_what_does_not_divide() -> None:
    values = some_codes(5, 40, E4M3, 0).codes
    block = torch.tensor([[1.0, 3.0, 5.0], [7.0, 0.1, 2.0]])
    expected = torch.empty(5, 40)
    for i in range(5):
        for j in range(40):
            expected[i, j] = float(values[i, j]) * block[i // 4, j // 16]
    assert torch.equal(times_blocks(values.float(), block, (4, 16)), expected)


def test_transposed_codes_dequantise_to_the_transposed_matrix() -> None:
    block = torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.5, 1.0]])
    codes = some_codes(5, 30, E4M3, 3, block=block, tile=(2, 16), inverse=torch.rand(5, 1))
    assert torch.equal(codes.t().dequantize(), codes.dequantize().t())


def test_snr() -> None:
    x = torch.ones(100)
    assert snr_db(x, x * 0.9) == pytest.approx(20)
    assert snr_db(x, x) == torch.inf
