"""Score the shipped estimator against published measurements.

    python -m tests.benchmarks.score tests/benchmarks/score/measured_runs.csv [--json]

Every row is predicted, or listed with the reason why it is not; rows that were held out are scored
apart. `--rows TEXT` looks only at rows whose id, framework or model contain the text, `--limit N`
at N of them. With `--processes 2` two worker processes share the work; one that dies ends the
scoring with an error that names its row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

from rich.console import Console

from finetune.errors import FinetuneError
from finetune.logging import quiet_libraries
from tests.benchmarks.score.jobs import Mapped
from tests.benchmarks.score.rows import read_rows
from tests.benchmarks.score.scoreboard import score_csv
from tests.benchmarks.score.speed import score_speeds
from tests.benchmarks.score.table import print_board, print_speeds


def main() -> int:
    """Score a file; 1 where it cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="CSV of measurements, see tests/benchmarks/score")
    parser.add_argument("--json", action="store_true", help="machine-readable, with every row")
    parser.add_argument("--rows", default="", help="only rows whose id, framework or model have it")
    parser.add_argument("--limit", type=int, help="at most so many rows")
    parser.add_argument("--processes", type=int, default=0, help="workers; 0: none")
    parser.add_argument("--no-baselines", action="store_true", help="the estimator alone")
    args = parser.parse_args()
    counter = itertools.count()

    def wanted(mapped: Mapped) -> bool:
        row = mapped.row
        named = args.rows.lower() in f"{row.id} {row.framework} {row.model}".lower()
        return named and (args.limit is None or next(counter) < args.limit)

    progress = Console(stderr=True, highlight=False)
    quiet_libraries()
    try:
        read_rows(args.file)  # an unreadable file is an error that says so
        speeds = score_speeds(args.file)  # seconds, before what takes long and would be lost
        board = score_csv(
            args.file,
            progress=progress.print,
            baselines=not args.no_baselines,
            processes=args.processes,
            only=wanted,
        )
    except FinetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"memory": board.to_json(), "speed": speeds.to_json()}, indent=1))
        return 0
    console = Console(highlight=False, width=max(110, Console().width))
    print_board(board, console)
    print_speeds(speeds, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
