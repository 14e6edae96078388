"""A small Transformer Engine of our own, where the wheel of the real one is missing.

`pytest` must test the backend in a fresh clone, without a download: so this fall-back stays, under
the same fixture and the same assertions as the engine's own Python (`loading`). It has the contract
that our backend relies on, and is strict about it:

* `te.Linear(in_features, out_features, bias=, params_dtype=, device=)`; FP8 only inside
  `te.autocast(enabled, recipe=)`, BF16 outside it, as in TE;
* tokens, inputs and outputs must be multiples of 16 in FP8; weights must be contiguous;
* all GEMMs go through `transformer_engine_torch.generic_gemm(A, transa, B, transb, ...)`, in
  layouts TN (fprop), NN (dgrad), NT (wgrad), with A the weight or the input;
* no wgrad for a frozen weight;
* delayed scaling: amaxes enter row 0 of each history. Leaving the outermost autocast with gradients
  enabled updates every forward scale, the backward of the first layer of an autocast those of
  gradients. During recomputation the scales of the first forward are used.

Rounding is that of `finetune.precision.formats`; block recipes are cast with one scale a tensor.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import sys
import types
from collections import Counter, deque
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from finetune.precision.formats import E4M3, E5M2, amax, cast, scale_from_amax


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
    first = False  # no layer has run in this autocast
    layers: list = []
    updates: Counter = Counter()
    region = None  # None, "first" or "again"


def update(direction):
    State.updates[direction] += bool(State.layers)
    for layer in State.layers:
        layer.fp8_meta[{"forward": "scaling_fwd", "backward": "scaling_bwd"}[direction]].update()


class autocast:  # noqa: N801 - TE's name
    def __init__(self, enabled=True, recipe=None):
        self.enabled, self.recipe = enabled, recipe

    def __enter__(self):
        self.previous = State.recipe
        State.recipe = self.recipe if self.enabled else None
        State.first = State.first or not State.depth
        State.depth += 1
        return self

    def __exit__(self, *exc):
        State.recipe = self.previous
        State.depth -= 1
        if self.enabled and State.depth == 0 and torch.is_grad_enabled():
            update("forward")


class ScalingState:
    def __init__(self, recipe, tensors, dtype):
        self.amax_history = torch.zeros(recipe.amax_history_len, tensors)
        self.scale = torch.ones(tensors)
        self.recipe, self.dtype = recipe, dtype

    def cast(self, index, x):
        self.amax_history[0, index] = torch.maximum(self.amax_history[0, index], amax(x))
        scale = self.scale[index].clone()
        return Quantized(None, cast(x, scale, self.dtype), scale)

    def update(self):
        last = self.amax_history[0].clone()
        window = self.amax_history.amax(0) if self.recipe.amax_compute_algo == "max" else last
        new = self.dtype.max / window / 2**self.recipe.margin
        self.scale.copy_(torch.where(last > 0, new, self.scale))  # an idle operand keeps all
        rolled = self.amax_history.roll(-1, 0)
        rolled[0] = 0
        self.amax_history.copy_(torch.where(last > 0, rolled, self.amax_history))


class Quantized:
    """Stands for TE's tensors: codes and scale, recognized by `_fp8_dtype` or `_fp4_dtype`.

    FP4 ones have no `_data`, as there; their codes here are FP8 all the same.
    """

    def __init__(self, recipe, codes, scale):
        self._codes, self._scale, self.tensors = codes, scale, (codes, scale)
        if isinstance(recipe, NVFP4BlockScaling):
            self._fp4_dtype, self._rowwise_data = "E2M1", codes.view(torch.uint8)
        else:
            self._fp8_dtype, self._data = codes.dtype, codes

    def size(self):
        return self._codes.size()


def generic_gemm(a, transa, b, transb, out_dtype=torch.bfloat16):
    """Column-major BLAS as in TE: the result is `op(B) @ op(A)` in row-major terms.

    TE's library works past PyTorch's dispatcher, so dispatch modes do not see inside.
    """
    with _disable_current_modes():
        if isinstance(a, Quantized):
            left = b._codes.t() if transb else b._codes
            right = a._codes.t() if transa else a._codes
            return (((left.float() @ right.float()) / (b._scale * a._scale)).to(out_dtype),)
        left, right = (b.t() if transb else b), (a.t() if transa else a)
        return ((left.to(out_dtype) @ right.to(out_dtype)),)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, layer, dtype):
        gemm = sys.modules["transformer_engine_torch"].generic_gemm
        ctx.layer, ctx.dtype, ctx.types = layer, dtype, (x.dtype, w.dtype)
        ctx.fp8 = State.recipe is not None
        # As in TE: the first of those that have a backward, so no frozen layer on raw embeddings.
        trains = any(ctx.needs_input_grad[:2])
        ctx.first, State.first = State.first and trains, State.first and not trains
        if not ctx.fp8:
            xq, wq = x.to(dtype), w.to(dtype)
        else:
            assert not x.shape[0] % 16, f"tokens {x.shape[0]} must be a multiple of 16"
            assert not w.shape[0] % 16, f"outputs {w.shape[0]} must be a multiple of 16"
            assert not w.shape[1] % 16, f"inputs {w.shape[1]} must be a multiple of 16"
            xq, wq = layer.cast("scaling_fwd", 0, x), layer.cast("scaling_fwd", 1, w)
        # As tensors, so that checkpointing drops and recomputes them, as with the real layer.
        ctx.save_for_backward(*([xq, wq] if not ctx.fp8 else [*xq.tensors, *wq.tensors]))
        return gemm(wq, True, xq, False, out_dtype=dtype)[0]

    @staticmethod
    def backward(ctx, g):
        gemm = sys.modules["transformer_engine_torch"].generic_gemm
        saved = ctx.saved_tensors
        recipe = ctx.layer.recipe
        if ctx.fp8:
            saved = Quantized(recipe, *saved[:2]), Quantized(recipe, *saved[2:])
        xq, wq = saved
        gq = ctx.layer.cast("scaling_bwd", 0, g) if ctx.fp8 else g.to(ctx.dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = gemm(wq, False, gq, False, out_dtype=ctx.dtype)[0].to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            dw = gemm(xq, False, gq, True, out_dtype=ctx.dtype)[0].to(ctx.types[1])
        if ctx.fp8 and ctx.first:
            update("backward")
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
        self._stash: deque = deque()

    def init_fp8_metadata(self, num_gemms=1):
        recipe = State.recipe
        if isinstance(recipe, DelayedScaling) and not self.fp8_meta:
            forward, backward = recipe.fp8_format.value
            self.fp8_meta["scaling_fwd"] = ScalingState(recipe, 3, forward)
            self.fp8_meta["scaling_bwd"] = ScalingState(recipe, 2, backward)
            State.layers.append(self)

    def cast(self, direction, index, x):
        if isinstance(self.recipe, DelayedScaling):
            return self.fp8_meta[direction].cast(index, x)
        dtype = self.recipe.fp8_format.value[direction == "scaling_bwd"]
        scale = scale_from_amax(amax(x), dtype)
        return Quantized(self.recipe, cast(x, scale, dtype), scale)

    def forward(self, x):
        assert self.weight.is_contiguous(), "TE quantizes contiguous weights"
        assert self.weight.device.type != "meta", "the parameters were not lent"
        assert x.dim() == 2
        self.recipe = State.recipe
        self.init_fp8_metadata()
        kind = x.device.type
        on = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if on else x.dtype
        forward = self.fp8_meta.get("scaling_fwd")
        now = None
        if forward is not None and State.region == "first":
            self._stash.append((forward.amax_history.clone(), forward.scale.clone()))
        if forward is not None and State.region == "again":
            now = forward.amax_history.clone(), forward.scale.clone()
            history, scale = self._stash.popleft()
            forward.amax_history.copy_(history)
            forward.scale.copy_(scale)
        try:
            y = _Linear.apply(x.to(dtype), self.weight, self, dtype)
        finally:
            if now is not None:
                forward.amax_history.copy_(now[0])
                forward.scale.copy_(now[1])
        return y if self.bias is None else y + self.bias.to(dtype)


@contextlib.contextmanager
def _phase(name):
    previous, State.region = State.region, name
    try:
        yield
    finally:
        State.region = previous


def get_activation_recompute_contexts():
    return _phase("first"), _phase("again")


class Engine:
    """The stand-in in force; the same as `loading.Engine`."""

    is_real = False

    def __init__(self, patch, capability=(9, 0)):
        State.depth, State.recipe, State.layers, State.region = 0, None, [], None
        State.updates = Counter()

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
        contexts = {"get_activation_recompute_contexts": get_activation_recompute_contexts}
        distributed = module("transformer_engine.pytorch.distributed", **contexts)
        parts = {"Linear": Linear, "autocast": autocast, "distributed": distributed}
        parts["NVFP4Quantizer"] = object
        pytorch = module("transformer_engine.pytorch", **parts)
        module("transformer_engine", common=common, pytorch=pytorch, __version__="2.20.2")
        module("transformer_engine_torch", generic_gemm=generic_gemm)

    def become(self, capability):
        """The stand-in is the same on every GPU."""

    updates = property(lambda _: State.updates)
    depth = property(lambda _: State.depth)
    in_fp8 = property(lambda _: State.recipe is not None)
    layers = property(lambda _: len(State.layers))

    def watch_forwards(self, patch):
        """A list that grows by an entry a forward of a layer: True in FP8."""
        seen, forward = [], _Linear.forward

        def watched(ctx, *args):
            seen.append(self.in_fp8)
            return forward(ctx, *args)

        patch.setattr(_Linear, "forward", staticmethod(watched))
        return seen
