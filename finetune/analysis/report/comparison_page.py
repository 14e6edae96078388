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
from typing import Any

import numpy as np

from finetune.analysis.compare.result import Comparison, EndGap, as_text
from finetune.analysis.report.curves import (
    LEAST_POINTS,
    UNIT,
    Curve,
    Drawn,
    curve,
    plot_of,
    row_of,
    smoothed,
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
    PageSource,
    PlotRow,
    Table,
    Tone,
    at,
    fixed,
    signed,
)
from finetune.analysis.report.run_page import table_of
from finetune.analysis.report.run_source import RunSource, ShownQuestion
from finetune.config.measures import MEASURES
from finetune.runs.card import without_paths
from finetune.runs.folder import COMPARISON as FILE
from finetune.runs.lookup import is_run
from finetune.units import count, percent, size_of_gib

TONES: dict[str, Tone] = {"equivalent": "good", "undecided": "plain"}
"""Tone of a verdict; any other's is bad."""
COSTS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "speed": ("tokens per second", "tokens_per_s", count),
    "memory": ("peak memory of a step", "gib", size_of_gib),
    "energy": ("tokens per joule", "tokens_per_joule", "{:.3g}".format),
}
"""Name, unit in the keys of `comparison.json`, and form of what a side costs."""


@dataclass(frozen=True)
class Sides:
    """A comparison with its runs on disk, by seed; `source` links to its folder."""

    found: Comparison
    source: PageSource
    labels: tuple[str, str]
    sides: tuple[dict[int, RunSource], dict[int, RunSource]]

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


def comparison_page(found: Comparison, source: PageSource) -> Page:
    labels = found.a.label, found.b.label
    c = Sides(found, source, labels, (_members(found, source, "a"), _members(found, source, "b")))
    firsts = [
        (next(iter(side.values())), label)
        for label, side in zip(labels, c.sides, strict=True)
        if side
    ]
    within = f" within {_text(found.within)}"
    forest, gaps = _gaps(c)
    parts = {
        "found": found,
        "n": c.num,
        "seeds": ", ".join(map(str, found.seeds)),
        "folder": source.link(f"{source.folder.resolve().name}/"),
        "level": percent(found.confidence, 0),
        "lead": c.num("verdict", _text(found.sentence)),
        "reasons": [c.num("reasons", _text(reason).rstrip(".")) for reason in found.reasons],
        "differences": _differences(c),
        "forest": forest,
        "gaps": gaps,
        "trajectories": _trajectories(c),
        "costs": _costs(c),
        "notes": [c.num("notes", _text(note).rstrip(".")).capitalized for note in found.notes],
        "answers": _answers(firsts),
        "tasks": _tasks(c),
        "runs": table_of(
            [s for pair in c.found.runs for side in c.sides if (s := side.get(pair.seed))]
        ),
        "firsts": firsts,
    }
    versus, first = " against ".join(labels), firsts[0][0] if firsts else None
    return Page(
        title=Line((f"{versus}: ", *first.title)) if first else Line((versus,)),
        setting=first.setting if first else Line(),
        verdict=c.num(
            "verdict", found.verdict.capitalize() + ("" if found.verdict == "refused" else within)
        ),
        tone=TONES.get(found.verdict, "bad"),
        template="comparison.j2",
        parts=parts,
    )


def _members(found: Comparison, source: PageSource, side: str) -> dict[int, RunSource]:
    """Runs of a side whose folders are there, by seed."""
    label = getattr(found, side).label
    folders = {pair.seed: source.folder / getattr(pair, side) for pair in found.runs}
    return {
        seed: RunSource(folder, source.base, f"{label}, seed {seed}")
        for seed, folder in folders.items()
        if is_run(folder)
    }


# ----------------------------------------------------------------------------------------- plots


def _gaps(c: Sides) -> tuple[list[PlotRow], Table]:
    """Forest plot of the gaps of losses, and a table of all measures' gaps."""
    rows = [_ends(c, f"losses.{key}", gap) for key, gap in c.found.losses.items()]
    rows += [_ends(c, f"scores.{key}", gap) for key, gap in c.found.scores.items()]
    a, b = c.labels
    head = ("", a, b, "gap", "interval", "for equivalence", f"band of {b}", "verdict")
    table = Table(head, rows, (1, 2, 3, 4, 5, 6))
    gaps = {MEASURES[key].title: gap for key, gap in c.found.losses.items()}
    if not any(gap.interval for gap in gaps.values()):  # single dots, which the table has
        return [], table
    forest = Forest(
        "gap",
        "Gap of losses",
        "%",
        "; ".join(f"{title}: {signed(gap.gap)}" for title, gap in gaps.items()),
        note=f"dot: gap over all seeds; thin line: {percent(c.found.confidence, 0)} interval; "
        "thick line: the interval that has to lie inside the margin (shaded) to be equivalent; "
        "ticks: single seeds",
        sources=(c.num("losses", FILE),),
        size="wide",
        gaps=gaps,
        margins=[c.found.margin_of(key) or 0.0 for key in c.found.losses],
    )
    return row_of(forest), table


