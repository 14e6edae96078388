"""PEFT's methods that read a layer's weight itself: refused where that is FP8 codes.

They go past what the layer computes, and would take codes for numbers. Those of `READS_WEIGHT` do
so in each forward, and cannot adapt stored weights at all. Those of `BEGINS_FROM_WEIGHT` do so when
they are attached: over a plain model, whose base `frozen=fp8` stores afterwards, they are as good
as any. LoRA itself adds to what the layer gives, but some of its initial values and variants start
from the weight, or from its type.

Nothing of ours runs when PEFT attaches adapters. Importing this module registers a hook of torch
that sees modules become children. The moment to refuse is

    a first adapter       when PEFT's layer takes the stored one for its own, or its model ours
                          where no layer of PEFT's is made before it fails
    LoRA, of any number   when PEFT's layer looks for the variant of an adapter (`guard`)

since a second adapter (`add_adapter`) comes to layers that PEFT made over plain weights, too.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
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
    "pissa": "PiSSA",
    "olora": "OLoRA",
    "corda": "CorDA",
    "mica": "MiCA",
    "loftq": "PEFT's LoftQ",
    "orthogonal": "init_lora_weights='orthogonal'",
}
"""Beginnings of LoRA's `init_lora_weights` that start from the weight, or from its type."""
VARIANTS = {"use_bdlora": "BD-LoRA", "kasa_config": "KaSA", "velora_config": "VeLoRA"}
"""Settings of LoRA whose parts are made of the weight (KaSA), or in its type."""


def method_of(layer: nn.Module, methods: Collection[str]) -> str:
    """The one of these methods of PEFT that a layer is of, or ""."""
    package = ".".join(type(layer).__module__.split(".")[:3])
    return next((m for m in methods if package == f"peft.tuners.{m.lower()}"), "")


def guard(layer: Any) -> None:
    """Let a layer of PEFT's LoRA refuse adapters that would start from codes; others stay."""
    if hasattr(type(layer), "resolve_lora_variant"):
        layer.__dict__["resolve_lora_variant"] = MethodType(resolve_lora_variant, layer)


def guard_adapters(model: nn.Module) -> None:
    """`guard` the layers whose base has been stored after PEFT made them."""
    for module in model.modules():
        if isinstance(module._modules.get("base_layer"), StoredMixin):
            guard(module)


def finish_adapters(model: nn.Module) -> None:
    """Let adapters change plain weights as they would in their first forward, which comes too late.

    KaSA of PEFT (0.21) leaves it until then where it was loaded with `low_cpu_mem_usage`.
    """
    layers: list[Any] = [m for m in model.modules() if "_lora_kasa_truncation_deferred" in vars(m)]
    for layer in layers:
        for name in list(layer._lora_kasa_truncation_deferred):
            layer.lora_variant[name]._apply_deferred_truncation(layer, name)


def resolve_lora_variant(layer: Any, *, config: Any, **kwargs: Any) -> Any:
    """`LoraLayer.resolve_lora_variant`, which PEFT (0.21) calls before it makes an adapter.

    Raises:
        StorageNotComputeError: the adapter would start from the weight, which is codes.
    """
    base = layer.get_base_layer()
    if isinstance(base, StoredMixin) and (method := _method_from_weight(config, base)):
        raise _reads_codes(method, plain_first=True)
    return type(layer).resolve_lora_variant(layer, config=config, **kwargs)


def _method_from_weight(config: Any, base: Any) -> str:
    """What in a configuration of LoRA starts from the weight, or ""."""
    first = str(config.init_lora_weights).lower()
    if first == "lora_ga" and hasattr(base, "_peft_loraga_grad"):  # without, it is the default's
        return "LoRA-GA"
    found = [named for start, named in INITIAL.items() if first.startswith(start)]
    found += [named for key, named in VARIANTS.items() if getattr(config, key, None) is not None]
    return next(iter(found), "")


def _refuse_as_base(parent: nn.Module, name: str, child: Any) -> None:
    """Hook of torch, called for each module that becomes a child."""
    if name == "base_layer" and isinstance(child, StoredMixin):
        method = method_of(parent, (*READS_WEIGHT, *BEGINS_FROM_WEIGHT))
        if method:
            raise _reads_codes(method, plain_first=method in BEGINS_FROM_WEIGHT)
        if type(parent).__name__ == "ParamWrapper":
            raise _reads_codes("target_parameters of LoRA", plain_first=False)
        guard(parent)
        return
    fails = method_of(parent, FAILS_FIRST) if name == "model" else ""
    if fails and any(isinstance(module, StoredMixin) for module in child.modules()):
        raise _reads_codes(fails, plain_first=fails in BEGINS_FROM_WEIGHT)


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
