"""Bytes of weights stored in FP8 or NF4, with scales; arithmetic without torch.

FP8 has one float32 scale per row or per tensor. In NF4 (QLoRA: Dettmers et al. 2023, arXiv
2305.14314, by bitsandbytes with double quantization) 64 weights in a row share an absmax, itself
stored in 8 bits, 256 of them under one float32:

    bits per weight = 4 + 8 / 64 + 32 / (64 · 256) = 4.127
"""

from __future__ import annotations

import math

from finetune.config.schema import Storage

BLOCK = 64
"""Number of NF4 weights that share an absmax."""
SUPERBLOCK = 256
"""Number of absmaxes that share a float32 scale."""


def stored_bytes(storage: Storage, n: int, k: int) -> int:
    """Bytes of a weight [N, K] under `model.storage`."""
    return nf4_bytes(n * k) if storage == "nf4" else fp8_bytes(n, k)


def nf4_bytes(numel: int) -> int:
    """Bytes of one weight of `numel` elements with its scales, lookup tables left out."""
    blocks = math.ceil(numel / BLOCK)
    return math.ceil(numel / 2) + blocks + 4 * math.ceil(blocks / SUPERBLOCK)


def fp8_bytes(n: int, k: int, scales: int | None = None) -> int:
    """Bytes of a weight [N, K] in FP8: codes and float32 scales, by default one per row."""
    return n * k + 4 * (n if scales is None else scales)
