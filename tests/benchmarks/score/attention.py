"""What attention kernels keep and allocate, without their arithmetic.

A kernel is one operator to the allocator: it returns its output and the logarithm of the softmax
sum, and its backward takes work space that no Python line shows.

* FlashAttention 2 (`flash_api.cpp`, `mha_bwd`): a float32 accumulator of dq over rounded rows and
  head size, the row sums of dout * out, and, when heads share keys, dk and dv for every head.
* The memory-efficient kernel of PyTorch's SDPA, which takes an additive mask: keys and values
  repeated for every head by the caller, the mask turned into the type of the query, an accumulator
  of dq in float32 when the type is narrower.

Sizes are of tensors [B, H, L, D]; both kernels return [B, L, H, D] as the next layer reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW_BLOCK = 128
"""Rows of the query rounded up (`seqlen_q_rounded` in flash_api.cpp)."""


def _rounded(number: int, to: int) -> int:
    return -(-number // to) * to


class FlashAttention(torch.autograd.Function):
    """FlashAttention 2 as an allocator sees it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, L, D]; k, v [B, Hkv, S, D] -> [B, L, H, D]."""
        batch, heads, length, size = q.shape
        out = q.new_empty(batch, length, heads, size)
        lse = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dout [B, L, H, D] -> dq, dk, dv."""
        q, k, _, _, _ = ctx.saved_tensors
        batch, heads, length, size = q.shape
        shared = k.shape[1]
        grads[0].contiguous()
        dq = q.new_empty(batch, length, heads, size)
        dk = k.new_empty(batch, k.shape[2], shared, size)
        dv = torch.empty_like(dk)
        rows = _rounded(length, _ROW_BLOCK)
        sums = q.new_empty(batch, heads, rows, dtype=torch.float32)
        gathered = q.new_empty(batch, heads, rows, _rounded(size, 32), dtype=torch.float32)
        if shared != heads:
            every_k = k.new_empty(batch, k.shape[2], heads, size)
            every_v = torch.empty_like(every_k)
            del every_k, every_v
        del sums, gathered
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class MaskedAttention(torch.autograd.Function):
    """SDPA's memory-efficient kernel with a mask [B, 1, L, S] that is added."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """q, k, v [B, H, L, D] -> [B, H, L, D], stored as [B, L, H, D]."""
        batch, heads, length, size = q.shape
        out = q.new_empty(batch, length, heads, size).transpose(1, 2)
        lse = q.new_empty(batch, heads, _rounded(length, 32), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse, *(() if bias is None else (bias,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """dout [B, H, L, D] -> dq, dk, dv."""
        q, k, v, _, _, *_ = ctx.saved_tensors
        batch, heads, length, size = q.shape
        grads[0].transpose(1, 2).contiguous()
        delta = q.new_empty(batch, heads, _rounded(length, 32), dtype=torch.float32)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        gathered = q.new_empty(batch * heads * _rounded(length, 64) * size, dtype=torch.float32)
        del delta, gathered
        return dq, dk, dv, None


def _in_16_bits(module: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """FlashAttention takes no float32: transformers casts to autocast's type."""
    low = module.config.scored_compute
    return tuple(t.to(low) if t.dtype is torch.float32 else t for t in tensors)


def attend_flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attention function of transformers: FlashAttention over full rows."""
    query, key, value = _in_16_bits(module, query, key, value)
    return FlashAttention.apply(query, key, value), None  # type: ignore[return-value]


def attend_repeated(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """FlashAttention over keys repeated for each head: Mistral, Mixtral, Qwen2 before 4.48."""
    times = query.shape[1] // key.shape[1]
    key, value = _repeated(key, times), _repeated(value, times)
    return attend_flash(module, query, key, value, attention_mask)


def _repeated(x: Tensor, times: int) -> Tensor:
    if times == 1:
        return x
    batch, heads, length, size = x.shape
    wide = x[:, :, None].expand(batch, heads, times, length, size)
    return wide.reshape(batch, heads * times, length, size)


def attend_masked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attention function of transformers: SDPA under a padding mask, keys repeated for each
    head."""
    times = query.shape[1] // key.shape[1]
    key, value = _repeated(key, times), _repeated(value, times)
    batch, length = query.shape[0], query.shape[2]
    # SDPA turns a boolean mask into an additive one of the query's type, rows aligned to 8
    # elements.
    bias = query.new_empty(batch, 1, length, _rounded(length, 8))
    out = MaskedAttention.apply(query, key, value, bias)
    return out.transpose(1, 2).contiguous(), None  # type: ignore[union-attr]


def attend_causal(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attention function of transformers: SDPA's flash kernel, causal and without a mask."""
    return FlashAttention.apply(query, key, value), None  # type: ignore[return-value]


def attend_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """`eager_attention_forward` of transformers under a causal mask: every step is a tensor."""
    times = query.shape[1] // key.shape[1]
    key, value = _repeated(key, times), _repeated(value, times)
    scores = torch.matmul(query, key.transpose(2, 3)) * 1.0
    scores = scores + module.config.scored_mask(query.shape[2], query.dtype)
    scores = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    scores = F.dropout(scores, p=0.0, training=module.training)
    return torch.matmul(scores, value).transpose(1, 2).contiguous(), None


class CausalMask:
    """The additive mask [1, 1, L, L] that every layer shares, made once for a length."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, length: int, dtype: torch.dtype) -> Tensor:
        if (length, dtype) not in self.made:
            self.made[length, dtype] = torch.empty(1, 1, length, length, dtype=dtype, device="meta")
        return self.made[length, dtype]


NAMES = {
    "eager": "scored_eager",
    "flash": "scored_full",
    "flash-repeated": "scored_repeated",
    "masked": "scored_masked",
    "causal": "scored_causal",
}
"""Kernel -> name under which transformers knows it. Names it has no mask for get none."""


def register_kernels() -> None:
    """Make `NAMES` known to transformers; does nothing when they are."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = {
        "flash": attend_flash,
        "flash-repeated": attend_repeated,
        "masked": attend_masked,
        "causal": attend_causal,
        "eager": attend_eager,
    }
    for kernel, function in functions.items():
        if NAMES[kernel] not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(NAMES[kernel], function)
