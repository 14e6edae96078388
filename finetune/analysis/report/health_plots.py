"""Training health of a run: the effect of FP8 casts on activations, weights and gradients.

The operands are `x`, `w` and `g`, a line for each layer group. Shares that are zero at every step
are a sentence instead of a plot; measures logged fewer than `LEAST_POINTS` times are a table.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from finetune.analysis.report.curves import (
    LEAST_POINTS,
    SMALL_BUCKETS,
    Curve,
    curve,
    envelope,
    treatment,
)
from finetune.analysis.report.elements import (
    METRICS,
    MISSING,
    Cell,
    Line,
    Plot,
    Row,
    Series,
    Source,
    Table,
)
from finetune.analysis.report.figures import style

LEAST_PERCENT = 1e-3
"""Smaller shares are shown per million."""
OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
MEASURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "snr_db": (
        "Signal over quantization noise",
        "dB",
        "Higher keeps more; E4M3 lies some six dB above E5M2.",
        {"least": 4.0},
    ),
    "overflow": ("Overflow", "%", "Share of values that a cast saturated.", {"from_zero": True}),
    "underflow": ("Underflow", "%", "Share of values that a cast made zero.", {"from_zero": True}),
    "amax": ("Largest magnitude", "", "The amax that scales follow.", {"log": True}),
}
OTHERS = {
    "grad_snr": ("Gradient signal over noise", "ratio"),
    "update_ratio": ("Update relative to weight", "ratio of norms"),
}
CROWDED = 60
"""Points above which lines are thin."""
_HEALTH_KEY = re.compile(r"health/([^/]+)/(?:([xwg])_)?(\w+)$")


class Health:
    """Logged training health of a run, by measure and operand: curves of layer groups."""

    def __init__(self, s: Source) -> None:
        self.source = s
        # Most rows hold none of these keys: looked for once, not for every key.
        self.rows = [row for row in s.run.rows if any(map(_HEALTH_KEY.match, row))]
        logged = sorted({key for row in self.rows for key in row})
        self.parsed = {key: match.groups() for key in logged if (match := _HEALTH_KEY.match(key))}
        self.groups = sorted({group for group, _, _ in self.parsed.values()})
        self.looks = {group: style(i) for i, group in enumerate(self.groups)}
        self.few: list[tuple[Cell, ...]] = []
        self.plots: list[Plot] = []
        self.silent: list[str] = []

    def parts(self) -> list[Row | Line | Table]:
        """Rows of plots, lines on measures that are zero at every step, a table of short series."""
        found: list[Row | Line | Table] = []
        for measure, (title, unit, note, options) in MEASURES.items():
            self.plots, self.silent = [], []
            for operand, label in OPERANDS.items():
                name, about = f"{measure.removesuffix('_db')}_{label}", f"{title} of {label}"
                self._add(operand, measure, Plot(name, label.capitalize(), unit, about, **options))
            found += self._row(title, note)
            if self.silent:
                link = self.source.num(f"no {measure}", METRICS, f"health/*/*_{measure}")
                found.append(Line((f"{' and '.join(self.silent)}: ", link, " at all.")))
        self.plots = []
        for measure, (title, unit) in OTHERS.items():
            self._add(None, measure, Plot(measure, title, unit, title, log=True))
        found += self._row("Gradients and updates", "")
        head = ("last logged value", *self.groups)
        numeric = tuple(range(1, len(head)))
        return [*found, Table(head, self.few, numeric)] if self.few else found

    def _add(self, operand: str | None, measure: str, plot: Plot) -> None:
        """Sort one measure of one operand: drawn, zero at every step, or too short to draw."""
        keys = {
            g: key for key, (g, x, what) in self.parsed.items() if (x, what) == (operand, measure)
        }
        drawn = {g: curve(self.rows, key) for g, key in keys.items()}
        drawn = {g: one for g, one in drawn.items() if len(one.x)}
        if not drawn:
            return
        if plot.from_zero and not any(one.y.any() for one in drawn.values()):
            self.silent.append(plot.title if not self.silent else plot.title.lower())
        elif max(len(one.x) for one in drawn.values()) < LEAST_POINTS:
            self.few.append(self._values(plot, keys, drawn))
        else:
            self.plots.append(self._plot(plot, keys, drawn))

    def _values(
        self, plot: Plot, keys: dict[str, str], drawn: dict[str, Curve]
    ) -> tuple[Cell, ...]:
        unit, factor = _unit(plot.unit, drawn)
        cells: list[Cell] = [f"{plot.about}, {unit}".removesuffix(", ")]
        for group in self.groups:
            one = drawn.get(group)
            text = f"{factor * one.y[-1]:.3g}" if one else MISSING
            cells.append(self.source.num(text, METRICS, keys.get(group, "")))
        return tuple(cells)

    def _plot(self, plot: Plot, keys: dict[str, str], drawn: dict[str, Curve]) -> Plot:
        unit, factor = _unit(plot.unit, drawn)
        series = []
        for group, one in drawn.items():
            x, y = envelope(one.x, one.y, SMALL_BUCKETS)
            values, weight = (factor * y).tolist(), "thin" if len(y) > CROWDED else "normal"
            series.append(Series(group, x.tolist(), values, weight=weight, **self.looks[group]))
        return replace(
            plot,
            unit=unit,
            about=f"{plot.about} over steps, a line for each layer group: {', '.join(drawn)}.",
            series=tuple(series),
            note=treatment(max(len(one.x) for one in drawn.values()), buckets=SMALL_BUCKETS),
            sources=(self.source.num(METRICS, METRICS, next(iter(keys.values()))),),
        )

    def _row(self, title: str, note: str) -> list[Row]:
        shown = {s.label for plot in self.plots for s in plot.series}
        looks = self.looks.items()
        legend = tuple(Series(group, (), **look) for group, look in looks if group in shown)
        return [Row(tuple(self.plots), legend, title, note)] if self.plots else []


def _unit(unit: str, drawn: dict[str, Curve]) -> tuple[str, float]:
    """Unit and factor of a share: most are so small that per cent would be all zeros."""
    if unit != "%":
        return unit, 1.0
    rare = max(one.y.max() for one in drawn.values()) < LEAST_PERCENT
    return ("per million", 1e6) if rare else (unit, 100.0)
