"""What `model.storage` cannot be combined with, refused before anything is loaded.

Small storage is for a base that stands still under adapters, and for BF16 compute: each weight is
dequantised before its matmul. FP8 compute with small frozen weights is another setting,
`precision.frozen`, which multiplies the FP8 codes themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.base_storage import held_layers
from finetune.config import RunConfig
from finetune.errors import ConfigError, FinetuneError, PlanError, PrecisionError

if TYPE_CHECKING:
    from torch import nn

    from finetune.precision.planner import PrecisionPlan


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