def _ends(c: Sides, at: str, gap: EndGap) -> tuple[Cell, ...]:
    """Where a measure ends, its gap and the verdict: a row of the table."""
    key = at.partition(".")[2]

    def shown(value: float) -> str:
        return _text(gap.shown(value))

    return (
        MEASURES[key].title,
        c.num(f"{at}.a, mean over seeds", fixed(float(np.mean(gap.a)))),
        c.num(f"{at}.b, mean over seeds", fixed(float(np.mean(gap.b)))),
        *(
            c.cell(f"{at}.{column}", shown)
            for column in ("gap", "interval", "equivalence_interval")
        ),
        c.cell(f"band.{key}", lambda spread: _text(f"{100 * spread:.2f} {gap.unit}")),
        c.cell(f"{at}.verdict", str),
    )


def _trajectories(c: Sides) -> list[PlotRow]:
    """What both sides are judged by, beside the gap of the seeds that both have."""
    rows, both = list[PlotRow](), sorted(c.sides[0].keys() & c.sides[1].keys())  # one may be gone
    members = [s for side in c.sides for s in side.values()]
    for key in members[0].run.method.judged if members else ():
        measure, rows_of_one = MEASURES[key], members[0].run.rows
        drawn = (x for x in measure.columns if len(curve(rows_of_one, x).x) >= LEAST_POINTS)
        judged, relative = measure.column(rows_of_one), measure.unit == "%"
        column = next(drawn, judged)
        title = measure.title if column == judged else f"Training {measure.name}"
        links = [
            [s.num(f"{s.run.recipe}, seed {seed}", METRICS, column) for seed, s in side.items()]
            for side in c.sides
        ]
        every = [_seeds([*side.values()], column) for side in c.sides]
        a, b = (_seeds([side[seed] for seed in both], column) for side in c.sides)
        steps, at_a, at_b = np.intersect1d(a.x, b.x, return_indices=True)
        # At steps that both logged: evaluations may be at others.
        of_a, of_b = a.y[:, at_a], b.y[:, at_b]
        # As the verdict has it: losses by their ratio, scores by their difference.
        gap = Curve(steps, of_a / of_b - 1 if relative else of_a - of_b)
        margin = c.found.margin_of(key) or 0.0
        lines = ((margin, "margin"), (-margin, ""))
        between = " / ".join(c.labels) + " − 1" if relative else " − ".join(c.labels)
        gap_title = f"{title}: gap over steps", between
        rows += row_of(
            plot_of([Drawn(*one) for one in zip(c.labels, every, links, (0, 1), strict=True)],
                    re.sub(r"\W", "_", column), title, UNIT if relative else "",
                    log=relative, size="half"),
            plot_of([Drawn("gap", gap, [*links[0], *links[1]], 0)],
                    f"gap_{key}", *gap_title, lines=lines, percent=relative, size="half"),
        )  # fmt: skip
    return rows


def _seeds(members: Sequence[RunSource], column: str) -> Curve:
    """Smoothed values [seeds, n] of one side, at the steps [n] that all of them logged."""
    # A step logged twice (the last evaluation) keeps its last value.
    curves = [curve(member.run.rows, column) for member in members]
    tables = [dict(zip(c.x.tolist(), c.y.tolist(), strict=True)) for c in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    values = [np.asarray([table[step] for step in steps]) for table in tables]
    # Each seed on its own, before means: smoothing a mean would hide how far seeds lie apart.
    lines = [smoothed(y, window_of(len(y))) for y in values]
    return Curve(np.asarray(steps), np.asarray(lines).reshape(len(lines), len(steps)))


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


def _answers(firsts: Sequence[tuple[RunSource, str]]) -> dict[ShownQuestion, list[tuple[Num, str]]]:
    """Last answers of the first seed of each side."""
    prompts: dict[ShownQuestion, list[tuple[Num, str]]] = {}
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
