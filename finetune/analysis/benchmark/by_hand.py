"""What other libraries do by themselves, for the steps of a ladder that are not this toolkit's.

*Stock* is `trl.SFTTrainer` and PEFT in BF16, without a session of ours. *Shipped* is the same
trainer told to use accelerate's own FP8: `Accelerator(mixed_precision="fp8")` with torchao. TRL has
no argument for it (its `bf16` default hides what is asked of accelerate, FP8_FINDINGS.md), so the
trainer's arguments for the accelerator are overridden, which is the shortest way that is open.

Nothing proves such a run. What can be seen from outside is whether the weights that shall train
have moved when it is over, and that is what its row says: accelerate wraps the weights of converted
layers in new parameters when the optimizer holds the old ones, so that they never train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import TrainerCallback
from trl import SFTTrainer

from finetune.hardware.device import Device, this_device
from finetune.precision.proof.movement import fingerprint
from finetune.precision.proof.proof import Proof


class Shipped(SFTTrainer):
    """`SFTTrainer` under accelerate's FP8, by torchao; emulated by torchao where there is none."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        from accelerate.utils import AORecipeKwargs

        args = super()._build_accelerator_args(**kwargs)
        recipe = AORecipeKwargs()
        assert recipe.config is not None  # its own default
        hardware = bool(this_device().has_fp8)
        recipe.config = dataclasses.replace(recipe.config, emulate=not hardware)
        handlers = [*(args.get("kwargs_handlers") or ()), recipe]
        return args | {"mixed_precision": "fp8", "kwargs_handlers": handlers}


@dataclasses.dataclass
class NoSession:
    """What a `MemoryMeter` asks of a session, where there is none."""

    device: Device
    compiled: str = "off"
    training: tuple[Proof | None, None] = (None, None)


class Movement(TrainerCallback):
    """Which trainable weights differ after training from what they were before its first step."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self.moved = self.total = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._before:
            self._before = {name: fingerprint(p) for name, p in _trainable(kwargs["model"])}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in _trainable(kwargs["model"]):
            self.total += p.numel()
            self.moved += p.numel() if fingerprint(p) != self._before.get(name) else 0

    @property
    def status(self) -> str:
        """For the row: not proven, and how much of what shall train has moved."""
        share = self.moved / self.total if self.total else 0.0
        if share == 0:
            return "not proven: it trains nothing, no trainable weight has moved"
        return f"not proven: stock libraries; {share:.1%} of the trainable weights moved"


def _trainable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, getattr(parameter.data, "_tensor", parameter.data)
