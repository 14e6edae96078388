"""Facts of one diagnosed step: observations, the estimator's prediction, and sizes where FP8 pays.

*Break-even size.* A GEMM of M tokens, N outputs and K inputs in FP8 instead of BF16 saves

    2 M N K · (1/p16 - 1/p8)        p16, p8: sustained FLOP/s of the GPU

and needs its operands cast: x [M, K] and g [M, N] each time, w [N, K] each time unless it is stored
in FP8. A cast reads two bytes and writes one per element, and reads two more for the amax unless
that is delayed or fused into the producer: b bytes at bandwidth B. The operand's size cancels; the
dimension it lacks remains:

    cast of x  pays where N > T        T = b / (2 B (1/p16 - 1/p8))
    cast of g  pays where K > T
    cast of w  pays where M > T        M: tokens of a micro-batch, on one GPU

T is 820 for an H100 by its sustained rates with b = 3, 1,370 with b = 5. So a micro-batch needs T
tokens unless weights are stored in FP8, and a layer with N or K below T is too small (typically key
and value projections under grouped-query attention). A memory-bound GEMM gains nothing either: with
one-byte weights those are M < p8 / (2 B).

Limits: GEMMs that fill a GPU badly gain less; a group's measured `bf16_seconds` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from finetune.analysis.diagnose.groups import ObservedGroup
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.changes import rows_of
from finetune.estimator.predict import predict_fast
from finetune.estimator.speed.roofline import efficiency_of
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import Interval
from finetune.estimator.variants import pair_of
from finetune.hardware.device import Device
from finetune.hardware.gpus import Gpu, find_gpu, this_machine
from finetune.hardware.requirements import emulates

FUSED_CAST_BYTES, EAGER_CAST_BYTES = 3.0, 5.0
"""Bytes moved per element cast: read and written once, or read once more for its amax."""


class Payoff(NamedTuple):
    """Sizes from which FP8 pays on one GPU.

    Attributes:
        least: T, the least N and K, and the least M if weights are cast each time.
        least_tokens: M below which even GEMMs with weights stored in FP8 are memory bound.
    """

    least: int
    least_tokens: int


def payoff_of(gpu: Gpu, *, fused: bool = True, rowwise: bool = False) -> Payoff | None:
    """Sizes from which FP8 pays on a GPU, None without FP8 units.

    Args:
        fused: a cast finds the amax without a second read of its operand.
        rowwise: GEMMs with one scale per row, whose kernels are slower.
    """
    shares = efficiency_of(gpu) if "fp8" in gpu.tflops else None
    if shares is None or "fp8" not in shares.gemm:
        return None
    p16 = gpu.half_peak * shares.gemm["bf16"]
    p8 = gpu.tflops["fp8"] * 1e12 * shares.gemm["fp8"] * (shares.shared.rowwise if rowwise else 1.0)
    # No finite size pays then.
    if p8 <= p16:
        return None
    bandwidth = gpu.gb_s * 1e9 * shares.shared.bandwidth
    cast_bytes = FUSED_CAST_BYTES if fused else EAGER_CAST_BYTES
    least = cast_bytes / (2 * bandwidth * (1 / p16 - 1 / p8))
    return Payoff(round(least), round(p8 / (2 * bandwidth)))


@dataclass(frozen=True)
class PredictedStep:
    """An optimizer step as the estimator predicts it, in seconds.

    `speed` is FP8's relative to BF16, whichever of them the run is: most likely, low, high.
    """

    seconds: float
    parts: dict[StepPart, float]
    speed: Interval | None
    why: tuple[str, ...]


def predict(
    config: RunConfig, device: Device, processes: int, length: int
) -> tuple[PredictedStep | None, str]:
    """Predict the step, or return None and the reason; `length` is in tokens per row."""
    machine = this_machine(device, processes)
    if machine.gpu is None:
        return None, f"nothing is predicted for {device.name}: its speed is not known"
    try:
        # Packed rows are full; others are as long as the observed batch.
        if not config.train.packing:
            config = with_overrides(config, [f"train.max_length={length}"])
        measured = predict_fast(config, machine)
        beside = pair_of(measured)
    except FinetuneError as error:
        return None, f"nothing is predicted: {error.why or error.what}"
    step = measured.timing
    if step is None:
        return None, f"nothing is predicted for {device.name}"
    fp8 = measured.config.precision.compute == "fp8"
    parts: dict[StepPart, float] = {}
    for name, seconds in step.classes.items():
        part = StepPart(name).profiled(fp8=fp8)
        parts[part] = parts.get(part, 0.0) + seconds
    speed, why = (beside.gain, beside.reasons) if beside is not None else (None, ())
    return PredictedStep(step.seconds, parts, speed, why), ""


@dataclass(frozen=True)
class Facts:
    """Observed facts of one step.

    Attributes:
        parts: seconds by step part; they add up to the step.
        profiled_seconds: duration of the step under the profiler.
        adapter_seconds: time in adapters: GEMMs and elementwise operations.
        compiled, adapters: the receipt's lines on `torch.compile` and on fusing adapters.
        masked: attention runs under an explicit mask over packed rows.
        trainable: number of trainable parameters.
        nbytes: bytes that the kernels of a step move at least; 0 where they were not seen.
    """

    config: RunConfig
    device: Device
    groups: tuple[ObservedGroup, ...]
    parts: dict[StepPart, float]
    recompute_seconds: float = 0.0
    adapter_seconds: float = 0.0
    profiled_seconds: float = 0.0
    compiled: str = "off"
    adapters: str = ""
    masked: bool = False
    trainable: int = 0
    nbytes: float = 0.0

    @property
    def bandwidth(self) -> tuple[float, float] | None:
        """GB/s of memory in use over the step, at least, and this GPU's; None on a CPU."""
        gpu = find_gpu(self.device)
        return (self.nbytes / self.seconds / 1e9, gpu.gb_s) if gpu and self.nbytes else None

    @property
    def rows(self) -> int:
        return rows_of(self.config)[0]

    @property
    def micro_batches(self) -> int:
        return rows_of(self.config)[1]

    @property
    def payoff(self) -> Payoff | None:
        """Sizes from which FP8 pays on this GPU; None without FP8 units or its speed."""
        gpu, p = find_gpu(self.device), self.config.precision
        if gpu is None or not self.device.has_fp8:
            return None
        fused = self.is_compiled or p.engine.is_fused or p.facts.has_history
        return payoff_of(gpu, fused=fused, rowwise=p.facts.by_row)

    @property
    def seconds(self) -> float:
        # An empty profile divides by no zero.
        return sum(self.parts.values()) or 1e-12

    def share(self, seconds: float) -> float:
        return seconds / self.seconds

    def share_of(self, groups: Iterable[ObservedGroup]) -> float:
        return self.share(sum(group.seconds for group in groups))

    @property
    def fp8_groups(self) -> list[ObservedGroup]:
        """Layers with FP8 GEMMs."""
        return [group for group in self.groups if group.is_low]

    @property
    def ran_fp8(self) -> bool:
        return bool(self.fp8_groups)

    @property
    def low(self) -> str:
        """`FP8` or `FP4`, whichever was requested."""
        return self.config.precision.low.upper()

    @property
    def emulated(self) -> bool:
        return self.ran_fp8 and emulates(self.config.precision, self.device)

    @property
    def is_compiled(self) -> bool:
        return self.compiled.startswith("on")

    @property
    def waits(self) -> bool:
        """True if a GPU may wait for the host: the profiler, which slows the host, slows the step.

        Else kernels that are slower in steps without a profile are all that its share can be.
        """
        return self.profiled_seconds > self.seconds

    @property
    def bf16_seconds(self) -> float | None:
        """Seconds of the FP8 layers' GEMMs in BF16 here; None if not measured.

        At most `ratio` times as long as in FP8. They are timed alone, where BF16 draws more power
        than in a step, and a GPU at its limit runs slower: an H100's took up to 2.26 times as long.
        """
        most = math.inf if self.emulated else self.ratio
        times = [
            min(group.bf16_seconds, most * group.gemm_seconds)
            for group in self.fp8_groups
            if group.bf16_seconds is not None and group.seconds
        ]
        return sum(times) if times and len(times) == len(self.fp8_groups) else None

    @property
    def speed_now(self) -> float | None:
        """Speed of this step relative to BF16, all else equal.

        (T - f + b) / T: T the step, f the GEMMs of FP8 layers and all casts (those of compiled
        layers belong to no group), b these GEMMs in BF16.
        """
        b = self.bf16_seconds
        if b is None:
            return None
        f = sum(group.gemm_seconds for group in self.fp8_groups) + self.parts[StepPart.CASTS]
        return (self.seconds - f + b) / self.seconds

    @property
    def ratio(self) -> float:
        """Peak of FP8 (or FP4) relative to BF16's here; 1 without FP8 units."""
        if not self.device.has_fp8:
            return 1.0
        gpu, low = find_gpu(self.device), self.config.precision.low
        return 1e12 * gpu.tflops[low] / gpu.half_peak if gpu and low in gpu.tflops else 2.0

    @property
    def speed_best(self) -> float | None:
        """Bound of the speed relative to BF16 (Amdahl): free casts, GEMMs at the peak.

        t / (t - b + b / r): t the step in BF16, b its GEMMs that FP8 may take, r the `ratio`.
        """
        if not self.ran_fp8:
            b = sum(group.gemm_seconds for group in self.groups if group.role == "base")
            t = self.seconds
        elif (measured := self.bf16_seconds) is not None and self.speed_now is not None:
            b, t = measured, self.seconds * self.speed_now
        else:
            return None
        return t / (t - b + b / self.ratio)

    @property
    def verdict(self) -> str:
        """Verdict in a sentence: the speed of FP8 here, and its best possible speed."""
        now, best = self.speed_now, self.speed_best
        if not self.ran_fp8:
            text = f"Nothing ran in FP8: {self.config.precision.compute.upper()} was asked"
            if best is None or not self.device.has_fp8:
                return f"{text}, and FP8 cannot be faster here."
            return f"{text}. At best FP8 would make it {_beside_bf16(best)}."
        if now is None or best is None:
            return f"{self.low} ran; what it gains was not measured."
        if self.emulated:
            return f"{self.low} is emulated here, and makes the step {_beside_bf16(now)}."
        return (
            f"By the time of its products alone in BF16, {self.low} makes this step "
            f"{_beside_bf16(now)}; were casts free and products at the peak of {self.low}, it "
            f"would be {_beside_bf16(best)}."
        )


def _beside_bf16(speed: float) -> str:
    """Text such as `1.32 times as fast as in BF16`, or how much longer it takes."""
    if speed < 0.995:
        return f"take {1 / speed:.2f} times as long as in BF16"
    return f"{speed:.2f} times as fast as in BF16"
