"""Layers whose weights train, under one scale per tensor: codes of every operand for every GEMM.

    fprop   y  [M, N] = x̂ · ŵᵀ      x̂ [M, K], ŵ [N, K]
    dgrad   dx [M, K] = ĝ · ŵ       ĝ [M, N], ŵᵀ [K, N]
    wgrad   dw [N, K] = ĝᵀ · x̂      ĝᵀ [N, M], x̂ᵀ [K, M]

An operand has one scale, so its codes serve both of its GEMMs, but `torch._scaled_mm` takes FP8
only with the contracted dimension innermost: each is written in both orders. Scales and casts are
those of torchao's tensorwise recipe, to the bit, without its tensor subclass.

What makes an operand in a compiled layer can cast it, too (Inductor does): x of a norm. Weights,
gradients that a GEMM or attention has written, and products of SwiGLU are cast by operators of
ours (`kernels`), if scales are powers of two: nearly always right at the first reading. Backward
casts x and w again, transposed, under the scales of forward: kept codes would take a byte of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.precision.engines.base import Fp8Mixin
from finetune.precision.model.swap import Swapped, weight_matrix
from finetune.precision.numbers.formats import SMALLEST_INVERSE, Format
from finetune.precision.numbers.gemm import as_output, as_rows, compute_dtype, torch_scaled_mm
from finetune.precision.numbers.kernels import (
    Whole,
    cast_whole,
    swiglu_backward_cast,
    swiglu_cast,
    transpose_codes,
)
from finetune.precision.numbers.scaling import OPERANDS, Operand
from finetune.precision.numbers.weights import INNER_MULTIPLE, of_type

X, W, G = (OPERANDS.index(operand) for operand in OPERANDS)
FORMULA = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
"""Source of what an MLP computes, in Transformers' models."""


class Tensorwise(NamedTuple):
    """How operands are cast.

    Attributes:
        formats: of x, w and g.
        pow2: True if scales are powers of two.
        own: True if operators of `finetune.precision.numbers.kernels` cast what is not compiled,
            and what a compiler cannot join to its producer.
    """

    formats: dict[Operand, Format]
    pow2: bool
    own: bool


def cast_tensorwise(
    x: Tensor, operand: Operand, guesses: Tensor, how: Tensorwise,
    *, plain: bool = True, turned: bool = False,
) -> Whole:  # fmt: skip
    """Cast an operand [R, C] under its current amax; `guesses` has the layer's last scales."""
    fmt, compiling = how.formats[operand], torch.compiler.is_compiling()
    if how.own and (not compiling or (how.pow2 and operand != "x")):
        column = OPERANDS.index(operand)
        return cast_whole(x, guesses, column, fmt, pow2=how.pow2, plain=plain, turned=turned)
    scale = scale_of(x, fmt, pow2=how.pow2)
    codes = (x.float() * scale).to(fmt.dtype)
    return Whole(codes, codes.t().contiguous() if turned else codes, scale, scale.reciprocal())


def scale_of(x: Tensor, fmt: Format, *, pow2: bool) -> Tensor:
    """The scale of a tensor, `scale_from_amax(amax(x), fmt, pow2=pow2)`, as it is best compiled.

    By operators that AOTAutograd's partition (torch 2.13) computes again in backward: with another
    one between them, it would save x in float32. In float64, as torchao has it, since Inductor's
    division of float32 numbers is not exact, and 448 / 1.75 a power of two only if it is.
    """
    largest = x.abs().amax().double().clamp(min=fmt.max * SMALLEST_INVERSE)
    scale = (fmt.max / largest).float()
    if not pow2:
        return scale
    return ((scale.view(torch.int32) >> 23) << 23).view(torch.float32)  # the exponent's bits


def turn(x: Tensor, operand: Operand, scale: Tensor, how: Tensorwise) -> Tensor:
    """Transposed codes [C, R] of an operand [R, C] under a scale that is known."""
    codes = (x.float() * scale).to(how.formats[operand].dtype)
    own = how.own and not torch.compiler.is_compiling()
    return transpose_codes(codes) if own else codes.t().contiguous()


