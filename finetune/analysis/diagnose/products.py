"""The products that ran in FP8, timed once more in BF16, so that what FP8 saves is measured.

Of each group and GEMM one product of the same sizes is multiplied by torch on the same device, from
operands of random numbers, a few times; the median counts. Operands lie as linear layers have them:
x [M, K], w [N, K], g [M, N], all with their last dimension innermost.

Limit: on a GPU products of less than some ten microseconds are timed with what a launch costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from finetune.analysis.diagnose.layer_groups import Group

REPEAT = 5
QUEUED = 10
"""Products between two looks at the clock on a GPU, where a look costs as much as a small one."""
LONGEST_S = 0.2
"""Of one product: where it takes longer it is timed once."""


def with_bf16_times(
    groups: Sequence[Group], device: torch.device, micro_batches: int
) -> list[Group]:
    """Add `bf16_seconds` to the groups that have FP8 GEMMs.

    Args:
        groups: with tokens and calls of one micro-step.
        device: that they ran on.
        micro_batches: of one optimizer step.
    """
    known: dict[tuple[str, int, int, int], float] = {}
    found = []
    for group in groups:
        m, (n, k), seconds = group.tokens, group.shape, 0.0
        if not group.is_low or not m:
            found.append(group)
            continue
        for gemm in group.ran:  # those kept high too: their time is among the group's seconds
            key = (gemm, m, n, k)
            if key not in known:
                known[key] = seconds_of(gemm, m, n, k, device)
            seconds += known[key] * group.calls[gemm] * micro_batches
        found.append(replace(group, bf16_seconds=seconds))
    return found


def seconds_of(gemm: str, m: int, n: int, k: int, device: torch.device) -> float:
    """Of one BF16 product: fprop [M,K]x[K,N], dgrad [M,N]x[N,K] or wgrad [N,M]x[M,K]."""

    def made(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    match gemm:
        case "fprop":
            a, b = made(m, k), made(n, k).t()
        case "dgrad":
            a, b = made(m, n), made(n, k)
        case _:
            a, b = made(m, n).t(), made(m, k)
    return _median(lambda: a @ b, device)


def _median(product: Callable[[], Tensor], device: torch.device) -> float:
    times: list[float] = []
    _synchronise(device)
    calls = QUEUED if device.type == "cuda" else 1
    for repetition in range(REPEAT + 1):
        start = time.perf_counter()
        for _ in range(calls):
            product()
        _synchronise(device)
        seconds = (time.perf_counter() - start) / calls
        if repetition or seconds > LONGEST_S:  # the first one chooses a kernel
            times.append(seconds)
        if seconds > LONGEST_S:
            break
    return median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
