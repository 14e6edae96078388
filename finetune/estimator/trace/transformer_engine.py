"""Stand-in for Transformer Engine's linear layer, without memory or Transformer Engine.

Its kernels run on GPUs only. These are the allocations of `te.Linear` under its autocast
(TransformerEngine 2.20, `pytorch/module/linear.py`):

* forward casts x and w. FP8 tensor cores of compute capability 8.9 and 9.0 contract along the last
  dimension of both operands only, so each cast is written twice, plain and transposed, if a later
  GEMM needs it; from 10.0 on one copy serves, but block formats scale the two directions apart and
  keep two everywhere.
* x is saved for wgrad as the transposed copy alone, and only if w trains; w is saved for dgrad.
  Without gradient checkpointing every layer's copies live from forward to backward.
* backward casts g, in both directions if both GEMMs follow.

A block format adds its scales: one byte for 32 elements (MXFP8), one for 16 and half a byte each
(NVFP4), four for 128 (blockwise).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.config.schema import PrecisionConfig
from finetune.precision.backends.base import Backend, Fp8Mixin
from finetune.precision.layers import by_rows
from finetune.precision.planner import PrecisionPlan

BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16, "blockwise": 1 + 4 / 128}
"""Bytes per cast element with its share of the scales, by block format; others have 1."""

_library = torch.library.Library("finetune_estimator", "FRAGMENT")
_library.define("fp8_cast(Tensor x, float bytes) -> Tensor")
_library.define("fp8_mm(Tensor a, Tensor b, int[] shape, ScalarType dtype) -> Tensor")
_library.impl(
    "fp8_cast",
    lambda x, size: x.new_empty(round(x.numel() * size), dtype=torch.float8_e4m3fn),
    "Meta",
)
_library.impl("fp8_mm", lambda a, _, shape, dtype: a.new_empty(shape, dtype=dtype), "Meta")
_OPS = torch.ops.finetune_estimator


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, size: float, copies: int) -> Tensor:
        (m, k), (n, _) = x.shape, w.shape
        ctx.shapes, ctx.cast, ctx.dtype = (m, n, k), (size, copies), w.dtype
        x_needed, w_needed = ctx.needs_input_grad[:2]
        xq = _cast(x, size, copies if w_needed else 1)
        wq = _cast(w, size, copies if x_needed else 1)
        # [M, K] @ [K, N]
        y = _OPS.fp8_mm(xq[0], wq[0], [m, n], x.dtype)
        ctx.needed = w_needed, x_needed
        ctx.save_for_backward(*xq[-1:] if w_needed else (), *wq if x_needed else ())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        (m, n, k), (size, copies), (w_needed, x_needed) = ctx.shapes, ctx.cast, ctx.needed
        saved = list(ctx.saved_tensors)
        xq = saved.pop(0) if w_needed else None
        gq = _cast(g, size, copies if w_needed and x_needed else 1)
        # dgrad [M, N] @ [N, K], wgrad [N, M] @ [M, K]
        dx = _OPS.fp8_mm(gq[0], saved[-1], [m, k], g.dtype) if x_needed else None
        dw = _OPS.fp8_mm(gq[-1], xq, [n, k], ctx.dtype) if w_needed else None
        return dx, dw, None, None


def _cast(x: Tensor, size: float, copies: int) -> list[Tensor]:
    return [_OPS.fp8_cast(x, size) for _ in range(copies)]


class EngineMixin(Fp8Mixin):
    """Forward of a linear layer as in `te.Linear`."""

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        backend: Any = self.fp8_backend
        size, copies = backend.size, backend.copies
        return by_rows(x, bias, lambda rows: _Linear.apply(rows, w.to(rows.dtype), size, copies))


class EngineBackend(Backend):
    """Stand-in for Transformer Engine.

    Attributes:
        size: bytes per cast element, scales included.
        copies: copies that a cast makes if two GEMMs follow.
    """

    name = "te"
    mixin = EngineMixin

    def __init__(self, precision: PrecisionConfig, capability: tuple[int, int]) -> None:
        super().__init__(precision)
        self.size = BYTES.get(precision.scaling, 1.0)
        self.copies = 1 if capability >= (10, 0) and precision.scaling not in BYTES else 2


def stand_in(capability: tuple[int, int]) -> Any:
    """Replacement of `convert.make_backend` for a plan of Transformer Engine."""

    def make_backend(plan: PrecisionPlan, *, hardware: bool) -> Backend | None:
        if all(layer.stored for layer in plan.fp8_layers):
            return None
        return EngineBackend(plan.precision, capability)

    return make_backend