def multiply(
    a: Tensor, b_t: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply codes [R, D] by [C, D], transposed: [R, D] @ [D, C] -> [R, C] in `dtype`.

    Args:
        inverse_a, inverse_b: one number each.
        fast: sums with fewer digits, as torchao's recipe has it in forward.
    """
    missing = -a.shape[1] % INNER_MULTIPLE  # of tokens, which wgrad contracts
    if missing:
        a, b_t = (nn.functional.pad(each, (0, missing)) for each in (a, b_t))
    return torch_scaled_mm(a, b_t.t(), inverse_a, inverse_b, dtype, fast=fast)  # [R, D] @ [D, C]


class WholeLinear(torch.autograd.Function):
    """`y = x Wᵀ` in three FP8 GEMMs, or two where the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, guesses: Tensor, how: Tensorwise) -> Tensor:
        """x [M, K], w [N, K] -> y [M, N] in the type of `x`."""
        xq, wq = cast_tensorwise(x, "x", guesses, how), cast_tensorwise(w, "w", guesses, how)
        kept = x if ctx.needs_input_grad[1] else None  # only wgrad needs x
        ctx.save_for_backward(kept, w, *xq[2:], *wq[2:], guesses)
        ctx.how = how
        return multiply(xq.codes, wq.codes, xq.inverse, wq.inverse, x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw [N, K]."""
        x, w, x_scale, x_inverse, w_scale, w_inverse, guesses = ctx.saved_tensors
        how, (wants_x, wants_w, *_) = ctx.how, ctx.needs_input_grad
        dx = dw = None
        gq = cast_tensorwise(g, "g", guesses, how, plain=wants_x, turned=wants_w)
        if wants_x:
            w_t = turn(w, "w", w_scale, how)
            # [M, N] @ [N, K]
            dx = multiply(gq.codes, w_t, gq.inverse, w_inverse, g.dtype)
        if wants_w:
            x_t = turn(x, "x", x_scale, how)
            # [N, M] @ [M, K]
            dw = multiply(gq.turned, x_t, gq.inverse, x_inverse, g.dtype)
            dw = of_type(dw, w.dtype)
        return dx, dw, None, None


# ------------------------------------------------------------------------------------------ SwiGLU


class WholeMlp(torch.autograd.Function):
    """`y = (silu(x Wgᵀ) · x Wuᵀ) Wdᵀ`: the products of `WholeLinear`, casts joined to SwiGLU.

    Its operators read gate, up and the gradient once, where a compiler (torch 2.13) reads them for
    an amax, and again for codes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor,
        gate_guesses: Tensor, up_guesses: Tensor, down_guesses: Tensor, how: Tensorwise,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """x [M, K], gate_w and up_w [F, K], down_w [K, F] -> y [M, K] in `dtype`."""
        ctx.how, ctx.dtype = how, x.dtype
        x = x.to(dtype)
        guesses = gate_guesses, up_guesses, down_guesses
        xq = cast_tensorwise(x, "x", gate_guesses, how)
        gate_q, up_q, down_q = (
            cast_tensorwise(w, "w", each, how)
            for w, each in zip((gate_w, up_w, down_w), guesses, strict=True)
        )
        gate, up = (
            multiply(xq.codes, wq.codes, xq.inverse, wq.inverse, x.dtype, fast=True)
            for wq in (gate_q, up_q)
        )
        codes, scale, inverse = swiglu_cast(
            gate, up, down_guesses, X, how.formats["x"], pow2=how.pow2
        )
        scales = *xq[2:], *gate_q[2:], *up_q[2:], *down_q[2:], scale, inverse
        ctx.save_for_backward(x, gate_w, up_w, down_w, gate, up, *scales, *guesses)
        return multiply(codes, down_q.codes, inverse, down_q.inverse, x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, K] -> dx [M, K] and the gradients of the weights."""
        how, (x, gate_w, up_w, down_w, gate, up, *rest) = ctx.how, ctx.saved_tensors
        *scales, scale, inverse, gate_guesses, up_guesses, down_guesses = rest
        of_x, of_gate, of_up, of_down = zip(scales[::2], scales[1::2], strict=True)
        gq = cast_tensorwise(g, "g", down_guesses, how, turned=True)
        # [M, K] @ [K, F]
        down_t = turn(down_w, "w", of_down[0], how)
        d_act = multiply(gq.codes, down_t, gq.inverse, of_down[1], g.dtype)
        act_t, *gradients = swiglu_backward_cast(
            d_act, gate, up, scale, (gate_guesses, up_guesses), G,
            how.formats["x"], how.formats["g"], pow2=how.pow2,
        )  # fmt: skip
        # [K, M] @ [M, F]
        d_down = multiply(gq.turned, act_t, gq.inverse, inverse, g.dtype)
        dx, found, x_t = None, [], turn(x, "x", of_x[0], how)
        for w, of_w, gq in ((gate_w, of_gate, gradients[0]), (up_w, of_up, gradients[1])):
            if ctx.needs_input_grad[0]:
                # [M, F] @ [F, K]
                w_t = turn(w, "w", of_w[0], how)
                part = multiply(gq.codes, w_t, gq.inverse, of_w[1], g.dtype)
                part = of_type(part, ctx.dtype)  # layers apart are added in the type of x, too
                dx = part if dx is None else dx + part
            # [F, M] @ [M, K]
            dw = multiply(gq.turned, x_t, gq.inverse, of_x[1], g.dtype)
            found.append(of_type(dw, w.dtype))
        return dx, *found, of_type(d_down, down_w.dtype), None, None, None, None, None


class WholeMixin(Fp8Mixin):
    """A linear layer that may multiply as `WholeLinear`.

    Attributes:
        fp8_whole: how it casts, None if otherwise.
        fp8_guesses: float32 [3], the last scales of x, w and g, on which no result depends.
    """

    fp8_whole: Tensorwise | None
    fp8_guesses: Tensor


def whole_linear(layer: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], w [N, K] -> [..., N], of what has the attributes of a `WholeMixin`."""
    if layer.fp8_guesses.device != x.device and not torch.compiler.is_compiling():
        layer.fp8_guesses = layer.fp8_guesses.to(x.device)
    y = WholeLinear.apply(as_rows(x), w, layer.fp8_guesses, layer.fp8_whole)
    return as_output(y, x, bias)


class MlpMixin(Swapped):
    """Mixin of an MLP with SwiGLU: one function of its layers where it is compiled.

    Uncompiled, as in the steps that are proven, its layers run one by one, and give the same bits.
    """

    keeps_name = True

    def forward(self, x: Tensor) -> Tensor:
        layers: list[Any] = [self.gate_proj, self.up_proj, self.down_proj]
        if not torch.compiler.is_compiling() or not all(map(_is_joinable, layers)):
            return super().forward(x)
        for layer in layers:
            layer.fp8_calls.count(x)
        weights = [weight_matrix(layer) for layer in layers]
        guesses = [layer.fp8_guesses for layer in layers]
        rows, how = x.reshape(-1, x.shape[-1]), layers[0].fp8_whole
        return as_output(WholeMlp.apply(rows, *weights, *guesses, how, compute_dtype(x)), x, None)


def _is_joinable(layer: Any) -> bool:
    """True for a layer that trains under scales that can be guessed, and adds nothing."""
    if not isinstance(layer, WholeMixin) or layer.fp8_whole is None or layer.bias is not None:
        return False
    guessed = layer.fp8_whole.own and layer.fp8_whole.pow2
    return guessed and layer.weight.requires_grad and layer.runs_low


def joinable_mlps(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """MLPs of a converted model that compute `FORMULA` with SiLU, and nothing else."""
    for module in modules:
        layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if all(map(_is_joinable, layers)) and _computes_swiglu(module):
            yield module


def _computes_swiglu(module: nn.Module) -> bool:
    if type(getattr(module, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return False
    try:
        lines = inspect.getsource(type(module).forward).strip().splitlines()
    except (OSError, TypeError):
        return False
    # `down_proj = ...; return down_proj`, or `return ...`.
    return len(lines) <= 3 and FORMULA in lines[1]
