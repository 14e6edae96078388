"""Figures of a finished run, from `metrics.jsonl`, `steps.jsonl` and `receipt.json` of its folder.

The final training loss is the mean over the last tenth of the steps, at least ten: the loss of one
step is that of eight rows or so. It contains the rounding of the FP8 forward, a constant few
thousandths of a nat, which dominates where a run has memorized its rows. The final eval loss is the
last evaluation, in high precision unless `precision.eval` differs: it judges the learned weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from finetune.analysis.statistics import Step
from finetune.errors import ConfigError
from finetune.runs.folder import Run, scores_in

LAST_SHARE, LAST_LEAST = 0.1, 10


@dataclass(frozen=True)
class Outcome:
    """A finished run of an experiment."""

    run: Run

    @property
    def receipt(self) -> dict[str, Any]:
        return self.run.receipt

    @cached_property
    def steps(self) -> list[Step]:
        return [Step(row["step"], row["seconds"], row["tokens"]) for row in self.run.steps]

    @cached_property
    def losses(self) -> list[float]:
        """Training losses of the last steps, nats per token; empty if none was logged."""
        losses = [row["loss"] for row in self.run.rows if "loss" in row]
        return losses[-max(LAST_LEAST, round(len(losses) * LAST_SHARE)) :]

    @property
    def train(self) -> float:
        """Final training loss: the mean of `losses`."""
        return fmean(self.losses)

    @property
    def eval(self) -> float | None:
        """Last eval loss; None without evaluation rows."""
        return next((r["eval_loss"] for r in reversed(self.run.rows) if "eval_loss" in r), None)

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Last scores of each task: the verb `evaluate` adds some of other tasks."""
        found = [scores_in(row) for row in self.run.rows]
        return {task: scores for row in found for task, scores in row.items()}


def read_outcome(folder: Path) -> Outcome:
    """Read the figures of a finished run.

    Raises:
        ConfigError: a file of the run is missing, or holds nothing that can be read.
    """
    run = Run(folder)
    files = {"receipt.json": run.receipt, "metrics.jsonl": run.rows, "steps.jsonl": run.steps}
    if unread := [name for name, content in files.items() if not content]:
        raise ConfigError(
            "a run of the experiment cannot be read",
            where=str(folder),
            why=f"{' and '.join(unread)} is missing, or holds nothing whole",
            fix="run the same command again: an experiment is read from its run folders",
        )
    return Outcome(run)
