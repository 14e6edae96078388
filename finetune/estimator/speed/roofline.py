"""Roofline model of the kernels on one device, and of the host that launches them.

    seconds = max( FLOP / (peak x efficiency of the precision x efficiency of the shape),
                   bytes / (bandwidth x efficiency) )  +  fixed cost of a kernel

*Efficiencies* are fractions of a GPU's peak that real kernels sustain: the clock falls under load,
tiles do not fill the chip, and operands have to arrive. The table (`assets/efficiency.yaml`) has
one number per GPU family and precision for an arbitrarily large GEMM. The numbers are few on
purpose, each has an origin, and none is fitted to a single published measurement.

*GEMM shape.* `[M, K] @ [K, N]` is computed in output tiles, one per multiprocessor at a time: T
tiles on S multiprocessors take ceil(T / S) waves, the last of them partly idle. As libraries do,
the model takes the best tile size (smaller tiles run at a lower rate, since they load more operands
per product) and split of K. Filling and draining the pipeline counts as a constant added to K. A
GEMM with a small M, N or K (LoRA's rank) is memory-bound.

*Attention* runs at the fraction of the BF16 peak that the kernel there reaches, a short sequence at
less of it where that was measured; the causal half is skipped. *Everything else* is bound by memory
bandwidth, or by the L2 cache if all operands fit into half of it.

*The host* needs microseconds per kernel (Python, dispatcher, autograd, launch) and runs ahead: a
kernel starts when the GPU is free and the host has launched it. GPU idle time is reported as
`waiting for launches`.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveFloat

from finetune.config.paths import ASSETS
from finetune.config.yaml import read_text
from finetune.errors import ConfigError
from finetune.estimator.memory.overheads import sdpa_kernel
from finetune.estimator.speed.fusion import Launch, launches
from finetune.estimator.speed.operators import (
    OF_ONE_LAUNCH,
    MatrixProduct,
    Precision,
    attention_flops,
    base_name,
    dtype_name,
    is_backward_attention,
    product_of,
)
from finetune.estimator.speed.step_parts import StepPart, classes_of
from finetune.estimator.trace.trace import Op
from finetune.hardware.device import cuda_of, gemm_engine
from finetune.hardware.gpus import Gpu, Peak
from finetune.hardware.versions import torch_of_gpus

TABLE = ASSETS / "efficiency.yaml"

Direction = Literal["forward", "backward"]
AttentionKernel = Literal["flash", "cudnn"]
HostKind = Literal["eager", "slow", "compiled", "native", "generate"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(_Row):
    """Microseconds of host time per kernel, by phase."""

    forward: float
    backward: float
    optimizer: float

    def microseconds(self, phase: str) -> float:
        """Time in a phase; recomputation is a forward."""
        return getattr(self, phase, self.forward)


class Shared(_Row):
    """Efficiencies independent of the GPU, explained in the table."""

    bandwidth: PositiveFloat
    l2: PositiveFloat
    columns: PositiveFloat
    transpose: PositiveFloat
    rowwise: PositiveFloat
    blocks: PositiveFloat
    masked_attention: PositiveFloat
    pipeline_k: PositiveFloat
    dequantize: PositiveFloat
    update_instructions: dict[str, PositiveFloat]
    kernel_us: PositiveFloat
    before_update_ms: PositiveFloat
    after_update_ms: PositiveFloat
    scatter_time: PositiveFloat
    scatter_ratio: PositiveFloat


class Efficiency(_Row):
    """Efficiencies of one GPU.

    Attributes:
        gemm: Fraction of the dense peak, by operand precision.
        attention: Fraction of the BF16 peak, by direction: of the kernel behind SDPA.
        flash: Same of FlashAttention-2, which documents of different lengths run but where cuDNN
            takes them.
        masked: Same with an explicit mask, which neither flash nor cuDNN attention supports.
        short: Tokens of a sequence that reaches half of `attention`, and half of `flash`, by
            direction; none: any.
    """

    gemm: dict[str, PositiveFloat]
    attention: dict[Direction, PositiveFloat]
    flash: dict[Direction, PositiveFloat]
    masked: dict[Direction, PositiveFloat]
    short: tuple[dict[Direction, float], dict[Direction, float]]
    shared: Shared


class _Family(_Row):
    name: str
    capability: tuple[tuple[int, int], ...]
    gemm: dict[str, PositiveFloat]
    outer_vector: PositiveFloat | None = None
    attention: dict[AttentionKernel, dict[Direction, PositiveFloat]]
    short: dict[AttentionKernel, dict[Direction, float]] = {}
    origin: str


class _Device(_Row):
    names: tuple[str, ...]
    gemm: dict[str, PositiveFloat]
    origin: str


class _Table(_Row):
    families: tuple[_Family, ...]
    devices: tuple[_Device, ...]
    shared: Shared
    hosts: dict[HostKind, Host]


@functools.cache
def _table() -> _Table:
    import yaml

    return _Table.model_validate(yaml.safe_load(read_text(TABLE)))


def host(kind: HostKind) -> Host:
    """Host time per kernel: eager PyTorch, compiled layers, or a program without Python."""
    return _table().hosts[kind]


def shared() -> Shared:
    return _table().shared


def efficiency_of(
    gpu: Gpu, attention: AttentionKernel | None = None, torch: tuple[int, ...] | None = None
) -> Efficiency:
    """Efficiencies of a GPU's family, or its own entry (power-limited models).

    Args:
        attention: default PyTorch's choice there.
        torch: version of torch, which decides what multiplies row-wise scales; default of GPUs.

    Raises:
        ConfigError: no family of the table has the GPU's compute capability.
    """
    table = _table()
    family = next((row for row in table.families if gpu.capability in row.capability), None)
    if family is None:
        known = ", ".join(row.name for row in table.families)
        raise ConfigError(
            f"no efficiency is known for {gpu.name} (compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]})",
            where=str(TABLE),
            why=f"step times are predicted for: {known}",
            fix="--gpu with a GPU of one of these",
        )
    # Some models of a family are held back by their power limit, and reach less of the same peak.
    own = next((row for row in table.devices if gpu.name in row.names), None)
    if attention is None:
        # 128 is the head size of nearly all models of the table; others pick their kernel in the
        # trace.
        picked = sdpa_kernel(gpu.capability, torch_of_gpus(), head_dim=128, masked=False)
        attention = "cudnn" if picked == "cudnn" else "flash"
    flash, slower = family.attention["flash"], table.shared.masked_attention
    cuda = cuda_of(torch or torch_of_gpus(), None)
    common = table.shared
    # From CUDA 12.9 on cuBLASLt has scales by row itself; before, CUTLASS does, at another speed.
    if gemm_engine("rowwise", gpu.capability, cuda) == "cuBLASLt outer-vector":
        common = common.model_copy(update={"rowwise": family.outer_vector or common.rowwise})
    return Efficiency(
        gemm=own.gemm if own else family.gemm,
        attention=family.attention.get(attention, flash),
        flash=flash,
        masked={direction: share * slower for direction, share in flash.items()},
        short=(family.short.get(attention, {}), family.short.get("flash", {})),
        shared=common,
    )


# ---------------------------------------------------------------------------------------- roofline

Bound = Literal["compute", "memory", "launch"]

# Output tiles of cuBLAS and CUTLASS (rows, columns, rate relative to large ones): 64 x 64 loads
# twice the operands per product of 128 x 128. Fitted rates, see `fit` in assets/efficiency.yaml.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.60))
# Split-K factors, considered where tiles are too few.
_SPLITS = (1, 2, 4, 8, 16)


class Kernel(NamedTuple):
    """Time of one kernel, its FLOPs, and the roof that bounds it."""

    seconds: float
    flops: float
    bound: Bound


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a sequence of operators (usually one optimizer step).

    Attributes:
        by_class: GPU seconds by part of the step, and `waiting for launches`; sum to `seconds`.
        bound: Roof that bounds most of the time of each part.
        mfu: FLOPs without recomputation / (`seconds` x dense BF16 peak).
    """

    seconds: float
    by_class: dict[str, float]
    bound: dict[str, Bound]
    mfu: float


