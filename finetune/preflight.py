"""What is refused before anything is loaded: missing libraries, precision, memory."""

from __future__ import annotations

import os

from finetune.config import RunConfig
from finetune.device import Device, resolve
from finetune.errors import PlanError, PrecisionError
from finetune.extras import check_extras
from finetune.memory import MemoryBound, advice, bound, check_fits, shards_of, why_too_small
from finetune.model import sketch
from finetune.precision.planner import PrecisionPlan, plan


def processes() -> int:
    """Processes of this run, as torchrun and accelerate launch set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def preflight(config: RunConfig, device: Device, *, force: bool = False) -> MemoryBound:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        PrecisionError: the precision cannot be had here.
        PlanError: a choice of layers cannot be honoured.
        MemoryShortError: weights, gradients and optimizer alone exceed the memory.
        MissingExtraError: a setting's optional library is not installed.
    """
    check_extras(config)
    model = sketch(config)
    _check_head(plan(model, config.precision))
    need = bound(model, config.train, shards=shards_of(config, processes()))
    try:
        resolve(config.precision, device)
    except PrecisionError as error:
        short = why_too_small(config, need, device)
        if not short:
            raise
        raise type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}. Besides, {short}",
            fix=f"an FP8 GPU with enough memory; or here: {advice(config)}",
        ) from None
    if not force:
        check_fits(config, need, device)
    return need


def _check_head(the_plan: PrecisionPlan) -> None:
    """`SFTTrainer` multiplies by the head's weight inside its loss, past the layer."""
    for layer in the_plan.layers:
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
