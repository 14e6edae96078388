"""What part of a step an operator belongs to, in words that a user has for it.

`adapters` are the modules of LoRA and its kin (`...lora_A...`), the pointwise work of the linear
that carries them, and, where the backward pass has lost its modules, products with a dimension
that is the rank of one of them. `head and loss` is the last linear and everything with as many
columns as the vocabulary. `FP8 casts` are operators that read or write 8-bit floats outside of a
product, and what else a module with FP8 products does: maxima, scales, clamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from finetune.estimator.kernels import base_name, dtype_name, kind_of, product_of
from finetune.estimator.tape import Op

LINEARS = "linears"
ADAPTERS = "adapters"
ATTENTION = "attention"
HEAD = "head and loss"
CASTS = "FP8 casts"
POINTWISE = "pointwise"
OPTIMIZER = "optimizer"
DEQUANTISE = "dequantisation"
EMBEDDING = "embedding"

_ADAPTER_WORDS = ("lora_", "adapter", "vera_", "hada_", "lokr_", "oft_", "boft_")


class Names(NamedTuple):
    """What a tape says about its model: carriers and ranks of adapters, vocabulary, FP8 modules."""

    carriers: frozenset[str]
    ranks: frozenset[int]
    vocabulary: int
    fp8: frozenset[str]


def names_of(ops: Sequence[Op]) -> Names:
    """Read off a tape what the classes need."""
    carriers: set[str] = set()
    ranks: set[int] = set()
    fp8: set[str] = set()
    vocabulary = 0
    for op in ops:
        name = base_name(op)
        if name == "embedding" and op.inputs and len(op.inputs[0].shape) == 2:
            vocabulary = max(vocabulary, op.inputs[0].shape[0])
        if name.endswith("scaled_mm"):
            fp8.add(op.module)
        for word in _ADAPTER_WORDS:
            at = op.module.find("." + word)
            if at < 0:
                continue
            carriers.add(op.module[:at])
            product = product_of(op)
            if product:
                ranks.add(min(product.m, product.n, product.k))
    return Names(frozenset(carriers), frozenset(ranks), vocabulary, frozenset(fp8))


def class_of(op: Op, names: Names) -> str:
    """The class of one operator."""
    kind = kind_of(op)
    if kind == "optimizer":
        return OPTIMIZER
    if kind == "attention":
        return ATTENTION
    if kind == "dequantise":
        return DEQUANTISE
    if any("." + word in op.module for word in _ADAPTER_WORDS):
        return ADAPTERS
    shapes = [o.shape for o in (*op.outputs, *op.inputs) if o.shape]
    if "embed" in op.module or base_name(op).startswith("embedding"):
        return EMBEDDING
    if op.module.endswith("lm_head") or (
        names.vocabulary and any(names.vocabulary in shape for shape in shapes)
    ):
        return HEAD
    if kind == "gemm":
        product = product_of(op)
        if product and {product.m, product.n, product.k} & names.ranks:
            return ADAPTERS
        return LINEARS
    if _casts_fp8(op, names):
        return CASTS
    return ADAPTERS if op.module in names.carriers else POINTWISE


def _casts_fp8(op: Op, names: Names) -> bool:
    if any(dtype_name(o).startswith("float8") for o in (*op.inputs, *op.outputs)):
        return True
    return bool(op.module) and op.module in names.fp8 and op.module not in names.carriers
