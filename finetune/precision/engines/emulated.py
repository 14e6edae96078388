"""Backend `emulated`: the numerics of every scaling rule, on any device.

Operands are cast by the rule in force (`scaling`) and multiplied by `gemm.scaled_mm`, so operands
are rounded as on an FP8 GPU. What differs is speed, the order and digits of the sums, and on a CPU,
with `emulation=allow`, a second rounding of results. One autograd function serves every rule, and
each of its three GEMMs may stay in high precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.errors import ConfigError
from finetune.precision import constants
from finetune.precision.engines.base import Engine, Fp8Mixin, restore
from finetune.precision.engines.observers import in_backward
from finetune.precision.facts import Gemm
from finetune.precision.model.plan import LayerPlan
from finetune.precision.numbers.gemm import Quantized, as_output, as_rows, compute_dtype, scaled_mm
from finetune.precision.numbers.scaling import (
    DelayedRule,
    DelayedState,
    Operand,
    Randomness,
    Rule,
    formats_of,
    make_rule,
)
from finetune.precision.settings import PrecisionConfig

DELAYED_TENSORS = ("history", "current", "scale")
"""Tensors of a `DelayedState` that belong to a checkpoint."""


class EmulatedLinear(torch.autograd.Function):
    """`y = x Wᵀ`, each GEMM on codes of its own operands, or in high precision."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        rule: Rule,
        high: frozenset[Gemm],
        dtype: torch.dtype,
    ) -> Tensor:
        """x [M, K], w [N, K] -> y [M, N] in `dtype`; GEMMs named in `high` are not quantized."""
        low_fprop = "fprop" not in high
        x_again = rule.reuses and "wgrad" not in high and w.requires_grad
        w_again = rule.reuses and "dgrad" not in high
        # Axis 1 is K of both, the dimension that fprop contracts.
        xq = rule.cast("x", x, 1) if low_fprop or x_again else None
        wq = rule.cast("w", w, 1) if low_fprop or w_again else None
        if low_fprop:
            assert xq is not None
            assert wq is not None
            y = scaled_mm(xq, wq.t(), dtype)  # [M, K] @ [K, N]
        else:
            y = x.to(dtype) @ w.t().to(dtype)  # [M, K] @ [K, N]
        ctx.rule, ctx.high, ctx.types = rule, high, (x.dtype, w.dtype)
        # For backward: codes that serve every GEMM, with their inverse, else the matrix.
        # Only wgrad needs x: a frozen weight saves none.
        x_saved = (x if w.requires_grad else None, None)
        if x_again and xq is not None:
            x_saved = xq.codes, xq.inverse
        w_saved = (wq.codes, wq.inverse) if w_again and wq is not None else (w, None)
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
                # dgrad contracts N: axis 1 of g [M, N], axis 0 of w [N, K].
                gq = rule.cast("g", g, 1)
                wq = _again(rule, "w", w, w_inverse)
                dx = scaled_mm(gq, wq, g.dtype)  # [M, N] @ [N, K]
            dx = dx.to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            if "wgrad" in high:
                dw = g.t() @ x.to(g.dtype)  # [N, M] @ [M, K]
            else:
                if gq is None or not rule.reuses:
                    # wgrad contracts M: axis 0 of g [M, N] and of x [M, K].
                    gq = rule.cast("g", g, 0)
                xq = _again(rule, "x", x, x_inverse)
                dw = scaled_mm(gq.t(), xq, g.dtype)  # [N, M] @ [M, K]
            dw = dw.to(ctx.types[1])
        return dx, dw, None, None, None


def _again(rule: Rule, operand: Operand, saved: Tensor, inverse: Tensor | None) -> Quantized:
    """Codes for backward: those of fprop, which `saved` has with their inverse, or of a matrix."""
    if inverse is None:
        return rule.cast(operand, saved, 0)
    return rule.quantized(operand, saved, inverse)


