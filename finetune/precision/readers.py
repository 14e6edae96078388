"""PEFT's methods that start from a layer's weight itself, past what the layer computes.

Where the weight is stored in FP8 they would take codes for numbers. Those of `READS_WEIGHT` do so
in each forward, and cannot adapt stored weights at all. Those of `BEGINS_FROM_WEIGHT` do so when
they are attached: over a plain model, whose base `frozen=fp8` stores afterwards, they are as good
as any.

Nothing of ours runs when PEFT attaches adapters to a model of `load_in_fp8`, which trains without a
plan: the moment to refuse is when PEFT's layer takes the stored one for its own (`watch`).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from finetune.errors import StorageNotComputeError
from finetune.precision.stored import StoredMixin

READS_WEIGHT = ["FRoD", "GLoRA", "HiRA", "HRA", "PEANuT", "SHiRA", "Supertuning"]
"""Methods of PEFT 0.21 whose layers read `base_layer.weight` in their forward."""
BEGINS_FROM_WEIGHT = ["AdaMSS", "DEFT", "DeLoRA", "OSF", "PSOFT", "UniLoRA"]
"""Those whose first values are made of the weight, or of its type: UniLoRA's are rounded to it."""
VELORA = "lora_velora_embed"
"""What VeLoRA, an option of LoRA, keeps in the type of the weight."""


def method_of(layer: nn.Module, methods: list[str]) -> str:
    """The one of these methods of PEFT that a layer is of, or ""."""
    package = ".".join(type(layer).__module__.split(".")[:3])
    named = {f"peft.tuners.{method.lower()}": method for method in methods}
    return named.get(package, "")


@functools.cache
def watch() -> None:
    """Let stored layers refuse from now on to be the base of what reads their weight."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, child: Any) -> None:
    """Hook of torch, called for each module that becomes a child."""
    if name == "base_layer" and isinstance(child, StoredMixin):
        method = method_of(parent, [*READS_WEIGHT, *BEGINS_FROM_WEIGHT])
        if method:
            raise _refused(method, plain_first=method in BEGINS_FROM_WEIGHT)
    elif name == VELORA and isinstance(getattr(parent, "base_layer", None), StoredMixin):
        raise _refused("VeLoRA", plain_first=True)


def _refused(method: str, *, plain_first: bool) -> StorageNotComputeError:
    fix = "load the model plain; or LoRA, which adds to what the layer gives"
    if plain_first:
        fix = "attach it to the model loaded plain, which frozen='fp8' of "
        fix += "setup_fp8_mixed_precision_training stores in FP8 afterwards; or LoRA"
    return StorageNotComputeError(
        f"{method} cannot be attached to weights that are stored in FP8",
        where="a model of load_in_fp8, or one that was prepared with frozen='fp8'",
        why=f"{method} starts from the layer's weight itself, or from its type, and that is codes, "
        "which are no numbers without their scales",
        fix=fix,
    )
