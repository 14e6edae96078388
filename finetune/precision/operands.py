"""What a precision does to one tensor: amax, saturation, flushing to zero, and noise.

The tensor is cast by the rule in force, exactly as the emulated GEMM casts it, whatever engine
multiplies; what comes back is compared with what went in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.config import PrecisionConfig
from finetune.precision.gemm import Codes
from finetune.precision.numerics import amax, snr_db
from finetune.precision.scaling import (
    Formats,
    Operand,
    make_rule,
    multiply_in_bf16,
    scaled,
    to_codes,
)


@dataclass(frozen=True)
class OperandHealth:
    """How one operand survives its quantisation.

    Attributes:
        amax: largest magnitude before it.
        overflow: share of values that saturated, 0 to 1.
        underflow: share of values that were not zero and became zero, 0 to 1.
        snr_db: signal-to-noise ratio in dB; infinite when nothing was lost, NaN for zeros.
    """

    amax: float
    overflow: float
    underflow: float
    snr_db: float


def quantise(
    x: Tensor, operand: Operand, precision: PrecisionConfig, scale: Tensor | None = None
) -> Codes:
    """Codes of a matrix as fprop (x, w) or dgrad (g) would cast it.

    Args:
        x: [rows, columns], the contracted dimension last.
        operand: which one it is.
        precision: with the scaling rule and format.
        scale: the delayed scale in force, float32. Without it delayed scaling is taken as
            tensorwise, that is, with the scale that its amax asks for.
    """
    if scale is None:
        update = {"scaling": "tensorwise"} if precision.scaling == "delayed" else {}
        return make_rule(precision.model_copy(update=update)).cast(operand, x, 1)
    fmt = Formats.of(precision)[operand]
    values = to_codes(scaled(x, scale), fmt, saturate=True)
    return Codes(values, scale.reciprocal(), fmt, multiply_in_bf16(precision))


@torch.no_grad()
def inspect_operand(
    x: Tensor, operand: Operand, precision: PrecisionConfig, scale: Tensor | None = None
) -> OperandHealth:
    """Health of one operand; arguments as of `quantise`."""
    codes = quantise(x, operand, precision, scale)
    back, wide = codes.dequantise(), x.float()
    lost = (codes.values == 0) & (wide != 0)
    # Rounding moves a value by half a unit at most; what moved further down had no room.
    half_unit = 2.0 ** -(codes.fmt.mantissa + 1)
    at_limit = codes.values.abs() == codes.fmt.max
    saturated = at_limit & (back.abs() < wide.abs() * (1 - half_unit))
    return OperandHealth(
        amax=float(amax(x)),
        overflow=float(saturated.float().mean()),
        underflow=float(lost.float().mean()),
        snr_db=snr_db(wide, back),
    )
