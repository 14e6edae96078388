"""A product with a weight of any shape, as 2-D linear products `y[M,N] = x[M,K] · W[N,K]ᵀ`.

Every product of two tensors is an einsum, and each of its labels is one of four kinds:

    batch        in x, in W and in y    one product for each of its values
    contracted   in x and in W          together K
    of x         in x and in y          together M, the tokens
    of W         in W and in y          together N, the outputs

A batch label over which x is broadcast belongs to W: `x[T,D] · W[H,D,N]` is one product with H·N
outputs, not H products, and its dgrad then sums over heads inside the GEMM. One over which W is
broadcast belongs to x. What remains as batch is a loop; weights and inputs are unbound once, so
that backward stacks gradients instead of adding H tensors of full size. In grouped products
(experts) tokens come sorted by expert, and in gathered ones each row brings the number of its
expert; both are a loop over the experts that have tokens, and cost one synchronisation with the
device.

Not a linear product, and refused: a label summed in one operand alone, repeated labels, three
operands, `out=`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Labels = tuple[Hashable, ...]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [M, K], w [N, K], bias [N] or None -> y [M, N]."""


@dataclass(frozen=True)
class Product:
    """`y = x · w`, with a label for each dimension.

    Attributes:
        x, w: the operands; `w` is the weight.
        of_x, of_w, of_y: labels of their dimensions; no label twice in one of them.
        bias: added by the product itself, [N].
        added: added to its result.
    """

    x: Tensor
    w: Tensor
    of_x: Labels
    of_w: Labels
    of_y: Labels
    bias: Tensor | None = None
    added: Tensor | None = None

    @property
    def batch(self) -> Labels:
        """Labels of all three."""
        return tuple(i for i in self.of_y if i in self.of_x and i in self.of_w)

    @property
    def contracted(self) -> Labels:
        """Labels of both operands and not of the result."""
        return tuple(i for i in self.of_w if i in self.of_x and i not in self.of_y)

    @property
    def rows(self) -> Labels:
        """Labels of x and the result."""
        return tuple(i for i in self.of_y if i in self.of_x and i not in self.of_w)

    @property
    def columns(self) -> Labels:
        """Labels of w and the result."""
        return tuple(i for i in self.of_y if i in self.of_w and i not in self.of_x)

    @property
    def is_linear(self) -> bool:
        """Whether labels are of the four kinds, and something is contracted."""
        labels = (self.of_x, self.of_w, self.of_y)
        repeated = any(len(set(group)) != len(group) for group in labels)
        known = {*self.batch, *self.contracted, *self.rows, *self.columns}
        return not repeated and bool(self.contracted) and known == set().union(*labels)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of its 2-D products."""
        size = dict(zip(self.of_w, self.w.shape, strict=True))
        return (
            math.prod(size[i] for i in self.columns),
            math.prod(size[i] for i in self.contracted),
        )

    def narrowed(self) -> Product:
        """The same product, without batch labels over which one operand only repeats itself."""
        x, of_x, w, of_w = self.x, list(self.of_x), self.w, list(self.of_w)
        for label in self.batch:
            i, j = of_x.index(label), of_w.index(label)
            if _repeats(x, i) and w.shape[j] > 1:
                x = x.select(i, 0)
                del of_x[i]
            elif _repeats(w, j):
                w = w.select(j, 0)
                del of_w[j]
        return replace(self, x=x, w=w, of_x=tuple(of_x), of_w=tuple(of_w))


def _repeats(x: Tensor, dim: int) -> bool:
    return x.shape[dim] == 1 or x.stride(dim) == 0


def contract(product: Product, linear: Linear) -> Tensor:
    """The result, each of its 2-D products made by `linear`; contiguous, as a matmul's is."""
    p = product
    size = dict(zip(p.of_x, p.x.shape, strict=True)) | dict(zip(p.of_w, p.w.shape, strict=True))
    x = _grouped(p.x, p.of_x, p.batch, p.rows, p.contracted)
    w = _grouped(p.w, p.of_w, p.batch, p.columns, p.contracted)
    if not p.batch:
        y = linear(x[0], w[0], p.bias)
    else:
        pairs = zip(x.unbind(0), w.unbind(0), strict=True)
        y = torch.stack([linear(x_MK, w_NK, p.bias) for x_MK, w_NK in pairs])
    found = (*p.batch, *p.rows, *p.columns)
    y = y.reshape([size[label] for label in found])
    y = y.permute([found.index(label) for label in p.of_y]).contiguous()
    return y if p.added is None else y + p.added


def _grouped(x: Tensor, labels: Labels, *groups: Labels) -> Tensor:
    """x with one dimension for each group of labels, of size 1 for an empty one."""
    x = x.permute([labels.index(label) for group in groups for label in group])
    sizes, at = [], 0
    for group in groups:
        sizes.append(math.prod(x.shape[at : at + len(group)]))
        at += len(group)
    return x.reshape(sizes)


def grouped(x: Tensor, w: Tensor, ends: Sequence[int], linear: Linear) -> Tensor:
    """Tokens sorted by expert, each multiplied by its expert's weight.

    Args:
        x: [S, K].
        w: [E, N, K].
        ends: where each expert's tokens end; rows past the last are nobody's and come out as 0.
        linear: makes the 2-D products.

    Returns:
        [S, N].
    """
    starts = [0, *ends[:-1]]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    pieces = x.split([*sizes, x.shape[0] - ends[-1]])
    found = [
        linear(x_MK, w_NK, None)
        for x_MK, w_NK in zip(pieces[:-1], w.unbind(0), strict=True)
        if x_MK.shape[0]
    ]
    if not found:  # keeps the result connected to both operands
        found = [linear(pieces[0], w[0], None)]
    nobodys = found[0].new_zeros(pieces[-1].shape[0], w.shape[1])
    return torch.cat([*found, nobodys])


def gathered(product: Product, source: Tensor, index: Tensor, linear: Linear) -> Tensor:
    """A product whose weight is `source[index]`, from `source`: each matrix is multiplied once.

    Args:
        product: its first weight label is the batch, of size S.
        source: [E, ...] where `product.w` is [S, ...].
        index: integers [S].
        linear: makes the 2-D products.
    """
    p = product
    index = index.remainder(source.shape[0])
    ends = torch.bincount(index, minlength=source.shape[0]).cumsum(0).tolist()
    order = index.argsort(stable=True)
    x = _grouped(p.x, p.of_x, p.batch, p.rows, p.contracted)  # [S, M, K]
    w = _grouped(source, p.of_w, p.batch, p.columns, p.contracted)  # [E, N, K]
    rows = x.shape[1]
    y = grouped(x[order].flatten(0, 1), w, [end * rows for end in ends], linear)
    y = y.unflatten(0, (-1, rows))[order.argsort()]  # [S, M, N]
    found = (*p.batch, *p.rows, *p.columns)
    size = dict(zip(p.of_w, source.shape, strict=True)) | dict(zip(p.of_x, p.x.shape, strict=True))
    y = y.reshape([size[label] for label in found])
    y = y.permute([found.index(label) for label in p.of_y]).contiguous()
    return y if p.added is None else y + p.added
