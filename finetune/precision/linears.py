"""What counts as a linear layer: a module that multiplies by one weight, `y = x Wᵀ`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(N, K) of a module that multiplies by one 2-D weight as `nn.Linear` does, else None."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if is_conv1d(type(module)):
        weight: Any = module.weight
        return weight.shape[1], weight.shape[0]  # GPT-2 stores its weight as [K, N]
    return None


def is_conv1d(cls: type[nn.Module]) -> bool:
    """Whether a class is GPT-2's `Conv1D`, a linear layer with a transposed weight."""
    return any(
        base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils"
        for base in cls.__mro__
    )


def iter_linears(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Name, module and (N, K) of each linear layer, shared modules once."""
    for name, module in model.named_modules():
        shape = linear_shape(module)
        if shape is not None:
            yield name, module, shape