@dataclass(frozen=True)
class Roofline:
    """Sustained rates of one device and of its host."""

    gpu: Gpu
    efficiency: Efficiency
    host: Host

    def step_time(
        self, ops: Sequence[Op], *, compiled: Callable[[Op], str | bool] | None = None
    ) -> StepTime:
        """Predict the time of traced operators; those that `compiled` selects may fuse.

        Raises:
            ConfigError: the GPU lacks matrix units for a precision of the trace.
        """
        classes = classes_of(ops)
        by_class: dict[str, float] = defaultdict(float)
        by_bound: dict[str, dict[Bound, float]] = defaultdict(lambda: defaultdict(float))
        useful = issued = ends = 0.0
        for launch in launches(ops, compiled):
            op = ops[launch.ops[0]]
            kernel = self.kernel_time(op, launch)
            issued += self.host.microseconds(op.phase) * 1e-6
            # The host runs ahead, so the GPU waits only where it is done before the next launch is
            # issued.
            waited = max(0.0, issued - ends)
            ends = max(ends, issued) + kernel.seconds
            cls = _class(ops, launch, classes)
            by_class[cls] += kernel.seconds
            by_class[StepPart.WAITING] += waited
            by_bound[cls]["launch" if waited > kernel.seconds else kernel.bound] += kernel.seconds
            # MFU by the usual definition (PaLM, arXiv 2204.02311, appendix B): recomputation is no
            # useful work.
            useful += 0.0 if op.phase == "recompute" else kernel.flops
        return StepTime(
            seconds=ends,
            by_class=dict(sorted(by_class.items(), key=lambda item: -item[1])),
            bound={cls: max(times, key=lambda b: times[b]) for cls, times in by_bound.items()},
            mfu=useful / (ends * self.gpu.half_peak) if ends else 0.0,
        )

    def kernel_time(self, op: Op, launch: Launch) -> Kernel:
        """Time of one kernel in isolation; `op` is its first operator."""
        memory = (launch.read + launch.written) / self._bandwidth(launch)
        # These have a launch for all tensors together, which is nothing for each.
        start = 0.0 if op.name in OF_ONE_LAUNCH else self.efficiency.shared.kernel_us * 1e-6
        compute = flops = 0.0
        if launch.kind == "gemm" and (product := product_of(op)):
            flops = product.flops
            compute = self.product_seconds(product)
        elif launch.kind == "attention":
            flops, masked = attention_flops(op)
            shares = self.efficiency
            flash = base_name(op).startswith("flash")
            plain, short = (shares.flash if flash else shares.attention), shares.short[flash]
            wide = dtype_name(op.inputs[0]) == "float32"  # the kernel of masks takes it alone
            reached = shares.masked if masked or wide else plain
            direction: Direction = "backward" if is_backward_attention(op) else "forward"
            peak = wide_peak(self.gpu) if wide else self.gpu.half_peak
            tokens = op.inputs[0].shape[-2]  # of q, in backward of its output's gradient
            # A sequence of `short` tokens reaches half: t / (t + short) of the rate of a long one.
            shorter = 1 if reached is shares.masked else 1 + short.get(direction, 0) / tokens
            compute = flops * shorter / (peak * reached[direction])
        elif op.name in OF_ONE_LAUNCH:
            every = self.efficiency.shared.update_instructions
            each = max(every.get(dtype_name(x), 0.0) for x in op.inputs)
            # Half the peak is instructions a second, as a fused multiply-add counts as two FLOPs.
            starts = self.gpu.tflops.get("fp32", math.inf) * 1e12 / 2
            compute = math.prod(op.inputs[0].shape) * each / starts
        body = max(compute, memory)
        # Less work than a launch costs: a faster kernel would not be seen.
        if body < start:
            return Kernel(body + start, flops, "launch")
        return Kernel(body + start, flops, "compute" if compute > memory else "memory")

    def product_seconds(self, product: MatrixProduct) -> float:
        """Compute-bound seconds of a GEMM `[M, K] @ [K, N]`."""
        share = shape_share(product, self.gpu.sms, self.efficiency.shared.pipeline_k)
        return product.flops / (self._rate(product.precision) * share)

    def _rate(self, precision: Precision) -> float:
        """Sustained FLOP/s of an arbitrarily large GEMM in this precision."""
        gemm, shared = self.efficiency.gemm, self.efficiency.shared
        if precision == "bf16":
            return self.gpu.half_peak * gemm["bf16"]
        peak: Peak = precision if precision in ("fp32", "fp4") else "fp8"
        share = gemm.get("fp8" if peak == "fp4" else peak)  # FP4's own is not known
        if peak not in self.gpu.tflops or share is None:
            raise ConfigError(
                f"{self.gpu.name} has no matrix units for {peak}",
                why="the step holds matrix products in that precision",
                fix="the recipe's _bf16 twin or precision.compute=bf16, or --gpu with another GPU",
            )
        factor = {"fp8_rowwise": shared.rowwise, "fp8_blocks": shared.blocks, "fp4": shared.blocks}
        return self.gpu.tflops[peak] * 1e12 * share * factor.get(precision, 1.0)

    def _bandwidth(self, launch: Launch) -> float:
        shared = self.efficiency.shared
        if launch.kind == "dequantize":
            return self.gpu.gb_s * 1e9 * shared.dequantize
        speed = self.gpu.gb_s * 1e9 * shared.bandwidth
        if launch.pattern != "straight":
            speed *= shared.columns if launch.pattern == "columns" else shared.transpose
        # Half, since what was written before and what is read now share the cache.
        if launch.kind != "gemm" and launch.read + launch.written <= self.gpu.l2_mib * 2**20 / 2:
            speed *= shared.l2
        return speed


