"""How long a step takes on a GPU: a roofline per kernel, and the host that launches them.

Each kernel takes what its roofs allow (roofs.py). `compiled` says which operators lie in a compiled
region, where chains share a kernel (fusion.py).

*The host.* It needs some microseconds per kernel (Python, dispatcher, autograd, launch) and runs
ahead of the GPU, so a kernel starts when the GPU is free and the host has launched it. Small shapes
leave the GPU waiting; that time is the class `waiting for launches`.

Communication between GPUs is not on the tape; the caller gives the seconds of it that computation
does not hide.

How sure it is. The standard deviation of ln(predicted / published) over published step times and
over published FP8-to-BF16 pairs stands in `assets/efficiency.yaml` (`scatter_*`): measured by
`score/speed.py`. A time is wrong by a factor that its twin mostly shares (clock, software, data),
so a ratio of two is known better than either. Intervals are 1.64 standard deviations, nine in ten.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from finetune.estimator.classes import classes_of
from finetune.estimator.efficiency import Efficiency, Host, efficiency_of, host
from finetune.estimator.fusion import Launch, launches
from finetune.estimator.kernels import product_of
from finetune.estimator.roofs import Bound, half_peak, kernel_time
from finetune.gpus import Gpu

if TYPE_CHECKING:
    from finetune.estimator.tape import Op, Tape

WAITING = "waiting for launches"
COMMUNICATION = "communication"

_NINE_IN_TEN = 1.645


class Row(NamedTuple):
    """Kernels of one kind and shape together, for a table."""

    label: str
    cls: str
    count: int
    seconds: float
    bound: Bound


class Interval(NamedTuple):
    """A value and the range that holds it in nine of ten cases."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class StepTime:
    """The predicted time of what stands on a tape (usually one optimizer step).

    Attributes:
        seconds: from start to end.
        by_class: seconds of GPU time by class (`linears`, `adapters`, `attention`, `pointwise`,
            `FP8 casts`, `head and loss`, `optimizer`, ...), `waiting for launches` and
            `communication`; they add up to `seconds`.
        bound: per class, the roof that most of its time is under.
        flops: floating point operations done, recomputation included.
        mfu: `flops` without recomputation, over `seconds` and the dense BF16 peak.
        launches: kernels.
        host_seconds: what the host needs to launch them all.
        rows: the kernels by kind and shape, slowest first.
        scatter: standard deviation of ln(predicted / true), see the module.
    """

    seconds: float
    by_class: dict[str, float]
    bound: dict[str, Bound]
    flops: float
    mfu: float
    launches: int
    host_seconds: float
    rows: tuple[Row, ...]
    scatter: float

    @property
    def interval(self) -> Interval:
        """Seconds, with the range that holds them in nine of ten cases."""
        return _interval(self.seconds, self.scatter)


def step_time(
    ops: Sequence[Op],
    gpu: Gpu,
    *,
    compiled: Callable[[Op], bool] | None = None,
    launched_by: Host | None = None,
    communication_s: float = 0.0,
    efficiency: Efficiency | None = None,
    tf32: bool = False,
) -> StepTime:
    """Predict the time of the operators of a tape on a GPU.

    Args:
        ops: operators in order, as traced.
        gpu: where they would run.
        compiled: whether an operator lies in a compiled region (None: none does).
        launched_by: host time per kernel; eager PyTorch's unless given.
        communication_s: seconds of communication that nothing hides.
        efficiency: shares of the peaks; those of the table unless given (calibration).
        tf32: whether float32 products may use TF32 (PyTorch's default is not).

    Raises:
        ConfigError: the GPU has no units for a precision on the tape, or no known efficiency.
    """
    shares = efficiency or efficiency_of(gpu)
    pace = launched_by or host("eager")
    classes = classes_of(ops)
    by_class: dict[str, float] = defaultdict(float)
    by_bound: dict[str, dict[Bound, float]] = defaultdict(lambda: defaultdict(float))
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    row_bound: dict[tuple[str, str], Bound] = {}
    flops = useful = 0.0
    issued = ends = 0.0
    count = 0
    for launch in launches(ops, compiled):
        op = ops[launch.ops[0]]
        kernel = kernel_time(op, launch, gpu, shares, tf32=tf32)
        issued += pace.microseconds(op.phase) * 1e-6
        waited = max(0.0, issued - ends)
        ends = max(ends, issued) + kernel.seconds
        cls = _class(ops, launch, classes)
        bound: Bound = "launch" if waited > kernel.seconds else kernel.bound
        by_class[cls] += kernel.seconds
        by_class[WAITING] += waited
        by_bound[cls][bound] += kernel.seconds
        key = (_label(ops, launch), cls)
        rows[key][0] += 1
        rows[key][1] += kernel.seconds
        row_bound[key] = bound
        flops += kernel.flops
        useful += 0.0 if op.phase == "recompute" else kernel.flops
        count += 1
    if communication_s:
        by_class[COMMUNICATION] += communication_s
    seconds = ends + communication_s
    return StepTime(
        seconds=seconds,
        by_class=dict(sorted(by_class.items(), key=lambda item: -item[1])),
        bound={cls: max(times, key=lambda b: times[b]) for cls, times in by_bound.items()},
        flops=flops,
        mfu=useful / (seconds * half_peak(gpu)) if seconds else 0.0,
        launches=count,
        host_seconds=issued,
        rows=tuple(
            sorted(
                (
                    Row(label, cls, int(n), seconds, row_bound[label, cls])
                    for (label, cls), (n, seconds) in rows.items()
                ),
                key=lambda row: -row.seconds,
            )
        ),
        scatter=shares.shared.scatter_time,
    )


def ops_of_step(tape: Tape) -> list[Op]:
    """The operators of a rehearsed step: those after its mark `step`, all where there is none.

    What is before prepares it: states of the optimizer are made there.
    """
    if "step" not in tape.marks or tape.marks["step"] >= len(tape.events):
        return tape.ops
    return tape.ops[tape.events[tape.marks["step"]].at :]


def speed_ratio(step: StepTime, other: StepTime, efficiency: Efficiency) -> Interval:
    """How many times faster `step` is than `other`, nine cases in ten between low and high.

    The spread is that of published pairs of steps that differ in the precision of their products.
    """
    return _interval(other.seconds / step.seconds, efficiency.shared.scatter_ratio)


def _interval(value: float, scatter: float) -> Interval:
    factor = math.exp(_NINE_IN_TEN * scatter)
    return Interval(value, value / factor, value * factor)


def _class(ops: Sequence[Op], launch: Launch, classes: Sequence[str]) -> str:
    """The class of a kernel: of its heaviest operators, when it joins several."""
    if len(launch.ops) == 1:
        return classes[launch.ops[0]]
    weights: dict[str, float] = defaultdict(float)
    for index in launch.ops:
        op = ops[index]
        weights[classes[index]] += sum(o.nbytes for o in (*op.inputs, *op.outputs))
    return max(weights, key=lambda cls: weights[cls])


def _label(ops: Sequence[Op], launch: Launch) -> str:
    op = ops[launch.ops[0]]
    if launch.kind == "gemm" and (product := product_of(op)):
        batch = f"{product.batch} x " if product.batch > 1 else ""
        return f"{product.precision} product {batch}{product.m} x {product.n} x {product.k}"
    if len(launch.ops) > 1:
        return f"fused {launch.kind}"
    return op.name
