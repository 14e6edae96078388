"""Time of an optimizer step on one device, from the trace of one rehearsed micro-batch.

For g micro-batches (gradient accumulation):

    step = g x (forward + backward) + optimizer + exposed communication

Compiled decoder layers (`precision.compile`) run with their pointwise chains fused. With
`train.fsdp` each micro-batch gathers the weights of each group in forward and in backward, the last
one also reduces gradients, and the update covers one GPU's shards in their stored dtype. Without it
gradients of the last micro-batch are all-reduced (DDP). Overlap (communication.py) needs seconds by
group: decoder layers are taken as equal, the rest belongs to the embedding and the head.

`scatter_*` in `assets/efficiency.yaml` is the standard deviation of ln(predicted / published) over
published step times and over FP8-to-BF16 pairs. Two runs share most of their error (clock,
software, data), so a ratio is more accurate than either time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from finetune.config.schema import PrecisionConfig, RunConfig
from finetune.estimator.memory.sharded import sharded_model, shares_model
from finetune.estimator.memory.sharding import Fsdp2
from finetune.estimator.place import Place
from finetune.estimator.speed.calibration import calibrated_roofline, load_calibration
from finetune.estimator.speed.communication import (
    collective_gb_s,
    ddp_communication,
    fsdp2_communication,
)
from finetune.estimator.speed.roofline import Bound, Roofline, StepTime, roofline_of
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.trace.rehearsal import Rehearsal
from finetune.estimator.trace.trace import Op, Operand, Trace
from finetune.hardware.gpus import Gpu

# Standard deviations to either side that hold 90% of a normal distribution.
NINE_IN_TEN = 1.645
# Modules inside a decoder layer (compiled); and those plus the layer itself.
_INSIDE_A_LAYER = re.compile(r"\.\d+\.")
_OF_A_LAYER = re.compile(r"\.\d+(\.|$)")


class Interval(NamedTuple):
    """A value with its 90% interval."""

    value: float
    low: float
    high: float


def spread(value: float, scatter: float) -> Interval:
    """90% interval of a value whose logarithm has standard deviation `scatter`."""
    factor = math.e ** (NINE_IN_TEN * scatter)
    return Interval(value, value / factor, value * factor)


@dataclass(frozen=True)
class Pace:
    """Speed of one device.

    Attributes:
        seconds: Duration of an optimizer step.
        tokens: Tokens per step on one device.
        classes: Seconds by part of the step; sum to `seconds`.
        bound: Roof that bounds most of the time of each part.
        mfu: Model FLOPs, recomputation excluded, / (`seconds` x dense BF16 peak).
        scatter: Standard deviation of ln(predicted / true).
        calibrated: True if based on a calibration of this device.
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
        return self.tokens / self.seconds

    def share(self, part: str) -> float:
        return self.classes.get(part, 0.0) / self.seconds


def compiles(precision: PrecisionConfig, place: Place) -> bool:
    """True if decoder layers are compiled, by the rule of `finetune.training.session`."""
    if precision.compile != "auto" or place.device.kind != "cuda":
        return precision.compile == "on"
    eager_casts = precision.backend == "torchao" or precision.frozen == "fp8"
    return precision.compute == "fp8" and eager_casts


def roofline_at(place: Place, *, compiled: bool) -> Roofline | None:
    """Roofline of a place's devices, calibrated if possible; None if their speed is unknown."""
    launched_by = "compiled" if compiled else "eager"
    measured = load_calibration(place.device.name) if place.here else None
    if measured is not None:
        return calibrated_roofline(measured, place.gpu, launched_by)
    return None if place.gpu is None else roofline_of(place.gpu, launched_by)


def pace_of_one(
    rehearsal: Rehearsal, config: RunConfig, place: Place, *, compiled: bool
) -> Pace | None:
    """Speed of one device, None if unknown; raises FinetuneError if the model cannot be sharded."""
    roofline = roofline_at(place, compiled=compiled)
    if roofline is None:
        return None
    several = place.count > 1 and place.gpu is not None
    model = None
    if several and shares_model(config, place):
        model = sharded_model(rehearsal, config, place.count)
        rehearsal = replace(rehearsal, trace=_update_of_shards(rehearsal.trace, model))
    batches = int(config.train.get("gradient_accumulation_steps", 1))

    def timed(ops: Sequence[Op]) -> StepTime:
        inside = (lambda op: bool(_INSIDE_A_LAYER.search(op.module))) if compiled else None
        return roofline.step_time(ops, compiled=inside)

    step, update = (rehearsal.trace.since(mark) for mark in ("step", "optimizer"))
    batch, once = timed(step[: len(step) - len(update)]), timed(update)
    classes = {name: value * batches for name, value in batch.by_class.items()}
    for name, value in once.by_class.items():
        classes[name] = classes.get(name, 0.0) + value
    if several:
        forward_s = timed([op for op in step if op.phase == "forward"]).seconds
        backward_s = batch.seconds - forward_s
        classes[StepPart.COMMUNICATION] = (
            _summed(rehearsal, place, backward_s)
            if model is None
            else _gathered(rehearsal, model, place, (forward_s, backward_s), batches)
        )
    seconds = sum(classes.values())
    return Pace(
        seconds=seconds,
        tokens=rehearsal.tokens * batches,
        classes=dict(sorted(classes.items(), key=lambda part: -part[1])),
        bound=once.bound | batch.bound,
        mfu=batch.mfu * batch.seconds * batches / seconds,
        scatter=roofline.efficiency.shared.scatter_time,
        calibrated=roofline.calibrated,
    )


