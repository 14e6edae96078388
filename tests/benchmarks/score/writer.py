"""Writes the operators of a transformer's parts without running them, forward and backward.

What a trace would show for a decoder's norm, linear, rotary embedding, gated unit and adapter, as
eager Transformers and PyTorch launch them. Which of these operators share a kernel is for
`speed.operators` to say; so the same list serves eager and compiled layers.

Shapes: M tokens, K inputs, N outputs of a linear.
Sources: transformers 4.4x-5.x `models/llama/modeling_llama.py`, peft `tuners/lora/layer.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.benchmarks.score.casts import Casts, Fp8
from tests.benchmarks.score.records import Records, Tensor


class Linear(NamedTuple):
    """A linear `[N, K]` of the model.

    Attributes:
        name: its module.
        weight: as held.
        packed: bytes of its codes, which are unpacked to BF16 for each product (0: not packed).
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


class Writer(Records):
    """Writes the parts.

    Args:
        once, turn_codes, weights_cast: see `Casts`.
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
        super().__init__()
        self.casts = Casts(self, once=once, turn_codes=turn_codes, weights_cast=weights_cast)
        self.adapter_dtype = adapter_dtype

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
            x8, sx = self.casts.cast(x, to.fp8, at=to.base)
            w8, sw = self.casts.weight(to.weight, to.fp8, at=to.base)
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

    def _scaled(self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, n: int, *, at: str) -> Tensor:
        out = self.tensor(a.shape[0], n)
        self.op("aten._scaled_mm.default", (a, b, sa, sb), (out,), at)
        return out

    def _fp8_backward(self, g: Tensor, x: Tensor, to: Linear) -> Tensor:
        how, at = to.fp8, to.base
        assert how
        g8, sg = self.casts.cast(g, how, at=at)
        w8, sw = self.casts.weight(to.weight, how, at=at, turned=True)
        dx = self._scaled(g8, w8, sg, sw, to.weight.shape[1], at=at)
        if to.trained:
            gt8, sgt = self.casts.cast(g, how, at=at, turned=True)
            xt8, sxt = self.casts.cast(x, how, at=at, turned=True)
            self._scaled(gt8, xt8, sgt, sxt, to.weight.shape[1], at=at)
        return dx
