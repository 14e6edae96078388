"""Page of a comparison: whether A and B train the same, and the speed and memory of A.

The band of B, the reference, spans its seeds: a line of A within it cannot be distinguished from
noise. The forest plot shows each gap with its confidence interval (thin) and the interval of the
two one-sided tests (TOST; thick), which has to lie inside the margin for "equivalent".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.analysis.compare.result import EMULATED, Comparison, LossGap, as_text
from finetune.analysis.report.content import (
    METRICS,
    MISSING,
    Block,
    Cell,
    Fact,
    Forest,
    ForestRow,
    Num,
    Page,
    Para,
    Plot,
    Row,
    RunSource,
    Samples,
    Section,
    Series,
    Source,
    Table,
    Tone,
    Words,
    figure,
    fixed,
    signed,
    words,
)
from finetune.analysis.report.curves import (
    SHARED_BUCKETS,
    curve,
    envelope,
    smoothed,
    treatment,
    window_of,
)
from finetune.analysis.report.run_page import answers, as_sentence, first_last
from finetune.analysis.report.several_page import fold
from finetune.runs.folder import COMPARISON as FILE
from finetune.runs.lookup import is_run
from finetune.units import count, percent, size_of_gib

LOSSES = {"train": ("Training loss", "loss"), "eval": ("Held-out loss", "eval_loss")}
Sides = tuple[list[RunSource], list[RunSource]]
VERDICTS: dict[str, tuple[str, Tone, str]] = {
    "equivalent": ("Equivalent", "good", "Within a margin of |, {a} trains as {b} does. "),
    "not equivalent": (
        "Not equivalent",
        "bad",
        "At a margin of |, {a} does not train as {b} does. ",
    ),
    "undecided": (
        "Undecided",
        "plain",
        "At a margin of |, these seeds cannot tell whether {a} trains as {b} does. ",
    ),
    "refused": (
        "Refused",
        "bad",
        "{a} and {b} cannot be compared, so no gap and no speed-up is told (margin |). ",
    ),
}
"""Headline, tone and sentence by verdict; the margin replaces the bar."""


def comparison_page(found: Comparison, source: Source) -> Page:
    headline, tone, lead = VERDICTS[found.verdict]
    sides = _members(found, source)
    before, _, after = lead.format(a=found.a.recipe, b=found.b.recipe).partition("|")
    margin = percent(found.margin, 3).rstrip("0%").rstrip(".") + "%"
    reasons = [as_sentence(source.words(r.rstrip("."), FILE, "reasons")) for r in found.reasons]
    fair, gaps, paths = _fairness(found, source), _gaps(found, source), _trajectories(found, sides)
    sections = [
        *(
            (fair, gaps, paths) if found.differences else (gaps, paths, fair)
        ),  # the important one first
        _cost(found, source),
        _samples(found, sides),
        _tasks(found, source),
        _runs(found, source, sides),
    ]
    names = ", ".join(d.condition for d in found.differences)
    insisted = " The comparison was insisted on." if found.allowed else ""
    loud = words("The two do not share: ", source.words(names, FILE, "differences"), f".{insisted}")
    return Page(
        title=f"{found.a.label} against {found.b.label}",
        about=words(f"{found.a.recipe} and {found.b.recipe}, seeds ",
                    source.num(", ".join(map(str, found.seeds)), FILE, "seeds"), ", in ",
                    Num(f"{source.folder.resolve().name}/", f"{source.href()}/")),
        verdict=headline,
        tone=tone,
        lead=words(before, source.num(margin, FILE, "margin"), after, *reasons),
        loud=(loud,) if found.differences else (),
        facts=_facts(found, source),
        sections=tuple(s for s in sections if s) + tuple(
            fold(member, f"{side.label}, first seed")
            for side, members in zip((found.a, found.b), sides, strict=True)
            for member in members[:1]
        ),
    )  # fmt: skip


def _members(found: Comparison, source: Source) -> Sides:
    sides: Sides = ([], [])
    for pair in found.runs:
        for members, path in zip(sides, (pair.a, pair.b), strict=True):
            folder = source.folder / path
            if is_run(folder):
                members.append(RunSource(folder, source.base, f"seed {pair.seed}"))
    return sides


def _interval(
    pair: tuple[float, float] | None, source: Source, key: str, form: Callable[[float], str]
) -> Words:
    if pair is None:
        return words("one seed: no interval")
    low, high = (source.num(form(value), FILE, key) for value in pair)
    return words(low, " to ", high)


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _facts(found: Comparison, source: Source) -> tuple[Fact, ...]:
    facts = []
    for key, (title, _) in LOSSES.items():
        if gap := found.losses.get(key):
            at = f"losses.{key}"
            value = words(source.num(signed(gap.gap), FILE, f"{at}.gap"))
            note = _interval(gap.interval, source, f"{at}.interval", signed)
            facts.append(Fact(f"{title}, gap", value, note))
    if speed := found.speed:
        value = words(source.num(_ratio(speed.ratio), FILE, "speed.ratio"))
        note = _interval(speed.interval, source, "speed.interval", _ratio)
        if found.emulated:
            note = words(note, "; ", source.num("emulated, no claim", FILE, "notes"))
        facts.append(Fact("Speed", value, note))
    if memory := found.memory:
        note = words(
            source.num(size_of_gib(memory.a_gib), FILE, "memory.a_gib"), " against ",
            source.num(size_of_gib(memory.b_gib), FILE, "memory.b_gib"),
        )  # fmt: skip
        value = words(source.num(_ratio(memory.ratio), FILE, "memory.ratio"))
        facts.append(Fact("Peak memory", value, note))
    return tuple(facts)


# ------------------------------------------------------------------------------------------- gaps


def _gaps(found: Comparison, source: Source) -> Section | None:
    rows, cells = [], []
    for key, (title, _) in LOSSES.items():
        if gap := found.losses.get(key):
            seeds = tuple(a / b - 1 for a, b in zip(gap.a, gap.b, strict=True) if b)
            rows.append(ForestRow(title, gap.gap, gap.interval, gap.equivalence_interval, seeds))
            cells.append((title, *_gap_cells(found, source, key, gap)))
    if not rows:
        return None
    level = percent(found.confidence, 0)
    forest = Forest(
        "gap",
        "Gap of losses",
        "; ".join(f"{r.label}: {signed(r.gap)}" for r in rows),
        tuple(rows),
        found.margin,
        note=f"dot: gap over all seeds; thin line: {level} interval; thick line: the interval that "
        "has to lie inside the margin (shaded) to be equivalent; ticks: single seeds",
        sources=(Num(FILE, source.href(FILE), "losses"),),
    )
    head = ("", found.a.label, found.b.label, "gap", "interval", "for equivalence",
            f"band of {found.b.label}", "verdict")  # fmt: skip
    confidence = source.num(level, FILE, "confidence")
    below = Para(words("Intervals, of speed too, at a confidence of ", confidence, "."))
    table = Table(head, cells, (1, 2, 3, 4, 5, 6))
    return Section("Do they train the same?", (forest, table, below))


def _gap_cells(found: Comparison, source: Source, key: str, gap: LossGap) -> tuple[Cell, ...]:
    at = f"losses.{key}"
    return (
        source.num(fixed(float(np.mean(gap.a))), FILE, f"{at}.a, mean over seeds"),
        source.num(fixed(float(np.mean(gap.b))), FILE, f"{at}.b, mean over seeds"),
        source.num(signed(gap.gap), FILE, f"{at}.gap"),
        _interval(gap.interval, source, f"{at}.interval", signed),
        _interval(gap.equivalence_interval, source, f"{at}.equivalence_interval", signed),
        source.num(figure(found.band.get(key), percent, 2), FILE, f"band.{key}"),
        source.num(gap.verdict, FILE, f"{at}.verdict"),
    )


# ------------------------------------------------------------------------------------ trajectories


class Losses(NamedTuple):
    """Smoothed losses [seeds, n] of one side, at the steps [n] that all its seeds logged."""

    steps: Any
    losses: Any
    window: int


def _trajectories(found: Comparison, sides: Sides) -> Section | None:
    blocks: list[Block] = []
    for key, (title, column) in LOSSES.items():
        a, b = (_losses(members, column) for members in sides)
        if a is None or b is None:
            continue
        links = tuple(
            Num(f"{member.run.recipe}, {member.label}", member.href(METRICS), column)
            for members in sides
            for member in members
        )
        name = "loss" if key == "train" else "held_out_loss"
        plots = [_band_plot(found, name, title, a, b, links)]
        if (gap := _gap_plot(found, key, title, a, b, links)) is not None:
            plots.append(gap)
        if key == "eval" and len(plots) > 1:  # few points need no more width
            blocks.append(Row(tuple(replace(plot, size="half") for plot in plots)))
        else:
            blocks += plots
    return Section("Trajectories", tuple(blocks)) if blocks else None


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


def _band_plot(
    found: Comparison, name: str, title: str, a: Losses, b: Losses, links: tuple[Num, ...]
) -> Plot:
    x, mean, low, high = _thin(b.steps, b.losses.mean(0), b.losses.min(0), b.losses.max(0))
    label, seeds = found.b.label, len(b.losses)
    series = [Series(f"{label}, mean", x, mean, color="c2", dash="dashed")]
    if seeds > 1:
        band = Series(f"{label}, band of {seeds} seeds", x, low=low, high=high, color="c2")
        series.insert(0, band)
    label = f"{found.a.label}, each seed" if len(a.losses) > 1 else found.a.label
    for number, line in enumerate(a.losses):
        one = _thin(a.steps, line)
        series.append(Series(label, *one, color="c1", weight="thin", listed=number == 0))
    return Plot(
        name,
        title,
        "nats per token",
        f"{title} over steps: {found.a.label} ends at {a.losses[:, -1].mean():.4f}, "
        f"{found.b.label} at {b.losses[:, -1].mean():.4f}, mean over seeds.",
        tuple(series),
        note=treatment(len(a.steps), a.window, SHARED_BUCKETS),
        sources=links,
        log=True,
        size="wide",
    )


def _gap_plot(
    found: Comparison, key: str, title: str, a: Losses, b: Losses, links: tuple[Num, ...]
) -> Plot | None:
    """A / B - 1 at each step: mean and range over paired seeds."""
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    if len(a.losses) != len(b.losses) or len(steps) < 2:
        return None
    gaps = a.losses[:, at_a] / b.losses[:, at_b] - 1
    x, mean, low, high = _thin(steps, gaps.mean(0), gaps.min(0), gaps.max(0))
    series = [Series("mean over seeds", x, mean, color="c1")]
    if len(gaps) > 1:
        series.insert(0, Series("range of the seeds", x, low=low, high=high, color="c1"))
    return Plot(
        f"gap_{key}",
        f"{title}: gap over steps",
        f"{found.a.label} / {found.b.label} − 1",
        f"Relative gap of the {title.lower()} over steps, ending at {signed(float(mean[-1]))}.",
        tuple(series),
        note=treatment(len(steps), a.window, SHARED_BUCKETS),
        sources=links,
        lines=((found.margin, "margin"), (-found.margin, "")),
        percent=True,
        size="wide",
    )


# --------------------------------------------------------------------------- fairness, cost, texts


def _fairness(found: Comparison, source: Source) -> Section:
    rows = [
        (
            d.condition,
            source.num(as_text(d.a), FILE, f"differences[{i}].a"),
            source.num(as_text(d.b), FILE, f"differences[{i}].b"),
            source.words(d.why, FILE, f"differences[{i}].why"),
        )
        for i, d in enumerate(found.differences)
    ]
    fair = words(
        source.num("No difference", FILE, "differences"),
        " in what a fair pair has to share: trainable parameters, optimizer, tokens ",
        "per step, checkpointing, attention, compile, fused kernels, versions.",
    )
    head = ("condition", found.a.label, found.b.label, "why it matters")
    notes = (Para(source.words(note, FILE, "notes")) for note in found.notes)
    return Section("Is it a fair pair?", (Table(head, rows) if rows else Para(fair), *notes))


def _cost(found: Comparison, source: Source) -> Section | None:
    rows: list[tuple[Cell, ...]] = []
    if s := found.speed:
        rows.append(
            (
                "tokens per second",
                source.num(count(s.a_tokens_per_s), FILE, "speed.a_tokens_per_s"),
                source.num(count(s.b_tokens_per_s), FILE, "speed.b_tokens_per_s"),
                source.num(_ratio(s.ratio), FILE, "speed.ratio"),
                _interval(s.interval, source, "speed.interval", _ratio),
            )
        )
    if m := found.memory:
        rows.append(
            (
                "peak memory of a step",
                source.num(size_of_gib(m.a_gib), FILE, "memory.a_gib"),
                source.num(size_of_gib(m.b_gib), FILE, "memory.b_gib"),
                source.num(_ratio(m.ratio), FILE, "memory.ratio"),
                MISSING,
            )
        )
    head = ("", found.a.label, found.b.label, "ratio", "interval")
    blocks: list[Block] = [Table(head, rows, (1, 2, 3, 4))]
    if found.emulated:
        blocks.append(Para(as_sentence(source.words(EMULATED, FILE, "notes")), loud=True))
    return Section("Speed and memory", tuple(blocks)) if rows else None


def _samples(found: Comparison, sides: Sides) -> Section | None:
    prompts: dict[str, list[tuple[Cell, str]]] = {}
    for side, members in zip((found.a, found.b), sides, strict=True):
        for s in (s for s in members[:1] if s.run.samples):
            for prompt, answer, file, key, _ in answers(s, -1):
                link = s.num(f"{side.label}, {s.label}", file, key)
                prompts.setdefault(prompt, []).append((link, answer))
    blocks = tuple(Samples(prompt, rows) for prompt, rows in prompts.items())
    return Section("What they say", blocks) if blocks else None


def _tasks(found: Comparison, source: Source) -> Section | None:
    rows: list[tuple[Cell, ...]] = []
    for task, scores in (found.tasks or {}).items():
        for score in scores:
            cells: list[Cell] = []
            for side, value, error in (("a", score.a, score.a_stderr),
                                       ("b", score.b, score.b_stderr)):  # fmt: skip
                key = f"tasks.{task}.{side}"
                cell = source.num(fixed(value), FILE, key)
                spread = source.num(fixed(error), FILE, f"{key}_stderr")
                cells.append(cell if error is None else words(cell, " ± ", spread))
            rows.append((task, score.metric, *cells))
    head = ("task", "metric", found.a.label, found.b.label)
    return Section("Tasks", (Table(head, rows, (2, 3)),)) if rows else None


def _runs(found: Comparison, source: Source, sides: Sides) -> Section | None:
    known = {member.folder: member for members in sides for member in members}
    rows: list[tuple[Cell, ...]] = []
    for pair in found.runs:
        cells: list[Cell] = [source.num(str(pair.seed), FILE, "runs[].seed")]
        for path in (pair.a, pair.b):
            if (s := known.get(source.folder / path)) is None:
                cells += [f"{Path(path).name} (missing)", MISSING, MISSING]
            else:
                cells.append(Num(s.run.name, s.href() + "/"))
                cells += [first_last(s, "loss")[1], first_last(s, "eval_loss")[1]]
        rows.append(tuple(cells))
    a, b = found.a.label, found.b.label
    head = ("seed", f"{a} run", "last loss", "held out", f"{b} run", "last loss", "held out")
    return Section("Runs", (Table(head, rows, (2, 3, 5, 6)),)) if rows else None
