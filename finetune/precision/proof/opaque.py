"""FLOPs of operators that multiply matrices inside: fused recurrent layers, and custom operators.

A fused LSTM or GRU multiplies each of its matrices by every token once, and twice more in backward.
Of another library's operator nothing is known but shapes. Counted as nothing, it would raise the
share of everything else, so it is taken for the product that makes its result: 2 · size of the
result · longest inner dimension of an operand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from finetune.precision.parameters import tensors_of

aten = torch.ops.aten
_RECURRENT = {
    getattr(aten, f"{name}{direction}")
    for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
    for direction in ("", "_backward")
    if hasattr(aten, f"{name}{direction}")
}
_CONTRACTING = {"_trilinear", "_cdist_forward", "_euclidean_dist", "sspaddmm", "_int_mm", "addr"}
"""Operators of `aten` without a formula in torch's own counter."""
_SEEN_THROUGH = {
    *("aten", "prim", "prims", "profiler", "c10d", "c10d_functional", "_c10d_functional"),
    *("torchao", "finetune", "fsdp", "inductor", "_inductor", "rngprims", "autograd"),
}
"""Namespaces whose other operators multiply no matrices, or are counted by name."""


def recurrent_flops(packet: Any, args: tuple[Any, ...]) -> int:
    """FLOPs of a fused recurrent layer, 0 of any other operator.

    An LSTM of 4 gates from 32 to 16, over 10 tokens: 2 · 10 · (64 · 32 + 64 · 16) = 61,440.
    """
    if packet not in _RECURRENT:
        return 0
    x, weights = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:3]
    tokens = x.numel() // x.shape[-1]
    inside = sum(w.numel() for w in weights if isinstance(w, Tensor) and w.dim() == 2)
    return 2 * tokens * inside * (2 if packet.__name__.endswith("_backward") else 1)


def estimated_flops(packet: Any, args: tuple[Any, ...], result: Any) -> int:
    """Estimated FLOPs of an operator that cannot be looked into, 0 of one that can."""
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace in _SEEN_THROUGH and not (namespace == "aten" and name in _CONTRACTING):
        return 0
    operands = [x for x in tensors_of(args) if x.is_floating_point() and x.dim() > 1]
    made = max((math.prod(y.shape) for y in tensors_of([result])), default=0)
    if len(operands) < 2:  # elementwise
        return 0
    return 2 * made * max(x.shape[-1] for x in operands)
