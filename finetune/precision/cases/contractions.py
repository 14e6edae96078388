"""A product with a weight of any shape, as 2-D linear products `y[M,N] = x[M,K] · W[N,K]ᵀ`.

Every product of two tensors is an einsum, whichever call of PyTorch makes it: `torch.matmul(a, b)`
is `...mk, ...kn -> ...mn`, `F.linear` is `...k, nk -> ...n`. So calls are read as products with a
label for each dimension, and each label is one of four kinds:

    batch        in x, in W and in y    one product for each of its values
    contracted   in x and in W          together K
    of x         in x and in y          together M, the tokens
    of W         in W and in y          together N, the outputs

A batch label over which x is broadcast belongs to W: `x[T,D] · W[H,D,N]` is one product with H·N
outputs, not H products, and its dgrad then sums over heads inside the GEMM. One over which W is
broadcast belongs to x. What remains as batch is a loop; weights and inputs are unbound once, so
that backward stacks gradients instead of adding H tensors of full size. In grouped products
(experts) tokens come sorted by expert, and in gathered ones each row brings the number of its
expert; both are a loop over the experts that have tokens, and cost one synchronization with the
device.

Not a linear product, and refused: a label summed in one operand alone, repeated labels, three
operands, `out=`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

Labels = tuple[Hashable, ...]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [M, K], w [N, K], bias [N] or None -> y [M, N]."""


