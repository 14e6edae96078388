"""Small number formats: rounding, casts and scales, as pure functions.

A number of a format has a sign, `mantissa` fraction bits and an exponent of at least
`min_exponent`; below that it is subnormal, with the spacing of the smallest normal numbers:

    E4M3  3 bits, 2^-6,  up to 448          E2M1  1 bit, 2^0, up to 6
    E5M2  2 bits, 2^-14, up to 57344        E8M0  0 bits: powers of two from 2^-127 to 2^127

The spacing around y is u(y) = 2^(max(floor(log2|y|), min_exponent) - mantissa). Adding and
subtracting 1.5 · 2^23 · u(y) in float32 rounds to nearest even: exact, on any device, and several
times faster on CPUs than a cast to `torch.float8_e4m3fn` and back. Rounding saturates; NaN stays.

Rounded numbers are *codes*: x ≈ codes · inverse, where inverse = 1 / scale. All of them are exact
in BF16, which is how the emulation has them; `cast` gives them in the format's own type.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022); Open Compute Project, OFP8 1.0
and Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A small floating-point format, named as in the OCP specifications in lower case.

    Attributes:
        mantissa: number of fraction bits.
        min_exponent: exponent of the smallest normal number.
        max: largest number.
        dtype: torch type of codes; uint8 for E2M1, which torch cannot compute with.
    """

    name: str
    mantissa: int
    min_exponent: int
    max: float
    dtype: torch.dtype


E4M3 = Format("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Format("e2m1", 1, 0, 6.0, torch.uint8)
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1)}
FP8_DTYPES = (E4M3.dtype, E5M2.dtype)
SMALLEST_INVERSE = 2.0**-126
"""Smallest inverse scale: the smallest normal float32, since GPUs may flush smaller ones to zero.

So an all-zero tensor has a finite scale, and an E4M3 tensor keeps its digits down to an amax of
5e-36. Transformer Engine has no floor either; torchao raises every amax to 1e-12 (`EPS` in
`float8_utils.py`), under which a tensor of amax 1e-20 becomes zero.
"""

_EXPONENT_BITS = 0x7F800000
E8M0_EXPONENTS = (-127, 127)


# -------------------------------------------------------------------------------- rounding, casts


def round_to(
    x: Tensor, fmt: Format, noise: Tensor | None = None, *, saturate: bool = True
) -> Tensor:
    """Round float32 values to the grid of a format, saturating.

    Args:
        x: float32, any shape; overwritten.
        fmt: target format.
        noise: numbers in [0, 1) of the same shape, for stochastic rounding: up with a probability
            equal to the distance from the number below, so that the mean is exact; overwritten.
            Default: nearest, ties to even.
        saturate: False saves a pass if no value exceeds the format's largest number.

    Returns:
        `x`, now on the grid. Zero has no sign.
    """
    if saturate:
        x.clamp_(-fmt.max, fmt.max)
    # Bits of the exponent alone are the float 2^floor(log2|x|), and 0 for a subnormal of float32.
    exponent = x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    # Subnormals of the format have the spacing of its smallest normal numbers.
    exponent.clamp_(min=2.0**fmt.min_exponent)
    if noise is None:
        # 1.5, not 1: the sum with a negative x, too, stays where float32 has the spacing u.
        magic = 1.5 * 2.0 ** (23 - fmt.mantissa)
        return x.add_(exponent, alpha=magic).sub_(exponent, alpha=magic)
    unit = exponent.mul_(2.0**-fmt.mantissa)
    # Above this, 3 + noise would round to 4 in float32, and a number on the grid would move.
    noise.clamp_(max=1 - 2.0 ** (fmt.mantissa - 23))
    return x.div_(unit).add_(noise).floor_().mul_(unit)


def cast(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Codes of `x` in the format's own type: `x · scale`, saturated, rounded to nearest even.

    The product is float32, as is the scale, broadcastable to `x`. E2M1 codes are the low four bits
    of a uint8; E2M1 has no NaN, which becomes the largest number (as in NVIDIA's conversion).
    """
    y = x.float() * scale
    if fmt is not E2M1:
        return y.clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    sign = y.signbit()  # before rounding, which drops the sign of zero
    magnitude = round_to(y.nan_to_num(nan=fmt.max).abs_(), fmt)
    # Grid 0 .5 1 1.5 2 3 4 6 -> 0 ... 7
    index = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, 0))
    index = torch.where(magnitude >= 4, magnitude / 2 + 4, index)
    return index.to(torch.uint8) | (sign.to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Codes of an FP8 type as float32 numbers, exactly."""
    if codes.dtype is not E4M3.dtype or codes.device.type != "cpu":
        return codes.float()
    wide = decode_bits(codes.view(torch.uint8)).float()
    return torch.where(wide.abs() == 480.0, torch.nan, wide)  # the bits of NaN


def decode_bits(bits: Tensor) -> Tensor:
    """E4M3 codes as BF16 numbers, of their bits (uint8), exactly.

    The bits are moved into those of a BF16 number, whose range holds them 2^120 smaller: on CPUs
    ten times faster than torch's conversion. NaN (0x7F, 0xFF) gives 480; stored weights exclude it.
    """
    if bits.device.type != "cpu":
        return bits.view(E4M3.dtype).to(torch.bfloat16)
    # s eeee mmm: exponent and fraction go where BF16 has them, s s s s s eeee mmm 0000 in 16 bits.
    wide = bits.view(torch.int8).to(torch.int16)  # the sign is extended to where BF16 has it
    # ~0x7800 clears the copies of the sign. The bias is 127 in BF16 and 7 in E4M3: a factor 2^120.
    return (wide << 4).bitwise_and_(~0x7800).view(torch.bfloat16).mul_(2.0**120)


# ------------------------------------------------------------------------------------------ scales


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Largest magnitude in float32: a scalar, or along `dim` kept as size 1. NaN propagates."""
    if dim is None:
        low, high = torch.aminmax(x.detach())  # whose derivative nobody needs
        return torch.maximum(high, -low).float()
    if x.dtype.itemsize == 2:  # without its sign a float orders as the integer of its bits
        bits = x.view(torch.int16).bitwise_and(0x7FFF).amax(dim, keepdim=True)
        return bits.view(x.dtype).float()
    return x.abs().amax(dim, keepdim=True).float()


def scale_from_amax(
    amax: Tensor, fmt: Format, *, pow2: bool = False, inverse: float = SMALLEST_INVERSE
) -> Tensor:
    """`max / amax` in float32, of the same shape as `amax`; with `pow2` rounded down to 2^n.

    An amax below `max · inverse` is raised to it, so that scales are finite; an infinite one gives
    0, so that infinity becomes NaN and stays visible.
    """
    # Not `max / amax`: torch computes a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, fmt.max).div_(amax.clamp(min=fmt.max * inverse))
    return floor_pow2(scale) if pow2 else scale


def floor_pow2(x: Tensor) -> Tensor:
    """The largest power of two not above a positive normal float32 `x`: its exponent bits.

    NaN becomes infinity, under which no product stays finite.
    """
    return x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)


def snr_db(x: Tensor, approximation: Tensor) -> float:
    """Signal-to-noise ratio of a quantization in dB: 10 log10(Σx² / Σ(x - x̂)²)."""
    signal = x.double().square().sum()
    noise = (x.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


def on_grid(values: Tensor, fmt: Format) -> bool:
    """True if every number of a tensor (NaN aside) is one of the format's."""
    # Cloned below, since `round_to` overwrites it, and `float()` copies no float32 tensor.
    wide = values.float()
    return bool(((round_to(wide.clone(), fmt) == wide) | wide.isnan()).all())
