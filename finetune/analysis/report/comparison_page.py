"""Page of a comparison: whether A and B train the same, and the speed and memory of A.

The band of B, the reference, spans its seeds: a line of A within it cannot be distinguished from
noise. The forest plot shows each gap with its confidence interval (thin) and the interval of the
two one-sided tests (TOST; thick), which has to lie inside the margin for "equivalent".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.analysis.compare.result import Comparison, LossGap, as_text
from finetune.analysis.report.curves import (
    SHARED_BUCKETS,
    curve,
    envelope,
    smoothed,
    treatment,
    window_of,
)
from finetune.analysis.report.elements import (
    METRICS,
    MISSING,
    Cell,
    Forest,
    Line,
    Num,
    Page,
    Plot,
    Row,
    Series,
    Source,
    Table,
    Tone,
    figure,
    fixed,
    signed,
)
from finetune.analysis.report.run_source import EMPTY, RunSource
from finetune.runs.card import without_paths
from finetune.runs.folder import COMPARISON as FILE
from finetune.runs.lookup import is_run
from finetune.units import count, percent, size_of_gib

LOSSES = {"train": ("Training loss", "loss"), "eval": ("Eval loss", "eval_loss")}
VERDICTS: dict[str, tuple[str, Tone, str]] = {
    "equivalent": ("Equivalent within {margin}", "good", "{a} trains as {b} does."),
    "not equivalent": ("Not equivalent within {margin}", "bad", "{a} does not train as {b} does."),
    "undecided": (
        *("Undecided at a margin of {margin}", "plain"),
        "These seeds cannot tell whether {a} trains as {b} does.",
    ),
    "refused": (
        *("Refused", "bad"),
        "{a} and {b} cannot be compared, so no gap and no speed-up is given.",
    ),
}  # fmt: skip
"""Headline, tone and sentence by verdict."""


@dataclass(frozen=True)
class Sides:
    """A comparison with its runs on disk; `source` links to its folder."""

    found: Comparison
    source: Source
    a: list[RunSource]
    b: list[RunSource]

    def num(self, key: str, text: str) -> Num:
        return self.source.num(text, FILE, key)

    def interval(self, key: str, pair: Any, form: Callable[[float], str]) -> Line:
        if pair is None:
            return Line(("one seed: no interval",))
        low, high = (self.num(key, form(value)) for value in pair)
        return Line((low, " to ", high))

    @property
    def labels(self) -> tuple[str, str]:
        return self.found.a.label, self.found.b.label


def comparison_page(found: Comparison, source: Source) -> Page:
    c = Sides(found, source, *_members(found, source))
    headline, tone, lead = VERDICTS[found.verdict]
    margin = percent(found.margin, None)
    forest, gaps, facts = _gaps(c)
    parts = {
        "found": found,
        "n": c.num,
        "seeds": ", ".join(map(str, found.seeds)),
        "folder": source.link(f"{source.folder.resolve().name}/"),
        "level": percent(found.confidence, 0),
        "lead": lead.format(a=found.a.recipe, b=found.b.recipe),
        "reasons": [c.num("reasons", _text(reason).rstrip(".")) for reason in found.reasons],
        "differences": _differences(c),
        "forest": forest,
        "gaps": gaps,
        "gap_facts": facts,
        "trajectories": _trajectories(c),
        "costs": _costs(c),
        "notes": [c.num("notes", _text(note)).capitalized for note in found.notes],
        "answers": _answers(c),
        "tasks": _tasks(c),
        "runs": _runs(c),
        "firsts": [
            (members[0], f"{label}, first seed")
            for label, members in zip(c.labels, (c.a, c.b), strict=True)
            if members
        ],
    }
    versus, first = " against ".join(c.labels), next(iter((*c.a, *c.b)), None)
    return Page(
        title=Line((f"{versus}: ", *first.title)) if first else Line((versus,)),
        setting=first.setting if first else Line(),
        verdict=c.num("verdict", headline.format(margin=margin)),
        tone=tone,
        template="comparison.j2",
        parts=parts,
    )


def _members(found: Comparison, source: Source) -> tuple[list[RunSource], list[RunSource]]:
    a, b = (
        [
            RunSource(folder, source.base, f"seed {pair.seed}")
            for pair in found.runs
            if is_run(folder := source.folder / getattr(pair, side))
        ]
        for side in "ab"
    )
    return a, b


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _gaps(c: Sides) -> tuple[Forest | None, Table, list[tuple[str, Num, Line]]]:
    """Forest plot of the gaps, their table, and (loss, gap, interval) for the key figures."""
    rows, facts, gaps = [], [], dict[str, LossGap]()
    for key, (title, _) in LOSSES.items():
        if (gap := c.found.losses.get(key)) is None:
            continue
        gaps[title] = gap
        at, inner = f"losses.{key}", gap.equivalence_interval
        whole = c.num(f"{at}.gap", signed(gap.gap))
        interval = c.interval(f"{at}.interval", gap.interval, signed)
        rows.append(
            (
                title,
                c.num(f"{at}.a, mean over seeds", fixed(float(np.mean(gap.a)))),
                c.num(f"{at}.b, mean over seeds", fixed(float(np.mean(gap.b)))),
                *(whole, interval, c.interval(f"{at}.equivalence_interval", inner, signed)),
                c.num(f"band.{key}", figure(c.found.band.get(key), percent, 2)),
                c.num(f"{at}.verdict", gap.verdict),
            )
        )
        facts.append((title, whole, interval))
    a, b = c.labels
    head = ("", a, b, "gap", "interval", "for equivalence", f"band of {b}", "verdict")
    forest = Forest(
        *("gap", "Gap of losses", "%"),
        "; ".join(f"{label}: {signed(gap.gap)}" for label, gap in gaps.items()),
        note=f"dot: gap over all seeds; thin line: {percent(c.found.confidence, 0)} interval; "
        "thick line: the interval that has to lie inside the margin (shaded) to be equivalent; "
        "ticks: single seeds",
        sources=(c.source.num(FILE, FILE, "losses"),),
        size="wide",
        gaps=gaps,
        margin=c.found.margin,
    )
    return forest if gaps else None, Table(head, rows, (1, 2, 3, 4, 5, 6)), facts


# ------------------------------------------------------------------------------------ trajectories


class Losses(NamedTuple):
    """Smoothed losses [seeds, n] of one side, at the steps [n] that all its seeds logged."""

    steps: Any
    losses: Any
    window: int


def _trajectories(c: Sides) -> list[Plot | Row]:
    parts: list[Plot | Row] = []
    seeds = {s.label for s in c.a} & {s.label for s in c.b}  # a run folder may be gone
    paired = [[s for s in side if s.label in seeds] for side in (c.a, c.b)]
    for key, (title, column) in LOSSES.items():
        a, b = _losses(c.a, column), _losses(c.b, column)
        if a is None or b is None:
            continue
        links = tuple(s.num(f"{s.run.recipe}, {s.label}", METRICS, column) for s in (*c.a, *c.b))
        plots = [_band_plot(c, "loss" if key == "train" else "eval_loss", title, a, b, links)]
        pairs = [_losses(side, column) for side in paired]
        if (gap := _gap_plot(c, key, title, pairs[0], pairs[1], links)) is not None:
            plots.append(gap)
        if key == "eval" and len(plots) > 1:  # few points need no more width
            parts.append(Row(tuple(replace(plot, size="half") for plot in plots)))
        else:
            parts += plots
    return parts


def _losses(members: Sequence[RunSource], column: str) -> Losses | None:
    # A step logged twice (the last evaluation) keeps its last value.
    curves = [curve(member.run.rows, column) for member in members]
    tables = [dict(zip(c.x.tolist(), c.y.tolist(), strict=True)) for c in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not steps:
        return None
    window = window_of(len(steps))
    even = [smoothed(np.asarray([table[step] for step in steps]), window) for table in tables]
    return Losses(np.asarray(steps), np.stack(even), window)


def _thin(x: Any, *lines: Any) -> list[list[float]]:
    """Steps and lines at the extremes of the first line, so that all share one grid."""
    kept, _ = envelope(x, lines[0], SHARED_BUCKETS)
    index = np.searchsorted(x, kept)
    return [x[index].tolist(), *(line[index].tolist() for line in lines)]


def _range(label: str, mean: str, steps: Any, values: Any, **look: str) -> list[Series]:
    """Mean over seeds, behind it the band between lowest and highest where there are several."""
    x, y, low, high = _thin(steps, values.mean(0), values.min(0), values.max(0))
    band = [Series(label, x, low=low, high=high, color=look["color"])] if len(values) > 1 else []
    return [*band, Series(mean, x, y, **look)]  # pyright: ignore[reportArgumentType]


def _band_plot(
    c: Sides, name: str, title: str, a: Losses, b: Losses, links: tuple[Num, ...]
) -> Plot:
    label_a, label_b = c.labels
    band, mean = f"{label_b}, band of {len(b.losses)} seeds", f"{label_b}, mean"
    series = _range(band, mean, b.steps, b.losses, color="c2", dash="dashed")
    label = f"{label_a}, each seed" if len(a.losses) > 1 else label_a
    for number, line in enumerate(a.losses):
        one = _thin(a.steps, line)
        series.append(Series(label, *one, color="c1", weight="thin", listed=number == 0))
    return Plot(
        *(name, title, "nats per token"),
        f"{title} over steps: {label_a} ends at {a.losses[:, -1].mean():.4f}, "
        f"{label_b} at {b.losses[:, -1].mean():.4f}, mean over seeds.",
        tuple(series),
        note=treatment(len(a.steps), a.window, SHARED_BUCKETS),
        sources=links,
        log=True,
        size="wide",
    )


def _gap_plot(
    c: Sides, key: str, title: str, a: Losses | None, b: Losses | None, links: tuple[Num, ...]
) -> Plot | None:
    """A / B - 1 at each step: mean and range over paired seeds."""
    if a is None or b is None:
        return None
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    if len(steps) < 2:
        return None
    gaps = a.losses[:, at_a] / b.losses[:, at_b] - 1
    end = signed(float(gaps[:, -1].mean()))
    return Plot(
        *(f"gap_{key}", f"{title}: gap over steps", f"{c.labels[0]} / {c.labels[1]} − 1"),
        f"Relative gap of the {title.lower()} over steps, ending at {end}.",
        tuple(_range("range of the seeds", "mean over seeds", steps, gaps, color="c1")),
        note=treatment(len(steps), a.window, SHARED_BUCKETS),
        sources=links,
        lines=((c.found.margin, "margin"), (-c.found.margin, "")),
        percent=True,
        size="wide",
    )


# ------------------------------------------------------------------------------------------ tables


def _differences(c: Sides) -> Table:
    keys = ("a", "b", "why")
    rows = [
        (d.condition, *(c.num(f"differences[{i}].{k}", _text(getattr(d, k))) for k in keys))
        for i, d in enumerate(c.found.differences)
    ]
    return Table(("condition", *c.labels, "why it matters"), rows)


def _text(value: object) -> str:
    """Text of a result as the page sets it: no path of the machine, `-0.07 %` as `−0.07%`."""
    shown = re.sub(r"(?<=\d) %", "%", without_paths(as_text(value)))
    return re.sub(r"(?<![\w.])-(?=\d)", "\u2212", shown)


def _costs(c: Sides) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for label, section, unit, form in (
        ("tokens per second", "speed", "tokens_per_s", count),
        ("peak memory of a step", "memory", "gib", size_of_gib),
    ):
        if (cost := getattr(c.found, section)) is not None:
            sides = (f"{side}_{unit}" for side in "ab")
            cells = [c.num(f"{section}.{key}", form(getattr(cost, key))) for key in sides]
            interval: Cell = MISSING
            if section == "speed":
                interval = c.interval("speed.interval", cost.interval, _ratio)
            rows.append((label, *cells, c.num(f"{section}.ratio", _ratio(cost.ratio)), interval))
    return Table(("", *c.labels, "ratio", "interval"), rows, (1, 2, 3, 4))


def _answers(c: Sides) -> dict[str, list[tuple[Cell, str]]]:
    prompts: dict[str, list[tuple[Cell, str]]] = {}
    for label, members in zip(c.labels, (c.a, c.b), strict=True):
        for s in (s for s in members[:1] if s.run.samples):
            for prompt, answer, file, key, _ in s.answers_of(-1):
                link = s.num(f"{label}, {s.label}", file, key)
                prompts.setdefault(prompt, []).append((link, answer or EMPTY))
    return prompts


def _tasks(c: Sides) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for task, scores in (c.found.tasks or {}).items():
        for score in scores:
            cells: list[Cell] = []
            for side in "ab":
                key, error = f"tasks.{task}.{side}", getattr(score, f"{side}_stderr")
                cell, spread = c.num(key, fixed(getattr(score, side))), fixed(error)
                both = Line((cell, " ± ", c.num(f"{key}_stderr", spread)))
                cells.append(cell if error is None else both)
            rows.append((task, score.metric, *cells))
    return Table(("task", "metric", *c.labels), rows, (2, 3))


def _runs(c: Sides) -> Table:
    known = {member.folder: member for member in (*c.a, *c.b)}
    rows: list[tuple[Cell, ...]] = []
    for pair in c.found.runs:
        cells: list[Cell] = [c.num("runs[].seed", str(pair.seed))]
        for path in (pair.a, pair.b):
            if (s := known.get(c.source.folder / path)) is None:
                cells += [f"{Path(path).name} (missing)", MISSING, MISSING]
            else:
                cells += [s.link(s.run.name), s.course("loss").last, s.course("eval_loss").last]
        rows.append(tuple(cells))
    a, b = c.labels
    head = ("seed", f"{a} run", "loss", "eval loss", f"{b} run", "loss", "eval loss")
    return Table(head, rows, (2, 3, 5, 6))
