"""Models without memory: a model on the meta device becomes one on a CPU that holds nothing.

A meta tensor tells every program that asks that it lies nowhere, and autocast, optimizers and
attention then go other ways than they would in training. A *fake* tensor has shape, type and
device, but no bytes. So models are built and adapters attached on meta, where that is fast, and then
their parameters are replaced by fake ones. The device is always the CPU: fake CUDA tensors need a
CUDA build of torch. What a GPU does otherwise is in `finetune.estimator.target`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """Operators under it give fake tensors; real ones may meet them (a batch, which is small)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers on meta by fake ones on the CPU, ties kept, in place."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                data = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            if isinstance(tensor, nn.Parameter):
                data = nn.Parameter(data, requires_grad=tensor.requires_grad)
                data.__dict__.update(tensor.__dict__)
            made[id(tensor)] = data
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # pyright: ignore[reportArgumentType]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
