"""From the last hidden states to the loss, as each library's version does it.

The same loss costs 2 to 16 bytes per token and word, by how often its code copies the logits:

* `transformers-4.45`: the logits are replaced by a float32 copy, shifted into a contiguous copy,
  and the logarithm of the softmax is kept.
* `transformers-4.48`: the same copies inside of a loss function, while its caller holds the 16-bit
  logits to return them (`ForCausalLMLoss`).
* `transformers-5`: no shifted copy; the labels are shifted instead.
* `fast-ce`: Unsloth's kernel over the shifted float32 copy, which backward overwrites with its
  gradient.
* `fused-head`: Liger's product and loss in chunks; the gradient of the hidden states is there after
  forward and no logits are kept.

`accelerate`'s mixed precision returns outputs in float32 (`ConvertOutputsToFp32`), which the
installed one does as well: one more copy while the caller of the model holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FastCrossEntropy(torch.autograd.Function):
    """Unsloth's kernel: logits [N, V] are kept, and backward writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [N, V], labels [N] -> losses [N], float32."""
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        sums = torch.empty_like(losses)
        ctx.save_for_backward(logits, sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        """The gradient is the storage of the logits."""
        return ctx.saved_tensors[0], None


class FusedHead(torch.autograd.Function):
    """Liger's fused linear cross entropy (`fused_linear_cross_entropy_forward`)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, low: torch.dtype) -> Tensor:
        """hidden [N, H], weight [V, H] -> loss; products in `low`."""
        count, size = hidden.shape
        words = weight.shape[0]
        chunk = 1 << (-(-count // -(-words // size)) - 1).bit_length()
        dweight = torch.zeros_like(weight) if weight.requires_grad else None
        dhidden = torch.zeros_like(hidden)
        losses = hidden.new_zeros(count, dtype=torch.float32)
        for start in range(0, count, chunk):
            part = hidden[start : start + chunk]
            logits = part.to(low) @ weight.to(low).t()
            logits = logits.float()
            logits = logits.to(low)
            grad_logits = logits * 1.0
            dhidden[start : start + chunk] = grad_logits @ weight.to(low)
            if dweight is not None:
                torch.mm(logits.t(), part.to(low))
        ctx.save_for_backward(dhidden, dweight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Both gradients were made in forward."""
        dhidden, dweight = ctx.saved_tensors
        return dhidden, dweight, None


def _shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    short = logits[..., :-1, :].contiguous()
    return short.view(-1, short.shape[-1]), labels[..., 1:].contiguous().view(-1)


def _in_445(
    hidden: Tensor, head: nn.Module, labels: Tensor, scale: float | None, fast: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if scale is not None:
        logits = logits / scale
    logits = logits.float()
    short, target = _shifted(logits, labels)
    if fast:
        return FastCrossEntropy.apply(short, target).sum() / 1.0, logits  # type: ignore[union-attr]
    return F.cross_entropy(short, target), logits


def _for_causal_lm(logits: Tensor, labels: Tensor, fast: bool) -> Tensor:
    logits = logits.float()
    short, target = _shifted(logits, labels)
    if fast:
        return FastCrossEntropy.apply(short, target).sum() / 1.0  # type: ignore[union-attr]
    return F.cross_entropy(short, target, reduction="sum") / 1.0


def _in_448(
    hidden: Tensor, head: nn.Module, labels: Tensor, scale: float | None, fast: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if scale is not None:
        logits = logits / scale
    return _for_causal_lm(logits, labels, fast), logits


def _in_5(
    hidden: Tensor, head: nn.Module, labels: Tensor, scale: float | None, fast: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if scale is not None:
        logits = logits / scale

    def loss() -> Tensor:
        wide = logits.float()
        target = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(wide.view(-1, wide.shape[-1]), target, reduction="sum") / 1.0

    return loss(), logits


def _without_float32(
    hidden: Tensor, head: nn.Module, labels: Tensor, scale: float | None, fast: bool
) -> tuple[Tensor, Tensor]:
    """GPTBigCode has a loss of its own until 4.49: no float32 copy."""
    logits = head(hidden)
    short, target = _shifted(logits, labels)
    if fast:
        return FastCrossEntropy.apply(short, target).sum() / 1.0, logits  # type: ignore[union-attr]
    return F.cross_entropy(short, target), logits


_PATHS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "transformers-4.45": _in_445,
    "transformers-4.48": _in_448,
    "transformers-5": _in_5,
    "gpt-bigcode": _without_float32,
}


def take_loss(
    path: str,
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    fast: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The loss, and the logits that the model returns beside it.

    Args:
        path: one of the paths above.
        hidden: [B, L, H], after the last norm.
        head: gives [B, L, V].
        labels: [B, L].
        fast: with Unsloth's kernel.
        scale: logits are divided by it (Granite).
    """
    if path == "fused-head":
        short = hidden[..., :-1, :].contiguous()
        weight: Any = head.weight
        loss = FusedHead.apply(short.view(-1, short.shape[-1]), weight, torch.bfloat16)
        return loss, None  # type: ignore[return-value]
    return _PATHS[path](hidden, head, labels, scale, fast)
