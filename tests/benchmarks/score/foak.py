"""Fused kernels of fms-acceleration (from Unsloth): what each keeps for backward.

Normalization keeps its input and one float32 per row, and writes its gradient over that of its
output. Rotation is done in place. The fused adapters of q, k, v and of o are one function each: it
keeps its input and, with dropout, the dropped input of each adapter; the products of the base are
added to in place. (`fms_acceleration_foak/kernels/unsloth`, `fused_ops/unsloth_lora`.)
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.estimator.trace.fake_cuda import replaced
from tests.benchmarks.score.jobs import Job


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        _, weight, _ = ctx.saved_tensors
        return grads[0], torch.empty_like(weight) if weight.requires_grad else None


def _weight(layer: nn.Linear) -> Tensor:
    """The weight [N, K], made for the moment where it is packed."""
    if layer.weight.dtype is not torch.uint8:
        return layer.weight
    return layer.weight.new_empty(layer.out_features, layer.in_features, dtype=torch.bfloat16)


def _product(x: Tensor, layer: Any, drop: float) -> tuple[Tensor, Tensor]:
    """`matmul_lora`: base, plus adapter added in place; and the input of the adapter."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    out = torch.matmul(x, _weight(layer.base_layer).t())
    inner = F.dropout(x, drop) if drop else x
    out += (inner @ a.t().to(x.dtype)) @ (b.t().to(x.dtype) * 1.0)
    return out, inner


def _adapter_grads(inner: Tensor, dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    low = dy.dtype
    da = inner.t() @ (dy @ b.to(low))
    db = (a.to(low) @ inner.t()) @ dy
    return da.t().to(a.dtype), db.t().to(b.dtype)


class _Adapters(torch.autograd.Function):
    """One to three adapted layers that read the same input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[Any], drop: float, *weights: Tensor) -> Any:
        made = [_product(x, layer, drop) for layer in layers]
        ctx.layers, ctx.dropped = layers, bool(drop)
        ctx.save_for_backward(x, *weights, *(inner for _, inner in made))
        return tuple(out for out, _ in made)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        layers = ctx.layers
        x, *rest = ctx.saved_tensors
        weights, inners = rest[: 2 * len(layers)], rest[2 * len(layers) :]
        flat = x.view(-1, x.shape[-1])
        grads: list[Tensor] = []
        for i, dy in enumerate(dys):
            dy2 = dy.reshape(-1, dy.shape[-1])
            inner = inners[i].view(-1, flat.shape[-1])
            grads += _adapter_grads(inner, dy2, weights[2 * i], weights[2 * i + 1])
        dx: Tensor | None = None
        for i, (layer, dy) in enumerate(zip(layers, dys, strict=True)):
            dy2 = dy.reshape(-1, dy.shape[-1])
            weight = _weight(layer.base_layer)
            if dx is None:
                dx = dy2 @ weight
            else:
                dx += dy2 @ weight
            del weight
            low = dy2.dtype
            added = (dy2 @ weights[2 * i + 1].to(low)) @ (weights[2 * i].to(low) * 1.0)
            if ctx.dropped:
                added = (inners[i].view(-1, flat.shape[-1]) != 0) * added
            dx += added
        assert dx is not None
        return (dx.view(x.shape), None, None, *grads)


def _adapter_weights(layers: list[Any]) -> list[Tensor]:
    return [w for p in layers for w in (p.lora_A["default"].weight, p.lora_B["default"].weight)]


def fuse(model: Any, job: Job) -> None:
    """Put the kernels into every norm, and with adapters into every attention, in place."""
    drop = float(dict(job.adapter_options).get("lora_dropout", 0.0))
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = types.MethodType(lambda self, x: _Norm.apply(x, self.weight), module)
        elif name.endswith("Attention") and job.adapter:
            _fuse_attention(module, drop)


def _fuse_attention(attention: Any, drop: float) -> None:
    """q_proj, k_proj, v_proj in one function, o_proj in another."""
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    waiting: list[Tensor] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        if not waiting:
            made: Any = _Adapters.apply(x, three, drop, *_adapter_weights(three))
            waiting.extend(made)
        return waiting.pop(0)

    for layer in three:
        layer.forward = types.MethodType(forward, layer)

    def forward_one(self: Any, x: Tensor) -> Tensor:
        made: Any = _Adapters.apply(x, [self], drop, *_adapter_weights([self]))
        return made[0]

    attention.o_proj.forward = types.MethodType(forward_one, attention.o_proj)


@contextlib.contextmanager
def rotation_in_place(architecture: str) -> Iterator[None]:
    """The tensors that rotation gets are those that it returns."""
    modeling = importlib.import_module(
        f"transformers.models.{architecture}.modeling_{architecture}"
    )
    with replaced([(modeling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))]):
        yield
