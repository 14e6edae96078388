"""A small Transformer Engine of our own, where the wheel of the real one is missing.

`pytest` must test the backend in a fresh clone, without a download: so this fall-back stays, under
the same fixture and the same assertions as the engine's own Python (`loading`). It has the contract
that our backend relies on, and is strict about it:

* a layer without weights keeps `quantizers` and delayed states of the autocast's recipe;
* quantizers say what buffers they make (`inner_tensor_specs`, `create_metadata`), of which tensors
  are made again; `general_gemm` multiplies two of these, in layouts TN (fprop), NN (dgrad) and NT
  (wgrad), by `transformer_engine_torch.generic_gemm(A, transa, B, transb, ...)`;
* tokens, inputs and outputs must be multiples of 16 in FP8; casts take contiguous tensors;
* delayed scaling: amaxes enter row 0 of each history, until the states are updated;
* `te.Linear(in_features, out_features, bias=, params_dtype=, device=)`, as Accelerate builds it:
  FP8 only inside `te.autocast(enabled, recipe=)`; no wgrad for a frozen weight.

Rounding is that of `finetune.precision.numbers.formats`; block recipes are cast with one scale a
tensor.
"""

from __future__ import annotations

import copy
import enum
import importlib.machinery
import sys
import types
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from finetune.precision.numbers.formats import E4M3, E5M2, amax, cast, scale_from_amax


class Format(enum.Enum):
    HYBRID = (E4M3, E5M2)
    E4M3 = (E4M3, E4M3)
    E5M2 = (E5M2, E5M2)


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    backward_override: str | None = None

    def __post_init__(self):
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."
        assert self.backward_override is None, "Delayed scaling only supports None."


@dataclass
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    backward_override: str | None = None
    fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = QParams()

    def __post_init__(self):
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."


class Float8BlockScaling(Float8CurrentScaling):
    """Numerics of block recipes are not under test here, only what our backend asks for."""

    fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = QParams(power_2_scale=True)


class MXFP8BlockScaling(Float8CurrentScaling):
    pass


@dataclass
class NVFP4BlockScaling(Float8CurrentScaling):
    fp8_format: Format = Format.E4M3
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False


class State:
    """What TE keeps in process-wide state."""

    depth = 0
    recipe = None


class autocast:  # noqa: N801 - TE's name
    def __init__(self, enabled=True, recipe=None):
        self.recipe = recipe if enabled else None

    def __enter__(self):
        self.previous, State.recipe = State.recipe, self.recipe
        State.depth += 1
        return self

    def __exit__(self, *exc):
        State.recipe = self.previous
        State.depth -= 1


class ScalingState:
    def __init__(self, recipe, tensors, dtype):
        self.amax_history = torch.zeros(recipe.amax_history_len, tensors)
        self.scale = torch.ones(tensors)
        self.dtype = dtype


def fused_amax_and_scale_update_after_reduction(
    amaxes, histories, scales, algorithm, dtype, margin
):
    parts = amaxes.split([scale.numel() for scale in scales])
    for last, history, scale in zip(parts, histories, scales, strict=True):
        history[0] = last
        window = history.amax(0) if algorithm == "max" else last
        new = dtype.max / window / 2**margin
        scale.copy_(torch.where(last > 0, new, scale))  # an idle operand keeps all
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        history.copy_(torch.where(last > 0, rolled, history))


class Quantizer:
    """Casts by the scale of the tensor, or of a delayed state, of which it records the amax."""

    def __init__(self, dtype, device=None, *, low="fp8", scale=None, amax=None):
        self.dtype, self.low, self.scale, self.amax = dtype, low, scale, amax
        self.internal = self.optimize_for_gemm = False

    def copy(self):
        return copy.copy(self)

    def set_usage(self, *, rowwise, columnwise):
        """Codes serve either direction, as on Blackwell."""

    def inner_tensor_specs(self, shape):
        data = "_data" if self.low == "fp8" else "_rowwise_data"
        return {data: (shape, torch.uint8), "_scale_inv": ((1,), torch.float32)}

    def create_metadata(self, shape, *, dtype):
        return {"cls": Quantized, "nontensor_kwargs": {"dtype": self.dtype, "low": self.low}}

    def __call__(self, x):
        assert x.is_contiguous(), "TE quantizes contiguous tensors"
        assert not x.shape[0] % 16, f"rows {x.shape[0]} must be a multiple of 16"
        assert not x.shape[1] % 16, f"columns {x.shape[1]} must be a multiple of 16"
        with _disable_current_modes():
            scale = scale_from_amax(amax(x), self.dtype) if self.scale is None else self.scale
            if self.amax is not None:
                self.amax.copy_(torch.maximum(self.amax, amax(x)))
            codes, inverse = cast(x, scale, self.dtype), scale.reciprocal().reshape(1)
        return Quantized(codes.view(torch.uint8), inverse, self.dtype, self.low)


class Quantized:
    """Stands for TE's tensors: codes and scale, recognized by `_fp8_dtype` or `_fp4_dtype`.

    FP4 ones have no `_data`, as there; their codes here are FP8 all the same.
    """

    def __init__(self, data, scale_inv, dtype, low):
        self._scale_inv, self.format = scale_inv, dtype
        if low == "fp4":
            self._fp4_dtype, self._rowwise_data = "E2M1", data
        else:
            self._fp8_dtype, self._data = dtype.dtype, data
        self.size = data.size

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantized(*inner.values(), **context["nontensor_kwargs"])

    @property
    def values(self):
        data = self._data if hasattr(self, "_data") else self._rowwise_data
        return data.view(self.format.dtype).float()


