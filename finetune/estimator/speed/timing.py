"""Time of an optimizer step on one device, from the trace of one rehearsed micro-batch.

For g micro-batches (gradient accumulation):

    step = g x (forward + backward) + optimizer + exposed communication

Weights cast once per optimizer step (`precision.fp8_params`) count with the optimizer.

Compiled decoder layers (`precision.compile`) run with their pointwise chains fused. With
`train.fsdp` each micro-batch gathers the weights of each group in forward and in backward, the last
one also reduces gradients, and the update covers one GPU's shards in their stored dtype. Without it
gradients of the last micro-batch are all-reduced (DDP).

*Communication.* In a ring of N GPUs each sends (N-1)/N of a buffer for an all-gather or a
reduce-scatter and twice that for an all-reduce; time = bytes / speed of the slowest link + latency.
Collectives of a process group run one after the other, overlapping computation, and are simulated
in torch's order:

* FSDP2, forward: group i+1 is gathered while i computes, once i has been gathered and group i-1
  copied out. Only the first all-gather is fully exposed.
* FSDP2, backward: group i-1 is gathered from the start of i on. The gradients of i are reduced
  during i-1, whose own reduction starts only after that.
* DDP: buckets of 25 MiB (the first of 1 MiB) are reduced as gradients arrive; the last is exposed.

Overlap needs seconds by group: decoder layers are taken as equal, the rest belongs to the embedding
and the head. Collectives reach a fraction of the link's nominal speed, a small one over PCIe
without peer access (data passes through host memory). Overlapped communication is not free either:
NCCL kernels occupy multiprocessors, copies use bandwidth. So at least half of it is added to the
step (`Communication.added`). Source: `_fsdp_param_group.py` of torch 2.13 (`unshard`,
`wait_for_unshard`, `post_backward`), `DistributedDataParallel`. Limit: a single machine.

*Scatter.* `scatter_*` in `assets/efficiency.yaml` is the standard deviation of ln(predicted /
published) over published step times and over FP8-to-BF16 pairs. Two runs share most of their error
(clock, software, data), so a ratio is more accurate than either time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

import torch

from finetune.config.schema import RunConfig
from finetune.estimator.memory.sharding import Fsdp2, sharded_model, shares_model
from finetune.estimator.speed.operators import base_name
from finetune.estimator.speed.roofline import Bound, Roofline, StepTime, roofline_of
from finetune.estimator.speed.step_parts import StepPart, in_layer
from finetune.estimator.trace.rehearsal import Rehearsal
from finetune.estimator.trace.trace import Op, Operand, Trace, layer_of
from finetune.hardware.gpus import Place
from finetune.units import MIB

# Standard deviations to either side that hold 90% of a normal distribution.
NINE_IN_TEN = 1.645


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
        traffic: What several devices send each other.
    """

    seconds: float
    tokens: int
    classes: dict[str, float]
    bound: dict[str, Bound]
    mfu: float
    scatter: float
    traffic: Traffic | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def interval(self) -> Interval:
        """Seconds of a step with their 90% interval."""
        return spread(self.seconds, self.scatter)

    def share(self, part: str) -> float:
        return self.classes.get(part, 0.0) / self.seconds


def roofline_at(place: Place, *, compiled: bool) -> Roofline | None:
    """Roofline of a place's devices; None if their speed is unknown."""
    if place.gpu is None:
        return None
    return roofline_of(place.gpu, "compiled" if compiled else "eager")


def pace_of_one(
    rehearsal: Rehearsal, config: RunConfig, place: Place, *, compiled: bool
) -> Pace | None:
    """Speed of one device, None if unknown; raises FinetuneError if the model cannot be sharded."""
    roofline = roofline_at(place, compiled=compiled)
    if roofline is None:
        return None
    gpu, trace, model = place.gpu if place.count > 1 else None, rehearsal.trace, None
    if gpu is not None and shares_model(config, place):
        model = sharded_model(rehearsal, config, place.count)
        trace = _update_of_shards(trace, model)
    batches = int(config.train.get("gradient_accumulation_steps", 1))

    def timed(ops: Sequence[Op]) -> StepTime:
        inside = (lambda op: layer_of(op.module)) if compiled else None
        return roofline.step_time(ops, compiled=inside)

    micro, update = micro_batch(trace)
    batch, once = timed(micro), timed(update)
    classes = {name: value * batches for name, value in batch.by_class.items()}
    for name, value in once.by_class.items():
        classes[name] = classes.get(name, 0.0) + value
    traffic = None
    if gpu is not None:
        halves = [[op for op in micro if (op.phase == "forward") == x] for x in (True, False)]
        beside = [[op for op in ops if not in_layer(op.module)] for ops in halves]
        passes, rest = ([timed(ops).seconds for ops in each] for each in (halves, beside))
        sent, gb_s = rehearsal.groups.trainable_bytes, collective_gb_s(gpu.link, gpu.link_gb_s)
        traffic = Traffic(model, sent, passes, rest, place.count, batches, gb_s)
        classes[StepPart.COMMUNICATION] = traffic.added
    seconds = sum(classes.values())
    return Pace(
        seconds=seconds,
        tokens=rehearsal.tokens * batches,
        classes=dict(sorted(classes.items(), key=lambda part: -part[1])),
        bound=once.bound | batch.bound,
        mfu=batch.mfu * batch.seconds * batches / seconds,
        scatter=roofline.efficiency.shared.scatter_time,
        traffic=traffic,
    )


