"""A frozen linear layer in FP8: one copy of the weight, two GEMMs, no master.

A weight that does not train needs `y = x Wᵀ` and the input gradient `dx = g W`, and neither a
weight gradient nor a cast per step. So it is held only as E4M3 codes with one float32 scale per
output channel (`finetune.precision.weights`: w ≈ diag(s) · q), and both GEMMs start from them:

    fprop   y  = (x̂ · qᵀ) scaled by s_x[m] · s[n]         x cast per token
    dgrad   dx = (ĝ · q)  scaled by s_g[m]                 g · diag(s) cast per token

dgrad contracts the output channels, along which the scales differ, and FP8 GEMMs take no scale
along the contracted dimension. Folding the scales into the gradient before it is cast is exact
algebra, and leaves the same codes to serve both GEMMs. Gradients are E4M3 as well: a scale per
token covers their range, and E5M2 would cost a digit. (With one scale per tensor there is nothing
to fold.) Scales follow the current amax: delayed ones would stand still in a module that does not
train.

On FP8 GPUs `torch._scaled_mm` multiplies; elsewhere the emulated GEMM does, from the same codes,
and differs in the order of accumulation. Hopper and Ada multiply FP8 only with the contracted
dimension innermost in both operands, so dgrad transposes the codes into a scratch of one layer.

Siblings that are fed the same tensor (q, k, v; gate, up) share its cast.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.config.schema import Gemm, PrecisionConfig
from finetune.precision.backends.base import Backend, Fp8Mixin, compute_dtype
from finetune.precision.formats import E4M3, amax, decode_bits, scale_from_amax
from finetune.precision.gemm import Codes, scaled_mm
from finetune.precision.planner import LayerPlan
from finetune.precision.scaling import scaled, to_codes
from finetune.precision.stored import StoredMixin
from finetune.precision.weights import Tile, dequantize_weight


class Arithmetic(NamedTuple):
    """Arithmetic of the two GEMMs of one frozen layer.

    Attributes:
        tile: tile of the stored weight that shares a scale.
        per_row: True if x and g are cast per token, else per tensor.
        pow2: True if their scales are powers of two.
        emulate: True for codes in BF16, else `torch._scaled_mm`.
        in_bf16: True if the emulated GEMM may be a BF16 one (see `gemm.scaled_mm`).
        high: GEMMs that stay in high precision, from the dequantized weight.
    """

    tile: Tile
    per_row: bool = True
    pow2: bool = False
    emulate: bool = True
    in_bf16: bool = True
    high: frozenset[Gemm] = frozenset()


class Operand(NamedTuple):
    """A cast operand [M, C].

    Attributes:
        values: E4M3 for `torch._scaled_mm`, or BF16 numbers on its grid for the emulation.
        inverse: float32, undoes the cast: [M, 1], or one number.
    """

    values: Tensor
    inverse: Tensor

    def bits(self) -> Tensor:
        """The codes in one byte each, saved for backward."""
        return self.values.to(E4M3.dtype)


def cast(x: Tensor, how: Arithmetic) -> Operand:
    """Codes of an activation or gradient [M, C] under its current amax."""
    scale = scale_from_amax(amax(x, 1 if how.per_row else None), E4M3, pow2=how.pow2)
    wide = scaled(x, scale)
    values = to_codes(wide, E4M3) if how.emulate else wide.to(E4M3.dtype)
    return Operand(values, scale.reciprocal())


def multiply(
    a: Operand, bits: Tensor, inverse: Tensor, how: Arithmetic, dtype: torch.dtype
) -> Tensor:
    """Multiply a cast operand by stored codes: [M, C] @ [C, D] -> [M, D] in `dtype`.

    Args:
        a: [M, C].
        bits: uint8 [C, D], in any layout.
        inverse: float32 inverse scale of each column, [1, D], or one number.
    """
    if how.emulate:
        b = Codes(decode_bits(bits), inverse, E4M3, how.in_bf16)
        return scaled_mm(Codes(*a, E4M3, how.in_bf16), b, dtype)  # [M, C] @ [C, D]
    if how.per_row:
        inverse = inverse.expand(1, bits.shape[1]).contiguous()
    # The kernel with a scale per row has BF16 results only, and is slow without fast accumulation.
    out = torch.bfloat16 if how.per_row else dtype
    y = torch._scaled_mm(  # [M, C] @ [C, D]
        a.values,
        _column_major(bits).view(E4M3.dtype),
        scale_a=a.inverse,
        scale_b=inverse if how.per_row else inverse.reshape(()),
        out_dtype=out,
        use_fast_accum=how.per_row,
    )
    return y.to(dtype)


def _column_major(b: Tensor) -> Tensor:
    return b if b.stride(0) == 1 else b.t().contiguous().t()


def fprop(x: Tensor, xq: Operand | None, bits: Tensor, inverse: Tensor, how: Arithmetic) -> Tensor:
    """`x Wᵀ`: x [M, K] and its cast, bits [N, K], inverse scales of the weight -> [M, N]."""
    if "fprop" in how.high:
        return x @ dequantize_weight(bits, inverse, how.tile, x.dtype).t()  # [M, K] @ [K, N]
    assert xq is not None
    return multiply(xq, bits.t(), inverse.t(), how, x.dtype)  # [M, K] @ [K, N]


def dgrad(g: Tensor, bits: Tensor, inverse: Tensor, how: Arithmetic) -> Tensor:
    """`g W`: g [M, N], bits [N, K], inverse scales of the weight -> [M, K]."""
    if "dgrad" in how.high:
        return g @ dequantize_weight(bits, inverse, how.tile, g.dtype)  # [M, N] @ [N, K]
    if inverse.numel() == 1:
        return multiply(cast(g, how), bits, inverse, how, g.dtype)  # [M, N] @ [N, K]
    folded = cast(g.float() * inverse.t(), how)
    return multiply(folded, bits, inverse.new_ones(1, 1), how, g.dtype)  # [M, N] @ [N, K]


class FrozenLinear(torch.autograd.Function):
    """`y = x Wᵀ` with a stored weight: two GEMMs, and only the weight's codes are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        x_inverse: Tensor | None,
        bits: Tensor,
        inverse: Tensor,
        how: Arithmetic,
    ) -> Tensor:
        """x [M, K], its cast, bits [N, K] -> y [M, N] in the type of `x`."""
        ctx.save_for_backward(bits, inverse)
        ctx.how = how
        return fprop(x, operand(values, x_inverse), bits, inverse, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K]."""
        bits, inverse = ctx.saved_tensors
        return dgrad(g, bits, inverse, ctx.how), None, None, None, None, None


def operand(values: Tensor | None, inverse: Tensor | None) -> Operand | None:
    """The operand of a cast, None where there was none."""
    return None if values is None or inverse is None else Operand(values, inverse)


class SharedCast:
    """Cast of the last activation, shared by the layers with the same input."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._state: tuple[Any, ...] = ()
        self._operand: Operand | None = None
        self._bits: Tensor | None = None

    def __call__(self, x: Tensor, how: Arithmetic, dtype: torch.dtype) -> Operand:
        """Codes of `x` [..., K] as a matrix [M, K], cast from `dtype`."""
        version = -1 if x.is_inference() else x._version
        state = (version, dtype, how.per_row, how.pow2)
        known = self._of is not None and self._of() is x and self._state == state
        if not known or self._operand is None:
            with torch.no_grad():
                self._operand = cast(x.detach().reshape(-1, x.shape[-1]).to(dtype), how)
            self._of, self._state, self._bits = weakref.ref(x, self._forget), state, None
        return self._operand

    def bits(self) -> Tensor:
        """Codes of the last operand in one byte each, saved once for backward."""
        assert self._operand is not None
        if self._bits is None:
            self._bits = self._operand.bits()
        return self._bits

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._of is gone:
            self._of = self._operand = self._bits = None


