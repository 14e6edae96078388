"""Hooks that make errors of two silent mistakes: training what was not, or no longer, prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from finetune.errors import OrderError
from finetune.precision.convert import Conversion

ATTRIBUTE = "_finetune_guard"


def watch_owner(optimizer: Optimizer, conversions: Iterable[Conversion]) -> Callable[[], None]:
    """Refuse steps of an optimizer that was prepared while its model was not.

    Args:
        optimizer: prepared by Accelerate.
        conversions: the prepared models, as they are when it steps.

    Returns:
        A function that ends the watch.
    """

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in owned for c in list(conversions) for p in c.model.parameters()):
            return
        raise OrderError(
            "an optimizer steps for a model that was never prepared",
            where="accelerator.prepare(optimizer) without its model, or nn.DataParallel",
            why="the model was not converted; it would train in another precision",
            fix="pass model and optimizer to accelerator.prepare; on several GPUs start with "
            "torchrun, or show one with CUDA_VISIBLE_DEVICES=0",
        )

    return optimizer.register_step_pre_hook(before_step).remove


def guard(model: nn.Module) -> None:
    """Refuse training calls of a model that a replaced session has reverted."""

    def before_forward(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise OrderError(
                "this model was prepared under a set-up that has been replaced",
                where="setup_fp8_mixed_precision_training() was called again",
                why="its layers are plain again; it would go on in BF16",
                fix="prepare it again (or build the trainer again) after the last set-up",
            )

    model.__dict__[ATTRIBUTE] = model.register_forward_pre_hook(before_forward)


def unguard(model: nn.Module) -> None:
    """Lift the guards of a model and of the models inside it."""
    for module in model.modules():
        hook = module.__dict__.pop(ATTRIBUTE, None)
        if hook is not None:
            hook.remove()
