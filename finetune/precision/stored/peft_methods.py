"""PEFT over weights that are stored as codes: LoRA and DoRA, and nothing else of it.

They add to what a layer gives. Other methods of PEFT read the layer's weight, in each forward or
when they begin, and would take codes for numbers; so do some beginnings and variants of LoRA
(PiSSA, OLoRA, LoftQ, KaSA). Over a plain model, whose base `frozen=fp8` stores afterwards, LoRA
begins as it likes.

Nothing of ours runs when PEFT attaches adapters. Importing this module registers a hook of torch
that sees modules become children. The moment to refuse is

    another method        when PEFT's layer takes the stored one for its own, or in the plan
    LoRA, of any number   when PEFT's layer looks for the variant of an adapter (`guard`)

since a second adapter (`add_adapter`) comes to layers that PEFT made over plain weights, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from finetune.errors import StorageNotComputeError
from finetune.precision.stored.linear import StoredMixin

BEGINNINGS = (True, False, "gaussian", "eva")
"""Values of LoRA's `init_lora_weights` that do not start from the weight."""
VARIANTS = ("DoraLinearVariant", "ALoraLinearVariant")
"""Classes of LoRA's variants that add to what the layer gives (PEFT 0.21)."""


def other_method(layer: nn.Module) -> str:
    """The method of PEFT that a layer is of, if it is not LoRA by modules, or ""."""
    found = re.match(r"peft\.tuners\.(\w+)", type(layer).__module__)
    if found is None:
        return ""
    if type(layer).__name__ == "ParamWrapper":
        return "target_parameters of LoRA"
    return "" if found[1] == "lora" else f"PEFT's {found[1]}"


def cannot_adapt_codes(what: str, where: str) -> StorageNotComputeError:
    """The error of adapting stored weights by anything but LoRA and DoRA."""
    return StorageNotComputeError(
        f"{what} cannot adapt weights that are stored in FP8 or in four bits",
        where=where,
        why="it starts from the layer's weight itself, or from its type, and that is codes, which "
        "are no numbers without their scales",
        fix="LoRA (init_lora_weights=True) or DoRA by target_modules, which add to what the layer "
        "gives; or load the model plain: LoRA begins as it likes before frozen='fp8' stores the "
        "base, and other methods train with frozen='bf16'",
    )


def guard(layer: Any) -> None:
    """Let a layer of PEFT's LoRA refuse adapters that would start from codes; others stay."""
    if hasattr(type(layer), "resolve_lora_variant"):
        # On the instance: PEFT's layers elsewhere keep the method of their class.
        layer.__dict__["resolve_lora_variant"] = MethodType(resolve_lora_variant, layer)


def guard_adapters(modules: Iterable[nn.Module]) -> None:
    """`guard` the layers whose base has been stored after PEFT made them."""
    for module in modules:
        if isinstance(module._modules.get("base_layer"), StoredMixin):
            guard(module)


def resolve_lora_variant(layer: Any, *, config: Any, **kwargs: Any) -> Any:
    """`LoraLayer.resolve_lora_variant`, which PEFT (0.21) calls before it makes an adapter.

    Raises:
        StorageNotComputeError: the adapter would start from the weight, which is codes.
    """
    variant = type(layer).resolve_lora_variant(layer, config=config, **kwargs)
    if isinstance(layer.get_base_layer(), StoredMixin):
        begins = config.init_lora_weights
        if begins not in BEGINNINGS:
            raise cannot_adapt_codes(f"LoRA with init_lora_weights={begins!r}", ATTACHED)
        if variant is not None and type(variant).__name__ not in VARIANTS:
            raise cannot_adapt_codes(f"LoRA with PEFT's {type(variant).__name__}", ATTACHED)
    return variant


ATTACHED = "a model of load_in_fp8, or one that was prepared with frozen='fp8'"


def _refuse_as_base(parent: nn.Module, name: str, child: Any) -> None:
    """Hook of torch, called for each module that becomes a child."""
    if name != "base_layer" or not isinstance(child, StoredMixin):
        return
    if method := other_method(parent):
        raise cannot_adapt_codes(method, ATTACHED)
    guard(parent)


register_module_module_registration_hook(_refuse_as_base)
