"""Triton's interpreter runs the kernels of `finetune.precision.numbers.kernels` on CPU tensors.

A process of its own: functions of Triton are interpreted only if that is chosen before its import.
Prints a JSON object: case -> number of results that differ from the reference by any bit; of logits
by more than one unit in the last place of their type, and of sums over them by 1e-5.
"""

from __future__ import annotations

import itertools
import json
import os
import types
from collections.abc import Iterator
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # its default changes in Triton 3.10

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from finetune.precision.numbers import kernels, triton_kernels
from finetune.precision.numbers.formats import E4M3, E5M2
from finetune.precision.numbers.scaling import cast_current

TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LENGTHS = (1, 37, 1024, 3000, 4096, 14336, 18944)
"""Lengths of rows: odd ones, those of published models, and longer than what stays in registers."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def convert(data, source, target, rounding):
    """The cast as torch has it: Triton 3.9 truncates to BF16 and is up to 6 % off in E4M3."""
    bits = torch.from_numpy(np.array(data, copy=True))
    bits = bits.view(BITS[bits.dtype.itemsize]).view(TORCH[source])
    result = bits.to(TORCH[target])
    return result.view(BITS[result.dtype.itemsize]).numpy()


interpreter._convert_float = convert
triton_kernels.libdevice = types.SimpleNamespace(exp=lambda x: tl.exp(x))


def bits(x: Tensor) -> Tensor:
    """Bit patterns of any type, with a single NaN: its sign and payload differ between devices."""
    wide = x.float()
    patterns = x.contiguous().view(BITS[x.dtype.itemsize]).to(torch.int64)
    return torch.where(wide.isnan(), -1, patterns)


def different(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> int:
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(found, wanted, strict=True))


def rows(length: int, dtype: torch.dtype) -> Tensor:
    """Rows that are small, large, zero, without a normal number, and with infinity and NaN."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(9, length, generator=generator)
    x[1], x[2], x[3], x[4] = x[1] * 3e4, x[2] * 1e-6, 0.0, x[4].abs() * 1e-40
    x[5, length // 2], x[6, -1], x[7, 0] = float("inf"), float("nan"), -float("inf")
    x[8] = 1e-37  # its inverse scale would be no normal number
    return x.to(dtype)


def casts() -> Iterator[tuple[str, int]]:
    for length, dtype in itertools.product(LENGTHS, DTYPES):
        if length > 1024 and dtype is not torch.bfloat16:
            continue
        x = rows(length, dtype)
        fold = torch.logspace(-3, 1, length)[None]
        for factors, pow2 in itertools.product((None, fold), (False, True)):
            wide = x if factors is None else x.float() * factors
            wanted = cast_current(wide, E4M3, 1, pow2=pow2, packed=True)
            found = triton_kernels.cast_rows(x, factors, pow2)
            name = f"cast {length} {dtype} fold={factors is not None} pow2={pow2}"
            yield name, different(found, wanted)
    strided = rows(96, torch.bfloat16).repeat(1, 2)[:, :96]
    wanted = cast_current(strided, E4M3, 1, packed=True)
    yield "cast of a slice", different(triton_kernels.cast_rows(strided, None, False), wanted)
    columns = rows(96, torch.bfloat16).t()
    wanted = cast_current(columns, E4M3, 1, packed=True)
    yield "cast of a transpose", different(triton_kernels.cast_rows(columns, None, False), wanted)
    none = torch.empty(0, 64)
    found = triton_kernels.cast_rows(none, None, False)
    yield "cast of no rows", different(found, (none.to(E4M3.dtype), torch.empty(0, 1)))


def transposes() -> Iterator[tuple[str, int]]:
    for n, k in ((1, 1), (16, 16), (37, 200), (64, 128), (300, 129), (0, 16)):
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
        found = triton_kernels.transpose_codes(codes)
        assert found.is_contiguous()
        yield f"transpose {n} x {k}", different((found,), (codes.t(),))
    typed = codes = torch.randint(0, 256, (48, 80), dtype=torch.uint8)
    typed = codes.view(E4M3.dtype)
    yield "transpose E4M3", different((triton_kernels.transpose_codes(typed),), (typed.t(),))
    back = triton_kernels.transpose_codes(codes.t())
    yield "transpose of a transpose", different((back,), (codes,))


def apart(found: Tensor, wanted: Tensor, tolerance: float) -> int:
    return int((~torch.isclose(found, wanted, rtol=tolerance, atol=1e-6, equal_nan=True)).sum())


def logits() -> Iterator[tuple[str, int]]:
    """Three slabs of a vocabulary in turn, with labels in each, then their gradients."""
    outputs = ["entropy", "log_sum_sq_probs", "mean_logits", "is_top1"]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 5300, generator=generator) * 3
    whole[5, 7] = 80.0
    whole[1, 2100], whole[1, 2500] = 30.0, 30.0  # two largest ones, the label is the second
    targets = torch.tensor([0, 2500, 5299, 2047, 3, 7])
    for dtype, cap, weigh in itertools.product(DTYPES, (None, 20.0), (False, True)):
        mapped = (0.5, cap, 1 / 0.7)
        each = []
        for run in (kernels._observe_logits, triton_kernels.observe_logits):
            statistics = torch.zeros(kernels.STATISTICS, 8)[:, 1:7]  # a slice of more tokens
            statistics[[0, 5]] = -float("inf")
            z = whole.to(dtype, copy=True)
            for start, width in ((0, 2048), (2048, 3000), (5048, 252)):
                slab = z[:, start : start + width]
                run(slab, targets, statistics, start, *mapped, outputs, weigh, None, None)
            each.append((z, statistics))
        (wanted, sums), (found, own) = each
        fold = torch.logspace(-3, 1, 3000)[None] if cap else None
        both = (
            run(whole[:, 2048:5048].to(dtype, copy=True), targets, own.clone(), 2048,
                *mapped, outputs, True, fold, cap is None)
            for run in (kernels._observe_logits, triton_kernels.observe_logits)
        )  # fmt: skip
        codes, scales = zip(*both, strict=True)
        yield f"scales {dtype} {cap} {weigh}", apart(scales[1], scales[0], 0.01)
        # Of numbers a unit in the last place apart, which have equal codes or neighbours.
        steps = codes[0].view(torch.uint8).int() - codes[1].view(torch.uint8).int()
        yield f"codes {dtype} {cap} {weigh}", int((steps.abs() > 1).sum())
        yield f"equal codes {dtype} {cap} {weigh}", int((steps != 0).float().mean() > 0.02)
        name = f"{dtype} cap={cap} weigh={weigh}"
        yield f"logits {name}", apart(found, wanted, max(torch.finfo(dtype).eps, 1e-5))
        yield f"statistics {name}", apart(own, sums, 1e-5)
        above = torch.randn(2, 6, generator=generator)
        log_z, h = sums[0] + sums[1].log(), torch.rand(6, generator=generator)
        for g_probs, g_entropy in ((above[0], above[1]), (above[0], None), (None, above[1])):
            slabs = [whole[:, 2048:].to(dtype, copy=True) for _ in range(2)]
            given = targets, log_z, h, g_probs, g_entropy, 2048, *mapped
            kernels._grade_logits(slabs[0], *given)
            triton_kernels.grade_logits(slabs[1], *given)
            case = f"{name} {g_probs is not None} {g_entropy is not None}"
            yield f"gradient {case}", apart(slabs[1], slabs[0], max(torch.finfo(dtype).eps, 1e-5))
    sums = torch.zeros(kernels.STATISTICS, 6)
    whole[4, 2] = float("nan")
    triton_kernels.observe_logits(whole, targets, sums, 0, 1.0, None, 1.0, [], False, None, None)
    yield "NaN stays in the sum", int(sums[1].isnan().tolist() != [i == 4 for i in range(6)])
    none = torch.empty(0, 64)
    triton_kernels.observe_logits(
        none, targets[:0], none.t(), 0, 1.0, None, 1.0, [], True, None, False
    )


