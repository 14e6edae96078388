"""Page of several runs: one table, shared plots, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.analysis.report.content import (
    CONFIG,
    MISSING,
    RECEIPT,
    Block,
    Cell,
    Num,
    Page,
    Para,
    RunSource,
    Section,
    Table,
    words,
)
from finetune.analysis.report.curves import overlay, side_by_side
from finetune.analysis.report.run_page import (
    environment,
    first_last,
    last_step,
    loud_lines,
    memory_fact,
    samples,
    speed_fact,
    verdict_of,
    what_ran,
)
from finetune.runs.folder import Run

HEAD = ("run", "precision", "verdict", "state", "steps", "loss", "held out", "tokens/s", "memory")


def several_page(members: Sequence[RunSource]) -> Page:
    proven = sum(s.run.proven for s in members)
    links: list[str | Num] = []
    for s in members:
        links += [", " if links else "", Num(f"{s.run.recipe}/{s.run.name}", s.href() + "/")]
    return Page(
        title=" · ".join(dict.fromkeys(s.run.recipe for s in members)),
        about=words("Several runs: ", *links),
        verdict="All proven" if proven == len(members) else "Not all proven",
        tone="good" if proven == len(members) else "bad",
        lead=words(
            "The precision of each is proven by its own receipt; the table names it."
            if proven == len(members)
            else f"Of {proven} of {len(members)} the receipt proves the precision; the table names "
            "it, and for the others what is missing."
        ),
        loud=tuple(words(f"{s.label}: ", line) for s in members for line in loud_lines(s)),
        facts=(),
        sections=(
            Section("Runs", (Table(HEAD, [*map(_row, members)], numeric=(4, 5, 6, 7, 8)),)),
            *_curves(members),
            _differences(members),
            *(fold(s) for s in members),
        ),
    )


def names_of(runs: Sequence[Run]) -> list[str]:
    """Name runs on a page: the recipe, with seed or id where names repeat."""
    names = [run.recipe for run in runs]
    for extra in ((lambda r: f"seed {_seed(r)}"), (lambda r: r.name.rpartition("-")[2])):
        longer = [
            f"{name}, {extra(run)}" if names.count(name) > 1 else name
            for name, run in zip(names, runs, strict=True)
        ]
        if len(set(longer)) > len(set(names)):
            names = longer
    return names


def _seed(run: Run) -> Any:
    return run.config.get("train", {}).get("seed", 42)


def _row(s: RunSource) -> tuple[Cell, ...]:
    verdict = verdict_of(s)[0]
    return (
        Num(s.label, s.href() + "/", ""),
        s.num(s.run.precision, RECEIPT, "precision"),
        s.num(verdict, RECEIPT, "status") if s.run.receipt else verdict,
        s.run.state,
        last_step(s),
        first_last(s, "loss")[1],
        first_last(s, "eval_loss")[1],
        speed_fact(s).value,
        memory_fact(s).value,
    )


def _curves(members: Sequence[RunSource]) -> list[Section]:
    unit, half = "nats per token", {"from_zero": True, "size": "half"}
    losses = (
        overlay(members, "loss", "loss", "Training loss", unit, size="wide"),
        overlay(members, "eval_loss", "held_out_loss", "Held-out loss", unit, size="wide"),
    )
    found = tuple(plot for plot in losses if plot is not None)
    below = side_by_side(
        overlay(members, "grad_norm", "gradient_norm", "Gradient norm", "L2", **half),
        overlay(members, "tokens_per_s", "speed", "Speed", "tokens per second", **half),
    )
    return [*([Section("Loss", found)] if found else []), *([below] if below else [])]


def _differences(members: Sequence[RunSource]) -> Section:
    flat = [_flat(s.run.config) for s in members]
    rows = [
        (key, *(s.num(str(one.get(key, MISSING)), CONFIG, key)
                for one, s in zip(flat, members, strict=True)))
        for key in dict.fromkeys(k for one in flat for k in one)
        if len({str(one.get(key)) for one in flat}) > 1
    ]  # fmt: skip
    head = ("key", *(s.label for s in members))
    empty: Block = Para(words("Nothing: the configurations are the same."))
    return Section("What differs", (Table(head, rows) if rows else empty,))


def _flat(data: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def fold(s: RunSource, title: str = "") -> Section:
    """Put a run in one folded section: verdict, layers, samples, environment."""
    verdict, tone, lead = verdict_of(s)
    blocks: list[Block] = [Para(words(f"{verdict}. ", lead), loud=tone == "bad")]
    for section in (what_ran(s), samples(s), environment(s)):
        blocks += section.blocks if section else ()
    return Section(title or s.label, tuple(blocks), folded=True)