class FrozenMixin(Fp8Mixin):
    """Forward of a stored linear layer whose class this backend has swapped."""

    fp8_backend: FrozenBackend
    fp8_how: Arithmetic
    weight_scale: Tensor

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        rows, how = x.reshape(-1, x.shape[-1]).to(dtype), self.fp8_how
        xq = (None, None) if "fprop" in how.high else self.fp8_backend.cast(x, how, dtype)
        y = FrozenLinear.apply(rows, *xq, w, self.weight_scale, how)
        y = y if bias is None else y + bias.to(dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class FrozenBackend(Backend):
    """Backend that multiplies stored layers in FP8."""

    name = "frozen"
    mixin = FrozenMixin

    def __init__(self, precision: PrecisionConfig, *, emulate: bool) -> None:
        super().__init__(precision)
        self.emulate = emulate
        self._shared = SharedCast()

    def cast(self, x: Tensor, how: Arithmetic, dtype: torch.dtype) -> Operand:
        """The cast of an activation [..., K], shared with the layer before if it had the same."""
        if torch.compiler.is_compiling():  # equal casts of one graph become one there
            return cast(x.detach().reshape(-1, x.shape[-1]).to(dtype), how)
        return self._shared(x, how, dtype)

    def cast_and_keep(
        self, x: Tensor, how: Arithmetic, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, and what to keep of `x`: its codes in one byte each, None for `x` itself."""
        xq = self.cast(x, how, dtype)
        kept = None
        if self.precision.saved_input == "fp8":
            kept = xq.bits() if torch.compiler.is_compiling() else self._shared.bits()
        return xq.values, xq.inverse, kept

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        assert isinstance(module, StoredMixin)
        return {"fp8_how": self.arithmetic(module.stored_tile)}

    def arithmetic(self, tile: Tile) -> Arithmetic:
        """Arithmetic of a layer with this storage."""
        p = self.precision
        pow2 = bool(p.power_of_two_scales)
        return Arithmetic(
            tile=tile,
            per_row=p.scaling == "rowwise",
            pow2=pow2,
            emulate=self.emulate,
            in_bf16=pow2 or p.emulation != "exact",
            high=p.gemms_kept_high - {"wgrad"},
        )

    def as_cast(
        self, module: Any, operand: Literal["x", "w", "g"], value: Tensor
    ) -> tuple[Tensor, PrecisionConfig]:
        rule = {"format": "e4m3", "power_of_two_scales": bool(self.precision.power_of_two_scales)}
        if operand == "g" and module.weight_scale.numel() > 1:
            value = value.float() * module.weight_scale.t()
        return value, self.precision.model_copy(update=rule)

    def effective(self) -> dict[str, Any]:
        p = self.precision
        return {
            "engine": "finetune emulation" if self.emulate else "torch._scaled_mm",
            "scaling": p.scaling,
            "x": E4M3.name,
            "w": f"{E4M3.name}, held",
            "g": E4M3.name,
            "power_of_two_scales": bool(p.power_of_two_scales),
            "high_gemms": sorted(p.gemms_kept_high - {"wgrad"}),
            "saved_input": p.saved_input,
        }
