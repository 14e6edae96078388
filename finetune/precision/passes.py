"""Forward passes of a model, and what is made for a compiled layer outside of its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from finetune.precision.backends.base import in_backward


class Passes:
    """Number of the running forward pass; a recomputation in backward belongs to the last one."""

    def __init__(self) -> None:
        self.number, self._inside = 0, False

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[None]:
        """Context of a call of the whole model, which is one pass."""
        before, self._inside = self._inside, True
        self.number += not before
        try:
            yield
        finally:
            self._inside = before

    def of_use(self, last: int | None) -> int:
        """Number of the pass in which something is used whose last use was in pass `last`.

        Parts of a model are called without the whole: a second use of one is then another pass.
        """
        if last == self.number and not self._inside and not in_backward():
            self.number += 1
        return self.number


def feed(
    layer: nn.Module, fact: str, values: Callable[[Tensor], Iterable[tuple[nn.Module, Any]]]
) -> None:
    """Set an attribute of modules before each call of the compiled layer that contains them.

    Tensors in attributes are inputs of a layer's graph, so what is made here runs outside of it.

    Args:
        fact: name of the attribute; () between calls, so that a graph of others makes its own.
        values: modules and their values, given the layer's first argument.
    """
    run: Any = layer._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        given = list(values(first))
        for module, value in given:
            module.__dict__[fact] = value
        try:
            return run(*args, **kwargs)
        finally:
            for module, _ in given:
                module.__dict__[fact] = ()

    layer._compiled_call_impl = call
