"""Stops a run at the first step whose loss, gradients or weights are not finite, and says where.

Checked are, of every optimizer step, the losses of its micro-batches and the gradients before the
optimizer uses them: one reduction over the gradients, and one number fetched. So weights are still
those of the step before, and the step can be run again to find where it began. Weights are checked
before they are saved: an update itself may break them, and a checkpoint of broken weights could
push the last good one out.

FP16 loss scaling skips steps whose gradients overflow and halves its scale. Gradients are left to
it until the scale is down to `LEAST_SCALE`; a loss is judged always, since it is not scaled.

*Running a step again.* Kept are the micro-batches that the trainer holds for the running step
anyway, by reference, and the state of the random generators, so that dropout falls alike. Weights
have not moved yet, so a micro-batch computes again what it computed. Delayed FP8 scales stay as
they were in the last micro-batch of the step: earlier ones of an accumulation may have had others,
and casts saturate, so a NaN does not depend on them. Kernels that are not deterministic may not
repeat themselves; then the error says so, instead of naming a layer that is innocent.

*Advice* is ordered: the remedy of the cause that was found comes first. Two common sayings do not
help and are left out. E5M2 is no remedy for NaN: casts saturate in every FP8 format, so range is
not what is missing, and E5M2 has half the digits. A larger epsilon of the optimizer only hides
zeros.

All processes decide together: one that stopped alone would leave the others waiting. Every process
runs the step again alike, until one of them has found something, since sharded models and gathered
metrics need all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.errors import NonFiniteError
from finetune.precision.convert import Conversion
from finetune.precision.planner import PrecisionPlan
from finetune.runs.checkpoint import newest_checkpoint
from finetune.training.health.nonfinite import KINDS, Finder, Finding, all_finite, check_parameters

LEAST_SCALE = 1.0
"""FP16: at this loss scale gradients are not scaled, and one that is not finite stays so."""
CALMER = "lower train.learning_rate, lengthen train.warmup_steps, or set train.max_grad_norm=1"

Named = list[tuple[str, nn.Parameter]]


def trainable(model: nn.Module) -> Named:
    """Trainable parameters by name, tied ones once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@dataclass(frozen=True)
class MicroBatch:
    """One call of `Trainer.training_step`.

    Attributes:
        step: the trainer's own method.
        args, kwargs: of the call, the batch among them, by reference.
        random: states of torch's generators before it, by device.
    """

    step: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Tensor]


class Finiteness:
    """Judges the steps of one trainer.

    Args:
        trainer: a `transformers.Trainer`.
        model: its model, unwrapped.
        conversion: of that model, None where no precision was set up.
    """

    def __init__(self, trainer: Any, model: nn.Module, conversion: Conversion | None) -> None:
        self.trainer, self.model, self.conversion = trainer, model, conversion
        self._batches: list[MicroBatch] = []
        self._losses: list[Tensor] = []

    def begin(self, step: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """A micro-batch is about to run: `step(*args, **kwargs)`."""
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            random["cuda"] = torch.cuda.get_rng_state()
        self._batches.append(MicroBatch(step, args, kwargs, random))

    def end(self, loss: Tensor) -> None:
        """It has run, forward and backward."""
        self._losses.append(loss.detach())

    def forget(self) -> None:
        """The optimizer step is done."""
        self._batches.clear()
        self._losses.clear()

    def judge_step(self, named: Named, step: int) -> None:
        """Judge the losses, and the gradients of these parameters.

        Args:
            named: parameters whose gradients are judged.
            step: number of the optimizer step.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        gradients = [p.grad for _, p in named if p.grad is not None]
        if _finite_everywhere([*self._losses, *gradients]):
            return
        is_loss = not all(math.isfinite(float(loss)) for loss in self._losses)
        what = "the loss is not finite" if is_loss else "a gradient is not finite"
        found, at = first_found(check_parameters(self.model)), ""
        if found is None:
            count = len(self._batches)
            found, index = self._run_again()
            at = f", micro-batch {index + 1} of {count}" if count > 1 else ""
        where = f"{found.where}: {found.tensor}{at}" if found else "could not be found"
        self._raise(found, f"{what} at step {step}", where)

    def judge_weights(self, step: int) -> None:
        """Raise `NonFiniteError` unless all trainable weights are finite after optimizer `step`."""
        if not _finite_everywhere([p for _, p in trainable(self.model)]):
            found = first_found(check_parameters(self.model))
            assert found is not None
            what = f"a weight is not finite after the update of step {step}"
            self._raise(found, what, f"{found.where}: {found.tensor}")

    def _raise(self, found: Finding | None, what: str, where: str) -> NoReturn:
        self.forget()
        why = "running the step again under hooks gave finite numbers everywhere"
        if found is not None:
            fed = f"; {', '.join(found.fed)}" if found.fed else ""
            why = f"the first tensor that is not finite: {found.counts}{fed}"
        plan = self.conversion.plan if self.conversion is not None else None
        saved = newest_checkpoint(Path(str(self.trainer.args.output_dir)))
        raise NonFiniteError(
            f"{what}; stopped before anything was saved",
            where=where,
            why=why,
            fix=advise(found, plan, saved),
        )

    def _run_again(self) -> tuple[Finding | None, int]:
        """The first finding of any process and the index of its micro-batch.

        Gradients are overwritten: training must not go on.
        """
        self.model.zero_grad(set_to_none=True)
        with torch.compiler.set_stance("force_eager"), _frozen_scales(self.conversion):
            for index, batch in enumerate(self._batches):
                torch.set_rng_state(batch.random["cpu"])
                if "cuda" in batch.random:
                    torch.cuda.set_rng_state(batch.random["cuda"])
                with Finder(self.model) as finder, _loss_shown_to(finder, self.trainer.accelerator):
                    batch.step(*batch.args, **batch.kwargs)
                    finder.see_gradients()
                found = first_found(finder.found)
                if found is not None:
                    return found, index
        return None, 0


def _finite_everywhere(tensors: list[Tensor]) -> bool:
    finite = all_finite(tensors)
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdict = torch.tensor(float(finite), device=tensors[0].device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        finite = bool(verdict)
    return finite


def first_found(finding: Finding | None) -> Finding | None:
    """The earliest finding of all processes, on every process.

    Of two, the one that comes first in a step counts: the sum of gradients hands what one process
    breaks to all others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return finding
    everyone: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, finding)
    found = [
        replace(one, tensor=f"{one.tensor}, in process {rank}")
        for rank, one in enumerate(everyone)
        if one is not None
    ]
    return min(found, key=lambda one: KINDS.index(one.kind), default=None)