def micro_batch(trace: Trace) -> tuple[list[Op], list[Op]]:
    """Operators of a micro-batch, and those that run once per optimizer step."""
    step = trace.since("step")
    once = [op.phase == "optimizer" or base_name(op) == "cast_weight" for op in step]
    return [*compress(step, (not x for x in once))], [*compress(step, once)]


def extrapolated(few: Pace, more: Pace, times: float) -> Pace:
    """Extrapolate linearly, part by part, by `times` the difference of two models.

    With 5 ms at 2 layers and 6 ms at 3, a model of 32 layers takes 5 + 30 x 1 = 35 ms. What
    several devices send is simulated anew, with all layers: how much computation hides does not
    grow evenly.
    """

    def grown(a: float, b: float) -> float:
        return max(0.0, a + times * (b - a))

    names = {**few.classes, **more.classes}
    classes = {n: grown(few.classes.get(n, 0.0), more.classes.get(n, 0.0)) for n in names}
    traffic = few.traffic and more.traffic and few.traffic.extrapolated(more.traffic, times)
    if traffic is not None:
        classes[StepPart.COMMUNICATION] = traffic.added
    seconds = sum(classes.values())
    done = grown(few.mfu * few.seconds, more.mfu * more.seconds)
    return replace(more, seconds=seconds, classes=classes, mfu=done / seconds, traffic=traffic)


def _update_of_shards(trace: Trace, model: Fsdp2) -> Trace:
    """Trace with the update of one GPU's shards, along the first dimension."""
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

    ops = [sharded(op) if op.phase == "optimizer" else op for op in trace.ops]
    return replace(trace, ops=ops)


# ------------------------------------------------------------------------------------ communication

# Seconds of a collective on a small buffer: assumed, of the order that nccl-tests report.
LATENCY_S = 30e-6
# Fraction of a link's nominal speed: fitted to published speeds of sharded training, below the 0.7
# to 0.8 of nccl-tests over NVLink. PCIe: GeForce cards, no peer access.
SHARE = {"nvlink": 0.35, "infinity-fabric": 0.35, "pcie": 0.10}
# Fraction of communication that always adds to the step: fitted to the same speeds.
SHOWN = 0.5
# Buckets of `DistributedDataParallel` (`bucket_cap_mb`); the first has 1 MiB.
BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True)
class Communication:
    """Communication of one GPU in a step: bytes sent, and seconds of all collectives.

    `exposed` is the part of `seconds` during which computation waits.
    """

    nbytes: int
    seconds: float
    exposed: float

    @property
    def added(self) -> float:
        return max(self.exposed, SHOWN * self.seconds)


def collective_gb_s(link: str, gb_s: float) -> float:
    """GB/s per direction that collectives reach on a link of nominal speed `gb_s`."""
    return SHARE[link] * gb_s


def fsdp2_communication(
    model: Fsdp2,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    gb_s: float,
    latency_s: float = LATENCY_S,
    reduces: bool = True,
) -> Communication:
    """Simulate a micro-batch under FSDP2.

    Two equal groups, the second kept gathered; gathers and reductions 2 s, forward 3, backward 6:
    forward starts after the first gather (2) and computes until 5 and 8; in backward the first
    group is gathered during the second (8 to 14), whose reduction (until 16) overlaps the first
    (until 20); the last reduction (until 22) is exposed. Of 22 s, 18 are computation: 4 s exposed.

    Args:
        model: Groups in forward order.
        forward_s: Computation of each group in forward.
        backward_s: Computation of each group in backward, recomputation included.
        gb_s: Speed of the slowest link per direction (`collective_gb_s`).
        reduces: True for the last micro-batch of a step, which reduces gradients.

    Raises:
        ValueError: not one time per group, or `gb_s` is not positive.
    """
    count = len(model.groups)
    if len(forward_s) != count or len(backward_s) != count:
        raise ValueError(f"{count} groups, {len(forward_s)} and {len(backward_s)} times of them")
    link = _Link(model.gpus, gb_s, latency_s)
    started = [0.0] * count
    now = 0.0
    for i in range(count):
        gathered = link.send(model.gathered_bytes(i), after=started[i - 2] if i > 1 else 0.0)
        started[i] = max(now, gathered)
        now = started[i] + forward_s[i]
    ready = [0.0] * count  # when the weights are gathered
    for i in reversed(range(count)):
        group = model.groups[i]
        if i == count - 1 and group.reshard:
            ready[i] = link.send(model.gathered_bytes(i), after=now)
        now = max(now, ready[i])
        if i and model.groups[i - 1].reshard:
            ready[i - 1] = link.send(model.gathered_bytes(i - 1), after=now)
        # The gradients go into a buffer that the previous reduction may still be reading.
        now = max(now + backward_s[i], link.reduced)
        if reduces:
            link.reduce(group.trainable * model.reduce, after=now)
    now = max(now, link.reduced)
    return Communication(link.nbytes, link.seconds, now - sum(forward_s) - sum(backward_s))


