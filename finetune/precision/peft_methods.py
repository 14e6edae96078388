"""PEFT's methods that read a layer's weight itself: refused where that is FP8 codes.

They go past what the layer computes, and would take codes for numbers. Those of `READS_WEIGHT` do
so in each forward, and cannot adapt stored weights at all. Those of `BEGINS_FROM_WEIGHT` do so when
they are attached: over a plain model, whose base `frozen=fp8` stores afterwards, they are as good
as any.

Nothing of ours runs when PEFT attaches adapters to a model of `load_in_fp8`: the moment to refuse
is when PEFT's layer takes the stored one for its own, or its model ours where no layer of PEFT's is
made before it fails. Importing this module registers a hook of torch that sees both.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from finetune.errors import StorageNotComputeError
from finetune.precision.stored import StoredMixin

READS_WEIGHT = ("FRoD", "GLoRA", "HiRA", "HRA", "PEANuT", "SHiRA", "Supertuning")
"""Methods of PEFT 0.21 whose layers read `base_layer.weight` in their forward."""
BEGINS_FROM_WEIGHT = ("AdaMSS", "DEFT", "DeLoRA", "OSF", "PSOFT", "TinyLoRA", "UniLoRA")
"""Those whose first values are made of the weight, or of its type: UniLoRA's are rounded to it."""
FAILS_FIRST = ("GLoRA", "TinyLoRA")
"""Those of both kinds that fail, in words of PEFT (0.21) or torch, before they make a layer."""
INITIAL = {
    "pissa_init": "PiSSA",
    "olora_init": "OLoRA",
    "corda_init": "CorDA",
    "mica_init": "MiCA",
    "loftq_init": "PEFT's LoftQ",
    "orthogonal_init": "init_lora_weights='orthogonal'",
}
"""Methods of LoRA's layers for `init_lora_weights` that start from the weight, or from its type."""
VELORA = "lora_velora_embed"
"""What VeLoRA, an option of LoRA, keeps in the type of the weight."""


def method_of(layer: nn.Module, methods: Collection[str]) -> str:
    """The one of these methods of PEFT that a layer is of, or ""."""
    package = ".".join(type(layer).__module__.split(".")[:3])
    return next((m for m in methods if package == f"peft.tuners.{m.lower()}"), "")


def _refuse_as_base(parent: nn.Module, name: str, child: Any) -> None:
    """Hook of torch, called for each module that becomes a child."""
    if name == "base_layer" and isinstance(child, StoredMixin):
        method = method_of(parent, (*READS_WEIGHT, *BEGINS_FROM_WEIGHT))
        if method:
            raise _reads_codes(method, plain_first=method in BEGINS_FROM_WEIGHT)
        if type(parent).__name__ == "ParamWrapper":
            raise _reads_codes("target_parameters of LoRA", plain_first=False)
        for initial in INITIAL.keys() & set(dir(parent)):
            parent.__dict__[initial] = partial(_refuse_initial, INITIAL[initial])
    elif name == "model" and (method := method_of(parent, FAILS_FIRST)):
        if any(isinstance(module, StoredMixin) for module in child.modules()):
            raise _reads_codes(method, plain_first=method in BEGINS_FROM_WEIGHT)
    elif name == VELORA and isinstance(getattr(parent, "base_layer", None), StoredMixin):
        raise _reads_codes("VeLoRA", plain_first=True)


def _refuse_initial(method: str, *_: Any) -> None:
    raise _reads_codes(method, plain_first=True)


def _reads_codes(method: str, *, plain_first: bool) -> StorageNotComputeError:
    fix = "load the model plain; or LoRA by target_modules, which adds to what the layer gives"
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


register_module_module_registration_hook(_refuse_as_base)
