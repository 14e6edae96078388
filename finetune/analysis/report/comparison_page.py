"""Page of a comparison: whether A and B train the same, and the speed and memory of A.

The bands of A and of B, the reference, span their seeds: where they overlap the two cannot be
distinguished. The forest plot shows each gap with its confidence interval (thin) and the interval
of the two one-sided tests (TOST; thick), which has to lie inside the margin for "equivalent".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from finetune.analysis.compare.result import Comparison, as_text
from finetune.analysis.report.curves import (
    UNIT,
    curve,
    envelope,
    row_of,
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
    at,
    fixed,
    signed,
)
from finetune.analysis.report.figures import style
from finetune.analysis.report.run_source import RunSource
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
COSTS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "speed": ("tokens per second", "tokens_per_s", count),
    "memory": ("peak memory of a step", "gib", size_of_gib),
    "energy": ("tokens per joule", "tokens_per_joule", "{:.3g}".format),
}
"""Name, unit in the keys of `comparison.json`, and form of what a side costs."""


@dataclass(frozen=True)
class Sides:
    """A comparison with its runs on disk; `source` links to its folder."""

    found: Comparison
    source: Source
    labels: tuple[str, str]
    sides: tuple[list[RunSource], list[RunSource]]

    @cached_property
    def _data(self) -> dict[str, Any]:
        return self.found.model_dump()

    def num(self, key: str, text: str) -> Num:
        return self.source.num(text, FILE, key)

    def cell(self, key: str, form: Callable[[Any], str]) -> Cell:
        """The value of `comparison.json` under a dotted key; of an interval both ends."""
        value = at(self._data, key)
        if isinstance(value, (tuple, list)):
            low, high = (self.num(key, form(end)) for end in value)
            return Line((low, " to ", high))
        if value is None:
            return "one seed: no interval" if key.endswith("interval") else MISSING
        return self.num(key, form(value))


def comparison_page(found: Comparison, source: Source) -> Page:
    labels = found.a.label, found.b.label
    c = Sides(found, source, labels, (_members(found, source, "a"), _members(found, source, "b")))
    headline, tone, lead = VERDICTS[found.verdict]
    firsts = [
        (members[0], label) for label, members in zip(labels, c.sides, strict=True) if members
    ]
    forest, gaps = _gaps(c)
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
        "trajectories": _trajectories(c),
        "costs": _costs(c),
        "notes": [c.num("notes", _text(note).rstrip(".")).capitalized for note in found.notes],
        "answers": _answers(firsts),
        "tasks": _tasks(c),
        "runs": _runs(c),
        "firsts": firsts,
    }
    versus, first = " against ".join(labels), firsts[0][0] if firsts else None
    return Page(
        title=Line((f"{versus}: ", *first.title)) if first else Line((versus,)),
        setting=first.setting if first else Line(),
        verdict=c.num("verdict", headline.format(margin=_text(found.within))),
        tone=tone,
        template="comparison.j2",
        parts=parts,
    )


def _members(found: Comparison, source: Source, side: str) -> list[RunSource]:
    """Runs of a side whose folders are there."""
    folders = {pair.seed: source.folder / getattr(pair, side) for pair in found.runs}
    return [
        RunSource(folder, source.base, f"seed {seed}")
        for seed, folder in folders.items()
        if is_run(folder)
    ]


# ----------------------------------------------------------------------------------------- plots


def _gaps(c: Sides) -> tuple[list[Row], Table]:
    """Forest plot of the gaps, and their table."""
    gaps = {key: c.found.losses[key] for key in LOSSES if key in c.found.losses}
    rows = [
        (
            LOSSES[key][0],
            c.num(f"losses.{key}.a, mean over seeds", fixed(float(np.mean(gap.a)))),
            c.num(f"losses.{key}.b, mean over seeds", fixed(float(np.mean(gap.b)))),
            *(c.cell(f"losses.{key}.{column}", signed)
              for column in ("gap", "interval", "equivalence_interval")),
            c.cell(f"band.{key}", lambda spread: percent(spread, 2)),
            c.cell(f"losses.{key}.verdict", str),
        )
        for key, gap in gaps.items()
    ]  # fmt: skip
    a, b = c.labels
    head = ("", a, b, "gap", "interval", "for equivalence", f"band of {b}", "verdict")
    table = Table(head, rows, (1, 2, 3, 4, 5, 6))
    if not gaps:
        return [], table
    forest = Forest(
        *("gap", "Gap of losses", "%"),
        "; ".join(f"{LOSSES[key][0]}: {signed(gap.gap)}" for key, gap in gaps.items()),
        note=f"dot: gap over all seeds; thin line: {percent(c.found.confidence, 0)} interval; "
        "thick line: the interval that has to lie inside the margin (shaded) to be equivalent; "
        "ticks: single seeds",
        sources=(c.num("losses", FILE),),
        size="wide",
        gaps={LOSSES[key][0]: gap for key, gap in gaps.items()},
        margins=[c.found.margin_of(key) or 0.0 for key in gaps],
    )
    return row_of(forest), table


class Seeds(NamedTuple):
    """Values [seeds, n] at the steps [n] that all seeds logged."""

    steps: Any
    values: Any


def _trajectories(c: Sides) -> list[Row]:
    """Losses of both sides, beside the gap of the seeds that both have."""
    rows: list[Row] = []
    both = set.intersection(*({s.label for s in members} for members in c.sides))
    quotient = " / ".join(c.labels)
    for key, (title, column) in LOSSES.items():
        every = [_seeds(members, column) for members in c.sides]
        # a run folder may be gone
        paired = [_seeds([s for s in side if s.label in both], column) for side in c.sides]
        (a, b), gap = paired, None
        if a is not None and b is not None:
            steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
            gap = Seeds(steps, a.values[:, at_a] / b.values[:, at_b] - 1)
        links = [
            s.num(f"{s.run.recipe}, {s.label}", METRICS, column)
            for members in c.sides
            for s in members
        ]
        gap_title = f"{title}: gap over steps", f"{quotient} − 1"
        margin = c.found.margin_of(key) or 0.0
        lines = ((margin, "margin"), (-margin, ""))
        rows += row_of(
            _plot(dict(zip(c.labels, every, strict=True)), links, column, title, UNIT, log=True),
            _plot({"gap": gap}, links, f"gap_{key}", *gap_title, lines=lines, percent=True),
        )
    return rows


def _seeds(members: Sequence[RunSource], column: str) -> Seeds | None:
    """Smoothed values of the seeds of one side."""
    # A step logged twice (the last evaluation) keeps its last value.
    curves = [curve(member.run.rows, column) for member in members]
    tables = [dict(zip(c.x.tolist(), c.y.tolist(), strict=True)) for c in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not steps:
        return None
    values = [np.asarray([table[step] for step in steps]) for table in tables]
    return Seeds(np.asarray(steps), np.stack([smoothed(y, window_of(len(y))) for y in values]))


def _plot(
    means: dict[str, Seeds | None], links: list[Num], name: str, title: str, unit: str, **more: Any
) -> Plot | None:
    """Mean over seeds of each, behind it the band between lowest and highest of several."""
    series, ends, n = list[Series](), list[str](), 0
    for number, (label, seeds) in enumerate(means.items()):
        if seeds is None or len(seeds.steps) < 2:
            return None
        mean, n = seeds.values.mean(0), len(seeds.steps)
        x, _ = envelope(seeds.steps, mean)
        shown = np.searchsorted(seeds.steps, x)  # so that all lines share one grid
        y, low, high = (line[shown].tolist()
                        for line in (mean, seeds.values.min(0), seeds.values.max(0)))  # fmt: skip
        color, dash = style(number)
        if (count := len(seeds.values)) > 1:
            band = f"{label}, range of {count} seeds"
            series.append(Series(band, x.tolist(), low=low, high=high, color=color))
            label = f"{label}, mean"
        series.append(Series(label, x.tolist(), y, color=color, dash=dash))
        ends.append(f"{label} ends at {mean[-1]:.4g}")
    return Plot(
        *(name, title, unit, f"{title} over steps: {'; '.join(ends)}."),
        tuple(series),
        note=treatment(n, window_of(n)),
        sources=tuple(links),
        size="half",
        **more,
    )


# ------------------------------------------------------------------------------------------ tables


def _text(value: object) -> str:
    """Text of a result as the page sets it: no path of the machine, `-0.07 %` as `−0.07%`."""
    shown = re.sub(r"(?<=\d) %", "%", without_paths(as_text(value)))
    return re.sub(r"(?<![\w.])-(?=\d)", "\u2212", shown)


def _differences(c: Sides) -> Table:
    keys = ("a", "b", "why")
    rows = [
        (d.condition, *(c.num(f"differences[{i}].{k}", _text(getattr(d, k))) for k in keys))
        for i, d in enumerate(c.found.differences)
    ]
    return Table(("condition", *c.labels, "why it matters"), rows)


def _costs(c: Sides) -> Table:
    rows = [
        (
            name,
            *(c.cell(f"{key}.{side}_{unit}", form) for side in "ab"),
            c.cell(f"{key}.ratio", _ratio),
            c.cell(f"{key}.interval", _ratio) if key == "speed" else MISSING,
        )
        for key, (name, unit, form) in COSTS.items()
        if getattr(c.found, key) is not None
    ]
    return Table(("", *c.labels, "ratio", "interval"), rows, (1, 2, 3, 4))


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _answers(firsts: Sequence[tuple[RunSource, str]]) -> dict[str, list[tuple[Num, str]]]:
    """Last answers of the first seed of each side."""
    prompts: dict[str, list[tuple[Num, str]]] = {}
    for s, label in firsts:
        for prompt, said in s.answers.items():
            when, answer = said[-1]
            link = replace(when, text=f"{label}, {when.text}")
            prompts.setdefault(prompt, []).append((link, answer))
    return prompts


def _tasks(c: Sides) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for task, scores in (c.found.tasks or {}).items():
        for score in scores:
            pairs = ("a", score.a, score.a_stderr), ("b", score.b, score.b_stderr)
            texts = {
                side: fixed(value) + ("" if error is None else f" ± {fixed(error)}")
                for side, value, error in pairs
            }
            cells = (c.num(f"tasks.{task}.{side}", text) for side, text in texts.items())
            gap = c.num(f"tasks.{task}", score.shown(score.a - score.b))
            verdict = c.num(f"tasks.{task}.verdict", score.verdict) if score.verdict else MISSING
            rows.append((task, score.metric, *cells, gap, verdict))
    return Table(("task", "metric", *c.labels, "difference", "verdict"), rows, (2, 3, 4))


def _runs(c: Sides) -> Table:
    """Runs by seed, those whose folders are there."""
    found = [{s.label: s for s in members} for members in c.sides]
    rows: list[tuple[Cell, ...]] = []
    for pair in c.found.runs:
        cells: list[Cell] = [c.num("runs[].seed", str(pair.seed))]
        for members in found:
            if (s := members.get(f"seed {pair.seed}")) is None:
                cells += ["missing", MISSING, MISSING]
            else:
                cells += [s.link(s.run.name), s.course("loss").last, s.course("eval_loss").last]
        rows.append(tuple(cells))
    a, b = c.labels
    head = ("seed", f"{a} run", "loss", "eval loss", f"{b} run", "loss", "eval loss")
    return Table(head, rows, (2, 3, 5, 6))
