"""Interface of an FP8 engine to the converter: a mixin to swap in, and hooks of a step."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from finetune.errors import ConfigError
from finetune.precision.engines.observers import CallCount
from finetune.precision.model.plan import LayerPlan
from finetune.precision.model.swap import Swapped, weight_matrix
from finetune.precision.numbers.scaling import Operand
from finetune.precision.settings import PrecisionConfig


class Fp8Mixin(Swapped):
    """Mixin before a linear layer's own class: training runs in FP8.

    Evaluation and generation stay in high precision unless `precision.eval=fp8`.
    """

    multiplies = True
    fp8_engine: Engine
    fp8_calls: CallCount
    weight: nn.Parameter
    bias: nn.Parameter | None

    def calls_of(self, layer: LayerPlan) -> CallCount:
        """Calls of a planned layer, or parameter, of this module."""
        return self.fp8_calls

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, Fp8Mixin):  # accelerate keeps a root's forward after a revert
            return type(self).forward(self, input)
        if not self.runs_low or input.numel() == 0:  # an expert without tokens has no scale
            y = self.plain_class.forward(self, input)
            if input.numel():
                self.fp8_calls.watch(input, y)
            return y
        self.fp8_calls.count(input)
        return self.fp8_linear(input, weight_matrix(self), self.bias)

    @property
    def runs_low(self) -> bool:
        """True if a call now runs in FP8: in training, or evaluation with `precision.eval=fp8`."""
        return self.fp8_engine.runs_low(self)

    def fp8_linear(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K], w [N, K] (a view of the parameter) -> [..., N]."""
        raise AssertionError("each engine's mixin defines fp8_linear")


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


class Engine:
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
        """True if a call of a module of this engine runs in FP8 now."""
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
        """Attributes of the converted module, besides `fp8_engine`."""
        return {}

    def linear(self, module: nn.Module, layer: LayerPlan) -> Callable[..., Tensor]:
        """`fp8_linear` for a planned parameter of `module`, which has no layer to swap.

        Returns:
            Function of x [..., K], w [N, K] (view of the parameter), bias [N] or None -> [..., N].
        """
        facts = types.SimpleNamespace(fp8_engine=self, **self.attributes(module, layer))
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
        raise AssertionError("each engine reports its recipe")

    @property
    def has_state(self) -> bool:
        """True if scales or random numbers carry over from one step to the next."""
        return bool(self.precision.facts.state)

    def state_tensors(self) -> dict[str, Tensor]:
        """Scaling state to store with a checkpoint, so that resuming is exact."""
        return {}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state_tensors`."""
