"""Interface of an FP8 engine to the converter: a mixin to swap in, and hooks of a step."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from finetune.errors import ConfigError
from finetune.precision.model.plan import LayerPlan
from finetune.precision.model.swap import Swapped, weight_matrix
from finetune.precision.numbers.scaling import Operand
from finetune.precision.settings import PrecisionConfig


def in_backward() -> bool:
    """True if autograd is running a backward, so that a forward is a recomputation."""
    # -1 outside the autograd engine.
    return torch._C._current_graph_task_id() != -1


# -------------------------------------------------------------------- observers, counts of calls


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


class Tally:
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


# --------------------------------------------------------------------------------- the engine


class Fp8Mixin(Swapped):
    """Mixin before a linear layer's own class: training runs in FP8.

    Evaluation and generation stay in high precision unless `precision.eval=fp8`.
    """

    multiplies = True
    fp8_backend: Backend
    fp8_tally: Tally
    weight: nn.Parameter
    bias: nn.Parameter | None

    def tally_of(self, layer: LayerPlan) -> Tally:
        """Calls of a planned layer, or parameter, of this module."""
        return self.fp8_tally

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, Fp8Mixin):  # accelerate keeps a root's forward after a revert
            return type(self).forward(self, input)
        if not self.runs_low or input.numel() == 0:  # an expert without tokens has no scale
            y = self.plain_class.forward(self, input)
            if input.numel():
                self.fp8_tally.watch(input, y)
            return y
        self.fp8_tally.count(input)
        return self.fp8_linear(input, weight_matrix(self), self.bias)

    @property
    def runs_low(self) -> bool:
        """True if a call now runs in FP8: in training, or evaluation with `precision.eval=fp8`."""
        return self.fp8_backend.runs_low(self)

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K], w [N, K] (a view of the parameter) -> [..., N]."""
        raise AssertionError("each backend's mixin defines fp8_linear")


def restore(target: Tensor, tensors: dict[str, Tensor], name: str) -> None:
    """Copy stored scaling state into `target`.

    Raises:
        ConfigError: the state was stored under another configuration.
    """
    stored = tensors.get(name)
    if stored is None or stored.shape != target.shape:
        shape = "nothing" if stored is None else f"shape {tuple(stored.shape)}"
        raise ConfigError(
            "the checkpoint's FP8 scaling state belongs to another configuration",
            where=f"{name}: stored {shape}, needed {tuple(target.shape)}",
            why="scales of another history length, scaling or model cannot be taken over",
            fix="resume with the precision section of the run that saved it (its config.yaml)",
        )
    target.copy_(stored)


class Backend:
    """An FP8 engine.

    Attributes:
        name: value of `precision.backend`; of engines of codes `frozen` and `fp8_params`.
        mixin: mixin of converted layers.
        conversion: what reverts its layers, alive as long as one of them is.
    """

    conversion: Any = None
    name: ClassVar[str]
    mixin: ClassVar[type[Fp8Mixin]]

    def __init__(self, precision: PrecisionConfig) -> None:
        self.precision = precision
        self._low: bool | None = None

    def runs_low(self, module: nn.Module) -> bool:
        """True if a call of a module of this backend runs in FP8 now."""
        if self._low is not None:
            return self._low
        return module.training or self.precision.eval == "fp8"

    @contextlib.contextmanager
    def computing(self, *, low: bool) -> Iterator[None]:
        """Compute in FP8 or in high precision, whatever the modules' mode and `precision.eval`."""
        before, self._low = self._low, low
        try:
            yield
        finally:
            self._low = before

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        """Attributes of the converted module, besides `fp8_backend`."""
        return {}

    def linear(self, module: nn.Module, layer: LayerPlan) -> Callable[..., Tensor]:
        """`fp8_linear` for a planned parameter of `module`, which has no layer to swap.

        Returns:
            Function of x [..., K], w [N, K] (view of the parameter), bias [N] or None -> [..., N].
        """
        facts = types.SimpleNamespace(fp8_backend=self, **self.attributes(module, layer))
        return functools.partial(self.mixin.fp8_linear, facts)  # pyright: ignore[reportArgumentType]

    def release(self, model: nn.Module) -> None:
        """Leave a model whose layers are plain again."""

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Context around the model's forward."""
        return contextlib.nullcontext()

    def begin_step(self) -> None:
        """Begin a training forward (not a recomputation, not an evaluation)."""

    def unrecorded(self) -> contextlib.AbstractContextManager[None]:
        """Context of a call that is no part of training, and moves no scale of a later one."""
        return contextlib.nullcontext()

    def scale_in_force(self, module: nn.Module, operand: Operand) -> Tensor | None:
        """The current delayed scale of this operand, None without delayed scaling."""
        return None

    def as_cast(
        self, module: nn.Module, operand: Operand, value: Tensor
    ) -> tuple[Tensor, PrecisionConfig]:
        """The operand as it is cast, and its scaling rule."""
        return value, self.precision

    def effective(self) -> dict[str, Any]:
        """The recipe in force, as the engine itself reports it."""
        raise AssertionError("each backend reports its recipe")

    @property
    def has_state(self) -> bool:
        """True if scales or random numbers carry over from one step to the next."""
        return bool(self.precision.rule.state)

    def state_tensors(self) -> dict[str, Tensor]:
        """Scaling state to store with a checkpoint, so that resuming is exact."""
        return {}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state_tensors`."""