def extrapolated(few: Pace, more: Pace, layers: tuple[int, int], to: int) -> Pace:
    """Extrapolate linearly to `to` layers from two smaller models, part by part.

    With 5 ms at 2 layers and 6 ms at 3, a model of 32 layers takes 5 + 30 x 1 = 35 ms.
    """
    first, second = layers
    times = (to - first) / (second - first)

    def grown(a: float, b: float) -> float:
        return max(0.0, a + times * (b - a))

    names = {**few.classes, **more.classes}
    classes = {n: grown(few.classes.get(n, 0.0), more.classes.get(n, 0.0)) for n in names}
    seconds = sum(classes.values())
    done = grown(few.mfu * few.seconds, more.mfu * more.seconds)
    return replace(more, seconds=seconds, classes=classes, mfu=done / seconds)


def _summed(rehearsal: Rehearsal, place: Place, backward_s: float) -> float:
    """Seconds that DDP adds to a step."""
    gradients = rehearsal.groups.trainable_bytes
    return ddp_communication(gradients, backward_s, gpus=place.count, gb_s=_gb_s(place)).added


def _gathered(
    rehearsal: Rehearsal,
    model: Fsdp2,
    place: Place,
    seconds: tuple[float, float],
    batches: int,
) -> float:
    """Seconds that FSDP2 adds to a step; `seconds` are of forward and of backward."""
    assert place.gpu is not None
    outside = _outside(rehearsal.trace, place.gpu)
    forward_s, backward_s = (
        _by_group(model, whole, min(own, whole))
        for whole, own in zip(seconds, outside, strict=True)
    )
    last, other = (
        fsdp2_communication(model, forward_s, backward_s, gb_s=_gb_s(place), reduces=reduces).added
        for reduces in (True, False)
    )
    return last + (batches - 1) * other


def _gb_s(place: Place) -> float:
    assert place.gpu is not None
    return collective_gb_s(place.gpu.link, place.gpu.link_gb_s)


def _outside(trace: Trace, gpu: Gpu) -> tuple[float, float]:
    """Seconds of forward and of backward outside decoder layers."""
    step, update = trace.since("step"), trace.since("optimizer")
    beside = [op for op in step[: len(step) - len(update)] if not _OF_A_LAYER.search(op.module)]
    roofline = roofline_of(gpu)
    forward_s, backward_s = (
        roofline.step_time([op for op in beside if (op.phase == "forward") == forward]).seconds
        for forward in (True, False)
    )
    return forward_s, backward_s


def _by_group(model: Fsdp2, seconds: float, outside: float) -> list[float]:
    """Seconds of each group; the head is last, or first if embeddings are tied."""
    count = len(model.groups)
    tied = not model.groups[0].reshard and (count == 1 or model.groups[-1].name != "head")
    layers = count - (1 if tied else 2)
    each = [(seconds - outside) / layers] * layers if layers else []
    rest = outside if layers else seconds
    return [rest, *each] if tied else [0.0, *each, rest]


def _update_of_shards(trace: Trace, model: Fsdp2) -> Trace:
    """Trace with the update of one GPU's shards, along the first dimension."""
    first = len(trace.ops) - len(trace.since("optimizer"))
    wider = model.stored != model.compute

    def part(operand: Operand) -> Operand:
        if not operand.shape:
            return operand
        rows = math.ceil(operand.shape[0] / model.gpus)
        low = operand.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if wider and low else operand.dtype
        shape = (rows, *operand.shape[1:])
        return Operand(operand.storage, shape, dtype, math.prod(shape) * dtype.itemsize)

    def sharded(op: Op) -> Op:
        return op._replace(inputs=tuple(map(part, op.inputs)), outputs=tuple(map(part, op.outputs)))

    return replace(trace, ops=[*trace.ops[:first], *map(sharded, trace.ops[first:])])
