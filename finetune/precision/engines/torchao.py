"""Backend `torchao`: the GEMMs and casts of `torchao.float8.Float8Linear`.

Their configuration is derived from torchao's recipes. On FP8 GPUs layers with one scale per tensor
give its bits by casts of ours (`finetune.precision.engines.whole`).
Differences from `convert_to_float8_training`:

* A frozen weight costs two GEMMs, not three: torchao computes its weight gradient and drops it
  (`OwnMatmul`).
* GEMMs that stay in high precision take float32 weights beside BF16 gradients (`OwnMatmul`).
* Under autocast on any device the input is cast to autocast's type (torchao: on CUDA only).
* Operands are padded only where tokens are no multiple of 16 (`_unpadded`).

Casts are many small kernels in eager mode: without `torch.compile` torchao is slower than BF16.
Without FP8 hardware, `emulate=True` gives the same numbers slowly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import CastConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

from finetune.precision.engines.base import Engine
from finetune.precision.engines.whole import Tensorwise, WholeMixin, whole_linear
from finetune.precision.facts import Gemm
from finetune.precision.model.plan import LayerPlan
from finetune.precision.numbers.formats import E4M3, E5M2
from finetune.precision.numbers.gemm import as_output, as_rows
from finetune.precision.numbers.scaling import OPERANDS, formats_of
from finetune.precision.numbers.weights import INNER_MULTIPLE
from finetune.precision.settings import PrecisionConfig


def ao_config(precision: PrecisionConfig, *, emulate: bool) -> Float8LinearConfig:
    """torchao's configuration of a precision: its own recipe with the requested overrides."""
    config = Float8LinearConfig.from_recipe_name(precision.scaling)
    gradients = E5M2 if precision.fp8_format == "hybrid" else E4M3
    granularity = config.cast_config_grad_output.scaling_granularity
    g = CastConfig(scaling_granularity=granularity, target_dtype=gradients.dtype)
    x, w = config.cast_config_input, config.cast_config_weight
    w_dgrad = config.cast_config_weight_for_grad_input
    assert w_dgrad is not None  # Float8LinearConfig fills it in

    def cast(gemm: Gemm, operand: CastConfig) -> CastConfig:
        # A GEMM runs in high precision when neither of its operands is cast.
        off = CastConfig(ScalingType.DISABLED, target_dtype=operand.target_dtype)
        return off if gemm in precision.gemms_kept_high else operand

    return dataclasses.replace(
        config,
        cast_config_input=cast("fprop", x),
        cast_config_weight=cast("fprop", w),
        cast_config_grad_output=cast("dgrad", g),
        cast_config_weight_for_grad_input=cast("dgrad", w_dgrad),
        cast_config_input_for_grad_weight=cast("wgrad", x),
        cast_config_grad_output_for_grad_weight=cast("wgrad", g),
        round_scales_to_power_of_2=precision.pow2_scales,
        pad_inner_dim=not emulate,  # taken back where there is nothing to pad: `_unpadded`
        emulate=emulate,
    )


class OwnMatmul(torch.autograd.Function):
    """`y = x Wᵀ` by torchao's casts and GEMMs, where its own function does too much or too little.

    `matmul_with_hp_or_float8_args` computes the weight gradient of a frozen weight, and cannot
    multiply float32 weights by BF16 gradients in a GEMM that stays in high precision.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_t: Tensor, mm: LinearMMConfig, config: Float8LinearConfig
    ) -> Tensor:
        """x [M, K], w_t [K, N] -> [M, N] in the type of `x`."""
        ctx.mm, ctx.config = mm, config
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w_t)  # only wgrad needs x
        # fprop contracts K: the last axis of x [M, K], axis 0 of w_t [K, N].
        xq = _to_float8(x, config.cast_config_input, mm, GemmInputRole.INPUT, -1, config)
        wq = _to_float8(w_t, config.cast_config_weight, mm, GemmInputRole.WEIGHT, 0, config)
        return torch.mm(xq, wq.to(x.dtype))  # [M, K] @ [K, N]

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw_t [K, N]."""
        x, w_t = ctx.saved_tensors
        mm, config, role = ctx.mm, ctx.config, GemmInputRole.GRAD_OUTPUT
        dx = dw_t = None
        if ctx.needs_input_grad[0]:
            # dgrad contracts N: the last axis of g [M, N] and of w_t [K, N].
            gq = _to_float8(g, config.cast_config_grad_output, mm, role, -1, config)
            cast = config.cast_config_weight_for_grad_input
            wq = _to_float8(w_t, cast, mm, GemmInputRole.WEIGHT, -1, config)
            dx = torch.mm(gq, wq.to(g.dtype).t())  # [M, N] @ [N, K]
        if ctx.needs_input_grad[1]:
            cast = config.cast_config_grad_output_for_grad_weight
            # wgrad contracts M: axis 0 of g [M, N] and of x [M, K].
            gq = _to_float8(g, cast, mm, role, 0, config)
            cast = config.cast_config_input_for_grad_weight
            xq = _to_float8(x, cast, mm, GemmInputRole.INPUT, 0, config)
            dw_t = torch.mm(gq.t(), xq.to(gq.dtype)).t().to(w_t.dtype)  # [N, M] @ [M, K]
        return dx, dw_t, None, None


