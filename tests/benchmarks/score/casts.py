"""How the operands of FP8 products are made: scales, casts and transposes, recipe by recipe.

    tensorwise   one scale per tensor, from its own maximum: a pass to find it, a pass to cast
    rowwise      one scale per row; what backward needs transposed has a scale per column instead
    delayed      Transformer Engine: a scale known from earlier steps, both layouts in one pass
    blocks       MXFP8: one scale per 32 neighbours, known as they are read
    frozen       a base that is kept in FP8, one scale per output channel; activations row by row

Products read their second operand along K, so each product of backward wants a transposed copy.
Sources: torchao `float8/float8_linear.py`, `float8/float8_scaling_utils.py`; Transformer Engine
`pytorch/module/linear.py`.
"""

from __future__ import annotations

from typing import Literal

from tests.benchmarks.score.records import Records, Tensor

FP8 = "float8_e4m3fn"
Fp8 = Literal["tensorwise", "rowwise", "delayed", "blocks", "frozen"]


class Casts:
    """Writes casts on records, and remembers them.

    Args:
        on: where operators are written.
        once: whether equal casts of one tensor are done once (a compiler removes the others).
        turn_codes: whether what backward needs transposed is made from the FP8 codes of before (as
            hand-written programs do) and not cast again from BF16 (as torchao does).
        weights_cast: whether FP8 weights are there in both layouts already.
    """

    def __init__(self, on: Records, *, once: bool, turn_codes: bool, weights_cast: bool) -> None:
        self.on = on
        self._once = once
        self._turn_codes = turn_codes
        self._weights_cast = weights_cast
        self._casts: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def both_layouts(self, weight: Tensor, how: Fp8, *, at: str) -> None:
        """Both FP8 layouts of a weight, once per update."""
        for turned in (False, True):
            self.cast(weight, how, at=at, turned=turned)

    def weight(
        self, weight: Tensor, how: Fp8, *, at: str, turned: bool = False
    ) -> tuple[Tensor, Tensor]:
        """A weight `[N, K]` in FP8, cast now, or kept since before in FP8."""
        n, k = weight.shape
        if self._weights_cast:
            n, k = (k, n) if turned else (n, k)
            return self.on.tensor(n, k, dtype=FP8), self.on.tensor(1, dtype="float32")
        if how != "frozen":
            return self.cast(weight, how, at=at, turned=turned)
        codes = Tensor(weight.storage, (n, k), FP8, n * k)
        scale = self.on.tensor(n, dtype="float32")
        if not turned:
            return codes, scale
        out = self.on.tensor(k, n, dtype=FP8)
        self.on.op("aten.clone.default", (codes,), (out,), at)
        return out, scale

    def cast(self, x: Tensor, how: Fp8, *, at: str, turned: bool = False) -> tuple[Tensor, Tensor]:
        """x in FP8 (transposed, where asked) and its scale: of all, of each row, or per block."""
        key = (x.storage, how, turned, self.on.phase)
        if (self._once or how == "delayed") and key in self._casts:
            return self._casts[key]
        if turned and self._turn_codes and how == "tensorwise":
            for phase in (self.on.phase, "forward"):
                before = self._casts.get((x.storage, how, False, phase))
                if before:
                    out = self.on.tensor(*x.shape[::-1], dtype=FP8)
                    self.on.op("aten.clone.default", before[:1], (out,), at)
                    return out, before[1]
        shape = x.shape[::-1] if turned else x.shape
        if how == "delayed":
            return self._cast_transpose(x, turned, at)
        if how == "blocks":  # the largest of 32 neighbours is known where they are read
            scale = self.on.tensor(shape[0], -(-shape[1] // 32), dtype="float8_e8m0fnu")
            out = self.on.tensor(*shape, dtype=FP8)
            self.on.op("aten._to_copy.default", (x,), (out, scale), at)
        else:
            scale = self._scale(x, how, turned, at)
            wide = self.on.map("_to_copy.default", x, at=at, dtype="float32")
            wide = self.on.map("mul.Tensor", wide, scale, at=at)
            wide = self.on.map("clamp.default", wide, at=at)
            if turned:
                flat = self.on.tensor(*shape, dtype=FP8)
                self.on.op("aten._to_copy.default", (wide,), (flat,), at)
                out = flat
            else:
                out = self.on.map("_to_copy.default", wide, at=at, dtype=FP8)
        self._casts[key] = (out, scale)
        return out, scale

    def _cast_transpose(self, x: Tensor, turned: bool, at: str) -> tuple[Tensor, Tensor]:
        """Transformer Engine's kernel: both layouts in one pass, the scale known from before."""
        scale = self.on.tensor(1, dtype="float32")
        straight, flat = (
            self.on.tensor(*x.shape, dtype=FP8),
            self.on.tensor(*x.shape[::-1], dtype=FP8),
        )
        name = "transformer_engine.cast_transpose.default"
        self.on.op(name, (x, scale), (straight, flat), at)
        for phase in (self.on.phase, "backward"):
            self._casts[x.storage, "delayed", False, phase] = (straight, scale)
            self._casts[x.storage, "delayed", True, phase] = (flat, scale)
        return (flat if turned else straight), scale

    def _scale(self, x: Tensor, how: Fp8, turned: bool, at: str) -> Tensor:
        size = self.on.map("abs.default", x, at=at)
        if how in ("rowwise", "frozen"):
            reduce = self.on.columns if turned else self.on.rows
            most = reduce("amax.default", size, at=at)
        else:
            key = (x.storage, "amax", self.on.phase)
            if self._once and key in self._casts:
                return self._casts[key][1]
            most = self.on.tensor(1, dtype=x.dtype)
            self.on.op("aten.max.default", (size,), (most,), at)
        wide = self.on.map("_to_copy.default", most, at=at, dtype="float32")
        scale = self.on.map("reciprocal.default", self.on.map("clamp.default", wide, at=at), at=at)
        scale = self.on.map("mul.Scalar", scale, at=at)
        if how == "tensorwise":
            self._casts[x.storage, "amax", self.on.phase] = (scale, scale)
        return scale
