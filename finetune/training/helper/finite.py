"""NaN and infinity in tensors of a model, with one read of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finetune.precision.model.tree import Tree, named_trainable
from finetune.precision.proof.movement import local_part


def own_values(x: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return local_part(x).detach()


@torch.no_grad()
def is_broken(x: Tensor) -> bool:
    """True if this process's part of a tensor has NaN or infinity; codes in 8 bits have neither."""
    own = own_values(x)
    judged = own.is_floating_point() and own.dtype.itemsize >= 2 and own.numel() > 0
    # NaN is the least and the greatest of any values; no mask as large as the tensor is made.
    return judged and not bool(torch.stack(torch.aminmax(own)).isfinite().all())


def not_finite(model: nn.Module | Tree) -> list[str]:
    """Names of trainable weights with NaN or infinity, which no optimizer step repairs.

    No health monitor runs in a hand-written loop, where moments in FP16, say, divide by zero.
    """
    return [name for name, p in named_trainable(model).items() if is_broken(p)]
