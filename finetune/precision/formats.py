"""Small number formats: rounding, casts and scales. Pure functions, the reference.

A number of a format has a sign, `mantissa` fraction bits and an exponent of at least
`min_exponent`; below that it is subnormal, with the spacing of the smallest normal numbers:

    E4M3  3 bits, 2^-6,  up to 448          E2M1  1 bit, 2^0, up to 6
    E5M2  2 bits, 2^-14, up to 57344        E8M0  0 bits: powers of two from 2^-127 to 2^127

So the spacing around y is u(y) = 2^(max(floor(log2|y|), min_exponent) - mantissa), and rounding to
nearest even is adding and taking away 1.5 · 2^23 · u(y) in float32, where the addition itself
rounds to a multiple of u. That is exact, works on any device, and is several times faster on CPUs
than a cast to `torch.float8_e4m3fn` and back. Rounding saturates: values beyond the largest number
become it, NaN stays NaN.

All these numbers fit into BF16 exactly. *Codes* are therefore held here as BF16 tensors of numbers
on the format's grid, with scales beside them: x ≈ codes / scale. `cast` gives the real
bit patterns where storage matters. Sources: Micikevicius et al., "FP8 Formats for Deep Learning"
(2022); Open Compute Project, OFP8 1.0 and Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A small floating-point format.

    Attributes:
        name: as in the OCP specifications, in lower case.
        mantissa: fraction bits.
        min_exponent: of the smallest normal number.
        max: largest number.
        dtype: torch's type of its bit patterns; E2M1 has none that computes and is cast to uint8.
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
AMAX_FLOOR = 1e-12
"""Current scaling: an all-zero tensor gets a finite scale (the floor that torchao uses too)."""

_EXPONENT_BITS = 0x7F800000
E8M0_EXPONENTS = (-127, 127)


# -------------------------------------------------------------------------------- rounding, casts


def round_to(
    x: Tensor, fmt: Format, noise: Tensor | None = None, *, saturate: bool = True
) -> Tensor:
    """Round float32 values to the grid of a format, saturating.

    Args:
        x: float32, any shape; overwritten.
        fmt: the format.
        noise: numbers in [0, 1) of the same shape, for stochastic rounding: up with a probability
            equal to the distance from the number below, so that the mean is exact; overwritten.
            Left out: nearest, ties to even.
        saturate: False saves a pass where no value is larger than the format's largest number.

    Returns:
        `x`, now float32 on the grid. Zero has no sign.
    """
    if saturate:
        x.clamp_(-fmt.max, fmt.max)
    exponent = x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    exponent.clamp_(min=2.0**fmt.min_exponent)
    if noise is None:
        magic = 1.5 * 2.0 ** (23 - fmt.mantissa)
        return x.add_(exponent, alpha=magic).sub_(exponent, alpha=magic)
    unit = exponent.mul_(2.0**-fmt.mantissa)
    # Above this, 3 + noise would itself be rounded to 4 in float32, and a number of the grid moved.
    noise.clamp_(max=1 - 2.0 ** (fmt.mantissa - 23))
    return x.div_(unit).add_(noise).floor_().mul_(unit)


def cast(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Bit patterns of `x · scale`: float32 product, saturated, rounded to nearest even.

    Args:
        x: floating point, any shape.
        scale: float32, broadcastable to `x`.
        fmt: format.

    Returns:
        A tensor of `fmt.dtype`. E2M1 patterns are the low four bits of a uint8; E2M1 has no NaN,
        and NaN becomes the largest number (as NVIDIA's conversion does).
    """
    y = x.float() * scale
    if fmt is not E2M1:
        return y.clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    sign = y.signbit()
    magnitude = round_to(y.nan_to_num(nan=fmt.max).abs_(), fmt)
    # Grid 0 .5 1 1.5 2 3 4 6 -> 0 ... 7
    index = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, 0))
    index = torch.where(magnitude >= 4, magnitude / 2 + 4, index)
    return index.to(torch.uint8) | (sign.to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Values of FP8 bit patterns in float32, exactly.

    E4M3's bits are moved into those of a float16, whose exponent range holds them 2^8 smaller:
    on CPUs ten times faster than torch's conversion.

    Args:
        codes: `torch.float8_e4m3fn` or `torch.float8_e5m2`, any shape.
    """
    if codes.dtype is not E4M3.dtype or codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = bits.view(torch.float16).float().mul_(256.0)
    return torch.where(values.abs() == 480.0, torch.nan, values)  # the pattern of NaN


def decode_bits(bits: Tensor) -> Tensor:
    """Values of E4M3 bit patterns in BF16, exactly.

    E4M3's exponent and fraction are moved into those of a BF16 number, whose range holds them 2^120
    smaller: on CPUs ten times faster than torch's conversion.

    Args:
        bits: uint8 (E4M3 has no infinities; the pattern of NaN, 0x7F or 0xFF, gives 480 here, and
            whoever stores weights keeps it out), any shape.
    """
    if bits.device.type != "cpu":
        return bits.view(E4M3.dtype).to(torch.bfloat16)
    wide = bits.view(torch.int8).to(torch.int16)  # the sign is extended to where BF16 has it
    return (wide << 4).bitwise_and_(~0x7800).view(torch.bfloat16).mul_(2.0**120)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`codes / scale` in float32, rounded once to `dtype`; codes are FP8 bit patterns."""
    return decode(codes).div_(scale).to(dtype)


def encode_e8m0(x: Tensor) -> Tensor:
    """E8M0 bit patterns: the nearest power of two, ties up (the even one of 1.0 and 1.1 binary).

    An E8M0 pattern is the exponent field of a float32, so rounding is a carry into that field.

    Args:
        x: floating point, any shape. E8M0 has neither sign nor zero nor infinity: zero, negative
            numbers, infinity and NaN become NaN (255). From 2^-127 down there is only 2^-127, and
            what is above it and below 2^-126 becomes 2^-126.

    Returns:
        uint8: the exponent plus 127.
    """
    bits = x.float().view(torch.int32)
    subnormal = (bits < 2**23).int()
    rounded = (bits + 2**22 - subnormal) >> 23
    return torch.where((bits <= 0) | (bits >= _EXPONENT_BITS), 255, rounded).to(torch.uint8)


def decode_e8m0(bits: Tensor) -> Tensor:
    """Float32 values of E8M0 bit patterns (uint8); 255 is NaN."""
    values = torch.ldexp(torch.ones_like(bits, dtype=torch.float32), bits.int() - 127)
    return torch.where(bits == 255, torch.nan, values)


# ------------------------------------------------------------------------------------------ scales


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Largest magnitude in float32: a scalar, or along `dim` kept as size 1.

    NaN in `x` gives NaN: it must not be hidden by the scale.
    """
    if dim is None:
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low).float()
    if x.dtype.itemsize == 2:  # without its sign a float orders as the integer of its bits
        bits = x.view(torch.int16).bitwise_and(0x7FFF).amax(dim, keepdim=True)
        return bits.view(x.dtype).float()
    return x.abs().amax(dim, keepdim=True).float()


def scale_from_amax(
    amax: Tensor, fmt: Format, *, pow2: bool = False, floor: float = AMAX_FLOOR
) -> Tensor:
    """`max / amax` in float32, of the same shape as `amax`; with `pow2` rounded down to 2^n.

    An amax below `floor` counts as that, so that scales are finite; an infinite one gives 0, which
    makes NaN of the infinity: it is not hidden.
    """
    # Not `max / amax`: torch turns that into a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, fmt.max).div_(amax.clamp(min=floor))
    return floor_pow2(scale) if pow2 else scale


def floor_pow2(x: Tensor) -> Tensor:
    """The largest power of two not above a positive normal float32 `x`: its bits of exponent.

    NaN becomes infinity, under which no product stays finite.
    """
    return x.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)


def snr_db(x: Tensor, approximation: Tensor) -> float:
    """Signal-to-noise ratio of a quantisation in dB: 10 log10(Σx² / Σ(x - x̂)²)."""
    signal = x.double().square().sum()
    noise = (x.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


def on_grid(values: Tensor, fmt: Format) -> bool:
    """Whether every number of a tensor (NaN aside) is one of the format's."""
    wide = values.float()
    return bool(((round_to(wide.clone(), fmt) == wide) | wide.isnan()).all())


# ------------------------------------------------------------------------------------------
# Blocks of a matrix: tiles that share a scale.
#
# A matrix [R, C] in tiles of (r, c) is the tensor [R/r, r, C/c, c]; one number per tile is a matrix
# [R/r, C/c]. Where tiles do not fit, the last ones are filled with zeros, which no amax sees and
# which are cut off again.


def along(dim: int, size: int) -> tuple[int, int]:
    """The tile of `size` elements along a dimension."""
    return (1, size) if dim == 1 else (size, 1)


def split(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """A matrix [R, C] as tiles [R/r, r, C/c, c], padded with zeros where they end."""
    rows, columns = tile
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    if down or right:
        x = torch.nn.functional.pad(x, (0, right, 0, down))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each tile: [R/r, r, C/c, c] -> [R/r, C/c]."""
    return blocks.abs().amax((1, 3))


def widen(block: Tensor) -> Tensor:
    """[R/r, C/c] -> [R/r, 1, C/c, 1], to be broadcast over tiles."""
    return block[:, None, :, None]


def join(blocks: Tensor, like: Tensor) -> Tensor:
    """Tiles back to a matrix of the shape of `like`."""
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def times_blocks(x: Tensor, block: Tensor, tile: tuple[int, int]) -> Tensor:
    """Every number of a matrix [R, C] times that of its tile [ceil(R/r), ceil(C/c)]."""
    return join(split(x, tile) * widen(block), x)


# ------------------------------------------------------------------------------------------
# The random Hadamard transform: outliers are spread over a block before it is cast to four bits.
#
# A block of 16 values shares one scale, which its largest value sets; next to an outlier the others
# become zero. Multiplying the block by an orthogonal matrix with all entries ±1/4 makes every
# value a
# mixture of all sixteen, so that no one stands out. Random signs in front keep structured inputs
# from
# lining up with a row of the matrix. Both operands of a product are transformed along the dimension
# that is contracted, and (Hx)ᵀ(Hg) = xᵀg: nothing has to be undone.
#
# It is part of a cast, on hardware fused with it, and no matrix multiplication of the layer. So it
# is
# an operator of its own, whose inside a dispatch mode (the proof's witness) does not see. Sources:
# arXiv 2509.25149, section 4.2; Transformer Engine's `reference_nvfp4.py`.


SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Random once, then fixed, as in Transformer Engine: both operands must use the same."""


@functools.cache
def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`diag(SIGNS) · H / 4` for the Hadamard matrix H of size 16: orthogonal, [16, 16]."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    for _ in range(4):  # Sylvester's construction
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=device)
    return (signs[:, None] * matrix / SIZE**0.5).to(dtype)


_library = torch.library.Library("finetune", "FRAGMENT")
_library.define("hadamard(Tensor x) -> Tensor")


def _hadamard(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        turned = hadamard_matrix(x.dtype, x.device).t() @ x.unflatten(0, (-1, SIZE))
    return turned.flatten(0, 1)


_library.impl("hadamard", _hadamard, "CompositeExplicitAutograd")
_library.impl("hadamard", torch.empty_like, "Meta")


def transform(x: Tensor) -> Tensor:
    """The Hadamard transform of every 16 rows of a matrix [M, C], in its own type.

    M is padded with zeros to a multiple of 16, which adds nothing to a product over M.
    """
    missing = -x.shape[0] % SIZE
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return torch.ops.finetune.hadamard(x)
