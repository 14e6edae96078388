"""Checkpoints of a run on disk: `checkpoints/checkpoint-<step>/`. Knows no torch.

`finetune.training.checkpoints` writes them and goes on from them.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = "checkpoints"
STATE = "trainer_state.json"
"""The trainer's own state, without which training cannot go on."""


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> folder of every `checkpoint-<step>` in a folder, in the order of steps."""
    steps = {path.name.rpartition("-")[2]: path for path in folder.glob("checkpoint-*")}
    return {int(step): steps[step] for step in sorted(filter(str.isdigit, steps), key=int)}


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in a folder, if any."""
    complete = [path for path in checkpoints_in(folder).values() if (path / STATE).is_file()]
    return complete[-1] if complete else None


def scaling_file(process: int) -> str:
    """Name of a process's file of FP8 scaling state in a checkpoint."""
    return f"fp8_scaling{f'_{process}' if process else ''}.safetensors"