SHAPES = ((1, 1), (37, 200), (64, 128), (130, 65))
"""Odd shapes, and whole tiles."""
WIDE = ((70, 2048), (66, 4096), (65, 14336))
"""Rows of a 1B and of an 8B model, of more tiles than there are programs."""


def guesses_for(x: Tensor, fmt, pow2: bool) -> Iterator[tuple[str, Tensor]]:
    """Columns of last scales: none, the right one, and one too large and too small."""
    right = kernels.cast_whole(x, torch.zeros(3), 1, fmt, pow2=pow2).scale
    for name, value in {
        "none": 0.0,
        "right": right,
        "large": right * 4,
        "small": right / 4,
    }.items():
        yield name, torch.tensor([7.0, float(value), 9.0])


def whole() -> Iterator[tuple[str, int]]:
    torch.manual_seed(2)
    for shape, fmt, pow2 in itertools.product(SHAPES, (E4M3, E5M2), (True, False)):
        x = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).bfloat16()
        for guess, table in guesses_for(x, fmt, pow2):
            for plain, turned in ((True, True), (True, False), (False, True)):
                given = x, table, 1, fmt.dtype, pow2, plain, turned
                found, wanted = triton_kernels.cast_whole(*given), kernels._cast_whole(*given)
                case = f"whole {shape} {fmt.name} pow2={pow2} guess={guess} {plain} {turned}"
                yield case, different(found, wanted)
            if pow2:
                yield f"{case}: the next guess", different((table[1],), (wanted[2],))
                yield f"{case}: others", int(table[0] != 7) + int(table[2] != 9)
    for name, value in {"infinity": float("inf"), "NaN": float("nan"), "zeros": 0.0}.items():
        x = torch.randn(40, 48) * (value != 0)
        x[3, 5] = value
        given = x.float(), torch.ones(3), 2, E4M3.dtype, True, True, True
        yield (
            f"whole {name}",
            different(triton_kernels.cast_whole(*given), kernels._cast_whole(*given)),
        )
    for shape in WIDE:
        given = torch.randn(shape).bfloat16(), torch.ones(3), 2, E5M2.dtype, True, True, True
        with mock.patch.object(triton_kernels, "PROGRAMS", 32):
            found = triton_kernels.cast_whole(*given)
        yield f"whole {shape}", different(found, kernels._cast_whole(*given))
    slice = torch.randn(64, 96).bfloat16()[:, 16:80]
    for x in (slice, slice.t()):
        given = x, torch.ones(3), 0, E4M3.dtype, True, True, True
        yield (
            f"whole {x.stride()}",
            different(triton_kernels.cast_whole(*given), kernels._cast_whole(*given)),
        )


def swiglus() -> Iterator[tuple[str, int]]:
    torch.manual_seed(3)
    for shape, pow2 in itertools.product((*SHAPES, WIDE[1]), (True, False)):
        dy, gate, up = ((torch.randn(shape) * 3).bfloat16() for _ in range(3))
        for guess in (0.0, 64.0, 1e5):
            tables = [torch.tensor([1.0, 1.0, guess]) for _ in range(2)]
            given = gate, up, tables[0], 2, E4M3.dtype, pow2
            found, wanted = triton_kernels.swiglu_cast(*given), kernels._swiglu_cast(*given)
            yield f"swiglu {shape} pow2={pow2} guess={guess}", different(found, wanted)
            given = dy, gate, up, wanted[1], *tables, 2, E4M3.dtype, E5M2.dtype, pow2
            found = triton_kernels.swiglu_backward_cast(*given)
            wanted = kernels._swiglu_backward_cast(*given)
            yield f"swiglu backward {shape} pow2={pow2} guess={guess}", different(found, wanted)


if __name__ == "__main__":
    torch.manual_seed(0)
    cases = itertools.chain(casts(), transposes(), logits(), whole(), swiglus())
    print(json.dumps(dict(cases)))
