"""The calls of PyTorch that multiply two tensors, read as products with labels.

`torch.matmul(a, b)` is `...mk, ...kn -> ...mn`, `F.linear` is `...k, nk -> ...n`, an einsum says so
itself. Reading them all as labels leaves one kind of product to serve (`contraction`), whichever
operand is the weight and however it is turned.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from finetune.precision.contraction import Labels, Product


@dataclass(frozen=True)
class Call:
    """A call that multiplies `a` and `b`.

    Attributes:
        a, b: the operands in the call's order.
        of_a, of_b, of_y: labels of their dimensions and of the result's.
        bias: added to the last dimension by the call.
        added: added to the result by the call.
        ends: of a grouped product, where each group's rows of `a` end.
    """

    a: Tensor
    b: Tensor
    of_a: Labels
    of_b: Labels
    of_y: Labels
    bias: Tensor | None = None
    added: Tensor | None = None
    ends: Tensor | None = None

    def product(self, *, weight_first: bool) -> Product:
        """The product, `a` or `b` being the weight."""
        pair = (self.a, self.of_a), (self.b, self.of_b)
        (w, of_w), (x, of_x) = pair if weight_first else pair[::-1]
        return Product(x, w, of_x, of_w, self.of_y, self.bias, self.added)


def _matmul(a: Tensor, b: Tensor) -> Call | None:
    """`a @ b`, batch dimensions aligned on the right, vectors without m or n."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.dim() or not b.dim():
        return None
    heads = [*range(max(a.dim(), b.dim()) - 2)]
    of_a = (*heads[len(heads) - a.dim() + 2 :], "m", "k") if a.dim() > 1 else ("k",)
    of_b = (*heads[len(heads) - b.dim() + 2 :], "k", "n") if b.dim() > 1 else ("k",)
    of_y = (*heads, *("m" * (a.dim() > 1)), *("n" * (b.dim() > 1)))
    return Call(a, b, of_a, of_b, of_y)


def _flipped(b: Tensor, a: Tensor) -> Call | None:
    return _matmul(a, b)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    if weight.dim() != 2:
        return None
    heads = tuple(range(input.dim() - 1))
    return Call(input, weight, (*heads, "k"), ("n", "k"), (*heads, "n"), bias=bias)


def _addmm(input: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Call | None:
    call = _matmul(a, b)
    if call is None or beta != 1 or alpha != 1:
        return None
    return replace(call, added=input)


def _einsum(equation: Any, a: Any, b: Any = None) -> Call | None:
    operands = a if isinstance(a, (list, tuple)) else (a, b)
    if not isinstance(equation, str) or len(operands) != 2 or operands[1] is None:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    most = max(
        x.dim() - len(term) + 3 for x, term in zip(operands, terms, strict=True) if "..." in term
    ) if "..." in inputs else 0  # fmt: skip

    def labels(term: str, dim: int) -> Labels:
        before, dots, after = term.partition("...")
        count = dim - len(before) - len(after) if dots else 0
        return (*before, *range(most - count, most), *after)

    of_a, of_b = (labels(term, x.dim()) for x, term in zip(operands, terms, strict=True))
    if arrow:
        of_y = labels(output, len(output.replace("...", "")) + most)
    else:
        once = Counter(c for c in inputs if c.isalpha())
        of_y = (*range(most), *sorted(c for c, count in once.items() if count == 1))
    return Call(operands[0], operands[1], of_a, of_b, of_y)


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Call | None:
    """Rows of a [S, K] sorted by group, times b [groups, K, N]; without offsets, `bmm`."""
    if bias is not None or out_dtype is not None:
        return None
    if offs is None:
        return _matmul(mat_a, mat_b)
    if mat_a.dim() != 2 or mat_b.dim() != 3:
        return None
    return Call(mat_a, mat_b, ("s", "k"), ("e", "k", "n"), ("s", "n"), ends=offs)


@dataclass(frozen=True)
class Form:
    """How a function's arguments are called, in the order of its reader's."""

    reader: Callable[..., Call | None]
    names: tuple[str, ...]


@functools.cache
def products() -> dict[Any, Form]:
    """The functions that multiply two tensors."""
    from transformers.integrations import moe  # registers a grouped product of its own

    assert moe.ALL_EXPERTS_FUNCTIONS
    ops: Any = torch.ops.transformers
    added = ("mat1", "mat2", "beta", "alpha")
    batch_added = ("batch1", "batch2", "beta", "alpha")
    return {
        torch.matmul: Form(_matmul, ("input", "other")),
        Tensor.matmul: Form(_matmul, ("self", "other")),
        Tensor.__matmul__: Form(_matmul, ("self", "other")),
        Tensor.__rmatmul__: Form(_flipped, ("self", "other")),
        torch.mm: Form(_matmul, ("input", "mat2")),
        Tensor.mm: Form(_matmul, ("self", "mat2")),
        torch.bmm: Form(_matmul, ("input", "mat2")),
        Tensor.bmm: Form(_matmul, ("self", "mat2")),
        torch.mv: Form(_matmul, ("input", "vec")),
        Tensor.mv: Form(_matmul, ("self", "vec")),
        torch.addmm: Form(_addmm, ("input", *added)),
        Tensor.addmm: Form(_addmm, ("self", *added)),
        torch.baddbmm: Form(_addmm, ("input", *batch_added)),
        Tensor.baddbmm: Form(_addmm, ("self", *batch_added)),
        torch.einsum: Form(_einsum, ("equation", "a", "b")),
        F.linear: Form(_linear, ("input", "weight", "bias")),
        F.grouped_mm: Form(_grouped_mm, ("mat_a", "mat_b", "offs", "bias", "out_dtype")),
        torch._grouped_mm: Form(_grouped_mm, ("self", "mat2", "offs", "bias", "out_dtype")),
        ops.grouped_mm_fallback: Form(_grouped_mm, ("input", "weight", "offs")),
    }


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The product that a call of one of `products()` makes, None for a form that is not served."""
    form = products()[func]
    given = dict(zip(form.names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if value is not None}
    if len(args) > len(form.names) or not given.keys() <= set(form.names):
        return None
    parameters = inspect.signature(form.reader).parameters
    names = dict(zip(form.names, parameters, strict=True))
    return form.reader(**{names[name]: value for name, value in given.items()})
