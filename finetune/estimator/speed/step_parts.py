"""`StepPart`: the parts of a training step that time is spent in, predicted and profiled.

The estimator knows the module and the operands of every operator, and so tells apart the first
group of parts; a profile knows kernels and the layers whose precision the receipt has, and so tells
apart the second (`finetune.analysis.diagnose`). `StepPart.profiled` leads from one to the other.

A rank shows in forward: a linear that multiplies by `[N, K]` and, in the same module or in parts
named `lora_...`, by `[r, K]` and `[N, r]`. Backward has no modules, so products with that rank are
taken for the adapters', while pointwise work of theirs counts as pointwise there.

An operator is a cast when all that read its result are FP8 products or casts, and it is of a kind
that casts consist of. The head's products are those outside of numbered layers, and later those
that read the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from finetune.estimator.speed.kernels import base_name, dtype_name, kind_of, product_of, words


class StepPart(StrEnum):
    """Part of a step; the value is its name in tables and JSON.

    The parts that a profile tells apart are in their display order.
    """

    LINEARS = "linears"
    """Products of the layers."""
    ADAPTERS = "adapters"
    """Products with the rank of an adapter, and in forward all that its linear does besides."""
    HEAD = "head and loss"
    """The last linear, over the vocabulary, and the loss."""
    FP8_CASTS = "FP8 casts"
    """What makes the operands of FP8 products: maxima, scales, casts, transposes."""
    DEQUANTIZE = "dequantisation"
    POINTWISE = "pointwise"
    """Norms, activations, rotary embeddings, residual sums, their backward."""
    EMBEDDING = "embedding"
    WAITING = "waiting for launches"

    FP8_GEMM = "FP8 GEMMs"
    """Products of FP8 operands, emulated ones too."""
    GEMM = "other GEMMs"
    """Products in high precision: head, adapters, layers that FP8 leaves alone."""
    CASTS = "casts"
    """FP8 casts and the dequantization of stored weights."""
    ATTENTION = "attention"
    """Fused attention; scores and weighted sums of the unfused one."""
    ELEMENTWISE = "elementwise, norms"
    """Pointwise parts and the loss."""
    OPTIMIZER = "optimizer"
    """Gradient norm, clipping, update."""
    COMMUNICATION = "communication"
    """Only where no computation hides it."""
    HOST = "host"
    """On a GPU, time in which it waits; on a CPU, Python, views and allocations."""
    OTHER = "other"
    """Copies between host and device, fills."""

    def profiled(self, *, fp8: bool) -> StepPart:
        """The part that a profile shows this one as.

        Of adapters and of the head what is elementwise counts with the products, where most of
        their time is on a GPU.

        Args:
            fp8: the linear layers run in FP8.
        """
        if self is StepPart.LINEARS:
            return StepPart.FP8_GEMM if fp8 else StepPart.GEMM
        return _PROFILED_AS.get(self, self)


_PROFILED_AS = {
    StepPart.ADAPTERS: StepPart.GEMM,
    StepPart.HEAD: StepPart.GEMM,
    StepPart.FP8_CASTS: StepPart.CASTS,
    StepPart.DEQUANTIZE: StepPart.CASTS,
    StepPart.POINTWISE: StepPart.ELEMENTWISE,
    StepPart.EMBEDDING: StepPart.ELEMENTWISE,
    StepPart.WAITING: StepPart.HOST,
}
PROFILED_PARTS = tuple(part for part in StepPart if part not in {*_PROFILED_AS, StepPart.LINEARS})
"""The parts that a profile tells apart, in display order."""

_ADAPTER = re.compile(r"\.(lora_|adapter|vera_|hada_|lokr_|oft_|boft_)")
_IN_A_LAYER = re.compile(r"(^|\.)\d+(\.|$)")
_CASTING = words(
    "abs amax aminmax max clamp reciprocal _to_copy pad contiguous clone copy_ mul mul_ div div_ "
    "bitwise_and bitwise_and_ bitwise_or __lshift__ __rshift__ full_like new_ones log2 floor ceil "
    "exp2 pow cast_transpose fp8_cast where"
)

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op
_MULTIPLYING = words("mul mul_ div div_")
_SMALL = 2**16
_LOSS = words("in_place addmm_fp32 nll_loss_forward nll_loss_backward")


def classes_of(ops: Sequence[Op]) -> list[StepPart]:
    """The part of every operator of a trace."""
    casts = _casts(ops)
    carriers, ranks = _adapters(ops)
    vocabulary, head = _head(ops)
    return [
        StepPart.FP8_CASTS if casts[index] else _class(op, carriers, ranks, vocabulary, head)
        for index, op in enumerate(ops)
    ]


def _class(
    op: Op, carriers: set[str], ranks: set[int], vocabulary: int, head: set[int]
) -> StepPart:
    kind, name = kind_of(op), base_name(op)
    if kind == "optimizer":
        return StepPart.OPTIMIZER
    if kind == "attention":
        return StepPart.ATTENTION
    if kind == "dequantise":
        return StepPart.DEQUANTIZE
    # in backward a product's module is that of a tensor it reads: its rank says more
    by_rank = kind == "gemm" and op.phase == "backward" and ranks
    if _ADAPTER.search(op.module) and not by_rank:
        return StepPart.ADAPTERS
    if name.startswith("embedding"):
        return StepPart.EMBEDDING
    if name in _LOSS or any(
        vocabulary and vocabulary in operand.shape for operand in (*op.outputs, *op.inputs)
    ):
        return StepPart.HEAD
    if kind == "gemm":
        product = product_of(op)
        if product and {product.m, product.n, product.k} & ranks:
            return StepPart.ADAPTERS
        return (
            StepPart.HEAD
            if any(operand.storage in head for operand in op.inputs)
            else StepPart.LINEARS
        )
    adapts = op.phase in ("forward", "recompute") and op.module in carriers
    return StepPart.ADAPTERS if adapts else StepPart.POINTWISE


def _casts(ops: Sequence[Op]) -> list[bool]:
    """Per operator whether all that it makes ends in operands of FP8 products."""
    found = [False] * len(ops)
    readers: dict[int, list[bool]] = {}  # by storage, of what it holds after the operator at hand
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        name = base_name(op)
        read = [reader for operand in op.outputs for reader in readers.pop(operand.storage, ())]
        multiplies = name.endswith(("scaled_mm", "fp8_mm"))
        if name in _CASTING and read and all(read):
            out = op.outputs[0]
            scales = dtype_name(out) == "float32" or out.nbytes <= _SMALL
            found[index] = scales or name not in _MULTIPLYING
        for operand in op.inputs:
            if operand.storage >= 0:
                readers.setdefault(operand.storage, []).append(multiplies or found[index])
    return found


def _adapters(ops: Sequence[Op]) -> tuple[set[str], set[int]]:
    """(modules that carry an adapter, ranks)."""
    products: dict[str, set[tuple[int, int]]] = {}
    for op in ops:
        if op.phase == "forward" and (product := product_of(op)):
            module = _ADAPTER.split(op.module)[0].removesuffix(".base_layer")
            products.setdefault(module, set()).add((product.n, product.k))
    carriers: set[str] = set()
    ranks: set[int] = set()
    for module, sizes in products.items():
        low = {
            r for n, k in sizes for r, k2 in sizes if k2 == k and r < min(n, k) and (n, r) in sizes
        }
        if low:
            carriers |= {module, f"{module}.base_layer"}
            ranks |= low
    return carriers, ranks


def _head(ops: Sequence[Op]) -> tuple[int, set[int]]:
    """(size of the vocabulary, 0 if unknown; storages of the head's weight)."""
    vocabulary, made = 0, set[int]()
    weights: set[int] = set()
    for op in ops:
        if op.phase != "forward":
            continue
        if base_name(op) == "embedding" and len(op.inputs[0].shape) == 2:
            vocabulary = max(vocabulary, op.inputs[0].shape[0])
        if kind_of(op) == "gemm" and not _IN_A_LAYER.search(op.module):
            weights |= {o.storage for o in op.inputs if o.storage not in made}
        made |= {operand.storage for operand in op.outputs}
    return vocabulary, weights
