"""Whether a weight has moved, for the price of one pass over its bits and eight bytes to keep."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number: well mixed bits
_CHUNK = 2**22


def fingerprint(parameter: Tensor) -> int:
    """A hash of a parameter's bits (of this process's shard, when sharded).

    Σ bits[i] · (i · odd | 1) in wrapping 64-bit integers. Position counts: a plain xor or sum would
    miss the same change made to an even number of equal weights, as a norm's ones are.
    """
    local = getattr(parameter, "_local_tensor", parameter).detach()
    flat = local.contiguous().view(_BITS[local.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].long()
        position = torch.arange(start, start + bits.numel(), device=flat.device)
        total += (bits * (position * _ODD | 1)).sum()
    return int(total)
