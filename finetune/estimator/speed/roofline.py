"""How long one kernel takes: the slower of its two roofs, and what starting it costs.

    seconds = max( FLOP / (peak x share of the precision x share of the shape),
                   bytes / (bandwidth x share) )  +  what starting and ending a kernel costs

*Shape of a product.* `[M, K] x [K, N]` is computed in tiles of the output, one per multiprocessor
at a time: with T tiles on S multiprocessors it takes ceil(T / S) rounds, so a part of the chip may
idle in the last. Libraries choose among tile sizes, and split K over multiprocessors where there
are too few tiles; the model takes the best of the same choices, smaller tiles at a lower rate since
they load more operands per product. Each tile also costs filling and draining a pipeline, as if K
were longer by a constant. A product with a small M, N or K (LoRA's rank) ends on the memory roof.

*Attention* runs at the share of the BF16 peak that the kernel in use there reaches; the causal half
is not computed. *Everything else* moves bytes: at the speed of memory, or of the level-2 cache when
all it touches fits into half of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.errors import ConfigError
from finetune.estimator.speed.efficiency import Efficiency, Host, efficiency_of, host
from finetune.estimator.speed.fusion import Launch, launches
from finetune.estimator.speed.kernels import (
    Precision,
    Product,
    attention_flops,
    is_backward_attention,
    product_of,
)
from finetune.estimator.speed.step_parts import StepPart, classes_of
from finetune.hardware.gpus import Gpu

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op, Tape

Bound = Literal["compute", "memory", "launch"]

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.60))
"""Output tiles that libraries choose from, with the rate of the large ones as 1."""
_SPLITS = (1, 2, 4, 8, 16)


class Kernel(NamedTuple):
    """Seconds of one kernel, the FLOPs it does, and the roof it is under."""

    seconds: float
    flops: float
    bound: Bound


def kernel_time(
    op: Op, launch: Launch, gpu: Gpu, shares: Efficiency, *, tf32: bool = False
) -> Kernel:
    """Seconds of one kernel alone, from start to end."""
    moved = launch.read + launch.written
    memory = moved / _bandwidth(gpu, launch, moved, shares)
    start = shares.shared.kernel_us * 1e-6
    compute = flops = 0.0
    if launch.kind == "gemm" and (product := product_of(op)):
        flops = product.flops
        compute = product_seconds(product, gpu, shares, tf32=tf32)
    elif launch.kind == "attention":
        flops, masked = attention_flops(op)
        reached = shares.masked if masked else shares.attention
        direction = "backward" if is_backward_attention(op) else "forward"
        compute = flops / (half_peak(gpu) * reached[direction])
    body = max(compute, memory)
    if body < start:
        return Kernel(body + start, flops, "launch")
    return Kernel(body + start, flops, "compute" if compute > memory else "memory")


def half_peak(gpu: Gpu) -> float:
    """Dense FLOP/s in BF16, or in FP16 where there is no BF16."""
    return gpu.tflops.get("bf16", gpu.tflops.get("fp16", 0.0)) * 1e12


def product_seconds(product: Product, gpu: Gpu, shares: Efficiency, *, tf32: bool = False) -> float:
    """Seconds that the tensor cores need for a matrix product, memory aside."""
    rate = _rate(product.precision, gpu, shares, tf32)
    return product.flops / (rate * shape_share(product, gpu.sms, shares.shared.pipeline_k))


def shape_share(product: Product, units: int, pipeline_k: float) -> float:
    """What a product of this shape gets of the rate of one without an end, at most 1.

    Args:
        product: its sizes.
        units: multiprocessors.
        pipeline_k: what a tile costs beside its products, as elements of K.
    """
    best = math.inf  # seconds at a rate of one
    for rows, columns, relative in _TILES:
        tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
        for split in _SPLITS if tiles < 2 * units else (1,):
            rounds = math.ceil(tiles * split / units)
            depth = product.k / split + pipeline_k
            best = min(best, 2.0 * rows * columns * depth * rounds * units / relative)
    return product.flops / best


def _rate(precision: Precision, gpu: Gpu, shares: Efficiency, tf32: bool) -> float:
    """FLOP/s that an endless product of this precision sustains."""
    factor = 1.0
    if precision == "bf16":
        return half_peak(gpu) * shares.gemm["bf16"]
    peak: Literal["fp32", "tf32", "fp8"]
    if precision in ("fp8_rowwise", "fp8_blocks", "fp8"):
        peak = "fp8"
        if precision == "fp8_rowwise":
            factor = shares.shared.rowwise
        elif precision == "fp8_blocks":
            factor = shares.shared.blocks
    else:
        peak = "tf32" if tf32 and "tf32" in gpu.tflops else "fp32"
    if peak not in gpu.tflops or peak not in shares.gemm:
        raise ConfigError(
            f"{gpu.name} has no matrix units for {peak}",
            why="the step holds matrix products in that precision",
            fix="choose a precision that this GPU has, or another GPU",
        )
    return gpu.tflops[peak] * 1e12 * shares.gemm[peak] * factor


def _bandwidth(gpu: Gpu, launch: Launch, moved: float, shares: Efficiency) -> float:
    """Bytes a second that this kernel gets."""
    numbers = shares.shared
    speed = gpu.gb_s * 1e9 * numbers.bandwidth
    if launch.kind == "dequantise":
        return gpu.gb_s * 1e9 * numbers.dequantise
    if launch.pattern != "straight":
        speed *= numbers.columns if launch.pattern == "columns" else numbers.transpose
    if launch.kind != "gemm" and moved <= gpu.l2_mib * 2**20 / 2:
        speed *= numbers.l2
    return speed


# ------------------------------------------------------------------------------------------
# How long a step takes on a GPU: a roofline per kernel, and the host that launches them.
#
# Each kernel takes what its roofs allow (roofs.py). `compiled` says which operators lie in a
# compiled
# region, where chains share a kernel (fusion.py).
#
# *The host.* It needs some microseconds per kernel (Python, dispatcher, autograd, launch) and runs
# ahead of the GPU, so a kernel starts when the GPU is free and the host has launched it. Small
# shapes
# leave the GPU waiting; that time is the class `waiting for launches`.
#
# Communication between GPUs is not on the tape; the caller gives the seconds of it that computation
# does not hide.
#
# How sure it is. The standard deviation of ln(predicted / published) over published step times and
# over published FP8-to-BF16 pairs stands in `assets/efficiency.yaml` (`scatter_*`): measured by
# `score/speed.py`. A time is wrong by a factor that its twin mostly shares (clock, software, data),
# so a ratio of two is known better than either. Intervals are 1.64 standard deviations, nine in
# ten.


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
        by_class[StepPart.WAITING] += waited
        by_bound[cls][bound] += kernel.seconds
        key = (_label(ops, launch), cls)
        rows[key][0] += 1
        rows[key][1] += kernel.seconds
        row_bound[key] = bound
        flops += kernel.flops
        useful += 0.0 if op.phase == "recompute" else kernel.flops
        count += 1
    if communication_s:
        by_class[StepPart.COMMUNICATION] += communication_s
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
