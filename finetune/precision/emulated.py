"""Backend `emulated`: the numerics of FP8 recipes on any device.

Operands are really cast to FP8 codes and multiplied by `numerics.scaled_mm`, so what differs from
an FP8 GPU is speed and the order of accumulation, not rounding. The rules:

* `tensorwise`: one scale per tensor from its current amax.
* `rowwise`: one scale per row of each GEMM operand, along the contracted dimension, so operands
  are quantised anew for each GEMM.
* `delayed`: one scale per tensor from the amax history of earlier micro-steps.

Delayed scaling follows Transformer Engine (`FP8GlobalStateManager.reduce_and_update_fp8_tensors`):
during a micro-step every cast uses the scale of the step's beginning and records its amax; then the
window of the last `amax_history_len` amaxes sets the next scale. TE updates at the end of forward
and keeps the old scales aside for recomputation. We update at the beginning of the next training
forward instead: the scales in use are the same, and a checkpointed layer that is recomputed during
backward finds its scales untouched and records the same amaxes once more, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.config import PrecisionConfig
from finetune.precision.backend import Backend, Fp8Mixin, compute_dtype, restore
from finetune.precision.numerics import (
    E4M3,
    E5M2,
    FP8_MAX,
    amax,
    cast,
    scale_from_amax,
    scaled_mm,
)
from finetune.precision.planner import LayerPlan


@dataclass(frozen=True)
class Formats:
    """FP8 types of the three operands of a linear layer."""

    x: torch.dtype
    w: torch.dtype
    g: torch.dtype

    @classmethod
    def of(cls, precision: PrecisionConfig) -> Formats:
        """`hybrid` keeps gradients, which need range more than digits, in E5M2."""
        return {
            "hybrid": cls(E4M3, E4M3, E5M2),
            "e4m3": cls(E4M3, E4M3, E4M3),
            "e5m2": cls(E5M2, E5M2, E5M2),
        }[precision.fp8_format]


class TensorwiseScales:
    """Current scaling: the scale of a tensor is that of its own amax."""

    def cast(self, operand: int, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes and scale of `x`; `operand` (0 x, 1 w, 2 g) does not matter here."""
        scale = scale_from_amax(amax(x), dtype)
        return cast(x, scale, dtype), scale