@dataclass(frozen=True)
class Product:
    """`y = x · w`, with a label for each dimension.

    Attributes:
        x, w: the operands; as read from a call in its order, for computing with the weight as `w`.
        of_x, of_w, of_y: labels of their dimensions; no label twice in one of them.
        bias: added by the product itself, [N].
        added: added to its result.
        ends: for a grouped product, the end of each group's rows of `x`.
    """

    x: Tensor
    w: Tensor
    of_x: Labels
    of_w: Labels
    of_y: Labels
    bias: Tensor | None = None
    added: Tensor | None = None
    ends: Tensor | None = None

    def exchanged(self) -> Product:
        """The same product with the operands in the other order."""
        return replace(self, x=self.w, w=self.x, of_x=self.of_w, of_w=self.of_x)

    def _shared(self, x: bool, w: bool, y: bool) -> Labels:
        """Labels that are in exactly these of the three."""
        of = self.of_x, self.of_w, self.of_y
        # In the order of y; what y has not, K, in that of w, for both operands.
        labels = self.of_y if y else self.of_w
        return tuple(i for i in labels if tuple(i in each for each in of) == (x, w, y))

    @property
    def batch(self) -> Labels:
        return self._shared(True, True, True)

    @property
    def contracted(self) -> Labels:
        return self._shared(True, True, False)

    @property
    def rows(self) -> Labels:
        return self._shared(True, False, True)

    @property
    def columns(self) -> Labels:
        return self._shared(False, True, True)

    @property
    def is_linear(self) -> bool:
        """True if labels are of the four kinds, and something is contracted."""
        labels = (self.of_x, self.of_w, self.of_y)
        repeated = any(len(set(group)) != len(group) for group in labels)
        # A label outside of the four kinds is summed in one operand alone.
        known = {*self.batch, *self.contracted, *self.rows, *self.columns}
        return not repeated and bool(self.contracted) and known == set().union(*labels)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of its 2-D products."""
        size = dict(zip(self.of_w, self.w.shape, strict=True))
        n, k = (math.prod(size[i] for i in group) for group in (self.columns, self.contracted))
        return n, k

    def narrowed(self) -> Product:
        """The same product, without batch labels over which one operand only repeats itself."""
        x, of_x, w, of_w = self.x, list(self.of_x), self.w, list(self.of_w)
        for label in self.batch:
            i, j = of_x.index(label), of_w.index(label)
            # Of size 1 in both, a label stays with x: a row, not another output.
            if _repeats(x, i) and w.shape[j] > 1:
                x = x.select(i, 0)
                del of_x[i]
            elif _repeats(w, j):
                w = w.select(j, 0)
                del of_w[j]
        return replace(self, x=x, w=w, of_x=tuple(of_x), of_w=tuple(of_w))

    def result(self, y: Tensor) -> Tensor:
        """Products [batch, M, N] in the result's shape, contiguous as a matmul's is."""
        size = dict(zip(self.of_x, self.x.shape, strict=True))
        size |= dict(zip(self.of_w, self.w.shape, strict=True))
        found = (*self.batch, *self.rows, *self.columns)
        y = y.reshape([size[label] for label in found])
        y = y.permute([found.index(label) for label in self.of_y]).contiguous()
        return y if self.added is None else y + self.added


def _repeats(x: Tensor, dim: int) -> bool:
    return x.shape[dim] == 1 or x.stride(dim) == 0


def _grouped(x: Tensor, labels: Labels, *groups: Labels) -> Tensor:
    """x with one dimension for each group of labels, of size 1 for an empty one."""
    size = dict(zip(labels, x.shape, strict=True))
    x = x.permute([labels.index(label) for group in groups for label in group])
    return x.reshape([math.prod(size[label] for label in group) for group in groups])


def contract(p: Product, linear: Linear) -> Tensor:
    """The result, each of its 2-D products made by `linear`."""
    x = _grouped(p.x, p.of_x, p.batch, p.rows, p.contracted)  # [batch, M, K]
    w = _grouped(p.w, p.of_w, p.batch, p.columns, p.contracted)  # [batch, N, K]
    if not p.batch:
        return p.result(linear(x[0], w[0], p.bias))  # [M, K] @ [K, N]
    pairs = zip(x.unbind(0), w.unbind(0), strict=True)
    # [M, K] @ [K, N] for each value of the batch
    return p.result(torch.stack([linear(x_MK, w_NK, p.bias) for x_MK, w_NK in pairs]))


def grouped(x: Tensor, w: Tensor, ends: Sequence[int], linear: Linear) -> Tensor:
    """Tokens x [S, K] sorted by expert, multiplied by their expert's weight in w [E, N, K].

    With `ends` [2, 5], rows 0 and 1 are of the first expert and 2 to 4 of the second. Rows past the
    last end belong to no expert and come out as 0. Returns [S, N].
    """
    starts = [0, *ends[:-1]]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    pieces = x.split([*sizes, x.shape[0] - ends[-1]])
    found = [
        linear(x_MK, w_NK, None)  # [M, K] @ [K, N], M the tokens of one expert
        for x_MK, w_NK in zip(pieces[:-1], w.unbind(0), strict=True)
        if x_MK.shape[0]
    ]
    if not found:  # keeps the result connected to both operands
        found = [linear(pieces[0], w[0], None)]
    rest = found[0].new_zeros(pieces[-1].shape[0], w.shape[1])
    return torch.cat([*found, rest])


def group_sizes(ends: Tensor, rows: int) -> list[int]:
    """Number of rows of each group, given their ends; one synchronization with the device.

    Fake tensors, as in rehearsals, have no values: their groups are even.
    """
    groups = len(ends)
    if isinstance(ends, FakeTensor):
        return [rows // groups + (i < rows % groups) for i in range(groups)]
    values = ends.tolist()
    return [end - start for start, end in zip([0, *values[:-1]], values, strict=True)]


def gathered(p: Product, source: Tensor, index: Tensor, linear: Linear) -> Tensor:
    """A product whose weight is `source[index]`, from `source`: each matrix is multiplied once.

    `source` is [E, ...] where `p.w` is [S, ...], of which the batch is the first label; `index` are
    S integers.
    """
    index = index.remainder(source.shape[0])  # negative ones count from the end
    # `tolist` is the synchronization with the device.
    ends = torch.bincount(index, minlength=source.shape[0]).cumsum(0).tolist()
    order = index.argsort(stable=True)
    x = _grouped(p.x, p.of_x, p.batch, p.rows, p.contracted)  # [S, M, K]
    w = _grouped(source, p.of_w, p.batch, p.columns, p.contracted)  # [E, N, K]
    rows = x.shape[1]
    # M rows for each index, so ends of indices become ends of rows.
    y = grouped(x[order].flatten(0, 1), w, [end * rows for end in ends], linear)
    # `order.argsort()` is the inverse permutation: back to the order of `index`.
    return p.result(y.unflatten(0, (-1, rows))[order.argsort()])  # [S, M, N]


# ------------------------------------------------------------- calls of PyTorch, read as products


def _matmul(a: Tensor, b: Tensor) -> Product | None:
    """`a @ b`, batch dimensions aligned on the right, vectors without m or n."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.dim() or not b.dim():
        return None
    # Batch labels are numbers, aligned on the right; each operand has the last ones.
    heads = [*range(max(a.dim(), b.dim()) - 2)]
    of_a = (*heads[len(heads) - a.dim() + 2 :], "m", "k") if a.dim() > 1 else ("k",)
    of_b = (*heads[len(heads) - b.dim() + 2 :], "k", "n") if b.dim() > 1 else ("k",)
    of_y = (*heads, *("m" * (a.dim() > 1)), *("n" * (b.dim() > 1)))
    return Product(a, b, of_a, of_b, of_y)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:
    if weight.dim() != 2:
        return None
    heads = tuple(range(input.dim() - 1))
    return Product(input, weight, (*heads, "k"), ("n", "k"), (*heads, "n"), bias=bias)


