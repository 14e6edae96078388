"""Triton's interpreter runs the kernels of `finetune.precision.kernels` on CPU tensors.

A process of its own: functions of Triton are interpreted only if that is chosen before its import.
Prints a JSON object: case -> number of results that differ from the reference by any bit.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # its default changes in Triton 3.10

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from finetune.precision import triton_kernels
from finetune.precision.formats import E4M3
from finetune.precision.scaling import cast_current

TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
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


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(dict(itertools.chain(casts(), transposes()))))
