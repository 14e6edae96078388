"""Low-bit optimizers: building and stepping those whose state is stored in few bits.

torchao compiles its update with `torch.compile`. On a GPU that makes it fast; on a CPU it needs a
C++ compiler and 20 to 40 seconds for nothing, so the update runs uncompiled there, with the same
arithmetic. torchao's classes go to the trainer as `optimizer_cls_and_kwargs`, since Transformers
has no name for the FP8 one and passes `block_size` as text.

The Trainer requests 32-bit embeddings from bitsandbytes in a process-wide register that keeps every
model and identifies parameters by `id()`, which Python reuses. A later run in the same process
would get 32 bits for an unrelated weight with the same id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch.optim import Optimizer

from finetune.config.optimizers import BLOCK, FP8_ADAMW, arguments, chosen
from finetune.errors import ConfigError


class TorchaoArguments(BaseModel):
    """Values that `train.optim_args` may have."""

    block_size: int = Field(default=BLOCK, ge=2)
    bf16_stochastic_round: bool = False


def class_and_kwargs(train: dict[str, Any], args: Any) -> tuple[type[Optimizer], dict[str, Any]]:
    """Trainer's `optimizer_cls_and_kwargs` for a `train` section with a torchao optimizer.

    Raises:
        ConfigError: an invalid value in `train.optim_args`.
    """
    from torchao import optim

    classes = {
        "adamw_torch_8bit": optim.AdamW8bit,
        "adamw_torch_4bit": optim.AdamW4bit,
        FP8_ADAMW: optim.AdamWFp8,
    }
    try:
        own = TorchaoArguments.model_validate(arguments(train)).model_dump()
    except ValidationError:
        raise ConfigError(
            f"train.optim_args cannot be {train['optim_args']!r}",
            where="train.optim_args",
            fix="block_size is a number, bf16_stochastic_round is true or false",
        ) from None
    return classes[chosen(train).name], {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    } | own


def forget_overrides() -> None:
    """Clear bitsandbytes' per-weight overrides from earlier runs of this process."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


def step_uncompiled(optimizer: Optimizer) -> Callable[[], None]:
    """Run the update of a torchao optimizer without `torch.compile`; returns a function to end it.

    These hooks run inside of the global ones: an error of the proof leaves nothing behind.
    """

    def before(*_: Any) -> None:
        torch.compiler.set_stance("force_eager")

    def after(*_: Any) -> None:
        torch.compiler.set_stance("default")

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        after()

    return undo
