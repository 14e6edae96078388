"""Figures of a finished run, from its `metrics.jsonl`, `steps.jsonl` and `receipt.json`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.analysis.statistics import Step
from finetune.config.measures import MEASURES
from finetune.errors import ConfigError
from finetune.runs.folder import Run, scores_in


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

    def last(self, name: str) -> list[float]:
        """The values whose mean is the end of a measure; none if it was never logged."""
        return MEASURES[name].last(self.run.rows)

    def end(self, name: str) -> float | None:
        """Where a measure ends; None if it was never logged."""
        return MEASURES[name].end(self.run.rows)

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
