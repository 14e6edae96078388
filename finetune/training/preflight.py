"""What is refused before anything is loaded: missing libraries, precision, memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config.optimizers import check_optimizer
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError, FinetuneError, PlanError, PrecisionError
from finetune.estimator.memory_bound import (
    MemoryBound,
    advice,
    bound,
    check_fits,
    shards_of,
    why_too_small,
)
from finetune.hardware.device import Device, resolve
from finetune.hardware.requirements import check_extras, check_optimizer_here
from finetune.precision.planner import PrecisionPlan, plan
from finetune.storage.held_layers import held_layers
from finetune.training.compute_types import refuse_half_weights
from finetune.training.model import is_published_fp8, sketch

if TYPE_CHECKING:
    from torch import nn

    from finetune.precision.planner import PrecisionPlan


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
    check_optimizer_here(config.train, device)
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


# ------------------------------------------------------------------------------------------
# What `model.storage` cannot be combined with, refused before anything is loaded.
#
# Small storage is for a base that stands still under adapters, and for BF16 compute: each weight is
# dequantised before its matmul. FP8 compute with small frozen weights is another setting,
# `precision.frozen`, which multiplies the FP8 codes themselves.


def check_storage(config: RunConfig, model: nn.Module) -> None:
    """Refuse settings that small storage cannot honour.

    Args:
        config: the run.
        model: its model with adapters, also on the meta device; its configuration tells of a
            checkpoint that is itself quantised.

    Raises:
        ConfigError: weights that are held quantised would have to train, or to be sharded.
        PrecisionError: compute other than BF16.
    """
    problem = None
    if config.model.storage is not None:
        problem = _why_not(config, f"model.storage={config.model.storage}")
    elif config.lora is None and getattr(model.config, "quantization_config", None):
        problem = _needs_adapters(f"quantization_config in config.json of {config.model.name}")
    if problem is not None:
        raise problem


def _needs_adapters(where: str) -> ConfigError:
    return ConfigError(
        "all weights were to train, and to be held quantised",
        where=f"{where}, and no section lora",
        why="quantised weights get no gradient, and an update would be lost between two of their "
        "levels",
        fix="add a section lora (as the _qlora_ recipes do), or take plain weights",
    )


def _why_not(config: RunConfig, where: str) -> FinetuneError | None:
    compute = config.precision.compute
    if config.lora is None:
        return _needs_adapters(where)
    if compute == "fp8":
        return PrecisionError(
            "FP8 compute was asked of weights that are held for BF16 compute",
            where=f"{where}, precision.compute=fp8",
            why="model.storage dequantises weights before a BF16 matmul; FP8 GEMMs need plain "
            "weights, or frozen ones held as the FP8 codes that they multiply",
            fix="precision.compute=bf16 (QLoRA); or ~model.storage and precision.frozen=fp8: FP8 "
            "compute on small frozen weights",
        )
    if compute != "bf16":
        return PrecisionError(
            f"{compute.upper()} compute was asked of weights that are held for BF16 compute",
            where=f"{where}, precision.compute={compute}",
            why="they are dequantised to BF16 and multiplied in BF16",
            fix="precision.compute=bf16, or ~model.storage",
        )
    if config.model.storage == "fp8":
        return None
    if config.train.get("fsdp"):
        return ConfigError(
            "FSDP cannot shard weights that are held quantised",
            where=f"{where}, train.fsdp={config.train['fsdp']}",
            why="a shard is a plain tensor, without the scales that stand beside the weight",
            fix="~train.fsdp ~train.fsdp_config: a copy on each GPU (DDP); or ~model.storage",
        )
    if config.lora.bias != "none":
        return ConfigError(
            "biases cannot train beside weights that are held quantised",
            where=f"{where}, lora.bias={config.lora.bias}",
            why="bitsandbytes casts a layer's bias to BF16 in place, where small updates are lost",
            fix="~lora.bias, or ~model.storage",
        )
    return None


def check_held_layers(config: RunConfig, model: nn.Module, the_plan: PrecisionPlan) -> None:
    """Refuse what is asked of single layers that will be held quantised.

    Args:
        config: the run.
        model: its model with adapters, also on the meta device.
        the_plan: of that model.

    Raises:
        PlanError: a layer that is held quantised was to train in full, or to compute in a type of
            its own.
    """
    if config.model.storage is None:
        return
    held = held_layers(model, config.model.storage)
    where = f"model.storage={config.model.storage}"
    copies = [name for name in held if "modules_to_save" in name.split(".")]
    if copies:
        raise PlanError(
            "layers that are held quantised were to train in full",
            where=f"{where}, lora.modules_to_save: {copies[0]}",
            why="quantised weights get no gradient",
            fix="leave them to adapters (lora.target_modules), or ~model.storage",
        )
    for layer in the_plan.layers:
        if layer.name in held and layer.compute != "bf16":
            raise PlanError(
                f"{layer.compute.upper()} was chosen for {layer.name!r}, which is held quantised",
                where=f"{where}, {layer.reason}",
                why="it is dequantised to BF16 and multiplied in BF16",
                fix="leave it out of precision.map, or ~model.storage",
            )
