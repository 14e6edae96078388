"""Linear attention, strictly causal and rotary, as BDH has it.

Token t reads the earlier tokens' values by plain inner products, without softmax and without scale:

    a_t = sum over tau < t of <R_t q_t, R_tau k_tau> v_tau

R_t is the rotary turn of position t. The sum is linear in what is remembered: it is R_t q_t
applied to a state of N x D numbers, which grows by the outer product of R_tau k_tau and v_tau at
each token. For training it is computed in parallel instead, with the [T, T] table of inner
products.

The inner products are sums of N terms that nothing keeps small: past what float16 holds, so there
they are computed in float32. They are never below bfloat16, as no operand is a parameter.

Limits: time and memory grow with T^2. Rotary pairs are neurons i and i + N/2 of a head: the
published pairs (2i, 2i + 1), permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's turn, float32 [B, 1, T, size / 2] (Su et al. 2021).

    Args:
        positions: int64 [B, T].
        size: neurons of a head.
        theta: pair i turns by theta^(-2i / size) a token.
    """
    pairs = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None, :, None].float() * theta ** (-pairs / size)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + N/2) of x [B, H, T, N] by [B, 1, T, N/2]; in the type of `x`."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Linear attention, in parallel: the sum of `v` weighted by plain inner products.

    Args:
        q: [B, H, T, N].
        k: [B, H, S, N].
        v: [B, 1, S, D], the same for all heads.
        visible: bool [B or 1, 1, T, S].

    Returns:
        [B, H, T, D].
    """
    if q.dtype == torch.float16:  # sums of N squares: past float16's range, whatever autocast says
        with torch.autocast(q.device.type, enabled=False):
            return attend(q.float(), k.float(), v.float(), visible)
    scores = (q @ k.mT).masked_fill(~visible, 0)
    # Heads share the values: one batch of [H·T, S] rather than H copies of v.
    return (scores.flatten(1, 2) @ v[:, 0]).unflatten(1, q.shape[1:3])


def visible_tokens(position_ids: Tensor, seen: int, attention_mask: Tensor | None) -> Tensor:
    """Which tokens each token reads: earlier ones of its own text that are not padding.

    Args:
        position_ids: int64 [B or 1, T]; at each 0 a text begins.
        seen: tokens of earlier calls, taken to be of the same text.
        attention_mask: [B, seen + T], 0 for padding.

    Returns:
        bool [B or 1, 1, T, seen + T].

    Raises:
        ValueError: a mask of another shape.
    """
    length = position_ids.shape[1]
    shape = (1, 1, length, seen + length)
    visible = torch.ones(shape, dtype=torch.bool, device=position_ids.device).tril(seen - 1)
    if not seen:
        text = (position_ids == 0).cumsum(-1)[:, None]
        visible = visible & (text[..., :, None] == text[..., None, :])
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(
                "BDH takes an attention_mask [batch, length], "
                f"not a {attention_mask.ndim}-dimensional one"
            )
        visible = visible & attention_mask.bool()[:, None, None]
    return visible
