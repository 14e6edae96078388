"""Fused attention as on a GPU: one operator forward, one backward, and their allocations.

`F.scaled_dot_product_attention` runs other kernels on a CPU, with other saved tensors. It is
replaced by an operator that computes nothing, but has the results, saved tensors and temporaries of
the kernel that CUDA would choose (`finetune.estimator.memory.attention_buffers`). Saved are q, k,
v, the output, one float32 per row (log-sum-exp), and the mask, which torch converts from bool to
the operands' dtype.

With `model.attention: flash_attention_2` Transformers calls the `flash-attn` package, which takes
packed rows without padding or mask; documents attend to themselves only. As it runs on GPUs only,
an attention function of the same shapes replaces it.

Shapes: q [B, H, L, D]; k, v [B, Hkv, S, D]; output [B, H, L, D], laid out as [B, L, H, D].
Source: torch 2.13, aten/src/ATen/native/transformers/cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from finetune.estimator.memory.attention_buffers import (
    Kernel,
    attention_backward_extra,
    attention_forward_extra,
    sdpa_kernel,
)
from finetune.estimator.memory.overheads import installed_torch

_library = torch.library.Library("finetune_estimator", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, str kernel)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? mask, bool causal, str kernel) -> (Tensor, Tensor, Tensor, Tensor[])"
)


def _by_position(x: Tensor) -> Tensor:
    """Empty [B, H, L, D] with the memory layout [B, L, H, D] of the kernels."""
    b, heads, length, d = x.shape
    return x.new_empty((b, length, heads, d)).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    b, heads, length, _ = q.shape
    out = q.new_empty((b, length, heads, v.shape[3])).transpose(1, 2)
    kept = attention_forward_extra(kernel, b, heads, length)
    return out, q.new_empty(kept // 4, dtype=torch.float32)


def _backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    (b, heads, rows, d), (_, kv_heads, keys, _) = q.shape, k.shape
    sizes = attention_backward_extra(kernel, b, heads, kv_heads, rows, keys, d, q.element_size())
    buffers = [q.new_empty(size, dtype=torch.uint8) for size in sizes]
    return _by_position(q), _by_position(k), _by_position(v), buffers


for _name, _call in (("attention", _forward), ("attention_backward", _backward)):
    _library.impl(_name, _call, "Meta")
_OPS = torch.ops.finetune_estimator


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: Kernel
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


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: Kernel
) -> Tensor:
    """Output [B, H, L, D] of a kernel, differentiable by the kernel's backward."""
    return _Attention.apply(q, k, v, mask, causal, kernel)  # pyright: ignore[reportReturnType]


def attention_on(
    capability: tuple[int, int], torch_version: tuple[int, ...] | None = None
) -> Callable[..., Tensor]:
    """`F.scaled_dot_product_attention` of a GPU, for tensors without memory.

    `torch_version` is the installed one by default.

    Returns:
        A function with the same arguments, which casts operands as autocast would.
    """
    version = torch_version or installed_torch()

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
        if torch.is_autocast_enabled(query.device.type):
            wanted = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
        if attn_mask is not None and attn_mask.dtype != query.dtype:
            attn_mask = attn_mask.to(query.dtype)
        kernel = sdpa_kernel(
            capability,
            version,
            head_dim=query.shape[-1],
            masked=attn_mask is not None,
            itemsize=query.element_size(),
        )
        return fused(query, key, value, attn_mask, is_causal, kernel)

    return fused_attention


NAME = "finetune_flash"
KERNELS: dict[str, Kernel] = {"flash_attention_2": "flash", "flash_attention_3": "flash3"}


def use_flash(model: nn.Module, kernel: Kernel) -> None:
    """Make a model's layers attend by `kernel`, in place."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        documents = 1 if cu_seq_lens_q is None else len(cu_seq_lens_q) - 1
        length = query.shape[2]
        if documents > 1 and length % documents == 0:
            query, key, value = (_split(x, documents) for x in (query, key, value))
        out = fused(query, key, value, None, True, kernel).transpose(1, 2)
        return out.reshape(-1, length, *out.shape[2:]), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
    set_attention(model, NAME)


def choose_attention(model: nn.Module, name: str | None) -> None:
    """Apply `model.attention` to a model sketched with its default attention."""
    if name in KERNELS:
        use_flash(model, KERNELS[name])
    elif name is not None:
        set_attention(model, name)


def set_attention(model: nn.Module, name: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = name


def _split(x: Tensor, documents: int) -> Tensor:
    """View [1, H, n L, D] as one row per document, [n, H, L, D]."""
    _, heads, length, d = x.shape
    rows = x.transpose(1, 2).reshape(documents, length // documents, heads, d)
    return rows.transpose(1, 2)
