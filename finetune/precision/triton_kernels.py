"""Triton kernels of `finetune.precision.kernels`, and their launches. Importing this needs Triton.

All are bound by memory: each number is read from it, and written to it, once.

*Bits.* The reference divides and multiplies as IEEE 754 has it, so division is `div_rn` (Triton's
`/` may be off by two units in the last place) and multiplication and addition are never joined. An
amax is the largest of the bits of |x|, taken as integers: NaN lies above infinity there, and so
stays visible, which a maximum of floats would drop. Hardware's cast saturates, as torch's does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from finetune.precision.formats import E4M3, SMALLEST_INVERSE

WHOLE = 16384
"""Longest row that stays in registers. Longer ones are read twice, the second time from the L2
cache.
"""
PIECE = 4096
"""Numbers of a longer row processed at a time; with 8,192 Triton 3.6 spills on compute capability
12.0.
"""
TILE = (64, 128)
"""Rows and columns of codes that one program transposes."""
WARPS = 8
"""Warps of such a program: 32 codes a thread."""
_FLOOR, _LARGEST = tl.constexpr(E4M3.max * SMALLEST_INVERSE), tl.constexpr(E4M3.max)


@triton.jit
def _load_row(x, fold, columns, inside, folds: tl.constexpr):
    """Numbers of a row in float32, multiplied by the factors of their columns."""
    y = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if folds:
        y *= tl.load(fold + columns, mask=inside, other=0.0)
    return y


@triton.jit
def cast_rows_kernel(
    x, fold, codes, inverse, stride,
    length: tl.constexpr, block: tl.constexpr, folds: tl.constexpr, pow2: tl.constexpr,
):  # fmt: skip
    """Cast one row of `length` numbers per program, `block` of them at a time."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may exceed 32 bits
    x += row * stride
    codes += row * length
    lanes = tl.arange(0, block)
    if length <= block:  # the row stays in registers
        y = _load_row(x, fold, lanes, lanes < length, folds)
        largest = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        largest = tl.zeros([block], tl.int32)
        for start in range(0, length, block):
            y = _load_row(x, fold, start + lanes, start + lanes < length, folds)
            largest = tl.maximum(largest, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(_LARGEST, tl.where(amax < _FLOOR, _FLOOR, amax))  # NaN < x is False: stays
    if pow2:  # the exponent's bits alone: down to a power of two
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(inverse + row, tl.div_rn(1.0, scale))
    if length <= block:
        tl.store(codes + lanes, (y * scale).to(tl.float8e4nv), mask=lanes < length)  # pyright: ignore
    else:
        for start in range(0, length, block):
            inside = start + lanes < length
            y = _load_row(x, fold, start + lanes, inside, folds)
            tl.store(codes + start + lanes, (y * scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def transpose_codes_kernel(codes, out, rows, columns, tall: tl.constexpr, wide: tl.constexpr):
    """Transpose one tile of `tall` x `wide` bytes per program, both sides coalesced."""
    n = tl.program_id(1).to(tl.int64) * tall + tl.arange(0, tall)
    k = tl.program_id(0).to(tl.int64) * wide + tl.arange(0, wide)
    inside = (n[:, None] < rows) & (k[None, :] < columns)
    tile = tl.load(codes + n[:, None] * columns + k[None, :], mask=inside, other=0)
    tl.store(out + k[:, None] * rows + n[None, :], tl.trans(tile), mask=tl.trans(inside))


def row_block(length: int) -> tuple[int, int]:
    """(numbers processed at a time, warps) for rows of this length: at most 32 a thread."""
    whole = max(triton.next_power_of_2(length), 128)
    block = whole if whole <= WHOLE else PIECE
    return block, max(block // 1024, 1)  # 1024: 32 threads of 32 numbers


def cast_rows(x: Tensor, fold: Tensor | None, pow2: bool) -> tuple[Tensor, Tensor]:
    """Launch `cast_rows_kernel`; see `kernels.cast_rows`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, length = x.shape
    codes = x.new_empty(x.shape, dtype=E4M3.dtype)
    inverse = x.new_empty((rows, 1), dtype=torch.float32)
    factors = x if fold is None else fold.contiguous()  # any pointer: not read without `folds`
    block, warps = row_block(length)
    if rows:
        with torch.cuda.device_of(x):
            launch = cast(Any, cast_rows_kernel)[(rows,)]
            launch(
                x, factors, codes, inverse, x.stride(0), length, block, fold is not None, pow2,
                num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return codes, inverse


def transpose_codes(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Launch `transpose_codes_kernel`; see `kernels.transpose_codes`."""
    out = codes.new_empty(codes.shape[::-1])
    source = codes.contiguous().view(torch.uint8)
    (rows, columns), (tall, wide) = codes.shape, TILE
    if codes.numel():
        grid = (triton.cdiv(columns, wide), triton.cdiv(rows, tall))
        with torch.cuda.device_of(codes):
            launch = cast(Any, transpose_codes_kernel)[grid]
            launch(
                source, out.view(torch.uint8), rows, columns, tall, wide,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out