def roofline_of(
    gpu: Gpu,
    launched_by: HostKind = "eager",
    attention: AttentionKernel | None = None,
    torch: tuple[int, ...] | None = None,
) -> Roofline:
    """Build a roofline from the efficiency table, see `efficiency_of`.

    Raises:
        ConfigError: the table has no entry for the GPU's compute capability.
    """
    return Roofline(gpu, efficiency_of(gpu, attention, torch), host(launched_by))


def wide_peak(gpu: Gpu) -> float:
    """Dense peak FLOP/s of attention in float32: three TF32 products for each, where there are any.

    Source: CUTLASS' `OpMultiplyAddFastF32`, which memory-efficient attention uses from Ampere on.
    """
    return (gpu.tflops["tf32"] / 3 if "tf32" in gpu.tflops else gpu.tflops["fp32"]) * 1e12


def shape_share(product: MatrixProduct, units: int, pipeline_k: float) -> float:
    """Efficiency of a GEMM's shape relative to an arbitrarily large one, at most 1.

    On 132 multiprocessors, M x N x K = 16896 x 256 x 8192 makes 132 tiles of 128 x 256: one full
    wave, 0.98. With 128 more rows there are 133 tiles and the second wave is nearly empty: the best
    choice of tiles and splits reaches 0.80.

    `units` are multiprocessors; `pipeline_k` is the fill and drain of a tile, in elements of K.
    """
    best = math.inf  # seconds at 1 FLOP/s
    for rows, columns, relative in _TILES:
        tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
        # Libraries split K where tiles leave multiprocessors idle; with many waves it only adds
        # traffic.
        for split in _SPLITS if tiles < 2 * units else (1,):
            rounds = math.ceil(tiles * split / units)
            depth = product.k / split + pipeline_k
            best = min(best, 2.0 * rows * columns * depth * rounds * units / relative)
    return product.flops / best


def _class(ops: Sequence[Op], launch: Launch, classes: Sequence[str]) -> str:
    """Part of the step that a kernel belongs to: the one with the most bytes."""
    if len(launch.ops) == 1:
        return classes[launch.ops[0]]
    weights: dict[str, float] = defaultdict(float)
    for index in launch.ops:
        op = ops[index]
        weights[classes[index]] += sum(o.nbytes for o in (*op.inputs, *op.outputs))
    return max(weights, key=lambda cls: weights[cls])
