"""A callback that leads a trainer through the steps of a diagnosis, and looks.

    witnessed   the proof sees every GEMM, as in any run; compiled layers are compiled after it
    warm        the proof sees weights move; kernels are chosen, graphs captured
    timed       the clock only
    profiled    ranges and `torch.profiler`
    operands    training health by layer: what casts do to what this step multiplies

The order keeps each look out of the others: what times is not looked at, and what is looked at for
noise is slow. Clocks are read when the device has caught up.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerState

from finetune.diagnosis.ranges import Ranges, window
from finetune.health.collector import OperandWatch
from finetune.health.tallies import Tallies
from finetune.precision.convert import Conversion
from finetune.precision.planner import PrecisionPlan
from finetune.session import Session

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