def _addmm(
    input: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1
) -> Product | None:
    product = _matmul(a, b)
    if product is None or beta != 1 or alpha != 1:
        return None
    return replace(product, added=input)


def _einsum(equation: Any, a: Any, b: Any = None) -> Product | None:
    operands = a if isinstance(a, (list, tuple)) else (a, b)
    if not isinstance(equation, str) or len(operands) != 2 or operands[1] is None:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    pairs = list(zip(operands, terms, strict=True))
    # Largest number of dimensions that "..." stands for; 3 is the length of the dots.
    most = max([x.dim() - len(term) + 3 for x, term in pairs if "..." in term], default=0)

    def labels(term: str, dim: int) -> Labels:
        before, dots, after = term.partition("...")
        count = dim - len(before) - len(after) if dots else 0
        # Numbers, which no letter equals; aligned on the right, as broadcasting has it.
        return (*before, *range(most - count, most), *after)

    of_a, of_b = (labels(term, x.dim()) for x, term in pairs)
    if arrow:
        of_y = labels(output, len(output.replace("...", "")) + most)
    else:
        # Without "->" those that occur once, in alphabetical order, as `torch.einsum` defines it.
        once = Counter(c for c in inputs if c.isalpha())
        of_y = (*range(most), *sorted(c for c, count in once.items() if count == 1))
    return Product(operands[0], operands[1], of_a, of_b, of_y)


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Product | None:
    """Rows of a [S, K] sorted by group, times b [groups, K, N]; without offsets, `bmm`."""
    if bias is not None or out_dtype is not None:
        return None
    if offs is None:
        return _matmul(mat_a, mat_b)
    if mat_a.dim() != 2 or mat_b.dim() != 3:
        return None
    return Product(mat_a, mat_b, ("s", "k"), ("e", "k", "n"), ("s", "n"), ends=offs)


@functools.cache
def products() -> dict[Any, tuple[Callable[..., Product | None], tuple[str, ...]]]:
    """Function that multiplies two tensors -> its reader, and the names of its arguments."""
    from transformers.integrations import moe  # registers a grouped product of its own

    assert moe.ALL_EXPERTS_FUNCTIONS
    ops: Any = torch.ops.transformers
    added = ("mat1", "mat2", "beta", "alpha")
    return {
        torch.matmul: (_matmul, ("input", "other")),
        Tensor.matmul: (_matmul, ("self", "other")),
        Tensor.__matmul__: (_matmul, ("self", "other")),
        torch.mm: (_matmul, ("input", "mat2")),
        Tensor.mm: (_matmul, ("self", "mat2")),
        torch.bmm: (_matmul, ("input", "mat2")),
        Tensor.bmm: (_matmul, ("self", "mat2")),
        torch.addmm: (_addmm, ("input", *added)),
        Tensor.addmm: (_addmm, ("self", *added)),
        torch.einsum: (_einsum, ("equation", "a", "b")),
        F.linear: (_linear, ("input", "weight", "bias")),
        F.grouped_mm: (_grouped_mm, ("mat_a", "mat_b", "offs", "bias", "out_dtype")),
        torch._grouped_mm: (_grouped_mm, ("self", "mat2", "offs", "bias", "out_dtype")),
        ops.grouped_mm_fallback: (_grouped_mm, ("input", "weight", "offs")),
    }


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """The product of a call of one of `products()`, operands in its order; None if not served."""
    reader, names = products()[func]
    given = dict(zip(names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if value is not None}
    if len(args) > len(names) or not given.keys() <= set(names):
        return None
    # Names of PyTorch's arguments -> those of the reader's, by position.
    parameters = dict(zip(names, inspect.signature(reader).parameters, strict=False))
    return reader(**{parameters[name]: value for name, value in given.items()})
