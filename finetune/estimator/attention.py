"""Fused attention as a GPU runs it: one operator forward, one backward, and what they hold.

`F.scaled_dot_product_attention` is one name for several kernels, and the one that a CPU has saves
and allocates other things than those of a GPU. For a GPU target its call is replaced by an operator
that computes nothing, but has the results, the saved tensors and the passing buffers of the kernel
that CUDA would choose:

* *flash* (FlashAttention-2, Dao 2023, arXiv 2307.08691): BF16 or FP16, no mask. It saves q, k, v,
  the output and one float32 per row (log-sum-exp); its backward accumulates dq in float32 and, when
  heads share keys and values, makes dk and dv per query head before it sums them.
* *efficient* (xFormers' kernel, for masks and for float32): saves the mask too, which torch first
  turns from truth values into numbers of the operands' type.

Shapes: q [B, H, L, D]; k, v [B, Hkv, S, D]; output [B, H, L, D], laid out as [B, L, H, D].
Source: torch 2.13, aten/src/ATen/native/transformers/cuda.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.estimator.attention_buffers import attention_backward_extra

_library = torch.library.Library("finetune_estimator", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, str kernel)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? mask, bool causal, str kernel) -> (Tensor, Tensor, Tensor, Tensor[])"
)


def _by_position(x: Tensor, heads: int) -> Tensor:
    """An empty [B, heads, L, D] whose memory is [B, L, heads, D], as the kernels lay it out."""
    b, _, length, d = x.shape
    return x.new_empty((b, length, heads, d)).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: str
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    sizes = attention_backward_extra(
        kernel, q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], q.dtype
    )
    passing = [q.new_empty(size, dtype=torch.uint8) for size in sizes]
    return (
        _by_position(q, q.shape[1]),
        _by_position(k, k.shape[1]),
        _by_position(v, v.shape[1]),
        passing,
    )


for _name, _call in (("attention", _forward), ("attention_backward", _backward)):
    _library.impl(_name, _call, "Meta")
_OPS = torch.ops.finetune_estimator


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: str
    ) -> Tensor:
        out, lse = _OPS.attention(q, k, v, mask, causal, kernel)
        ctx.save_for_backward(q, k, v, out, lse, *([] if mask is None else [mask]))
        ctx.how = causal, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        q, k, v, out, lse, *mask = ctx.saved_tensors
        dq, dk, dv, _ = _OPS.attention_backward(
            g, q, k, v, out, lse, mask[0] if mask else None, *ctx.how
        )
        return dq, dk, dv, None, None, None


def kernel_of(q: Tensor, mask: Tensor | None) -> str:
    """What CUDA would choose: `flash` or `efficient`."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return "flash" if half and mask is None and q.shape[-1] <= 256 else "efficient"


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of a GPU, on tensors without memory.

    Under autocast the operands are cast as autocast casts them for it.
    """
    if torch.is_autocast_enabled(query.device.type):
        wanted = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
    if attn_mask is not None and attn_mask.dtype != query.dtype:
        attn_mask = attn_mask.to(query.dtype)
    kernel = kernel_of(query, attn_mask)
    return _Attention.apply(query, key, value, attn_mask, is_causal, kernel)  # pyright: ignore
