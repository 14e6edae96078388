"""Pages of one run and of several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from finetune.analysis.report.curves import health, loss_plots, speed_plots
from finetune.analysis.report.elements import CONFIG, MISSING, RECEIPT, Cell, Line, Num, Page, Table
from finetune.analysis.report.run_source import RunSource
from finetune.runs.card import without_paths
from finetune.runs.folder import Run


def run_page(s: RunSource) -> Page:
    parts = {"loss": loss_plots([s]), "health": health(s), "speed": speed_plots([s])}
    verdict, tone = s.verdict
    return Page(s.title, s.setting, verdict, tone, "run.j2", {"s": s} | parts)


# ------------------------------------------------------------------------------------ several runs


def several_page(runs: Sequence[RunSource]) -> Page:
    """One table, shared plots, and differences of the configurations."""
    proven = sum(s.run.proven and not s.fell_back for s in runs)
    head = ("run", "precision", "verdict", "state", "steps", "loss", "eval loss", "tokens/s")
    shown = {
        "table": Table((*head, "memory"), [*map(_row, runs)], numeric=(4, 5, 6, 7, 8)),
        "loss": loss_plots(runs),
        "speed": speed_plots(runs),
        "differences": _differences(runs),
    }
    title = " · ".join(dict.fromkeys(s.run.recipe for s in runs))
    whole = proven == len(runs)
    return Page(
        title=Line((title,)),
        setting=Line(),
        verdict=Num("All verified" if whole else "Not all verified"),
        tone="good" if whole else "bad",
        template="several.j2",
        parts={"runs": runs, "proven": proven} | shown,
    )


def names_of(runs: Sequence[Run]) -> list[str]:
    """Name runs on a page: the recipe, with seed, id or a number where names repeat."""
    names = [run.recipe for run in runs]
    seeds = [f"seed {run.config.get('train', {}).get('seed', 42)}" for run in runs]
    numbers = [f"run {number}" for number in range(1, len(runs) + 1)]
    for extra in (seeds, [_id_of(run) for run in runs], numbers):
        longer = [
            f"{name}, {more}" if names.count(name) > 1 else name
            for name, more in zip(names, extra, strict=True)
        ]
        if len(set(longer)) > len(set(names)):
            names = longer
    return names


def _id_of(run: Run) -> str:
    """`2cfd` of `20261123-063059-2cfd-fp8-rowwise`; of another name all of it."""
    stamped = re.match(r"\d{8}-\d{6}-([0-9a-f]{4})\b", run.name)
    return stamped[1] if stamped else run.name


def _row(s: RunSource) -> tuple[Cell, ...]:
    return (
        s.link(s.label),
        s.num(s.run.precision, RECEIPT, "precision"),
        s.verdict[0],
        *(s.run.state, s.last_step, s.course("loss").last, s.course("eval_loss").last),
        *(s.speed, s.memory),
    )


def _differences(runs: Sequence[RunSource]) -> Table:
    flat = [_flat(s.run.config) for s in runs]
    rows = [
        (key, *(s.num(without_paths(str(one.get(key, MISSING))), CONFIG, key)
                for one, s in zip(flat, runs, strict=True)))
        for key in dict.fromkeys(k for one in flat for k in one)
        if len({str(one.get(key)) for one in flat}) > 1
    ]  # fmt: skip
    return Table(("key", *(s.label for s in runs)), rows)


def _flat(data: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        nested = isinstance(value, dict) and value
        found |= _flat(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return found
