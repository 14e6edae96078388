"""Seconds that GPUs spend on each other's weights and gradients, where nothing hides them.

Fully sharded training (FSDP) moves, per micro-batch and GPU, with W bytes of weights among n:

    gather in forward, gather in backward        2 W (n - 1) / n
    scatter of the gradients of what is trained    G (n - 1) / n

Data parallelism with whole copies (DDP) moves `2 G (n - 1) / n`, once per update.

A collective gets a part of a link's stated speed: most of NVLink's, little of PCIe's where GPUs
cannot reach each other's memory and data goes through the host's. It runs beside computation, yet
some of it always shows: the first layer waits for its weights, the last gradient for its scatter,
and both sides share memory bandwidth.

Limits: one machine. Between machines the network's speed rules, which is not in the table.
"""

from __future__ import annotations

from finetune.gpus import Gpu

SHARE = {"nvlink": 0.35, "infinity-fabric": 0.35, "pcie": 0.10}
"""Of a link's stated speed, in collectives. NVLink: NCCL's own tests (`busbw` of 300-370 GB/s on
eight H100). PCIe: GeForce cards, without peer access."""
SHOWN = 0.5
"""Of communication that does not outlast computation, the part that is not hidden."""


def fsdp_seconds(
    weight_bytes: float, gradient_bytes: float, gpu: Gpu, gpus: int, compute_s: float
) -> float:
    """Seconds of a micro-batch that sharded training adds to `compute_s` of computation."""
    if gpus < 2:
        return 0.0
    moved = (2 * weight_bytes + gradient_bytes) * (gpus - 1) / gpus
    return _shown(moved / (gpu.link_gb_s * 1e9 * SHARE[gpu.link]), compute_s)


def ddp_seconds(gradient_bytes: float, gpu: Gpu, gpus: int, compute_s: float) -> float:
    """Seconds of an update that summing gradients over whole copies adds."""
    if gpus < 2:
        return 0.0
    moved = 2 * gradient_bytes * (gpus - 1) / gpus
    return _shown(moved / (gpu.link_gb_s * 1e9 * SHARE[gpu.link]), compute_s)


def _shown(seconds: float, compute_s: float) -> float:
    return max(SHOWN * seconds, seconds - compute_s)
