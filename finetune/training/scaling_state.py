"""Scaling state in checkpoints of scripts, `accelerator.save_state` and `load_state`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from finetune.precision.backends.base import Backend


class ScalingState:
    """What `Accelerator.register_for_checkpointing` takes, around a backend's state."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def state_dict(self) -> dict[str, Tensor]:
        """Scaling state on the CPU."""
        return {name: t.detach().cpu().clone() for name, t in self.backend.state_tensors().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.backend.load_state_tensors(state)
