"""A finished run of an experiment, read from its folder."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import ConfigError
from finetune.runs.folder import RunFolder


def read_outcome(folder: Path) -> RunFolder:
    """Read a finished run.

    Raises:
        ConfigError: a file of the run is missing, or holds nothing that can be read.
    """
    run = RunFolder(folder)
    files = {"receipt.json": run.receipt, "metrics.jsonl": run.rows, "steps.jsonl": run.steps}
    if unread := [name for name, content in files.items() if not content]:
        raise ConfigError(
            "a run of the experiment cannot be read",
            where=str(folder),
            why=f"{' and '.join(unread)} is missing, or holds nothing whole",
            fix="run the same command again: an experiment is read from its run folders",
        )
    return run
