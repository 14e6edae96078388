"""Observer: a callback that leads a trainer through the steps of a diagnosis.

    witnessed   the proof sees every GEMM, as in any run; compiled layers are compiled after it
    warm        the proof sees weights move; kernels are chosen, graphs captured
    timed       the clock only
    profiled    ranges and `torch.profiler`
    operands    training health by layer: the effect of casts on this step's operands

The order keeps the measurements apart: timed steps are not observed, and observing noise is slow.
Clocks are read after a device synchronization. Every step sees the first micro-batch again, so that
tokens, FLOPs and GEMM sizes, which the witness counts once, hold for the steps that are timed.

*Ranges* name the running layer, in forward and in recomputation. Inside them every planned linear
layer, decoder layer and PEFT layer opens a `record_function` range around its forward; `timeline`
finds the backward by autograd's sequence numbers. A forward inside a backward is a recomputation by
checkpointing and is marked so. GEMMs of adapters fused with their base, of declared parameters, and
of the head in TRL's fused loss are named by the code that multiplies them. A layer under
`torch.compile` is one range around the compiled call; its GEMMs are distinguished by their sizes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerState

from finetune.hardware.device import synchronize
from finetune.precision.convert import Conversion
from finetune.precision.engines.observers import ObservedMixin, in_backward
from finetune.precision.model.compiling import OURS
from finetune.precision.model.layers import decoder_layers
from finetune.precision.model.plan import PrecisionPlan
from finetune.training.health.operands import GroupSums, OperandWatch
from finetune.training.helper.session import Session

PREFIX = "finetune|"
WINDOW = f"{PREFIX}window"
"""Range around all profiled steps."""
WITNESSED, WARM, OPERANDS = 1, 2, 1
"""Steps of each kind; `StepObserver.steps` are timed, and as many profiled."""
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keep Kineto from writing to the terminal


def _range_name(layer: str) -> str:
    """Range name of a layer that begins now."""
    return f"{PREFIX}{'recompute' if in_backward() else 'forward'}|{layer}"


class Ranges:
    """Opens ranges around the layers of a converted model. Use as a context manager."""

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self._open: list[Any] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Ranges:
        model, plan = self.conversion.model, self.conversion.plan
        compiled = {id(module) for module in self.conversion.compiled}
        inside = {id(m) for c in self.conversion.compiled for m in c.modules()}
        decoder = {id(module) for module in decoder_layers(model)}
        layers = {layer.owner for layer in plan.layers}
        layers |= {name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        for name, module in model.named_modules():
            if id(module) in compiled:
                self._replace(module, "_compiled_call_impl", _in_range(name))
            if id(module) in inside:
                continue
            if name in layers or id(module) in decoder:
                self._around(name, module)
            if "_gradient_checkpointing_func" in vars(module):
                # Transformers checkpoints inside a layer's forward: hooks miss the recomputation.
                self._replace(module, "_gradient_checkpointing_func", _in_recomputed_range(name))
            if isinstance(module, ObservedMixin):
                self._listen(module.fp8_observers)
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()
        while self._open:
            self.leave()

    def enter(self, name: str, shape: tuple[int, int], backward: bool = False) -> None:
        """Begin a GEMM of the named adapter, parameter or head."""
        self._push(f"{PREFIX}backward|{name}" if backward else _range_name(name))

    def leave(self) -> None:
        """End it."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def watch(self, name: str, shape: tuple[int, int], y: Tensor, inputs: tuple[Any, ...]) -> None:
        """Record a parameter's GEMM; its node's number identifies the backward."""

    def _push(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)

    def _listen(self, listeners: list[Any]) -> None:
        listeners.append(self)
        self._undo.callback(listeners.remove, self)

    def _around(self, name: str, module: nn.Module) -> None:
        for handle in (
            module.register_forward_pre_hook(
                lambda *_: self._push(_range_name(name)), prepend=True
            ),
            module.register_forward_hook(lambda *_: self.leave(), always_call=True),
        ):
            self._undo.callback(handle.remove)

    def _replace(self, module: nn.Module, attribute: str, wrap: Callable[[Any], Any]) -> None:
        own = vars(module)  # past `nn.Module.__setattr__`
        plain = own[attribute]
        own[attribute] = wrap(plain)
        self._undo.callback(own.__setitem__, attribute, plain)


