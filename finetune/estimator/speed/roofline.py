"""How long kernels take on one device: a roofline for each, and the host that launches them.

    seconds = max( FLOP / (peak x share of the precision x share of the shape),
                   bytes / (bandwidth x share) )  +  what starting and ending a kernel costs

*Shape of a product.* `[M, K] @ [K, N]` is computed in tiles of the output, one per multiprocessor
at a time: with T tiles on S multiprocessors it takes ceil(T / S) rounds, so a part of the chip may
idle in the last. Libraries choose among tile sizes, and split K over multiprocessors where there
are too few tiles; the model takes the best of the same choices, smaller tiles at a lower rate since
they load more operands per product. Each tile also costs filling and draining a pipeline, as if K
were longer by a constant. A product with a small M, N or K (LoRA's rank) ends on the memory roof.

*Attention* runs at the share of the BF16 peak that the kernel in use there reaches; the causal half
is not computed. *Everything else* moves bytes: at the speed of memory, or of the level-2 cache when
all it touches fits into half of it.

*The host* needs some microseconds per kernel (Python, dispatcher, autograd, launch) and runs ahead
of the GPU, so a kernel starts when the GPU is free and the host has launched it. Small shapes leave
the GPU waiting; that time is the part `waiting for launches`.

Which operators share a kernel, and the bytes that it moves, are fusion.py's to say: whoever reads
them off the code that Inductor writes gives other `Launch`es to the same roofs. Shares come from
efficiency.py, or from a measurement of this very device (calibration.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from finetune.errors import ConfigError
from finetune.estimator.speed.efficiency import (
    AttentionKernel,
    Efficiency,
    Host,
    HostKind,
    efficiency_of,
    host,
)
from finetune.estimator.speed.fusion import Launch, launches
from finetune.estimator.speed.kernels import (
    Precision,
    Product,
    attention_flops,
    is_backward_attention,
    product_of,
)
from finetune.estimator.speed.step_parts import StepPart, classes_of
from finetune.estimator.trace.trace import Op
from finetune.hardware.gpus import Gpu

Bound = Literal["compute", "memory", "launch"]

# Output tiles (rows, columns) that cuBLAS and CUTLASS choose from on tensor cores, with the rate of
# the large ones as 1: a tile of 64 x 64 loads twice the operands per product that one of 128 x 128
# does. Rates are chosen, see `fit` in assets/efficiency.yaml.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.60))
# Parts of K that multiprocessors may share (split-K), where tiles are too few.
_SPLITS = (1, 2, 4, 8, 16)


class Kernel(NamedTuple):
    """Seconds of one kernel, the FLOPs it does, and the roof it is under."""

    seconds: float
    flops: float
    bound: Bound


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a sequence of operators (usually one optimizer step).

    Attributes:
        seconds: from start to end.
        by_class: seconds of GPU time by part of the step (`linears`, `adapters`, `attention`, ...),
            and `waiting for launches`; they add up to `seconds`.
        bound: per part, the roof that most of its time is under.
        flops: floating point operations done, recomputation included.
        mfu: `flops` without recomputation, over `seconds` and the dense BF16 peak.
    """

    seconds: float
    by_class: dict[str, float]
    bound: dict[str, Bound]
    flops: float
    mfu: float


