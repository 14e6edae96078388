"""FlashAttention-2 of torch's wheel over packed rows: its checks, and plain arithmetic.

Source: `mha_varlen_fwd` and `mha_varlen_bwd` in `flash_attn/flash_api.cpp` of torch 2.13.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def _check(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), f"FlashAttention has no {q.dtype}"
    assert q.dtype == k.dtype == v.dtype
    assert {x.device.type for x in (q, k, v, ends_q, ends_k)} == {"cuda"}
    assert ends_q.dtype == ends_k.dtype == torch.int32, "cu_seqlens must be int32"
    assert ends_q.is_contiguous()
    assert ends_k.is_contiguous()
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension is contiguous"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0, "head_size is a multiple of 8"
    assert q.shape[1] % k.shape[1] == 0


def _scores(q: Tensor, k: Tensor, scale: float, left: int | None) -> Tensor:
    """[H, L, L], causal, within `left` tokens."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    number = torch.arange(len(q), device=q.device)
    ahead = number[:, None] - number
    hidden = (ahead < 0) | (ahead > left if left is not None and left >= 0 else ahead > len(q))
    return scores.masked_fill(hidden, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    dropout: float, causal: bool, return_debug_mask: bool = False, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> Any:  # fmt: skip
    _check(q, k, v, ends_q, ends_k)
    assert causal or window_size_right == 0
    out = torch.empty_like(q)
    lse = torch.zeros(q.shape[1], len(q), device=q.device)
    bounds = ends_q.cpu().tolist()
    assert bounds[-1] == len(q), "the documents end where the tokens do"
    for start, end in itertools.pairwise(bounds):
        assert end - start <= max_q, "a document is longer than max_q"
        if end > start:
            rows = slice(start, end)
            s = _scores(q[rows], k[rows], scale or q.shape[-1] ** -0.5, window_size_left)
            wide = v[rows].repeat_interleave(q.shape[1] // k.shape[1], 1)
            out[rows] = torch.einsum("hnm,mhd->nhd", s.softmax(-1), wide.float()).to(q.dtype)
            lse[:, rows] = s.logsumexp(-1)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, lse, seed, torch.empty(0, device=q.device), torch.empty(0, device=q.device)


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends_q: Tensor,
    ends_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor,
    unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **_: Any,
) -> Any:  # fmt: skip
    _check(q, k, v, ends_q, ends_k)
    assert g.dtype == q.dtype, "the gradient has the operands' type"
    bounds = ends_q.cpu().tolist()
    found = tuple(torch.zeros_like(x) for x in (q, k, v))
    scale = scale or q.shape[-1] ** -0.5
    groups = q.shape[1] // k.shape[1]
    for start, end in itertools.pairwise(bounds):
        if end == start:
            continue
        rows = slice(start, end)
        p = _scores(q[rows], k[rows], scale, window_size_left).softmax(-1)
        grad, wide_v, wide_k = (
            g[rows].float(),
            v[rows].repeat_interleave(groups, 1).float(),
            k[rows].repeat_interleave(groups, 1).float(),
        )
        dp = torch.einsum("nhd,mhd->hnm", grad, wide_v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        parts = (
            torch.einsum("hnm,mhd->nhd", ds, wide_k),
            torch.einsum("hnm,nhd->mhd", ds, q[rows].float()),
            torch.einsum("hnm,nhd->mhd", p, grad),
        )
        for whole, part in zip(found, parts, strict=True):
            part = part.unflatten(1, (whole.shape[1], -1)).sum(2)
            whole[rows] = part.to(whole.dtype)
    return found
