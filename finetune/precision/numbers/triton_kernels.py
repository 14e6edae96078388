"""Triton kernels of `finetune.precision.numbers.kernels`, and their launches. Importing this needs
Triton.

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
from triton.language.extra import libdevice

from finetune.precision.numbers import kernels
from finetune.precision.numbers.formats import E4M3, SMALLEST_INVERSE, Format

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
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Statistics by their flags, in order."""
LOGITS = (1024, 4)
"""Logits of a token that one program takes at a time, and its warps: with 2,048 and 8 Triton 3.6
spills.
"""
_FLOOR, _LARGEST = tl.constexpr(E4M3.max * SMALLEST_INVERSE), tl.constexpr(E4M3.max)


@triton.jit
def _load_row(x, fold, columns, inside, folds: tl.constexpr):
    """Numbers of a row in float32, multiplied by the factors of their columns."""
    y = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if folds:
        y *= tl.load(fold + columns, mask=inside, other=0.0)
    return y


@triton.jit
def _scale_of(bits, pow2: tl.constexpr, largest: tl.constexpr = _LARGEST,
              floor: tl.constexpr = _FLOOR):  # fmt: skip
    """Scale of numbers by the bits of their magnitudes, [N]; of E4M3 unless said otherwise."""
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.where(amax < floor, floor, amax))  # NaN < x is False: stays
    if pow2:  # the exponent's bits alone: down to a power of two
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


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
    scale = _scale_of(largest, pow2)
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


@triton.jit
def _map(z, scale, softcap, inv_t, caps: tl.constexpr):
    """Mapped logits, and the derivative of their cap, 1 without one (`kernels.LogitMap`)."""
    # Launched by Inductor of torch before 2.15, a number of Python's would be float64.
    y, slope = z.to(tl.float32) * tl.cast(scale, tl.float32), 1.0
    if caps:
        cap = tl.cast(softcap, tl.float32)
        t = 2 * tl.sigmoid(2 * y / cap) - 1  # tanh
        y, slope = cap * t, 1 - t * t
    return y * tl.cast(inv_t, tl.float32), slope


@triton.jit
def _weight(z, fold, words, inside, local, now, scale, softcap, inv_t, caps: tl.constexpr,
            folds: tl.constexpr):  # fmt: skip
    """Weights of logits as they would be stored, in float32, times the factors of their words."""
    y, slope = _map(tl.load(z + words, mask=inside, other=0.0), scale, softcap, inv_t, caps)
    e = tl.where(inside & (words != local), tl.exp(y - now) * slope, 0.0)
    e = e.to(z.dtype.element_ty).to(tl.float32)
    if folds:
        e *= tl.load(fold + words, mask=inside, other=0.0)
    return e


