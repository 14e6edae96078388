"""Measures the steps between two health rows: tokens, seconds, and what they make of the GPU.

Time runs from the end of a step to the end of the next, data loading included; evaluation, saving
and steps that were looked into are left out. On a GPU, work is queued ahead of the clock; over an
interval of many steps, each of which fetches a number before the optimizer, that evens out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from finetune import float32, session
from finetune.device import Device, this_device
from finetune.gpus import find_gpu
from finetune.health.utilisation import Work, least_bandwidth_gb_s, mfu, optimizer_bytes, work_of
from finetune.proof import Proof


class Speed:
    """Tokens and seconds since the last `restart`.

    Attributes:
        work: of the micro-step that the proof observed, None before it was.
        steps, tokens, seconds: since the last `restart`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._witnessed_tokens = 0
        self.work: Work | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now."""
        self._mark, self.seconds, self.steps, self.tokens = self._clock(), 0.0, 0, 0

    def resume(self) -> None:
        """Go on after something that is not training."""
        self._mark = self._clock()

    def begin_micro_step(self, inputs: Any) -> None:
        """Count the tokens of a micro-step, which is about to run."""
        ids = inputs.get("input_ids")
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        self.tokens += tokens
        proof = _proof()
        if self.work is None and proof is not None and tokens:
            if not proof.layers:
                self._witnessed_tokens = tokens  # the witness looks at this micro-step
            elif self._witnessed_tokens:
                self.work = work_of(proof.layers, self._witnessed_tokens)

    def end_step(self) -> None:
        """Count an optimizer step."""
        now = self._clock()
        self.seconds += now - self._mark
        self.steps += 1
        self._mark = now

    def row(
        self,
        named: Iterable[tuple[str, Tensor]],
        optimizer: Optimizer,
        tell: Callable[[str, str], None],
    ) -> dict[str, float]:
        """`health/mfu` and `health/bandwidth_at_least_gb_s` of the interval; empty on a CPU.

        Args:
            named: trainable parameters.
            optimizer: the one that owns them.
            tell: called with a key and a line where something cannot be known.
        """
        device = _device()
        if device.kind != "cuda" or self.work is None or not self.tokens or self.seconds <= 0:
            return {}
        moved = self.steps * optimizer_bytes(named, optimizer)
        speed = least_bandwidth_gb_s(self.work, self.tokens, moved, self.seconds)
        row = {"health/bandwidth_at_least_gb_s": speed}
        gpu = find_gpu(device)
        if gpu is None:
            tell("peak", f"the peak of {device.name!r} is not known here, so there is no MFU")
            return row
        row["health/bandwidth_at_least"] = speed / gpu.gb_s
        tf32 = float32.in_force()["cuda.matmul"] == "tf32"
        share = None if _emulates() else mfu(self.work, self.tokens, self.seconds, gpu, tf32=tf32)
        return row if share is None else row | {"health/mfu": share}


def _proof() -> Proof | None:
    running = session.in_force()
    return running.training[0] if running is not None else None


def _device() -> Device:
    running = session.in_force()
    return running.device if running is not None else this_device()


def _emulates() -> bool:
    running = session.in_force()
    if running is None or running.precision.compute != "fp8":
        return False
    return running.precision.backend == "emulated" or not running.device.has_fp8
