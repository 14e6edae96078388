"""`StepPart`: parts of a training step, predicted and profiled.

The estimator has the module and operands of every operator and predicts the first group of parts;
a profile (`finetune.analysis.diagnose`) has kernels and layers and distinguishes the second.
`StepPart.profiled` maps the first to the second.

* Adapters: a rank r shows in forward, as a linear with weight `[N, K]` and, in the same module or
  in submodules named `lora_...`, `[r, K]` and `[N, r]`. Backward has no modules: GEMMs with that
  rank count as adapters, pointwise work does not.
* Casts: operators of a kind that casts consist of, read only by FP8 GEMMs or other casts.
* Head: GEMMs outside numbered layers, and any that read the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from finetune.estimator.speed.operators import (
    ENGINE,
    base_name,
    dtype_name,
    kind_of,
    product_of,
    words,
)
from finetune.estimator.trace.trace import OF_IMAGES, Op


class StepPart(StrEnum):
    """Part of a step, named as in tables and JSON; profiled parts are in display order."""

    LINEARS = "linears"
    """GEMMs of the layers."""
    ADAPTERS = "adapters"
    """GEMMs with an adapter's rank, and in forward the other work of its linear layer."""
    HEAD = "head and loss"
    """The last linear, over the vocabulary, and the loss."""
    FP8_CASTS = "FP8 casts"
    """Preparation of FP8 operands: amax, scales, casts, transposes."""
    IMAGES = "images"
    """All work of a tower for images and of its projector."""
    DEQUANTIZE = "dequantization"
    POINTWISE = "pointwise"
    """Norms, activations, rotary embeddings, residual sums, their backward."""
    EMBEDDING = "embedding"
    WAITING = "waiting for launches"
    GENERATION = "generation"
    """Answers that the model writes before it learns from them."""

    FP8_GEMM = "FP8 GEMMs"
    """GEMMs with FP8 operands, emulated ones included."""
    GEMM = "other GEMMs"
    """GEMMs in high precision: head, adapters, layers without FP8."""
    CASTS = "casts"
    """FP8 casts and the dequantization of stored weights."""
    ATTENTION = "attention"
    """Fused attention, or the score and value GEMMs of the unfused one."""
    ELEMENTWISE = "elementwise, norms"
    """Pointwise parts and the loss."""
    OPTIMIZER = "optimizer"
    """Gradient norm, clipping, update."""
    COMMUNICATION = "communication"
    """Exposed communication only."""
    HOST = "host"
    """Idle time of a GPU; on a CPU, Python, views and allocations."""
    OTHER = "other"
    """Copies between host and device, fills."""

    def profiled(self, *, fp8: bool) -> StepPart:
        """Part under which a profile shows this one; `fp8` if linear layers run in FP8.

        Elementwise work of adapters and of the head counts with their GEMMs, which dominate.
        """
        if self is StepPart.LINEARS:
            return StepPart.FP8_GEMM if fp8 else StepPart.GEMM
        return _PROFILED_AS.get(self, self)


_PROFILED_AS = {
    StepPart.ADAPTERS: StepPart.GEMM,
    StepPart.HEAD: StepPart.GEMM,
    StepPart.IMAGES: StepPart.GEMM,
    StepPart.FP8_CASTS: StepPart.CASTS,
    StepPart.DEQUANTIZE: StepPart.CASTS,
    StepPart.POINTWISE: StepPart.ELEMENTWISE,
    StepPart.EMBEDDING: StepPart.ELEMENTWISE,
    StepPart.WAITING: StepPart.HOST,
    StepPart.GENERATION: StepPart.OTHER,
}
PROFILED_PARTS = tuple(part for part in StepPart if part not in {*_PROFILED_AS, StepPart.LINEARS})
"""Parts that a profile distinguishes, in display order."""

_ADAPTER = re.compile(r"[./](lora_|adapter|vera_|hada_|lokr_|oft_|boft_)")
_NUMBERED = re.compile(r"(^|[./])\d+([./]|$)")
_CASTING = words(
    "abs amax aminmax max clamp reciprocal _to_copy pad contiguous clone copy_ mul mul_ div div_ "
    "bitwise_and bitwise_and_ bitwise_or __lshift__ __rshift__ full_like new_ones log2 floor ceil "
    "exp2 pow cast_transpose fp8_cast where cast_rows transpose_codes cast_whole"
)

