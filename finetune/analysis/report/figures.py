"""Plots as SVG in the page's theme, and as PNG.

Series differ in color (`c1` to `c8`) and dash pattern, so that no plot depends on color alone. In
both themes text has a contrast of at least 4.5 to its background, lines of 3 (WCAG 2.2);
`tests/analysis/test_report_plots.py` computes it.

Matplotlib has no CSS: a plot is drawn in the colors of the light theme, each of which the SVG then
replaces by its variable (`var(--c1)`), so that one drawing serves light, dark and print. Text stays
text (`svg.fonttype: none`) in the page's font. Ids get the plot's name as a prefix, as a page has
many plots; metadata, which contains web addresses, is removed.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

import yaml

from finetune.analysis.report.elements import Forest, Plot, Series, signed
from finetune.errors import MissingExtraError, install_hint

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise MissingExtraError(
        "pages and pictures need matplotlib, which is not installed",
        where="the extra `report`",
        fix=install_hint("report"),
    ) from error

TEMPLATES = Path(__file__).parent / "templates"
_THEMES = yaml.safe_load((TEMPLATES / "themes.yaml").read_text("utf-8"))
LIGHT, DARK = ({n: pair[theme] for n, pair in _THEMES.items()} for theme in ("light", "dark"))
COLORS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")


def style(number: int) -> tuple[str, str]:
    """Color and dash of the series with this number; 40 of them differ."""
    # Moved on by one each round of colors, so that no pair of color and dash comes twice before 40.
    turn = number + number // len(COLORS)
    return COLORS[number % len(COLORS)], list(DASHES)[turn % len(DASHES)]


DASHES: dict[str, Any] = {
    "solid": "solid",
    "dashed": (0, (5, 2.5)),
    "dotted": (0, (1.2, 2)),
    "dashdot": (0, (6, 2, 1.2, 2)),
    "long": (0, (10, 3)),
}
SIZES = {
    "wide": {"wide": (920, 330), "phone": (340, 250)},
    "half": {"wide": (460, 270), "phone": (340, 250)},
    "third": {"any": (310, 215)},
}
"""CSS pixels of plots by kind of screen, without scaling, so that text keeps its size."""
FOREST_ROW = 50
"""CSS pixels per row of a forest plot."""
PLOT_STYLE: Any = {
    key: LIGHT.get(value, value) if isinstance(value, str) else value
    for key, value in yaml.safe_load((TEMPLATES / "plots.yaml").read_text("utf-8")).items()
}


def svgs(plot: Plot) -> dict[str, str]:
    """`<svg>` of a plot by kind of screen."""
    found = {}
    for screen, (width, height) in SIZES[plot.size].items():
        name = f"{plot.name}-phone" if screen == "phone" else plot.name
        # Ids in an SVG are hashes; with a salt a page that is made again is the same, byte by byte.
        with rc_context(PLOT_STYLE | {"svg.hashsalt": name}):
            buffer = io.StringIO()
            drawn(plot, width, height).savefig(buffer, format="svg", transparent=True)
        found[screen] = _themed(buffer.getvalue(), plot, name)
    return found


def save_picture(plot: Plot, file: Path | io.BytesIO) -> None:
    """Write the plot with its title and legend as PNG, on white."""
    with rc_context(PLOT_STYLE):
        figure = drawn(plot, *((860, 380) if plot.size == "wide" else (560, 340)))
        axes = figure.axes[0]
        title = f"{plot.title}, {plot.unit}".removesuffix(", ")
        axes.set_title(title, loc="left", fontsize=13, weight="bold")
        if plot.legend:
            artists = {x.get_label(): x for x in (*axes.lines, *axes.collections)}
            handles = [artists[series.label] for series in plot.legend]
            axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=4)
        figure.savefig(file, dpi=108, facecolor="white", bbox_inches="tight")


def drawn(plot: Plot, width: int, height: int) -> Figure:
    """The plot in a figure of `width` x `height` CSS pixels."""
    figure = Figure(dpi=72)
    axes, left = figure.add_subplot(), 46
    if isinstance(plot, Forest):
        height, left = 60 + FOREST_ROW * len(plot.gaps), 90
        _forest(axes, plot)
    else:
        draw_plot(axes, plot, ticks=max(4, width // 100))
    figure.set_size_inches(width / 72, height / 72)
    figure.subplots_adjust(left / width, 34 / height, 1 - 14 / width, 1 - 12 / height)
    return figure


# ---------------------------------------------------------------------------------------- drawing


def draw_plot(axes: Axes, plot: Plot, ticks: int) -> None:
    """Draw series, lines and marks, with at most `ticks` figures on the horizontal axis."""
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
    low, high = axes.get_ylim()
    if plot.log and min(values) > 0 and max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(log_locator(*axes.get_ylim()))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        # Or noise of a hundredth would fill the plot's whole height.
        if high - low < plot.least:
            middle = (low + high) / 2
            axes.set_ylim(middle - plot.least / 2, middle + plot.least / 2)
        axes.yaxis.set_major_locator(MaxNLocator(6, min_n_ticks=4, steps=[1, 2, 2.5, 5, 10]))
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if plot.percent else _tick))
    whole: dict[str, Any] = {"integer": True, "min_n_ticks": 1, "steps": [1, 2, 5, 10]}
    settings = whole if plot.over == "step" else {"steps": [1, 2, 2.5, 5, 10]}
    axes.xaxis.set_major_locator(MaxNLocator(ticks, **settings))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


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
        marker="o" if len(series.x) == 1 else None,
        markersize=5, markeredgewidth=0,
    )  # fmt: skip
    line.set_gid(f"series-{number}")


def _forest(axes: Axes, plot: Forest) -> None:
    """One row per gap, with its intervals and the gaps of single seeds."""
    points = [v for r in plot.gaps.values() for v in (*(r.interval or ()), *r.of_seeds, r.gap)]
    reach = max(max(plot.margins) * 1.3, *(1.08 * abs(v) for v in points))
    ink, muted = LIGHT["ink"], LIGHT["muted"]
    axes.axvline(0, color=muted, linewidth=0.9)
    for number, (row, margin) in enumerate(zip(plot.gaps.values(), plot.margins, strict=True)):
        inside = {"color": LIGHT["accent"], "alpha": 0.09, "linewidth": 0}
        axes.fill_between([-margin, margin], -number - 0.5, -number + 0.5, **inside)
        for pair, width in ((row.interval, 1.6), (row.equivalence_interval, 5)):
            if pair:
                axes.hlines(-number, *pair, color=ink, linewidth=width)
        seeds = row.of_seeds
        axes.plot(seeds, [-number - 0.22] * len(seeds), "|", color=muted, markersize=7)
        (dot,) = axes.plot([row.gap], [-number], "o", color=ink, markersize=9)
        dot.set_gid(f"series-{number}")
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-len(plot.gaps) + 0.5, 0.5)
    axes.grid(visible=False)
    axes.set_yticks([-number for number in range(len(plot.gaps))], list(plot.gaps))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(value) if value else "0%"))


# ------------------------------------------------------------------------------------------ theme


def _themed(svg: str, plot: Plot, name: str) -> str:
    # Within a page an SVG has no XML declaration and no doctype.
    svg = svg[svg.index("<svg") :]
    for part in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(part, "", svg, flags=re.S)
    svg = re.sub(r"#[0-9a-f]{6}", lambda m: _VARIABLES.get(m[0], m[0]), svg)
    # The page's own font, by inheritance.
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
