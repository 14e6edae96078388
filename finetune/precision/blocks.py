"""Blocks of a matrix: tiles that share a scale.

A matrix [R, C] in tiles of (r, c) is the tensor [R/r, r, C/c, c]; one number per tile is a matrix
[R/r, C/c]. Where tiles do not fit, the last ones are filled with zeros, which no amax sees and
which are cut off again.
"""

from __future__ import annotations

import torch
from torch import Tensor


def along(dim: int, size: int) -> tuple[int, int]:
    """The tile of `size` elements along a dimension."""
    return (1, size) if dim == 1 else (size, 1)


def split(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """A matrix [R, C] as tiles [R/r, r, C/c, c], padded with zeros where they end."""
    rows, columns = tile
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    if down or right:
        x = torch.nn.functional.pad(x, (0, right, 0, down))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def block_amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each tile: [R/r, r, C/c, c] -> [R/r, C/c]."""
    return blocks.abs().amax((1, 3))


def widen(block: Tensor) -> Tensor:
    """[R/r, C/c] -> [R/r, 1, C/c, 1], to be broadcast over tiles."""
    return block[:, None, :, None]


def join(blocks: Tensor, like: Tensor) -> Tensor:
    """Tiles back to a matrix of the shape of `like`."""
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def times_blocks(x: Tensor, block: Tensor, tile: tuple[int, int]) -> Tensor:
    """Every number of a matrix [R, C] times that of its tile [ceil(R/r), ceil(C/c)]."""
    return join(split(x, tile) * widen(block), x)
