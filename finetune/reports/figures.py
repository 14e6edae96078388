"""Plots as SVG that follows the page's theme, and as PNG.

Matplotlib knows no CSS. So each plot is drawn in the colours of the light theme, and in the SVG
every one of them is then replaced by the variable it stands for (`var(--c1)`): one drawing serves
light, dark and print. Text stays text (`svg.fonttype: none`), in the page's own font. Ids get the
plot's name in front, since a page holds many plots; metadata, which names web addresses, goes.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from finetune.reports.content import Forest, Plot, Series, signed
from finetune.reports.theme import LIGHT

DASHES: dict[str, Any] = {
    "solid": "solid",
    "dashed": (0, (5, 2.5)),
    "dotted": (0, (1.2, 2)),
    "dashdot": (0, (6, 2, 1.2, 2)),
    "long": (0, (10, 3)),
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "text.color": LIGHT["ink"],
    "legend.frameon": False,
    "path.simplify_threshold": 0.3,
}


def to_svg(plot: Plot | Forest, width: int, height: int, suffix: str = "") -> str:
    """The plot as an `<svg>` element for a page, `width` x `height` CSS pixels or less.

    Args:
        suffix: tells two drawings of the same plot apart.
    """
    name = f"{plot.name}{suffix}"
    with rc_context(_STYLE | {"svg.hashsalt": name}):
        buffer = io.StringIO()
        _figure(plot, width, height, 1.0).savefig(buffer, format="svg", transparent=True)
    return _themed(buffer.getvalue(), plot, name)


def to_png(plot: Plot | Forest, file: Path) -> None:
    """The plot as a picture with its title and legend, on white."""
    width, height = (860, 420) if plot.wide else (560, 380)
    with rc_context(_STYLE):
        figure = _figure(plot, width, height, 1.0, titled=True)
        figure.savefig(file, dpi=140, facecolor="white")


def _figure(plot: Plot | Forest, width: int, height: int, scale: float, titled: bool = False) -> Any:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72 * scale)
    axes = figure.add_subplot()
    if isinstance(plot, Forest):
        _forest(axes, plot, narrow=width < 500)
        left, bottom = 12, 34
        low = axes.get_ylim()
        axes.set_ylim(low)
    else:
        _plot(axes, plot)
        left, bottom = 46, 34
    top = 44 if titled else 12
    legend = plot.legend if titled else ()
    if legend:
        columns = min(len(legend), 4 if width > 700 else 3)
        top += 18 * -(-len(legend) // columns)
        handles = [line for line in axes.lines if line.get_label() in {s.label for s in legend}]
        handles += [b for b in axes.collections if b.get_label() in {s.label for s in legend}]
        figure.legend(
            handles=handles, loc="upper left", ncols=columns, fontsize=10, handlelength=2.6,
            bbox_to_anchor=((left - 10) / width, 1 - 30 / height),
        )  # fmt: skip
    if titled:
        x, y = left / width, 1 - 24 / height
        figure.text(x, y, f"{plot.title}, {plot.unit}", fontsize=13, weight="bold")
    figure.subplots_adjust(left / width, bottom / height, 1 - 14 / width, 1 - top / height)
    return figure


# ---------------------------------------------------------------------------------------- drawing


def _plot(axes: Axes, plot: Plot) -> None:
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
    axes.set_xlabel("step", loc="right", labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.01)
    if plot.log and all(min((*s.y, *s.low), default=1) > 0 for s in plot.series):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    if plot.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif not plot.log:
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _: int) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}".replace("-", "\u2212")


def _draw(axes: Axes, series: Series, number: int) -> None:
    colour = LIGHT[series.colour]
    if len(series.low):
        band = axes.fill_between(
            series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0,
            label=series.label,
        )  # fmt: skip
        band.set_gid(f"series-{number}")
        return
    (line,) = axes.plot(
        series.x,
        series.y,
        color=colour,
        linestyle="none" if series.dash == "none" else DASHES[series.dash],
        linewidth=0.9 if series.faint else 1.8,
        alpha=0.4 if series.faint else 1.0,
        marker=series.marker or ("o" if len(series.x) == 1 else None),
        markersize=5,
        markeredgewidth=0,
        label=series.label,
    )
    line.set_gid(f"series-{number}")


def _forest(axes: Axes, plot: Forest, *, narrow: bool) -> None:
    """Each row: its name and gap above, its intervals below; zero and the margin as uprights."""
    reach = max(
        plot.margin * 1.6,
        *(abs(v) * 1.15 for r in plot.rows for v in (*(r.interval or ()), *r.seeds, r.gap)),
    )
    axes.axvspan(-plot.margin, plot.margin, color=LIGHT["accent"], alpha=0.09, linewidth=0)
    for at in (-plot.margin, plot.margin):
        axes.axvline(at, color=LIGHT["accent"], linewidth=1, linestyle=DASHES["dashed"])
    axes.axvline(0, color=LIGHT["muted"], linewidth=0.9)
    for number, row in enumerate(plot.rows):
        y = -number
        for low_high, width in ((row.interval, 1.6), (row.inner, 5)):
            if low_high:
                axes.plot(
                    low_high, (y, y), color=LIGHT["ink"], linewidth=width, solid_capstyle="butt"
                )
        axes.plot(row.seeds, [y - 0.2] * len(row.seeds), "|", color=LIGHT["muted"], markersize=7)
        (dot,) = axes.plot([row.gap], [y], "o", color=LIGHT["ink"], markersize=9)
        dot.set_gid(f"series-{number}")
        said = f"{signed(row.gap)}"
        if row.interval:
            said += f" ({signed(row.interval[0])} to {signed(row.interval[1])})"
        for x, text, align in ((0.0, row.label, "left"), (1.0, said, "right")):
            axes.annotate(
                text, (x, y + 0.3), xycoords=("axes fraction", "data"), ha=align, va="bottom",
                fontsize=10 if narrow else 11,
            )  # fmt: skip
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-len(plot.rows) + 0.5, 0.85)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 7))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:+.3g}%".replace("-", "\u2212"))
    )


# ------------------------------------------------------------------------------------------ theme


def _themed(svg: str, plot: Plot | Forest, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    for part in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        svg = re.sub(part, "", svg, flags=re.S)
    svg = re.sub(r"#[0-9a-f]{6}", lambda m: _VARIABLES.get(m[0], m[0]), svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    head, end, body = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    about = html.escape(plot.about)
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">'
        f'{html.escape(plot.title)}</title><desc id="{name}-desc">{about}</desc>'
        + re.sub(r"\n\s*", "\n", body).strip()
    )


_VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
