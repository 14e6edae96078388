"""One picture of a run or a comparison, for wherever a link to its page is shown.

1200 x 630 pixels, the size that `og:image` is displayed in: title, verdict, up to four figures, and
the loss.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from finetune.analysis.report.elements import Page, Plot
from finetune.analysis.report.figures import LIGHT, PLOT_STYLE, draw_plot, legend_handles, set_ticks

WIDTH, HEIGHT = 1200, 630
MARGIN = 60
"""Pixels around the text."""
_COLORS = {"good": LIGHT["accent"], "bad": LIGHT["bad"], "plain": LIGHT["ink"]}


def draw_summary(page: Page, file: Path) -> None:
    """Draw the picture as PNG."""
    with rc_context(PLOT_STYLE):
        # At 72 points an inch a point is a pixel.
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
        _write(figure, page.title.text, 52, size=34, weight="bold")
        _write(figure, page.verdict.text, 112, size=30, weight="bold", color=_COLORS[page.tone])
        if page.chart is not None:
            _chart(figure, page.chart)
        for number, fact in enumerate(page.facts):
            _fact(figure, number, fact, columns=1 if page.chart else 2)
        foot = "  ·  ".join(
            filter(None, (page.setting.text.replace(", ", "  ·  "), "fp8-finetune"))
        )
        _write(figure, foot, HEIGHT - 52, size=17, color=LIGHT["muted"])
        figure.savefig(file, facecolor=LIGHT["paper"])


def _write(
    figure: Figure, text: str, top: float, *, left: float = MARGIN, room: float = 0, **look: object
) -> None:
    """Write text `top` pixels below the upper edge, smaller where it is wider than `room`."""
    room = room or WIDTH - MARGIN - left
    shown = figure.text(left / WIDTH, 1 - top / HEIGHT, text, va="top", **look)  # pyright: ignore
    if (width := shown.get_window_extent().width) > room:
        shown.set_fontsize(float(shown.get_fontsize()) * room / width)


def _chart(figure: Figure, plot: Plot) -> None:
    left, top, width, height = MARGIN + 40, 212, 700, 296
    _write(figure, plot.title, 178, size=17, color=LIGHT["muted"])
    axes = figure.add_axes(
        (left / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT)
    )
    with rc_context({"font.size": 15}):
        draw_plot(axes, replace(plot, perplexity=False))
        set_ticks(axes, plot, ticks=7)
        axes.set_facecolor("none")
        axes.tick_params(labelsize=15)
    for line in axes.lines:
        line.set_linewidth(1.6 * line.get_linewidth())
    if plot.legend:
        axes.legend(handles=legend_handles(axes, plot), loc="upper right", fontsize=15)


def _fact(figure: Figure, number: int, fact: tuple[str, str, str], columns: int) -> None:
    label, value, note = fact
    row, column = divmod(number, columns)
    left, top = (870, 178 + 98 * row) if columns == 1 else (MARGIN + 520 * column, 210 + 150 * row)
    room = WIDTH - left - MARGIN / 2 if columns == 1 else 480
    _write(figure, label, top, left=left, room=room, size=16, color=LIGHT["muted"])
    _write(figure, value, top + 20, left=left, room=room, size=32, weight="bold")
    _write(figure, note, top + 60, left=left, room=room, size=15, color=LIGHT["muted"])
