"""Models without memory: a model on the meta device becomes one on a CPU that holds nothing.

A meta tensor tells every program that asks that it lies nowhere, and autocast, optimizers and
attention then go other ways than they would in training. A *fake* tensor has shape, type and
device, but no bytes. So models are built and adapters attached on meta, where that is fast; then
their parameters are replaced by fake ones. The device is always the CPU: fake CUDA tensors need a
CUDA build of torch. What a GPU does otherwise is in `finetune.estimator.target`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.precision import tiles


@contextlib.contextmanager
def without_memory() -> Iterator[FakeTensorMode]:
    """Operators give fake tensors; real ones may meet them (a batch, which is small)."""
    whole: list[tuple[Any, str, Any]] = [(tiles, "SLAB", {}), (tiles, "SLAB_ELSEWHERE", 2**62)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, replaced(whole):
        yield mode


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes other values for a while: (owner, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            if name in vars(owner):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:  # inherited
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def to_fake(model: nn.Module) -> None:
    """Replace parameters and buffers on meta by ones on the CPU, ties kept, in place.

    Inside of `without_memory` those are fake.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            data: Tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, nn.Parameter):
                data = nn.Parameter(data, requires_grad=tensor.requires_grad)
            made[id(tensor)] = data
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # pyright: ignore[reportArgumentType]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
