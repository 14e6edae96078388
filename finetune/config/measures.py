"""What runs are judged by: a row for each figure, whatever the method that logs it.

A method's row names its measures (`finetune.config.methods`); `compare`, reports and lists of runs
read them here, so that none knows a method. A figure of an evaluation ends at its last one. One of
single steps ends at the mean over the last tenth of them, at least ten: one step is eight rows or
so, and of a reward a few answers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

LAST_SHARE, LAST_LEAST = 0.1, 10


def ends(column: str, rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Logged values whose means are where a column begins and ends; none if it was never logged.

    What begins it lies before its end, save in a run of ten values or fewer: there it is the first.
    """
    values = [row[column] for row in rows if isinstance(row.get(column), (int, float))]
    count = max(LAST_LEAST, round(len(values) * LAST_SHARE))
    count = 1 if column.startswith("eval_") else count
    return values[: min(count, max(1, len(values) - count))], values[-count:]


@dataclass(frozen=True)
class Measure:
    """A figure that runs are judged by.

    Attributes:
        name: in a sentence.
        columns: of `metrics.jsonl`; the first that a run has is read.
        margin: gap that counts as none: of a loss as FP8 guides have it, else by default.
        unit: of gaps and margins: `%` of a loss that stays above zero, or points (`pt`), which are
            hundredths of a share, of a reward or of a nat.
        rises: True if more is better.
    """

    name: str
    columns: tuple[str, ...]
    margin: float
    unit: Literal["%", "pt"] = "pt"
    rises: bool = True

    @property
    def title(self) -> str:
        return self.name.capitalize()

    def column(self, rows: Sequence[dict[str, Any]]) -> str:
        """The column that these rows have; empty if none."""
        return next((key for key in self.columns if any(key in row for row in rows)), "")

    def last(self, rows: Sequence[dict[str, Any]]) -> list[float]:
        """The values whose mean is the end; none if it was never logged."""
        return ends(self.column(rows), rows)[1]

    def end(self, rows: Sequence[dict[str, Any]]) -> float | None:
        """Where it ends; None if it was never logged."""
        values = self.last(rows)
        return fmean(values) if values else None


MEASURES = {
    "train": Measure("training loss", ("loss",), 0.02, "%", rises=False),
    "eval": Measure("eval loss", ("eval_loss",), 0.03, "%", rises=False),
    "loss": Measure("loss", ("eval_loss", "loss"), 0.02, rises=False),
    "accuracy": Measure(
        "preference accuracy",
        ("eval_rewards/accuracies", "eval_accuracy", "rewards/accuracies", "accuracy"),
        0.02,
    ),
    "reward": Measure("reward", ("eval_reward", "reward"), 0.05),
}
"""Name in `--margins` -> its measure. The training loss contains the rounding of the FP8 forward, a
constant few thousandths of a nat, which dominates where a run has memorized its rows; the eval loss
is in high precision unless `precision.eval` differs: it judges the learned weights. A `loss` that
falls to zero, as in preferences, has no relative gap: its points are 0.01 nats.
"""
LOSSES = ("train", "eval")
"""Measures of a loss of words, in nats per token, which alone has a perplexity."""