@triton.jit
def observe_logits_kernel(
    z, targets, statistics, fold, codes, inverse, z_stride, s_stride, start, columns,
    scale, softcap, inv_t,
    block: tl.constexpr, caps: tl.constexpr, entropy: tl.constexpr, squares: tl.constexpr,
    mean: tl.constexpr, top1: tl.constexpr, weigh: tl.constexpr, casts: tl.constexpr,
    folds: tl.constexpr, pow2: tl.constexpr,
):  # fmt: skip
    """Observe the logits of one token per program: read for the largest, then from the cache.

    Each lane has sums of its own, so that a row is reduced twice and not once a block. Where
    weights are cast, `codes` has whole rows of `columns`.
    """
    row = tl.program_id(0).to(tl.int64)
    z += row * z_stride
    s = statistics + row
    local = tl.load(targets + row) - start
    lanes = tl.arange(0, block)
    least = tl.full([block], -float("inf"), tl.float32)
    peaks, before, means = least, least, tl.zeros([block], tl.float32)
    if (local >= 0) & (local < columns):
        y, _ = _map(tl.load(z + local), scale, softcap, inv_t, caps)
        tl.store(s + 6 * s_stride, y)
    for first in range(0, columns, block):
        inside = first + lanes < columns
        y = tl.load(z + first + lanes, mask=inside, other=0.0)
        y, _ = _map(y, scale, softcap, inv_t, caps)
        if mean:
            means += tl.where(inside, y, 0.0)
        y = tl.where(inside, y, -float("inf"))
        peaks = tl.maximum(peaks, y)
        if top1:
            before = tl.where(first + lanes < local, tl.maximum(before, y), before)
    largest = tl.load(s)
    now = tl.maximum(largest, tl.max(peaks, 0))
    shrunk = tl.exp(largest - now)
    total = tl.zeros([block], tl.float32)
    x_total, square = total, total
    for first in range(0, columns, block):
        inside = first + lanes < columns
        y = tl.load(z + first + lanes, mask=inside, other=0.0)
        y, slope = _map(y, scale, softcap, inv_t, caps)
        e = tl.where(inside, tl.exp(y - now), 0.0)
        total += e
        if entropy:
            x_total += e * y
        if squares:
            square += e * e
        if weigh:
            e = tl.where(first + lanes == local, 0.0, e * slope)
            tl.store(z + first + lanes, e.to(z.dtype.element_ty), mask=inside)
    if casts:
        top = tl.zeros([block], tl.int32)
        for first in range(0, columns, block):
            words = first + lanes
            e = _weight(z, fold, words, words < columns, local, now, scale, softcap, inv_t,
                        caps, folds)  # fmt: skip
            top = tl.maximum(top, e.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        factor = _scale_of(top, pow2)
        tl.store(inverse + row, tl.div_rn(1.0, factor))
        for first in range(0, columns, block):
            words = first + lanes
            e = _weight(z, fold, words, words < columns, local, now, scale, softcap, inv_t,
                        caps, folds)  # fmt: skip
            place = codes + row * columns + words
            tl.store(place, (e * factor).to(tl.float8e4nv), mask=words < columns)
    tl.store(s, now)
    tl.store(s + s_stride, tl.load(s + s_stride) * shrunk + tl.sum(total, 0))
    tl.store(s + 7 * s_stride, shrunk)
    if entropy:
        tl.store(s + 2 * s_stride, tl.load(s + 2 * s_stride) * shrunk + tl.sum(x_total, 0))
    if squares:
        x = tl.load(s + 3 * s_stride) * shrunk * shrunk
        tl.store(s + 3 * s_stride, x + tl.sum(square, 0))
    if mean:
        tl.store(s + 4 * s_stride, tl.load(s + 4 * s_stride) + tl.sum(means, 0))
    if top1:
        tl.store(s + 5 * s_stride, tl.maximum(tl.load(s + 5 * s_stride), tl.max(before, 0)))


@triton.jit
def grade_logits_kernel(
    z, targets, log_z, entropy, g_probs, g_entropy, z_stride, start, columns,
    scale, softcap, inv_t,
    block: tl.constexpr, caps: tl.constexpr, probs: tl.constexpr, entropies: tl.constexpr,
):  # fmt: skip
    """Turn `block` logits of one token per program into their gradient."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * block + tl.arange(0, block)
    inside, place = lanes < columns, z + row * z_stride + lanes
    y, slope = _map(tl.load(place, mask=inside, other=0.0), scale, softcap, inv_t, caps)
    log_p = y - tl.load(log_z + row)
    p = tl.exp(log_p)
    g = tl.zeros([block], tl.float32)
    if probs:
        is_label = (lanes + start == tl.load(targets + row)).to(tl.float32)
        g += tl.load(g_probs + row) * (is_label - p)
    if entropies:
        g -= tl.load(g_entropy + row) * p * (log_p + tl.load(entropy + row))
    g = g * tl.cast(inv_t, tl.float32) * slope * tl.cast(scale, tl.float32)
    tl.store(place, g.to(z.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------ one scale a tensor
#
# Two launches. If scales are powers of two, the first casts under the tensor's last scale, which it
# reads from `guess`, and finds the amax in passing; the second has the scale that is right, and
# casts again only if it is another one. Else the first finds the amax alone. Each program leaves
# its own amax in `scratch`, and takes tiles in turns, so that the second launch is over at once
# where nothing is left to do.

SQUARE = (64, 64)
"""Rows and columns of a tile that is written in both orders: whole sectors of 32 bytes each way."""
SPAN = 4096
"""Numbers that a program takes at a time where nothing is transposed."""
PROGRAMS = 1024
"""Programs of a launch at most: 7 or 8 for each multiprocessor of an H100."""
TRITON = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_PROGRAMS = tl.constexpr(PROGRAMS)


@triton.jit
def _begin(guess, scratch, scale, inverse, largest: tl.constexpr, floor: tl.constexpr,
           pow2: tl.constexpr, settles: tl.constexpr):  # fmt: skip
    """Scale to cast under, and whether to: not again under the scale that was guessed.

    `scratch` has the bits of each program's amax, and of the guess.
    """
    first = tl.program_id(0) == 0
    if settles:
        programs = tl.arange(0, _PROGRAMS)
        found = tl.load(scratch + programs, mask=programs < tl.num_programs(0), other=0)
        factor = _scale_of(found, pow2, largest, floor)
        needed = True
        if pow2:
            needed = factor.to(tl.int32, bitcast=True) != tl.load(scratch + _PROGRAMS)
        tl.store(guess, factor, mask=first)
        tl.store(scale, factor, mask=first)
        tl.store(inverse, tl.div_rn(1.0, factor), mask=first)
    else:
        factor = tl.load(guess)
        needed = True
        tl.store(scratch + _PROGRAMS, factor.to(tl.int32, bitcast=True), mask=first)
    return factor, needed


@triton.jit
def _bits(y):
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def cast_whole_kernel(
    x, guess, scratch, codes, turned, scale, inverse, rows, columns, stride,
    kind: tl.constexpr, largest: tl.constexpr, floor: tl.constexpr, pow2: tl.constexpr,
    settles: tl.constexpr, plain: tl.constexpr, turns: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Cast a matrix under one scale, into `codes` and the transposed `turned`, in tiles."""
    factor, needed = _begin(guess, scratch, scale, inverse, largest, floor, pow2, settles)
    if needed:
        across = tl.cdiv(columns, wide)
        top = tl.zeros([tall], tl.int32)
        for tile in range(tl.program_id(0), across * tl.cdiv(rows, tall), tl.num_programs(0)):
            row = (tile // across).to(tl.int64) * tall + tl.arange(0, tall)
            column = (tile % across).to(tl.int64) * wide + tl.arange(0, wide)
            inside = (row[:, None] < rows) & (column[None, :] < columns)
            at = row[:, None] * stride + column[None, :]
            y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            if not settles:
                top = tl.maximum(top, tl.max(_bits(y), 1))
            if settles or pow2:
                code = (y * factor).to(kind)
                if plain:
                    tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
                if turns:
                    there = column[:, None] * rows + row[None, :]
                    tl.store(turned + there, tl.trans(code), mask=tl.trans(inside))
        if not settles:
            tl.store(scratch + tl.program_id(0), tl.max(top, 0))


@triton.jit
def _silu(g, kind: tl.constexpr):
    """silu(g) in float32, rounded to the type of the activations."""
    return tl.div_rn(g, libdevice.exp(-g) + 1.0).to(kind).to(tl.float32)


@triton.jit
def swiglu_cast_kernel(
    gate, up, guess, scratch, codes, scale, inverse, numbers,
    kind: tl.constexpr, largest: tl.constexpr, floor: tl.constexpr, pow2: tl.constexpr,
    settles: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Cast silu(gate) · up."""
    of: tl.constexpr = gate.dtype.element_ty
    factor, needed = _begin(guess, scratch, scale, inverse, largest, floor, pow2, settles)
    if needed:
        top = tl.zeros([block], tl.int32)
        for piece in range(tl.program_id(0), tl.cdiv(numbers, block), tl.num_programs(0)):
            at = piece * tl.full([], block, tl.int64) + tl.arange(0, block)
            inside = at < numbers
            g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
            y = (_silu(g, of) * u).to(of).to(tl.float32)
            if not settles:
                top = tl.maximum(top, _bits(y))
            if settles or pow2:
                tl.store(codes + at, (y * factor).to(kind), mask=inside)
        if not settles:
            tl.store(scratch + tl.program_id(0), tl.max(top, 0))


@triton.jit
def swiglu_backward_cast_kernel(
    dy, gate, up, act_scale, gate_guess, up_guess, scratch,
    act_t, dgate, dgate_t, dup, dup_t, gate_scale, gate_inverse, up_scale, up_inverse,
    rows, columns,
    act_kind: tl.constexpr, kind: tl.constexpr, largest: tl.constexpr, floor: tl.constexpr,
    pow2: tl.constexpr, settles: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Cast the gradients of gate and up in both orders, and silu(gate) · up, transposed."""
    of: tl.constexpr = gate.dtype.element_ty
    gate_factor, for_gate = _begin(
        gate_guess, scratch, gate_scale, gate_inverse, largest, floor, pow2, settles
    )
    up_scratch = scratch + _PROGRAMS + 1
    up_factor, for_up = _begin(
        up_guess, up_scratch, up_scale, up_inverse, largest, floor, pow2, settles
    )
    if for_gate or for_up:
        act_factor = tl.load(act_scale)
        across = tl.cdiv(columns, wide)
        gate_top = tl.zeros([tall], tl.int32)
        up_top = tl.zeros([tall], tl.int32)
        for tile in range(tl.program_id(0), across * tl.cdiv(rows, tall), tl.num_programs(0)):
            row = (tile // across).to(tl.int64) * tall + tl.arange(0, tall)
            column = (tile % across).to(tl.int64) * wide + tl.arange(0, wide)
            inside = (row[:, None] < rows) & (column[None, :] < columns)
            at = row[:, None] * columns + column[None, :]
            there = column[:, None] * rows + row[None, :]
            across_inside = tl.trans(inside)
            d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
            silu = _silu(g, of)
            to_up = (d * silu).to(of).to(tl.float32)
            half = tl.div_rn(1.0, libdevice.exp(-g) + 1.0)  # the sigmoid of g
            to_gate = (d * u).to(of).to(tl.float32) * half * (g * (1.0 - half) + 1.0)
            to_gate = to_gate.to(of).to(tl.float32)
            if not settles:
                gate_top = tl.maximum(gate_top, tl.max(_bits(to_gate), 1))
                up_top = tl.maximum(up_top, tl.max(_bits(to_up), 1))
                act = ((silu * u).to(of).to(tl.float32) * act_factor).to(act_kind)
                tl.store(act_t + there, tl.trans(act), mask=across_inside)
            if settles or pow2:
                code = (to_gate * gate_factor).to(kind)
                tl.store(dgate + at, code, mask=inside)
                tl.store(dgate_t + there, tl.trans(code), mask=across_inside)
                code = (to_up * up_factor).to(kind)
                tl.store(dup + at, code, mask=inside)
                tl.store(dup_t + there, tl.trans(code), mask=across_inside)
        if not settles:
            tl.store(scratch + tl.program_id(0), tl.max(gate_top, 0))
            tl.store(up_scratch + tl.program_id(0), tl.max(up_top, 0))


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


def observe_logits(
    z: Tensor, targets: Tensor, statistics: Tensor, start: int, scale: float,
    softcap: float | None, inv_t: float, outputs: list[str], weigh: bool,
    fold: Tensor | None, pow2: bool | None,
) -> list[Tensor]:  # fmt: skip
    """Launch `observe_logits_kernel`; see `kernels.observe_logits`."""
    casts, (rows, columns) = pow2 is not None, z.shape
    # In place of what is not read or written any pointer.
    codes = z.new_empty(z.shape, dtype=E4M3.dtype) if casts else z
    inverse = z.new_empty((rows, 1), dtype=torch.float32) if casts else statistics
    factors = statistics if fold is None else fold.contiguous()
    block, warps = LOGITS
    if rows:
        with torch.cuda.device_of(z):
            launch = cast(Any, observe_logits_kernel)[(rows,)]
            launch(
                z, targets, statistics, factors, codes, inverse,
                z.stride(0), statistics.stride(0), start, columns, scale, softcap or 1.0, inv_t,
                block, softcap is not None, *(name in outputs for name in OUTPUTS),
                weigh and not casts, casts, fold is not None, bool(pow2),
                num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return [codes, inverse] if casts else []


def grade_logits(
    z: Tensor, targets: Tensor, log_z: Tensor, entropy: Tensor | None, g_probs: Tensor | None,
    g_entropy: Tensor | None, start: int, scale: float, softcap: float | None, inv_t: float,
) -> None:  # fmt: skip
    """Launch `grade_logits_kernel`; see `kernels.grade_logits`."""
    (rows, columns), (block, warps) = z.shape, LOGITS
    if rows:
        with torch.cuda.device_of(z):
            launch = cast(Any, grade_logits_kernel)[(rows, triton.cdiv(columns, block))]
            # In place of what is not given any pointer: it is not read.
            each = (log_z if x is None else x for x in (entropy, g_probs, g_entropy))
            launch(
                z, targets, log_z, *each, z.stride(0), start, columns, scale, softcap or 1.0, inv_t,
                block, softcap is not None, g_probs is not None, g_entropy is not None,
                num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def _twice(
    kernel: Any, x: Tensor, pieces: int, fmt: Format, *operands: Any, **constants: Any
) -> None:
    """Launch a kernel that guesses scales, and again to settle them."""
    constants |= {"largest": fmt.max, "floor": fmt.max * SMALLEST_INVERSE}
    launch = cast(Any, kernel)[(max(min(pieces, PROGRAMS), 1),)]
    with torch.cuda.device_of(x):
        for settles in (False, True):
            launch(
                *operands, kind=TRITON[fmt.dtype], settles=settles, **constants,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip


def _place(guesses: Tensor, column: int, x: Tensor) -> Tensor:
    """Where the last scale of an operand is kept; on another device than `x`'s none is."""
    here = guesses.device == x.device
    return guesses[column] if here else torch.zeros((), dtype=torch.float32, device=x.device)


def _scratch(x: Tensor, scales: int = 1) -> Tensor:
    return torch.empty(scales * (_PROGRAMS.value + 1), dtype=torch.int32, device=x.device)


def _tiles(x: Tensor) -> int:
    return triton.cdiv(x.shape[0], SQUARE[0]) * triton.cdiv(x.shape[1], SQUARE[1])


def cast_whole(
    x: Tensor, guesses: Tensor, column: int, dtype: torch.dtype, pow2: bool,
    plain: bool, turned: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch `cast_whole_kernel`; see `kernels.cast_whole`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    results = kernels.empty_whole(x, guesses, column, dtype, pow2, plain, turned)
    scratch = _scratch(x)
    _twice(
        cast_whole_kernel, x, _tiles(x), kernels.FORMATS[dtype],
        x, _place(guesses, column, x), scratch, *results, *x.shape, x.stride(0),
        pow2=pow2, plain=plain, turns=turned, tall=SQUARE[0], wide=SQUARE[1],
    )  # fmt: skip
    return results


def swiglu_cast(
    gate: Tensor, up: Tensor, guesses: Tensor, column: int, dtype: torch.dtype, pow2: bool
) -> tuple[Tensor, ...]:
    """Launch `swiglu_cast_kernel`; see `kernels.swiglu_cast`."""
    gate, up = gate.contiguous(), up.contiguous()
    results = kernels.empty_swiglu(gate, up, guesses, column, dtype, pow2)
    scratch = _scratch(gate)
    _twice(
        swiglu_cast_kernel, gate, triton.cdiv(gate.numel(), SPAN), kernels.FORMATS[dtype],
        gate, up, _place(guesses, column, gate), scratch, *results, gate.numel(),
        pow2=pow2, block=SPAN,
    )  # fmt: skip
    return results


def swiglu_backward_cast(
    dy: Tensor, gate: Tensor, up: Tensor, scale: Tensor, gate_guesses: Tensor,
    up_guesses: Tensor, column: int, act_dtype: torch.dtype, dtype: torch.dtype, pow2: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch `swiglu_backward_cast_kernel`; see `kernels.swiglu_backward_cast`."""
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    results = kernels.empty_swiglu_backward(
        dy, gate, up, scale, gate_guesses, up_guesses, column, act_dtype, dtype, pow2
    )
    scratch = _scratch(dy, 2)
    _twice(
        swiglu_backward_cast_kernel, dy, _tiles(dy), kernels.FORMATS[dtype],
        dy, gate, up, scale, _place(gate_guesses, column, dy), _place(up_guesses, column, dy),
        scratch, *results, *dy.shape,
        act_kind=TRITON[act_dtype], pow2=pow2, tall=SQUARE[0], wide=SQUARE[1],
    )  # fmt: skip
    return results
