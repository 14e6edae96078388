"""Time of an optimizer step on one device, from the trace of one rehearsed micro-batch.

For g micro-batches (gradient accumulation):

    step = g x (forward + backward) + optimizer + idle time + exposed communication + generation

*Idle time*: once in a step the host reads whether the gradients are finite, and the GPU waits until
the update begins, and then, unless the update takes as long, until the next forward does.

Of a model that writes its rows, generation is all prompts once and then token by token, each as
long as the last one; what is scored once for several micro-batches is counted so.

Weights that train in host memory wait for the bus, and the CPU updates them
(`finetune.estimator.speed.hosted`).

Compiled decoder layers (`precision.compile`) run with their pointwise chains fused. With
`train.fsdp` each micro-batch gathers the weights of each group in forward and in backward, the last
one also reduces gradients, and the update covers one GPU's shards in their stored dtype. Without it
gradients of the last micro-batch are all-reduced (DDP).

*Communication.* In a ring of N GPUs each sends (N-1)/N of a buffer for an all-gather or a
reduce-scatter and twice that for an all-reduce; time = bytes / speed of the slowest link + latency
(`Ring`). Gathers of forward hide behind its computation, gathers of backward and reductions
behind backward's; what takes longer than these is waited for. Collectives reach a fraction of the
link's nominal speed, a small one over PCIe without peer access (data passes through host memory).
Overlapped communication is not free either: NCCL kernels occupy multiprocessors, copies use
bandwidth. How much shows is not measured yet: half of it is assumed, between nothing of what
computation can hide and all of it (`Traffic.waits`). Limits: a single machine; the first gather and
the last reduction, behind which nothing is computed, count as the others.

*Scatter.* `scatter_*` in `assets/efficiency.yaml` is the standard deviation of ln(predicted /
published) over published step times and over FP8-to-BF16 pairs. Two runs share most of their error
(clock, software, data), so a ratio is more accurate than either time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import torch

from finetune.config.schema import RunConfig
from finetune.estimator.memory.sharding import Fsdp2, sharded_model, shares_model
from finetune.estimator.speed.hosted import Hosted, hosted, ways
from finetune.estimator.speed.roofline import Bound, Roofline, StepTime, roofline_of
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.trace.rehearsal import Rehearsal
from finetune.estimator.trace.trace import Op, Operand, Trace, layer_of
from finetune.hardware.gpus import Gpu, Machine
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
class Timing:
    """Speed of one device.

    Attributes:
        seconds: Duration of an optimizer step.
        tokens: Tokens per step on one device.
        classes: Seconds by part of the step; sum to `seconds`.
        bound: Roof that bounds most of the time of each part.
        mfu: Model FLOPs, recomputation excluded, / (`seconds` x dense BF16 peak).
        scatter: Standard deviation of ln(predicted / true).
        traffic: What several devices send each other.
        hosted: What is done in host memory and over the bus to it.
    """

    seconds: float
    tokens: int
    classes: dict[str, float]
    bound: dict[str, Bound]
    mfu: float
    scatter: float
    traffic: Traffic | None = None
    hosted: Hosted | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def interval(self) -> Interval:
        """Seconds of a step with their 90% interval."""
        return spread(self.seconds, self.scatter)

    def share(self, part: str) -> float:
        return self.classes.get(part, 0.0) / self.seconds


def timing_of_one(
    rehearsal: Rehearsal, config: RunConfig, machine: Machine, *, compiled: bool
) -> Timing | None:
    """Speed of one device, None if unknown; raises FinetuneError if the model cannot be sharded."""
    if machine.gpu is None:
        return None
    # Compiled layers launch fewer kernels, each at less cost to the host.
    roofline = roofline_of(machine.gpu, "compiled" if compiled else "eager")
    gpu, trace, model = machine.gpu if machine.count > 1 else None, rehearsal.trace, None
    if gpu is not None and shares_model(config, machine):
        model = sharded_model(rehearsal, config, machine.count)
        trace = _update_of_shards(trace, model)
    batches = int(config.train.gradient_accumulation_steps)
    away = any(storage.memory != "device" for storage in trace.storages.values())

    def timed(ops: Sequence[Op]) -> StepTime:
        inside = (lambda op: layer_of(op.module)) if compiled else None
        on_gpu = (way == "gpu" for way in ways(ops, trace)) if away else (True for _ in ops)
        return roofline.step_time([*compress(ops, on_gpu)], compiled=inside)

    micro, update = micro_batch(trace)
    batch, once = timed(micro), timed(update)
    classes = {name: value * batches for name, value in batch.by_class.items()}
    written = roofline_of(roofline.gpu, "generate") if rehearsal.generations else None
    beside = _written(rehearsal, roofline, written) if written is not None else {}
    for name, value in (*once.by_class.items(), *beside.items()):
        classes[name] = classes.get(name, 0.0) + value
    shared = roofline.efficiency.shared
    # Milliseconds: what the host needs for the norm's verdict, and for coming back to the next
    # forward while the update still runs.
    waits = shared.before_update_ms + max(0.0, shared.after_update_ms - once.seconds * 1e3)
    classes[StepPart.WAITING] = classes.get(StepPart.WAITING, 0.0) + waits * 1e-3
    traffic = on_host = None
    computed = 0.0, 0.0
    if gpu is not None or away:
        # Alone: what is sent in forward hides behind forward, and in backward behind backward.
        forward = timed([op for op in micro if op.phase == "forward"]).seconds
        computed = forward, batch.seconds - forward
    if away:
        on_host = hosted(micro, update, trace, roofline.gpu, machine.host, batches, computed)
        classes[StepPart.COMMUNICATION] = on_host.waits
        classes[StepPart.OPTIMIZER] = classes.get(StepPart.OPTIMIZER, 0.0) + on_host.on_cpu
    if gpu is not None:
        ring = ring_of(gpu, machine.count)
        if model is not None:
            traffic = sharded_traffic(model, ring, computed, batches)
        else:
            sent = rehearsal.groups.trainable_bytes
            traffic = copied_traffic(sent, ring, computed, batches)
        classes[StepPart.COMMUNICATION] = traffic.added
    seconds = sum(classes.values())
    return Timing(
        seconds=seconds,
        tokens=rehearsal.tokens * batches,
        classes=dict(sorted(classes.items(), key=lambda part: -part[1])),
        # A micro-batch's own word wins: it runs several times a step, the update once.
        bound=once.bound | batch.bound,
        # MFU times seconds are FLOPs; the update has none that count.
        mfu=batch.mfu * batch.seconds * batches / seconds,
        scatter=roofline.efficiency.shared.scatter_time,
        traffic=traffic,
        hosted=on_host,
    )


def _written(rehearsal: Rehearsal, scores: Roofline, writes: Roofline) -> dict[str, float]:
    """Seconds by part in which a model writes and scores its rows, per optimizer step.

    All tokens take as long as the last one, which reads the longest cache. Layers that are
    compiled for training run uncompiled in a generation.
    """
    trace, times = rehearsal.trace, rehearsal.generations
    ops = trace.since("step")[: -len(trace.since("written"))]

    def timed(roofline: Roofline, *phases: str) -> StepTime:
        return roofline.step_time([op for op in ops if op.phase in phases])

    seconds = timed(writes, "prompt").seconds
    # The first token comes out of the prompt's pass.
    seconds += timed(writes, "token").seconds * (rehearsal.answer - 1)
    scored = timed(scores, "forward", "reference").by_class
    return {n: s * times for n, s in (scored | {StepPart.GENERATION: seconds}).items()}


def micro_batch(trace: Trace) -> tuple[list[Op], list[Op]]:
    """Operators of a micro-batch, and those that run once per optimizer step."""
    step = trace.since("written" if "written" in trace.marks else "step")
    once = [op.phase == "optimizer" for op in step]
    return [*compress(step, (not x for x in once))], [*compress(step, once)]


def extrapolated(few: Timing, more: Timing, times: float) -> Timing:
    """Extrapolate linearly, part by part, by `times` the difference of two models.

    With 5 ms at 2 layers and 6 ms at 3, a model of 32 layers takes 5 + 30 x 1 = 35 ms. What
    several devices send is compared with what all layers compute: how much of it these hide does
    not grow evenly.
    """

    def grown(a: float, b: float) -> float:
        # A line between near points may cross zero where a part is rounding alone.
        return max(0.0, a + times * (b - a))

    names = {**few.classes, **more.classes}
    classes = {n: grown(few.classes.get(n, 0.0), more.classes.get(n, 0.0)) for n in names}
    traffic = few.traffic and more.traffic and few.traffic.extrapolated(more.traffic, times)
    if traffic is not None:
        classes[StepPart.COMMUNICATION] = traffic.added
    on_host = few.hosted and more.hosted and few.hosted.extrapolated(more.hosted, times)
    if on_host is not None:
        classes[StepPart.COMMUNICATION] = on_host.waits
    seconds = sum(classes.values())
    # FLOPs grow along a line, their ratio to time does not.
    done = grown(few.mfu * few.seconds, more.mfu * more.seconds)
    sent: Any = {"traffic": traffic, "hosted": on_host}
    return replace(more, seconds=seconds, classes=classes, mfu=done / seconds, **sent)


def _update_of_shards(trace: Trace, model: Fsdp2) -> Trace:
    """Trace with the update of one GPU's shards, along the first dimension."""
    wider = model.stored != model.compute

    def part(operand: Operand) -> Operand:
        if not operand.shape:
            return operand
        rows = math.ceil(operand.shape[0] / model.gpus)
        low = operand.dtype in (torch.bfloat16, torch.float16)
        # Rehearsed in the gathered dtype; shards and states are stored wider under mixed precision.
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
# Fraction of communication that adds to the step even where computation could hide it: assumed. It
# was chosen with `SHARE`, to which published speeds of whole steps do not tell it apart.
SHOWN = 0.5
# Buckets of `DistributedDataParallel` (`bucket_cap_mb`).
BUCKET_BYTES = 25 * MIB


