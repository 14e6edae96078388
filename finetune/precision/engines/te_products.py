"""Casts and products of Transformer Engine as operators of torch, opaque to `torch.compile`.

    te_cast(x, rule, operand, both)          x [R, C] -> the buffers of its codes and inverse scales
    te_cast_delayed(x, scale, history, ...)  the same by a scale of the past; records the amax
    te_mm(a, b, bias, rule, layout, ...)     two lists of buffers -> [M, N]

Under current scales of whole tensors that are powers of two, `whole` casts, to the same bits: the
engine reads a number twice, in four kernels; that one nearly always once, in two.

A layer of the engine cannot be traced (its casts write into states of a process), so in a decoder
layer each one would break the graph. As operators they leave one graph, in which norms, RoPE,
SwiGLU and residuals are fused, and in which q, k and v share the codes of their input: equal calls
become one. Uncompiled layers call the same operators: what is proven is what is compiled.

A quantized tensor crosses the boundary as its buffers, in the order in which the engine describes
them to compilers (`Quantizer.inner_tensor_specs`); what else it is follows from the rule. A rule
is named, not passed, since operators take plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.precision.engines import whole
from finetune.precision.numbers.gemm import compute_dtype
from finetune.precision.numbers.scaling import Operand

LAYOUTS: dict[str, tuple[Operand, Operand]] = {
    "TN": ("w", "x"),  # fprop: y = x Wᵀ
    "NN": ("w", "g"),  # dgrad: dx = g W
    "NT": ("x", "g"),  # wgrad: dW = gᵀ x
}
"""Layout of a product, as of a column-major BLAS -> its operands A and B."""
ACCUMULATES = {"TN": ("fprop", False), "NN": ("dgrad", True), "NT": ("wgrad", True)}
"""Layout -> name of the recipe's setting for it, and whether partial sums are added up outside of
the tensor core where a recipe does not say (`_2X_ACC_*` of TE 2.20)."""
SLOTS: dict[Operand, int] = {"x": 0, "w": 1, "g": 0}
"""Column of an operand in the engine's delayed states, of forward or of backward."""


class TeRule:
    """Quantizers of a recipe, the same for every layer.

    Attributes:
        name: by which operators find it.
        rows, columns: operand -> places of its row-wise and column-wise buffers in a cast of both.
        own: how kernels of ours cast, None where the engine does.
    """

    def __init__(
        self, name: str, recipe: Any, quantizers: dict[Operand, Any], how: Any,
        own: whole.Tensorwise | None,
    ) -> None:  # fmt: skip
        """`how`: quantizers that describe the buffers, where `quantizers` do not (delayed)."""
        self.name, self.own = name, own
        self.split = {
            layout: getattr(getattr(recipe, f"fp8_gemm_{gemm}", None), "use_split_accumulator", by)
            for layout, (gemm, by) in ACCUMULATES.items()
        }
        self.quantizers: dict[tuple[Operand, bool, bool], Any] = {}
        self.names: dict[tuple[Operand, bool, bool], tuple[str, ...]] = {}
        for operand, quantizer in (how or quantizers).items():
            for usage in ((True, False), (False, True), (True, True)):
                one = quantizer.copy()
                one.set_usage(rowwise=usage[0], columnwise=usage[1])
                self.quantizers[operand, *usage] = one
                self.names[operand, *usage] = tuple(one.inner_tensor_specs((128, 128)))
        self.rows = {operand: self._places(operand, (True, False)) for operand in quantizers}
        self.columns = {operand: self._places(operand, (False, True)) for operand in quantizers}
        self.delayed = quantizers if how else {}

    def _places(self, operand: Operand, usage: tuple[bool, bool]) -> tuple[int, ...]:
        every = self.names[operand, True, True]
        return tuple(every.index(name) for name in self.names[operand, *usage])

    def tensor(self, operand: Operand, columnwise: bool, buffers: list[Tensor], dtype: Any) -> Any:
        """The engine's tensor of these buffers, of one direction."""
        key = operand, not columnwise, columnwise
        quantizer, inner = self.quantizers[key], dict(zip(self.names[key], buffers, strict=True))
        context = quantizer.create_metadata((), dtype=dtype)  # internal tensors know no shape
        return context["cls"].__tensor_unflatten__(inner, context, (), None)


