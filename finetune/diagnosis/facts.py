"""The facts of one diagnosed step, from which its causes are read. Plain data, and what follows."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config import RunConfig
from finetune.device import Device
from finetune.diagnosis.groups import Group
from finetune.diagnosis.parts import CASTS, FP8_GEMM, Part
from finetune.diagnosis.payoff import Payoff


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
    parts: dict[Part, float]
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
        return self.parts.get(FP8_GEMM, 0.0) + self.parts.get(CASTS, 0.0)

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
