"""Movement: every trainable parameter is in an optimizer, and its numbers change.

A step counts if the learning rate is above zero and some gradient of the model is not zero: where
the loss has none (equal rewards in a group, say) nothing can move. By the second step that counts
(LoRA's A has no gradient until B has moved) a parameter has

    moved              some of its numbers have changed, and it had a gradient
    below_resolution   it had a gradient, and no number has changed: updates are smaller than its
                       type can hold
    without_gradient   it had none, or zeros: said by name. Its layer did not run (an expert that
                       no token chose, a row of a token that no batch had), the loss cancels it (the
                       last bias of a reward model), or FP8 has rounded its gradient to zeros

Weight decay alone is no movement. A parameter that has a gradient and is in no optimizer is an
error, and so is a run in whose steps nothing has moved (`finetune.training.helper.evidence`).

*Numbers.* One changed number of a tensor says little beside BF16 weights: where an update is below
half of a weight's last bit, rounding to nearest takes it back, step after step, and most numbers of
a tensor that "moves" stay as they were.

    weight 0.02, BF16 spacing 1.2e-4: an AdamW update of 1e-5 is lost, one of 1e-4 is not

So numbers are counted, once warm-up is over and at the end: of this process's shards, all of a
tensor up to `SAMPLE` numbers, of a larger one every k-th, so that its share is known to 0.4 % (two
standard errors, 0.5 / sqrt(SAMPLE) each). The samples wait in host memory, at most 128 KiB for a
BF16 tensor. What returns to its first value counts as unchanged. After a resume the first step of
the process counts as the first.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from finetune.errors import some
from finetune.precision.engines.observers import in_backward
from finetune.precision.model.tree import Tree
from finetune.precision.proof.row import still_line

EFFECTIVE_STEPS = 2
SAMPLE = 65_536
STILL = "weights have not been seen to move"
ZEROS = "all gradients were zero"


class Movement:
    """Judges the first steps of a model's optimizers, and counts changed numbers in all of them.

    Attributes:
        is_done: True once the first steps have been judged, and something has moved.
        missing: what has not been seen yet.
        counts: `Receipt.trainable`, kept current.
    """

    def __init__(
        self,
        model: nn.Module | Tree,
        counts: dict[str, int],
        fail: Callable[..., None],
        optimizers: Collection[Optimizer] = (),
    ) -> None:
        """Begin.

        Args:
            model: the model whose parameters train.
            counts: counts to fill in.
            fail: raises an error of what, where, why and fix.
            optimizers: those that will step, at some time: a generator's, say, after five steps of
                its critic's.
        """
        self.model, self.counts, self._fail = model, counts, fail
        self.is_done, self.missing, self._optimizers = False, STILL, optimizers
        self._first: dict[str, Tensor] = {}  # name -> sample before the first step
        self._driven: set[str] = set()  # have had a gradient that is not zeros
        self._owned: set[int] = set()
        self._effective: Counter[int] = Counter()  # steps that count, of each optimizer
        self._steps: Counter[int] = Counter()
        self._rates: dict[int, float] = {}  # in the step before
        self._state_bytes: dict[int, int] = {}
        self._early: dict[str, Any] = {}
        self._rounding = "nearest"
        self._told: set[str] = set()

    # ---------------------------------------------------------------------- the first steps

    def before_step(self, optimizer: Optimizer, trainable: dict[str, nn.Parameter]) -> None:
        """Keep samples of what is seen for the first time, and look at gradients.

        Args:
            optimizer: what will step.
            trainable: name -> parameter of all that trains.
        """
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._owned |= owned
        for name, p in trainable.items():
            if name not in self._first:
                self._first[name] = sample(p)
        for name, p in trainable.items():
            if name not in self._driven and is_nonzero(p.grad):
                self._driven.add(name)
        counts = _rate(optimizer) > 0 and any(
            is_nonzero(p.grad) for p in trainable.values() if id(p) in owned
        )  # the first one tells
        if _maximum([[counts]], trainable)[0][0]:
            self._effective[id(optimizer)] += 1
        if not self._effective:
            self.missing = STILL + (f"; {ZEROS}" if _rate(optimizer) > 0 else "")

    def after_step(self, optimizer: Optimizer, trainable: dict[str, nn.Parameter]) -> None:
        """Count what has moved in the first steps, of all processes together.

        Raises (through `fail`):
            ProofError: a parameter with a gradient is in no optimizer.
        """
        self.counts["in_optimizer"] = sum(
            p.numel() for p in self.model.parameters() if id(p) in self._owned
        )
        self._state_bytes[id(optimizer)] = stored_bytes(optimizer)
        self.counts["optimizer_state_bytes"] = sum(self._state_bytes.values())
        rows = {"moved": 0, "below_resolution": 0, "without_gradient": 0}
        still: list[str] = []
        # Of all processes together: a shard may stand still alone.
        flags = [[n in self._driven, _changed(self._first.get(n), p)] for n, p in trainable.items()]
        together = _maximum(flags, trainable)
        for (name, p), (driven, changed) in zip(trainable.items(), together, strict=True):
            if not driven:
                still.append(name)
            kind = "moved" if changed else "below_resolution"
            rows[kind if driven else "without_gradient"] += p.numel()
        self.counts.update(rows)
        done = max(self._effective.values(), default=0)
        if done == 1:
            self.missing = f"one optimizer step was seen, and it takes {EFFECTIVE_STEPS}"
        if done >= EFFECTIVE_STEPS:  # by now all optimizers have stepped, or are in the collection
            without = set(still)
            self._judge_optimizers({n: p for n, p in trainable.items() if n not in without})
            self.missing, self.is_done = STILL, rows["moved"] > 0
            self._tell(still, rows["without_gradient"])

    def _judge_optimizers(self, driven: dict[str, nn.Parameter]) -> None:
        groups = [group for one in list(self._optimizers) for group in one.param_groups]
        known = self._owned | {id(p) for group in groups for p in group["params"]}
        if left := [name for name, p in driven.items() if id(p) not in known]:
            self._fail(
                "trainable parameters are not in the optimizer",
                where=some(left),
                why="they get gradients that nothing applies, and would never train",
                fix="build the optimizer from model.parameters() after adapters are attached, and "
                "pass model and optimizer together to accelerator.prepare",
            )

    def _tell(self, still: list[str], count: int) -> None:
        if set(still) <= self._told:
            return
        self._told.update(still)
        warnings.warn(
            f"{count:,} trainable parameters have had no gradient but zeros ({some(still, 3)}): "
            "their layers did not run, or do not take part in the loss, or their gradients were "
            "rounded to zeros (the same step in BF16 tells). Freeze them if they are not meant to "
            "train",
            stacklevel=2,
        )

    # --------------------------------------------------------------------------- all steps

    def count_step(self, optimizer: Optimizer) -> None:
        """Count numbers once warm-up is over, and warn if most of them stand still."""
        self._steps[id(optimizer)] += 1
        if getattr(optimizer, "bf16_stochastic_round", False):  # torchao's
            self._rounding = "stochastic"
        if self._early:
            return
        rate = _rate(optimizer)
        before, self._rates[id(optimizer)] = self._rates.get(id(optimizer), 0.0), rate
        # The rate rises in warm-up; the first step that does not raise it is after it.
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
        embeddings = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        groups: dict[tuple[str, str], list[float]] = {}
        for name, p in self.model.named_parameters():
            before, now = self._first.get(name), sample(p)
            if before is None or not before.numel() or before.shape != now.shape:
                continue
            matrix = "embeddings" if id(p) in embeddings else "matrices"
            key = (matrix if p.dim() > 1 else "vectors", str(p.dtype).removeprefix("torch."))
            counts = groups.setdefault(key, [0, 0.0])
            counts[0] += p.numel()
            # The share of changed numbers in the sample, scaled up to the whole tensor.
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


def _changed(before: Tensor | None, parameter: Tensor) -> bool:
    now = sample(parameter)
    return before is not None and before.shape == now.shape and bool((before != now).any())


def _rate(optimizer: Optimizer) -> float:
    """The highest learning rate of an optimizer's groups."""
    return max(float(group.get("lr", 1.0)) for group in optimizer.param_groups)


