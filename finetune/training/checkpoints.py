"""Writing of checkpoints, and going on from one; see `finetune.runs.checkpoints` for their form.

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
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import TrainerCallback

from finetune.config.section import CheckpointsConfig
from finetune.errors import CheckpointError, NonFiniteError
from finetune.precision.backends.base import Backend
from finetune.precision.convert import conversion_of
from finetune.runs.checkpoints import (
    KEEPER,
    MANIFEST,
    SAVING,
    STATE,
    Checkpoint,
    checkpoints_in,
    digest,
    hashes_of,
    resume_command,
    scaling_file,
    superfluous,
)
from finetune.training.checkpoint_weights import load_best_whole, load_whole
from finetune.training.faults import is_of_the_disk, write_failure
from finetune.training.session import Session
from finetune.training.sharded import WholeFiles


class CheckpointKeeper(TrainerCallback):
    """Saves a trainer's checkpoints whole, with FP8 scaling state, and loads that on resuming.

    Attributes:
        facts: what the manifest keeps for resuming (`resume.facts_of`).
        resumed: checkpoint to go on from, if any.
        fresh: amax histories start anew, since the precision is another one.
        kept: which checkpoints are kept.
    """

    def __init__(
        self,
        session: Session,
        facts: dict[str, Any],
        resumed: Path | None,
        *,
        fresh: bool = False,
        kept: CheckpointsConfig | None = None,
    ) -> None:
        self.session, self.facts, self.resumed, self.fresh = session, facts, resumed, fresh
        self.kept = kept or CheckpointsConfig()
        self._begun, self._early = 0, None

    def take_over(self, trainer: Any, say: Callable[[str], Any]) -> None:
        """Let the trainer save through this keeper, and `say` what it could not keep.

        The limit is no longer the trainer's, which would delete older checkpoints before the new
        one is whole, and of a limit of 1 the newest when training is interrupted.
        """
        self.trainer, self._save, self._say = trainer, trainer._save_checkpoint, say
        self._limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        trainer._save_checkpoint = self.save
        trainer._load_from_checkpoint = partial(
            load_whole, trainer._load_from_checkpoint, None, trainer
        )
        trainer._load_best_model = partial(load_best_whole, trainer._load_best_model, trainer)
        if trainer.accelerator.is_fsdp2:
            WholeFiles(trainer)

    @property
    def loaded_best(self) -> bool:
        """True if weights of another step took the place of the last ones when training ended."""
        state = self.trainer.state
        best = state.best_global_step if state.best_model_checkpoint is not None else None
        return self.trainer.args.load_best_model_at_end and best not in (None, state.global_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = state.global_step
        self._find_best(state)
        conversion = self.session.conversion
        if self.resumed is None or conversion is None or conversion.backend is None or self.fresh:
            return
        conversion.backend.load_state_tensors(stored_scaling(self.resumed, args.process_index))

    def _find_best(self, state: Any) -> None:
        """Name the best checkpoint until now where it lies: its run may have been moved.

        Transformers 5.23 then forgets it but not its loss, and ends with the last weights for the
        best.
        """
        saved = Checkpoint(self.resumed).state if self.resumed is not None else {}
        best = Path(str(saved.get("best_model_checkpoint") or ""))
        if self.resumed is None or not best.name or best.is_dir():
            return
        if (beside := self.resumed.parent / best.name).is_dir():
            state.best_model_checkpoint = str(beside)
            return
        self._say(f"! {best.name}, the best until here, is gone: the next best counts")
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the first step early: a disk that cannot take it shows now, not in hours."""
        first = state.global_step == self._begun + 1 and args.save_strategy != "no"
        if first and self.kept.first_step and not control.should_save:
            self._early = f"checkpoint-{state.global_step}"
            control.should_save = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Raise `NonFiniteError` if the eval loss is; what was trained is saved before."""
        step, folder = state.global_step, Path(args.output_dir)
        if math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            return
        again = "then start again"
        if step > self._begun:
            if step not in checkpoints_in(folder):
                self.trainer._save_checkpoint(self.trainer.model, None)  # judges the weights
            again = f"then go on: {resume_command(folder.parent)}"
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
        trainer, args = self.trainer, self.trainer.args
        step, folder = trainer.state.global_step, Path(args.output_dir)
        partial, final = folder / SAVING, folder / f"checkpoint-{step}"
        trainer.state.stateful_callbacks[KEEPER] = {}  # says that there is a manifest
        trainer._get_output_dir = lambda **_: str(partial)
        try:
            if args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            trainer.accelerator.wait_for_everyone()
            self._save(model, trial)
            self.save_to(partial / final.name, args.process_index)
            self._name_the_best(partial / final.name, folder)
            trainer.accelerator.wait_for_everyone()
            if args.should_save:
                refuse_unreadable(partial / final.name)
                self._write_manifest(partial / final.name, step)
                _rename(partial / final.name, final)
                self._delete_older(folder, self._limit)
            trainer.accelerator.wait_for_everyone()
        except Exception as error:
            if not is_of_the_disk(error):
                raise
            what = f"the checkpoint of step {step} could not be written"
            raise write_failure(error, folder.parent, what) from error
        finally:
            if step >= trainer.state.max_steps:  # the trainer then leaves the best alone, of one
                args.save_total_limit = self._limit
            del trainer._get_output_dir
            if args.should_save:
                shutil.rmtree(partial, ignore_errors=True)

    def _delete_older(self, folder: Path, limit: int | None) -> None:
        """Delete what is not kept, renamed before: one half deleted is none that could be taken."""
        saved = [Checkpoint(path) for path in checkpoints_in(folder).values()]
        doomed = [one for one in saved[:-1] if one.folder.name == self._early]
        self._early = self._early if not doomed else None
        saved = [one for one in saved if one not in doomed]
        if self.kept.keep_last is not None:
            doomed += superfluous(saved, self.kept.keep_last, self.kept.keep_best)
        elif limit is not None and limit > 0:
            named = self.trainer.state.best_model_checkpoint or ""
            doomed += superfluous(saved, limit, named=named)
        for one in doomed:
            one.folder.rename(folder / SAVING / one.folder.name)  # deleted with it

    def save_to(self, folder: Path, process: int = 0) -> None:
        """Store the current scaling state, if any."""
        conversion = self.session.conversion
        save_scaling(conversion.backend if conversion is not None else None, folder, process)

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
            _to_disk(file)
        sums = zip(files, hashes_of(files), strict=True)
        manifest: dict[str, Any] = {
            "step": step,
            "precision": self.session.resolution.label,
            "only_model": bool(self.trainer.args.save_only_model),
            **self.facts,
            "files": {
                str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": value}
                for file, value in sums
            },
        }
        manifest["sha256"] = digest(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _to_disk(folder / MANIFEST)
        for inside in {folder, *(file.parent for file in files)}:
            _to_disk(inside)


def refuse_unreadable(folder: Path) -> None:
    """Raise for an optimizer's state that resuming would not read (`weights_only`).

    It shows when the first step is saved, and not when a run of days is to go on.

    Raises:
        CheckpointError: it holds more than tensors and plain data.
    """
    file = folder / "optimizer.pt"
    found = get_unsafe_globals_in_checkpoint(file) if file.is_file() else []
    if found:
        raise CheckpointError(
            "the optimizer's state could not be read again: no run would go on from it",
            where="train.optim",
            why=f"it holds more than tensors and numbers: {', '.join(found)}",
            fix="train.optim=adamw_torch_fused; or train.save_strategy=no",
        )


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(made: Path, final: Path) -> None:
    if final.exists():  # the same step, saved a second time
        shutil.rmtree(final)
    made.rename(final)
    _to_disk(final.parent)


# ----------------------------------------------------------------------------------- scaling state
#
# The amax history of delayed scaling, and the state of the stochastic-rounding generator, belong to
# a run and not to its weights, so they have a file. Processes may differ in either (without
# `reduce_amax`; by row lengths), so each writes one.


def save_scaling(backend: Backend | None, folder: Path, process: int) -> None:
    """Store the current scaling state of a process, if there is any."""
    if backend is not None and (state := backend.state_tensors()):
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / scaling_file(process))


def stored_scaling(folder: Path, process: int) -> dict[str, Tensor]:
    """Scaling state of a checkpoint for a process; nothing if it has none."""
    own, first = (folder / scaling_file(i) for i in (process, 0))
    file = own if own.is_file() else first  # resumed by more processes than saved it
    return load_file(file) if file.is_file() else {}


def keep_in_states(running: Session) -> None:
    """Let `accelerator.save_state` of a script keep scaling state, and `load_state` load it.

    In files of its own: what is registered for checkpointing has numbers, by which states of other
    scalings and of BF16 runs could not be loaded, and is that of the first process alone.
    """

    def hook(accelerator: Any) -> None:
        reference = weakref.proxy(accelerator)

        def save(models: Any, weights: Any, output_dir: str) -> None:
            for backend, folder in _states(reference, Path(output_dir)):
                save_scaling(backend, folder, reference.process_index)

        def load(models: Any, input_dir: str) -> None:
            _load_states(reference, Path(input_dir))

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)

    running.on_accelerator = hook


def _states(accelerator: Any, folder: Path) -> list[tuple[Backend, Path]]:
    """Backends of prepared models that have scaling state, and the folders of their files."""
    conversions = (conversion_of(accelerator.unwrap_model(m)) for m in accelerator._models)
    backends = (one.backend for one in conversions if one is not None)
    stateful = [one for one in backends if one is not None and one.has_state]
    return [(one, folder / f"model_{i}" if i else folder) for i, one in enumerate(stateful)]


def _load_states(accelerator: Any, folder: Path) -> None:
    found = _states(accelerator, folder)
    for backend, place in found:
        if tensors := stored_scaling(place, accelerator.process_index):
            backend.load_state_tensors(tensors)
        else:
            warnings.warn(
                f"! {place} has no FP8 scaling state: amax histories begin anew", stacklevel=5
            )
    if not found and stored_scaling(folder, accelerator.process_index):
        warnings.warn(
            f"! the FP8 scaling state in {folder} is left: this run's scales have no history",
            stacklevel=5,
        )


def keep_in_checkpoints(running: Session) -> None:
    """Let every `Trainer` of a script save and load scaling state, and load all weights.

    It never calls `accelerator.save_state` (Transformers 5.23).
    """
    from transformers import Trainer

    patches = running.patches
    stores = running.prepare_model if running.precision.frozen == "fp8" else None

    def backend_of(trainer: Any) -> Backend | None:
        conversion = conversion_of(trainer.accelerator.unwrap_model(trainer.model))
        return conversion.backend if conversion is not None else None

    def make_save(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(trainer: Any, output_dir: str) -> None:
            original(trainer, output_dir)
            save_scaling(backend_of(trainer), Path(output_dir), trainer.args.process_index)

        return save

    def make_load(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(trainer: Any, checkpoint: str | None) -> None:
            original(trainer, checkpoint)
            if checkpoint is not None and not any(Path(checkpoint).glob("optimizer*")):
                warnings.warn(
                    f"! {checkpoint} has no state of optimizer and schedule (save_only_model): its "
                    "weights train on with moments of zero, and the learning rate begins anew",
                    stacklevel=2,
                )
            backend = backend_of(trainer)
            if checkpoint is None or backend is None:
                return
            # A checkpoint of a run in another precision has none: histories begin anew.
            if tensors := stored_scaling(Path(checkpoint), trainer.args.process_index):
                backend.load_state_tensors(tensors)
            elif backend.has_state:
                warnings.warn(
                    f"! {checkpoint} has no scaling state: the scales (or random numbers) of "
                    "its steps are gone, and begin anew as at the start of a run",
                    stacklevel=2,
                )

        return load

    def make_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_weights(trainer: Any, checkpoint: str, model: Any = None) -> None:
            load_whole(partial(original, trainer), stores, trainer, checkpoint, model)

        return load_weights

    def make_load_best(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda trainer: load_best_whole(partial(original, trainer), trainer)

    patches.replace(Trainer, "_load_from_checkpoint", make_load_weights)
    patches.replace(Trainer, "_load_best_model", make_load_best)
    patches.replace(Trainer, "_save_optimizer_and_scheduler", make_save)
    patches.replace(Trainer, "_load_optimizer_and_scheduler", make_load)
