"""What a precision does to one tensor: amax, saturation, flushing to zero, and noise.

The tensor is cast by the rule in force, exactly as the emulated GEMM casts it, whatever engine
multiplies; what comes back is compared with what went in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.config.schema import PrecisionConfig
from finetune.precision.formats import amax, snr_db
from finetune.precision.gemm import Codes
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


# ------------------------------------------------------------------------------------------
# What was seen of many operands, folded into the few numbers that are logged.
#
# Of the layers of a group, and of the processes of a run: amax, drift and change by the largest,
# shares over all elements, the signal-to-noise ratio by its mean over layers and by its worst
# layer.


EXACT_DB = 144.5
"""Reported for a cast without any noise: 20 log10(2^24), as much as float32 itself can tell."""


@dataclass
class Tally:
    """What was seen of one operand in one group.

    Attributes:
        amax: largest magnitude.
        elements: how many values were judged by a cast, 0 where none is.
        overflow, underflow: of these, how many.
        snr_db: sum over layers, in dB; `layers` of them.
        worst: lowest ratio in dB and the layer that has it.
        drift, change: largest, in powers of two; None without delayed scaling.
    """

    amax: float = 0.0
    elements: int = 0
    overflow: float = 0.0
    underflow: float = 0.0
    snr_db: float = 0.0
    layers: int = 0
    worst: tuple[float, str] = (math.inf, "")
    drift: float | None = None
    change: float | None = None

    def add(self, name: str, elements: int, seen: OperandHealth) -> None:
        """Add one operand that is quantised."""
        self.amax = max(self.amax, seen.amax)
        self.elements += elements
        self.overflow += seen.overflow * elements
        self.underflow += seen.underflow * elements
        snr = min(seen.snr_db, EXACT_DB)
        if not math.isnan(snr):  # nothing but zeros has no ratio
            self.snr_db += snr
            self.layers += 1
            self.worst = min(self.worst, (snr, name))

    def merge(self, other: Tally) -> None:
        """Add what another process saw of the same group."""
        self.amax = max(self.amax, other.amax)
        self.worst = min(self.worst, other.worst)
        for name in ("elements", "overflow", "underflow", "snr_db", "layers"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drift", "change"):
            both = [v for v in (getattr(self, name), getattr(other, name)) if v is not None]
            setattr(self, name, max(both, default=None))


Tallies = dict[tuple[str, Operand], Tally]


def health_row(tallies: Tallies) -> dict[str, float]:
    """`health/attn/x_amax` and so on: what is logged, plain finite floats."""
    row: dict[str, float] = {}
    for (group, operand), tally in sorted(tallies.items()):
        at = f"health/{group}/{operand}"
        row[f"{at}_amax"] = tally.amax
        if tally.elements:
            row[f"{at}_overflow"] = tally.overflow / tally.elements
            row[f"{at}_underflow"] = tally.underflow / tally.elements
        if tally.layers:
            row[f"{at}_snr_db"] = tally.snr_db / tally.layers
            row[f"{at}_worst_snr_db"] = tally.worst[0]
        for name, value in (("scale_drift", tally.drift), ("scale_change", tally.change)):
            if value is not None:
                key = f"health/{group}/{name}"
                row[key] = max(row.get(key, 0.0), value)
    return {key: value for key, value in row.items() if math.isfinite(value)}


def merge_tallies(parts: Iterable[Tallies]) -> Tallies:
    """What all processes saw, of what each of them saw."""
    whole: Tallies = {}
    for part in parts:
        for key, tally in part.items():
            whole.setdefault(key, Tally()).merge(tally)
    return whole
