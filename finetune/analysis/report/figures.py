"""Plots as SVG in the page's theme, and as PNG.

Series differ in color (`c1` to `c8`) and dash pattern, so that no plot depends on color alone. In
both themes text has a contrast of at least 4.5 to its background, lines of 3 (WCAG 2.2);
`tests/analysis/test_report.py` computes it.

Matplotlib has no CSS: a plot is drawn in the colors of the light theme, each of which the SVG then
replaces by its variable (`var(--c1)`), so that one drawing serves light, dark and print. Text stays
text (`svg.fonttype: none`) in the page's font. Ids get the plot's name as a prefix, as a page has
many plots; metadata, which contains web addresses, is removed.
"""

from __future__ import annotations

import html
import io
import math
import re
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import yaml
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)
from PIL.Image import Image, frombytes

from finetune.analysis.report.elements import Forest, Plot, Series, signed

TEMPLATES = Path(__file__).parent / "templates"
_THEMES = yaml.safe_load((TEMPLATES / "themes.yaml").read_text("utf-8"))
LIGHT, DARK = ({n: pair[theme] for n, pair in _THEMES.items()} for theme in ("light", "dark"))
COLORS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
PATTERNS = ("solid", "dashed", "dashdot", "dotted", "long")


class Look(TypedDict):
    color: str
    dash: str


def style(number: int) -> Look:
    """Color and dash of the series with this number; 40 of them differ."""
    turn = number + number // len(COLORS)
    return {"color": COLORS[number % len(COLORS)], "dash": PATTERNS[turn % len(PATTERNS)]}


DASHES: dict[str, Any] = {
    "solid": "solid",
    "dashed": (0, (5, 2.5)),
    "dotted": (0, (1.2, 2)),
    "dashdot": (0, (6, 2, 1.2, 2)),
    "long": (0, (10, 3)),
}
FOREST_ROW = 62
"""CSS pixels per row of a forest plot."""
PLOT_STYLE: Any = {
    key: LIGHT.get(value, value) if isinstance(value, str) else value
    for key, value in yaml.safe_load((TEMPLATES / "plots.yaml").read_text("utf-8")).items()
}


