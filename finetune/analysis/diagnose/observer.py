"""Names for a profile: which layer is running, in forward and when it is computed a second time.

While entered, every linear layer of the plan, every decoder layer and every PEFT layer opens a
`record_function` range around its forward. In a trace everything below a range is that layer's;
backward is found by autograd's sequence numbers (`timeline`). A forward that runs inside a backward
is a recomputation of checkpointing, and its ranges say so.

The products of adapters that run in one function with their base, and those of declared parameters,
are told by what multiplies them. Layers under `torch.compile` cannot be looked into: they are one
range each, around the compiled call, and what they multiply is told apart by its sizes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState

from finetune.precision.backends.base import in_backward
from finetune.precision.convert import Conversion
from finetune.precision.lora import FusedMixin
from finetune.precision.parameters import ParameterMixin
from finetune.precision.planner import PrecisionPlan
from finetune.training.health.collector import OperandWatch
from finetune.training.health.tallies import Tallies
from finetune.training.session import Session

PREFIX = "finetune|"
WINDOW = f"{PREFIX}window"
"""The range around all profiled steps."""
RECOMPUTE = "recompute"


def range_name(layer: str) -> str:
    """The range of a layer that begins now."""
    return f"{PREFIX}{RECOMPUTE if in_backward() else 'forward'}|{layer}"


class Ranges:
    """Opens ranges around the layers of a converted model. Use as a context manager."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self._open: list[Any] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Ranges:
        model = self.conversion.model
        inside = {id(m) for c in self.conversion.compiled for m in c.modules()}
        decoder = {
            name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()
        }
        planned = {layer.owner for layer in self.conversion.plan.layers}
        peft = {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        for name, module in model.named_modules():
            if id(module) in inside:
                continue
            if name in planned or name in peft or type(module).__name__ in decoder:
                self._around(name, module)
            if "_gradient_checkpointing_func" in vars(module):
                self._around_checkpoint(name, module)
            if isinstance(module, FusedMixin):
                module.fp8_listeners.append(self)
                self._undo.callback(module.fp8_listeners.remove, self)
            if isinstance(module, ParameterMixin):
                module.fp8_observers.append(self)
                self._undo.callback(module.fp8_observers.remove, self)
        for name, module in model.named_modules():
            if any(module is c for c in self.conversion.compiled):
                self._around_compiled(name, module)
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()
        while self._open:
            self.leave()

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """A product of the adapter or parameter of this name begins."""
        self._push(f"{PREFIX}backward|{name}" if backward else range_name(name))

    def leave(self) -> None:
        """It has ended."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """A product of a parameter is made; its backward is found by its node's number."""

    def _push(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)

    def _around(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._push(range_name(name))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.leave()

        first = module.register_forward_pre_hook(before, prepend=True)
        last = module.register_forward_hook(after, always_call=True)
        self._undo.callback(first.remove)
        self._undo.callback(last.remove)

    def _around_checkpoint(self, name: str, module: nn.Module) -> None:
        """Transformers checkpoints inside a layer's forward: hooks do not see what runs again."""
        checkpoint: Any = module._gradient_checkpointing_func

        def named(function: Any, *args: Any, **kwargs: Any) -> Any:
            def run(*inputs: Any, **more: Any) -> Any:
                with record_function(range_name(name)):
                    return function(*inputs, **more)

            return checkpoint(run, *args, **kwargs)

        def back() -> None:
            module.__dict__["_gradient_checkpointing_func"] = checkpoint

        named.finetune_wraps = checkpoint  # pyright: ignore  the engine's wrapper is inside already
        module.__dict__["_gradient_checkpointing_func"] = named
        self._undo.callback(back)

    def _around_compiled(self, name: str, module: nn.Module) -> None:
        call: Any = module._compiled_call_impl

        def named(*args: Any, **kwargs: Any) -> Any:
            with record_function(range_name(name)):
                return call(*args, **kwargs)

        def back() -> None:
            module._compiled_call_impl = call

        module._compiled_call_impl = named
        self._undo.callback(back)


@contextlib.contextmanager
def window() -> Iterator[None]:
    """The range around all profiled steps."""
    with record_function(WINDOW):
        yield


# ------------------------------------------------------------------------------------------
# A callback that leads a trainer through the steps of a diagnosis, and looks.
#
#     witnessed   the proof sees every GEMM, as in any run; compiled layers are compiled after it
#     warm        the proof sees weights move; kernels are chosen, graphs captured
#     timed       the clock only
#     profiled    ranges and `torch.profiler`
#     operands    training health by layer: what casts do to what this step multiplies
#
# The order keeps each look out of the others: what times is not looked at, and what is looked at
# for
# noise is slow. Clocks are read when the device has caught up.


WITNESSED, WARM, OPERANDS = 1, 2, 1
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to the terminal otherwise


@dataclass
class Observer(TrainerCallback):
    """Looks at `steps` timed and as many profiled steps of one trainer.

    Attributes:
        session: in force.
        steps: timed, and profiled.
        step_seconds: mean of the timed steps.
        tokens: of a micro-batch, padding included, and without it.
        events: of the profiled steps.
        tallies: (layer, operand) -> what its cast does.
    """

    session: Session
    steps: int
    step_seconds: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    events: list[Any] = field(default_factory=list)
    tallies: Tallies = field(default_factory=dict)
    _trainer: Any = None
    _watch: OperandWatch | None = None
    _looking: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _began: float = 0.0
    _step: int = 0
    _fresh: bool = False

    @property
    def total(self) -> int:
        """Optimizer steps of the whole diagnosis."""
        return WITNESSED + WARM + 2 * self.steps + OPERANDS

    def attend(self, trainer: Any) -> None:
        """Look at this trainer, which has this callback."""
        self._trainer, plain = trainer, trainer.training_step

        def training_step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            fresh, self._fresh = self._fresh, False
            if fresh and self._step == 0:
                self._count(inputs)
            if not fresh or self._step < self.total - OPERANDS:
                return plain(model, inputs, *args, **kwargs)
            watch = OperandWatch(self._conversion.model, self._conversion, each_layer)
            with watch.watching():
                loss = plain(model, inputs, *args, **kwargs)
            self.tallies = watch.tallies
            return loss

        trainer.training_step = training_step

    @property
    def _conversion(self) -> Conversion:
        _, conversion = self.session.training
        assert conversion is not None  # the trainer has prepared its model
        return conversion

    def _count(self, inputs: Any) -> None:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        real = int(mask.sum()) if isinstance(mask, Tensor) and mask.dim() == 2 else ids.numel()
        self.tokens = ids.numel(), real

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._step, self._fresh = state.global_step, True
        timed = WITNESSED + WARM
        if self._step == timed:
            self._began = self._now()
        elif self._step == timed + self.steps:
            self._start_profile()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        timed = WITNESSED + WARM
        if state.global_step == timed + self.steps:
            self.step_seconds = (self._now() - self._began) / self.steps
        elif state.global_step == timed + 2 * self.steps:
            self.close()

    def _start_profile(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.session.device.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._now()
        self._looking.enter_context(Ranges(self._conversion))
        self._looking.callback(lambda: self.events.extend(profiler.events() or []))
        self._looking.enter_context(profiler)
        self._looking.enter_context(window())
        self._looking.callback(self._now)

    def close(self) -> None:
        """Stop looking, also out of a step that was broken off. Harmless when already done."""
        self._looking.close()

    def _now(self) -> float:
        if self.session.device.kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def each_layer(model: nn.Module, plan: PrecisionPlan | None) -> dict[str, str]:
    """Every module with parameters of its own, and every layer of a plan, is a group by itself."""
    names = [n for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    names += [layer.name for layer in plan.layers] if plan is not None else []
    return {name: name for name in names}
