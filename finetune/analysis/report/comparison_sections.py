"""What a report says of a comparison: do A and B train the same, and what does A cost and gain.

`comparison.json` holds the verdict and its figures; the curves are drawn from the runs inside the
folder. B, the reference, is drawn as the band that its seeds span: a line of A that stays within
is not told from noise. The forest plot shows each gap with two intervals. The thin one is the
gap's confidence interval; the thick one is that of the two one-sided tests (TOST), which has to
lie inside the margin for "equivalent".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.analysis.compare.result import EMULATED, Comparison, LossGap
from finetune.analysis.report.content import (
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
    Samples,
    Section,
    Series,
    Source,
    Table,
    Words,
    fixed,
    grouped,
    percent,
    signed,
    words,
)
from finetune.analysis.report.run_facts import METRICS, REPORT, Tone, as_sentence
from finetune.analysis.report.series import envelope, said, series_of, smoothed, split, window_of
from finetune.analysis.report.several import Member, final_loss, fold
from finetune.runs.folder import COMPARISON as FILE
from finetune.runs.folder import Run
from finetune.runs.lookup import is_run
from finetune.units import size_of_gib

LOSSES = {"train": ("Training loss", "loss"), "eval": ("Held-out loss", "eval_loss")}
BUCKETS = 200
_VERDICTS: dict[str, tuple[str, Tone, str]] = {
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
"""Verdict -> headline, tone, sentence; the margin stands at the bar."""


def comparison_page(found: Comparison, source: Source) -> Page:
    """The page of a comparison; `source` is its folder."""
    told, tone, lead = _VERDICTS[found.verdict]
    a, b = found.a.label, found.b.label
    sides = _members(found, source)
    text = lead.format(a=found.a.recipe, b=found.b.recipe)
    margin = source.num(percent(found.margin, 3).rstrip("0%").rstrip(".") + "%", FILE, "margin")
    before, _, after = text.partition("|")
    reasons = [
        as_sentence(source.words(reason.rstrip("."), FILE, "reasons")) for reason in found.reasons
    ]
    sections = [
        _fairness(found, source),
        _gaps(found, source),
        _trajectories(found, sides),
        _cost(found, source),
        _samples(found, sides),
        _tasks(found, source),
        _runs(found, source, sides),
    ]
    if not found.differences:  # a fair pair: the result first
        sections = [*sections[1:3], sections[0], *sections[3:]]
    return Page(
        title=f"{a} against {b}",
        about=words(f"{found.a.recipe} and {found.b.recipe}, seeds ",
                    source.num(", ".join(map(str, found.seeds)), FILE, "seeds"), ", in ",
                    Num(f"{source.folder.resolve().name}/", f"{source.href()}/")),
        verdict=told,
        tone=tone,
        lead=words(before, margin, after, *reasons),
        loud=_loud(found, source),
        facts=_facts(found, source),
        sections=tuple(s for s in sections if s) + tuple(
            fold(f"{side.label}, first seed", run, where)
            for side, members in zip((found.a, found.b), sides, strict=True)
            for _, run, where in members[:1]
        ),
    )  # fmt: skip


def _members(found: Comparison, source: Source) -> tuple[list[Member], list[Member]]:
    sides: tuple[list[Member], list[Member]] = ([], [])
    for pair in found.runs:
        for members, path in zip(sides, (pair.a, pair.b), strict=True):
            folder = source.folder / path
            if is_run(folder):
                members.append((f"seed {pair.seed}", Run(folder), Source(folder, source.base)))
    return sides


def _loud(found: Comparison, source: Source) -> tuple[Words, ...]:
    if not found.differences:
        return ()
    names = ", ".join(d.condition for d in found.differences)
    what = source.words(names, FILE, "differences")
    insisted = " The comparison was insisted on." if found.allowed else ""
    return (words("The two do not share: ", what, f".{insisted}"),)


def _interval(pair: tuple[float, float] | None, source: Source, key: str, form: Any) -> Words:
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
        gap = found.losses.get(key)
        if gap is None:
            continue
        seeds = tuple(a / b - 1 for a, b in zip(gap.a, gap.b, strict=True) if b)
        rows.append(ForestRow(title, gap.gap, gap.interval, gap.equivalence_interval, seeds))
        cells.append(_gap_cells(found, source, key, title, gap))
    if not rows:
        return None
    inside = percent(found.confidence, 0)
    about = "; ".join(f"{r.label}: {signed(r.gap)}" for r in rows)
    note = (
        f"dot: gap over all seeds; thin line: {inside} interval; thick line: the interval that has "
        "to lie inside the margin (shaded) to be equivalent; ticks: single seeds"
    )
    link = Num(FILE, source.href(FILE), "losses")
    forest = Forest(
        "gap", "Gap of losses", about, tuple(rows), found.margin, note=note, sources=(link,)
    )
    head = ("", found.a.label, found.b.label, "gap", "interval", "for equivalence",
            f"band of {found.b.label}", "verdict")  # fmt: skip
    confidence = source.num(inside, FILE, "confidence")
    told = Para(words("Intervals, of speed too, at a confidence of ", confidence, "."))
    table = Table(head, cells, (1, 2, 3, 4, 5, 6))
    return Section("Do they train the same?", (forest, table, told))


def _gap_cells(
    found: Comparison, source: Source, key: str, title: str, gap: LossGap
) -> tuple[Cell, ...]:
    at = f"losses.{key}"
    return (
        title,
        source.num(fixed(float(np.mean(gap.a))), FILE, f"{at}.a, mean over seeds"),
        source.num(fixed(float(np.mean(gap.b))), FILE, f"{at}.b, mean over seeds"),
        source.num(signed(gap.gap), FILE, f"{at}.gap"),
        _interval(gap.interval, source, f"{at}.interval", signed),
        _interval(gap.equivalence_interval, source, f"{at}.equivalence_interval", signed),
        source.num(percent(found.band.get(key), 2), FILE, f"band.{key}"),
        source.num(gap.verdict, FILE, f"{at}.verdict"),
    )


# ------------------------------------------------------------------------------------ trajectories


def _trajectories(found: Comparison, sides: Sequence[list[Member]]) -> Section | None:
    blocks: list[Block] = []
    for key, (title, column) in LOSSES.items():
        a, b = (_grid(members, column) for members in sides)
        if a is None or b is None:
            continue
        links = _links(sides, column)
        name = "loss" if key == "train" else "held_out_loss"
        plots = [_band_plot(found, name, title, a, b, links)]
        if (gap := _gap_plot(found, key, title, a, b, links)) is not None:
            plots.append(gap)
        if key == "eval" and len(plots) > 1:  # few points: half the page will do
            blocks.append(Row(tuple(replace(plot, size="half") for plot in plots)))
        else:
            blocks += plots
    return Section("Trajectories", tuple(blocks)) if blocks else None


def _links(sides: Sequence[list[Member]], column: str) -> tuple[Num, ...]:
    return tuple(
        Num(f"{run.recipe}, {name}", source.href(METRICS), column)
        for members in sides
        for name, run, source in members
    )


def _grid(members: Sequence[Member], column: str) -> tuple[Any, Any, int] | None:
    """Steps [n] that all seeds logged, losses [seeds, n] at them, smoothed; and the window."""
    found = [split(*series_of(run.rows, column))[:2] for _, run, _ in members]
    if not found or not all(len(x) for x, _ in found):
        return None
    # A step may be logged twice (the last evaluation): its last value counts.
    tables = [dict(zip(x.tolist(), y.tolist(), strict=True)) for x, y in found]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    if not steps:
        return None
    losses = np.asarray([[table[step] for step in steps] for table in tables])
    window = window_of(len(steps))
    even = np.stack([smoothed(one, window) for one in losses])
    return np.asarray(steps), even, window


def _thin(x: Any, *lines: Any) -> list[list[float]]:
    """Steps and lines over them at the extremes of the first line, so that all keep one grid."""
    kept, _ = envelope(x, lines[0], BUCKETS)
    index = np.searchsorted(x, kept)
    return [x[index].tolist(), *(line[index].tolist() for line in lines)]


def _band_plot(
    found: Comparison, name: str, title: str, a: Any, b: Any, links: tuple[Num, ...]
) -> Plot:
    (ax, ay, window), (bx, by, _) = a, b
    x, mean, low, high = _thin(bx, by.mean(0), by.min(0), by.max(0))
    count = f"{len(by)} seeds" if len(by) > 1 else "one seed"
    series = []
    if len(by) > 1:
        series.append(
            Series(f"{found.b.label}, band of {count}", x, low=low, high=high, colour="c2")
        )
    series.append(Series(f"{found.b.label}, mean", x, mean, colour="c2", dash="dashed"))
    for number, line in enumerate(ay):
        sx, sy = _thin(ax, line)
        label = f"{found.a.label}, each seed" if len(ay) > 1 else found.a.label
        series.append(Series(label, sx, sy, colour="c1", weight="thin", listed=number == 0))
    return Plot(
        name,
        title,
        "nats per token",
        f"{title} over steps: {found.a.label} ends at {ay[:, -1].mean():.4f}, "
        f"{found.b.label} at {by[:, -1].mean():.4f}, mean over seeds.",
        tuple(series),
        note=said(len(ax), window, BUCKETS),
        sources=links,
        log=True,
        size="wide",
    )


def _gap_plot(
    found: Comparison, key: str, title: str, a: Any, b: Any, links: tuple[Num, ...]
) -> Plot | None:
    """A / B - 1 at each step, mean over paired seeds with the range they span."""
    (ax, ay, window), (bx, by, _) = a, b
    if len(ay) != len(by) or len(np.intersect1d(ax, bx)) < 2:
        return None
    steps, at_a, at_b = np.intersect1d(ax, bx, return_indices=True)
    gaps = ay[:, at_a] / by[:, at_b] - 1
    x, mean, low, high = _thin(steps, gaps.mean(0), gaps.min(0), gaps.max(0))
    series = [Series("mean over seeds", x, mean, colour="c1")]
    if len(gaps) > 1:
        series.insert(0, Series("range of the seeds", x, low=low, high=high, colour="c1"))
    return Plot(
        f"gap_{key}",
        f"{title}: gap over steps",
        f"{found.a.label} / {found.b.label} − 1",
        f"Relative gap of the {title.lower()} over steps, ending at {signed(float(mean[-1]))}.",
        tuple(series),
        note=said(len(steps), window, BUCKETS),
        sources=links,
        lines=((found.margin, "margin"), (-found.margin, "")),
        percent=True,
        size="wide",
    )


# --------------------------------------------------------------------------- fairness, cost, texts


def _fairness(found: Comparison, source: Source) -> Section:
    blocks: list[Block] = []
    if found.differences:
        rows = [
            (
                d.condition,
                source.num(_value(d.a), FILE, f"differences[{i}].a"),
                source.num(_value(d.b), FILE, f"differences[{i}].b"),
                source.words(d.why, FILE, f"differences[{i}].why"),
            )
            for i, d in enumerate(found.differences)
        ]
        blocks.append(Table(("condition", found.a.label, found.b.label, "why it matters"), rows))
    else:
        link = source.num("No difference", FILE, "differences")
        blocks.append(
            Para(
                words(
                    link,
                    " in what a fair pair has to share: trainable parameters, optimizer, tokens ",
                    "per step, checkpointing, attention, compile, fused kernels, versions.",
                )
            )
        )
    blocks += [Para(source.words(note, FILE, "notes")) for note in found.notes]
    return Section("Is it a fair pair?", tuple(blocks))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cost(found: Comparison, source: Source) -> Section | None:
    rows: list[tuple[Cell, ...]] = []
    if s := found.speed:
        rows.append(
            (
                "tokens per second",
                source.num(grouped(s.a_tokens_per_s), FILE, "speed.a_tokens_per_s"),
                source.num(grouped(s.b_tokens_per_s), FILE, "speed.b_tokens_per_s"),
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


def _samples(found: Comparison, sides: Sequence[list[Member]]) -> Section | None:
    """The final answers of both sides of the first seed."""
    answers: dict[str, list[tuple[Cell, str]]] = {}
    for side, members in zip((found.a, found.b), sides, strict=True):
        for name, run, source in members[:1]:
            if not run.samples:
                continue
            step, pairs = run.samples[-1]
            final = pairs == run.report.get("samples")
            file, key = (REPORT, "samples") if final else (METRICS, f"samples at step {step}")
            for pair in pairs:
                link = source.num(f"{side.label}, {name}", file, key)
                prompt, answer = str(pair.get("prompt", "")), str(pair.get("answer", ""))
                answers.setdefault(prompt, []).append((link, answer))
    blocks = tuple(Samples(prompt, rows) for prompt, rows in answers.items())
    return Section("What they say", blocks) if blocks else None


def _tasks(found: Comparison, source: Source) -> Section | None:
    rows: list[tuple[Cell, ...]] = []
    for task, scores in (found.tasks or {}).items():
        for score in scores:
            key = f"tasks.{task}"
            told = [source.num(fixed(value), FILE, f"{key}.{side}") if error is None else
                    words(source.num(fixed(value), FILE, f"{key}.{side}"), " ± ",
                          source.num(fixed(error), FILE, f"{key}.{side}_stderr"))
                    for side, value, error in (("a", score.a, score.a_stderr),
                                               ("b", score.b, score.b_stderr))]  # fmt: skip
            rows.append((task, score.metric, *told))
    head = ("task", "metric", found.a.label, found.b.label)
    return Section("Tasks", (Table(head, rows, (2, 3)),)) if rows else None


def _runs(found: Comparison, source: Source, sides: Sequence[list[Member]]) -> Section | None:
    known = {run.folder: where for members in sides for _, run, where in members}
    rows: list[tuple[Cell, ...]] = []
    for pair in found.runs:
        cells: list[Cell] = [source.num(str(pair.seed), FILE, "runs[].seed")]
        for path in (pair.a, pair.b):
            folder = source.folder / path
            where = known.get(folder)
            if where is None:
                cells += [f"{Path(path).name} (missing)", MISSING, MISSING]
                continue
            run = Run(folder)
            cells.append(Num(run.name, where.href() + "/"))
            cells += [final_loss(run, where, "loss"), final_loss(run, where, "eval_loss")]
        rows.append(tuple(cells))
    a, b = found.a.label, found.b.label
    head = ("seed", f"{a} run", "last loss", "held out", f"{b} run", "last loss", "held out")
    return Section("Runs", (Table(head, rows, (2, 3, 5, 6)),)) if rows else None
