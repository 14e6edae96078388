"""Plots over steps: curves of one run, of several, and of training health.

A page is some 800 points wide; a run may have 10,000 steps. Every tenth step would hide a spike, so
`envelope` keeps the smallest and the largest value of each bucket of steps. Smoothing uses all
steps, before thinning. Steps with values that are not finite are marked.

Training health shows the effect of FP8 casts on activations, weights and gradients (`x`, `w`, `g`),
a line for each layer group; shares that are zero at every step are a sentence instead of a plot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.analysis.report.elements import (
    METRICS,
    Line,
    Num,
    Plot,
    Row,
    Series,
    Source,
    is_number,
)
from finetune.analysis.report.figures import Look, style

Floats = NDArray[np.float64]
BUCKETS, SHARED_BUCKETS, SMALL_BUCKETS = 300, 200, 150
"""Buckets, two points each, of a wide plot of one run, of several runs, and of a small plot."""
LEAST_PERCENT = 1e-3
"""Smaller shares are shown per million."""
OPERANDS = {"x": "activations", "w": "weights", "g": "gradients"}
MEASURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "snr_db": (
        "Signal over quantisation noise",
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
_HEALTH_KEY = re.compile(r"health/([^/]+)/(?:([xwg])_)?(\w+)$")


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


def curve(rows: Iterable[dict[str, Any]], key: str) -> Curve:
    pairs = [
        (row["step"], row[key])
        for row in rows
        if isinstance(row.get(key), (int, float)) and not isinstance(row[key], bool)
    ]
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    x, y = table[:, 0], table[:, 1]
    good = np.isfinite(y)
    return Curve(x[good], y[good], tuple(float(step) for step in x[~good]))


def envelope(x: Floats, y: Floats, buckets: int = BUCKETS) -> tuple[Floats, Floats]:
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
    train, held_out = curve(s.run.rows, "loss"), curve(s.run.rows, "eval_loss")
    series = _with_smoothed(train, "training, as logged", "training, smoothed", "training")
    if len(held_out.x):
        marker = "o" if len(held_out.x) <= 60 else ""
        line = Series("held out", *held_out.line(), color="c2", dash="dashed", marker=marker)
        series.append(line)
    if not series:
        return None
    ends = [f"{s.label} from {s.y[0]:.3f} to {s.y[-1]:.3f}" for s in series if s.weight != "faint"]
    return Plot(
        *("loss", "Training and eval loss", "nats per token"),
        f"Loss over {s.run.last_step} steps: {'; '.join(ends)}.",
        tuple(series),
        note=treatment(len(train.y), train.window),
        sources=(s.num(METRICS, METRICS, "loss"),),
        marks=train.broken + held_out.broken,
        size="wide",
    )


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
    if len(drawn.x) < 2:
        return None
    return Plot(
        *(name, title, unit),
        f"{title} over steps, from {min(drawn.y):.4g} to {max(drawn.y):.4g} {unit}.",
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


def health(s: Source) -> list[Row | Line]:
    """Plots of training health by measure, or a line on measures that are zero at every step."""
    logged = sorted({key for row in s.run.rows for key in row if key.startswith("health/")})
    parsed = {key: match.groups() for key in logged if (match := _HEALTH_KEY.match(key))}
    groups = sorted({group for group, _, _ in parsed.values()})
    looks = {group: style(i) for i, group in enumerate(groups)}

    def keys_of(operand: str | None, measure: str) -> dict[str, str]:
        return {g: key for key, (g, x, what) in parsed.items() if (x, what) == (operand, measure)}

    found: list[Row | Line] = []
    for measure, (title, unit, note, options) in MEASURES.items():
        plots, silent = [], []
        for operand, label in OPERANDS.items():
            name, about = f"{measure.removesuffix('_db')}_{label}", f"{title} of {label}"
            keys = keys_of(operand, measure)
            plot = _health_plot(s, keys, looks, name, label, unit, about, **options)
            if plot and options.get("from_zero") and not any(any(x.y) for x in plot.series):
                silent.append(label)
            elif plot:
                plots.append(plot)
        found += _health_row(title, note, plots, looks)
        if silent:
            link = s.num(f"no {measure}", METRICS, f"health/*/*_{measure}")
            found.append(Line((f"{' and '.join(silent).capitalize()}: ", link, " at all.")))
    plots = [
        _health_plot(s, keys_of(None, measure), looks, measure, title, unit, title, log=True)
        for measure, (title, unit) in OTHERS.items()
    ]
    return found + _health_row("Gradients and updates", "", [p for p in plots if p], looks)


def _health_row(title: str, note: str, plots: list[Plot], looks: dict[str, Look]) -> list[Row]:
    shown = {s.label for plot in plots for s in plot.series}
    legend = tuple(Series(group, (), **look) for group, look in looks.items() if group in shown)
    return [Row(tuple(plots), legend, title, note)] if plots else []


def _health_plot(
    s: Source,
    keys: dict[str, str],
    looks: dict[str, Look],
    name: str,
    title: str,
    unit: str,
    about: str,
    **options: Any,
) -> Plot | None:
    """One measure, a line for each layer group that has it."""
    drawn = {group: curve(s.run.rows, key) for group, key in sorted(keys.items())}
    drawn = {group: one for group, one in drawn.items() if len(one.x)}
    if not drawn:
        return None
    factor = 1.0
    if unit == "%":  # a share, mostly so small that per cent would be all zeros
        rare = max(one.y.max() for one in drawn.values()) < LEAST_PERCENT
        unit, factor = ("per million", 1e6) if rare else (unit, 100.0)
    series = []
    for group, one in drawn.items():
        x, y = envelope(one.x, one.y, SMALL_BUCKETS)
        series.append(Series(group, x.tolist(), (factor * y).tolist(), **looks[group]))
    return Plot(
        *(name, title[:1].upper() + title[1:], unit),
        f"{about} over steps, a line for each layer group: {', '.join(drawn)}.",
        tuple(series),
        note=treatment(max(len(one.x) for one in drawn.values()), buckets=SMALL_BUCKETS),
        sources=(s.num(METRICS, METRICS, next(iter(keys.values()))),),
        **options,
    )
