"""Base weights held in 4 bits, and what their products allocate.

NF4 (bitsandbytes): two weights to a byte, one float32 maximum for 64 weights; with double
quantisation that maximum is one byte, with a float32 for 256 of them. GPTQ (auto_gptq): eight
weights to an int32, for each group of 128 inputs (or for all of them) a scale (2 bytes) and a zero
(4 bits) per output, and an int32 per input that says its group. Each product makes the whole
weight anew in 16 bits, forward and backward, and keeps none. The input is not kept, the base being
frozen; bitsandbytes before 0.43 kept it all the same (`MatMul4Bit.forward`: `ctx.tensors = (A,
B)`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NF4_BLOCK, _NF4_BLOCK2 = 64, 256
_GPTQ_GROUP = 128


class _Product(torch.autograd.Function):
    """x W^T with W made for the moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        """x [..., K] -> [..., N]."""
        ctx.layer = layer
        if layer.keeps_input:
            ctx.save_for_backward(x)
        return F.linear(x, layer.dequantised())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """dy [..., N] -> dx [..., K]."""
        return torch.matmul(grads[0], ctx.layer.dequantised()), None


class PackedLinear(nn.Linear):
    """A frozen linear layer whose weight is codes and scales; made in place by `pack`."""

    form: str
    compute: torch.dtype
    keeps_input: bool
    scales: list[Tensor]

    def dequantised(self) -> Tensor:
        """The weight [N, K] in the compute type, with what making it takes."""
        count = self.in_features * self.out_features
        weight = self.weight.new_empty(self.out_features, self.in_features, dtype=self.compute)
        if self.form == "nf4-dq":  # the maxima are made first
            self.weight.new_empty(count // _NF4_BLOCK, dtype=torch.float32)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] -> [..., N] in the type of `input`, as bitsandbytes returns it."""
        given = input.dtype
        out = _Product.apply(input.to(self.compute), self)
        if self.bias is not None:
            out = out + self.bias  # type: ignore[operator]
        return out.to(given)  # type: ignore[union-attr]


def packed_bytes(form: str, rows: int, columns: int) -> tuple[int, int]:
    """Bytes of the codes, and of scales and indices, of a weight [rows, columns]."""
    count = rows * columns
    if form == "nf4":
        return count // 2, count // _NF4_BLOCK * 4
    if form == "nf4-dq":
        blocks = count // _NF4_BLOCK
        return count // 2, blocks + -(-blocks // _NF4_BLOCK2) * 4
    if form in ("gptq4", "gptq4-column"):
        groups = 1 if form == "gptq4-column" else -(-columns // _GPTQ_GROUP)
        return count // 2, groups * rows * 2 + groups * rows // 2 + columns * 4
    if form == "int8":
        groups = -(-columns // _GPTQ_GROUP)
        return count, groups * rows * 2 + groups * rows + columns * 4
    raise KeyError(form)


def pack(layer: nn.Linear, form: str, compute: torch.dtype, *, keeps_input: bool = False) -> None:
    """Hold `layer`'s weight in `form` from now on."""
    codes, scales = packed_bytes(form, layer.out_features, layer.in_features)
    layer.__class__ = type("Packed", (PackedLinear, type(layer)), {})
    layer.weight = nn.Parameter(
        torch.empty(codes, dtype=torch.uint8, device="meta"), requires_grad=False
    )
    assert isinstance(layer, PackedLinear)
    layer.form, layer.compute, layer.keeps_input = form, compute, keeps_input
    layer.scales = [torch.empty(scales, dtype=torch.uint8, device="meta")]


def forward_bnb_lora(self: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """`peft.tuners.lora.bnb.Linear4bit.forward`: the product is cloned, and the input is cast to
    the adapter's type unless autocast will do it (`torch.is_autocast_enabled`)."""
    result = self.base_layer(x).clone()
    for name in self.active_adapters:
        a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        given = result.dtype
        inner = x if self.scored_autocast else x.to(a.weight.dtype)
        added = b(a(dropout(inner))) * self.scaling[name]
        result = result + (added if self.scored_autocast else added.to(given))
    return result


def forward_gptq_lora(self: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """`peft.tuners.lora.gptq.QuantLinear.forward`, and fms's `GPTQLoraLinear`."""
    result = self.base_layer(x)
    for name in self.active_adapters:
        a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        given = result.dtype
        inner = x if self.scored_autocast else x.to(a.weight.dtype)
        added = b(a(dropout(inner)))
        if not self.scored_autocast:
            added = added.to(given)
        result = result + added * self.scaling[name]
    return result
