"""Backend `torchao`: `torchao.float8.Float8Linear` multiplies.

Layers become subclasses of `Float8Linear`, with a configuration derived from torchao's recipes.
Three differences from `convert_to_float8_training`:

* A frozen weight costs two GEMMs, not three: torchao computes its weight gradient and drops it.
* With `precision.fp8_params` a weight is cast once per optimizer step, to the same bits (`cached`).
* Under autocast on any device the input is cast to autocast's type (torchao: on CUDA only).

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
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
)
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from finetune.config.schema import Gemm, PrecisionConfig
from finetune.precision.backends.base import Fp8Mixin
from finetune.precision.backends.cached import CachedBackend, WeightCache, compiled_once
from finetune.precision.formats import E4M3, E5M2
from finetune.precision.gemm import by_rows
from finetune.precision.planner import LayerPlan


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
        pad_inner_dim=not emulate,  # where tokens are no multiple of 16: `_unpadded`
        emulate=emulate,
    )


class OwnMatmul(torch.autograd.Function):
    """`y = x Wᵀ` by torchao's casts and GEMMs, where its own function does too much or too little.

    That has no weight which was cast before, computes the weight gradient of one that does not
    train, and cannot multiply float32 weights by BF16 gradients in a GEMM that stays high.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_t: Tensor,
        fprop: Tensor | None,
        fprop_scale: Tensor | None,
        dgrad: Tensor | None,
        dgrad_scale: Tensor | None,
        mm: LinearMMConfig,
        config: Float8LinearConfig,
    ) -> Tensor:
        """x [M, K], w_t [K, N] -> [M, N] in the type of `x`.

        Args:
            fprop, fprop_scale: FP8 numbers of w_t as fprop multiplies them, and their scale; None
                casts w_t.
            dgrad, dgrad_scale: the same in dgrad; None: those of fprop, if one cast serves both.
        """
        ctx.mm, ctx.config, ctx.w_dtype = mm, config, w_t.dtype
        xq = _to_float8(x, config.cast_config_input, mm, GemmInputRole.INPUT, -1, config)
        cast = config.cast_config_weight
        wq = _weight(w_t, fprop, fprop_scale, x.dtype, cast, mm, 0, config)
        if dgrad is None and _one_cast(config):
            dgrad, dgrad_scale = fprop, fprop_scale
        x_saved = x if ctx.needs_input_grad[1] else None  # only wgrad needs it
        ctx.save_for_backward(x_saved, w_t if dgrad is None else None, dgrad, dgrad_scale)
        return torch.mm(xq, wq)  # [M, K] @ [K, N]

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw_t [K, N]."""
        x, w_t, codes, scale = ctx.saved_tensors
        mm, config, role = ctx.mm, ctx.config, GemmInputRole.GRAD_OUTPUT
        dx = dw_t = None
        if ctx.needs_input_grad[0]:
            gq = _to_float8(g, config.cast_config_grad_output, mm, role, -1, config)
            cast = config.cast_config_weight_for_grad_input
            wq = _weight(w_t, codes, scale, g.dtype, cast, mm, -1, config)
            dx = torch.mm(gq, wq.t())  # [M, N] @ [N, K]
        if ctx.needs_input_grad[1]:
            cast = config.cast_config_grad_output_for_grad_weight
            gq = _to_float8(g, cast, mm, role, 0, config)
            cast = config.cast_config_input_for_grad_weight
            xq = _to_float8(x, cast, mm, GemmInputRole.INPUT, 0, config)
            dw_t = torch.mm(gq.t(), xq.to(gq.dtype)).t().to(ctx.w_dtype)  # [N, M] @ [M, K]
        return dx, dw_t, None, None, None, None, None, None


def _one_cast(config: Float8LinearConfig) -> bool:
    """True if one cast of the weight serves fprop and dgrad: it has one scale."""
    casts = config.cast_config_weight, config.cast_config_weight_for_grad_input
    return casts[0] == casts[1] and casts[0].scaling_granularity is ScalingGranularity.TENSORWISE


def _weight(
    w_t: Tensor | None,
    codes: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    cast: CastConfig,
    mm: LinearMMConfig,
    axis: int,
    config: Float8LinearConfig,
) -> Tensor:
    """Numbers that were cast before, or w_t [K, N] cast now, to meet an operand of `dtype`."""
    if codes is None:
        assert w_t is not None
        return _to_float8(w_t, cast, mm, GemmInputRole.WEIGHT, axis, config).to(dtype)
    axiswise = get_maybe_axiswise_dim(axis, cast.scaling_granularity)
    assert scale is not None
    return Float8TrainingTensor(codes, scale, dtype, mm, GemmInputRole.WEIGHT, axiswise)


def _to_float8(
    x: Tensor,
    cast: CastConfig,
    mm: LinearMMConfig,
    role: GemmInputRole,
    axis: int,
    config: Float8LinearConfig,
) -> Tensor:
    """Cast as torchao does, or leave unchanged where this GEMM stays in high precision."""
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


def quantize_weight(
    w: Tensor, dtype: torch.dtype, granularity: ScalingGranularity, pow2: bool, *, for_dgrad: bool
) -> tuple[Tensor, Tensor]:
    """FP8 numbers of a weight [N, K], as [K, N], and their scale: the bits of torchao's cast.

    In plain operations, which `torch.compile` makes two passes over the weight.

    Args:
        for_dgrad: True for scales along N, which dgrad contracts; else along K.
    """
    axis = get_maybe_axiswise_dim(0 if for_dgrad else -1, granularity)
    scale = tensor_to_scale(w, dtype, False, None, granularity, axis, pow2)
    return to_fp8_saturated(w.float() * scale, dtype).t(), scale.t() if scale.dim() else scale


# An operator: one result of a weight for dispatch modes, such as the estimator's trace.
_library = torch.library.Library("finetune", "FRAGMENT")
_library.define(
    "cast_weight(Tensor w, ScalarType dtype, bool rowwise, bool pow2, bool for_dgrad, bool fused) "
    "-> (Tensor, Tensor)"
)


def _cast_weight(
    w: Tensor, dtype: torch.dtype, rowwise: bool, pow2: bool, for_dgrad: bool, fused: bool
) -> tuple[Tensor, Tensor]:
    granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    quantize = compiled_once(quantize_weight) if fused else quantize_weight
    return quantize(w, dtype, granularity, pow2, for_dgrad=for_dgrad)


def _empty_cast(
    w: Tensor, dtype: torch.dtype, rowwise: bool, pow2: bool, for_dgrad: bool, fused: bool
) -> tuple[Tensor, Tensor]:
    n, k = w.shape
    shape = ((k, 1) if for_dgrad else (1, n)) if rowwise else ()
    return torch.empty_like(w, dtype=dtype).t(), w.new_empty(shape, dtype=torch.float32)


_library.impl("cast_weight", _cast_weight, "CompositeExplicitAutograd")
_library.impl("cast_weight", _empty_cast, "Meta")


TOKENS = 16
"""Divisor of the inner dimension of `torch._scaled_mm`."""


def _unpadded(mm: LinearMMConfig) -> LinearMMConfig:
    """The GEMMs of tokens that are a multiple of 16, where there is nothing to pad.

    torchao (0.18) pads by nothing, too: in eager mode a copy of each operand, and in a graph for
    changing lengths an operator whose result is row-major when traced, and not when it pads nothing
    (torch 2.13): `constant_pad_nd` of the transposed gradient, which `_scaled_mm` then refuses.
    """
    return LinearMMConfig(*(gemm._replace(pad_inner_dim=False) for gemm in mm))


class TorchaoMixin(Fp8Mixin):
    """Forward of a linear layer that torchao multiplies."""

    fp8_backend: TorchaoBackend
    fp8_codes: tuple[Tensor | None, ...]
    config: Float8LinearConfig
    linear_mm_config: LinearMMConfig
    unpadded_mm_config: LinearMMConfig

    @classmethod
    def bases(cls, original: type[nn.Module]) -> tuple[type, ...]:
        # torchao's own tools still recognize a converted `nn.Linear` as one of its layers.
        return cls, Float8Linear if original is nn.Linear else original

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        config, codes = self.config, self.fp8_backend.codes_for(self, w)
        # wgrad contracts tokens: those of a last or packed batch need not be a multiple of 16.
        aligned = x.shape[:-1].numel() % TOKENS == 0
        mm = self.unpadded_mm_config if aligned else self.linear_mm_config
        # [M, K] @ [K, N]; backward: [M, N] @ [N, K] and, of a weight that trains, [N, M] @ [M, K]
        if codes or not w.requires_grad or self.fp8_backend.precision.gemms_kept_high:
            given = codes or (None,) * 4
            return by_rows(x, bias, lambda rows: OwnMatmul.apply(rows, w.t(), *given, mm, config))
        matmul = matmul_with_hp_or_float8_args
        return by_rows(x, bias, lambda rows: matmul.apply(rows, w.t(), mm, config))


class TorchaoBackend(CachedBackend):
    """Backend whose layers run in torchao."""

    name = "torchao"
    mixin = TorchaoMixin

    def __init__(self, precision: PrecisionConfig, *, emulate: bool) -> None:
        super().__init__(precision)
        self.config = ao_config(precision, emulate=emulate)

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        with torch.device("meta"):
            model = Float8Linear(1, 1, bias=False, config=self.config)
        names = ("config", "linear_mm_config", "scaling_type_input", "scaling_type_weight")
        facts = {name: getattr(model, name) for name in (*names, "scaling_type_grad_output")}
        unpadded = {"unpadded_mm_config": _unpadded(model.linear_mm_config)}
        return super().attributes(module, layer) | facts | unpadded

    def kept_codes(self, layer: Any, w: Tensor, cache: WeightCache[Any]) -> tuple[Any, ...]:
        """Numbers and scale for fprop and for dgrad, None where a GEMM has none of its own."""
        config, found = self.config, list[Any]()
        fused = cache.fused and w.is_cuda  # on CPUs compiling takes longer than it saves
        for cast in (config.cast_config_weight, config.cast_config_weight_for_grad_input):
            assert cast is not None  # Float8LinearConfig fills it in
            assert cast.target_dtype is not None
            dgrad, off = bool(found), cast.scaling_type is ScalingType.DISABLED
            if off or (dgrad and (_one_cast(config) or not torch.is_grad_enabled())):
                found += [None, None]
                continue
            rowwise = cast.scaling_granularity is ScalingGranularity.AXISWISE
            how = cast.target_dtype, rowwise, config.round_scales_to_power_of_2, dgrad, fused
            found += cache.get(w, dgrad, lambda w, how=how: torch.ops.finetune.cast_weight(w, *how))
        return tuple(found)

    def effective(self) -> dict[str, Any]:
        config = self.config
        casts = config.cast_config_weight, config.cast_config_grad_output
        rowwise = any(c.scaling_granularity is ScalingGranularity.AXISWISE for c in casts)
        return {
            "engine": "torchao.float8",
            "scaling": "rowwise" if rowwise else "tensorwise",
            "x": config.cast_config_input.short_str(),
            "w": config.cast_config_weight.short_str(),
            "g": config.cast_config_grad_output.short_str(),
            "round_scales_to_power_of_2": config.round_scales_to_power_of_2,
            "emulate": config.emulate,
            "fp8_params": self.cache is not None,
        }