class Ring(NamedTuple):
    """GPUs of one machine in a ring, of which each sends `gb_s` GB/s to the next."""

    gpus: int
    gb_s: float

    def seconds(self, nbytes: float, collectives: int = 1) -> float:
        """Seconds to gather, or to reduce and scatter, `nbytes` in some collectives.

        A GPU sends all parts but one: 8 GPUs gather 8 GB at 70 GB/s in 0.1 s.
        """
        if not nbytes:
            return 0.0
        return collectives * LATENCY_S + self.sent(nbytes) / (self.gb_s * 1e9)

    def sent(self, nbytes: float) -> float:
        """Bytes that each GPU sends for that."""
        return nbytes * (self.gpus - 1) / self.gpus


def ring_of(gpu: Gpu, gpus: int) -> Ring:
    """The ring that collectives of several GPUs make, at the speed they reach."""
    return Ring(gpus, SHARE[gpu.link] * gpu.link_gb_s)


class Traffic(NamedTuple):
    """Seconds of what one of several GPUs sends, and of what it computes meanwhile.

    Attributes:
        forward, backward: sent in each micro-batch, to gather weights.
        reduced: sent in backward of a step's last micro-batch, to sum gradients.
        computed_forward, computed_backward: computation of a micro-batch.
        batches: micro-batches of a step.
        nbytes: bytes that a GPU sends in a step.
    """

    forward: float
    backward: float
    reduced: float
    computed_forward: float
    computed_backward: float
    batches: float = 1
    nbytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all that it sends in a step."""
        return self.batches * (self.forward + self.backward) + self.reduced

    @property
    def added(self) -> float:
        """Seconds that it adds to a step."""
        return self._added(SHOWN)

    @property
    def waits(self) -> tuple[float, float]:
        """The least and the most that it may add: what nothing can hide, and all that is sent."""
        return self._added(0.0), self.seconds

    def _added(self, shown: float) -> float:
        return self._of_one(self.reduced, shown) + (self.batches - 1) * self._of_one(0.0, shown)

    def _of_one(self, reduced: float, shown: float) -> float:
        """Seconds that sending adds to a micro-batch, in which it reduces gradients or not."""
        backward = self.backward + reduced
        waits = max(0.0, self.forward - self.computed_forward)
        waits += max(0.0, backward - self.computed_backward)
        # What cannot be hidden is waited for in any case; of the rest a share shows.
        return max(waits, shown * (self.forward + backward))

    def extrapolated(self, more: Traffic, times: float) -> Traffic:
        """Extrapolate to a model with `times` the layers that `more` has beyond this one's."""
        return Traffic._make(a + times * (b - a) for a, b in zip(self, more, strict=True))


