"""Writing of a run's checkpoints; see `finetune.runs.checkpoints` for their form.

What is in them is written and read as in any trainer under a session: weights by
`training.helper.checkpoint_weights`, FP8 scaling state by `training.helper.scaling_state`, sharded
ones by `training.checkpoints.sharded`.

A checkpoint is written beside the others under a hidden name, and renamed when every file of every
process is on the disk: a process that is killed while it saves leaves the earlier ones as they
were. Older ones are deleted after that, not before, and leave in one step too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from finetune.config.sections import CheckpointsConfig
from finetune.config.train_keys import TrainerArguments
from finetune.errors import CheckpointError, ConfigError, NonFiniteError, first_line
from finetune.hardware.unpromised import stands
from finetune.runs.checkpoints import (
    KEPT,
    MANIFEST,
    SAVING,
    STATE,
    Checkpoint,
    checkpoints_in,
    hashes_of,
    resume_command,
    superfluous,
)
from finetune.training.checkpoints.sharded import WholeFiles
from finetune.training.faults import is_of_the_disk, write_failure


class CheckpointKeeper(TrainerCallback):
    """Saves a trainer's checkpoints whole, and deletes those that are not to be kept.

    Attributes:
        precision: label of the session's, for the manifest.
        facts: what the manifest keeps for resuming (`resume.facts_of`).
        resumed: checkpoint that the run resumes from, if any.
        kept: which checkpoints are kept.
    """

    def __init__(
        self,
        precision: str,
        facts: dict[str, Any],
        resumed: Path | None,
        kept: CheckpointsConfig | None = None,
    ) -> None:
        self.precision, self.facts, self.resumed = precision, facts, resumed
        self.kept = kept or CheckpointsConfig()
        self._begun, self._early = 0, None

    def take_over(self, trainer: Any) -> None:
        """Let the trainer save through this keeper.

        The limit is no longer the trainer's, which would delete older checkpoints before the new
        one is whole, and of a limit of 1 the newest when training is interrupted.
        """
        self.trainer = trainer
        if not stands("whole checkpoints"):  # the trainer saves as it does
            return
        self._save = trainer._save_checkpoint
        # Transformers (5.23) deletes as it saves, before this one has its name, and knows no
        # `kept`.
        args = TrainerArguments(trainer.args)
        self._limit, args.save_total_limit = args.save_total_limit, None
        trainer._save_checkpoint = self.save
        if trainer.accelerator.is_fsdp2:
            WholeFiles(trainer)

    @property
    def loaded_best(self) -> bool:
        """True if weights of another step took the place of the last ones when training ended."""
        state = self.trainer.state
        best = state.best_global_step if state.best_model_checkpoint is not None else None
        loads = TrainerArguments(self.trainer.args).load_best_model_at_end
        return loads and best not in (None, state.global_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the best checkpoint until now where it lies: its run may have been moved.

        Transformers 5.23 then forgets it but not its loss, and ends with the last weights for the
        best.
        """
        self._begun = state.global_step
        saved = Checkpoint(self.resumed).state if self.resumed is not None else {}
        best = Path(str(saved.get("best_model_checkpoint") or ""))
        if self.resumed is None or not best.name or best.is_dir():
            return
        if (beside := self.resumed.parent / best.name).is_dir():
            state.best_model_checkpoint = str(beside)
            return
        warnings.warn(
            f"! {best.name}, the best until here, is gone: the next best counts", stacklevel=2
        )
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the first step early: a disk that cannot take it shows now, not in hours."""
        first = state.global_step == self._begun + 1
        first = first and TrainerArguments(args).save_strategy != "no"
        if first and self.kept.first_step and not control.should_save:
            self._early = f"checkpoint-{state.global_step}"
            control.should_save = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Raise `NonFiniteError` if the eval loss is; what was trained is saved before."""
        step, folder = state.global_step, Path(TrainerArguments(args).output_dir)
        if math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            return
        again = "then start again"
        if step > self._begun:
            if step not in checkpoints_in(folder) and stands("whole checkpoints"):
                self.trainer._save_checkpoint(self.trainer.model, None)  # judges the weights
            again = f"then resume: {resume_command(folder.parent)}"
        raise NonFiniteError(
            f"the eval loss is not finite at step {step}",
            where=f"{len(self.trainer.eval_dataset):,} eval rows",
            why="the weights are finite: some eval row has no token that counts, or its logits "
            "overflow",
            fix=f"look at the rows (`python -m finetune data RECIPE`), or other ones: "
            f"data.eval_path, data.eval_fraction; {again}",
        )

    def save(self, model: Any, trial: Any) -> None:
        """`Trainer._save_checkpoint`: whole, or a `CheckpointError` that leaves earlier ones."""
        trainer, args = self.trainer, TrainerArguments(self.trainer.args)
        step, folder = trainer.state.global_step, Path(args.output_dir)
        partial, final = folder / SAVING, folder / f"checkpoint-{step}"
        # The hidden folder: Transformers puts `checkpoint-<step>` into it by itself.
        trainer._get_output_dir = lambda **_: str(partial)
        try:
            if args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            # No process may write before the first one has cleared what an earlier crash left.
            trainer.accelerator.wait_for_everyone()
            self._save(model, trial)
            self._name_the_best(partial / final.name, folder)
            trainer.accelerator.wait_for_everyone()
            if args.should_save:
                # Before it is renamed and an older one deleted: what cannot be read again is no
                # checkpoint.
                _refuse_unsafe(partial / final.name)
                self._write_manifest(partial / final.name, step)
                _rename(partial / final.name, final)
                self._delete_older(folder, self._limit)
            trainer.accelerator.wait_for_everyone()
        except Exception as error:
            # An error of the code keeps its own text and traceback.
            if not is_of_the_disk(error):
                raise
            what = f"the checkpoint of step {step} could not be written"
            raise write_failure(error, folder.parent, what) from error
        finally:
            # The class's own method is found again behind the deleted attribute.
            del trainer._get_output_dir
            if args.should_save:
                shutil.rmtree(partial, ignore_errors=True)

    def _delete_older(self, folder: Path, limit: int | None) -> None:
        """Delete what is not kept, renamed before: one half deleted is none that could be taken."""
        saved = [Checkpoint(path) for path in checkpoints_in(folder).values()]
        doomed = [one for one in saved[:-1] if one.folder.name == self._early and not one.is_kept]
        saved = [one for one in saved if one not in doomed]
        if self.kept.keep_last is not None:
            doomed += superfluous(saved, self.kept.keep_last, self.kept.keep_best)
        elif limit is not None and limit > 0:
            named = self.trainer.state.best_model_checkpoint or ""
            doomed += superfluous(saved, limit, named=named)
        for one in doomed:
            # A rename is one step for the file system; deleting gigabytes is thousands, in which a
            # kill leaves a half.
            one.folder.rename(folder / SAVING / one.folder.name)  # deleted with it

    def _name_the_best(self, saved: Path, folder: Path) -> None:
        """The best checkpoint by the name that it will have, in the trainer's state too."""
        state = self.trainer.state
        if not state.best_global_step:
            return
        name = f"checkpoint-{state.best_global_step}"
        if name == saved.name or (folder / name).is_dir():
            state.best_model_checkpoint = str(folder / name)
        if self.trainer.args.should_save:
            state.save_to_json(str(saved / STATE))

    def _write_manifest(self, folder: Path, step: int) -> None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in files:
            # Renaming may reach the disk before contents do (ext4 delays allocation), and a power
            # cut in between would leave a checkpoint of zeros.
            _to_disk(file)
        sums = zip(files, hashes_of(files), strict=True)
        manifest: dict[str, Any] = {
            "step": step,
            "precision": self.precision,
            "only_model": bool(TrainerArguments(self.trainer.args).save_only_model),
            **self.facts,
            "files": {
                str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": value}
                for file, value in sums
            },
        }
        # Last: a folder with a manifest is one whose files were all there.
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _to_disk(folder / MANIFEST)
        for inside in {folder, *(file.parent for file in files)}:
            _to_disk(inside)


