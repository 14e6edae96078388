"""The largest inputs of each layer, on training rows: NVFP4's `input_global_scale`.

NVFP4 gives every 16 inputs a scale when they come, but that scale is an E4M3 number and needs a
float32 one above it, which is stored: 448 · 6 over the largest input that is expected. It is taken
from training rows, so that the held-out rows of the parity check stay held out. An input larger
than the calibrated one saturates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ConfigError
from finetune.precision.numerics import amax


def input_amax(
    model: nn.Module, layers: list[str], batches: Iterable[dict[str, Any]]
) -> dict[str, float]:
    """Largest magnitude of the inputs of each layer.

    Args:
        model: the stock model, with its adapter or without.
        layers: names of linear layers, as in the stock model.
        batches: what the model takes.

    Raises:
        ConfigError: a layer got no input, or one that is not finite.
    """
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen = amax(args[0])
            largest[name] = torch.maximum(seen, largest.get(name, seen))

        return hook

    hooks = [base.get_submodule(n).register_forward_pre_hook(watch(n)) for n in layers]
    try:
        with torch.inference_mode():
            for batch in batches:
                model(**{k: v for k, v in batch.items() if k != "labels"})
    finally:
        for hook in hooks:
            hook.remove()
    found = {name: float(value) for name, value in largest.items()}
    for name in layers:
        if not 0 < found.get(name, 0.0) < float("inf"):
            raise ConfigError(
                f"the inputs of {name} could not be calibrated",
                where="--to nvfp4",
                why=f"their largest magnitude on the training rows is {found.get(name, 'unknown')}",
                fix="--to fp8 needs no calibration",
            )
    return found
