"""What looks on while an engine multiplies: observers of GEMMs outside modules, counts of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from finetune.precision.model.swap import Swapped


def in_backward() -> bool:
    """True if autograd is running a backward, so that a forward is a recomputation."""
    # -1 outside the autograd engine.
    return torch._C._current_graph_task_id() != -1


class Observer(Protocol):
    """Observer of GEMMs by parameters or adapter matrices, for which no module is called."""

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """Enter a GEMM by the matrix of this name and shape (N, K)."""
        ...

    def leave(self) -> None:
        """Leave the GEMM."""
        ...

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """Register its gradients, which run in the autograd nodes between `y` and `inputs`."""
        ...


class ObservedMixin(Swapped):
    """Mixin for a module that multiplies by matrices outside modules; usually without observers."""

    fp8_name: str
    fp8_observers: list[Observer]
    keeps_name = True


class Hook:
    """A hook on a module that copies of it (deepcopy, pickle) do not have: theirs does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """The hook of a copy."""


class Owner(NamedTuple):
    """Name of a matrix that no module multiplies by, and the observers of its GEMMs."""

    name: str
    observers: list[Observer]


def multiplying(
    owner: Owner, w: Tensor, *, backward: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Report the GEMMs by `w` [N, K] in this block to its observers, if any."""
    if not owner.observers:  # also what `torch.compile` sees
        return contextlib.nullcontext()
    return _observed(owner, (w.shape[0], w.shape[1]), backward)


@contextlib.contextmanager
def _observed(owner: Owner, shape: tuple[int, int], backward: bool) -> Iterator[None]:
    for observer in owner.observers:
        observer.enter(owner.name, shape, backward)
    try:
        yield
    finally:
        for observer in owner.observers:
            observer.leave()


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors among a call's arguments or results, including lists one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, Tensor))


class CallCount:
    """Calls of one converted layer with gradients enabled.

    Attributes:
        ran: True if it was called in FP8 since this was last set to False.
        rows: tokens M of those calls; calls in compiled code do not count them.
        high: gradients that passed calls in high precision, since this was last set to 0.
        high_rows: tokens of those calls.
    """

    def __init__(self) -> None:
        self.ran, self.rows, self.high, self.high_rows = False, 0, 0, 0

    def count(self, x: Tensor) -> None:
        """Count a call in FP8 with the input x [..., K]."""
        if torch.is_grad_enabled():
            self.ran = True
            if not torch.compiler.is_compiling():
                self.rows += x.numel() // x.shape[-1]

    def watch(self, x: Tensor, y: Any) -> None:
        """Count a call in high precision, x [..., K] -> y, if a gradient passes it."""
        if not isinstance(y, Tensor) or not y.requires_grad or torch.compiler.is_compiling():
            return

        def passed(gradient: Tensor) -> None:
            self.high += 1
            self.high_rows += rows

        rows = x.numel() // x.shape[-1]
        y.register_hook(passed)
