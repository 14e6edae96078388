"""Operators written down without running them, in records of the same form as the tape's.

Made without torch: a data type is its name. Shapes: M tokens, K inputs, N outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1}


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


class Records:
    """Collects operators; `phase` is of those written next."""

    def __init__(self) -> None:
        self.phase = "forward"
        self._ops: list[_Op] = []
        self._next = 0

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
