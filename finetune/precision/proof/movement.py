"""Evidence that an optimizer step changed a weight: its bits, and the state the optimizer keeps.

A fingerprint costs one pass over the weight's bits and eight bytes to keep. Where the bits stand
still, the gradient and the optimizer's statistics tell a dead weight (all zeros) from one whose
update is less than its type can hold. Of sharded tensors this process's shard is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number: well mixed bits
_CHUNK = 2**22


def fingerprint(parameter: Tensor) -> int:
    """A hash of a parameter's bits.

    Σ bits[i] · (i · odd | 1) in wrapping 64-bit integers. Position counts: a plain xor or sum would
    miss the same change made to an even number of equal weights, as a norm's ones are.
    """
    local = _local(parameter).detach()
    flat = local.contiguous().view(_BITS[local.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].long()
        position = torch.arange(start, start + bits.numel(), device=flat.device)
        total += (bits * (position * _ODD | 1)).sum()
    return int(total)


def was_updated(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether a parameter has a gradient or optimizer statistics other than 0."""
    tensors = [*evidence(optimizer.state.get(parameter, {}))]
    if parameter.grad is not None:
        tensors.append(_local(parameter.grad))
    return any(bool((t != 0).any()) for t in tensors)


def evidence(state: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors of a parameter's optimizer state that are not all 0 once a gradient was not.

    Codes and lookup tables say nothing: zero is some code between others. So of torchao's moments
    the first is read, which has an exact zero, and of bitsandbytes' the scales.

    Args:
        state: `optimizer.state[parameter]`.
    """
    quantized = "absmax1" in state
    for key, local in _moments(state):
        if is_torchao(local):
            if key == "exp_avg":
                yield local.dequantize()
        elif not quantized or key.startswith("absmax"):
            yield local


def stored_bytes(optimizer: Optimizer) -> int:
    """Bytes of the moments and their scales, without lookup tables and step counters."""
    return sum(
        part.numel() * part.element_size()
        for state in optimizer.state.values()
        for _, local in _moments(state)
        for part in ((local.codes, local.scale) if is_torchao(local) else (local,))
    )


def is_torchao(thing: Any) -> bool:
    """Whether an optimizer, or a tensor of its state, is one of torchao's low-bit ones."""
    return type(thing).__module__.startswith("torchao.optim.")


def _moments(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and local tensor of all but step counters and bitsandbytes' lookup tables (`qmap1`)."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and not key.startswith("qmap"):
            yield key, _local(value)


def _local(value: Tensor) -> Any:
    return getattr(value, "_local_tensor", value)
