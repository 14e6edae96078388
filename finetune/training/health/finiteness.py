"""Finiteness checks: stop a run at the first loss, gradient or weight that is not finite, and say
which it is.

Each optimizer step checks the losses of its micro-batches, and the norm of each gradient before the
optimizer uses it. One number is fetched. So weights are still those before the step. Weights are
checked before they are saved: an update itself may break them, and a broken checkpoint could push
out the last good one. Norms are taken before the trainer clips: a NaN in one gradient makes the
total norm NaN, and clipping multiplies all gradients by it.

FP16 loss scaling skips steps whose gradients overflow and halves its scale. It handles gradients
until the scale is down to `LEAST_SCALE`; the loss, which is not scaled, is always judged.

*What is named*, of all processes together: a weight that was broken before the step, else the first
micro-batch whose loss is not finite, else the gradient that backward came to first. One broken
number makes every gradient behind it NaN, so that is the last one in the order of the model.

*Advice* is about the cause that was found first. E5M2 is none: casts saturate in every
FP8 format, so range is not missing, and E5M2 has half the digits.

All processes decide together: one that stopped alone would leave the others waiting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn

from finetune.config.train_keys import TrainerArguments
from finetune.errors import NonFiniteError
from finetune.precision.convert import Conversion
from finetune.precision.model.layers import plain_name
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.model.tree import named_trainable
from finetune.runs.checkpoints import newest_checkpoint
from finetune.training.helper.finite import is_broken, own_values

LEAST_SCALE = 1.0
"""FP16: at this loss scale gradients are unscaled, and a nonfinite one stays so."""
CALMER = "lower train.learning_rate, lengthen train.warmup_steps, or set train.max_grad_norm=1"


Kind = Literal["parameter", "loss", "gradient"]
KINDS: tuple[Kind, ...] = ("parameter", "loss", "gradient")
"""In the order in which they come in a step."""


@dataclass(frozen=True)
class Finding:
    """The first tensor that is not finite.

    Attributes:
        kind: where in a step it was found.
        where: name of the parameter, or "the loss".
        tensor: which tensor of it.
        counts: number of NaN, of Inf and of all values; of a gradient its norm.
    """

    kind: Kind
    where: str
    tensor: str
    counts: str


class Finiteness:
    """Judges the steps of one trainer, of a plain model if there is no conversion."""

    def __init__(self, trainer: Any, model: nn.Module, conversion: Conversion | None) -> None:
        self.trainer, self.model, self.conversion = trainer, model, conversion
        self._losses: list[Tensor] = []
        self._norms: dict[Tensor, Tensor] = {}  # parameter -> norm of its gradient

    def note(self, loss: Tensor) -> None:
        """Remember the loss of a micro-batch, and behind the last one the norm of each gradient."""
        self._losses.append(loss.detach())
        if self.trainer.accelerator.sync_gradients and (made := self._gradients()):
            # A norm of each, in few kernels: a NaN or Inf anywhere in a tensor makes its norm so.
            norms = torch._foreach_norm([own_values(gradient) for gradient in made.values()])
            self._norms = dict(zip(made, norms, strict=True))

    def forget(self) -> None:
        """Discard what is known of a finished optimizer step."""
        self._losses.clear()
        self._norms.clear()

    def judge_step(self, step: int, *, gradients: bool) -> None:
        """Raise `NonFiniteError` unless losses, and `gradients` that nothing scales, are finite."""
        norms = self._norms if gradients else {}
        # One number is read from the device; names are looked for only where something is wrong.
        if _finite_everywhere([*self._losses, *norms.values()]):
            return
        found = first_found(
            # In the order in which they come about in a step: the first is the cause of the others.
            check_parameters(self.model) or self._broken_loss() or self._broken_gradient(norms)
        )
        is_gradient = found is not None and found.kind == "gradient"
        what = "a gradient is not finite" if is_gradient else "the loss is not finite"
        self._raise(found, f"{what} at step {step}")

    def _gradients(self) -> dict[Tensor, Tensor]:
        """Gradient of each parameter that the optimizer has, without a walk over the model."""
        groups = self.trainer.optimizer.param_groups
        return {p: p.grad for group in groups for p in group["params"] if p.grad is not None}

    def _broken_loss(self) -> Finding | None:
        count = len(self._losses)
        for index, loss in enumerate(self._losses):
            if is_broken(loss):
                at = f", micro-batch {index + 1} of {count}" if count > 1 else ""
                return Finding("loss", "the loss", f"its value{at}", _counts(loss))
        return None

    def _broken_gradient(self, norms: dict[Tensor, Tensor]) -> Finding | None:
        """The gradient that backward came to first: the last one in the order of the model."""
        for name, parameter in reversed(list(self.model.named_parameters())):
            norm = norms.get(parameter)
            if norm is not None and is_broken(norm):
                return Finding("gradient", name, "its gradient", f"its norm is {float(norm)}")
        return None

    def judge_weights(self, step: int) -> None:
        """Raise `NonFiniteError` unless all trainable weights are finite after optimizer `step`."""
        if not _finite_everywhere(list(named_trainable(self.model).values())):
            found = first_found(check_parameters(self.model))
            self._raise(found, f"a weight is not finite after the update of step {step}")

    def _raise(self, found: Finding | None, what: str) -> NoReturn:
        assert found is not None  # a process that is not finite has found something
        self.forget()
        plan = self.conversion.plan if self.conversion is not None else None
        saved = newest_checkpoint(Path(str(TrainerArguments(self.trainer.args).output_dir)))
        raise NonFiniteError(
            f"{what}; stopped before anything was saved",
            where=f"{found.where}: {found.tensor}",
            why=f"the first tensor that is not finite: {found.counts}",
            fix=advise(found, plan, saved),
        )


def refuse_broken_weights(model: nn.Module, name: str) -> None:
    """Raise `NonFiniteError` for a model that has NaN or Inf before it has trained."""
    if (found := first_found(check_parameters(model))) is not None:
        raise NonFiniteError(
            "a weight of the model is not finite before the first step",
            where=f"{name}: {plain_name(found.where)}",
            why=f"the file has it so: {found.counts}",
            fix="download or copy the model's safetensors files again, or take another model",
        )


def check_parameters(model: nn.Module) -> Finding | None:
    """Return the first nonfinite parameter, if any."""
    for name, parameter in model.named_parameters():
        if is_broken(parameter):
            return Finding("parameter", name, "its values", _counts(parameter))
    return None


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if every element of every tensor is finite, with one read of each.

    NaN and Inf survive any norm, so a finite one settles it. Another may be an overflow of large
    numbers: only then every element is tested. Of sharded tensors, this process's part is tested.
    """
    local = [own_values(t) for t in tensors]
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for one in local:  # torch brings the norms of all to the first device, and waits for each
        by_device[one.device].append(one)
    norms = [torch.nn.utils.get_total_norm(each) for each in by_device.values()]
    # The norm of large finite numbers may overflow, so an infinite one is looked into.
    return all(map(math.isfinite, norms)) or not any(is_broken(t) for t in local)


