"""Bytes of weights stored in FP8 or NF4, their scales included; arithmetic that needs no torch.

A weight in FP8 has a float32 scale for each row, or one. In NF4 (QLoRA: Dettmers et al. 2023, arXiv
2305.14314, by bitsandbytes with double quantisation) 64 weights in a row share an absmax, which is
itself held in 8 bits, 256 of them under one float32:

    bits per weight = 4 + 8 / 64 + 32 / (64 · 256) = 4.127
"""

from __future__ import annotations

import math

from finetune.config.schema import Storage

BLOCK = 64
"""Weights of NF4 that share an absmax."""
SUPERBLOCK = 256
"""Absmaxes that share a float32 scale."""


def stored_bytes(storage: Storage, n: int, k: int) -> int:
    """Bytes of a weight [N, K] under `model.storage`."""
    return nf4_bytes(n * k) if storage == "nf4" else fp8_bytes(n, k)


def nf4_bytes(numel: int) -> int:
    """Bytes of one weight of `numel` elements with its scales, lookup tables left out."""
    blocks = math.ceil(numel / BLOCK)
    return math.ceil(numel / 2) + blocks + 4 * math.ceil(blocks / SUPERBLOCK)


def fp8_bytes(n: int, k: int, scales: int | None = None) -> int:
    """Bytes of a weight [N, K] in FP8: codes, and float32 scales, one for each row."""
    return n * k + 4 * (n if scales is None else scales)