RULES: dict[str, TeRule] = {}
"""Rules that operators find by name; one for each recipe of the process."""

_library = torch.library.Library("finetune", "FRAGMENT")
_library.define("te_cast(Tensor x, str rule, str operand, bool both) -> Tensor[]")
_library.define(
    "te_cast_delayed(Tensor x, Tensor scale, Tensor(a!) history, str rule, str operand, bool both)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "te_mm(Tensor[] a, Tensor[] b, Tensor? bias, str rule, str layout, SymInt m, SymInt n, "
    "ScalarType dtype) -> Tensor"
)


def _cast(x: Tensor, rule: str, operand: Operand, both: bool) -> list[Tensor]:
    key = operand, True, both
    made = RULES[rule].quantizers[key](x.contiguous())
    return [getattr(made, name) for name in RULES[rule].names[key]]


def _empty_cast(x: Tensor, rule: str, operand: Operand, both: bool) -> list[Tensor]:
    specs = RULES[rule].quantizers[operand, True, both].inner_tensor_specs(tuple(x.shape))
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in specs.values()]


def _cast_delayed(
    x: Tensor, scale: Tensor, history: Tensor, rule: str, operand: Operand, both: bool
) -> tuple[Tensor, ...]:
    slot = SLOTS[operand]
    quantizer = RULES[rule].delayed[operand].copy()
    quantizer.scale, quantizer.amax = scale[slot], history[0, slot].reshape(1)
    quantizer.set_usage(rowwise=True, columnwise=both)
    made = quantizer(x.contiguous())
    transpose = getattr(made, "_transpose", None)
    # Blackwell multiplies by codes in either direction, and its casts write none transposed.
    none = made._data.new_empty(0) if transpose is None else transpose
    return made._data, none, made._scale_inv


def _empty_cast_delayed(
    x: Tensor, scale: Tensor, history: Tensor, rule: str, operand: Operand, both: bool
) -> tuple[Tensor, ...]:
    buffers = _empty_cast(x, rule, operand, both)
    none = () if len(buffers) == 3 else (x.new_empty(0, dtype=torch.uint8),)
    return (buffers[0], *none, *buffers[1:])


