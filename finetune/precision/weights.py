"""Codes of a weight [N, K], and the scales that its tiles share, from the current amax.

    row     (1, K)       one scale per output channel, [N, 1]
    tensor  (N, K)       one scale, [1, 1]
    block   (128, 128)   as DeepSeek-V3 and Qwen publish, [ceil(N/128), ceil(K/128)]

Codes are E4M3 bit patterns in uint8 (the reason is in `finetune.precision.stored`).
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
"""Numbers quantized at a time. Larger temporaries fragment a CPU's heap between the codes; a GPU's
allocator is not affected, and its kernels want more.
"""
SLAB_ELSEWHERE = 2**24


def tile_of(granularity: Granularity, shape: tuple[int, int]) -> Tile:
    """The tile of a weight [N, K] that shares a scale."""
    n, k = shape
    return {"row": (1, k), "tensor": (n, k), "block": (BLOCK, BLOCK)}[granularity]


def serves(tile: Tile, shape: tuple[int, int], granularity: Granularity) -> bool:
    """True if codes stored with this tile can be used at a granularity without a new cast.

    One scale per tensor equals one per row, all the same; no other pair is compatible.
    """
    wanted = tile_of(granularity, shape)
    return tile == wanted or (granularity == "row" and tile == tile_of("tensor", shape))


def quantize_weight(w: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """E4M3 codes of a weight [N, K] under the largest scale that saturates nothing.

    Some rows at a time: the float32 products of a whole weight would take four times its codes.

    Returns:
        bits, uint8 [N, K]; inverse scales, float32, one per tile [ceil(N/r), ceil(K/c)]. A tile
        with NaN or infinity has a NaN or infinite inverse.
    """
    n, k = w.shape
    rows = slab_rows((n, k), w.device, tile)
    bits = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    return bits, quantize_slabs(lambda: w.split(rows), bits, tile)


def slab_rows(shape: tuple[int, int], device: torch.device, *tiles: Tile) -> int:
    """Number of rows of a weight [N, K] processed at a time: whole tiles, or whole rows."""
    n, k = shape
    whole = math.lcm(*(tile[0] for tile in tiles if tile != shape))
    slab = SLAB.get(device.type, SLAB_ELSEWHERE)
    return min(max(slab // k // whole, 1) * whole, n)


def quantize_slabs(slabs: Callable[[], Iterable[Tensor]], bits: Tensor, tile: Tile) -> Tensor:
    """`quantize_weight` of a weight that is produced some rows at a time.

    Args:
        slabs: yields the rows in order, `slab_rows` at a time; called twice for a single scale.
        bits: uint8 [N, K]; overwritten with the codes.
        tile: tile that shares a scale.

    Returns:
        Inverse scales, float32, one per tile.
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
    """Multiply codes (uint8 [N, K]) by inverse scales (one per tile) in float32, rounded once."""
    values = decode_bits(bits).float()
    if inverse.shape[1] == 1 and inverse.shape[0] in (1, values.shape[0]):
        return values.mul_(inverse).to(dtype)
    return times_blocks(values, inverse, tile).to(dtype)