def _in_range(name: str) -> Callable[[Any], Any]:
    """Give a wrapper that runs a call inside a range."""

    def wrap(call: Any) -> Any:
        def named(*args: Any, **kwargs: Any) -> Any:
            with record_function(_range_name(name)):
                return call(*args, **kwargs)

        setattr(named, OURS, True)  # a compiled call stays one of ours
        return named

    return wrap


def _in_recomputed_range(name: str) -> Callable[[Any], Any]:
    """Wrap a checkpointing function so that its forward runs in a range, each time."""

    def wrap(checkpoint: Any) -> Any:
        def named(function: Any, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(_in_range(name)(function), *args, **kwargs)

        named.finetune_wraps = checkpoint  # pyright: ignore  already includes the backend's wrapper
        return named

    return wrap


@dataclass
class StepObserver(TrainerCallback):
    """Observes `steps` timed and as many profiled steps of one trainer.

    Attributes:
        trace: file for the trace of the profiled steps, which Perfetto opens; None for none.
        step_seconds: mean of the timed steps.
        tokens: tokens of a micro-batch, with padding and without.
        events: events of the profiled steps.
        sums: effect of casts by (layer, operand).
    """

    session: Session
    steps: int
    trace: Path | None = None
    step_seconds: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    events: list[Any] = field(default_factory=list)
    sums: GroupSums = field(default_factory=dict)
    _looking: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _began: float = 0.0
    _step: int = 0
    _first: bool = False
    _inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Optimizer steps of the whole diagnosis."""
        return WITNESSED + WARM + 2 * self.steps + OPERANDS

    def attend(self, trainer: Any) -> None:
        """Observe this trainer, which has this callback."""
        plain = trainer.training_step

        def training_step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            first, self._first = self._first, False
            # The first micro-batch, which the witness has counted.
            if not self._inputs:
                self._inputs = dict(inputs)
                ids, mask = inputs["input_ids"], inputs.get("attention_mask")
                real = int(mask.sum()) if isinstance(mask, Tensor) and mask.dim() == 2 else None
                self.tokens = ids.numel(), ids.numel() if real is None else real
            # A copy, since trainers take entries out of it.
            inputs = dict(self._inputs)
            if not first or self._step < self.total - OPERANDS:
                return plain(model, inputs, *args, **kwargs)
            watch = OperandWatch(self._conversion.model, self._conversion, each_layer)
            with watch.watching():
                loss = plain(model, inputs, *args, **kwargs)
            self.sums = watch.sums
            return loss

        trainer.training_step = training_step

    @property
    def _conversion(self) -> Conversion:
        conversion = self.session.conversion
        assert conversion is not None  # the trainer has prepared its model
        return conversion

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._step, self._first = state.global_step, True
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
        # Callbacks run in reverse: the window closes, then the profiler, then its events are read.
        self._looking.enter_context(Ranges(self._conversion))
        self._looking.callback(lambda: self.events.extend(profiler.events() or []))
        if self.trace is not None:
            self._looking.callback(profiler.export_chrome_trace, str(self.trace))
        self._looking.enter_context(profiler)
        self._looking.enter_context(record_function(WINDOW))
        self._looking.callback(self._now)

    def close(self) -> None:
        """Stop observing, also after an aborted step. Idempotent."""
        self._looking.close()

    def _now(self) -> float:
        synchronize(self.session.device.kind)
        return time.perf_counter()


def each_layer(model: nn.Module, plan: PrecisionPlan | None) -> dict[str, str]:
    """Map every module with own parameters, and every planned layer, to a group of its own."""
    names = [n for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    names += [layer.name for layer in plan.layers] if plan is not None else []
    return {name: name for name in names}
