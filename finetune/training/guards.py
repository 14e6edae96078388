"""Guards: errors instead of training that would silently run in another precision.

Before training they reject trainer settings that contradict the session's precision; during
training, an optimizer whose model was never converted, and a model reverted by a replaced session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from finetune.config.schema import PrecisionConfig
from finetune.errors import OrderError, PrecisionError
from finetune.hardware.device import Resolution
from finetune.precision.convert import Conversion
from finetune.precision.layers import iter_weights

ATTRIBUTE = "_finetune_guard"


def multiplies(module: nn.Module) -> bool:
    """True if there is anything to convert: a linear layer or a declared parameter."""
    return next(iter(iter_weights(module)), None) is not None


def refuse_conflicts(given: dict[str, Any], precision: PrecisionConfig) -> None:
    """Reject arguments of an `Accelerator` that contradict the session's precision."""
    if precision.compute == "fp8" and str(given.get("mixed_precision")) == "fp16":
        raise PrecisionError(
            "FP8 was set up, and this trainer asks for FP16",
            where="fp16=True or mixed_precision='fp16'",
            why="FP8 training keeps everything else in BF16; FP16 needs loss scaling, which "
            "delayed and current FP8 scales would see as exploding gradients",
            fix="leave fp16 out, or call teardown_fp8_mixed_precision_training() first",
        )
    names = {type(handler).__name__ for handler in given.get("kwargs_handlers") or ()}
    clash = names & {"TERecipeKwargs", "AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs"}
    if clash:
        raise PrecisionError(
            "FP8 was set up twice: by the helper and by Accelerate's own recipe handlers",
            where=f"kwargs_handlers={sorted(clash)}",
            why="both would convert the model",
            fix="pass those settings to setup_fp8_mixed_precision_training instead",
        )


def check_accelerator(accelerator: Any, resolution: Resolution, *, known: bool) -> None:
    """Reject an accelerator that cannot train a model in this precision.

    Args:
        accelerator: prepares the model.
        resolution: the session's precision.
        known: the accelerator was built under it.
    """
    if not known:
        raise OrderError(
            f"this trainer was built before {resolution.asked.compute.upper()} was set up",
            where="Trainer() or Accelerator() came before setup_fp8_mixed_precision_training()",
            why="its Accelerator was made for another precision; it would train in BF16",
            fix="call setup_fp8_mixed_precision_training() first, then build the trainer",
        )
    if str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "MEGATRON_LM"):
        raise PrecisionError(
            "FP8 with DeepSpeed or Megatron-LM is not supported",
            where=f"distributed_type={accelerator.distributed_type}",
            why="their engines replace forward and optimizer, past what can be proven here",
            fix="use FSDP2 (train.fsdp, fsdp_version 2) or DDP",
        )
    if resolution.precision.fp8_params and "FSDP" in str(accelerator.distributed_type):
        raise PrecisionError(
            "fp8_params with FSDP is not supported",
            where="precision.fp8_params=true",
            why="FSDP gathers each weight anew for every use, so there is nothing to hold",
            fix="~precision.fp8_params; or use DDP",
        )
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        raise PrecisionError(
            "torch_compile of the whole model does not go with the proof",
            where="torch_compile=True, or the dynamo settings of accelerate",
            why="a model that torch.compile first meets under the witness is never compiled",
            fix="leave torch_compile out and set precision.compile=on (compile='on' in the "
            "helper): each decoder layer is compiled after the witnessed step",
        )


def watch_owner(optimizer: Optimizer, conversions: Iterable[Conversion]) -> Callable[[], None]:
    """Reject steps of an optimizer that was prepared while its model was not.

    Args:
        optimizer: prepared by Accelerate.
        conversions: the models prepared by the time it steps.

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
    """Reject training calls of a model that a replaced session has reverted."""

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
    """Remove the guards of a model and its submodules."""
    for module in model.modules():
        hook = module.__dict__.pop(ATTRIBUTE, None)
        if hook is not None:
            hook.remove()
