"""`model.storage`: which layers of a frozen base are held small, and in how many bytes.

Known before anything is loaded, from a model on the meta device, so that memory can be told and
what cannot work be refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.precision.layers import linear_shape, storable
from finetune.storage import nf4
from finetune.storage.sizes import fp8_bytes, nf4_bytes

if TYPE_CHECKING:
    from torch import nn

    from finetune.config.schema import Storage


def held_layers(model: nn.Module, storage: Storage | None) -> dict[str, Any]:
    """Name -> module of the layers that will be held so.

    Args:
        model: plain or with adapters, also on the meta device.
        storage: `model.storage` of the run.

    Raises:
        PlanError: there is no layer that could be held in FP8.
    """
    match storage:
        case "nf4":
            return nf4.held_linears(model)
        case "fp8":
            return {name: model.get_submodule(name) for name in storable(model)}
        case _:
            return {}


def held_bytes(layer: nn.Module, storage: Storage) -> int:
    """Bytes of one layer's weight with its scales, when it is held so."""
    shape = linear_shape(layer)
    assert shape is not None
    n, k = shape
    return nf4_bytes(n * k) if storage == "nf4" else fp8_bytes(n, k)
