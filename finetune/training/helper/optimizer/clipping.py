"""Clipping of gradients by the update that reads them anyway.

`clip_grad_norm_` of torch, which Accelerate and the Trainer call, reads all gradients for their
norm, and reads and writes them once more to multiply. Where the update is a kernel (`adamw`), on a
GPU or in host memory, one pass sums squares, and the factor stays on the device until the update
multiplies by it, in float32:

    bytes a number, BF16 gradients     torch 2 + 4, here 2;   waits of the host: none

The norm that is returned, and logged, is that before clipping, as torch's is; in float32, where
torch's has the type of the gradients. Gradients keep the values of backward until the step.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import TensorWeakRef

from finetune.precision.proof.movement import local_part
from finetune.training.helper.optimizer import adamw_host
from finetune.training.helper.optimizer.adamw import (
    PointerTable,
    Update,
    in_host_memory,
    no_factor,
    runs_kernels,
)


class Factor:
    """What the gradients of an optimizer are to be multiplied by, in its next step.

    It belongs to the gradients that were there when it was made: those of a later backward, after
    a step that a script has left out, are not multiplied.
    """

    def __init__(self, value: Tensor, update: Update) -> None:
        gradients = _gradients(update)
        self._value, self._update = value, update
        # A weak reference: a factor that is never used must not keep gradients alive.
        self._alive, self._known = TensorWeakRef(gradients[0]), _versions(gradients)

    def __call__(self) -> Tensor | None:
        """The factor, for its only use; None if its gradients are gone."""
        self._update.take_factor = no_factor
        if self._alive() is None:
            return None
        # `_version` counts in-place changes: what was added after clipping would be scaled with the
        # rest.
        if self._known != _versions(_gradients(self._update)):
            self._update.clips = False
            warnings.warn(
                "gradients were changed between clip_grad_norm_ and the optimizer's step, which "
                "multiplies them by the clipping factor: in this step after that change. From now "
                "on clip_grad_norm_ multiplies them itself",
                stacklevel=2,
            )
        return self._value


def _gradients(update: Update) -> list[Tensor]:
    return [local_part(p.grad) for _, p in update.graded if p.grad is not None]


def _versions(gradients: list[Tensor]) -> list[tuple[int, int]]:
    return [(x.data_ptr(), x._version) for x in gradients]


@torch.no_grad()
def clip(updates: Sequence[Update], parameters: Sequence[Tensor], bound: float) -> Tensor | None:
    """Leave the clipping of gradients to the updates that read them.

    Returns:
        The norm of all gradients, float32, on their device; None where that does not go, and
        nothing was done: gradients of another optimizer or of only some parameters, without
        kernels, or sharded in another way than FSDP2's over one dimension of a mesh.
    """
    graded = {id(p): p.grad for p in parameters if p.grad is not None}
    takes = [one for one in updates if any(id(p) in graded for _, p in one.graded)]
    owned = {id(p) for one in takes for _, p in one.graded}
    # All or none: one norm is of all parameters, and each of them has to be multiplied by the
    # factor.
    if not graded or owned != graded.keys() or not all(one.clips for one in takes):
        return None
    local = [local_part(x) for x in graded.values()]
    groups = _sharded_over(list(graded.values()))
    numbers = sum(one.numbers for one in takes)
    if groups is None or not all(runs_kernels(x.device, numbers) for x in local):
        return None
    for one in takes:  # clipped once already: multiply now
        if (factor := one.take_factor()) is not None:
            for x in _gradients(one):
                x.mul_(factor)
    total = sum_of_squares(local, takes[0].tables)
    # Squares of shards add up over processes; a mean or a maximum would not be the norm.
    for group in groups:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if math.isfinite(bound):
        factor = (bound / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
        for one in takes:
            one.take_factor = Factor(factor, one)
    return norm


def _sharded_over(gradients: list[Any]) -> list[Any] | None:
    """Process groups over which a sum is added up; None if gradients are split in several ways."""
    if not any(isinstance(x, DTensor) for x in gradients):
        return []
    if not all(isinstance(x, DTensor) for x in gradients):
        return None
    mesh, placements = gradients[0].device_mesh, gradients[0].placements
    alike = all(x.device_mesh == mesh and x.placements == placements for x in gradients)
    split = len(placements) == 1 and isinstance(placements[0], Shard)
    return [mesh.get_group()] if alike and split else None


def sum_of_squares(gradients: Sequence[Tensor], tables: dict[Any, PointerTable]) -> Tensor:
    """Sum of the squares of all numbers in one pass, float32, on their device."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    total = torch.zeros((), device=gradients[0].device)
    for x in gradients:
        x = x.contiguous()
        if in_host_memory(x.device):
            total += adamw_host.squares(x).to(total.device)
        elif x.numel():
            kinds[x.device, x.dtype, not (x.data_ptr() % 16 or x.numel() % 16)].append(x)
    for kind, each in kinds.items():
        from finetune.training.helper.optimizer import adamw_kernels

        columns, sizes = [[x.data_ptr()] for x in each], [x.numel() for x in each]
        table = tables[kind].on(kind[0], columns, sizes)
        total += adamw_kernels.squares(table, *kind[1:]).sum().to(total.device)
    return total
