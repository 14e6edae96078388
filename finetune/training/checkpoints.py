"""Checkpoints: their contents and location, and resuming.

    checkpoints/checkpoint-<step>/      written by `transformers.Trainer` (`train.save_strategy`)
        model or adapter, tokenizer     plain Hugging Face weights, also of an FP8 run
        optimizer, scheduler, rng       the trainer's
        trainer_state.json              its step, its logs
        fp8_scaling.safetensors         ours: scaling state of the FP8 layers

The amax history of delayed scaling, and the state of the stochastic-rounding generator, belong to a
run and not to its weights, so they have a file. Processes may differ in either (without
`reduce_amax`; by row lengths), so each writes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState

from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.runs.folder import CHECKPOINTS, STATE, checkpoints_in, scaling_file
from finetune.training.session import Session


def resume_folder(config: RunConfig) -> Path | None:
    """Checkpoint selected by `train.resume_from_checkpoint`, or None.

    Raises:
        ConfigError: there is no checkpoint.
    """
    value = config.train.get("resume_from_checkpoint")
    if not value:
        return None
    folder = Path(str(value)).expanduser()
    if (folder / CHECKPOINTS).is_dir():  # a run folder: its newest checkpoint
        folder = folder / CHECKPOINTS
    folder = next(reversed(checkpoints_in(folder).values()), folder)
    if not (folder / STATE).is_file():
        raise ConfigError(
            f"there is no checkpoint in {str(value)!r}",
            where="train.resume_from_checkpoint",
            why="a checkpoint folder holds trainer_state.json",
            fix="give a run folder, its checkpoints/ folder, or one checkpoint-N folder",
        )
    return folder


class ScalingStateKeeper(TrainerCallback):
    """Stores FP8 scaling state beside each checkpoint, and loads it on resuming."""

    def __init__(self, session: Session, resume_from: Path | None) -> None:
        self.session, self.resume_from = session, resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        conversion = self.session.training[1]
        if self.resume_from is None or conversion is None or conversion.backend is None:
            return
        own, first = (self.resume_from / scaling_file(i) for i in (args.process_index, 0))
        file = own if own.is_file() else first  # resumed by more processes than saved it
        conversion.backend.load_state_tensors(load_file(file) if file.is_file() else {})

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.save_to(checkpoint, args.process_index)

    def save_to(self, folder: Path, process: int = 0) -> None:
        """Store the current state, if any."""
        conversion = self.session.training[1]
        backend = conversion.backend if conversion is not None else None
        tensors = backend.state_tensors() if backend is not None else {}
        if tensors:
            plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
            folder.mkdir(parents=True, exist_ok=True)
            save_file(plain, folder / scaling_file(process))
