"""What a run folder holds, and whether it can be exported.

A run that ended leaves `config.yaml`, `receipt.json`, `report.json` and `model/`; one that was
interrupted or stopped has no `model/`, and there is nothing to export.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config import RunConfig
from finetune.errors import ConfigError
from finetune.recipe import load_recipe

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
    folder = Path(folder).expanduser()
    if not (folder / "config.yaml").is_file() or not (folder / "receipt.json").is_file():
        raise _no_run(folder)
    receipt: dict[str, Any] = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
    model = folder / "model"
    if not model.is_dir():
        ended = receipt.get("run", {})
        why = ended.get("stopped") or "it has not ended yet, or was killed"
        if ended.get("interrupted"):
            why = "it was interrupted before its end"
        raise ConfigError(
            f"the run {str(folder)!r} has no trained weights",
            where=str(model.resolve()),
            why=why,
            fix=f"let it end: train.resume_from_checkpoint={folder} goes on from its last "
            "checkpoint, if it saved one",
        )
    report = folder / "report.json"
    measured = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    config = load_recipe(str(folder / "config.yaml")).config
    return FinishedRun(folder, config, model, receipt["status"], measured.get("eval_loss"))


def _no_run(folder: Path) -> ConfigError:
    inside = sorted(p.parent for p in folder.glob("*/receipt.json"))
    inside = inside or sorted(p.parent for p in folder.glob("*/*/receipt.json"))
    why = "no such folder"
    if folder.is_dir():
        why = "a run folder holds config.yaml, receipt.json and model/"
    newest = f"the newest run in it is {inside[-1]}" if inside else ""
    return ConfigError(
        f"{str(folder)!r} is no run folder",
        where=str(folder.resolve()),
        why=why,
        fix=newest or "give the folder that the run printed at its end, runs/<recipe>/<time>-<id>",
    )
