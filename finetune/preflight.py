"""What is refused before anything is loaded: missing libraries, precision, memory."""

from __future__ import annotations

import os

from finetune.config import RunConfig
from finetune.device import Device, resolve
from finetune.errors import PrecisionError
from finetune.extras import check_extras
from finetune.memory import MemoryBound, advice, bound, check_fits, shards_of, why_too_small
from finetune.model import sketch


def processes() -> int:
    """Processes of this run, as torchrun and accelerate launch set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def preflight(config: RunConfig, device: Device, *, force: bool = False) -> MemoryBound:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        PrecisionError: the precision cannot be had here.
        MemoryShortError: weights, gradients and optimizer alone exceed the memory.
        MissingExtraError: a setting's optional library is not installed.
    """
    check_extras(config)
    need = bound(sketch(config), config.train, shards=shards_of(config, processes()))
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
