"""Writes the operators of a transformer's parts without running them, forward and backward.

What a trace would show for a decoder's norm, linear, rotary embedding, gated unit and loss, as eager
Transformers and PyTorch launch them, on records of the same form as the tape's (`tape.Op`), made
without torch: a data type is its name. Which of these operators share a kernel is for fusion.py to
say; so the same list serves eager and compiled layers.

Shapes: M tokens, K inputs, N outputs of a linear, V columns of the vocabulary.
Sources: transformers 4.4x-5.x `models/llama/modeling_llama.py`, peft `tuners/lora/layer.py`,
torchao `float8/float8_linear.py` and `float8_scaling_utils.py`, torch `optim/adamw.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from finetune.estimator.tape import Op

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1}
FP8 = "float8_e4m3fn"
Fp8 = Literal["tensorwise", "rowwise", "delayed", "blocks", "frozen"]


class Tensor(NamedTuple):
    """A record of a tensor, of the form of `tape.Operand`."""

    storage: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class _Op(NamedTuple):
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    phase: str
    module: str


class Linear(NamedTuple):
    """A linear `[N, K]` of the model.

    Attributes:
        name: its module.
        weight: as held.
        packed: bytes of its codes where they are unpacked to BF16 for each product (0: they are not).
        trained: whether it has a weight gradient.
        fp8: how its operands become FP8, None for BF16.
        rank: of its adapter, 0 for none.
    """

    name: str
    weight: Tensor
    packed: int = 0
    trained: bool = True
    fp8: Fp8 | None = None
    rank: int = 0

    @property
    def base(self) -> str:
        """The module that multiplies: inside of the one that carries an adapter."""
        return f"{self.name}.base_layer" if self.rank else self.name


class Writer:
    """Collects operators.

    Args:
        once: whether equal casts of one tensor are done once (a compiler removes the others).
        turn_codes: whether what backward needs transposed is made from the FP8 codes of before (as
            hand-written programs do) and not cast again from BF16 (as torchao does).
        weights_cast: whether FP8 weights are there in both layouts already.
        adapter_dtype: of the adapters' products.
    """

    def __init__(
        self,
        *,
        once: bool = False,
        turn_codes: bool = False,
        weights_cast: bool = False,
        adapter_dtype: str = "bfloat16",
    ) -> None:
        self.phase = "forward"
        self.adapter_dtype = adapter_dtype
        self._ops: list[_Op] = []
        self._next = 0
        self._once = once
        self._turn_codes = turn_codes
        self._weights_cast = weights_cast
        self._casts: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def take(self) -> list[Op]:
        """The operators written so far, which are then forgotten."""
        ops, self._ops = self._ops, []
        return cast("list[Op]", ops)

    def tensor(self, *shape: int, dtype: str = "bfloat16") -> Tensor:
        """A new tensor."""
        self._next += 1
        count = 1
        for size in shape:
            count *= size
        return Tensor(self._next, shape, dtype, count * ITEMSIZE[dtype])

    def op(self, name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], at: str) -> None:
        """Write one operator."""
        self._ops.append(_Op(name, tuple(inputs), tuple(outputs), self.phase, at))

    def map(self, name: str, *inputs: Tensor, at: str, dtype: str = "") -> Tensor:
        """A pointwise operator: the result has the shape and dtype of the first input."""
        out = self.tensor(*inputs[0].shape, dtype=dtype or inputs[0].dtype)
        self.op(f"aten.{name}", inputs, (out,), at)
        return out

    def rows(self, name: str, x: Tensor, *, at: str) -> Tensor:
        """A reduction over the last dimension."""
        out = self.tensor(*x.shape[:-1], 1, dtype=x.dtype)
        self.op(f"aten.{name}", (x,), (out,), at)
        return out

    def columns(self, name: str, x: Tensor, *, at: str) -> Tensor:
        """A reduction over the first dimension."""
        out = self.tensor(1, *x.shape[1:], dtype=x.dtype)
        self.op(f"aten.{name}", (x,), (out,), at)
        return out

    def product(self, a: Tensor, b: Tensor, n: int, *, at: str, dtype: str = "bfloat16") -> Tensor:
        """`[M, K] x [K, N]`."""
        out = self.tensor(a.shape[0], n, dtype=dtype)
        self.op("aten.mm.default", (a, b), (out,), at)
        return out

    # -------------------------------------------------------------------------------------- norms

    def rms_norm(self, x: Tensor, *, at: str) -> Tensor:
        """As Transformers writes it: in float32, in eight operators."""
        wide = self.map("_to_copy.default", x, at=at, dtype="float32")
        mean = self.rows("mean.dim", self.map("pow.Tensor_Scalar", wide, at=at), at=at)
        inverse = self.map("rsqrt.default", self.map("add.Scalar", mean, at=at), at=at)
        scaled = self.map("mul.Tensor", wide, inverse, at=at)
        narrow = self.map("_to_copy.default", scaled, at=at, dtype=x.dtype)
        return self.map("mul.Tensor", narrow, self.tensor(x.shape[-1], dtype=x.dtype), at=at)

    def rms_norm_backward(self, g: Tensor, x: Tensor, *, trained: bool, at: str) -> Tensor:
        """What autograd makes of it."""
        scaled = self.map("mul.Tensor", g, self.tensor(x.shape[-1], dtype=x.dtype), at=at)
        if trained:
            self.columns("sum.dim_IntList", self.map("mul.Tensor", g, x, at=at), at=at)
        wide = self.map("_to_copy.default", scaled, at=at, dtype="float32")
        kept = self.tensor(*x.shape, dtype="float32")
        inverse = self.tensor(*x.shape[:-1], 1, dtype="float32")
        direct = self.map("mul.Tensor", wide, inverse, at=at)
        inner = self.rows("sum.dim_IntList", self.map("mul.Tensor", wide, kept, at=at), at=at)
        inner = self.map("mul.Tensor", self.map("pow.Tensor_Scalar", inner, at=at), at=at)
        spread = self.map("div.Scalar", kept, inner, at=at)
        doubled = self.map("mul.Scalar", self.map("mul.Tensor", spread, kept, at=at), at=at)
        total = self.map("add.Tensor", direct, doubled, at=at)
        return self.map("_to_copy.default", total, at=at, dtype=x.dtype)

    def layer_norm(self, x: Tensor, *, at: str) -> Tensor:
        """One kernel."""
        return self.map("native_layer_norm.default", x, at=at)

    def layer_norm_backward(self, g: Tensor, x: Tensor, *, at: str) -> Tensor:
        """One kernel over rows, one over columns."""
        self.columns("sum.dim_IntList", self.map("mul.Tensor", g, x, at=at), at=at)
        return self.map("_fused_rms_norm_backward.default", g, x, at=at)

    # ------------------------------------------------------------------------------------- rotary

    def rotary(self, x: Tensor, table: Tensor, *, at: str) -> Tensor:
        """`x cos + rotate_half(x) sin`, `[M, heads D]`."""
        turned = self.map("cat.default", self.map("neg.default", x, at=at), at=at)
        a = self.map("mul.Tensor", x, table, at=at)
        b = self.map("mul.Tensor", turned, table, at=at)
        return self.map("add.Tensor", a, b, at=at)

    def rotary_backward(self, g: Tensor, table: Tensor, *, at: str) -> Tensor:
        """The transpose; slices' gradients are padded with zeros and added."""
        a = self.map("mul.Tensor", g, table, at=at)
        b = self.map("mul.Tensor", g, table, at=at)
        padded = self.map("constant_pad_nd.default", self.map("neg.default", b, at=at), at=at)
        other = self.map("constant_pad_nd.default", b, at=at)
        both = self.map("add.Tensor", padded, other, at=at)
        return self.map("add.Tensor", a, both, at=at)

    # ------------------------------------------------------------------------------------ linears

    def linear(self, x: Tensor, to: Linear) -> Tensor:
        """`y = x Wᵀ`, with the adapter's branch."""
        n = to.weight.shape[0]
        if to.fp8:
            x8, sx = self._cast(x, to.fp8, at=to.base)
            w8, sw = self._weight(to)
            y = self._scaled(x8, w8, sx, sw, n, at=to.base)
        else:
            y = self.product(x, self._unpack(to), n, at=to.base)
        return self._adapter(x, y, to) if to.rank else y

    def linear_backward(self, g: Tensor, x: Tensor, to: Linear) -> Tensor:
        """`dx = g W`, and `dW = gᵀ x` where the weight is trained."""
        n, k = to.weight.shape
        if to.fp8:
            dx = self._fp8_backward(g, x, to)
        else:
            dx = self.product(g, self._unpack(to), k, at=to.base)
            if to.trained:
                turned = Tensor(g.storage, (n, g.shape[0]), g.dtype, g.nbytes)
                self.product(turned, x, k, at=to.base)
        return self._adapter_backward(g, x, dx, to) if to.rank else dx

    def _unpack(self, to: Linear) -> Tensor:
        if not to.packed:
            return to.weight
        codes = Tensor(to.weight.storage, (to.packed,), "uint8", to.packed)
        wide = self.tensor(*to.weight.shape)
        self.op("bitsandbytes.dequantize_4bit.default", (codes,), (wide,), to.base)
        return wide

    # ----------------------------------------------------------------------------------- adapters

    def _adapter(self, x: Tensor, y: Tensor, to: Linear) -> Tensor:
        a, b, dtype = f"{to.name}.lora_A.default", f"{to.name}.lora_B.default", self.adapter_dtype
        inner, weight = x, self.tensor(to.rank, x.shape[1], dtype=dtype)
        if dtype != x.dtype:
            inner = self.map("_to_copy.default", x, at=to.name, dtype=dtype)
        low = self.product(inner, weight, to.rank, at=a, dtype=dtype)
        high = self.product(
            low, self.tensor(to.rank, y.shape[1], dtype=dtype), y.shape[1], at=b, dtype=dtype
        )
        scaled = self.map("mul.Tensor", high, at=to.name)
        total = self.map("add.Tensor", y, scaled, at=to.name, dtype=dtype)
        if dtype == y.dtype:
            return total
        return self.map("_to_copy.default", total, at=to.name, dtype=y.dtype)

    def _adapter_backward(self, g: Tensor, x: Tensor, dx: Tensor, to: Linear) -> Tensor:
        at, dtype, rank = to.name, self.adapter_dtype, to.rank
        (m, k), n = x.shape, g.shape[1]
        if dtype != g.dtype:
            g = self.map("_to_copy.default", g, at=at, dtype=dtype)
            x = self.tensor(m, k, dtype=dtype)
        g = self.map("mul.Tensor", g, at=at)
        low = self.tensor(m, rank, dtype=dtype)
        a, b = f"{at}.lora_A.default", f"{at}.lora_B.default"
        down = self.product(g, self.tensor(n, rank, dtype=dtype), rank, at=b, dtype=dtype)
        turned = Tensor(g.storage, (n, m), dtype, g.nbytes)
        self.product(turned, low, rank, at=b, dtype=dtype)
        inner = self.product(down, self.tensor(rank, k, dtype=dtype), k, at=a, dtype=dtype)
        turned = Tensor(down.storage, (rank, m), dtype, down.nbytes)
        self.product(turned, x, k, at=a, dtype=dtype)
        if dtype != dx.dtype:
            inner = self.map("_to_copy.default", inner, at=at, dtype=dx.dtype)
        return self.map("add.Tensor", dx, inner, at=at)

    # ---------------------------------------------------------------------------------------- FP8

    def cast_weight(self, weight: Tensor, how: Fp8, *, at: str) -> None:
        """Both FP8 layouts of a weight, once per update."""
        for turned in (False, True):
            self._cast(weight, how, at=at, turned=turned)

    def _scaled(self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, n: int, *, at: str) -> Tensor:
        out = self.tensor(a.shape[0], n)
        self.op("aten._scaled_mm.default", (a, b, sa, sb), (out,), at)
        return out

    def _fp8_backward(self, g: Tensor, x: Tensor, to: Linear) -> Tensor:
        how, at = to.fp8, to.base
        assert how
        g8, sg = self._cast(g, how, at=at)
        w8, sw = self._weight(to, turned=True)
        dx = self._scaled(g8, w8, sg, sw, to.weight.shape[1], at=at)
        if to.trained:
            gt8, sgt = self._cast(g, how, at=at, turned=True)
            xt8, sxt = self._cast(x, how, at=at, turned=True)
            self._scaled(gt8, xt8, sgt, sxt, to.weight.shape[1], at=at)
        return dx

    def _weight(self, to: Linear, *, turned: bool = False) -> tuple[Tensor, Tensor]:
        """The FP8 weight, cast now, or kept since before in FP8."""
        if self._weights_cast:
            n, k = to.weight.shape[::-1] if turned else to.weight.shape
            return self.tensor(n, k, dtype=FP8), self.tensor(1, dtype="float32")
        if to.fp8 != "frozen":
            return self._cast(to.weight, to.fp8 or "tensorwise", at=to.base, turned=turned)
        n, k = to.weight.shape
        codes = Tensor(to.weight.storage, (n, k), FP8, n * k)
        scale = self.tensor(n, dtype="float32")
        if not turned:
            return codes, scale
        out = self.tensor(k, n, dtype=FP8)
        self.op("aten.clone.default", (codes,), (out,), to.base)
        return out, scale

    def _cast(self, x: Tensor, how: Fp8, *, at: str, turned: bool = False) -> tuple[Tensor, Tensor]:
        """x in FP8 (transposed, where asked) and its scale: of all, of each row, or per block."""
        key = (x.storage, how, turned, self.phase)
        if (self._once or how == "delayed") and key in self._casts:
            return self._casts[key]
        if turned and self._turn_codes and how == "tensorwise":
            for phase in (self.phase, "forward"):
                before = self._casts.get((x.storage, how, False, phase))
                if before:
                    out = self.tensor(*x.shape[::-1], dtype=FP8)
                    self.op("aten.clone.default", before[:1], (out,), at)
                    return out, before[1]
        shape = x.shape[::-1] if turned else x.shape
        if how == "delayed":
            return self._cast_transpose(x, turned, at)
        if how == "blocks":  # the largest of 32 neighbours is known where they are read
            scale = self.tensor(shape[0], -(-shape[1] // 32), dtype="float8_e8m0fnu")
            out = self.tensor(*shape, dtype=FP8)
            self.op("aten._to_copy.default", (x,), (out, scale), at)
        else:
            scale = self._scale(x, how, turned, at)
            wide = self.map("_to_copy.default", x, at=at, dtype="float32")
            wide = self.map("mul.Tensor", wide, scale, at=at)
            wide = self.map("clamp.default", wide, at=at)
            if turned:
                flat = self.tensor(*shape, dtype=FP8)
                self.op("aten._to_copy.default", (wide,), (flat,), at)
                out = flat
            else:
                out = self.map("_to_copy.default", wide, at=at, dtype=FP8)
        self._casts[key] = (out, scale)
        return out, scale

    def _cast_transpose(self, x: Tensor, turned: bool, at: str) -> tuple[Tensor, Tensor]:
        """Transformer Engine's kernel: both layouts in one pass, the scale known from before."""
        scale = self.tensor(1, dtype="float32")
        straight, flat = self.tensor(*x.shape, dtype=FP8), self.tensor(*x.shape[::-1], dtype=FP8)
        name = "transformer_engine.cast_transpose.default"
        self.op(name, (x, scale), (straight, flat), at)
        for phase in (self.phase, "backward"):
            self._casts[x.storage, "delayed", False, phase] = (straight, scale)
            self._casts[x.storage, "delayed", True, phase] = (flat, scale)
        return (flat if turned else straight), scale

    def _scale(self, x: Tensor, how: Fp8, turned: bool, at: str) -> Tensor:
        size = self.map("abs.default", x, at=at)
        if how in ("rowwise", "frozen"):
            most = (
                self.columns("amax.default", size, at=at)
                if turned
                else self.rows("amax.default", size, at=at)
            )
        else:
            key = (x.storage, "amax", self.phase)
            if self._once and key in self._casts:
                return self._casts[key][1]
            most = self.tensor(1, dtype=x.dtype)
            self.op("aten.max.default", (size,), (most,), at)
        wide = self.map("_to_copy.default", most, at=at, dtype="float32")
        scale = self.map("reciprocal.default", self.map("clamp.default", wide, at=at), at=at)
        scale = self.map("mul.Scalar", scale, at=at)
        if how == "tensorwise":
            self._casts[x.storage, "amax", self.phase] = (scale, scale)
        return scale
