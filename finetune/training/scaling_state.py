"""Scaling state in checkpoints: of recipes, of stock trainers, and of `accelerator.save_state`.

The amax history of delayed scaling, and the state of the stochastic-rounding generator, belong to a
run and not to its weights, so they have a file. Processes may differ in either (without
`reduce_amax`; by row lengths), so each writes one.

A `Trainer` never calls `accelerator.save_state` (Transformers 5.23): in a script its state is saved
and loaded with that of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.precision.backends.base import Backend
from finetune.precision.convert import conversion_of
from finetune.runs.checkpoints import scaling_file
from finetune.training.patches import Patches


class ScalingState:
    """What `Accelerator.register_for_checkpointing` takes, around a backend's state."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def state_dict(self) -> dict[str, Tensor]:
        """Scaling state on the CPU."""
        tensors = self.backend.state_tensors()
        return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.backend.load_state_tensors(state)


def save_scaling(backend: Backend | None, folder: Path, process: int) -> None:
    """Store the current scaling state of a process, if there is any."""
    tensors = ScalingState(backend).state_dict() if backend is not None else {}
    if tensors:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / scaling_file(process))


def stored_scaling(folder: Path, process: int) -> dict[str, Tensor]:
    """Scaling state of a checkpoint for a process; nothing if it has none."""
    own, first = (folder / scaling_file(i) for i in (process, 0))
    file = own if own.is_file() else first  # resumed by more processes than saved it
    return load_file(file) if file.is_file() else {}


def keep_in_checkpoints(patches: Patches) -> None:
    """Let every `Trainer` of a session save and load scaling state with its optimizer's."""
    from transformers import Trainer

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
            backend = backend_of(trainer)
            if checkpoint is None or backend is None:
                return
            # A checkpoint of a run in another precision has none: histories begin anew.
            if tensors := stored_scaling(Path(checkpoint), trainer.args.process_index):
                backend.load_state_tensors(tensors)

        return load

    patches.replace(Trainer, "_save_optimizer_and_scheduler", make_save)
    patches.replace(Trainer, "_load_optimizer_and_scheduler", make_load)
