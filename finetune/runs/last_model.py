"""The model of a run that ended between its last step and the saving of its model. No torch.

A signal in the evaluation after training, a kill or a full disk can end a run there. No step is
left that a resumed run could train. The last checkpoint holds the model's files, beside those that
only training reads (optimizer, schedule, random generators).
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError, writing
from finetune.runs.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    Checkpoint,
    newest_checkpoint,
    scaling_file,
)
from finetune.runs.folder import RunFolder, finite, json_of, write_whole

MODEL = "model"
"""Folder of a run's model."""
OF_TRAINING = ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "fp8_scaling*", "README.md")
"""Files of a checkpoint that are not part of the model; README.md is PEFT's empty card."""


@contextlib.contextmanager
def saved_whole(folder: Path, *, writes: bool = True) -> Iterator[Path]:
    """A folder to save a run's model in, which becomes `model/` when all of it is written.

    Args:
        writes: of several processes the first one renames it.
    """
    # A leading dot: what is half written looks like no model to whoever lists the folder.
    partial = folder / ".model"
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        if writes:
            partial.rename(folder / MODEL)
    finally:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)


def save_last_model(folder: Path, *, writes: bool = True) -> Path | None:
    """Save the model of a run's last step, which is all that was left to do.

    The run then counts as finished, if it has a receipt.

    Args:
        writes: of several processes the first one does, and the others only answer.

    Returns:
        The checkpoint that the model is of; None if steps are left.

    Raises:
        ConfigError: the run has its model, or it cannot be written.
    """
    config, newest = RunFolder(folder).config, newest_checkpoint(folder / CHECKPOINTS)
    state = Checkpoint(newest).state if newest is not None else {}
    # With steps left the run is to be resumed: its last checkpoint is not its result.
    if newest is None or state.get("global_step", 0) < state.get("max_steps", math.inf):
        return None
    train = TrainSection(config.get("train", {}))
    if train.load_best_model_at_end:
        # By its name alone: the trainer stored the path that the run had then, and it may have been
        # moved.
        newest = folder / CHECKPOINTS / Path(str(state.get("best_model_checkpoint"))).name
    # A damaged checkpoint is left to `resume`, which goes back to an earlier one and says so.
    if not (folder / MODEL).exists() and Checkpoint(newest).problem(contents=True):
        return None
    if not writes:
        return newest
    if (folder / MODEL).exists():
        raise _ended(folder, train, state)
    scales = newest / scaling_file(0)
    with writing(
        "the model cannot be saved", where=str(folder), fix="make room there, then resume"
    ):
        with saved_whole(folder) as partial:
            others = shutil.ignore_patterns(*OF_TRAINING, STATE, MANIFEST)
            shutil.copytree(newest, partial, ignore=others)
        # Evaluation in FP8 multiplies by the scales that training ended with; without the file a
        # reloaded model would begin with others.
        if config.get("precision", {}).get("eval") == "fp8" and scales.is_file():
            shutil.copy(scales, folder)
        if receipt := json_of(folder / "receipt.json"):
            receipt["run"] = {**receipt.get("run", {}), "interrupted": False, "stopped": ""}
            # It was of the process that was stopped, and the run counts as finished from here on.
            receipt["run"].pop("exit_code", None)
            write_whole(folder / "receipt.json", json.dumps(receipt, indent=1) + "\n")
            report = json_of(folder / "report.json") | {"folder": str(folder), "interrupted": False}
            write_whole(folder / "report.json", json.dumps(report, indent=1) + "\n")
    return newest


def _ended(folder: Path, train: TrainSection, state: dict[str, Any]) -> ConfigError:
    """The error for a run that has its model, with what trains it further."""
    key, more = "max_steps", 2 * state["global_step"]
    if not (finite(train.max_steps) or 0) > 0:
        key, more = "num_train_epochs", 2 * math.ceil(finite(state.get("epoch")) or 1)
    name = shlex.quote(str(folder))
    return ConfigError(
        f"the run {str(folder)!r} has ended",
        where=str(folder / MODEL),
        why=f"no step is left to train after step {state['global_step']}",
        fix=f'python -m finetune generate {name} "..."; to train on: python -m finetune resume '
        f"{name} train.{key}={more} 'resume.allow=[train.{key}]'",
    )
