"""Plots over steps and over time: curves of one run and of several.

A page is some 800 points wide; a run may have 10,000 steps. Every tenth step would hide a spike, so
`envelope` keeps the smallest and the largest value of each bucket of steps. Smoothing uses all
steps, before thinning. Steps with values that are not finite are marked.

*Training health* is the effect of FP8 casts on activations, weights and gradients: the
operands are `x`, `w` and `g`, a line for each layer group. Shares that are zero at every step
are a sentence instead of a plot; measures logged fewer than `LEAST_POINTS` times are a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.analysis.report.elements import (
    METRICS,
    MISSING,
    Cell,
    Line,
    Num,
    Plot,
    Row,
    Series,
    Source,
    Table,
    is_number,
)
from finetune.analysis.report.figures import style

Floats = NDArray[np.float64]
BUCKETS, SHARED_BUCKETS, SMALL_BUCKETS = 300, 200, 150
"""Buckets, two points each, of a wide plot of one run, of several runs, and of a small plot."""
LEAST_POINTS = 3
"""Logged values below which a series is not drawn."""
MOST_LOSS = 20.0
"""Losses above which perplexity, exp(loss), is not shown."""
CLOCK = ((3, "seconds", 1), (180, "minutes", 60), (math.inf, "hours", 3600))
"""Units of a time axis: up to so many minutes, name, seconds."""


class Curve(NamedTuple):
    """Finite values y [n] at steps x [n], and the steps at which the value is not finite."""

    x: Floats
    y: Floats
    broken: tuple[float, ...] = ()

    @property
    def window(self) -> int:
        return window_of(len(self.y))

    def line(
        self, buckets: int = BUCKETS, *, smooth: bool = False
    ) -> tuple[list[float], list[float]]:
        """Steps and values to draw."""
        x, y = envelope(self.x, smoothed(self.y, self.window) if smooth else self.y, buckets)
        return x.tolist(), y.tolist()


def curve(rows: Iterable[dict[str, Any]], key: str, over: str = "step") -> Curve:
    """Values logged under `key`, over steps or another key."""
    pairs = [
        (row[over], row[key])
        for row in rows
        if isinstance(row.get(key), (int, float)) and not isinstance(row[key], bool)
        if is_number(row.get(over))
    ]
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    x, y = table[:, 0], table[:, 1]
    good = np.isfinite(y)
    return Curve(x[good], y[good], tuple(float(step) for step in x[~good]))


def envelope(x: Floats, y: Floats, buckets: int) -> tuple[Floats, Floats]:
    """Keep the extremes of each bucket, in their order, and the first and the last point.

    Six points 5 1 3 2 9 4 in two buckets (5 1 3, 2 9 4) keep 5 1 2 9 4. Series of up to 2 `buckets`
    points are unchanged.
    """
    n = len(y)
    if n <= 2 * buckets:
        return x, y
    kept = {0, n - 1}
    for part in np.array_split(np.arange(n), buckets):
        kept |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    index = np.asarray(sorted(kept))
    return x[index], y[index]


def window_of(n: int) -> int:
    """Points in the mean of a smoothed line: a fiftieth, odd; 1 is no smoothing."""
    return 1 if n < 20 else max(3, (n // 50) | 1)


def smoothed(y: Floats, window: int) -> Floats:
    """Mean over the `window` points around each [n], fewer at the ends."""
    if window <= 1:
        return y
    sums, counts = (np.convolve(x, np.ones(window), "same") for x in (y, np.ones_like(y)))
    return sums / counts


def treatment(n: int, window: int = 1, buckets: int = BUCKETS) -> str:
    """Describe smoothing and thinning of `n` points, for the line below the plot."""
    parts = []
    if window > 1:
        parts.append(f"smoothed: mean of {window} logged points")
    if n > 2 * buckets:
        share = math.ceil(n / buckets)
        parts.append(f"{n:,} points drawn as the lowest and highest of every {share}")
    return "; ".join(parts)


# ----------------------------------------------------------------------------------------- one run


def loss_plot(s: Source) -> Plot | None:
    """Training and eval loss over steps, with perplexity beside."""
    train, evaluated = curve(s.run.rows, "loss"), curve(s.run.rows, "eval_loss")
    series = _losses(train, evaluated)
    if not series:
        return None
    ends = [f"{s.label} from {s.y[0]:.3f} to {s.y[-1]:.3f}" for s in series if s.weight != "faint"]
    highest = max(max(one.y) for one in series)
    return Plot(
        *("loss", "Training and eval loss", "nats per token; on the right: perplexity"),
        f"Loss over {s.run.last_step} steps: {'; '.join(ends)}.",
        tuple(series),
        note=treatment(len(train.y), train.window),
        sources=(s.num(METRICS, METRICS, "loss"),),
        marks=train.broken + evaluated.broken,
        size="wide",
        perplexity=highest < MOST_LOSS,
    )


def loss_over_time(s: Source) -> Plot | None:
    """The same over wall-clock time, in which evaluations count; none of a single point."""
    train, evaluated = (curve(s.run.rows, key, "seconds") for key in ("loss", "eval_loss"))
    most = max((*train.x, *evaluated.x), default=0.0)
    least_points = len(train.x) < LEAST_POINTS and len(evaluated.x) < LEAST_POINTS
    if least_points or any(np.any(np.diff(one.x) < 0) for one in (train, evaluated)):
        return None
    unit, seconds = next((unit, n) for minutes, unit, n in CLOCK if most <= 60 * minutes)
    train, evaluated = (one._replace(x=one.x / seconds) for one in (train, evaluated))
    return Plot(
        *("loss_over_time", "Loss over time", "nats per token"),
        f"Loss over {most / seconds:.3g} {unit} of training and evaluation.",
        tuple(_losses(train, evaluated)),
        note=treatment(len(train.y), train.window),
        sources=(s.num(METRICS, METRICS, "seconds"),),
        size="half",
        over=unit,
    )


def learning_rate(s: Source) -> Plot | None:
    drawn, source = curve(s.run.rows, "learning_rate"), s.num(METRICS, METRICS, "learning_rate")
    plot = _half(drawn, "learning_rate", "Learning rate", "", source)
    # A schedule has no noise that smoothing would take away.
    return plot and replace(
        plot, series=(Series("as scheduled", *drawn.line()),), note=treatment(len(drawn.y))
    )


def _losses(train: Curve, evaluated: Curve) -> list[Series]:
    series = _with_smoothed(train, "training, as logged", "training, smoothed", "training")
    if len(evaluated.x):
        marker = "o" if len(evaluated.x) <= 60 else ""
        line = evaluated.line()
        series.append(Series("eval", *line, color="c2", dash="dashed", marker=marker))
    return series


def _with_smoothed(drawn: Curve, logged: str, smooth: str, alone: str) -> list[Series]:
    """Series of a curve: as logged, and pale behind its smoothed line where that differs."""
    if drawn.window == 1:
        return [Series(alone, *drawn.line())] if len(drawn.x) else []
    return [Series(logged, *drawn.line(), weight="faint"), Series(smooth, *drawn.line(smooth=True))]


def gradients_and_speed(s: Source) -> Row:
    """Gradient norm and tokens per second over steps; single steps where they were timed."""
    ticks = [
        {"step": r["step"], "speed": r["tokens"] / r["seconds"]}
        for r in s.run.steps
        if is_number(r.get("tokens")) and is_number(r.get("seconds")) and r["seconds"] > 0
    ]
    rows, key, file = s.run.rows, "tokens_per_s", METRICS
    if len(ticks) > 1:
        rows, key, file = ticks, "speed", "steps.jsonl"
    gradient = curve(s.run.rows, "grad_norm")
    return side_by_side(
        _half(
            gradient, "gradient_norm", "Gradient norm", "L2", s.num(METRICS, METRICS, "grad_norm")
        ),
        _half(curve(rows, key), "speed", "Speed", "tokens per second", s.num(file, file, key)),
    )


def side_by_side(*plots: Plot | None) -> Row:
    return Row(tuple(plot for plot in plots if plot is not None))


def _half(drawn: Curve, name: str, title: str, unit: str, source: Num) -> Plot | None:
    if len(drawn.x) < LEAST_POINTS:
        return None
    return Plot(
        *(name, title, unit),
        f"{title} over steps, from {min(drawn.y):.4g} to {max(drawn.y):.4g} {unit}".rstrip() + ".",
        tuple(_with_smoothed(drawn, "as logged", "smoothed", "as logged")),
        note=treatment(len(drawn.y), drawn.window),
        sources=(source,),
        marks=drawn.broken,
        from_zero=True,
        size="half",
    )


# ------------------------------------------------------------------------------------ several runs


def overlay(
    members: Sequence[Source], key: str, name: str, title: str, unit: str, **options: Any
) -> Plot | None:
    """One key of all runs over steps, smoothed where there are many points."""
    curves = [curve(s.run.rows, key) for s in members]
    drawn = [
        (i, s, one) for i, (s, one) in enumerate(zip(members, curves, strict=True)) if len(one.y)
    ]
    if not drawn:
        return None
    series = []
    for number, s, one in drawn:
        marker = "o" if len(one.y) <= 30 and key == "eval_loss" else ""
        line = one.line(SHARED_BUCKETS, smooth=True)
        series.append(Series(s.label, *line, marker=marker, **style(number)))
    longest = max(curves, key=lambda one: len(one.y))
    return Plot(
        *(name, title, unit),
        f"{title} over steps: {'; '.join(f'{s.label} ends at {s.y[-1]:.4g}' for s in series)}.",
        tuple(series),
        note=treatment(len(longest.y), longest.window, SHARED_BUCKETS),
        sources=tuple(s.num(s.label, METRICS, key) for _, s, _ in drawn),
        marks=tuple(step for one in curves for step in one.broken),
        **options,
    )


# ------------------------------------------------------------------------------------------ health

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
