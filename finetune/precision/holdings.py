"""How the weights of linear layers are held, where they are not plain numbers of 16 or 32 bits.

Storage is apart from compute: a weight in NF4 (bitsandbytes) is dequantised before a BF16 matmul,
one in FP8 (`finetune.precision.storage`) likewise or multiplied as it is. Plan and receipt tell it
from what the module holds, not from what was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.precision.linears import iter_linears
from finetune.precision.storage import StoredMixin

if TYPE_CHECKING:
    from torch import nn

    from finetune.precision.planner import LayerPlan


def held_as(module: nn.Module) -> str:
    """`nf4` or `fp4` of bitsandbytes' layers, `fp8` of ours, empty for a plain weight."""
    if isinstance(module, StoredMixin):
        return "fp8"
    weight = module._parameters.get("weight")
    # By name, as Transformers and PEFT ask: bitsandbytes need not be installed.
    return weight.quant_type if type(weight).__name__ == "Params4bit" else ""  # pyright: ignore


def held_weights(model: nn.Module) -> dict[str, int]:
    """How weights are held that are not plain -> number of linear layers."""
    return dict(Counter(kind for _, module, _ in iter_linears(model) if (kind := held_as(module))))


def tell_holdings(rows: Iterable[LayerPlan], model: nn.Module) -> list[LayerPlan]:
    """Rows of a plan, with how the weight is held in the reason of those without FP8 compute."""
    held = {name: kind for name, module, _ in iter_linears(model) if (kind := held_as(module))}
    return [
        replace(row, reason=f"{row.reason}; weight held in {held[row.name]}")
        if row.name in held and row.compute != "fp8"
        else row
        for row in rows
    ]
