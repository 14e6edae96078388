"""Linear layers whose weight becomes codes in FP8, which forward and backward multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from finetune.precision.cases.case import Site, Swap
from finetune.precision.engines.observers import CallCount
from finetune.precision.stored.linear import store
from finetune.precision.stored.peft_methods import guard_adapters


def stored_layers(site: Site) -> Iterator[Swap]:
    """Store the planned weights; PEFT's layers above them refuse what would read codes."""
    if site.frozen is None:
        return
    first: dict[int, tuple[nn.Parameter, Any]] = {}  # by the weight, which stays alive here
    for layer in site.plan.fp8_layers:
        if layer.kind == "parameter" or not layer.stored:
            continue
        module: Any = site.modules[layer.name]
        _, other = first.setdefault(id(module.weight), (module.weight, module))
        store(module, layer.stored)
        if other is not module:  # they shared a weight: they share its codes
            module.weight, module.weight_scale = other.weight, other.weight_scale
            module.stored_tile = other.stored_tile
        facts = site.frozen.attributes(module, layer)
        facts = {"fp8_engine": site.frozen, "fp8_calls": CallCount(), **facts}
        yield Swap(module, site.frozen.mixin, facts)
    guard_adapters(site.modules.values())
