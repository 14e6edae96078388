"""Tiles of a matrix whose numbers share a scale, for rules that are finer than a row.

A matrix [R, C] in tiles of (r, c) is [R/r, r, C/c, c]; with one number per tile, such as a scale, a
matrix [R/r, C/c]. Partial tiles are padded with zeros and cut off again:

    x [3, 4] in tiles (2, 2)  ->  split: [2, 2, 2, 2]  ->  block_amax: [2, 2]  ->  join: [3, 4]
"""

from __future__ import annotations

import torch
from torch import Tensor


def along(dim: int, size: int) -> tuple[int, int]:
    """The tile of `size` elements along a dimension."""
    return (1, size) if dim == 1 else (size, 1)


def split(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Split a matrix [R, C] into tiles [R/r, r, C/c, c], padded with zeros."""
    rows, columns = tile
    down, right = -x.shape[0] % rows, -x.shape[1] % columns  # what is missing to whole tiles
    if down or right:
        x = torch.nn.functional.pad(x, (0, right, 0, down))  # (left, right, top, bottom)
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each tile: [R/r, r, C/c, c] -> [R/r, C/c]."""
    return blocks.abs().amax((1, 3))


def widen(block: Tensor) -> Tensor:
    """Reshape [R/r, C/c] to [R/r, 1, C/c, 1], to be broadcast over tiles."""
    return block[:, None, :, None]


def join(blocks: Tensor, like: Tensor) -> Tensor:
    """Join tiles into a matrix of the shape of `like`."""
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def times_blocks(x: Tensor, block: Tensor, tile: tuple[int, int]) -> Tensor:
    """Multiply a matrix [R, C] by one number per tile, [ceil(R/r), ceil(C/c)]."""
    return join(split(x, tile) * widen(block), x)
