"""Triton kernels of `adamw`, and their launches. Importing this needs Triton.

One launch serves many tensors. A table on the device has a row of pointers and sizes for each, and
a program finds its tensor and its place in it by its number:

    owner[program] -> row;  numbers (program - row.first) * CHUNK + [0, CHUNK) of that tensor

Each number is read from memory once and written once, in vectors of up to 16 bytes.

*Bits.* The arithmetic is that of `torchao.optim.adam.single_param_adam` as eager PyTorch has it on
a CPU: division and roots are IEEE 754's, nothing is contracted but torch's own `lerp`, which is a
fused multiply-add there.

*Nearest level.* torchao looks a scaled moment up in its table of 256 levels by 8 comparisons, each
of which reads the table, 10 reads with the rounding. Here a closed form finds the level or the one
below it, and one comparison with the threshold between them decides. Levels of the dynamic map are
evenly spaced within each of 7 decades, and each decade has twice as many as the one below it:

    rank of a, of n 2^i levels in decade i:  R = n 2^i / 0.9 (10^(6-i) a - 0.1) + n (2^i - 1) - 0.5

These are lines, steeper in lower decades, so R is their minimum. A level's neighbourhood ends half
a rank above it, and 0.7 above the last one of a decade: the floor of R + 0.5 - 0.21, which is R -
0.21 rounded, is the nearest level or the one below.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from finetune.training.helper.optimizer.adamw import CHUNK, EACH, ROUNDS, TILE, WARPS

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}
FIELDS = 10
"""Of a row: weight, gradient, codes and scales of both moments; the number of the tensor and of its
first draw for rounding by chance; how many numbers it has, and its first program.
"""
_ROUNDS, _EACH, _TILE, _CHUNK = map(tl.constexpr, (ROUNDS, EACH, TILE, CHUNK))
_FIELDS = tl.constexpr(FIELDS)


def _lines(count: int) -> tuple[tuple[float, float], ...]:
    """Slope and offset of the code below or at a number, in each decade, before it is rounded.

    Args:
        count: levels in the lowest decade.
    """
    each = [count * 2.0**i for i in range(7)]
    start = [count * (2.0**i - 1) + 1 for i in range(7)]  # zero is the code below the first
    return tuple(
        (n / 0.9 * 10.0 ** (6 - i), first - n / 9 - 0.5 - 0.21)
        for i, (n, first) in enumerate(zip(each, start, strict=True))
    )


_SIGNED, _UNSIGNED = tl.constexpr(_lines(1)), tl.constexpr(_lines(2))
_INTEGERS, _INTEGERS_BITS = tl.constexpr(2.0**23), tl.constexpr(0x4B000000)


@triton.jit
def _below(a, lines: tl.constexpr):
    """Code of the nearest level of a, or the one below it."""
    code = tl.fma(a, lines[0][0], lines[0][1])
    for i in tl.static_range(1, 7):
        code = tl.minimum(code, tl.fma(a, lines[i][0], lines[i][1]))
    # From 2^23 on float32 has integers alone: the sum is rounded, and its last bits are the code.
    return (code + _INTEGERS).to(tl.int32, bitcast=True) - _INTEGERS_BITS


@triton.jit
def _nearest(x, thresholds, levels: tl.constexpr, signed: tl.constexpr):
    """Code of the nearest level; x in [-1, 1], or [0, 1]. NaN has the code 0, as in torchao."""
    lowest: tl.constexpr = -1.0 if signed else 0.0
    x = tl.where(x >= lowest, x, lowest)
    if levels == 16:
        code = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range(4):
            code += tl.where(x >= tl.load(thresholds + code + (8 >> i)), 8 >> i, 0)
    else:
        if signed:
            rank = _below(tl.abs(x), _SIGNED)
            code = tl.where(x < 0, 126 - rank, 127 + rank)
        else:
            code = _below(x, _UNSIGNED)
        code += (x >= tl.load(thresholds + 1 + code)).to(tl.int32)
    return code


@triton.jit
def _spread(x, count: tl.constexpr):
    """Each number of x `count` times: [L] -> [L * count]."""
    wide = tl.broadcast_to(x[:, None], [x.shape[0], count])
    return tl.reshape(wide, [x.shape[0] * count])


@triton.jit
def _largest(x, block: tl.constexpr):
    """Largest magnitude of each block, at least 1e-12; NaN stays. [C] -> [C / block]."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.max(tl.reshape(bits, [x.shape[0] // block, block]), 1)
    # As integers, where a NaN is larger than any number: `tl.max` of floats would drop it.
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(largest < 1e-12, 1e-12, largest)


