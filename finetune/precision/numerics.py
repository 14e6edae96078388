"""FP8 numbers: scales, casts and the scaled GEMM. Pure functions, the reference for every backend.

A tensor x is held as codes q in FP8 and a scale s, with x ≈ q / s. The scale puts the largest
magnitude (amax) at the largest FP8 number:

    s = FP8_MAX / (amax · 2^margin)            E4M3: FP8_MAX = 448, E5M2: FP8_MAX = 57344

and the cast rounds to nearest even and saturates. A GEMM multiplies codes exactly, accumulates in
float32, multiplies by the inverse scales and rounds once to the output type, as the FP8 tensor
cores and cuBLASLt's epilogue do. Sources: Micikevicius et al., "FP8 Formats for Deep Learning"
(2022); Open Compute Project OFP8 specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_DTYPES = (E4M3, E5M2)
FP8_MAX = {dtype: torch.finfo(dtype).max for dtype in FP8_DTYPES}
AMAX_FLOOR = 1e-12
"""Current scaling: an all-zero tensor gets a finite scale (the floor that torchao uses too)."""


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Largest magnitude in float32: a scalar, or along `dim` kept as size 1.

    NaN in `x` gives NaN: it must not be hidden by the scale.
    """
    if dim is None:
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low).float()
    return x.abs().amax(dim, keepdim=True).float()


def scale_from_amax(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """`FP8_MAX / (amax · 2^margin)` in float32, of the same shape as `amax`.

    Args:
        amax: float32, any shape.
        dtype: the FP8 format of the codes.
        margin: powers of two of headroom.
    """
    return (FP8_MAX[dtype] / 2**margin) / amax.clamp(min=AMAX_FLOOR)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of `x · scale`: float32 product, saturated, rounded to nearest even.

    Args:
        x: floating point, any shape.
        scale: float32, broadcastable to `x`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
    """
    limit = FP8_MAX[dtype]
    return (x.float() * scale).clamp_(-limit, limit).to(dtype)


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`codes / scale` in float32, rounded once to `dtype`."""
    return (codes.float() / scale).to(dtype)


def snr_db(x: Tensor, approximation: Tensor) -> float:
    """Signal-to-noise ratio of a quantisation in dB: 10 log10(Σx² / Σ(x - x̂)²)."""
    signal = x.double().square().sum()
    noise = (x.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


# Registered as an operator, so that a dispatch mode sees it called with FP8 operands, exactly as it
# sees `aten._scaled_mm` on hardware: the proof counts both alike.
_library = torch.library.Library("finetune", "DEF")
_library.define(
    "scaled_mm(Tensor a, Tensor b, Tensor a_inverse_scale, Tensor b_inverse_scale, "
    "ScalarType out_dtype) -> Tensor"
)


def _scaled_mm(
    a: Tensor, b: Tensor, a_inverse_scale: Tensor, b_inverse_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        product = a.float() @ b.float()  # products of two FP8 numbers are exact in float32
    # One scale at a time would be the same up to rounding; cuBLASLt multiplies by both at the end.
    return product.mul_(a_inverse_scale * b_inverse_scale).to(out_dtype)


def _scaled_mm_meta(
    a: Tensor, b: Tensor, a_inverse_scale: Tensor, b_inverse_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_library.impl("scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
_library.impl("scaled_mm", _scaled_mm_meta, "Meta")


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Emulated `torch._scaled_mm`: `(a / a_scale) @ (b / b_scale)` of FP8 codes.

    Args:
        a: FP8 codes [M, K].
        b: FP8 codes [K, N].
        a_scale: float32, one element or [M, 1].
        b_scale: float32, one element or [1, N].
        out_dtype: type of the result.

    Returns:
        [M, N] in `out_dtype`.
    """
    return torch.ops.finetune.scaled_mm(a, b, a_scale.reciprocal(), b_scale.reciprocal(), out_dtype)
