"""Linear layers that keep their weights: the engine's mixin comes before their class."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.precision.cases.case import Site, Swap
from finetune.precision.engines.observers import CallCount
from finetune.precision.engines.whole import MlpMixin, joinable_mlps


def linear_layers(site: Site) -> Iterator[Swap]:
    """The planned layers, in the order of the plan: engines keep state in it."""
    for layer in site.plan.fp8_layers:
        if layer.kind == "linear" and not layer.stored:
            assert site.engine is not None
            module = site.modules[layer.name]
            facts = site.engine.attributes(module, layer)
            facts = {"fp8_engine": site.engine, "fp8_calls": CallCount(), **facts}
            yield Swap(module, site.engine.mixin, facts)


def mlps(site: Site) -> Iterator[Swap]:
    """MLPs all of whose layers one function of the engine can multiply."""
    for module in list(joinable_mlps(site.modules.values())):
        yield Swap(module, MlpMixin, {})
