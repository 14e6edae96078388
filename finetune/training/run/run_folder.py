"""The folder of a run: its name, what a run begins with there, and room for what it will save."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config.recipe import Recipe
from finetune.config.schema import RunConfig
from finetune.errors import REFUSED, CheckpointError, writing
from finetune.hardware.device import processes, rank
from finetune.runs.card import model_card
from finetune.runs.checkpoints import CHECKPOINTS, checkpoints_in
from finetune.runs.folder import write_start
from finetune.runs.last_model import MODEL
from finetune.runs.receipt import RunReport
from finetune.training.helper.optimizer.low_bit import bytes_of_states
from finetune.training.run.preflight import Preflight
from finetune.units import size

if TYPE_CHECKING:
    from torch import nn


def name_folder(out: Path, recipe: str, label: str) -> Path:
    """Return `out/<recipe>/<time>-<short id>-<precision>/`, the same on every process.

    Args:
        recipe: name of the recipe, whose precision an override may have replaced.
        label: executed precision, such as `FP8 emulated/delayed`.
    """
    from accelerate.utils import broadcast_object_list

    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    if processes() > 1:
        # Each process would draw another id, and most would write where nobody looks.
        stamp = broadcast_object_list([stamp])[0]
    kind, _, engine = label.lower().partition(" ")
    scaling = re.sub(r"[^a-z0-9]+", "-", engine.rpartition("/")[2]).strip("-")
    return out / recipe / "-".join(part for part in (stamp, kind, scaling) if part)


def start_folder(folder: Path, recipe: Recipe, out: Path) -> None:
    """Make a run folder, and write what a run begins with: `run.json` and `config.yaml`.

    Raises:
        ConfigError: it cannot be made; `out` is named there.
    """
    failure, fix = f"the run folder {str(folder)!r} cannot be made", "choose another with --out"
    with writing(failure, where=f"--out {out}", fix=fix):
        folder.mkdir(parents=True)
        write_start(folder, recipe.name)
        (folder / "config.yaml").write_text(recipe.to_yaml(), encoding="utf-8")


@contextlib.contextmanager
def discarded_unless_begun(folder: Path) -> Iterator[None]:
    """Remove a run folder if Ctrl-C or a refusal ends the run before it logged or saved a step."""
    try:
        yield
    except (*REFUSED, KeyboardInterrupt):
        metrics = folder / "metrics.jsonl"
        logged = metrics.is_file() and metrics.stat().st_size
        # A folder with a logged step is evidence, however the run ended.
        if rank() == 0 and not logged and not checkpoints_in(folder / CHECKPOINTS):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def write_card(folder: Path, config: RunConfig, report: RunReport) -> None:
    """Write the card of a run's model, if it has one: an interrupted run has none."""
    if (folder / MODEL).is_dir():
        card = model_card(config, asdict(report.receipt), asdict(report))
        (folder / MODEL / "README.md").write_text(card, encoding="utf-8")


# ------------------------------------------------------------------------------------ disk space


def bytes_of_weights(model: nn.Module, config: RunConfig) -> float:
    """Bytes of the saved model: adapters alone, or all of its weights."""
    saved = (p for p in model.parameters() if p.requires_grad or config.lora is None)
    return float(sum(p.nbytes for p in saved))


def bytes_of_checkpoint(model: nn.Module, config: RunConfig) -> float:
    """Bytes of a checkpoint: the saved weights and the optimizer's moments."""
    only_model = config.train.save_only_model
    moments = 0.0 if only_model else bytes_of_states(model, config.train)
    return bytes_of_weights(model, config) + moments


def checkpoints_at_once(config: RunConfig) -> tuple[int, int]:
    """The most checkpoints of a run on the disk at one time, and of these the ones that stay.

    One more than are kept, since one is deleted when the next is whole; also where all are kept,
    for that of the first step. Where their number is known only from rows or eval losses
    (`save_strategy=best`), one is counted besides that: such a run may need more.
    """
    train, kept = config.train, config.checkpoints
    strategy = str(train.save_strategy)
    if strategy in ("no", "False", "false"):
        return 0, 0
    every, steps = train.save_steps, train.max_steps
    made = 1
    if strategy == "steps" and steps > 0:
        every = every if every >= 1 else every * steps
        made = math.ceil(steps / every)
    elif strategy == "epoch":
        made = math.ceil(train.num_train_epochs)
    limit = train.save_total_limit
    if kept.keep_last is not None:
        limit = kept.keep_last + kept.keep_best
    stay = min(made, limit or made)
    # One more than stay at a time: the older one is deleted when the new one is whole.
    more = made > stay or kept.first_step
    return stay + 1 if more else stay, stay


def check_disk(run: Preflight, out: Path) -> None:
    """Raise `CheckpointError` for a run whose checkpoints and model have no room on their disk."""
    config = run.config
    each, model = (
        bytes_of_checkpoint(run.meta_model, config),
        bytes_of_weights(run.meta_model, config),
    )
    most, stay = checkpoints_at_once(config)
    # The folder itself may not be there yet; its disk is the nearest existing folder's.
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(there).free
    # The model is saved when no checkpoint is being written any more.
    need = max(most * each, stay * each + model)
    if need <= free:
        return
    room = int((free - model) // each) if each else 0
    fix = "make room there, or choose another folder with --out"
    if stay > 1 and room > 1:
        fix = f"checkpoints.keep_last={max(1, room - 2)}, or {fix}"
    raise CheckpointError(
        f"what the run will save has no room on the disk: {size(need)}, and {size(free)} are free",
        where=str(there),
        why=f"{most} checkpoints of {size(each)} at one time, and a model of {size(model)}",
        fix=f"{fix}; --force starts anyway",
    )
