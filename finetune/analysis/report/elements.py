"""Elements of a page: figures with their sources, tables, and the plots to draw.

A number is a `Num`, made with the file and key it was read from, which the page turns into a link.
Text of models and data sets is untrusted: it is `str`, which templates escape.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from finetune import units
from finetune.analysis.compare.result import LossGap
from finetune.runs.card import without_paths
from finetune.runs.folder import RunFolder, finite

METRICS, RECEIPT, REPORT, CONFIG = "metrics.jsonl", "receipt.json", "report.json", "config.yaml"
MISSING = "–"
Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True)
class Num:
    """A figure with its source: `href` relative to the page, `key` inside that file."""

    text: str
    href: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        return bool(self.text)

    def __html__(self) -> str:
        if not self.href or not self.text:
            return html.escape(self.text)
        title = f"{self.href.rpartition('/')[2]}: {self.key}" if self.key else self.href
        # Paths and texts come from runs, which may be somebody else's.
        href, title, text = map(html.escape, (self.href, title, self.text))
        return f'<a class="n" href="{href}" title="{title}">{text}</a>'

    @property
    def capitalized(self) -> Num:
        return replace(self, text=self.text[:1].upper() + self.text[1:])


class Line(tuple[str | Num, ...]):
    """A cell of several parts: `Line((Num("0.31", ...), " ± ", Num("0.01", ...)))`."""

    def __html__(self) -> str:
        return "".join(p.__html__() if isinstance(p, Num) else html.escape(p) for p in self)

    @property
    def text(self) -> str:
        return "".join(p.text if isinstance(p, Num) else p for p in self)


Cell = str | Num | Line


@dataclass(frozen=True)
class PageSource:
    """A folder whose files a page links to, the page's folder `base`, and a name for the page."""

    folder: Path
    base: Path
    label: str = ""

    @cached_property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    def href(self, file: str = "") -> str:
        """Relative, percent-encoded path from the page to a file."""
        target = os.path.relpath(self.folder.resolve() / file, self.base.resolve())
        # A `#` or a space in a folder's name would end the link there.
        return quote(Path(target).as_posix())

    def link(self, text: str) -> Num:
        """Link to the folder itself."""
        return Num(text, self.href() + "/")

    def num(self, text: str, file: str, key: str) -> Num:
        """A figure read from `file` under `key`; without a link if missing."""
        return Num(text) if text == MISSING else Num(text, self.href(file), key)

    def receipt(self, key: str, form: Callable[[Any], str] | None = None) -> Num:
        """Entry of `receipt.json` under a dotted key: a formatted number, or a text or none."""
        value = self.facts(key)
        text = figure(value, form) if form else without_paths(str(value or ""))
        return self.num(text, RECEIPT, key)

    def facts(self, key: str) -> Any:
        """Value of `receipt.json` under a dotted key; None if missing."""
        return at(self.run.receipt, key)


def at(value: Any, key: str) -> Any:
    """Value of nested mappings under a dotted key; None if missing."""
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head.

    Attributes:
        numeric: right-aligned columns.
        shares: columns drawn as bars, with a share of the whole (0 to 1) for each row.
    """

    head: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    numeric: tuple[int, ...] = ()
    shares: dict[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """A line of a plot, or a band between `low` and `high`.

    Attributes:
        color: `c1` to `c8`, `ink` or `muted`, variables of the page's theme.
        weight: `faint` lines are pale background.
        listed: True if a legend names it.
    """

    label: str
    x: Sequence[float] = ()
    y: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    color: str = "c1"
    dash: str = "solid"
    weight: Literal["normal", "thin", "faint"] = "normal"
    listed: bool = True


@dataclass(frozen=True)
class Plot:
    """A plot of series over steps, or over time.

    Attributes:
        name: stem of its file, `loss` for `plots/loss.png`.
        about: alternative text.
        note: treatment of the data, below the plot.
        sources: files it was drawn from.
        log: use a logarithmic vertical axis.
        percent: show the vertical axis in per cent.
        lines: horizontal lines, (height, label).
        marks: steps at which the value was not finite.
        size: `wide` is the page's width; `half` and `third` stand side by side.
        least: smallest span of the vertical axis, so that small noise looks small.
        over: horizontal axis, `step` or a unit of time.
    """

    name: str
    title: str
    unit: str
    about: str
    series: tuple[Series, ...] = ()
    note: str = ""
    sources: tuple[Num, ...] = ()
    log: bool = False
    percent: bool = False
    lines: tuple[tuple[float, str], ...] = ()
    marks: tuple[float, ...] = ()
    size: Literal["wide", "half", "third"] = "third"
    from_zero: bool = False
    least: float = 0.0
    over: str = "step"

    @property
    def legend(self) -> tuple[Series, ...]:
        """Series that a legend names; none for a single series."""
        listed = tuple(s for s in self.series if s.listed)
        return listed if len(listed) > 1 else ()


@dataclass(frozen=True)
class Forest(Plot):
    """Gaps of losses by title with their intervals, against the margin of equivalence of each."""

    gaps: dict[str, LossGap] = field(default_factory=dict)
    margins: Sequence[float] = ()


@dataclass(frozen=True)
class PlotRow:
    """Plots of one size side by side under a title and a note; numbers too few to be one, said."""

    plots: tuple[Plot, ...]
    title: str = ""
    note: str = ""
    said: tuple[Line, ...] = ()

    @property
    def legend(self) -> tuple[Series, ...]:
        """Series of all plots, each once."""
        return tuple({s.label: s for plot in self.plots for s in plot.legend}.values())


@dataclass(frozen=True)
class Page:
    """A report: its template with the parts to fill in.

    Attributes:
        title: subject of the page.
        setting: device and date, after the title.
        verdict: headline.
        tone: color of the verdict.
    """

    title: Line
    setting: Line
    verdict: Num
    tone: Tone
    template: str
    parts: dict[str, Any]

    @property
    def plots(self) -> list[Plot]:
        rows = (row for part in self.parts.values() if isinstance(part, list) for row in part)
        return [plot for row in rows if isinstance(row, PlotRow) for plot in row.plots]


def figure(value: Any, form: Callable[..., str], *options: Any) -> str:
    """Format a number with a function of `finetune.units`; a missing one is a dash."""
    return form(value, *options) if finite(value) is not None else MISSING


def fixed(value: Any) -> str:
    """Format as `1.3657`; other values unchanged, a missing one is a dash."""
    if finite(value) is not None:
        return f"{value:.4f}"
    return MISSING if value is None else str(value)


def signed(share: float, digits: int = 2) -> str:
    """Format 0.004 as `+0.40%`, with a true minus sign."""
    return units.percent(share, digits, sign=True).replace("-", "\u2212")
