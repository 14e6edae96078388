"""Elements of a page, before they are set in HTML or Markdown.

A number is a `Num`, made with the file and key it was read from, which both renderers turn into a
link. Text of models and data sets is untrusted: it is `str`, which both escape.
"""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from finetune import units
from finetune.runs.folder import Run

METRICS, RECEIPT, REPORT, CONFIG = "metrics.jsonl", "receipt.json", "report.json", "config.yaml"
MISSING = "–"
Tone = Literal["good", "bad", "plain"]
Size = Literal["wide", "half", "third"]


@dataclass(frozen=True)
class Num:
    """A figure with its source: `href` relative to the page, `key` inside that file."""

    text: str
    href: str = ""
    key: str = ""

    def __html__(self) -> str:
        if not self.href:
            return html.escape(self.text)
        title = f"{self.href.rpartition('/')[2]}: {self.key}" if self.key else self.href
        figure = any(c.isdigit() for c in self.text) and len(self.text) < 40
        kind = "n" if figure or re.fullmatch(r"\S+[./]\S*", self.text) else "n text"  # or a file
        return (
            f'<a class="{kind}" href="{html.escape(self.href)}" title="{html.escape(title)}">'
            f"{html.escape(self.text)}</a>"
        )

    @property
    def md(self) -> str:
        return f"[{escape_md(self.text)}]({self.href})" if self.href else escape_md(self.text)


@dataclass(frozen=True)
class Words:
    parts: tuple[str | Num, ...]

    def __html__(self) -> str:
        return "".join(
            part.__html__() if isinstance(part, Num) else html.escape(part) for part in self.parts
        )

    @property
    def md(self) -> str:
        return "".join(p.md if isinstance(p, Num) else escape_md(p) for p in self.parts)

    def __bool__(self) -> bool:
        return bool(self.parts)


def words(*parts: str | Num | Words) -> Words:
    """Concatenate parts, without empty ones."""
    flat: list[str | Num] = []
    for part in parts:
        flat += part.parts if isinstance(part, Words) else [part] if part != "" else []
    return Words(tuple(flat))


def escape_md(text: str) -> str:
    text = re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", html.escape(text, quote=False))
    text = re.sub(r"^(\s*\d*)([.)+-])(?=\s)", r"\1\\\2", text)  # would begin a list
    return re.sub(r"\s*\n\s*", "<br>", text)


@dataclass(frozen=True)
class Source:
    """A folder whose files a page links to, and the folder `base` of the page."""

    folder: Path
    base: Path

    def href(self, file: str = "") -> str:
        """Relative, percent-encoded path from the page to a file."""
        target = os.path.relpath(self.folder.resolve() / file, self.base.resolve())
        return quote(Path(target).as_posix())

    def num(self, text: str, file: str, key: str) -> Num:
        """A figure read from `file` under `key`; without a link if missing."""
        return Num(text) if text == MISSING else Num(text, self.href(file), key)

    def words(self, text: str, file: str, key: str) -> Words:
        return Words((self.num(text, file, key),)) if text else Words(())


@dataclass(frozen=True)
class RunSource(Source):
    """A run folder; `label` is the run's name on the page."""

    label: str = ""

    @cached_property
    def run(self) -> Run:
        return Run(self.folder)


Cell = str | Num | Words


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
    kind: str = "table"