def changes_nothing(optimizer: Optimizer) -> bool:
    """True for a step by which torch makes an optimizer's state before it loads one into it.

    `torch.distributed.checkpoint` (torch 2.13, `_init_optim_state`) steps with gradients of zeros
    and a learning rate of zero, as Accelerate does when a run under FSDP2 is resumed.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return not _rate(optimizer) and not any(map(is_nonzero, gradients))


def is_nonzero(gradient: Tensor | None) -> bool:
    """True if there is a gradient, and it is not all zeros in this process."""
    return gradient is not None and bool((local_part(gradient) != 0).any())


def _maximum(flags: list[list[bool]], trainable: dict[str, nn.Parameter]) -> list[list[bool]]:
    """True where any process has True; an optimizer that steps inside a backward decides alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or in_backward():
        return flags
    device = next(iter(trainable.values())).device
    reduced = torch.tensor(flags, dtype=torch.float32, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [[bool(flag) for flag in row] for row in reduced.tolist()]


def stored_bytes(optimizer: Optimizer) -> int:
    """Bytes of the moments and their scales, without lookup tables and step counters."""
    return sum(
        part.numel() * part.element_size()
        for state in optimizer.state.values()
        for local in _moments(state)
        for part in ((local.codes, local.scale) if is_torchao(local) else (local,))
    )


def is_torchao(thing: Any) -> bool:
    """True for a low-bit optimizer of torchao, or a tensor of its state."""
    return type(thing).__module__.startswith("torchao.optim.")


def _moments(state: dict[str, Any]) -> Iterator[Any]:
    """Local tensors of all but step counters and bitsandbytes' lookup tables (`qmap1`)."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and not key.startswith("qmap"):
            yield local_part(value)


def local_part(value: Tensor) -> Any:
    """This process's part of a tensor."""
    # A DTensor's shard in this process; a plain tensor is its own part.
    return getattr(value, "_local_tensor", value)
