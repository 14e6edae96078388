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
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.errors import ConfigError
from finetune.estimator.efficiency import Efficiency
from finetune.estimator.fusion import Launch
from finetune.estimator.kernels import (
    Precision,
    Product,
    attention_flops,
    is_backward_attention,
    product_of,
)
from finetune.gpus import Gpu

if TYPE_CHECKING:
    from finetune.estimator.tape import Op

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