@contextlib.contextmanager
def _loss_shown_to(finder: Finder, accelerator: Any) -> Iterator[None]:
    backward = accelerator.backward

    def watched(loss: Tensor, **kwargs: Any) -> None:
        finder.see_loss(loss)
        backward(loss, **kwargs)

    accelerator.backward = watched
    try:
        yield
    finally:
        accelerator.backward = backward


@contextlib.contextmanager
def _frozen_scales(conversion: Conversion | None) -> Iterator[None]:
    backend = conversion.backend if conversion is not None else None
    if backend is None:
        yield
        return
    backend.begin_step = lambda: None
    try:
        yield
    finally:
        del backend.begin_step


def advise(finding: Finding | None, plan: PrecisionPlan | None, checkpoint: Path | None) -> str:
    """The settings to change or the command to type next.

    Args:
        finding: what broke first, None where running the step again showed nothing.
        plan: of the model, None where no precision was set up.
        checkpoint: the newest one, None where there is none.
    """
    again = (
        f"go on with train.resume_from_checkpoint={checkpoint}"
        if checkpoint
        else "start again (no checkpoint was saved yet)"
    )
    if finding is None:
        return (
            f"{again}; if it happens at another step, suspect kernels that are not deterministic "
            "or a faulty GPU (nvidia-smi -q -d ECC), else lower train.learning_rate"
        )
    if finding.kind == "parameter":
        return (
            "the weights were broken before this step, by the last update or already when loaded: "
            f"{again}, and {CALMER}"
        )
    if finding.kind == "input":
        return "look at the data: the model is handed values that are not finite"
    if finding.kind == "loss":
        return (
            "the logits are finite and the loss is not: look at the rows of this step (one without "
            f"a token to train on?) and at the loss settings; then {again}"
        )
    return "; ".join([*_by_precision(finding, plan), CALMER, again])


def _by_precision(finding: Finding, plan: PrecisionPlan | None) -> Iterator[str]:
    if plan is None or plan.precision.compute in ("bf16", "fp32"):
        return
    precision = plan.precision
    if precision.compute == "fp16":
        yield "FP16 ends at 65504: train with precision.compute=bf16"
        return
    if precision.scaling == "delayed":
        yield (
            f"delayed scales come from earlier amaxes: precision.margin={precision.margin + 1}, or "
            "precision.scaling=tensorwise, which has no history"
        )
    layer = finding.where.removesuffix(".weight").removesuffix(".bias")
    if layer in {low.name for low in plan.fp8_layers}:
        yield f"keep this layer in high precision: precision.keep=[{layer}]"
    if precision.format != "e5m2":
        yield "precision.format=e5m2 is no cure"
