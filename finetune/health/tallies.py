"""What was seen of many operands, folded into the few numbers that are logged.

Of the layers of a group, and of the processes of a run: amax, drift and change by the largest,
shares over all elements, the signal-to-noise ratio by its mean over layers and by its worst layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from finetune.precision.operands import OperandHealth
from finetune.precision.scaling import Operand

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