def _mm(
    a: list[Tensor],
    b: list[Tensor],
    bias: Tensor | None,
    rule: str,
    layout: str,
    m: int,
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    found, (first, second) = RULES[rule], LAYOUTS[layout]
    return general_gemm(
        found.tensor(first, layout[0] == "N", a, dtype),
        found.tensor(second, layout[1] == "T", b, dtype),
        out_dtype=dtype, layout=layout, bias=bias, grad=layout != "TN",
        use_split_accumulator=found.split[layout],
    )[0]  # fmt: skip


def _empty_mm(a: list[Tensor], *rest: Any) -> Tensor:
    m, n, dtype = rest[-3:]
    return a[0].new_empty((m, n), dtype=dtype)


for _name, _real, _empty in (
    ("te_cast", _cast, _empty_cast),
    ("te_cast_delayed", _cast_delayed, _empty_cast_delayed),
    ("te_mm", _mm, _empty_mm),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    _library.impl(_name, _empty, "Meta")


def cast_buffers(
    x: Tensor, rule: TeRule, operand: Operand, both: bool, state: Sequence[Tensor | None]
) -> list[Tensor]:
    """Buffers of `x` [R, C], row-wise or in both directions.

    `state`: scale and history of delayed scaling; for casts of ours the last scales, and None.
    """
    scale, history = state
    if rule.own is not None and scale is not None:
        turned = both and rule.rows[operand] != rule.columns[operand]  # alike on Blackwell
        made = whole.cast_tensorwise(x, operand, scale, rule.own, turned=turned)
        codes = (made.codes, made.turned) if turned else (made.codes,)
        return [*(each.view(torch.uint8) for each in codes), made.inverse.reshape(1)]
    if scale is None:
        return torch.ops.finetune.te_cast(x, rule.name, operand, both)
    codes, transpose, inverse = torch.ops.finetune.te_cast_delayed(
        x, scale, history, rule.name, operand, both
    )
    return [codes, transpose, inverse] if transpose.numel() else [codes, inverse]


class TeLinear(torch.autograd.Function):
    """`y = x Wᵀ + b`, with casts and products of Transformer Engine."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        rule: TeRule,
        high: bool,
        saves: bool,
        dtype: torch.dtype,
        scale: Tensor | None,
        history: Tensor | None,
        g_scale: Tensor | None,
        g_history: Tensor | None,
    ) -> Tensor:
        """x [M, K], w [N, K], bias [N] -> [M, N] in `dtype`.

        Args:
            high: dgrad and wgrad are multiplied in high precision.
            saves: False where no backward follows: column-wise codes are not made.
            scale, history, g_scale, g_history: states of forward and backward, as `cast_buffers`
                takes them.
        """
        needs_x, needs_w = ctx.needs_input_grad[:2]
        low, state = saves and not high, (scale, history)
        xq = cast_buffers(x, rule, "x", low and needs_w, state)
        wq = cast_buffers(w, rule, "w", low and needs_x, state)
        m, n = x.shape[0], w.shape[0]
        x_rows = _part(xq, rule.rows["x"], low and needs_w)
        w_rows = _part(wq, rule.rows["w"], low and needs_x)
        # [M, K] @ [K, N]
        y = torch.ops.finetune.te_mm(w_rows, x_rows, bias, rule.name, "TN", m, n, dtype)
        ctx.rule, ctx.high, ctx.state = rule, high, (g_scale, g_history)
        ctx.types = x.dtype, w.dtype, None if bias is None else bias.dtype
        ctx.shapes = x.shape, w.shape
        x_saved: list[Tensor] = []
        w_saved: list[Tensor] = []
        if saves and needs_w:
            x_saved = [x] if high else _part(xq, rule.columns["x"], True)
        if saves and needs_x:
            w_saved = [w] if high else _part(wq, rule.columns["w"], True)
        ctx.saved_of_x = len(x_saved)
        ctx.save_for_backward(*x_saved, *w_saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor):
        """g [M, N] -> dx [M, K], dw [N, K], db [N]."""
        rule, saved = ctx.rule, ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        xs, ws = list(saved[: ctx.saved_of_x]), list(saved[ctx.saved_of_x :])
        (m, k), (n, _) = ctx.shapes
        dx = dw = None
        db = g.sum(0).to(ctx.types[2]) if needs_b else None
        if ctx.high:
            dx = g @ ws[0].to(g.dtype) if needs_x else None  # [M, N] @ [N, K]
            dw = g.t() @ xs[0].to(g.dtype) if needs_w else None  # [N, M] @ [M, K]
        else:
            mm = torch.ops.finetune.te_mm
            gq = cast_buffers(g, rule, "g", needs_w, ctx.state)
            if needs_x:
                rows = _part(gq, rule.rows["g"], needs_w)
                dx = mm(ws, rows, None, rule.name, "NN", m, k, g.dtype)  # [M, N] @ [N, K]
            if needs_w:
                columns = _part(gq, rule.columns["g"], True)
                dw = mm(xs, columns, None, rule.name, "NT", n, k, g.dtype)  # [N, M] @ [M, K]
        dx = None if dx is None else dx.to(ctx.types[0])
        dw = None if dw is None else dw.to(ctx.types[1])
        return dx, dw, db, *(None,) * 8


def _part(buffers: list[Tensor], places: tuple[int, ...], both: bool) -> list[Tensor]:
    """The buffers of one direction out of a cast of both; a cast of rows has no others."""
    return [buffers[place] for place in places] if both else list(buffers)


def te_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rule: TeRule,
    *,
    high: bool,
    states: Sequence[Tensor | None],
) -> Tensor:
    """x [M, K], w [N, K], bias [N] -> [M, N]; `states`: see `TeLinear.forward`."""
    dtype = compute_dtype(x)
    if bias is not None:  # cuBLAS adds no float32 bias to an FP8 product
        bias = bias.to(torch.bfloat16 if dtype is torch.float32 else dtype)
    saves = torch.is_grad_enabled()
    return TeLinear.apply(x, w, bias, rule, high, saves, dtype, *states)
