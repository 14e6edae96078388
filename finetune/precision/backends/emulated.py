"""Backend `emulated`: the numerics of every scaling rule, on any device.

Operands are cast by the rule in force (`scaling`) and multiplied by `gemm.scaled_mm`, so only speed
and the order of accumulation differ from an FP8 GPU, not rounding. One autograd function serves
every rule, and each of its three GEMMs may stay in high precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from finetune.config.schema import Gemm, PrecisionConfig
from finetune.errors import ConfigError
from finetune.precision.backends.base import Backend, Fp8Mixin, restore
from finetune.precision.formats import E2M1, E4M3, Format, decode, row_hashes
from finetune.precision.gemm import Codes, scaled_mm
from finetune.precision.layers import by_rows, compute_dtype
from finetune.precision.planner import LayerPlan
from finetune.precision.scaling import (
    DelayedRule,
    DelayedState,
    Operand,
    Randomness,
    Rule,
    formats_of,
    make_rule,
)

DELAYED_TENSORS = ("history", "current", "scale")
"""Tensors of a `DelayedState` that belong to a checkpoint."""


class EmulatedLinear(torch.autograd.Function):
    """`y = x Wᵀ`, each GEMM on codes of its own operands, or in high precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, rule: Rule, high: frozenset[Gemm], dtype: torch.dtype
    ) -> Tensor:
        """x [M, K], w [N, K] -> y [M, N] in `dtype`; GEMMs named in `high` are not quantized."""
        low_fprop = "fprop" not in high
        x_again = rule.reuses and "wgrad" not in high and w.requires_grad
        w_again = rule.reuses and "dgrad" not in high
        xq = rule.cast("x", x, 1) if low_fprop or x_again else None
        wq = rule.cast("w", w, 1) if low_fprop or w_again else None
        if low_fprop:
            assert xq is not None
            assert wq is not None
            y = scaled_mm(xq, wq.t(), dtype)  # [M, K] @ [K, N]
        else:
            y = x.to(dtype) @ w.t().to(dtype)  # [M, K] @ [K, N]
        ctx.rule, ctx.high, ctx.types = rule, high, (x.dtype, w.dtype)
        # For backward: reusable codes, else the matrix; a frozen w needs no x.
        ctx.x_format, x_saved = _pack(xq if x_again else None, x if w.requires_grad else None)
        ctx.w_format, w_saved = _pack(wq if w_again else None, w)
        ctx.save_for_backward(*x_saved, *w_saved)
        return y

    @staticmethod
    @once_differentiable  # rounding has no second derivative: an error, not a wrong number
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw [N, K]; a frozen weight costs no wgrad."""
        x, x_inverse, w, w_inverse = ctx.saved_tensors
        rule, high = ctx.rule, ctx.high
        dx = dw = gq = None
        if ctx.needs_input_grad[0]:
            if "dgrad" in high:
                dx = g @ w.to(g.dtype)  # [M, N] @ [N, K]
            else:
                gq = rule.cast("g", g, 1)
                wq = _unpack(ctx.w_format, w, w_inverse) or rule.cast("w", w, 0)
                dx = scaled_mm(gq, wq, g.dtype)  # [M, N] @ [N, K]
            dx = dx.to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            if "wgrad" in high:
                dw = g.t() @ x.to(g.dtype)  # [N, M] @ [M, K]
            else:
                if gq is None or not rule.reuses:
                    gq = rule.cast("g", g, 0)
                xq = _unpack(ctx.x_format, x, x_inverse) or rule.cast("x", x, 0)
                dw = scaled_mm(gq.t(), xq, g.dtype)  # [N, M] @ [M, K]
            dw = dw.to(ctx.types[1])
        return dx, dw, None, None, None


Packed = tuple[tuple[Format, bool] | None, tuple[Tensor | None, Tensor | None]]


def _pack(codes: Codes | None, matrix: Tensor | None) -> Packed:
    """Tensors to save for backward: codes and their scale, or the matrix."""
    if codes is None:
        return None, (matrix, None)
    return (codes.fmt, codes.in_bf16), (codes.values, codes.inverse)


def _unpack(kind: tuple[Format, bool] | None, values: Any, inverse: Any) -> Codes | None:
    return None if kind is None else Codes(values, inverse, *kind)


class CachedWeight(Rule):
    """A rule that casts its weight once per update and caches it as FP8 bit patterns.

    The parameter is the optimizer's high-precision master. The cache is invalidated by every
    optimizer step and by any other change of the weight's bits. Writes through `.data` (merging
    adapters, averaging weights) do not change `_version`, so hashes of the bits are compared, at
    about a fifth of the cost of a cast.
    """

    def __init__(self, rule: Rule, updates: Updates) -> None:
        self.rule, self.updates = rule, updates
        self.reuses = rule.reuses
        self._cached: dict[Hashable, tuple[Tensor, Codes]] = {}
        self._made_after = updates.count

    def cast(self, operand: Operand, x: Tensor, dim: int) -> Codes:
        whole = x if x._base is None else x._base
        if operand != "w" or not isinstance(whole, nn.Parameter):  # a copy has no lasting address
            return self.rule.cast(operand, x, dim)
        if self._made_after != self.updates.count:
            self._cached.clear()
            self._made_after = self.updates.count
        # A parameter may contain many matrices, and be multiplied in either orientation.
        key, bits = (dim, x.data_ptr(), x.shape, x.stride()), row_hashes(x)
        if key not in self._cached or not torch.equal(self._cached[key][0], bits):
            codes = self.rule.cast(operand, x, dim)
            # E2M1 numbers are E4M3 numbers too, and torch has no four-bit type that computes.
            kind = E4M3.dtype if codes.fmt is E2M1 else codes.fmt.dtype
            self._cached[key] = bits, codes._replace(values=codes.values.to(kind))
        codes = self._cached[key][1]
        return codes._replace(values=decode(codes.values).to(torch.bfloat16))


class Updates:
    """Counter of the steps of all optimizers during its lifetime."""

    def __init__(self) -> None:
        self.count = 0
        this = weakref.ref(self)

        def stepped(*_: Any) -> None:
            alive = this()
            if alive is not None:
                alive.count += 1

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)


class EmulatedMixin(Fp8Mixin):
    """Forward of a linear layer whose class the emulated backend has swapped."""

    fp8_backend: EmulatedBackend
    fp8_rule: Rule

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        rule, high, dtype = self.fp8_rule, self.fp8_backend.high, compute_dtype(x)
        return by_rows(x, bias, lambda rows: EmulatedLinear.apply(rows, w, rule, high, dtype))


class EmulatedBackend(Backend):
    """Backend that emulates FP8; owns the state of delayed scaling and of stochastic rounding."""

    name = "emulated"
    mixin = EmulatedMixin

    def __init__(self, precision: PrecisionConfig, layers: int) -> None:
        super().__init__(precision)
        self.high = precision.gemms_kept_high
        delayed = precision.scaling == "delayed"
        self.state = DelayedState(layers, precision) if delayed else None
        self.randomness = Randomness()
        self._updates = Updates() if precision.fp8_params else None
        self._rows = 0

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        rule: Rule
        if self.state is not None:
            rule = DelayedRule(self.state, self._rows)
            self._rows += 1
        else:
            rule = make_rule(self.precision, self.randomness)
        if self._updates is not None:
            rule = CachedWeight(rule, self._updates)
        return {"fp8_rule": rule}

    def scale_in_force(self, module: nn.Module, operand: Operand) -> Tensor | None:
        rule: Any = module.fp8_rule
        rule = rule.rule if isinstance(rule, CachedWeight) else rule
        return rule.scale_in_force(operand) if isinstance(rule, DelayedRule) else None

    def begin_step(self) -> None:
        if self.state is not None:
            self.state.advance()

    def effective(self) -> dict[str, Any]:
        p = self.precision
        report: dict[str, Any] = {
            "engine": "finetune emulation",
            "scaling": p.scaling,
            **{operand: fmt.name for operand, fmt in formats_of(p).items()},
            "power_of_two_scales": p.pow2_scales,
            "high_gemms": sorted(self.high),
            "fp8_params": p.fp8_params,
        }
        if p.scaling == "nvfp4":
            report |= {"hadamard": p.hadamard, "stochastic_rounding": p.stochastic_rounding}
        if self.state is not None:
            report |= {
                "margin": self.state.margin,
                "amax_history_len": self.state.history.shape[0],
                "amax_compute_algo": self.state.algorithm,
                "reduce_amax": self.state.reduce,
            }
        return report

    @property
    def rounds_stochastically(self) -> bool:
        """True if gradients are rounded stochastically in some GEMM."""
        p = self.precision
        requested = p.scaling == "nvfp4" and p.stochastic_rounding
        return requested and not {"dgrad", "wgrad"} <= self.high

    def state_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        if self.state is not None:
            tensors |= {name: getattr(self.state, name) for name in DELAYED_TENSORS}
            tensors["steps"] = torch.tensor(self.state.steps)
        if self.randomness.state is not None:
            tensors["random"] = self.randomness.state
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        if self.state is not None:
            for name in DELAYED_TENSORS:
                restore(getattr(self.state, name), tensors, name)
            self.state.steps = int(tensors["steps"])
        if self.rounds_stochastically:
            if "random" not in tensors:
                raise ConfigError(
                    "the checkpoint has no state of stochastic rounding",
                    where="random: stored nothing",
                    why="the run would go on with other random numbers than it stopped with, and "
                    "resuming would not be exact",
                    fix="resume with the precision section of the run that saved it (its "
                    "config.yaml), or set precision.stochastic_rounding=false",
                )
            self.randomness.restore(tensors["random"])