def _to_float8(
    x: Tensor,
    cast: CastConfig,
    mm: LinearMMConfig,
    role: GemmInputRole,
    axis: int,
    config: Float8LinearConfig,
) -> Tensor:
    """Cast as torchao does, or leave unchanged where this GEMM stays in high precision.

    A rowwise scale is taken over `axis`, the one that the GEMM contracts; a tensorwise one ignores
    it.
    """
    if cast.scaling_type is ScalingType.DISABLED:
        return x
    assert cast.target_dtype is not None  # Float8LinearConfig fills it in
    return hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        mm,
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(axis, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def _unpadded(mm: LinearMMConfig) -> LinearMMConfig:
    """The same GEMMs without padding, for tokens that are a multiple of 16.

    torchao (0.18) pads by nothing, too: in eager mode a copy of each operand, and in a graph for
    changing lengths an operator whose result is row-major when traced, and not when it pads nothing
    (torch 2.13): `constant_pad_nd` of the transposed gradient, which `_scaled_mm` then refuses.
    """
    return LinearMMConfig(*(gemm._replace(pad_inner_dim=False) for gemm in mm))


class TorchaoMixin(WholeMixin):
    """Forward of a linear layer that torchao multiplies.

    Attributes:
        fp8_mm: torchao's GEMMs, which pad the inner dimension.
        fp8_unpadded_mm: the same without padding.
    """

    fp8_engine: TorchaoEngine
    fp8_config: Float8LinearConfig
    fp8_mm: LinearMMConfig
    fp8_unpadded_mm: LinearMMConfig

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if self.fp8_whole is not None:
            return whole_linear(self, x, w, bias)
        config = self.fp8_config
        # wgrad contracts tokens: those of a last or packed batch need not be a multiple of 16.
        aligned = x.shape[:-1].numel() % INNER_MULTIPLE == 0
        mm = self.fp8_unpadded_mm if aligned else self.fp8_mm
        # [M, K] @ [K, N]; backward: [M, N] @ [N, K] and, of a weight that trains, [N, M] @ [M, K]
        own = not w.requires_grad or self.fp8_engine.precision.gemms_kept_high
        matmul = OwnMatmul if own else matmul_with_hp_or_float8_args
        return as_output(matmul.apply(as_rows(x), w.t(), mm, config), x, bias)


class TorchaoEngine(Engine):
    """Backend whose layers run in torchao."""

    name = "torchao"
    mixin = TorchaoMixin

    def __init__(self, precision: PrecisionConfig, *, emulate: bool, triton: bool = True) -> None:
        super().__init__(precision)
        self.config = ao_config(precision, emulate=emulate)
        self.whole: Tensorwise | None = None
        if precision.facts.reads_twice and not emulate and not precision.gemms_kept_high:
            formats, pow2 = formats_of(precision), bool(precision.pow2_scales)
            self.whole = Tensorwise(formats, pow2, own=triton)

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        # Built only for its `linear_mm_config`: on meta it takes no memory.
        with torch.device("meta"):
            model = Float8Linear(1, 1, bias=False, config=self.config)
        mm = model.linear_mm_config
        guesses = torch.zeros(len(OPERANDS), dtype=torch.float32)
        facts = {"fp8_config": self.config, "fp8_mm": mm, "fp8_unpadded_mm": _unpadded(mm)}
        return facts | {"fp8_whole": self.whole, "fp8_guesses": guesses}

    def effective(self) -> dict[str, Any]:
        config = self.config
        casts = config.cast_config_weight, config.cast_config_grad_output
        rowwise = any(c.scaling_granularity is ScalingGranularity.AXISWISE for c in casts)
        return {
            "engine": "torchao.float8",
            "casts": "torchao.float8" if self.whole is None else "finetune",
            "scaling": "rowwise" if rowwise else "tensorwise",
            "x": config.cast_config_input.short_str(),
            "w": config.cast_config_weight.short_str(),
            "g": config.cast_config_grad_output.short_str(),
            "round_scales_to_power_of_2": config.round_scales_to_power_of_2,
            "emulate": config.emulate,
        }
