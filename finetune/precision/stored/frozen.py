"""Engine `frozen`: a linear layer that does not train, multiplied in FP8 as it is stored.

One copy of the weight, two GEMMs (`finetune.precision.numbers.weights`), no master. Siblings that
are fed the same tensor (q, k, v; gate, up) share its cast.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from finetune.precision import constants
from finetune.precision.engines.base import Engine, Fp8Mixin
from finetune.precision.model.plan import LayerPlan
from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.gemm import as_output, as_rows, compute_dtype
from finetune.precision.numbers.scaling import Operand
from finetune.precision.numbers.weights import Arithmetic, FrozenLinear, cast_operand
from finetune.precision.settings import PrecisionConfig
from finetune.precision.stored.linear import StoredMixin

Cast = tuple[Tensor, Tensor]
"""Codes of an activation [M, K], and their inverse scale."""


class SharedCast:
    """Cast of the last activation, shared by the layers with the same input."""

    def __init__(self) -> None:
        # Weak, so that this cache does not keep an activation alive.
        self._of: weakref.ref[Tensor] | None = None
        self._state: tuple[Any, ...] = ()
        self._cast: Cast | None = None
        self._bits: Tensor | None = None

    def __call__(self, x: Tensor, how: Arithmetic, dtype: torch.dtype) -> Cast:
        """Codes of `x` [..., K] as a matrix [M, K], cast from `dtype`."""
        # An inference tensor has no version, so nothing tells when it was overwritten.
        version = object() if x.is_inference() else x._version
        # The tile is of the weight alone, so layers with other tiles share a cast.
        state = (version, dtype, how.per_row, how.pow2)
        known = self._of is not None and self._of() is x and self._state == state
        if not known or self._cast is None:
            self._cast = _cast_rows(x, how, dtype)
            self._of, self._state, self._bits = weakref.ref(x, self._forget), state, None
        return self._cast

    def bits(self) -> Tensor:
        """Codes of the last activation in one byte each, saved once for backward."""
        assert self._cast is not None
        if self._bits is None:
            self._bits = self._cast[0].to(E4M3.dtype)
        return self._bits

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._of is gone:
            # A late callback of an earlier activation must not drop the cast of the present one.
            self._of = self._cast = self._bits = None


@torch.no_grad()
def _cast_rows(x: Tensor, how: Arithmetic, dtype: torch.dtype) -> Cast:
    # Not of `x.detach()`: in a compiled graph its view would be another node than the one that the
    # adapter multiplies, and Inductor would store x once for each.
    return cast_operand(x.reshape(-1, x.shape[-1]).to(dtype), how)


class FrozenMixin(Fp8Mixin):
    """Forward of a stored linear layer whose class this engine has swapped."""

    fp8_engine: FrozenEngine
    fp8_how: Arithmetic
    weight_scale: Tensor
    bits: Tensor

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        how, inverse, xq = self.fp8_how, self.weight_scale, (None, None)
        if "fprop" not in how.high:
            xq = self.fp8_engine.cast(x, how, compute_dtype(x))
        return as_output(FrozenLinear.apply(as_rows(x), *xq, w, inverse, how), x, bias)


class FrozenEngine(Engine):
    """Backend that multiplies stored layers in FP8.

    Attributes:
        how: arithmetic of its layers, each of which has a tile of its own.
    """

    name = "frozen"
    mixin = FrozenMixin

    def __init__(self, precision: PrecisionConfig, *, emulate: bool, triton: bool = True) -> None:
        super().__init__(precision)
        rowwise, pow2 = precision.facts.stored == "row", bool(precision.power_of_two_scales)
        # A frozen weight has no wgrad to keep in high precision.
        high = precision.gemms_kept_high - {"wgrad"}
        # Inductor joins a cast with the norm or activation before it, which moves fewer bytes than
        # casts apart; what it does not compile, or cannot join, runs in kernels of ours.
        own = precision.kernels in ("auto", "triton") and not emulate and triton
        self.how = Arithmetic(
            # Placeholder: `attributes` puts in the tile of each layer.
            tile=(1, 1),
            per_row=rowwise,
            pow2=pow2,
            emulate=emulate,
            in_bf16=pow2 or precision.emulation != "exact",
            high=high,
            fast_accum=constants.FAST_ACCUM,
            own=own,
            own_cast=own and precision.kernels == "triton",
        )
        self._shared = SharedCast()

    def cast(self, x: Tensor, how: Arithmetic, dtype: torch.dtype) -> Cast:
        """The cast of an activation [..., K], shared with the layer before if it had the same."""
        if torch.compiler.is_compiling():  # equal casts of one graph become one there
            return _cast_rows(x, how, dtype)
        return self._shared(x, how, dtype)

    def cast_and_keep(
        self, x: Tensor, how: Arithmetic, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, and what to keep of `x`: its codes in one byte each, None for `x` itself."""
        codes, inverse = self.cast(x, how, dtype)
        kept = None
        if constants.SAVED_INPUT == "fp8":
            compiling = torch.compiler.is_compiling()
            kept = codes.to(E4M3.dtype) if compiling else self._shared.bits()
        return codes, inverse, kept

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        assert isinstance(module, StoredMixin)
        how = self.how._replace(tile=module.stored_tile)
        return {"fp8_how": how}

    def as_cast(
        self, module: Any, operand: Operand, value: Tensor
    ) -> tuple[Tensor, PrecisionConfig]:
        if operand == "g" and module.weight_scale.numel() > 1:
            value = value.float() * module.weight_scale.t()
        rule = {"format": "e4m3", "power_of_two_scales": self.how.pow2}
        return value, self.precision.model_copy(update=rule)

    def effective(self) -> dict[str, Any]:
        return {
            "engine": "finetune emulation" if self.how.emulate else "torch._scaled_mm",
            "scaling": self.precision.scaling,
            "x": E4M3.name,
            "w": f"{E4M3.name}, stored",
            "g": E4M3.name,
            "power_of_two_scales": self.how.pow2,
            "high_gemms": sorted(self.how.high),
            "saved_input": constants.SAVED_INPUT,
            "fast_accum": self.how.fast_accum,
        }
