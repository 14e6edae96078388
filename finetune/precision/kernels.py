"""Casts and transposes of FP8 operands: operators of torch around its FP8 GEMMs.

    cast_rows(x, fold, pow2)     [M, K] -> E4M3 codes [M, K], inverse scales [M, 1]
    transpose_codes(codes, g)    [N, K] -> [K, N], contiguous

Written in ATen, the same is a chain of pointwise kernels that `torch.compile` has to fuse. Inductor
fuses it into the producer of x, but as often as there are readers: q, k and v get a buffer of codes
each. An operator is opaque to the compiler, so equal calls in a graph become one, its result is
stored once, and without a compiler it is one kernel, too. Dispatch modes (the proof's witness, the
estimator's trace) see it by name.

Implementations: CUDA launches kernels of our own (`triton_kernels`, imported at the first launch:
Triton comes with CUDA builds of torch); any other device runs the reference, from which the kernels
differ in no bit; fake and meta tensors get shapes. The setting `precision.kernels` chooses
(`finetune.hardware.requirements`), and `finetune.precision.weights` calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from finetune.precision.formats import E4M3
from finetune.precision.scaling import cast_current

_library = torch.library.Library("finetune", "FRAGMENT")
_library.define("cast_rows(Tensor x, Tensor? fold, bool pow2) -> (Tensor, Tensor)")
_library.define("transpose_codes(Tensor codes, Tensor? after) -> Tensor")


def cast_rows(
    x: Tensor, fold: Tensor | None = None, *, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast a matrix to E4M3 under the current amax of each row.

    Args:
        x: floating type, [M, K].
        fold: float32 factors of the columns, [1, K], multiplied in first: for dgrad the scales of
            the weight, which lie along the dimension that it contracts.
        pow2: round scales down to powers of two.

    Returns:
        Codes, `float8_e4m3fn` [M, K]; inverse scales, float32 [M, 1]. The bits are those of
        `cast_current(x.float() * fold, E4M3, 1, pow2=pow2, packed=True)`.
    """
    return torch.ops.finetune.cast_rows(x, fold, pow2)


def transpose_codes(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Transpose a matrix of one-byte numbers into a contiguous one: [N, K] -> [K, N].

    cuBLASLt multiplies FP8 only with the contracted dimension innermost in both operands, and
    codes of a weight serve two GEMMs, which contract K and N.

    Args:
        after: any tensor that has to be there first, not read. Of a weight alone, AOTAutograd would
            transpose in forward and keep the result for backward: a second copy of each weight.
    """
    return torch.ops.finetune.transpose_codes(codes, after)


def _cast_rows(x: Tensor, fold: Tensor | None, pow2: bool) -> tuple[Tensor, Tensor]:
    wide = x if fold is None else x.float() * fold
    # Contiguous, as the shapes for fake tensors (`_empty_rows`) promise it to the compiler.
    return cast_current(wide.contiguous(), E4M3, 1, pow2=pow2, packed=True)


def _empty_rows(x: Tensor, fold: Tensor | None, pow2: bool) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=E4M3.dtype)
    return codes, x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _transpose(codes: Tensor, after: Tensor | None) -> Tensor:
    # Not `contiguous()`: for N = 1 it is a view, and an operator must not return one of its input.
    return codes.t().clone(memory_format=torch.contiguous_format)


def _empty_transpose(codes: Tensor, after: Tensor | None) -> Tensor:
    return codes.new_empty(codes.shape[::-1])


def _launch(name: str, *args: Any) -> Any:
    from finetune.precision import triton_kernels

    return getattr(triton_kernels, name)(*args)


for _name, _reference, _empty in (
    ("cast_rows", _cast_rows, _empty_rows),
    ("transpose_codes", _transpose, _empty_transpose),
):
    _library.impl(_name, _reference, "CompositeExplicitAutograd")  # any device not named below
    _library.impl(_name, partial(_launch, _name), "CUDA")
    _library.impl(_name, _empty, "Meta")
