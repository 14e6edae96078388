"""Ratios from the optimizer: gradient signal to noise, and update to weight.

*Gradient signal-to-noise ratio.* Adam keeps running means m of the gradient g and v of its square
(Kingma & Ba, arXiv 1412.6980). With the bias corrections of its section 3,

    m̂ = m / (1 - β1^t)      v̂ = v / (1 - β2^t)      ratio = Σ m̂² / Σ (v̂ - m̂²)

is the squared mean gradient over its variance, summed over a group's elements: the inverse of the
"simple noise scale" of McCandlish et al. (arXiv 1812.06162, equation 2.9) at the batch size in use,
and for one parameter the ratio of Liu et al. (arXiv 2001.07384). Limits: m̂ has noise of its own,
so pure noise reads (1 - β1) / (2 β1), 0.056 for β1 = 0.9, and only values above that floor are
signal; clipped gradients are seen clipped. Optimizers without both moments have no ratio: SGD,
Adafactor, Lion.

*Update-to-weight ratio.* ‖w after - w before‖ / ‖w before‖ of one optimizer step. About 1e-3 is
usual at the peak of a healthy schedule; far below, BF16 weights (8 bits of mantissa) do not move.

Both sample up to `SAMPLE` evenly spread elements of each parameter, which bounds memory, and scale
the sums up. Of moments stored in 8 or 4 bits these alone are dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from finetune.precision.proof.movement import local_part

SAMPLE = 2**14


@dataclass
class SummedRatio:
    """Numerator and denominator, summed over a group."""

    above: float = 0.0
    below: float = 0.0

    def __add__(self, other: SummedRatio) -> SummedRatio:
        return SummedRatio(self.above + other.above, self.below + other.below)


def spread(numel: int) -> slice:
    """Slice of at most `SAMPLE` evenly spread indices of a flat tensor."""
    # Rounded up, so that there are never more than `SAMPLE`.
    return slice(0, numel, max(1, -(-numel // SAMPLE)))


def sample(value: Tensor) -> Tensor:
    """Copy up to `SAMPLE` elements of a tensor (of this process's shard) in float32."""
    local = local_part(value).detach()
    return local.reshape(-1)[spread(local.numel())].float().clone()


def moments_of(state: dict[str, Any], numel: int) -> tuple[Tensor, Tensor, float] | None:
    """Sampled m and v (float32) and the step count of one parameter's AdamW state; None without.

    The state is torch's, torchao's (8 bits, 4 bits, FP8) or bitsandbytes, of `numel` elements
    of this process's shard.
    """
    if "exp_avg" in state and "exp_avg_sq" in state:
        stored = [_parts(local_part(state[name])) for name in ("exp_avg", "exp_avg_sq")]
    elif "state1" in state and "state2" in state:  # bitsandbytes; small tensors have no codes
        stored = [
            (state[f"state{i}"], state.get(f"qmap{i}"), state.get(f"absmax{i}")) for i in (1, 2)
        ]
    else:
        return None
    m, v = (_sampled(*parts, numel) for parts in stored)
    step = float(state.get("step", 0))
    return (m, v, step) if m is not None and v is not None and step > 0 else None


def _parts(moment: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values of torch's state; codes, their table (none for FP8) and scales of torchao's."""
    codes = getattr(moment, "codes", None)
    # torch's own states are plain numbers.
    if codes is None:
        return moment, None, None
    return codes, None if codes.is_floating_point() else moment.qmap, moment.scale


def _sampled(
    codes: Tensor, table: Tensor | None, scales: Tensor | None, numel: int
) -> Tensor | None:
    """Sampled float32 values of a moment; None if it is no average of `numel` elements."""
    where, is_packed = spread(numel), codes.numel() * 2 == numel  # two codes of 4 bits in a byte
    if not is_packed and codes.numel() != numel:  # AdEMAMix keeps two averages in one
        return None
    if scales is None:
        return codes.reshape(-1)[where].float()
    index = torch.arange(where.start, numel, where.step, device=codes.device)
    picked = codes.reshape(-1)[index // 2 if is_packed else index]
    if is_packed:
        picked = torch.where(index % 2 == 0, picked >> 4, picked & 0b1111)
    values = picked.float() if table is None else table.to(codes.device)[picked.long()]
    # As many blocks as scales; the last block may be short, so round up to a power of two.
    block = 1 << (-(-numel // scales.numel()) - 1).bit_length()
    return values * scales[index // block]


@torch.no_grad()
def gradient_snr(
    named: Mapping[str, Tensor], optimizer: Optimizer, groups: dict[str, str]
) -> dict[str, SummedRatio]:
    """Σ m̂² and Σ (v̂ - m̂²) of each group that has moments, after an optimizer step."""
    betas = {id(p): g.get("betas") for g in optimizer.param_groups for p in g["params"]}
    sums: dict[str, list[Tensor]] = {}
    for name, parameter in named.items():
        pair, numel = betas.get(id(parameter)), local_part(parameter).numel()
        found = moments_of(optimizer.state.get(parameter, {}), numel)
        if found is None or not pair or len(pair) != 2 or not numel:
            continue
        m, v, step = found
        m_hat, v_hat = m / (1 - pair[0] ** step), v / (1 - pair[1] ** step)
        signal = m_hat.double().square().sum()
        # In float64: the difference of two nearly equal sums of 16,384 squares.
        both = torch.stack((signal, v_hat.double().sum() - signal)) * (numel / len(m))
        sums.setdefault(groups[name], []).append(both)
    return _ratios(sums)


@torch.no_grad()
def update_ratio(
    before: dict[str, Tensor], named: Mapping[str, Tensor], groups: dict[str, str]
) -> dict[str, SummedRatio]:
    """‖Δw‖² and ‖w‖² per group, from `sample(parameter)` before and after an optimizer step."""
    sums: dict[str, list[Tensor]] = {}
    for name, parameter in named.items():
        old = before.get(name)
        if old is None or not old.numel():
            continue
        parts = (sample(parameter) - old).double().square().sum(), old.double().square().sum()
        scale = local_part(parameter).numel() / len(old)
        sums.setdefault(groups[name], []).append(torch.stack(parts) * scale)
    return _ratios(sums)


def _ratios(sums: dict[str, list[Tensor]]) -> dict[str, SummedRatio]:
    return {
        group: SummedRatio(*torch.stack(parts).sum(0).tolist()) for group, parts in sums.items()
    }


def ratio_row(snr: dict[str, SummedRatio], update: dict[str, SummedRatio]) -> dict[str, float]:
    """Logged metrics such as `health/attn/grad_snr` and `health/attn/update_ratio`."""
    row = {
        f"health/{group}/grad_snr": r.above / r.below
        for group, r in snr.items()
        if r.below > 1e-6 * r.above  # after one step m̂² = v̂: no variance yet
    }
    return row | {
        f"health/{group}/update_ratio": (r.above / r.below) ** 0.5
        for group, r in update.items()
        if r.below > 0
    }
