"""The scoreboard as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tests.benchmarks.score.scoreboard import Scoreboard, Statistics
    from tests.benchmarks.score.speed import SpeedBoard


def _cells(s: Statistics) -> list[str]:
    shares = (s.median, s.p90, s.p95, s.worst, s.under)
    return [str(s.count), *(f"{100 * x:.1f} %" for x in shares), f"{100 * s.lowest:+.1f} %"]


def print_board(board: Scoreboard, console: Console) -> None:
    """Print two tables, the verdicts and the reasons of what is not scored."""
    from rich.table import Table

    for title, apart in (("Rows looked at while developing", False), ("Held-out rows", True)):
        lines = board.table(apart=apart)
        if not any(s for line in lines.values() for s in line.values()):
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("class", "by", "rows", "median", "p90", "p95", "worst", "under", "lowest"):
            table.add_column(name, justify="left" if name in ("class", "by") else "right")
        for group, line in lines.items():
            label = group
            for who, found in line.items():
                if found is not None:
                    table.add_row(label, who, *_cells(found))
                    label = ""
        console.print(table, soft_wrap=True)
        right, count = board.right(apart=apart)
        if count:
            wrong, ran = board.false_alarms(apart=apart)
            console.print(
                f"Out of memory: {right} of {count} foreseen; of {ran} rows that ran, {wrong} were "
                "predicted not to fit."
            )
    placed = len(board.scored) + len(board.verdicts)
    console.print(f"{board.rows} rows: {placed} scored, {len(board.unscored)} not:")
    for reason, count in board.reasons().items():
        console.print(f"  {count:4d}  {reason}", markup=False, highlight=False)


def print_speeds(board: SpeedBoard, console: Console) -> None:
    """Print what was predicted of published speeds, rows held out apart."""
    from rich.table import Table

    table = Table(title="Speed", title_justify="left", box=None, pad_edge=False)
    for name in ("rows", "times", "median error", "FP8/BF16 pairs", "within 0.08", "sign right"):
        table.add_column(name, justify="left" if name == "rows" else "right")
    for title, apart in (("looked at while developing", False), ("held out", True)):
        found = board.part(apart=apart)
        table.add_row(
            title,
            f"{found['rows']:.0f}",
            _percent(found["median_error"], 1),
            f"{found['pairs']:.0f}",
            _percent(found["within_0.08"]),
            _percent(found["sign_right"]),
        )
    console.print(table, soft_wrap=True)
    console.print(f"{len(board.reasons)} rows tell no speed, or none that can be predicted.")


def _percent(share: float, digits: int = 0) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def render(board: Scoreboard) -> str:
    """The same as text."""
    import io

    from rich.console import Console

    text = io.StringIO()
    print_board(board, Console(width=110, file=text))
    return text.getvalue()
