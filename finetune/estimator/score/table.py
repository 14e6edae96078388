"""The scoreboard as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.estimator.score.scoreboard import Scoreboard, Statistics


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
        table = Table(title=title, title_justify="left")
        for name in ("class", "by", "rows", "median", "p90", "p95", "worst", "under", "lowest"):
            table.add_column(name, justify="left" if name in ("class", "by") else "right")
        for group, line in lines.items():
            label = group
            for who, found in line.items():
                if found is not None:
                    table.add_row(label, who, *_cells(found))
                    label = ""
        console.print(table)
        right, count = board.right(apart=apart)
        if count:
            console.print(f"Out of memory: {right} of {count} foreseen.")
    placed = len(board.scored) + len(board.verdicts)
    console.print(f"{board.rows} rows: {placed} scored, {len(board.unscored)} not:")
    for reason, count in board.reasons().items():
        console.print(f"  {count:4d}  {reason}", markup=False, highlight=False)


def render(board: Scoreboard) -> str:
    """The same as text."""
    import io

    from rich.console import Console

    text = io.StringIO()
    print_board(board, Console(width=110, file=text))
    return text.getvalue()
