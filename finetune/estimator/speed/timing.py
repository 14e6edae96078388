"""The time of a whole optimizer step, from the micro-batch that was rehearsed.

A step of g micro-batches computes forward and backward g times and updates once:

    step = g · (forward + backward) + optimizer + communication that nothing hides

Decoder layers that `precision.compile` compiles run with their pointwise chains fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.config.schema import PrecisionConfig
from finetune.estimator.place import Place
from finetune.estimator.speed.calibration import (
    calibrated_efficiency,
    calibrated_gpu,
    calibrated_host,
    load_calibration,
)
from finetune.estimator.speed.efficiency import Efficiency, Host, efficiency_of, host
from finetune.estimator.speed.roofline import Bound, Interval, StepTime, step_time
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.trace.rehearsal import Rehearsal
from finetune.estimator.trace.trace import Op
from finetune.hardware.gpus import Gpu

NINE_IN_TEN = 1.645
_IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Pace:
    """How fast one device goes through a step.

    Attributes:
        seconds: of an optimizer step.
        tokens: of it, on one device.
        classes: part of the step -> seconds; they add up.
        bound: part -> the roof that most of its time is under.
        mfu: floating point operations of the model, nothing computed twice, over what the dense
            BF16 peak would do in the time.
        scatter: standard deviation of ln(predicted / true).
        calibrated: on this very GPU.
    """

    seconds: float
    tokens: int
    classes: dict[str, float]
    bound: dict[str, Bound]
    mfu: float
    scatter: float
    calibrated: bool = False

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        return self.tokens / self.seconds

    def share(self, part: str) -> float:
        """Of the step's time that a part takes, 0 to 1."""
        return self.classes.get(part, 0.0) / self.seconds


def compiles(precision: PrecisionConfig, place: Place) -> bool:
    """Whether a run compiles its decoder layers, as `finetune.training.session` decides it."""
    if precision.compile != "auto" or place.device.kind != "cuda":
        return precision.compile == "on"
    eager_casts = precision.backend == "torchao" or precision.frozen == "fp8"
    return precision.compute == "fp8" and eager_casts


def pace(
    rehearsal: Rehearsal,
    place: Place,
    *,
    micro_batches: int,
    compiled: bool,
    exposed: Callable[[float, float], float] | None = None,
) -> Pace | None:
    """The time of an optimizer step, None where nothing is known of the device's speed.

    Args:
        rehearsal: of one micro-batch and the update.
        place: where.
        micro_batches: of a step (`gradient_accumulation_steps`).
        compiled: decoder layers are compiled.
        exposed: from the seconds of forward and backward of a micro-batch to those of
            communication that a step is longer by.
    """
    known = _known(place, compiled=compiled)
    if known is None:
        return None
    gpu, shares, calibrated, launcher = known

    def timed(ops: Sequence[Op]) -> StepTime:
        inside = (lambda op: bool(_IN_A_LAYER.search(op.module))) if compiled else None
        return step_time(ops, gpu, compiled=inside, efficiency=shares, launched_by=launcher)

    update = rehearsal.tape.since("optimizer")
    whole = rehearsal.tape.since("step")
    batch = timed(whole[: len(whole) - len(update)])
    once = timed(update)
    classes = {name: value * micro_batches for name, value in batch.by_class.items()}
    for name, value in once.by_class.items():
        classes[name] = classes.get(name, 0.0) + value
    if exposed is not None:
        forward = timed([op for op in whole if op.phase == "forward"]).seconds
        classes[StepPart.COMMUNICATION] = exposed(forward, batch.seconds - forward)
    seconds = sum(classes.values())
    return Pace(
        seconds=seconds,
        tokens=rehearsal.tokens * micro_batches,
        classes=dict(sorted(classes.items(), key=lambda part: -part[1])),
        bound=once.bound | batch.bound,
        mfu=batch.mfu * batch.seconds * micro_batches / seconds,
        scatter=shares.shared.scatter_time,
        calibrated=calibrated,
    )


def _known(place: Place, *, compiled: bool) -> tuple[Gpu, Efficiency, bool, Host] | None:
    pace = host("compiled" if compiled else "eager")
    measured = load_calibration(place.device.name) if place.here else None
    if measured is not None:
        gpu = calibrated_gpu(measured, place.gpu)
        launcher = calibrated_host(measured, pace, place.gpu)
        return gpu, calibrated_efficiency(measured, place.gpu), True, launcher
    if place.gpu is None:
        return None
    return place.gpu, efficiency_of(place.gpu), False, pace


def spread(value: float, scatter: float) -> Interval:
    """The range that holds a value in nine of ten cases."""
    factor = 2.718281828459045 ** (NINE_IN_TEN * scatter)
    return Interval(value, value / factor, value * factor)


def extrapolated(few: Pace, more: Pace, layers: tuple[int, int], to: int) -> Pace:
    """The pace of `to` layers from those of two smaller models: every part is linear in them."""
    first, second = layers
    times = (to - first) / (second - first)

    def grown(a: float, b: float) -> float:
        return max(0.0, a + times * (b - a))

    names = {**few.classes, **more.classes}
    classes = {n: grown(few.classes.get(n, 0.0), more.classes.get(n, 0.0)) for n in names}
    seconds = sum(classes.values())
    done = grown(few.mfu * few.seconds, more.mfu * more.seconds)
    return Pace(
        seconds, more.tokens, classes, more.bound, done / seconds, more.scatter, more.calibrated
    )