@triton.jit
def _divided(x, by, inverse):
    """x / by, as IEEE 754 rounds it; `inverse` is 1 / by, rounded so too, of many x the same.

    Two corrections by the remainder (Markstein 1990); a division of its own has a branch.
    """
    # Two corrections by the remainder give the quotient's last bit, without a division for each
    # number.
    y = x * inverse
    y = tl.fma(tl.fma(y, -by, x), inverse, y)
    return tl.fma(tl.fma(y, -by, x), inverse, y)


@triton.jit
def _load_moment(codes, scales, maps, start, left, block: tl.constexpr, levels: tl.constexpr):
    """Float32 numbers of a moment."""
    spots = start + tl.arange(0, _TILE)
    if levels == 0:
        return tl.load(codes + spots, mask=spots < left, other=0.0).to(tl.float32)
    if levels == 16:
        spots = start // 2 + tl.arange(0, _TILE // 2)
        code = tl.load(codes + spots, mask=2 * spots < left, other=0).to(tl.int32)
        value = tl.load(maps + tl.reshape(tl.join(code >> 4, code & 15), [_TILE]))
    elif levels == 256:
        value = tl.load(maps + tl.load(codes + spots, mask=spots < left, other=0).to(tl.int32))
    else:
        value = tl.load(codes + spots, mask=spots < left, other=0.0).to(tl.float32)
    lanes = start + tl.arange(0, _TILE // _EACH) * _EACH
    scale = tl.load(scales + lanes // block, mask=lanes < left, other=0.0)
    return value * _spread(scale, _EACH)


@triton.jit
def _store_moment(
    x, codes, scales, thresholds, start, left,
    block: tl.constexpr, levels: tl.constexpr, signed: tl.constexpr,
):  # fmt: skip
    spots = start + tl.arange(0, _TILE)
    if levels == 0:
        tl.store(codes + spots, x.to(codes.dtype.element_ty), mask=spots < left)
    else:
        scale = _largest(x, block)
        if levels == 8:
            scale = tl.div_rn(scale, 448.0)
        rows = start + tl.arange(0, _TILE // block) * block
        tl.store(scales + rows // block, scale, mask=rows < left)
        x = _divided(x, _spread(scale, block), _spread(tl.div_rn(1.0, scale), block))
        if levels == 8:
            tl.store(codes + spots, x.to(tl.float8e4nv), mask=spots < left)
        else:
            code = _nearest(x, thresholds, levels, signed)
            if levels == 16:
                high, low = tl.split(tl.reshape(code, [_TILE // 2, 2]))
                code = (high << 4) | low
                spots = start // 2 + tl.arange(0, _TILE // 2)
                tl.store(codes + spots, code.to(tl.uint8), mask=2 * spots < left)
            else:
                tl.store(codes + spots, code.to(tl.uint8), mask=spots < left)


@triton.jit
def _by_chance(x, draws, step, tensor):
    """BF16 above or below x, by 16 random bits of its own for each number. NaN stays.

    Args:
        draws: a counter for each `EACH` numbers of x, [C / EACH].
    """
    zero = draws * 0
    a, b, c, d = tl.philox(step, draws, zero + tensor, zero, zero, _ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # in this order: a, b, c, d
    # Two numbers a word: the low half first, as in `adamw._halves`.
    halves = tl.join(words & 0xFFFF, words >> 16)
    bits = x.to(tl.uint32, bitcast=True)
    up = (bits + tl.reshape(halves, x.shape)) >> 16
    # The quiet bit of BF16, so that no NaN becomes infinity when its low bits are cut.
    up = tl.where(x == x, up, bits >> 16 | 0x40)
    return up.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["step"])  # or steps 1, 2 and 16 would be compiled apart
def adamw_kernel(
    table, owner, maps, factor, step, lr, decay, eps, first, second, bias1, bias2,
    weight: tl.constexpr, grad: tl.constexpr, code: tl.constexpr, levels: tl.constexpr,
    block: tl.constexpr, even: tl.constexpr, clips: tl.constexpr, chance: tl.constexpr,
    decoupled: tl.constexpr,
):  # fmt: skip
    """Update `CHUNK` numbers of one tensor per program.

    Args:
        maps: float32 [4, levels]: levels and thresholds of the first moment, and of the second.
        factor: what gradients are multiplied by, read if `clips`.
        step: seed of rounding by `chance`.
        first, second: 1 - beta of the two moments.
        bias1, bias2: 1 - beta^step of the first; the root of the same of the second.
        weight, grad, code: types of numbers.
        levels: 256 or 16 of a map, 8 for FP8, 0 for moments without blocks.
        even: pointers and numbers are multiples of 16.
    """
    pid = tl.program_id(0)
    row = table + tl.load(owner + pid) * _FIELDS
    numbers = tl.load(row + 8)
    begin = (pid - tl.load(row + 9)) * _CHUNK
    if even:
        numbers = tl.multiple_of(numbers, 16)
    p = tl.load(row).to(tl.pointer_type(weight)) + begin
    g = tl.load(row + 1).to(tl.pointer_type(grad)) + begin
    packed: tl.constexpr = 2 if levels == 16 else 1
    m = tl.load(row + 2).to(tl.pointer_type(code)) + begin // packed
    m_scale = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + begin // block
    v = tl.load(row + 4).to(tl.pointer_type(code)) + begin // packed
    v_scale = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + begin // block
    tensor, shard = tl.load(row + 6), tl.load(row + 7)
    if even:
        p, g = tl.multiple_of(p, 16), tl.multiple_of(g, 16)
        m, v = tl.multiple_of(m, 16), tl.multiple_of(v, 16)
    left = tl.minimum(numbers - begin, _CHUNK).to(tl.int32)
    if even:
        left = tl.multiple_of(left, 16)
    clip = tl.load(factor) if clips else 1.0
    inverse1, inverse2 = tl.div_rn(1.0, bias1), tl.div_rn(1.0, bias2)
    for start in range(0, left, _TILE):
        spots = start + tl.arange(0, _TILE)
        y = tl.load(g + spots, mask=spots < left, other=0.0).to(tl.float32)
        if clips:
            y *= clip
        w = tl.load(p + spots, mask=spots < left, other=0.0).to(tl.float32)
        if decoupled:
            w -= decay * w
        else:
            y += decay * w
        x = _load_moment(m, m_scale, maps, start, left, block, levels)
        # torch's `lerp` with a weight below a half, contracted as on a CPU.
        x = tl.fma(y - x, first, x)
        z = _load_moment(v, v_scale, maps + 2 * levels, start, left, block, levels)
        z = tl.fma(y * y - z, second, z)
        _store_moment(x, m, m_scale, maps + levels, start, left, block, levels, True)
        _store_moment(z, v, v_scale, maps + 3 * levels, start, left, block, levels, False)
        below = _divided(tl.sqrt_rn(z), bias2, inverse2) + eps
        w -= tl.div_rn(lr * _divided(x, bias1, inverse1), below)
        if chance:
            draws = (shard + begin // _EACH).to(tl.int32) + start // _EACH
            draws += tl.arange(0, _TILE // _EACH)
            w = _by_chance(w, draws, step, tensor.to(tl.int32))
        tl.store(p + spots, w.to(weight), mask=spots < left)


@triton.jit
def squares_kernel(table, owner, out, grad: tl.constexpr, even: tl.constexpr):
    """Sum of squares of `CHUNK` numbers of one gradient per program, in float32.

    Rows of the table are gradient, numbers, first program.
    """
    pid = tl.program_id(0)
    row = table + tl.load(owner + pid) * 3
    numbers = tl.load(row + 1)
    begin = (pid - tl.load(row + 2)) * _CHUNK
    g = tl.load(row).to(tl.pointer_type(grad)) + begin
    left = tl.minimum(numbers - begin, _CHUNK).to(tl.int32)
    if even:
        g, left = tl.multiple_of(g, 16), tl.multiple_of(left, 16)
    total = tl.zeros([_TILE], tl.float32)
    for start in range(0, left, _TILE):
        spots = start + tl.arange(0, _TILE)
        y = tl.load(g + spots, mask=spots < left, other=0.0).to(tl.float32)
        total += y * y
    tl.store(out + pid, tl.sum(total, 0))


def adamw(
    table: Any, maps: Tensor, factor: Tensor | None, step: int, numbers: list[float], kind: Any
) -> None:
    """Launch `adamw_kernel` for the tensors of an `adamw.Table` of one `adamw.Kind`.

    Args:
        maps: see `adamw.maps`.
        factor: float32 number on the device, what gradients are multiplied by.
        step: of all tensors.
        numbers: see `adamw_kernel`, from `lr` to `bias2`.
    """
    rows, owner = table.rows, table.owner
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(rows):
        launch = cast(Any, adamw_kernel)[(owner.numel(),)]
        launch(
            rows, owner, maps, rows if factor is None else factor, step, *numbers,
            TYPES[kind.weight], TYPES[kind.gradient], TYPES[kind.code], kind.levels, kind.block,
            kind.even, factor is not None, kind.chance, kind.decoupled,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def squares(table: Any, dtype: torch.dtype, even: bool) -> Tensor:
    """Sums of squares of the gradients of an `adamw.Table`, one for each program."""
    rows, owner = table.rows, table.owner
    out = rows.new_empty(owner.shape, dtype=torch.float32)
    with torch.cuda.device_of(rows):
        launch = cast(Any, squares_kernel)[(owner.numel(),)]
        launch(
            rows, owner, out, TYPES[dtype], even, num_warps=WARPS, enable_fp_fusion=False
        )  # fmt: skip
    return out