def _counts(x: Tensor) -> str:
    own = own_values(x)
    nan, inf = int(own.isnan().sum()), int(own.isinf().sum())
    kind = str(own.dtype).removeprefix("torch.")
    return f"{nan:,} NaN and {inf:,} Inf of {own.numel():,} values ({kind} {list(own.shape)})"


def _finite_everywhere(tensors: list[Tensor]) -> bool:
    finite = all_finite(tensors)
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdict = torch.tensor(float(finite), device=tensors[0].device)
        # The least of 0 and 1: one process that is not finite stops all.
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        finite = bool(verdict)
    return finite


def first_found(finding: Finding | None) -> Finding | None:
    """Earliest finding within the step of all processes: summed gradients spread one's to all."""
    everyone: list[Finding | None] = gather_object([finding])
    if len(everyone) == 1:
        return finding
    found = [
        replace(one, tensor=f"{one.tensor}, in process {rank}")
        for rank, one in enumerate(everyone)
        if one is not None
    ]
    return min(found, key=lambda one: KINDS.index(one.kind), default=None)


def advise(finding: Finding, plan: PrecisionPlan | None, checkpoint: Path | None) -> str:
    """Advice for a first failure."""
    again = "start again (no checkpoint was saved yet)"
    if checkpoint:
        again = f"resume with train.resume_from_checkpoint={checkpoint}"
    if finding.kind == "parameter":
        return (
            "the weights were broken before this step, by the last update or already when "
            f"loaded: {again}, and {CALMER}"
        )
    advice = [*_by_precision(finding, plan), CALMER, again]
    if finding.kind == "loss":
        advice.insert(0, "look at the rows of this step (one without a token to train on?)")
    return "; ".join(advice)


def _by_precision(finding: Finding, plan: PrecisionPlan | None) -> Iterator[str]:
    if plan is None or plan.precision.compute in ("bf16", "fp32"):
        return
    precision = plan.precision
    if precision.compute == "fp16":
        yield "FP16 ends at 65504: train with precision.compute=bf16"
        return
    if precision.facts.has_history:
        yield (
            f"delayed scales come from earlier amaxes: precision.margin={precision.margin + 1}, or "
            "precision.scaling=tensorwise, which has no history"
        )
    layer = finding.where.removesuffix(".weight").removesuffix(".bias")
    if layer in {low.name for low in plan.fp8_layers}:
        yield f"keep this layer in high precision: precision.keep=[{layer}]"