class Drawing:
    """A plot, drawn once and given out in several sizes."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self._figures: dict[bool, Figure] = {}

    def svg(self, width: int, height: int, suffix: str = "") -> str:
        """Give an `<svg>` of at most `width` x `height` CSS pixels; `suffix` makes ids unique."""
        name = f"{self.plot.name}{suffix}"
        with rc_context(PLOT_STYLE | {"svg.hashsalt": name}):
            buffer = io.StringIO()
            self._sized(width, height, top=12).savefig(buffer, format="svg", transparent=True)
        return _themed(buffer.getvalue(), self.plot, name)

    def image(self) -> Image:
        """Give the plot with its title and legend, on white."""
        plot = self.plot
        width, height = (860, 420) if plot.size == "wide" else (560, 380)
        if isinstance(plot, Forest):
            height = 120 + FOREST_ROW * len(plot.gaps)
        columns = min(len(plot.legend), 4 if width > 700 else 3) or 1
        rows = -(-len(plot.legend) // columns)
        height += 18 * max(0, rows - 10)  # a legend of 40 fits; those of more make it taller
        with rc_context(PLOT_STYLE):
            figure = self._sized(width, height, top=44 + 18 * rows)
            left = figure.subplotpars.left
            title = f"{plot.title}, {plot.unit}".removesuffix(", ")
            added: list[Any] = [
                figure.text(left, 1 - 24 / height, title, fontsize=13, weight="bold")
            ]
            if plot.legend:
                added += [
                    figure.legend(
                        handles=legend_handles(figure.axes[0], plot), loc="upper left",
                        ncols=columns, fontsize=10, handlelength=2.6,
                        bbox_to_anchor=(left - 10 / width, 1 - 30 / height),
                    )
                ]  # fmt: skip
            buffer = io.BytesIO()
            figure.savefig(buffer, format="rgba", dpi=108, facecolor="white")
            for artist in added:
                artist.remove()
        size = round(width * 1.5), round(height * 1.5)
        return frombytes("RGBA", size, buffer.getvalue()).convert("RGB")

    def save(self, file: Path) -> None:
        """Write `image` as PNG; a third more bytes than at the default level, in half the time."""
        self.image().save(file, compress_level=1)

    def _sized(self, width: int, height: int, top: int) -> Figure:
        plot, narrow = self.plot, width < 500
        forest = isinstance(plot, Forest)
        figure = self._figures.get(forest and narrow)
        if figure is None:
            figure = self._figures[forest and narrow] = Figure(dpi=72)
            axes = figure.add_subplot()
            _forest(axes, plot, narrow=narrow) if forest else draw_plot(axes, plot)
        figure.set_size_inches(width / 72, height / 72)
        if forest:
            left, right, bottom = (12, 14, 28) if narrow else (110, 190, 28)
        else:
            left, right, bottom = 46, 40 if plot.perplexity else 14, 34
            set_ticks(figure.axes[0], plot, ticks=9 if width > 500 else 6 if width > 400 else 4)
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        return figure


def legend_handles(axes: Axes, plot: Plot) -> list[Any]:
    """What was drawn of each series in the legend, once by label."""
    drawn = {x.get_label(): x for x in (*axes.lines, *axes.collections)}
    return [drawn[s.label] for s in plot.legend]


# ---------------------------------------------------------------------------------------- drawing


def draw_plot(axes: Axes, plot: Plot) -> None:
    """Draw series, lines and marks; `set_ticks` sets the horizontal axis for a width."""
    for number, series in enumerate(plot.series):
        _draw(axes, series, number)
    for height, label in plot.lines:
        axes.axhline(height, color=LIGHT["muted"], linewidth=0.9, linestyle=DASHES["dotted"])
        axes.annotate(
            label, (1, height), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", fontsize=10, color=LIGHT["muted"],
        )  # fmt: skip
    for step in plot.marks:
        axes.axvline(step, color=LIGHT["bad"], linewidth=1.2)
    values = [value for s in plot.series for value in (*s.y, *s.low, *s.high)]
    axes.set_xlabel(plot.over, loc="right", labelpad=1)
    axes.margins(x=0.01)
    left, right = axes.get_xlim()
    if right - left < 1 and plot.over == "step":  # a single step: no other one is on the axis
        axes.set_xlim((left + right - 1) / 2, (left + right + 1) / 2)
    low, high = axes.get_ylim()
    if plot.log and min(values) > 0 and max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(log_locator(*axes.get_ylim()))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        if high - low < plot.least:
            middle = (low + high) / 2
            axes.set_ylim(middle - plot.least / 2, middle + plot.least / 2)
        axes.yaxis.set_major_locator(MaxNLocator(6, min_n_ticks=4, steps=[1, 2, 2.5, 5, 10]))
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if plot.percent else _tick))
    if plot.perplexity:
        _perplexity(axes)


def set_ticks(axes: Axes, plot: Plot, ticks: int) -> None:
    """Put at most `ticks` figures on the horizontal axis."""
    if plot.over == "step":
        axes.xaxis.set_major_locator(
            MaxNLocator(ticks, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
        )
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))


def _perplexity(axes: Axes) -> None:
    """Axis on the right: exp of a loss in nats per token."""
    right, limits = axes.twinx(), axes.get_ylim()
    right.grid(visible=False)
    low, high = np.exp(limits)
    right.set_yticks([math.log(x) for x in log_locator(low, high).tick_values(low, high)])
    right.set_ylim(limits)
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(math.exp(value))))


def log_locator(low: float, high: float) -> LogLocator:
    """Round values on a logarithmic axis: 1.5, 2, 3 and 5 from 1.2 to 5.6, else 1, 10, 100, ..."""
    within = high / low
    mantissas = (1, 1.5, 2, 3, 5, 7) if within < 10 else (1, 2, 5) if within < 100 else (1,)
    return LogLocator(subs=mantissas, numticks=8)


def _tick(value: float, _: int = 0) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    if abs(value) >= 1e-3 or not value:
        return f"{value:,.4g}".replace("-", "\u2212")
    mantissa, power = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}".replace("-", "\u2212")


def _percent(value: float, _: int) -> str:
    return f"{_tick(100 * value)}%"


def _draw(axes: Axes, series: Series, number: int) -> None:
    color = LIGHT[series.color]
    if len(series.low):
        band = axes.fill_between(
            series.x, series.low, series.high, color=color, alpha=0.18, linewidth=0,
            label=series.label,
        )  # fmt: skip
        band.set_gid(f"series-{number}")
        return
    (line,) = axes.plot(
        series.x, series.y, color=color, linestyle=DASHES[series.dash], label=series.label,
        linewidth={"normal": 1.8, "thin": 1.0, "faint": 0.9}[series.weight],
        alpha=0.4 if series.weight == "faint" else 1.0,
        marker=series.marker or ("o" if len(series.x) == 1 else None),
        markersize=5, markeredgewidth=0,
    )  # fmt: skip
    line.set_gid(f"series-{number}")


def _forest(axes: Axes, plot: Forest, *, narrow: bool) -> None:
    """One row per gap: name, intervals, figures (beside them, or above on a narrow page)."""
    points = [v for r in plot.gaps.values() for v in (*(r.interval or ()), *r.of_seeds, r.gap)]
    reach = max(plot.margin * 1.3, *(1.08 * abs(v) for v in points))
    axes.axvspan(-plot.margin, plot.margin, color=LIGHT["accent"], alpha=0.09, linewidth=0)
    pieces = [(-i - 0.4, -i + 0.2) for i in range(len(plot.gaps))] if narrow else [(-99.0, 1.0)]
    axes.vlines(
        [at for at in (-plot.margin, plot.margin) for _ in pieces],
        [low for low, _ in pieces] * 2, [high for _, high in pieces] * 2,
        color=LIGHT["accent"], linewidth=1, linestyle=DASHES["dashed"],
    )  # fmt: skip
    axes.axvline(0, color=LIGHT["muted"], linewidth=0.9)
    for number, (label, row) in enumerate(plot.gaps.items()):
        y = -number
        for low_high, width in ((row.interval, 1.6), (row.equivalence_interval, 5)):
            if low_high:
                axes.plot(
                    low_high, (y, y), color=LIGHT["ink"], linewidth=width, solid_capstyle="butt"
                )
        seeds = row.of_seeds
        axes.plot(seeds, [y - 0.22] * len(seeds), "|", color=LIGHT["muted"], markersize=7)
        (dot,) = axes.plot([row.gap], [y], "o", color=LIGHT["ink"], markersize=9)
        dot.set_gid(f"series-{number}")
        text = signed(row.gap)
        if row.interval:
            text += f" ({signed(row.interval[0])} to {signed(row.interval[1])})"
        for shown, x, align in (
            (label, 0.0 if narrow else -0.015, "left" if narrow else "right"),
            (text, 1.0 if narrow else 1.015, "right" if narrow else "left"),
        ):
            axes.annotate(
                shown, (x, y + 0.25 * narrow), xycoords=("axes fraction", "data"), ha=align,
                va="bottom" if narrow else "center_baseline", fontsize=11 - narrow,
            )  # fmt: skip
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-len(plot.gaps) + 0.5, 0.75)
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: ("+" if value > 0 else "") + _percent(value, 0))
    )


# ------------------------------------------------------------------------------------------ theme


def _themed(svg: str, plot: Plot, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    for part in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(part, "", svg, flags=re.S)
    svg = re.sub(r"#[0-9a-f]{6}", lambda m: _VARIABLES.get(m[0], m[0]), svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    # Hundredths of a pixel are enough. Text is no attribute, so its figures stay.
    svg = re.sub(r'="[^"]*"', lambda m: re.sub(r"(\d\.\d\d)\d+", r"\1", m[0]), svg)
    head, _, body = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    about = html.escape(plot.about)
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">'
        f'{html.escape(plot.title)}</title><desc id="{name}-desc">{about}</desc>'
        + re.sub(r"\n\s*", "\n", body).strip()
    )


_VARIABLES = {color: f"var(--{name})" for name, color in LIGHT.items()}
