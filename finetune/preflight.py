"""What is refused before anything is loaded: missing libraries, precision, memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config import RunConfig
from finetune.device import Device, resolve
from finetune.errors import ConfigError, PlanError, PrecisionError
from finetune.extras import check_extras
from finetune.loss_scaling import refuse_half_weights
from finetune.memory import MemoryBound, advice, bound, check_fits, shards_of, why_too_small
from finetune.model import is_published_fp8, sketch
from finetune.optimizer_checks import check_here, check_optimizer
from finetune.precision.planner import PrecisionPlan, plan
from finetune.storage_checks import check_held_layers, check_storage

if TYPE_CHECKING:
    from torch import nn


def processes() -> int:
    """Processes of this run, as torchrun and accelerate launch set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Ahead:
    """What is known of a run before anything is loaded.

    Attributes:
        plan: of its model, in the precision that will run here.
        need: the memory it takes at least.
    """

    plan: PrecisionPlan
    need: MemoryBound


def preflight(config: RunConfig, device: Device, *, force: bool = False) -> Ahead:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        PlanError: a choice of layers cannot be honoured.
        ConfigError: settings that do not go together, or an optimizer that cannot step here.
        PrecisionError: the precision cannot be had here, or not with these weights.
        MemoryShortError: weights, gradients and optimizer alone exceed the memory.
        MissingExtraError: a setting's optional library is not installed.
    """
    check_extras(config)
    check_here(config.train, device)
    _check_liger(config, device)
    model = sketch(config)
    the_plan = check_settings(config, model)
    shards = shards_of(config, processes())
    storage = config.model.storage
    if storage is None and is_published_fp8(model.config):
        storage = "fp8"
    need = bound(model, the_plan, config.train, shards=shards, storage=storage)
    try:
        resolution = resolve(config.precision, device)
    except PrecisionError as error:
        short = why_too_small(config, need, device)
        if not short:
            raise
        raise type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}. Besides, {short}",
            fix=f"an FP8 GPU with enough memory; or here: {advice(config, device)}",
        ) from None
    if resolution.fallback:
        the_plan = plan(model, resolution.precision)
        need = bound(model, the_plan, config.train, shards=shards)
    if not force:
        check_fits(config, need, device)
    return Ahead(the_plan, need)


def _check_liger(config: RunConfig, device: Device) -> None:
    if config.train.get("use_liger_kernel") and device.kind == "cpu":
        raise ConfigError(
            "Liger's kernels were asked on a CPU",
            where="train.use_liger_kernel",
            why="they are written in Triton, which compiles for GPUs",
            fix="~train.use_liger_kernel, or run on a GPU",
        )


def check_settings(config: RunConfig, model: nn.Module) -> PrecisionPlan:
    """Refuse settings that contradict each other on any machine; the plan of the others.

    Args:
        config: the run.
        model: its model with adapters, also on the meta device.

    Raises:
        PlanError: a choice of layers cannot be honoured.
        ConfigError: what is asked of the optimizer, of float32 compute or of `model.storage` cannot
            be honoured.
        PrecisionError: float16 compute of trainable weights that are not float32, or a compute that
            weights held quantised cannot have.
    """
    check_optimizer(config.train)
    check_storage(config, model)
    the_plan = plan(model, config.precision)
    _check_head(the_plan)
    check_held_layers(config, model, the_plan)
    if config.precision.compute == "fp16":
        refuse_half_weights(model)
    if config.precision.compute == "fp32" and config.model.dtype != "float32":
        raise ConfigError(
            "FP32 compute was asked of weights that are not float32",
            where=f"model.dtype={config.model.dtype}",
            why="linear layers would multiply in the type of their weights",
            fix="model.dtype=float32, or precision.compute=bf16",
        )
    if config.precision.compute == "fp32" and config.train.get("tf32"):
        raise ConfigError(
            "FP32 compute was asked, and TF32 too",
            where="train.tf32=true",
            why="TF32 keeps 10 of the 23 bits of a float32 operand's significand",
            fix="~train.tf32",
        )
    return the_plan


def _check_head(the_plan: PrecisionPlan) -> None:
    """`SFTTrainer` multiplies by the head's weight inside its loss, past the layer."""
    for layer in the_plan.layers:
        if layer.role == "head" and layer.name.endswith(".base_layer"):
            raise PlanError(
                "adapters were asked on the output head, which SFTTrainer multiplies outside of "
                "its layer",
                where=f"lora.target_modules: {layer.plain_name}",
                why="TRL fuses the head with the loss, past any adapter; it refuses this too",
                fix=f"leave it out of lora.target_modules, or train it in full: "
                f"lora.modules_to_save=[{layer.plain_name}]",
            )
        if layer.role == "head" and (layer.forced or layer.compute == "fp8"):
            raise PlanError(
                f"{layer.compute.upper()} was chosen for the output head, which SFTTrainer "
                "multiplies outside of its layer",
                where=f"{layer.reason}: {layer.name}",
                why="TRL fuses the head with the loss, so that the logits are never held whole; "
                "what that multiplies is decided there",
                fix="~precision.map.output; a loop of your own, or transformers.Trainer, calls the "
                "head's layer and can have it (setup_fp8_mixed_precision_training(map=...))",
            )
