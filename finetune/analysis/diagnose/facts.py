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

from finetune.analysis.diagnose.layer_groups import Group
from finetune.config.schema import RunConfig
from finetune.estimator.speed.efficiency import efficiency_of
from finetune.estimator.speed.roofline import half_peak
from finetune.estimator.speed.step_parts import StepPart
from finetune.hardware.device import Device
from finetune.hardware.gpus import Gpu

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


# ------------------------------------------------------------------------------------------
# The facts of one diagnosed step, from which its causes are read. Plain data, and what follows.


@dataclass(frozen=True)
class Facts:
    """What was seen of a step.

    Attributes:
        config: of the run, as it ran.
        device: where.
        groups: its layers, with times.
        parts: part -> seconds of one step; they add up to the step.
        recompute_seconds: of it, what checkpointing computed a second time.
        adapter_seconds: of it, adapters: their products and what is elementwise of them.
        micro_batches: of one step.
        payoff: what the GPU needs for FP8 to pay; None where that is not known.
        compiled: what the receipt says of compiling.
        adapters: what the receipt says of fusing adapters.
        masked: attention runs under an explicit mask over packed rows.
        trainable: parameters that train.
    """

    config: RunConfig
    device: Device
    groups: tuple[Group, ...]
    parts: dict[StepPart, float]
    recompute_seconds: float = 0.0
    adapter_seconds: float = 0.0
    micro_batches: int = 1
    payoff: Payoff | None = None
    compiled: str = "off"
    adapters: str = ""
    masked: bool = False
    trainable: int = 0

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return sum(self.parts.values()) or 1e-12

    def share(self, seconds: float) -> float:
        """Of the step, 0 to 1."""
        return seconds / self.seconds

    @property
    def fp8_groups(self) -> list[Group]:
        """Layers with FP8 GEMMs."""
        return [group for group in self.groups if group.is_low]

    @property
    def ran_fp8(self) -> bool:
        """Whether anything ran in FP8."""
        return bool(self.fp8_groups)

    @property
    def low(self) -> str:
        """FP8 or FP4, whichever was asked."""
        return self.config.precision.low.upper()

    @property
    def emulated(self) -> bool:
        """Whether what ran in FP8 was emulated."""
        emulates = self.config.precision.backend == "emulated" or not self.device.has_fp8
        return self.ran_fp8 and emulates

    @property
    def is_compiled(self) -> bool:
        """Whether decoder layers are compiled."""
        return self.compiled.startswith("on")

    @property
    def fp8_seconds(self) -> float:
        """FP8 products and casts of one step."""
        return self.parts.get(StepPart.FP8_GEMM, 0.0) + self.parts.get(StepPart.CASTS, 0.0)

    @property
    def bf16_seconds(self) -> float | None:
        """That the same products take in BF16 here; None where that was not measured."""
        times = [group.bf16_seconds if group.seconds else None for group in self.fp8_groups]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if known and len(known) == len(times) else None

    @property
    def speed_now(self) -> float | None:
        """How many times as fast FP8 makes this step as BF16, all else being as it is.

        (T - f + b) / T: T the step, f its FP8 layers with their casts, b their products in BF16.
        """
        b = self.bf16_seconds
        if b is None:
            return None
        f = sum(group.seconds for group in self.fp8_groups)
        return (self.seconds - f + b) / self.seconds

    @property
    def ratio(self) -> float:
        """How many times as fast a large product is in FP8 here; 1 without FP8 units."""
        if not self.device.has_fp8:
            return 1.0
        return self.payoff.ratio if self.payoff is not None else 2.0

    @property
    def speed_best(self) -> float | None:
        """How many times as fast FP8 could make this step at best (Amdahl), were casts free.

        t / (t - b + b / r): t the step in BF16, b those of its products that FP8 may take, r how
        many times as fast they are in FP8.
        """
        if not self.ran_fp8:
            b = sum(group.gemm_seconds for group in self.groups if group.role == "base")
            t = self.seconds
        elif (measured := self.bf16_seconds) is not None and self.speed_now is not None:
            b, t = measured, self.seconds * self.speed_now
        else:
            return None
        return t / (t - b + b / self.ratio)
