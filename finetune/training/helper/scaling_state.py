"""The state of FP8 scaling beside weights: one pair of functions for every way to save.

    Trainer._save_scaler, _load_scaler (recipes, scripts) ──┐
    accelerator.save_state, load_state ─────────────────────┼─> save_scaling, load_scaling
    the model of a run that evaluates in FP8 ───────────────┘

The amax history of delayed scaling, and the state of the stochastic-rounding generator, belong to
a run and not to its weights, so they have a file. Processes may differ in either (without
`reduce_amax`; by row lengths), so each writes one. It names the precision that it is of: under
another one amax histories begin again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from finetune.hardware.unpromised import stands
from finetune.precision.convert import conversion_of
from finetune.precision.engines.base import Engine
from finetune.runs.checkpoints import scaling_file

if TYPE_CHECKING:
    from finetune.training.helper.replacing import Patches

PRECISION = "precision"
"""Key in the file's metadata."""
WITHOUT_EFFECT = {"compile", "emulation", "eval", "health_every", "on_unsupported"}
"""Settings of the precision that scaling states do not depend on."""


def save_scaling(engine: Engine | None, folder: Path, process: int = 0) -> None:
    """Store the current scaling state of a process, if there is any."""
    if engine is not None and (state := engine.state_tensors()):
        # Cloned: safetensors refuses tensors that share storage.
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / scaling_file(process), {PRECISION: _name(engine)})


def load_scaling(engine: Engine | None, folder: Path, process: int = 0) -> str:
    """Take up the state of `save_scaling`.

    Returns:
        Why there is none to take up; empty if it was, or the scaling has no state.
    """
    if engine is None or not engine.has_state:
        return ""
    own, first = (folder / scaling_file(i) for i in (process, 0))
    file = own if own.is_file() else first  # resumed by more processes than saved it
    if not file.is_file():
        return f"{folder} has no FP8 scaling state"
    with safe_open(file, framework="pt") as opened:
        saved = (opened.metadata() or {}).get(PRECISION)
    # None: a file that names no precision is taken as it is.
    # An amax history says what the numbers of a scale are, under one rule and format alone.
    if saved not in (None, _name(engine)):
        return f"the FP8 scaling state in {folder} is of another precision"
    engine.load_state_tensors(load_file(file))
    return ""


def _name(engine: Engine) -> str:
    return engine.precision.model_dump_json(exclude=WITHOUT_EFFECT)


def _resume(engine: Engine | None, folder: Path, process: int) -> None:
    if why := load_scaling(engine, folder, process):
        warnings.warn(f"! {why}: amax histories begin again", stacklevel=4)


# ---------------------------------------------------------------------------------- who saves


def keep_in_trainers(patches: Patches) -> None:
    """Let every `Trainer` keep scaling state where it keeps that of FP16's loss scaling."""
    from transformers import Trainer

    def backend_of(trainer: Any) -> Engine | None:
        conversion = conversion_of(trainer.accelerator.unwrap_model(trainer.model))
        return conversion.engine if conversion is not None else None

    def make_save(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(trainer: Any, output_dir: str) -> None:
            original(trainer, output_dir)
            save_scaling(backend_of(trainer), Path(output_dir), trainer.args.process_index)

        return save

    def make_load(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(trainer: Any, checkpoint: str | None) -> None:
            if checkpoint is None:
                return
            # Transformers (5.23) loads the file where it is there, and the attribute is None.
            if trainer.accelerator.scaler is not None:  # a stray scaler.pt is nothing to others
                original(trainer, checkpoint)
            if not any(Path(checkpoint).glob("optimizer*")):
                warnings.warn(
                    f"! {checkpoint} has no state of optimizer and schedule (save_only_model): its "
                    "weights train on with moments of zero, and the learning rate begins again",
                    stacklevel=2,
                )
            _resume(backend_of(trainer), Path(checkpoint), trainer.args.process_index)

        return load

    if stands("scales of checkpoints"):
        patches.replace(Trainer, "_save_scaler", make_save)
        patches.replace(Trainer, "_load_scaler", make_load)


def keep_in_states(accelerator: Any) -> None:
    """Let `accelerator.save_state` keep scaling state, and `load_state` load it.

    In files of their own: what is registered for checkpointing has numbers, by which states of
    other scalings and of BF16 runs could not be loaded, and is that of the first process alone.
    """
    # The accelerator keeps the hooks; a strong reference would keep it alive for good.
    reference = weakref.proxy(accelerator)

    def save(models: Any, weights: Any, output_dir: str) -> None:
        for engine, folder in _states(reference, Path(output_dir)):
            save_scaling(engine, folder, reference.process_index)

    def load(models: Any, input_dir: str) -> None:
        for engine, folder in _states(reference, Path(input_dir)):
            _resume(engine, folder, reference.process_index)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _states(accelerator: Any, folder: Path) -> list[tuple[Engine, Path]]:
    """Backends of prepared models that have scaling state, and the folders of their files."""
    conversions = (conversion_of(accelerator.unwrap_model(m)) for m in accelerator._models)
    engines = (one.engine for one in conversions if one is not None)
    stateful = [one for one in engines if one is not None and one.has_state]
    return [(one, folder / f"model_{i}" if i else folder) for i, one in enumerate(stateful)]
