"""What a run folder holds, and whether it can be exported.

A run that ended leaves `config.yaml`, `receipt.json`, `report.json` and `model/`; one that was
interrupted or stopped has no `model/`, and there is nothing to export.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.config import RunConfig
from finetune.errors import ConfigError
from finetune.recipe import load_recipe
from finetune.runs import read_run

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class FinishedRun:
    """A run that can be exported.

    Attributes:
        folder: the run folder.
        config: what was run.
        model: the folder of trained weights, plain Hugging Face weights or a plain adapter.
        status: of the proof, `proven` or why not.
        eval_loss: held-out loss that the run reported, None without held-out rows.
    """

    folder: Path
    config: RunConfig
    model: Path
    status: str
    eval_loss: float | None

    @property
    def has_adapter(self) -> bool:
        """Whether `model` holds an adapter; else it holds all weights."""
        return (self.model / ADAPTER_CONFIG).is_file()


def open_run(folder: Path | str) -> FinishedRun:
    """Read a run folder.

    Raises:
        ConfigError: it is no run folder, or the run has left no weights.
    """
    run = read_run(folder)
    folder = run.folder
    model = folder / "model"
    if not model.is_dir():
        why = {
            "interrupted": "it was interrupted before its end",
            "stopped": run.receipt.get("run", {}).get("stopped", ""),
            "failed": "it ended in an error",
            "running": "it has not ended yet",
            "killed": "it was killed before its end",
        }.get(run.state, "it ended, and its model/ was removed")
        raise ConfigError(
            f"the run {str(folder)!r} has no trained weights",
            where=str(model.resolve()),
            why=why,
            fix=f"let it end: train.resume_from_checkpoint={folder} goes on from its last "
            "checkpoint, if it saved one",
        )
    if not run.receipt:
        raise ConfigError(
            f"the run {str(folder)!r} has no receipt",
            where=str((folder / "receipt.json").resolve()),
            why="an export says what of the run was proven",
            fix="let the run end, or run it again",
        )
    config = load_recipe(str(folder / "config.yaml")).config
    status, eval_loss = run.receipt["status"], run.report.get("eval_loss")
    return FinishedRun(folder, config, model, status, eval_loss)
