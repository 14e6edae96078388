"""Modules that compute in a type of the user's choice (`precision.map`), whatever autocast says.

A linear layer multiplies inputs and weights cast to that type; an embedding or a norm gets its
input in that type and gives its result in it (norms compute inside in that type or a higher one, as
they are written). Where autocast is on, only its own type and float32 can meet afterwards, so a
result in a third type (float16 in a BF16 run) is handed on in autocast's. As everywhere, only the
class of the module changes: parameters stay what the optimizer knows, and gradients come back in
their own type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from finetune.precision.layers import is_conv1d
from finetune.precision.swap import Swapped

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ForcedMixin(Swapped):
    """In front of a module's own class: computes in `fp8_dtype`, with autocast off."""

    fp8_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        dtype = self.fp8_dtype
        # The input is the first argument, whatever the module calls it.
        name, x = ("", args[0]) if args else next(iter(kwargs.items()))
        kind = x.device.type
        around = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        with torch.autocast(kind, enabled=False):
            if isinstance(self, nn.Linear) or is_conv1d(type(self)):  # pyright: ignore
                weight: Any = self.weight
                weight = weight if isinstance(self, nn.Linear) else weight.t()
                bias: Any = None if self.bias is None else self.bias.to(dtype)
                y = nn.functional.linear(x.to(dtype), weight.to(dtype), bias)
            else:
                x = x.to(dtype) if x.is_floating_point() else x  # token ids stay
                args, kwargs = ((x, *args[1:]), kwargs) if args else ((), {**kwargs, name: x})
                y = self.plain_class.forward(self, *args, **kwargs)
                y = y.to(dtype)
        return y.to(around) if dtype not in (torch.float32, around) else y
