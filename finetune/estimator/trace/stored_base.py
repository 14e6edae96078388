"""A frozen base stored in 8 or 4 bits, without memory.

FP8 codes are made by the functions that store a real base. bitsandbytes' kernels reject fake
tensors, so 4-bit layers get a forward of the same shapes: packed bytes, dequantized to the
activation's dtype for each matmul of forward and backward and never saved (bitsandbytes,
`autograd/_functions.py`, MatMul4Bit).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.precision.layers import storable
from finetune.precision.stored import store
from finetune.precision.swap import Swapped, swap
from finetune.storage import nf4
from finetune.storage.sizes import nf4_bytes

TABLES = 4 * (16 + 256 + 1)
"""Bytes of the tables of a 4-bit layer: NF4's codes, those of its absmaxes, their mean."""


class _FourBitMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        # [M, K] @ [K, N]
        return x @ _dequantized(packed, shape, x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        (packed,) = ctx.saved_tensors
        # [M, N] @ [N, K]
        return g @ _dequantized(packed, ctx.shape, g.dtype), None, None


def _dequantized(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Dequantize packed bytes to the weight [N, K]."""
    return torch.ops.finetune_estimator.dequantise(packed, list(shape), dtype)


def _dequantise(packed: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


_library = torch.library.Library("finetune_estimator", "FRAGMENT")
_library.define("dequantise(Tensor packed, int[] shape, ScalarType dtype) -> Tensor")
_library.impl("dequantise", _dequantise, "Meta")


class FourBitMixin(Swapped):
    """`bitsandbytes.nn.Linear4bit` with a matmul for tensors without memory."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        shape, dtype = (self.out_features, self.in_features), x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _FourBitMatmul.apply(x.to(torch.bfloat16), self.weight, shape)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.to(dtype)


def as_four_bit(model: Any) -> None:
    """Replace the linear layers of a meta model by 4-bit ones, before adapters are attached."""
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(nf4.quantization_config(), pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": torch.device("meta")})
    # Trainers read a quantizer of such a model; TRL casts its adapters, which runs undo.
    model.is_quantized = model.is_loaded_in_4bit = False


def store_base(model: nn.Module, storage: str | None) -> None:
    """Store the frozen base of a fake model as `model.storage` requests."""
    if storage == "fp8":
        for name in storable(model):
            store(model.get_submodule(name), "row")
    if storage != "nf4":
        return
    from bitsandbytes.nn import Linear4bit

    for module in [m for m in model.modules() if isinstance(m, Linear4bit)]:
        shaped: Any = module
        packed = nf4_bytes(math.prod(shaped.weight.shape)) + TABLES
        shaped.weight = nn.Parameter(torch.empty(packed, dtype=torch.uint8), requires_grad=False)
        swap(module, FourBitMixin)
