"""Pages of one run, of several, and of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.analysis.benchmark.result import BENCHMARK, RIGHT, Benchmark
from finetune.analysis.report.curves import health, loss_plots, method_plots, speed_plots
from finetune.analysis.report.elements import (
    CONFIG,
    MISSING,
    RECEIPT,
    Line,
    Num,
    Page,
    PageSource,
    Table,
)
from finetune.analysis.report.run_source import RunSource
from finetune.runs.card import without_paths
from finetune.runs.folder import RunFolder


def page_of(runs: Sequence[RunSource]) -> Page:
    """The page of one run, or a table of several with shared plots and what differs."""
    parts = {"loss": loss_plots(runs), "rewards": method_plots(runs), "speed": speed_plots(runs)}
    if len(runs) == 1:
        (s,) = runs
        parts = {"s": s, "health": health(s)} | parts
        return Page(s.title, s.setting, *s.verdict, "run.j2", parts)
    proven = sum(s.run.proven and not s.fell_back for s in runs)
    parts |= {"runs": runs, "proven": proven, "table": table_of(runs)}
    whole = proven == len(runs)
    return Page(
        title=Line((" · ".join(dict.fromkeys(s.run.recipe for s in runs)),)),
        setting=Line(),
        verdict=Num("All verified" if whole else "Not all verified"),
        tone="good" if whole else "bad",
        template="several.j2",
        parts=parts | {"differences": _differences(runs)},
    )


def benchmark_page(found: Benchmark, source: PageSource) -> Page:
    """The page of a benchmark or matrix: the tables that a terminal shows, and their notes."""
    tables = [
        Table(
            tuple(head),
            [[source.num(text, BENCHMARK, "rows") for text in row] for row in rows],
            tuple(i for i, title in enumerate(head) if title in RIGHT),
        )
        for head, *rows in found.shown_tables()
    ]
    whole = not any(row.error for row in found.rows)
    return Page(
        title=Line((found.title,)),
        setting=Line(),
        verdict=source.num(found.headline, BENCHMARK, "rows").capitalized,
        tone="good" if whole else "plain",
        template="benchmark.j2",
        parts={"tables": tables, "notes": found.notes(), "folder": source.link(source.folder.name)},
    )


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Name runs on a page: the recipe, with the seed or a number where names repeat."""
    recipes = [run.recipe for run in runs]
    seeds = [f"{run.recipe}, seed {run.config.get('train', {}).get('seed', 42)}" for run in runs]
    numbers = [f"{run.recipe}, run {number}" for number, run in enumerate(runs, 1)]
    # The shortest names that tell the runs apart.
    return next((names for names in (recipes, seeds) if len(set(names)) == len(runs)), numbers)


def table_of(runs: Sequence[RunSource]) -> Table:
    """Runs in a line each: precision, verdict, losses, speed and memory."""
    learned = [s.learned for s in runs]
    names = [*dict.fromkeys(name for one in learned for name in one)]
    head = ("run", "precision", "verdict", "state", "steps", *names)
    rows = [
        (
            s.link(s.label),
            s.num(s.run.precision, RECEIPT, "precision"),
            s.verdict[0],
            s.run.state,
            s.last_step,
            *(own[name].last if name in own else MISSING for name in names),
            s.speed,
            s.memory,
        )
        for s, own in zip(runs, learned, strict=True)
    ]
    numeric = tuple(range(4, len(head) + 2))
    return Table((*head, "tokens/s", "memory"), rows, numeric)


def _differences(runs: Sequence[RunSource]) -> Table:
    flat = [_flat(s.run.config) for s in runs]
    rows = [
        (key, *(s.num(without_paths(str(one.get(key, MISSING))), CONFIG, key)
                for one, s in zip(flat, runs, strict=True)))
        for key in dict.fromkeys(k for one in flat for k in one)
        # As text: a value from YAML and the same from JSON may be of two types.
        if len({str(one.get(key)) for one in flat}) > 1
    ]  # fmt: skip
    return Table(("key", *(s.label for s in runs)), rows)


def _flat(data: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        nested = isinstance(value, dict) and value
        found |= _flat(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return found