def generic_gemm(a, transa, b, transb, out_dtype=torch.bfloat16):
    """Column-major BLAS as in TE: the result is `op(B) @ op(A)` in row-major terms.

    TE's library works past PyTorch's dispatcher, so dispatch modes do not see inside.
    """
    with _disable_current_modes():
        if isinstance(a, Quantized):
            left = b.values.t() if transb else b.values
            right = a.values.t() if transa else a.values
            return ((left @ right * (b._scale_inv * a._scale_inv)).to(out_dtype),)
        left, right = (b.t() if transb else b), (a.t() if transa else a)
        return ((left.to(out_dtype) @ right.to(out_dtype)),)


def general_gemm(a, b, *, out_dtype, layout, bias=None, grad=False, use_split_accumulator=False):
    gemm = sys.modules["transformer_engine_torch"].generic_gemm
    y = gemm(a, layout[0] == "T", b, layout[1] == "T", out_dtype=out_dtype)[0]
    return (y if bias is None else y + bias,)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, layer, dtype):
        ctx.layer, ctx.dtype, ctx.types = layer, dtype, (x.dtype, w.dtype)
        ctx.fp8 = State.recipe is not None
        if not ctx.fp8:
            tensors = x.to(dtype), w.to(dtype)
            xq, wq = tensors
        else:
            quantizers = layer.quantizers["scaling_fwd"]
            xq, wq = quantizers[0](x), quantizers[1](w)
            ctx.kinds = xq, wq
            tensors = xq._scale_inv, wq._scale_inv
        # As tensors, so that checkpointing drops and recomputes them, as with the real layer.
        ctx.save_for_backward(*tensors)
        return general_gemm(wq, xq, out_dtype=dtype, layout="TN")[0]

    @staticmethod
    def backward(ctx, g):
        saved = ctx.saved_tensors
        xq, wq = ctx.kinds if ctx.fp8 else saved
        g = g.contiguous()
        gq = ctx.layer.quantizers["scaling_bwd"][0](g) if ctx.fp8 else g.to(ctx.dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = general_gemm(wq, gq, out_dtype=ctx.dtype, layout="NN")[0].to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            dw = general_gemm(xq, gq, out_dtype=ctx.dtype, layout="NT")[0].to(ctx.types[1])
        return dx, dw, None, None


class Linear(nn.Module):
    def __init__(
        self, in_features, out_features, bias=True, params_dtype=torch.float32, device="cuda"
    ):
        super().__init__()
        empty = {"dtype": params_dtype, "device": device}
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **empty))
        self.bias = nn.Parameter(torch.empty(out_features, **empty)) if bias else None
        self.fp8_meta: dict = {}
        self.quantizers: dict = {}

    def init_fp8_metadata(self, num_gemms=1):
        recipe = State.recipe
        if recipe is None or self.quantizers:
            return
        low = "fp4" if isinstance(recipe, NVFP4BlockScaling) else "fp8"
        kinds = zip(("scaling_fwd", "scaling_bwd"), (3, 2), recipe.fp8_format.value, strict=True)
        for direction, tensors, dtype in kinds:
            made = [Quantizer(dtype, low=low) for _ in range(tensors)]
            if isinstance(recipe, DelayedScaling):
                state = self.fp8_meta[direction] = ScalingState(recipe, tensors, dtype)
                for index, quantizer in enumerate(made):
                    quantizer.scale = state.scale[index]
                    quantizer.amax = state.amax_history[0, index]
            self.quantizers[direction] = made

    def forward(self, x):
        assert self.weight.is_contiguous(), "TE quantizes contiguous weights"
        assert x.dim() == 2
        self.init_fp8_metadata()
        kind = x.device.type
        on = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if on else x.dtype
        y = _Linear.apply(x.to(dtype), self.weight, self, dtype)
        return y if self.bias is None else y + self.bias.to(dtype)


class Engine:
    """The stand-in in force; the same as `loading.Engine`."""

    is_real = False

    def __init__(self, patch, capability=(9, 0)):
        State.depth, State.recipe = 0, None

        def module(name, **attributes):
            made = types.ModuleType(name)
            made.__spec__ = importlib.machinery.ModuleSpec(name, None)
            made.__dict__.update(attributes)
            patch.setitem(sys.modules, name, made)
            return made

        recipes = (
            Format, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling,
            NVFP4BlockScaling, QParams,
        )  # fmt: skip
        recipe = module("transformer_engine.common.recipe", **{r.__name__: r for r in recipes})
        common = module("transformer_engine.common", recipe=recipe)
        parts = {
            "Linear": Linear,
            "autocast": autocast,
            "NVFP4Quantizer": object,
            "Float8CurrentScalingQuantizer": Quantizer,
            "cpp_extensions": module(
                "transformer_engine.pytorch.cpp_extensions", general_gemm=general_gemm
            ),
        }
        pytorch = module("transformer_engine.pytorch", **parts)
        module("transformer_engine", common=common, pytorch=pytorch, __version__="2.20.2")
        update = {f.__name__: f for f in (fused_amax_and_scale_update_after_reduction,)}
        module("transformer_engine_torch", generic_gemm=generic_gemm, **update)

    def become(self, capability):
        """The stand-in is the same on every GPU."""

    depth = property(lambda _: State.depth)
    in_fp8 = property(lambda _: State.recipe is not None)

    def watch_forwards(self, patch):
        """A list that grows by an entry a forward of a layer: True in FP8."""
        seen, forward = [], _Linear.forward

        def watched(ctx, *args):
            seen.append(self.in_fp8)
            return forward(ctx, *args)

        patch.setattr(_Linear, "forward", staticmethod(watched))
        return seen
