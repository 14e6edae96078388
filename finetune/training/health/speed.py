"""GPU use between two health rows: model FLOPs utilization and a lower bound of memory bandwidth.

*MFU* (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B) is the time of the model's matmuls at
the GPU's peak over the time of the steps:

    MFU = Σ over precisions (FLOPs in p / peak of p) / seconds

so the FP8 half of a step is measured by the FP8 peak. FLOPs are those witnessed in the first
micro-step, by executed precision, per token of that micro-step, without recomputation by
checkpointing and fused losses (that would be hardware utilization). Attention, quadratic in the
length, is taken as seen.

*Bandwidth, at least*: bytes that must move over seconds. Counted are operands and results of the
witnessed GEMMs, once each in their precision, and per step reading and writing of weights and
optimizer state and reading of gradients. Casts, norms, attention, logits and eager operations are
not: the true figure is higher, by a factor of two or more with little fusion. Operands that stay in
the GPU's cache between GEMMs make it slightly too high.

There is no MFU if the GPU's peak is unknown, or FP8 is emulated and runs on other units.

Time runs from the end of a step to the end of the next, data loading included, without evaluation,
saving and observed steps. GPU work is queued ahead of the clock; over many steps, each of which
fetches a number before the optimizer, that evens out. (The run's `StepTimer` counts tokens without
padding, over all processes, when a loss is logged; this counts padding too, per process.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from finetune.hardware.device import this_device
from finetune.hardware.gpus import Gpu, find_gpu
from finetune.hardware.requirements import emulates
from finetune.precision.proof.movement import local_part, stored_bytes
from finetune.precision.proof.witness import ATTENTION
from finetune.runs.receipt import LayerReceipt
from finetune.training import compute_types, session

OPERAND_BYTES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
RESULT_BYTES = 2.0
"""GEMMs write BF16 or FP16; those that write float32 write more."""
FUSED_ATTENTION = {"fprop": 2, "dgrad": 5}
"""Matmuls in one call of fused attention, forward and backward."""


@dataclass(frozen=True)
class Work:
    """Computation and traffic of one observed micro-step.

    Attributes:
        flops: floating-point operations by precision, without recomputation.
        gemm_bytes: operands and results of its GEMMs, with recomputation.
        tokens: tokens of that micro-step, with padding.
    """

    flops: dict[str, float]
    gemm_bytes: float
    tokens: int


def work_of(layers: Iterable[LayerReceipt], tokens: int) -> Work:
    """Work of the observed micro-step, from the receipt's layers."""
    flops: Counter[str] = Counter()
    moved = 0.0
    for row in layers:
        matmuls = FUSED_ATTENTION if row.name == ATTENTION else {}
        units = {gemm: matmuls.get(gemm, 1) for gemm in row.calls}
        total = sum(calls * units[gemm] for gemm, calls in row.calls.items())
        if not total:
            continue
        unit = row.flops / total
        for gemm, calls in row.calls.items():
            precision = getattr(row, gemm)
            if once := (calls - _recomputed(row, gemm)) * units[gemm] * unit:
                flops[precision] += once  # pyright: ignore[reportArgumentType]
            if calls and all(row.shape):
                moved += calls * _gemm_bytes(row.shape, unit, gemm, precision)
    return Work(dict(flops), moved, tokens)


def _recomputed(row: LayerReceipt, gemm: str) -> int:
    """Forward calls without a matching backward; none if no backward was seen."""
    backward = max(row.calls.get("dgrad", 0), row.calls.get("wgrad", 0))
    seen = all(row.shape) or row.name == ATTENTION
    return max(row.calls[gemm] - backward, 0) if gemm == "fprop" and backward and seen else 0


def _gemm_bytes(shape: tuple[int, int], flops: float, gemm: str, precision: str) -> float:
    n, k = shape
    m = flops / (2 * n * k)
    x, w, y = m * k, n * k, m * n
    operands, result = {"fprop": (x + w, y), "dgrad": (y + w, x), "wgrad": (y + x, w)}[gemm]
    width = min(OPERAND_BYTES.get(p, RESULT_BYTES) for p in precision.split("+"))
    return operands * width + result * RESULT_BYTES


def optimizer_bytes(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Bytes that one optimizer step must move: weights and state twice, gradients once."""
    weights = sum(p.numel() * p.element_size() for p in map(local_part, parameters))
    return 3 * weights + 2 * stored_bytes(optimizer)


def mfu(work: Work, tokens: int, seconds: float, gpu: Gpu, *, tf32: bool = False) -> float | None:
    """Model FLOPs utilization, 0 to 1; None if a precision has no known peak.

    Example: 1e12 FP8 FLOPs per token, 1,000 tokens in 1 s at a peak of 1,979e12 FLOP/s: 0.51.

    Args:
        tokens: tokens of the measured steps, on this GPU.
        seconds: duration of these steps.
        tf32: float32 matmuls may use TF32.
    """
    at_peak_s = 0.0
    for precision, flops in work.flops.items():
        kinds = ["tf32" if p == "fp32" and tf32 else p for p in precision.split("+")]
        peaks = [peak for kind in kinds if (peak := gpu.tflops.get(kind)) is not None]  # pyright: ignore
        if len(peaks) < len(kinds):
            return None
        at_peak_s += flops / (min(peaks) * 1e12)
    return at_peak_s * (tokens / work.tokens) / seconds


def least_bandwidth_gb_s(work: Work, tokens: int, per_steps_bytes: float, seconds: float) -> float:
    """Lower bound of the memory bandwidth in GB/s over steps of so many tokens on this GPU."""
    return (work.gemm_bytes * tokens / work.tokens + per_steps_bytes) / seconds / 1e9


class Speed:
    """Tokens and seconds since the last `restart`.

    Attributes:
        work: work of the micro-step that the proof observed, None before.
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
        """Continue after work that is not training."""
        self._mark = self._clock()

    def begin_micro_step(self, inputs: Any) -> None:
        """Count the tokens of the micro-step about to run."""
        # Trainers that generate, such as GRPO's, get rows of prompts here.
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        self.tokens += tokens
        running = session.in_force()
        proof = running.proof if running is not None else None
        if self.work is None and proof is not None and tokens:
            if not proof.layers:
                self._witnessed_tokens = tokens  # the witness observes this micro-step
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
        parameters: Iterable[Tensor],
        optimizer: Optimizer,
        warn: Callable[[str, str], None],
    ) -> dict[str, float]:
        """Metrics `health/mfu` and `health/bandwidth_at_least_gb_s`; empty on a CPU."""
        running = session.in_force()
        device = running.device if running is not None else this_device()
        if device.kind != "cuda" or self.work is None or not self.tokens or self.seconds <= 0:
            return {}
        moved = self.steps * optimizer_bytes(parameters, optimizer)
        speed = least_bandwidth_gb_s(self.work, self.tokens, moved, self.seconds)
        row = {"health/bandwidth_at_least_gb_s": speed}
        gpu = find_gpu(device)
        if gpu is None:
            warn("peak", f"the peak of {device.name!r} is not known here, so there is no MFU")
            return row
        row["health/bandwidth_at_least"] = speed / gpu.gb_s
        p = running.precision if running is not None else None
        if p and emulates(p, device):
            return row
        tf32 = compute_types.in_force()["cuda.matmul"] == "tf32"
        share = mfu(self.work, self.tokens, self.seconds, gpu, tf32=tf32)
        return row if share is None else row | {"health/mfu": share}
