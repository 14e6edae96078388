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

from finetune.analysis.report.content import (
    METRICS,
    Block,
    Num,
    Para,
    Plot,
    Row,
    RunSource,
    Section,
    Series,
    is_number,
    words,
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
        y = smoothed(self.y, self.window) if smooth else self.y
        kept_x, kept_y = envelope(self.x, y, buckets)
        return kept_x.tolist(), kept_y.tolist()


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
    half = window // 2
    sums = np.concatenate(([0.0], np.cumsum(y)))
    at = np.arange(len(y))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return (sums[high] - sums[low]) / (high - low)


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


def loss_plot(s: RunSource) -> Plot | None:
    train, held_out = curve(s.run.rows, "loss"), curve(s.run.rows, "eval_loss")
    series = []
    if train.window > 1:
        series += [
            Series("training, as logged", *train.line(), color="c1", weight="faint"),
            Series("training, smoothed", *train.line(smooth=True), color="c1"),
        ]
    elif len(train.x):
        series.append(Series("training", *train.line(), color="c1"))
    if len(held_out.x):
        marker = "o" if len(held_out.x) <= 60 else ""
        line = Series("held out", *held_out.line(), color="c2", dash="dashed", marker=marker)
        series.append(line)
    if not series:
        return None
    ends = [f"{s.label} from {s.y[0]:.3f} to {s.y[-1]:.3f}" for s in series if s.weight != "faint"]
    return Plot(
        "loss",
        "Training and held-out loss",
        "nats per token",
        f"Loss over {s.run.last_step} steps: {'; '.join(ends)}.",
        tuple(series),
        note=treatment(len(train.y), train.window),
        sources=(Num(METRICS, s.href(METRICS), "loss"),),
        marks=train.broken + held_out.broken,
        size="wide",
    )


def gradients_and_speed(s: RunSource) -> Section | None:
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
        _half(s, gradient, "gradient_norm", "Gradient norm", "L2", METRICS, "grad_norm"),
        _half(s, curve(rows, key), "speed", "Speed", "tokens per second", file, key),
    )


def side_by_side(*plots: Plot | None) -> Section | None:
    found = tuple(plot for plot in plots if plot is not None)
    return Section("Gradients and speed", (Row(found),)) if found else None


def _half(
    s: RunSource, drawn: Curve, name: str, title: str, unit: str, file: str, key: str
) -> Plot | None:
    if len(drawn.x) < 2:
        return None
    even = drawn.window > 1
    series = [Series("as logged", *drawn.line(), weight="faint" if even else "normal")]
    if even:
        series.append(Series("smoothed", *drawn.line(smooth=True)))
    return Plot(
        name,
        title,
        unit,
        f"{title} over steps, from {min(drawn.y):.4g} to {max(drawn.y):.4g} {unit}.",
        tuple(series),
        note=treatment(len(drawn.y), drawn.window),
        sources=(Num(file, s.href(file), key),),
        marks=drawn.broken,
        from_zero=True,
        size="half",
    )


# ------------------------------------------------------------------------------------ several runs


def overlay(
    members: Sequence[RunSource], key: str, name: str, title: str, unit: str, **options: Any
) -> Plot | None:
    """One key of all runs over steps, smoothed where there are many points."""
    drawn = [(number, s, curve(s.run.rows, key)) for number, s in enumerate(members)]
    marks = tuple(step for *_, one in drawn for step in one.broken)
    drawn = [found for found in drawn if len(found[2].y)]
    if not drawn:
        return None
    series = []
    for number, s, one in drawn:
        marker = "o" if len(one.y) <= 30 and key == "eval_loss" else ""
        line = one.line(SHARED_BUCKETS, smooth=True)
        series.append(Series(s.label, *line, marker=marker, **style(number)))
    longest = max((one for *_, one in drawn), key=lambda one: len(one.y))
    return Plot(
        name,
        title,
        unit,
        f"{title} over steps: {'; '.join(f'{s.label} ends at {s.y[-1]:.4g}' for s in series)}.",
        tuple(series),
        note=treatment(len(longest.y), longest.window, SHARED_BUCKETS),
        sources=tuple(Num(s.label, s.href(METRICS), key) for _, s, _ in drawn),
        marks=marks,
        **options,
    )


# ------------------------------------------------------------------------------------------ health


def health(s: RunSource) -> Section | None:
    """Section on training health; None if no health was logged."""
    logged = sorted({key for row in s.run.rows for key in row if key.startswith("health/")})
    parsed = {key: match.groups() for key in logged if (match := _HEALTH_KEY.match(key))}
    groups = sorted({group for group, _, _ in parsed.values()})
    if not groups:
        return None
    looks = {group: style(i) for i, group in enumerate(groups)}

    def keys_of(operand: str | None, measure: str) -> dict[str, str]:
        return {g: key for key, (g, x, what) in parsed.items() if (x, what) == (operand, measure)}

    blocks: list[Block] = []
    for measure, (title, unit, note, options) in MEASURES.items():
        plots, silent = [], []
        for operand, label in OPERANDS.items():
            name, about = f"{measure.removesuffix('_db')}_{label}", f"{title} of {label}"
            keys = keys_of(operand, measure)
            plot = _health_plot(s, keys, looks, name, label, unit, about, **options)
            if plot is None:
                continue
            if options.get("from_zero") and not any(any(x.y) for x in plot.series):
                silent.append(label)
            else:
                plots.append(plot)
        blocks += _health_row(title, note, plots, looks)
        if silent:
            link = s.num(f"no {measure}", METRICS, f"health/*/*_{measure}")
            blocks.append(Para(words(f"{' and '.join(silent).capitalize()}: ", link, " at all.")))
    plots = []
    for measure, (title, unit) in OTHERS.items():
        keys = keys_of(None, measure)
        plot = _health_plot(s, keys, looks, measure, title, unit, title, log=True)
        plots.append(plot)
    found = [plot for plot in plots if plot is not None]
    blocks += _health_row("Gradients and updates", "", found, looks)
    return Section("Training health", tuple(blocks))


def _health_row(title: str, note: str, plots: list[Plot], looks: dict[str, Look]) -> list[Block]:
    shown = {s.label for plot in plots for s in plot.series}
    legend = tuple(Series(group, (), **look) for group, look in looks.items() if group in shown)
    return [Para(words(note), head=title), Row(tuple(plots), legend)] if plots else []


def _health_plot(
    s: RunSource,
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
        name=name,
        title=title[:1].upper() + title[1:],
        unit=unit,
        about=f"{about} over steps, a line for each layer group: {', '.join(drawn)}.",
        series=tuple(series),
        note=treatment(max(len(one.x) for one in drawn.values()), buckets=SMALL_BUCKETS),
        sources=(Num(METRICS, s.href(METRICS), next(iter(keys.values()))),),
        **options,
    )