def ddp_communication(
    gradient_bytes: int, backward_s: float, *, gpus: int, gb_s: float, latency_s: float = LATENCY_S
) -> Communication:
    """Simulate DDP, with gradients arriving evenly over backward; ValueError unless `gb_s` > 0."""
    link = _Link(gpus, gb_s, latency_s)
    done = 0
    while done < gradient_bytes:
        size = min(BUCKET_BYTES if done else MIB, gradient_bytes - done)
        done += size
        link.reduce(2 * size, after=backward_s * done / gradient_bytes)
    return Communication(link.nbytes, link.seconds, max(0.0, link.reduced - backward_s))


@dataclass(frozen=True)
class Traffic:
    """What one of several GPUs sends in an optimizer step, and what hides it.

    Attributes:
        model: the sharded model; None for DDP.
        sent: bytes of gradients that DDP reduces.
        passes: seconds of forward and of backward, of one micro-batch.
        beside: of these, seconds outside of decoder layers.
    """

    model: Fsdp2 | None
    sent: int
    passes: list[float]
    beside: list[float]
    gpus: int
    batches: int
    gb_s: float

    @property
    def added(self) -> float:
        """Seconds that it adds to a step."""
        gb_s, model = self.gb_s, self.model
        if model is None:
            return ddp_communication(self.sent, self.passes[1], gpus=self.gpus, gb_s=gb_s).added
        by_group = [_by_group(model, *each) for each in zip(self.passes, self.beside, strict=True)]
        last, other = (
            fsdp2_communication(model, *by_group, gb_s=gb_s, reduces=reduces).added
            for reduces in (True, False)
        )
        return last + (self.batches - 1) * other

    def extrapolated(self, more: Traffic, times: float) -> Traffic:
        """That of a model with `times` the layers that `more` has beyond this one's."""
        model = more.model
        if self.model is not None and model is not None:
            first, layer, *rest = model.groups
            added = len(model.groups) - len(self.model.groups)
            layers = [layer] * (1 + round((times - 1) * added))
            model = replace(model, groups=(first, *layers, *rest))
        passes = [a + times * (b - a) for a, b in zip(self.passes, more.passes, strict=True)]
        sent = round(self.sent + times * (more.sent - self.sent))
        return replace(more, model=model, sent=sent, passes=passes)


def _by_group(model: Fsdp2, seconds: float, outside: float) -> list[float]:
    """Seconds of each group; the head is last, or first if embeddings are tied."""
    count = len(model.groups)
    tied = not model.groups[0].reshard and (count == 1 or model.groups[-1].name != "head")
    layers = count - (1 if tied else 2)
    outside = min(outside, seconds)
    each = [(seconds - outside) / layers] * layers if layers else []
    rest = outside if layers else seconds
    return [rest, *each] if tied else [0.0, *each, rest]


class _Link:
    def __init__(self, gpus: int, gb_s: float, latency_s: float) -> None:
        if gb_s <= 0:
            raise ValueError(f"a link of {gb_s} GB/s")
        self.share = (gpus - 1) / gpus
        self.gb_s, self.latency_s = gb_s, latency_s
        self.free = self.reduced = self.seconds = 0.0
        self.nbytes = 0

    def send(self, buffer: int, *, after: float) -> float:
        """End time of an all-gather or reduce-scatter of a buffer."""
        if not buffer or not self.share:
            return after
        sent = round(buffer * self.share)
        took = self.latency_s + sent / (self.gb_s * 1e9)
        self.nbytes += sent
        self.seconds += took
        self.free = max(self.free, after) + took
        return self.free

    def reduce(self, buffer: int, *, after: float) -> None:
        self.reduced = max(self.reduced, self.send(buffer, after=after))
