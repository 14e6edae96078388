"""Numbers: how many of the trainable numbers have changed since the first step, by kind of tensor.

`movement` asks whether a tensor trains at all, and one changed number of it is enough. Beside BF16
weights that says little: where an update is below half of a weight's last bit, rounding to nearest
takes it back, step after step, and most numbers of a tensor that "moves" stay as they were.

    weight 0.02, BF16 spacing 1.2e-4: an AdamW update of 1e-5 is lost, one of 1e-4 is not

Counted are the numbers of this process's shards: all of a tensor up to `SAMPLE` numbers, of a
larger one every k-th, so that its share is known to 0.4 % (two standard errors, 0.5 / sqrt(SAMPLE)
each). The samples wait in host memory, at most 128 KiB for a BF16 tensor.

Limits: what returns to its first value counts as unchanged. After a resume the first step of the
process counts as the first.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from finetune.precision.proof.movement import local_part
from finetune.runs.receipt import still_line

SAMPLE = 65_536


class Numbers:
    """Counts changed numbers of a model: once warm-up is over, and whenever it is asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first: dict[str, Tensor] = {}  # name -> sample before the first step
        self._steps: Counter[int] = Counter()  # of each optimizer
        self._rates: dict[int, float] = {}  # in its step before
        self._early: dict[str, Any] = {}
        self._rounding = "nearest"

    def before_step(self, trainable: dict[str, nn.Parameter]) -> None:
        """Keep samples of what is seen for the first time."""
        for name, p in trainable.items():
            if name not in self._first:
                self._first[name] = sample(p)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count once warm-up is over, and warn if most numbers stand still."""
        self._steps[id(optimizer)] += 1
        if getattr(optimizer, "bf16_stochastic_round", False):  # torchao's
            self._rounding = "stochastic"
        if self._early:
            return
        rate = max(float(group.get("lr", 1.0)) for group in optimizer.param_groups)
        before, self._rates[id(optimizer)] = self._rates.get(id(optimizer), 0.0), rate
        if not before >= rate > 0:
            return  # it warms up
        self._early = self._count()
        if line := still_line(self.described()):
            warnings.warn(line, stacklevel=2)

    def described(self) -> dict[str, Any]:
        """`Receipt.movement`; empty before the first step."""
        if not self._steps:
            return {}
        kept = {"rounding": self._rounding, "sample": SAMPLE}
        return {**kept, "early": self._early, "now": self._count()}

    @torch.no_grad()
    def _count(self) -> dict[str, Any]:
        embeddings = {id(m.weight) for m in self._model.modules() if isinstance(m, nn.Embedding)}
        groups: dict[tuple[str, str], list[float]] = {}
        for name, p in self._model.named_parameters():
            before, now = self._first.get(name), sample(p)
            if before is None or not before.numel() or before.shape != now.shape:
                continue
            matrix = "embeddings" if id(p) in embeddings else "matrices"
            key = (matrix if p.dim() > 1 else "vectors", str(p.dtype).removeprefix("torch."))
            counts = groups.setdefault(key, [0, 0.0])
            counts[0] += p.numel()
            counts[1] += p.numel() * int((before != now).sum()) / before.numel()
        rows = [
            {"kind": kind, "type": dtype, "numbers": int(every), "changed": math.ceil(changed)}
            for (kind, dtype), (every, changed) in groups.items()
        ]
        return {"steps": max(self._steps.values()), "groups": rows}


def sample(parameter: Tensor) -> Tensor:
    """Up to `SAMPLE` numbers of a parameter's shard, in host memory.

    Every k-th number, where k and the width of the matrix share no divisor: 4096 x 4096 numbers
    and k = 256 would be 16 of its columns, k = 257 goes through all of them.
    """
    local: Tensor = local_part(parameter).detach()
    width = local.shape[-1] if local.dim() else 1
    every = max(1, math.ceil(local.numel() / SAMPLE))
    while math.gcd(every, width) > 1 and every > 1:
        every += 1
    return local.reshape(-1)[::every].to("cpu", copy=True)
