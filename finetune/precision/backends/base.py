"""What an FP8 engine is to the converter: a class to swap in, and a few moments of a step.

A converted layer stays the *same object*: only its `__class__` changes, to a subclass of what it
was, as FSDP2's `fully_shard` does. Everything that refers to the layer keeps referring to it: the
parent, PEFT's `base_layer`, hooks, the parameters in the optimizer, ties, and names in the state
dict. Reverting puts the old class back.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from finetune.config.schema import PrecisionConfig
from finetune.errors import ConfigError
from finetune.precision.layers import is_conv1d
from finetune.precision.planner import LayerPlan
from finetune.precision.weights import constructor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type matmuls produce here: autocast's where it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def in_backward() -> bool:
    """Whether autograd is running a backward here: then a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def reduce_as_plain(self: Any, protocol: Any) -> Any:
    """Pickle and deepcopy a converted module as the plain one it was: copies are not converted."""
    ours = ("_finetune_conversion", "config", "linear_mm_config")
    state = {
        k: v
        for k, v in self.__dict__.items()
        if not k.startswith(("fp8_", "scaling_type_")) and (k not in ours or k == "config")
    }
    if isinstance(self, Fp8Mixin):
        state.pop("config", None)  # torchao's; a model's own `config` stays
    original = vars(type(self)).get("fp8_root_of", type(self))
    original = getattr(original, "fp8_original", original)
    return (*constructor(original), state)


class Fp8Mixin:
    """In front of a linear layer's own class: training runs in FP8, evaluation as before.

    Evaluation and generation stay in high precision unless `precision.eval=fp8`.
    """

    fp8_backend: Backend
    fp8_original: ClassVar[type[nn.Module]]
    fp8_transposed: ClassVar[bool] = False
    training: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, Fp8Mixin):  # accelerate keeps a root's forward after a revert
            return type(self).forward(self, input)
        high = not self.training and self.fp8_backend.precision.eval == "high"
        if high or input.numel() == 0:  # an expert without tokens has nothing to scale
            return self.fp8_original.forward(self, input)  # pyright: ignore[reportArgumentType]
        weight = self.weight.t() if self.fp8_transposed else self.weight
        return self.fp8_linear(input, weight, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as_plain(self, protocol)

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
        name: as in `precision.backend`.
        mixin: put in front of the classes of converted layers.
        wraps_checkpointing: recomputation must run inside `wrap_checkpoint`.
    """

    name: ClassVar[str]
    mixin: ClassVar[type[Fp8Mixin]]
    wraps_checkpointing: ClassVar[bool] = False

    def __init__(self, precision: PrecisionConfig) -> None:
        self.precision = precision

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """The class a converted `module` will have: a subclass of the one it has."""
        return _swapped_class(self.mixin, type(module), is_conv1d(type(module)))

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        """Attributes, besides `fp8_backend`, that the converted module needs."""
        return {}

    def linear(self, module: nn.Module, layer: LayerPlan) -> Callable[..., Tensor]:
        """`fp8_linear` for a planned parameter of `module`, which is no layer to be swapped.

        Returns:
            x [..., K], w [N, K] (a view of the parameter), bias [N] or None -> [..., N].
        """
        seat = types.SimpleNamespace(fp8_backend=self, **self.attributes(module, layer))
        return functools.partial(self.mixin.fp8_linear, seat)  # pyright: ignore[reportArgumentType]

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Entered around the model's forward."""
        return contextlib.nullcontext()

    def wrap_checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The gradient-checkpointing function to use instead of `checkpoint`."""
        return checkpoint

    def begin_step(self) -> None:
        """A training forward begins (not a recomputation, not an evaluation)."""

    def scale_in_force(self, module: nn.Module, operand: Literal["x", "w", "g"]) -> Tensor | None:
        """The scale that delayed scaling uses for this operand now, None where none is kept."""
        return None

    def as_cast(
        self, module: nn.Module, operand: Literal["x", "w", "g"], value: Tensor
    ) -> tuple[Tensor, PrecisionConfig]:
        """What of an operand is really cast, and under which rule."""
        return value, self.precision

    def effective(self) -> dict[str, Any]:
        """The recipe in force, as the engine itself reports it."""
        raise AssertionError("each backend reports its recipe")

    def state_tensors(self) -> dict[str, Tensor]:
        """Scaling state to be stored beside a checkpoint, so that resuming is exact."""
        return {}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state_tensors` gave."""


@functools.cache
def _swapped_class(
    mixin: type[Fp8Mixin], original: type[nn.Module], transposed: bool
) -> type[nn.Module]:
    name = f"{mixin.__name__.removesuffix('Mixin')}{original.__name__}"
    facts = {"fp8_original": original, "fp8_transposed": transposed}
    return type(name, (mixin, original), {"__module__": mixin.__module__, **facts})
