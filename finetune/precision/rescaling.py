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

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from finetune.precision.swap import unswap
from finetune.precision.weights import (
    Fp8Bits,
    Granularity,
    StoredMixin,
    Tile,
    dequantise_weight,
    hold,
    quantise_slabs,
    serves,
    slab_rows,
    tile_of,
)

if TYPE_CHECKING:
    from torch import nn


@torch.no_grad()
def store(module: nn.Module, granularity: Granularity) -> None:
    """Have a linear layer held at a granularity, whatever it holds now.

    Codes of another granularity are cast again, by way of the float32 weight of this one layer.
    """
    if not isinstance(module, StoredMixin):
        return hold(module, granularity)
    n, k = module.bits.shape
    if serves(module.stored_tile, (n, k), granularity):
        return None
    recast(module, tile_of(granularity, (n, k)))
    return None


def recast(module: StoredMixin, tile: Tile) -> None:
    """Give a stored layer scales of another tile: codes are multiplied out and cast again.

    In float32, some rows at a time. From one scale to one a row nothing has to be cast.

    Args:
        module: a stored layer.
        tile: what shall share a scale.
    """
    (n, k), held, inverse = module.bits.shape, module.stored_tile, module.weight_scale
    one = held == (n, k)
    if one and tile == (1, k):
        module.weight_scale, module.stored_tile = inverse.repeat(n, 1), tile
        return
    rows = slab_rows((n, k), module.bits.device, tile, held)

    def slabs() -> Iterator[Tensor]:
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            above = slice(None) if one else slice(start // held[0], -(-stop // held[0]))
            part = (stop - start, k) if one else held
            yield dequantise_weight(module.bits[start:stop], inverse[above], part)

    bits = torch.empty_like(module.bits, memory_format=torch.contiguous_format)
    new = quantise_slabs(slabs, bits, tile)
    module.weight = Fp8Bits(bits.t().contiguous() if module.transposed_weight else bits)
    module.weight_scale, module.stored_tile = new, tile


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
    w = w.t().contiguous() if module.transposed_weight else w
    plain: Any = module
    unswap(module, to=module.plain_class.swapped_from)
    del plain.weight_scale
    plain.weight = torch.nn.Parameter(w, requires_grad=False)