class DelayedScales:
    """Scales of one layer's three operands, as rows of the run's `DelayedState`."""

    def __init__(self, state: DelayedState, row: int) -> None:
        self.state, self.row = state, row

    def cast(self, operand: int, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes of `x` with the scale of the step's beginning; records the amax of `x`."""
        self.state.to(x.device)
        index = 3 * self.row + operand
        current = self.state.current
        current[index] = torch.maximum(current[index], amax(x))
        # A copy: codes saved for backward keep the scale that made them.
        scale = self.state.scale[index].clone()
        return cast(x, scale, dtype), scale


class DelayedState:
    """Amax history and scales of every operand of every delayed-scaling layer.

    Attributes:
        history: float32 [amax_history_len, 3 · layers], newest first after each `advance`.
        current: float32 [3 · layers], amaxes seen in the running micro-step.
        scale: float32 [3 · layers], in use during the running micro-step.
    """

    def __init__(self, layers: int, precision: PrecisionConfig) -> None:
        formats = Formats.of(precision)
        self.fp8_max = torch.tensor(
            [FP8_MAX[f] for f in (formats.x, formats.w, formats.g)] * layers
        )
        self.margin = precision.margin
        self.algorithm = precision.amax_compute_algo
        self.reduce = precision.reduce_amax
        self.history = torch.zeros(precision.amax_history_len, 3 * layers)
        self.current = torch.zeros(3 * layers)
        self.scale = torch.ones(3 * layers)
        self.steps = 0

    def to(self, device: torch.device) -> None:
        """Follow the model to its device."""
        if self.scale.device != device:
            for name in ("fp8_max", "history", "current", "scale"):
                setattr(self, name, getattr(self, name).to(device))

    @torch.no_grad()
    def advance(self) -> None:
        """End a micro-step: the recorded amaxes enter the history and the scales follow.

        An operand that was not seen, or whose amax is not finite, keeps its scale (as in TE).
        """
        if self.steps:
            if self.reduce and dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(self.current, op=dist.ReduceOp.MAX)
            self.history = self.history.roll(1, 0)
            self.history[0] = self.current
            window = self.history.amax(0) if self.algorithm == "max" else self.current
            usable = (window > 0) & window.isfinite()
            largest = torch.finfo(torch.float32).max
            new = (self.fp8_max / window / 2**self.margin).clamp(max=largest)
            self.scale = torch.where(usable, new, self.scale)
            self.current = torch.zeros_like(self.current)
        self.steps += 1


class TensorScaledLinear(torch.autograd.Function):
    """`y = x Wᵀ` with one scale per tensor: codes of x and W serve all three GEMMs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scales: Any, formats: Formats, dtype: torch.dtype):
        """x [M, K], w [N, K] -> y [M, N] in `dtype`."""
        xq, xs = scales.cast(0, x, formats.x)
        wq, ws = scales.cast(1, w, formats.w)
        ctx.save_for_backward(xq if w.requires_grad else None, xs, wq, ws)
        ctx.scales, ctx.formats = scales, formats
        ctx.types = x.dtype, w.dtype
        return scaled_mm(xq, wq.t(), xs, ws, dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw [N, K]; a frozen weight costs no wgrad."""
        xq, xs, wq, ws = ctx.saved_tensors
        gq, gs = ctx.scales.cast(2, g, ctx.formats.g)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(gq, wq, gs, ws, g.dtype).to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            dw = scaled_mm(gq.t(), xq, gs, xs, g.dtype).to(ctx.types[1])
        return dx, dw, None, None, None


class RowScaledLinear(torch.autograd.Function):
    """`y = x Wᵀ` with one scale per row of each operand, along the contracted dimension.

    Contractions differ (K, N, M for fprop, dgrad, wgrad), so each GEMM quantises its own operands
    from high precision, as torchao's `rowwise` recipe does. Scales are powers of two there and here
    (rounded down), so a value quantised along both dimensions differs by a shift only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, formats: Formats, dtype: torch.dtype):
        """x [M, K], w [N, K] -> y [M, N] in `dtype`."""
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.formats = formats
        ctx.types = x.dtype, w.dtype
        xq, xs = _cast_rows(x, formats.x)
        wq, ws = _cast_rows(w, formats.w)
        return scaled_mm(xq, wq.t(), xs, ws.t(), dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw [N, K]; a frozen weight costs no wgrad."""
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            gq, gs = _cast_rows(g, ctx.formats.g)
            wq, ws = _cast_rows(w.t(), ctx.formats.w)
            dx = scaled_mm(gq, wq.t(), gs, ws.t(), g.dtype).to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            gq, gs = _cast_rows(g.t(), ctx.formats.g)
            xq, xs = _cast_rows(x.t(), ctx.formats.x)
            dw = scaled_mm(gq, xq.t(), gs, xs.t(), g.dtype).to(ctx.types[1])
        return dx, dw, None, None


def _cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and power-of-two scales [R, 1] of a matrix, one scale per row."""
    scale = scale_from_amax(amax(x, dim=1), dtype)
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [0.5, 1)
    scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return cast(x, scale, dtype), scale


class EmulatedMixin(Fp8Mixin):
    """Forward of a linear layer whose class the emulated backend has swapped."""

    fp8_backend: EmulatedBackend
    fp8_scales: TensorwiseScales | DelayedScales | None

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        formats = self.fp8_backend.formats
        if self.fp8_scales is None:
            y = RowScaledLinear.apply(rows, w, formats, dtype)
        else:
            y = TensorScaledLinear.apply(rows, w, self.fp8_scales, formats, dtype)
        y = y if bias is None else y + bias.to(dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class EmulatedBackend(Backend):
    """Makes layers emulate FP8 and owns the state of delayed scaling."""

    name = "emulated"
    mixin = EmulatedMixin

    def __init__(self, precision: PrecisionConfig, layers: int) -> None:
        super().__init__(precision)
        self.formats = Formats.of(precision)
        delayed = precision.scaling == "delayed"
        self.state = DelayedState(layers, precision) if delayed else None
        self._rows = 0

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        scales: TensorwiseScales | DelayedScales | None = None
        if self.state is not None:
            scales = DelayedScales(self.state, self._rows)
            self._rows += 1
        elif self.precision.scaling == "tensorwise":
            scales = TensorwiseScales()
        return {"fp8_scales": scales}

    def begin_step(self) -> None:
        if self.state is not None:
            self.state.advance()

    def effective(self) -> dict[str, Any]:
        p = self.precision
        report: dict[str, Any] = {
            "engine": "finetune emulation",
            "scaling": p.scaling,
            "x": str(self.formats.x).removeprefix("torch."),
            "w": str(self.formats.w).removeprefix("torch."),
            "g": str(self.formats.g).removeprefix("torch."),
        }
        if self.state is not None:
            report |= {
                "margin": self.state.margin,
                "amax_history_len": self.state.history.shape[0],
                "amax_compute_algo": self.state.algorithm,
                "reduce_amax": self.state.reduce,
            }
        return report

    def state_tensors(self) -> dict[str, Tensor]:
        if self.state is None:
            return {}
        steps = torch.tensor(self.state.steps)
        names = ("history", "current", "scale")
        return {name: getattr(self.state, name) for name in names} | {"steps": steps}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        if self.state is not None:
            for name in ("history", "current", "scale"):
                restore(getattr(self.state, name), tensors, name)
            self.state.steps = int(tensors["steps"])
