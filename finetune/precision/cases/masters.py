"""What trains and stays in host memory besides FP8 layers: embeddings and the head, by a copy.

Where FSDP2 shards, it gathers embeddings and the head as ever.

Norms and biases stay on the device, with their gradients and their part of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from finetune.precision.cases.case import Site, Swap
from finetune.precision.model.layers import decoder_layers, head_modules
from finetune.precision.stored.gathered import GatheredEngine, GatheringMixin
from finetune.precision.stored.trained import (
    AwayMixin,
    DeviceMixin,
    LayerMixin,
    TableMixin,
    TrainedEngine,
)


def masters_in_host_memory(site: Site) -> Iterator[Swap]:
    """Tables, decoder layers that wait for their weights, and the model itself."""
    if isinstance(site.engine, GatheredEngine):
        yield Swap(site.model, GatheringMixin, {"fp8_shards": site.engine.shards})
    if not isinstance(site.engine, TrainedEngine):
        return
    masters = site.engine.masters
    heads, tables = head_modules(site.model), list[nn.Module]()
    for module in site.modules.values():
        weight = module._parameters.get("weight")
        if weight is None or isinstance(module, AwayMixin) or not weight.requires_grad:
            continue
        if isinstance(module, nn.Embedding) or module in heads:
            tables.append(module)
            yield Swap(module, TableMixin, {"fp8_master": masters.of(weight, None)})
    for layer in decoder_layers(site.model):
        inside = [m.fp8_master for m in layer.modules() if isinstance(m, AwayMixin)]
        yield Swap(layer, LayerMixin, {"fp8_inside": inside})
    masters.settle()
    yield Swap(site.model, DeviceMixin, {"fp8_masters": masters, "fp8_tables": tables})
