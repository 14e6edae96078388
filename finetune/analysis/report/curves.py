"""Plots of logged metrics: curves of one run and of several, and of training health.

A page is some 800 points wide; a run may have 10,000 steps. Every tenth step would hide a spike, so
`envelope` keeps the smallest and the largest value of each bucket of steps. Smoothing uses all
steps, before thinning. Steps with values that are not finite are marked.

*Training health* is the effect of FP8 casts on activations, weights and gradients: the
operands are `x`, `w` and `g`, a line for each layer group. Shares that are zero at every step
are a sentence instead of a plot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from finetune.analysis.report.elements import METRICS, Line, Num, PageSource, Plot, PlotRow, Series
from finetune.analysis.report.figures import TEMPLATES, style
from finetune.runs.folder import finite
from finetune.runs.progress import OPERANDS
from finetune.units import percent

Floats = NDArray[np.float64]
BUCKETS = 150
"""Buckets of a thinned line, two points each."""
LEAST_POINTS = 3
"""Logged values below which nothing is drawn: numbers are said."""
CROWDED = 60
"""Points above which three or more lines are thin."""
NOISY = {"loss", "grad_norm", "tokens_per_s", "reward", "rewards/accuracies", "rewards/margins"}
"""Metrics of single steps, which are smoothed."""
UNIT = "nats per token"
"""Unit of a loss."""
HALF: dict[str, Any] = {"size": "half", "from_zero": True}
"""Fields of a small plot that stands beside another."""
CLOCK = ((3, "seconds", 1), (180, "minutes", 60), (math.inf, "hours", 3600))
"""Units of a time axis: up to so many minutes, name, seconds."""


class Curve(NamedTuple):
    """Finite values y [n], of several runs [runs, n], at steps x [n]; steps that have none."""

    x: Floats
    y: Floats
    broken: tuple[float, ...] = ()


def curve(rows: Iterable[dict[str, Any]], key: str, over: str = "step") -> Curve:
    """Values logged under `key`, over steps or another key; rows without both are left out."""
    pairs = [
        (row[over], row[key])
        for row in rows
        if isinstance(row.get(key), (int, float)) and not isinstance(row[key], bool)
        if finite(row.get(over)) is not None
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
    # The ends are what a reader compares with the numbers beside the plot.
    kept = {0, n - 1}
    for part in np.array_split(np.arange(n), buckets):
        kept |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    index = np.asarray(sorted(kept))
    return x[index], y[index]


def window_of(n: int) -> int:
    """Points in the mean of a smoothed line: a fiftieth, odd; 1 is no smoothing."""
    # Odd, so that the mean is centered on its point.
    return 1 if n < 20 else max(3, (n // 50) | 1)


def smoothed(y: Floats, window: int) -> Floats:
    """Mean over the `window` points around each [n], fewer at the ends."""
    if window <= 1:
        return y
    # Divided by how many points were inside, or the ends would bend towards zero.
    sums, counts = (np.convolve(x, np.ones(window), "same") for x in (y, np.ones_like(y)))
    return sums / counts


def treatment(n: int, window: int = 1) -> str:
    """Describe smoothing and thinning of `n` points, for the line below the plot."""
    parts = []
    if window > 1:
        parts.append(f"smoothed: mean of {window} logged points")
    if n > 2 * BUCKETS:
        each = math.ceil(n / BUCKETS)
        parts.append(f"{n:,} points drawn as the lowest and highest of every {each}")
    return "; ".join(parts)


# ------------------------------------------------------------------------------------ one plot


class Drawn(NamedTuple):
    """A curve to draw.

    Attributes:
        label: its name in the legend.
        sources: links to its files.
        number: of its color and dash.
        noisy: drawn smoothed.
    """

    label: str
    curve: Curve
    sources: Sequence[Num]
    number: int
    noisy: bool = False


def plot_of(
    drawn: Sequence[Drawn], name: str, title: str, unit: str, **more: Any
) -> Plot | Line | None:
    """Curves in one plot; a noisy one that is alone has its logged values behind it.

    A curve of several runs is their mean, behind it the band between their lowest and highest.
    Where none has `LEAST_POINTS` their numbers are a line, and nothing is None.

    Args:
        **more: further fields of the plot; `over` is the name of its horizontal axis.
    """
    drawn = [one for one in drawn if len(one.curve.x)]
    longest = max((len(one.curve.x) for one in drawn), default=0)
    if longest < LEAST_POINTS:
        return _in_words(drawn, title, as_share="percent" in more) if drawn else None
    series, ends, window = list[Series](), list[str](), 1
    alone = sum(one.noisy for one in drawn) == 1
    weight = "thin" if len(drawn) > 2 and longest > CROWDED else "normal"
    for label, (x, y, _), _, number, noisy in drawn:
        line, width, color, dash = y, window_of(len(x)), *style(number)
        if y.ndim > 1:
            line, window = y.mean(0), max(window, width)  # smoothed before
            shown = np.searchsorted(x, envelope(x, line)[0])  # so that all lines share one grid
            low, high = (end[shown].tolist() for end in (y.min(0), y.max(0)))
            if len(y) > 1:
                band = Series(f"{label}, range of {len(y)} seeds", x[shown].tolist(), color=color)
                series.append(replace(band, low=low, high=high))
                label = f"{label}, mean"
        elif noisy and width > 1:
            line, window = smoothed(y, width), max(window, width)
            # Several noisy curves over their logged values would be a gray field.
            if alone:
                faint = _line(f"{label}, as logged", x, y)
                series.append(replace(faint, color=color, dash=dash, weight="faint"))
                label = f"{label}, smoothed"
        series.append(replace(_line(label, x, line), color=color, dash=dash, weight=weight))
        ends.append(f"{label} from {line[0]:.4g} to {line[-1]:.4g}".lstrip())
    return Plot(
        name,
        title,
        unit,
        f"{title} over {more.get('over', 'step')}: {'; '.join(ends)}.",
        tuple(series),
        note=treatment(longest, window),
        sources=tuple({link.text: link for one in drawn for link in one.sources}.values()),
        marks=tuple(step for one in drawn for step in one.curve.broken),
        **more,
    )


def _in_words(drawn: Sequence[Drawn], title: str, *, as_share: bool) -> Line:
    """`Eval loss: FP8 1.234 at step 10; FP8 1.1 at step 20; BF16 ...`."""
    parts: list[str | Num] = []
    for label, (x, y, _), sources, *_ in drawn:
        for step, value in zip(x, y.mean(0) if y.ndim > 1 else y, strict=True):
            shown = replace(sources[0], text=percent(value) if as_share else f"{value:.4g}")
            parts += [f"; {label} ".replace("  ", " "), shown, f" at step {step:,.0f}"]
    return Line((f"{title}: {parts[0]}".replace("; ", ""), *parts[1:], "."))


def _line(label: str, x: Floats, y: Floats) -> Series:
    """A thinned line; of a curve without a name, what was appended to it is the label."""
    x, y = envelope(x, y)
    return Series(label.lstrip(", "), x.tolist(), y.tolist())


def metric_plot(
    runs: Sequence[PageSource],
    keys: dict[str, str],
    name: str,
    title: str,
    unit: str,
    *,
    seconds: int = 1,
    **more: Any,
) -> Plot | Line | None:
    """Logged metrics of runs, without losses where a method's says nothing; None if there are none.

    Args:
        keys: key of a metric -> its name in the legend; an empty one: the run's.
        seconds: of one unit of time, for a plot over time.
        **more: as of `plot_of`; with a unit of time as `over`, the metrics are drawn over the
            logged seconds.
    """
    over, drawn = "step" if more.get("over", "step") == "step" else "seconds", list[Drawn]()
    for s in runs:
        for key, label in keys.items():
            if key.endswith("loss") and key not in s.run.method.columns:
                continue
            one = curve(s.run.rows, key, over)
            one = one._replace(x=one.x / seconds)
            source = s.num(s.label or METRICS, METRICS, key)
            drawn.append(Drawn(label or s.label, one, [source], len(drawn), key in NOISY))
    return plot_of(drawn, name, title, unit, **more)


def row_of(*plots: Plot | Line | None, title: str = "", note: str = "") -> list[PlotRow]:
    """Plots side by side, or nothing; what they draw alike has one legend."""
    shown = tuple(plot for plot in plots if isinstance(plot, Plot))
    said = tuple(line for line in plots if isinstance(line, Line))
    return [PlotRow(shown, title, note, said)] if shown or said else []


def loss_plots(runs: Sequence[PageSource]) -> list[PlotRow]:
    """Losses over steps; of one run in one plot, and over time."""
    both = {"loss": "training", "eval_loss": "eval"}
    unit = UNIT if all(s.run.method.is_text for s in runs) else ""
    if len(runs) > 1:
        titles = {"loss": "Training loss", "eval_loss": "Eval loss"}
        plots = [metric_plot(runs, {k: ""}, k, x, unit, size="wide") for k, x in titles.items()]
        return [row for plot in plots for row in row_of(plot)]
    (s,) = runs
    times = [curve(s.run.rows, key, "seconds").x for key in both]
    most = max((x[-1] for x in times if len(x)), default=0.0)
    # The largest unit of which the axis still has several.
    over, seconds = next((unit, n) for minutes, unit, n in CLOCK if most <= 60 * minutes)
    clock: Any = {"seconds": seconds, "over": over, "size": "wide"}
    over_steps = metric_plot(runs, both, "loss", "Training and eval loss", unit, size="wide")
    over_time = metric_plot(runs, both, "loss_over_time", "Loss over time", unit, **clock)
    # What is too little to draw is said over steps.
    return [*row_of(over_steps), *row_of(over_time if isinstance(over_time, Plot) else None)]


def speed_plots(runs: Sequence[PageSource]) -> list[PlotRow]:
    """Gradient norm, learning rate and tokens per second over steps."""
    speed, gradient, rate = {"tokens_per_s": ""}, {"grad_norm": ""}, {"learning_rate": ""}
    return row_of(
        metric_plot(runs, gradient, "gradient_norm", "Gradient norm", "L2", **HALF),
        metric_plot(runs, rate, "learning_rate", "Learning rate", "", **HALF),
        metric_plot(runs, speed, "speed", "Speed", "tokens per second", **HALF),
    )


OF_METHODS = yaml.safe_load((TEMPLATES / "methods.yaml").read_text("utf-8"))


def method_plots(runs: Sequence[PageSource]) -> list[PlotRow]:
    """Rewards, accuracies and answers over steps, of methods that have them."""
    rows, seen = list[PlotRow](), {key for s in runs for row in s.run.rows for key in row}
    for row in OF_METHODS:
        plots = []
        for kind in row:
            fields = dict(kind)
            columns = {k: label for k, label in fields.pop("columns").items() if k in seen}
            if len(runs) > 1:  # a line for each, of the first
                columns = dict.fromkeys([*columns][:1], "")
            plots.append(metric_plot(runs, columns, **fields, size="half"))
        rows += row_of(*plots)
    return rows


# ------------------------------------------------------------------------------------------ health

MEASURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "snr_db": (
        "Signal over quantization noise",
        "dB",
        "Higher keeps more; E4M3 lies some six dB above E5M2.",
        {"least": 4.0},
    ),
    "overflow": (
        "Overflow", "", "Share of values that a cast saturated.",
        {"from_zero": True, "percent": True},
    ),
    "underflow": (
        "Underflow", "", "Share of values that a cast made zero.",
        {"from_zero": True, "percent": True},
    ),
    "amax": ("Largest magnitude", "", "The amax that scales follow.", {"log": True}),
}  # fmt: skip
"""Measure of an operand -> title, unit and note of its row, further fields of its plots."""
OTHERS = {
    "grad_snr": ("Gradient signal over noise", "ratio"),
    "update_ratio": ("Update relative to weight", "ratio of norms"),
}
"""Measure of a layer group, without an operand -> title and unit."""
_HEALTH_KEY = re.compile(r"health/[^/]+/\w+$")
"""`health/<layer group>/<operand>_<measure>`, or without an operand."""


def health(s: PageSource) -> list[PlotRow | Line]:
    """Rows of plots by measure, an operand a plot, and lines on measures that are always zero."""
    # Most rows hold none of these keys: looked for once, not for every key.
    rows = [row for row in s.run.rows if any(map(_HEALTH_KEY.match, row))]
    logged = sorted({key for row in rows for key in row if _HEALTH_KEY.match(key)})
    numbers = {g: i for i, g in enumerate(dict.fromkeys(key.split("/")[1] for key in logged))}

    def drawn(measure: str) -> list[Drawn]:
        keys = {g: key for g in numbers if (key := f"health/{g}/{measure}") in logged}
        link = s.num(METRICS, METRICS, f"health/*/{measure}")
        return [Drawn(g, curve(rows, key), [link], numbers[g]) for g, key in keys.items()]

    found: list[PlotRow | Line] = []
    for measure, (title, unit, note, more) in MEASURES.items():
        plots, silent = list[Plot | Line | None](), list[str]()
        for operand, label in OPERANDS.items():
            lines = drawn(f"{operand}_{measure}")
            # A flat line at zero would look like a plot that failed.
            if more.get("percent") and lines and not any(one.curve.y.any() for one in lines):
                silent.append(label)
                continue
            name = f"{measure.removesuffix('_db')}_{label}"
            plots.append(plot_of(lines, name, label.capitalize(), unit, **more))
        found += row_of(*plots, title=title, note=note)
        if silent:
            link = s.num(f"no {measure}", METRICS, f"health/*/*_{measure}")
            found.append(Line((f"{' and '.join(silent).capitalize()}: ", link, " at all.")))
    others = (
        plot_of(drawn(measure), measure, title, unit, log=True)
        for measure, (title, unit) in OTHERS.items()
    )
    return [*found, *row_of(*others, title="Gradients and updates")]
