"""From which size on FP8 pays on a GPU: every cast is paid for by the products that use it.

A product of M tokens, N outputs and K inputs in FP8 instead of BF16 saves

    2 M N K · (1/p16 - 1/p8)        p16, p8: FLOP/s that the GPU sustains in each

and needs its operands cast: x [M, K] and g [M, N] each time, w [N, K] each time unless it is held
as codes. A cast reads two bytes and writes one an element, and reads them once more to find the
amax unless that is delayed or fused with what made the operand: b bytes over the bandwidth B. The
size of the operand cancels, and what is left is the dimension that it does not have:

    cast of x  pays where N > T        T = b / (2 B (1/p16 - 1/p8))
    cast of g  pays where K > T
    cast of w  pays where M > T        M: tokens of a micro-batch, on one GPU

T is 820 for an H100 by its sustained rates with b = 3, 1,370 with b = 5. So a micro-batch has too
few tokens below T unless weights are held in FP8, and a layer is too small where N or K is below T
(the key and value projections under grouped attention are the usual case). A product has no use of
FP8 either where it waits for memory: with weights of one byte that ends at M = p8 / (2 B).

Limits: products that fill a GPU badly gain less; a group's `bf16_seconds`, measured, says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.estimator.efficiency import efficiency_of
from finetune.estimator.roofs import half_peak
from finetune.gpus import Gpu

FUSED_BYTES, EAGER_BYTES = 3.0, 5.0
"""Moved for each element that is cast: read and written once, or read once more for its amax."""


@dataclass(frozen=True)
class Payoff:
    """What one GPU needs for FP8 to pay.

    Attributes:
        least: T, the least N, K, and M of a weight that is cast each time.
        least_tokens: M below which even weights held in FP8 make a product wait for memory.
        ratio: how many times as fast a large product is in FP8, casts not counted.
    """

    least: int
    least_tokens: int
    ratio: float


def payoff_of(gpu: Gpu, *, cast_bytes: float = FUSED_BYTES, rowwise: bool = False) -> Payoff | None:
    """What a GPU needs, None where it has no FP8 units.

    Args:
        gpu: its line of the table.
        cast_bytes: moved for each element that is cast.
        rowwise: products have a scale for each row, whose kernels are slower.
    """
    if "fp8" not in gpu.tflops:
        return None
    shares = efficiency_of(gpu)
    if "fp8" not in shares.gemm:
        return None
    factor = shares.shared.rowwise if rowwise else 1.0
    p16 = half_peak(gpu) * shares.gemm["bf16"]
    p8 = gpu.tflops["fp8"] * 1e12 * shares.gemm["fp8"] * factor
    bandwidth = gpu.gb_s * 1e9 * shares.shared.bandwidth
    if p8 <= p16:
        return None
    least = cast_bytes / (2 * bandwidth * (1 / p16 - 1 / p8))
    return Payoff(round(least), round(p8 / (2 * bandwidth)), p8 / p16)