DAMAGED = (OSError, ValueError, RuntimeError, EOFError, SafetensorError, UnpicklingError)
"""What reading a damaged file raises."""


def unreadable(folder: Path) -> str:
    """Why the files of a checkpoint could not be read; empty if they can.

    The trainer reads optimizer, schedule and generators with `weights_only`, which stops at
    anything but tensors and plain data, since other things run code when they are read.
    """
    for file in sorted(folder.iterdir()):
        try:
            found: list[str] = []
            if file.suffix in (".pt", ".pth"):
                with safe_globals():
                    # Reads the pickle's opcodes and runs none of them (torch 2.13).
                    found = get_unsafe_globals_in_checkpoint(file)
            elif file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    pass
        except DAMAGED as error:
            return f"{file.name} cannot be read, it is damaged: {first_line(error)}"
        if found:
            return f"{file.name} holds more than tensors and numbers: {', '.join(found)}"
    return ""


def _refuse_unsafe(folder: Path) -> None:
    """Refuse to keep a checkpoint that no run could resume from: now, not when one is to."""
    if problem := unreadable(folder):
        raise CheckpointError(
            "the checkpoint could not be read again: no run would resume from it",
            where="train.optim",
            why=problem,
            fix="train.optim=adamw_torch_fused; or train.save_strategy=no",
        )


def refuse_unreadable(checkpoint: Path | None) -> None:
    """Refuse a checkpoint of another program, or another person, before its files are read.

    Raises:
        ConfigError: a file is damaged, or reading it would run code.
    """
    if checkpoint is not None and (problem := unreadable(checkpoint)):
        raise ConfigError(
            problem,
            where=str(checkpoint),
            why="reading it would fail, or run code; nothing of it was run",
            fix="resume from another checkpoint of the run, one that you made yourself",
        )


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(made: Path, final: Path) -> None:
    if (final / KEPT).exists():  # a run that resumed from before it: both stay, the older aside
        final.rename(next(p for i in count(1) if not (p := Path(f"{final}.kept-{i}")).exists()))
    elif final.exists():  # the same step, saved a second time
        shutil.rmtree(final)
    made.rename(final)
    # A name is an entry of the folder, which has to reach the disk, too.
    _to_disk(final.parent)
