"""The command line's `report`: a page of a run, of several, or of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli_estimate import AsJson


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folder of a run or comparison, recipe, or `last`."),
    ],
    to: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html, report.md and plots: what ran, how it went, what it cost."""
    from finetune.reports.writer import write_report

    done = write_report(runs, to)
    if as_json:
        print(json.dumps(done.facts(), indent=1))
        return
    print(f"{done.verdict}\nreport: {done.html}")
