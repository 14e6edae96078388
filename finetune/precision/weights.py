"""Codes of a weight [N, K], and the scales that its tiles share.

    row     (1, K)       one scale per output channel, [N, 1]
    tensor  (N, K)       one scale, [1, 1]
    block   (128, 128)   as DeepSeek-V3 and Qwen publish, [ceil(N/128), ceil(K/128)]

Under current amax. Codes are bit patterns of E4M3 in uint8 (`finetune.precision.stored` says why).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from finetune.precision.formats import (
    E4M3,
    amax,
    block_amax,
    decode_bits,
    join,
    scale_from_amax,
    split,
    times_blocks,
    widen,
)

Granularity = Literal["row", "tensor", "block"]
Tile = tuple[int, int]
BLOCK = 128
SLAB = {"cpu": 2**16}
"""Numbers that are quantized at a time. On a heap larger temporaries come to lie between codes, and
leave holes as large as these; a GPU's allocator does not mind, and its kernels want more."""
SLAB_ELSEWHERE = 2**24


def tile_of(granularity: Granularity, shape: tuple[int, int]) -> Tile:
    """The tile of a weight [N, K] that shares a scale."""
    n, k = shape
    return {"row": (1, k), "tensor": (n, k), "block": (BLOCK, BLOCK)}[granularity]


def serves(tile: Tile, shape: tuple[int, int], granularity: Granularity) -> bool:
    """Whether codes stored with this tile can be used at a granularity, or are to be cast again.

    One scale per tensor is one per row, all equal; no other can stand for another.
    """
    wanted = tile_of(granularity, shape)
    return tile == wanted or (granularity == "row" and tile == tile_of("tensor", shape))


def quantize_weight(w: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """E4M3 codes of a weight under the largest scale that saturates nothing.

    Some rows at a time: the float32 products of a whole weight would take four times its codes.

    Args:
        w: [N, K], floating point.
        tile: what shares a scale.

    Returns:
        bits, uint8 [N, K]; inverse scales, float32, one for each tile [ceil(N/r), ceil(K/c)]. A
        tile with NaN or infinity has a NaN or infinite inverse, which nothing hides.
    """
    n, k = w.shape
    rows = slab_rows((n, k), w.device, tile)
    bits = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    return bits, quantize_slabs(lambda: w.split(rows), bits, tile)


def slab_rows(shape: tuple[int, int], device: torch.device, *tiles: Tile) -> int:
    """How many rows of a weight [N, K] are worked on at a time: whole tiles, or whole rows."""
    n, k = shape
    whole = math.lcm(*(tile[0] for tile in tiles if tile != shape))
    slab = SLAB.get(device.type, SLAB_ELSEWHERE)
    return min(max(slab // k // whole, 1) * whole, n)


def quantize_slabs(slabs: Callable[[], Iterable[Tensor]], bits: Tensor, tile: Tile) -> Tensor:
    """`quantize_weight` of a weight that comes some rows at a time.

    Args:
        slabs: gives the rows in order, `slab_rows` at a time; called twice for a scale of all.
        bits: uint8 [N, K]; is written.
        tile: what shares a scale.

    Returns:
        Inverse scales, float32, one for each tile.
    """
    shape, inverses, row, scale = tuple(bits.shape), [], 0, None
    if tile == shape:
        top = torch.stack([amax(slab) for slab in slabs()]).amax()
        scale = scale_from_amax(top, E4M3)
        inverses.append(scale.reciprocal().reshape(1, 1))
    for slab in slabs():
        if scale is not None:
            codes = slab.float() * scale
        elif tile == (1, shape[1]):
            own = scale_from_amax(amax(slab, 1), E4M3)
            codes = slab * own
            inverses.append(own.reciprocal())
        else:
            tiles = split(slab.float(), tile)
            own = scale_from_amax(block_amax(tiles), E4M3)
            codes = join(tiles * widen(own), slab)
            inverses.append(own.reciprocal())
        bits[row : row + len(slab)] = codes.to(E4M3.dtype).view(torch.uint8)
        row += len(slab)
    return torch.cat(inverses)


def dequantize_weight(
    bits: Tensor, inverse: Tensor, tile: Tile, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight that codes stand for: their product in float32, rounded once to `dtype`.

    Args:
        bits: uint8 [N, K].
        inverse: float32, one for each tile.
        tile: what shares a scale.
        dtype: of the result [N, K].
    """
    values = decode_bits(bits).float()
    if inverse.shape[1] == 1 and inverse.shape[0] in (1, values.shape[0]):
        return values.mul_(inverse).to(dtype)
    return times_blocks(values, inverse, tile).to(dtype)
