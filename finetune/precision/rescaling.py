"""From one set of scales to another, and back to high precision: one stored layer at a time.

Checkpoints come with scales of 128 x 128 blocks, and FP8 GEMMs of a frozen weight want one scale
for each output channel. The codes are multiplied out in float32 and quantised anew: a second
rounding, whose error stands beside that of the first. Both are of E4M3, and nearly independent, so
that together they are about √2 of one:

    ‖W - row(block(W))‖ ≈ (‖W - block(W)‖² + ‖W - row(W)‖²)^½

which `python -m tests.benchmarks.fp8_loading --errors` measures. Nothing is gained over the
published codes by it; no BF16 checkpoint has to be made on the way, nor a layer in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.precision.storage import Granularity, StoredMixin, recast, tile_of

if TYPE_CHECKING:
    from torch import nn


@torch.no_grad()
def requantise(module: nn.Module, granularity: Granularity) -> None:
    """Give a stored layer scales of another granularity. Its weight changes by a rounding.

    A layer that has them already keeps its codes, and so does one with a single scale that gets
    one a row, all equal.

    Args:
        module: a stored layer.
        granularity: what shall share a scale.
    """
    if not isinstance(module, StoredMixin):
        raise TypeError(f"{type(module).__name__} holds no FP8 codes")
    n, k = module.bits.shape
    tile = tile_of(granularity, (n, k))
    if module.stored_tile == tile:
        return
    recast(module, tile)


@torch.no_grad()
def release(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make a stored layer a plain one, whose weight is what the codes stand for.

    Args:
        module: a stored layer.
        dtype: of the weight; left out: the type of the model.
    """
    if not isinstance(module, StoredMixin):
        raise TypeError(f"{type(module).__name__} holds no FP8 codes")
    dtype = dtype or module.compute_dtype
    w = module.dequantise(dtype)
    w = w.t().contiguous() if module.stored_transposed else w
    plain: Any = module
    plain.__class__ = module.stored_original
    del plain.weight_scale, plain.stored_tile, plain.compute_dtype
    plain.weight = torch.nn.Parameter(w, requires_grad=False)