_CODING = words("cast_rows cast_whole fp8_cast fp8_amax")
_MULTIPLYING = words("mul mul_ div div_")
_BY_KIND = {
    "optimizer": StepPart.OPTIMIZER, "attention": StepPart.ATTENTION,
    "dequantize": StepPart.DEQUANTIZE,
}  # fmt: skip
_SMALL = 2**16
_LOSS = words("in_place observe_logits grade_logits addmm_fp32 nll_loss_forward nll_loss_backward")


def classes_of(ops: Sequence[Op]) -> list[StepPart]:
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
    if op.module.startswith(OF_IMAGES):
        return StepPart.IMAGES
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    # in backward a GEMM's module is that of one of its operands: its rank is more reliable
    by_rank = kind == "gemm" and op.phase == "backward" and ranks
    if _ADAPTER.search(op.module) and not by_rank:
        return StepPart.ADAPTERS
    if name.startswith("embedding"):
        return StepPart.EMBEDDING
    operands = (*op.outputs, *op.inputs)
    # By its size: no other dimension of a model is likely to be as large as its vocabulary.
    if name in _LOSS or (vocabulary and any(vocabulary in x.shape for x in operands)):
        return StepPart.HEAD
    if kind == "gemm":
        product = product_of(op)
        if product and {product.m, product.n, product.k} & ranks:
            return StepPart.ADAPTERS
        of_head = any(operand.storage in head for operand in op.inputs)
        return StepPart.HEAD if of_head else StepPart.LINEARS
    adapts = op.phase in ("forward", "recompute") and op.module in carriers
    return StepPart.ADAPTERS if adapts else StepPart.POINTWISE


def _casts(ops: Sequence[Op]) -> list[bool]:
    """Flag the operators whose results all end up as operands of FP8 GEMMs."""
    found = [False] * len(ops)
    readers: dict[int, list[bool]] = {}  # by storage: later readers of its present content
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        name = base_name(op)
        # `pop`: a storage that is written here had another content before, which others read.
        read = [reader for operand in op.outputs for reader in readers.pop(operand.storage, ())]
        multiplies = name.endswith("scaled_mm") or name.removesuffix("_mm") in ENGINE
        found[index] = name in _CODING  # also where its scales are for something else
        if name in _CASTING and read and all(read):
            out = op.outputs[0]
            # A product by a scale is part of a cast if it makes scales or codes; one of a large
            # tensor in 16 bits is a layer's own arithmetic that happens to be read by a cast.
            scales = dtype_name(out) == "float32" or out.nbytes <= _SMALL
            found[index] = scales or name not in _MULTIPLYING
        for operand in op.inputs:
            if operand.storage >= 0:
                readers.setdefault(operand.storage, []).append(multiplies or found[index])
    return found


def _adapters(ops: Sequence[Op]) -> tuple[set[str], set[int]]:
    """(modules with an adapter, ranks)."""
    products: dict[str, set[tuple[int, int]]] = {}
    for op in ops:
        if op.phase == "forward" and (product := product_of(op)):
            module = _ADAPTER.split(op.module)[0].removesuffix(".base_layer")
            products.setdefault(module, set()).add((product.n, product.k))
    carriers: set[str] = set()
    ranks: set[int] = set()
    for module, sizes in products.items():
        low = {
            # [N, K] beside [r, K] and [N, r]: W, A and B of an adapter of rank r.
            r
            for n, k in sizes
            for r, k2 in sizes
            if k2 == k and r < min(n, k) and (n, r) in sizes
        }
        if low:
            carriers |= {module, f"{module}.base_layer"}
            ranks |= low
    return carriers, ranks


def _head(ops: Sequence[Op]) -> tuple[int, set[int]]:
    """(vocabulary size, 0 if unknown; storages of the head's weight)."""
    vocabulary, made = 0, set[int]()
    weights: set[int] = set()
    for op in ops:
        if base_name(op) == "transpose_codes" and op.inputs[0].storage in weights:
            weights.add(op.outputs[0].storage)  # for dgrad
        if op.phase != "forward":
            continue
        if base_name(op) == "embedding" and len(op.inputs[0].shape) == 2:
            vocabulary = max(vocabulary, op.inputs[0].shape[0])
        outside = not (in_layer(op.module) or op.module.startswith(OF_IMAGES))
        if kind_of(op) == "gemm" and outside:
            # What nothing in the step has made is a parameter.
            weights |= {o.storage for o in op.inputs if o.storage not in made}
        made |= {operand.storage for operand in op.outputs}
    return vocabulary, weights


def in_layer(module: str) -> bool:
    """True for a module of a decoder layer, compiled with it or left out."""
    return _NUMBERED.search(module) is not None