@dataclass(frozen=True)
class Roofline:
    """What one device sustains, and the host beside it.

    Attributes:
        gpu: its line in the table of GPUs, with the peaks.
        efficiency: the shares of the peaks that kernels get.
        host: microseconds of host time per kernel.
        calibrated: the shares were measured on this very device.
    """

    gpu: Gpu
    efficiency: Efficiency
    host: Host
    calibrated: bool = False

    def step_time(
        self, ops: Sequence[Op], *, compiled: Callable[[Op], bool] | None = None
    ) -> StepTime:
        """Predict the time of traced operators.

        Args:
            ops: in order, as traced.
            compiled: whether an operator lies in a compiled region, where chains of operators
                share a kernel; None: none does.

        Raises:
            ConfigError: the GPU has no units for a precision among them.
        """
        classes = classes_of(ops)
        by_class: dict[str, float] = defaultdict(float)
        by_bound: dict[str, dict[Bound, float]] = defaultdict(lambda: defaultdict(float))
        flops = useful = issued = ends = 0.0
        for launch in launches(ops, compiled):
            op = ops[launch.ops[0]]
            kernel = self.kernel_time(op, launch)
            issued += self.host.microseconds(op.phase) * 1e-6
            waited = max(0.0, issued - ends)
            ends = max(ends, issued) + kernel.seconds
            cls = _class(ops, launch, classes)
            by_class[cls] += kernel.seconds
            by_class[StepPart.WAITING] += waited
            by_bound[cls]["launch" if waited > kernel.seconds else kernel.bound] += kernel.seconds
            flops += kernel.flops
            useful += 0.0 if op.phase == "recompute" else kernel.flops
        return StepTime(
            seconds=ends,
            by_class=dict(sorted(by_class.items(), key=lambda item: -item[1])),
            bound={cls: max(times, key=lambda b: times[b]) for cls, times in by_bound.items()},
            flops=flops,
            mfu=useful / (ends * half_peak(self.gpu)) if ends else 0.0,
        )

    def kernel_time(self, op: Op, launch: Launch) -> Kernel:
        """Seconds of one kernel alone, from start to end; `op` is the first that it runs."""
        memory = (launch.read + launch.written) / self._bandwidth(launch)
        start = self.efficiency.shared.kernel_us * 1e-6
        compute = flops = 0.0
        if launch.kind == "gemm" and (product := product_of(op)):
            flops = product.flops
            compute = self.product_seconds(product)
        elif launch.kind == "attention":
            flops, masked = attention_flops(op)
            reached = self.efficiency.masked if masked else self.efficiency.attention
            direction = "backward" if is_backward_attention(op) else "forward"
            compute = flops / (half_peak(self.gpu) * reached[direction])
        body = max(compute, memory)
        if body < start:
            return Kernel(body + start, flops, "launch")
        return Kernel(body + start, flops, "compute" if compute > memory else "memory")

    def product_seconds(self, product: Product) -> float:
        """Seconds that the tensor cores need for a matrix product, memory aside."""
        share = shape_share(product, self.gpu.sms, self.efficiency.shared.pipeline_k)
        return product.flops / (self._rate(product.precision) * share)

    def _rate(self, precision: Precision) -> float:
        """FLOP/s that an endless product of this precision sustains."""
        gemm, shared = self.efficiency.gemm, self.efficiency.shared
        if precision == "bf16":
            return half_peak(self.gpu) * gemm["bf16"]
        peak: Literal["fp32", "fp8"] = "fp32" if precision == "fp32" else "fp8"
        if peak not in self.gpu.tflops or peak not in gemm:
            raise ConfigError(
                f"{self.gpu.name} has no matrix units for {peak}",
                why="the step holds matrix products in that precision",
                fix="choose a precision that this GPU has, or another GPU",
            )
        factor = {"fp8_rowwise": shared.rowwise, "fp8_blocks": shared.blocks}.get(precision, 1.0)
        return self.gpu.tflops[peak] * 1e12 * gemm[peak] * factor

    def _bandwidth(self, launch: Launch) -> float:
        """Bytes a second that this kernel gets."""
        shared = self.efficiency.shared
        if launch.kind == "dequantise":
            return self.gpu.gb_s * 1e9 * shared.dequantise
        speed = self.gpu.gb_s * 1e9 * shared.bandwidth
        if launch.pattern != "straight":
            speed *= shared.columns if launch.pattern == "columns" else shared.transpose
        if launch.kind != "gemm" and launch.read + launch.written <= self.gpu.l2_mib * 2**20 / 2:
            speed *= shared.l2
        return speed


def roofline_of(
    gpu: Gpu, launched_by: HostKind = "eager", attention: AttentionKernel | None = None
) -> Roofline:
    """The roofline of a GPU by the table of efficiencies.

    Args:
        gpu: its line of the table of GPUs.
        launched_by: what launches kernels.
        attention: the kernel of attention; None for what the installed PyTorch picks there.

    Raises:
        ConfigError: no efficiency is known for a GPU of its compute capability.
    """
    return Roofline(gpu, efficiency_of(gpu, attention), host(launched_by))


def half_peak(gpu: Gpu) -> float:
    """Dense FLOP/s in BF16, or in FP16 where there is no BF16."""
    return gpu.tflops.get("bf16", gpu.tflops.get("fp16", 0.0)) * 1e12


def shape_share(product: Product, units: int, pipeline_k: float) -> float:
    """The share of an endless product's rate that one of this shape gets, at most 1.

    On 132 multiprocessors, 16896 x 256 x 8192 makes 132 tiles of 128 x 256: one full round, a share
    of 0.98. With 128 rows more there are 133, and the second round is nearly empty: the best choice
    of tiles and splits gets 0.80.

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


def _class(ops: Sequence[Op], launch: Launch, classes: Sequence[str]) -> str:
    """The part of the step that a kernel is of: that of its heaviest operators, in bytes."""
    if len(launch.ops) == 1:
        return classes[launch.ops[0]]
    weights: dict[str, float] = defaultdict(float)
    for index in launch.ops:
        op = ops[index]
        weights[classes[index]] += sum(o.nbytes for o in (*op.inputs, *op.outputs))
    return max(weights, key=lambda cls: weights[cls])