@dataclass(frozen=True)
class Series:
    """A line of a plot, or a band between `low` and `high`.

    Attributes:
        color: `c1` to `c8`, `ink` or `muted`, variables of the page's theme.
        marker: matplotlib marker at each point.
        weight: `faint` lines are pale background.
        listed: True if a legend names it.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    color: str = "c1"
    dash: str = "solid"
    marker: str = ""
    weight: Literal["normal", "thin", "faint"] = "normal"
    listed: bool = True


@dataclass(frozen=True)
class Plot:
    """A plot of series over steps.

    Attributes:
        name: stem of its file, `loss` for `loss.png`.
        about: alternative text.
        note: treatment of the data, below the plot.
        sources: files it was drawn from.
        log: use a logarithmic vertical axis.
        percent: show the vertical axis in per cent.
        lines: horizontal lines, (height, label).
        marks: steps at which the value was not finite.
        size: `wide` is the page's width; `half` and `third` stand side by side.
        least: smallest span of the vertical axis, so that small noise looks small.
    """

    name: str
    title: str
    unit: str
    about: str
    series: tuple[Series, ...]
    note: str = ""
    sources: tuple[Num, ...] = ()
    log: bool = False
    percent: bool = False
    lines: tuple[tuple[float, str], ...] = ()
    marks: tuple[float, ...] = ()
    size: Size = "third"
    from_zero: bool = False
    least: float = 0.0
    kind: str = "plot"

    @property
    def legend(self) -> tuple[Series, ...]:
        """Series that a legend names; none for a single series."""
        listed = tuple(s for s in self.series if s.listed)
        return listed if len(listed) > 1 else ()


@dataclass(frozen=True)
class ForestRow:
    """A gap (0.01 for 1 %) with its intervals, and one point a seed."""

    label: str
    gap: float
    interval: tuple[float, float] | None
    inner: tuple[float, float] | None
    seeds: tuple[float, ...]


@dataclass(frozen=True)
class Forest:
    """Gaps with intervals, against the margin of equivalence."""

    name: str
    title: str
    about: str
    rows: tuple[ForestRow, ...]
    margin: float
    note: str = ""
    sources: tuple[Num, ...] = ()
    size: Size = "wide"
    kind: str = "plot"
    legend: tuple[Series, ...] = ()
    unit: str = "%"


@dataclass(frozen=True)
class Samples:
    """Answers to one prompt, (where, answer)."""

    prompt: str
    answers: Sequence[tuple[Cell, str]]
    kind: str = "samples"


@dataclass(frozen=True)
class Listing:
    text: str
    source: Num
    kind: str = "listing"


@dataclass(frozen=True)
class Para:
    """A paragraph; `loud` warns, `head` starts a group."""

    line: Words
    loud: bool = False
    head: str = ""
    kind: str = "para"


@dataclass(frozen=True)
class Row:
    """Plots of one size side by side, with one `legend` for all."""

    plots: tuple[Plot, ...]
    legend: tuple[Series, ...] = ()
    kind: str = "row"

    @property
    def size(self) -> Size:
        return self.plots[0].size


Block = Table | Plot | Forest | Samples | Listing | Para | Row


@dataclass(frozen=True)
class Section:
    """A part of the page; collapsed if `folded`."""

    title: str
    blocks: tuple[Block, ...]
    folded: bool = False

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Fact:
    label: str
    value: Words
    note: Words = Words(())


@dataclass(frozen=True)
class Page:
    """A report; `tone` is that of its verdict."""

    title: str
    about: Words
    verdict: str
    tone: Tone
    lead: Words
    loud: tuple[Words, ...]
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]

    @property
    def plots(self) -> list[Plot | Forest]:
        found: list[Plot | Forest] = []
        for block in (block for section in self.sections for block in section.blocks):
            if isinstance(block, (Plot, Forest)):
                found.append(block)
            elif isinstance(block, Row):
                found += block.plots
        return found


# ---------------------------------------------------------------------------------------- numbers


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def figure(value: Any, form: Callable[..., str], *options: Any) -> str:
    """Format a number with a function of `finetune.units`; a missing one is a dash."""
    return form(value, *options) if is_number(value) else MISSING


def fixed(value: Any) -> str:
    """Format as `1.3657`; other values unchanged, a missing one is a dash."""
    if is_number(value):
        return f"{value:.4f}"
    return MISSING if value is None else str(value)


def signed(share: float, digits: int = 2) -> str:
    """Format 0.004 as `+0.40%`, with a true minus sign."""
    return units.percent(share, digits, sign=True).replace("-", "\u2212")
