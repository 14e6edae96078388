"""The command line's `benchmark`: speed and memory of recipes, measured side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from finetune.cli_estimate import AsJson, Overrides
from finetune.errors import ConfigError

INTERRUPTED, NOTHING_MEASURED = 130, 1


def benchmark(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name, or path to a YAML file.")],
    overrides: Overrides = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(metavar="RECIPE", help="Another to compare it with; may be given again."),
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help='Micro-batches and lengths: "batch=1,2,4 length=512,2048".')
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each round.")] = 10,
    rounds: Annotated[
        int | None,
        typer.Option(help="Processes for each point; 3 where something is compared, else 1."),
    ] = None,
    ladder: Annotated[
        str | None, typer.Option(help="lora or full: step by step from stock libraries to here.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A ladder's step, or part of several names.")
    ] = None,
    all_points: Annotated[
        bool, typer.Option("--all", help="Also what is larger than one that did not fit.")
    ] = False,
    force: Annotated[bool, typer.Option(help="Also what is predicted far too large.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of benchmarks.")] = Path("runs/benchmark"),
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Measure speed and memory: random weights, synthetic tokens, each point a process."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv were both asked for", fix="leave one of them out")
    from finetune.benchmarking.runner import benchmark as measure

    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    found = measure(
        recipe,
        vs=vs or (),
        overrides=overrides or (),
        grid=grid,
        steps=steps,
        rounds=rounds,
        ladder=ladder,
        only=only or (),
        out=out,
        force=force,
        all_points=all_points,
        say=lambda line: progress.print(line, style="dim"),
    )
    if as_json:
        print(found.to_json())
    elif as_csv:
        sys.stdout.write(found.to_csv())
    else:
        console = Console(highlight=False, width=max(120, Console().width))
        console.print(found)
        console.print(f"rows: {found.folder}/benchmark.json and .csv", soft_wrap=True)
    if found.interrupted:
        progress.print(f"interrupted; rows until then are in {found.folder}", style="yellow")
        sys.exit(INTERRUPTED)
    if not any(row.rounds for row in found.rows):  # what failed or did not fit is told in its row
        sys.exit(NOTHING_MEASURED)