def sharded_traffic(
    model: Fsdp2, ring: Ring, computed: tuple[float, float], batches: int = 1
) -> Traffic:
    """FSDP2 gathers each group in forward, and again in backward if it was freed between."""

    def gathered(groups: list[int]) -> int:
        return sum(map(model.gathered_bytes, groups))

    every = list(range(len(model.groups)))
    freed = [i for i in every if model.groups[i].reshard]
    trained = [group.trainable for group in model.groups if group.trainable]
    summed = sum(trained) * model.reduce
    forward, backward = (ring.seconds(gathered(groups), len(groups)) for groups in (every, freed))
    reduced = ring.seconds(summed, len(trained))
    nbytes = ring.sent(batches * (gathered(every) + gathered(freed)) + summed)
    return Traffic(forward, backward, reduced, *computed, batches, nbytes)


def copied_traffic(
    gradients: int, ring: Ring, computed: tuple[float, float], batches: int = 1
) -> Traffic:
    """DDP reduces and scatters all gradients, and gathers the sums, in buckets."""
    # Twice the gradients: an all-reduce is a reduce-scatter and an all-gather.
    buckets = math.ceil(gradients / BUCKET_BYTES)
    reduced, nbytes = ring.seconds(2 * gradients, buckets), ring.sent(2 * gradients)
    return Traffic(0.0, 0.0, reduced, *computed, batches, nbytes)