class EmulatedMixin(Fp8Mixin):
    """Forward of a linear layer whose class the emulated engine has swapped."""

    fp8_engine: EmulatedEngine
    fp8_rule: Rule

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        given = self.fp8_rule, self.fp8_engine.high, compute_dtype(x)
        self.fp8_engine.note_use(self.fp8_rule)
        return as_output(EmulatedLinear.apply(as_rows(x), w, *given), x, bias)


class Passes:
    """Number of the running forward pass; a recomputation in backward belongs to the last one."""

    def __init__(self) -> None:
        self.number, self._inside = 0, False

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[None]:
        """Context of a call of the whole model, which is one pass."""
        before, self._inside = self._inside, True
        # A call nested in the whole model belongs to the pass under way.
        self.number += not before
        try:
            yield
        finally:
            self._inside = before

    def of_use(self, last: int | None) -> int:
        """Number of the pass in which something is used whose last use was in pass `last`.

        Parts of a model are called without the whole: a second use of one is then another pass.
        """
        if last == self.number and not self._inside and not in_backward():
            self.number += 1
        return self.number


class EmulatedEngine(Engine):
    """Backend that emulates FP8; owns the state of delayed scaling and of stochastic rounding."""

    name = "emulated"
    mixin = EmulatedMixin

    def __init__(self, precision: PrecisionConfig, layers: int) -> None:
        super().__init__(precision)
        self.high = precision.gemms_kept_high
        has_history = precision.facts.has_history
        self.state = DelayedState(layers, precision) if has_history else None
        self._passes = Passes()
        self.randomness = Randomness()
        self._rows = 0

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        rule: Rule
        if self.state is not None:
            rule = DelayedRule(self.state, self._rows)
            # Three columns of the shared state for each layer, in the order of conversion.
            self._rows += 1
        else:
            rule = make_rule(self.precision, self.randomness)
        return {"fp8_rule": rule}

    def scale_in_force(self, module: nn.Module, operand: Operand) -> Tensor | None:
        rule: Any = module.fp8_rule
        return rule.scale_in_force(operand) if isinstance(rule, DelayedRule) else None

    def region(self) -> contextlib.AbstractContextManager[None]:
        return super().region() if self.state is None else self._passes.whole_model()

    def begin_step(self) -> None:
        if self.state is not None:
            self.state.advance()

    def note_use(self, rule: Rule) -> None:
        """Begin a step where parts of the model are called without the whole, in training."""
        # In a compiled layer the number of a pass would be a guard, another one at each step.
        if self.state is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        assert isinstance(rule, DelayedRule)
        before = self._passes.number
        rule.used_in = self._passes.of_use(rule.used_in)
        if rule.used_in != before:
            self.state.advance()

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        before = None if self.state is None else self.state.current.clone()
        try:
            yield
        finally:
            if self.state is not None and before is not None:
                self.state.current.copy_(before)  # not itself: it may be of inference mode

    def effective(self) -> dict[str, Any]:
        p = self.precision
        report: dict[str, Any] = {
            "engine": "finetune emulation",
            "scaling": p.scaling,
            **{operand: fmt.name for operand, fmt in formats_of(p).items()},
            "power_of_two_scales": p.pow2_scales,
            "high_gemms": sorted(self.high),
        }
        if p.facts.is_random:
            report["hadamard"] = constants.HADAMARD
            report["stochastic_rounding"] = constants.STOCHASTIC_ROUNDING
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
        requested = self.precision.facts.is_random and constants.STOCHASTIC_ROUNDING
        # Only gradients are rounded so, and they are operands of dgrad and wgrad alone.
        return requested and not {"dgrad", "wgrad"} <= self.high

    def state_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        if self.state is not None:
            tensors |= {name: getattr(self.state, name) for name in DELAYED_TENSORS}
            # A tensor, since a safetensors file holds no plain numbers.
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
                    why="the run would continue with other random numbers than it stopped with, "
                    "and resuming would not be exact",
                    fix="resume with the precision section of the run that saved it (its "
                    "config.yaml)",
                )
            self.randomness.restore(tensors["random"])
