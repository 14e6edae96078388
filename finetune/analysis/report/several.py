"""What a report says of several runs side by side: one table, shared plots, what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.analysis.report.content import (
    MISSING,
    Block,
    Cell,
    Num,
    Page,
    Para,
    Plot,
    Section,
    Series,
    Source,
    Table,
    fixed,
    words,
)
from finetune.analysis.report.curves import curves_section
from finetune.analysis.report.figures import style
from finetune.analysis.report.run_facts import (
    CONFIG,
    METRICS,
    RECEIPT,
    first_last,
    loud_lines,
    memory_fact,
    speed_fact,
    verdict_of,
)
from finetune.analysis.report.run_sections import environment, samples, what_ran
from finetune.analysis.report.series import envelope, said, series_of, smoothed, split, window_of
from finetune.runs.folder import Run

Member = tuple[str, Run, Source]
"""What a run is called on the page, the run, and where its files are."""
BUCKETS = 200


def several_page(members: Sequence[Member]) -> Page:
    """The page of several runs."""
    proven = sum(run.proven for _, run, _ in members)
    loud = [words(f"{name}: ", line) for name, run, s in members for line in loud_lines(run, s)]
    return Page(
        title=" · ".join(dict.fromkeys(run.recipe for _, run, _ in members)),
        about=words("Several runs: ", *_joined(members)),
        verdict="All proven" if proven == len(members) else "Not all proven",
        tone="good" if proven == len(members) else "bad",
        lead=words(
            "The precision of each is proven by its own receipt; the table names it."
            if proven == len(members)
            else f"Of {proven} of {len(members)} the receipt proves the precision; the table names "
            "it, and for the others what is missing."
        ),
        loud=tuple(loud),
        facts=(),
        sections=(
            Section("Runs", (table_of(members),)),
            *curves(members),
            *_differences(members),
            *(fold(*member) for member in members),
        ),
    )


def _joined(members: Sequence[Member]) -> list[str | Num]:
    parts: list[str | Num] = []
    for _, run, source in members:
        parts += [", " if parts else "", Num(f"{run.recipe}/{run.name}", source.href() + "/")]
    return parts


def names_of(runs: Sequence[Run]) -> list[str]:
    """What to call runs on a page: the recipe, with seed or id where that is not enough."""
    names = [run.recipe for run in runs]
    for extra in ((lambda r: f"seed {_seed(r)}"), (lambda r: r.name.rpartition("-")[2])):
        told = [
            f"{name}, {extra(run)}" if names.count(name) > 1 else name
            for name, run in zip(names, runs, strict=True)
        ]
        if len(set(told)) > len(set(names)):
            names = told
    return names


def _seed(run: Run) -> Any:
    return run.config.get("train", {}).get("seed", 42)


def table_of(members: Sequence[Member]) -> Table:
    """A row a run: precision, proof, losses, speed, memory."""
    rows: list[tuple[Cell, ...]] = []
    for name, run, source in members:
        verdict = verdict_of(run, source)[0]
        rows.append(
            (
                Num(name, source.href() + "/", ""),
                source.num(run.precision, RECEIPT, "precision"),
                source.num(verdict, RECEIPT, "status") if run.receipt else verdict,
                run.state,
                source.num(f"{run.last_step:,}", METRICS, "step"),
                first_last(run, source, "loss")[1],
                first_last(run, source, "eval_loss")[1],
                speed_fact(run, source).value,
                memory_fact(run, source).value,
            )
        )
    head = (
        "run",
        "precision",
        "verdict",
        "state",
        "steps",
        "loss",
        "held out",
        "tokens/s",
        "memory",
    )
    return Table(head, rows, numeric=(4, 5, 6, 7, 8))


def curves(members: Sequence[Member]) -> list[Section]:
    """Loss and held-out loss of all, then gradient norm and speed."""
    loss = overlay(members, "loss", "loss", "Training loss", "nats per token", size="wide")
    held = overlay(
        members, "eval_loss", "held_out_loss", "Held-out loss", "nats per token", size="wide"
    )
    norm = overlay(
        members, "grad_norm", "gradient_norm", "Gradient norm", "L2", from_zero=True, size="half"
    )
    speed = overlay(
        members, "tokens_per_s", "speed", "Speed", "tokens per second", from_zero=True, size="half"
    )
    found = tuple(plot for plot in (loss, held) if plot is not None)
    below = curves_section(norm, speed)
    return [*([Section("Loss", found)] if found else []), *([below] if below else [])]


def overlay(
    members: Sequence[Member], key: str, name: str, title: str, unit: str, **options: Any
) -> Plot | None:
    """One key of all runs over steps, a line each, smoothed where there are many points."""
    series, longest, widest, marks, sources = [], 0, 1, (), []
    for number, (label, run, source) in enumerate(members):
        x, y, broken = split(*series_of(run.rows, key))
        marks += broken
        if not len(y):
            continue
        window = window_of(len(y))
        longest, widest = max(longest, len(y)), max(widest, window)
        x, y = envelope(x, smoothed(y, window), BUCKETS)
        marker = "o" if len(y) <= 30 and key == "eval_loss" else ""
        series.append(Series(label, x.tolist(), y.tolist(), marker=marker, **style(number)))
        sources.append(Num(label, source.href(METRICS), key))
    if not series:
        return None
    ends = "; ".join(f"{s.label} ends at {s.y[-1]:.4g}" for s in series)
    return Plot(
        name,
        title,
        unit,
        f"{title} over steps: {ends}.",
        tuple(series),
        note=said(longest, widest, BUCKETS),
        sources=tuple(sources),
        marks=marks,
        **options,
    )


def _differences(members: Sequence[Member]) -> list[Section]:
    """Keys of the configuration that the runs do not share."""
    flat = [_flat(run.config) for _, run, _ in members]
    keys = [
        key
        for key in dict.fromkeys(k for one in flat for k in one)
        if len({str(one.get(key)) for one in flat}) > 1
    ]
    rows = [
        (key, *(source.num(str(one.get(key, MISSING)), CONFIG, key)
                for one, (_, _, source) in zip(flat, members, strict=True)))
        for key in keys
    ]  # fmt: skip
    head = ("key", *(name for name, _, _ in members))
    empty: Block = Para(words("Nothing: the configurations are the same."))
    return [Section("What differs", (Table(head, rows) if rows else empty,))]


def _flat(data: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def fold(name: str, run: Run, source: Source) -> Section:
    """All of one run in one folded section: verdict, layers, samples, environment."""
    verdict, tone, lead = verdict_of(run, source)
    blocks: list[Block] = [Para(words(f"{verdict}. ", lead), loud=tone == "bad")]
    for section in (what_ran(run, source), samples(run, source), environment(run, source)):
        blocks += section.blocks if section else ()
    return Section(name, tuple(blocks), folded=True)


def final_loss(run: Run, source: Source, key: str) -> Num:
    """The last loss of a run, linked."""
    x, y, _ = split(*series_of(run.rows, key))
    if not len(y):
        return Num(MISSING)
    return source.num(fixed(float(y[-1])), METRICS, f"{key} at step {x[-1]:.0f}")
