"""A module that computes in a type of the user's choice (`finetune.precision.model.choices`).

The module changes class, whatever autocast says: a linear layer multiplies
inputs and weights cast to its type; an embedding or a norm gets its input in that type and gives
its result in it (norms compute inside in that type or a higher one, as they are written). Where
autocast is on, only its own type and float32 can meet afterwards, so a result in a third type
(float16 in a BF16 run) is handed on in autocast's. Parameters stay what the optimizer knows, and
gradients come back in their own type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.precision.cases.case import Site, Swap
from finetune.precision.model.swap import Swapped, weight_matrix
from finetune.precision.stored.linear import StoredMixin

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class OverrideMixin(Swapped):
    """In front of a module's own class: computes in `fp8_dtype`, with autocast off."""

    fp8_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        dtype = self.fp8_dtype
        # The input is the first argument, whatever the module calls it.
        name, x = ("", args[0]) if args else next(iter(kwargs.items()))
        kind = x.device.type
        around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        with torch.autocast(kind, enabled=False):
            linear = isinstance(self, nn.Linear) or self.transposed_weight  # or GPT-2's Conv1D
            # A stored layer dequantizes to the type of its input.
            if linear and not isinstance(self, StoredMixin):
                this: Any = self
                weight, bias = weight_matrix(this).to(dtype), this.bias
                bias = None if bias is None else bias.to(dtype)
                y = nn.functional.linear(x.to(dtype), weight, bias)  # [M, K] @ [K, N]
            elif self.plain_class.forward is nn.LayerNorm.forward:  # its kernels take one type
                own: Any = self
                weight, bias = (p if p is None else p.to(dtype) for p in (own.weight, own.bias))
                y = nn.functional.layer_norm(
                    x.to(dtype), own.normalized_shape, weight, bias, own.eps
                )
            else:
                x = x.to(dtype) if x.is_floating_point() else x  # token ids stay
                args, kwargs = ((x, *args[1:]), kwargs) if args else ((), {**kwargs, name: x})
                y = self.plain_class.forward(self, *args, **kwargs)
                y = y.to(dtype)
        # Float32 and autocast's own type stay; a third one could not meet them afterwards.
        return y.to(around) if dtype not in (torch.float32, around) else y


def overridden(site: Site) -> Iterator[Swap]:
    """Modules for which the user chose a type that autocast would not give them."""
    for name, compute in site.plan.overrides.items():
        yield Swap(site.modules[name], OverrideMixin, {"fp8_dtype": DTYPES[compute]})
