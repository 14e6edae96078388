"""Finiteness checks: stop a run at the first loss, gradient or weight that is not finite, and
locate it.

Each optimizer step checks the losses of its micro-batches, and the gradients before the optimizer
uses them: by the norm that the trainer has computed of them all, which is finite only if they are,
else by one reduction. One number is fetched. So weights are still those before the step, and the
step can run again to find the origin. Weights are checked before they are saved: an update itself
may break them, and a broken checkpoint could push out the last good one.

FP16 loss scaling skips steps whose gradients overflow and halves its scale. It handles gradients
until the scale is down to `LEAST_SCALE`; the loss, which is not scaled, is always judged.

*Running a step again.* Kept are references to the step's micro-batches and the random states, so
dropout repeats; weights have not moved. Delayed FP8 scales stay as in the last micro-batch: earlier
ones may have had others, but casts saturate, so NaN does not depend on them. If nondeterministic
kernels do not repeat the failure, the error says so and names no layer.

*Advice* puts the remedy of the cause that was found first. Two common remedies do not help: E5M2
(casts saturate in every FP8 format, so range is not missing, and E5M2 has half the digits), and a
larger optimizer epsilon, which only hides zeros.

All processes decide together: one that stopped alone would leave the others waiting. All of them
run the step again until one finds something: sharded models and gathered metrics need all.
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
from accelerate.utils import gather_object
from torch import Tensor, nn

from finetune.errors import NonFiniteError
from finetune.precision.convert import Conversion
from finetune.precision.layers import plain_name
from finetune.precision.planner import PrecisionPlan
from finetune.precision.proof.proof import named_trainable
from finetune.runs.checkpoints import newest_checkpoint
from finetune.training.health.nonfinite import KINDS, Finder, Finding, all_finite, check_parameters
from finetune.training.patches import replaced

LEAST_SCALE = 1.0
"""FP16: at this loss scale gradients are unscaled, and a nonfinite one stays so."""
CALMER = "lower train.learning_rate, lengthen train.warmup_steps, or set train.max_grad_norm=1"


@dataclass(frozen=True)
class MicroBatch:
    """One call of `Trainer.training_step`, and the states of torch's generators before it."""

    call: Callable[[], Tensor]
    on_cpu: Tensor
    on_gpu: Tensor | None


class Finiteness:
    """Judges the steps of one trainer, of a plain model if there is no conversion."""

    norm: Tensor | None = None

    def __init__(self, trainer: Any, model: nn.Module, conversion: Conversion | None) -> None:
        self.trainer, self.model, self.conversion = trainer, model, conversion
        self._batches: list[MicroBatch] = []
        self._losses: list[Tensor] = []

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a micro-batch's forward and backward; returns its loss."""
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        on_gpu = torch.cuda.get_rng_state() if gpu else None
        self._batches.append(MicroBatch(call, torch.get_rng_state(), on_gpu))
        loss = call()
        self._losses.append(loss.detach())
        return loss

    def forget(self) -> None:
        """Discard the micro-batches of a finished optimizer step."""
        self._batches.clear()
        self._losses.clear()
        self.norm = None

    def judge_step(self, step: int, *, gradients: bool) -> None:
        """Raise `NonFiniteError` unless losses, and `gradients` that nothing scales, are finite."""
        if gradients and self.norm is not None and _finite_everywhere([*self._losses, self.norm]):
            return
        trained = named_trainable(self.model).values()
        judged = [p.grad for p in trained if gradients and p.grad is not None]
        if _finite_everywhere([*self._losses, *judged]):
            return
        is_loss = not all(math.isfinite(float(loss)) for loss in self._losses)
        what = "the loss is not finite" if is_loss else "a gradient is not finite"
        found, at = first_found(check_parameters(self.model)), ""
        if found is None:
            count = len(self._batches)
            found, index = self._run_again()
            at = f", micro-batch {index + 1} of {count}" if count > 1 else ""
        self._raise(found, f"{what} at step {step}", at)

    def judge_weights(self, step: int) -> None:
        """Raise `NonFiniteError` unless all trainable weights are finite after optimizer `step`."""
        if not _finite_everywhere(list(named_trainable(self.model).values())):
            found = first_found(check_parameters(self.model))
            self._raise(found, f"a weight is not finite after the update of step {step}")

    def _raise(self, found: Finding | None, what: str, at: str = "") -> NoReturn:
        self.forget()
        where = "could not be found"
        why = "running the step again under hooks gave finite numbers everywhere"
        if found is not None:
            where = f"{found.where}: {found.tensor}{at}"
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
        """First finding of any process, and its micro-batch; training cannot go on after it."""
        self.model.zero_grad(set_to_none=True)
        accelerator, plain = self.trainer.accelerator, self.trainer.accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            finder.see_loss(loss)
            plain(loss, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(replaced(accelerator, "backward", backward))
            if self.conversion is not None and self.conversion.backend is not None:
                # Scales stay as they are.
                stack.enter_context(replaced(self.conversion.backend, "begin_step", lambda: None))
            for index, batch in enumerate(self._batches):
                torch.set_rng_state(batch.on_cpu)
                if batch.on_gpu is not None:
                    torch.cuda.set_rng_state(batch.on_gpu)
                with Finder(self.model) as finder:
                    batch.call()
                    finder.see_gradients()
                found = first_found(finder.found)
                if found is not None:
                    return found, index
        return None, 0


def refuse_broken_weights(model: nn.Module, name: str) -> None:
    """Raise `NonFiniteError` for a model that has NaN or Inf before it has trained."""
    if (found := first_found(check_parameters(model))) is not None:
        raise NonFiniteError(
            "a weight of the model is not finite before the first step",
            where=f"{name}: {plain_name(found.where)}",
            why=f"the file has it so: {found.counts}",
            fix="download or copy the model's safetensors files again, or take another model",
        )


def _finite_everywhere(tensors: list[Tensor]) -> bool:
    finite = all_finite(tensors)
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdict = torch.tensor(float(finite), device=tensors[0].device)
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


def advise(finding: Finding | None, plan: PrecisionPlan | None, checkpoint: Path | None) -> str:
    """Advice for a first failure (None: a repeated step showed none)."""
    again = "start again (no checkpoint was saved yet)"
    if checkpoint:
        again = f"go on with train.resume_from_checkpoint={checkpoint}"
    match finding.kind if finding is not None else None:
        case None:
            return (
                f"{again}; if it happens at another step, suspect kernels that are not "
                "deterministic or a faulty GPU (nvidia-smi -q -d ECC), else lower "
                "train.learning_rate"
            )
        case "parameter":
            return (
                "the weights were broken before this step, by the last update or already when "
                f"loaded: {again}, and {CALMER}"
            )
        case "input":
            return "look at the data: the model is handed values that are not finite"
        case "loss":
            return (
                "the logits are finite and the loss is not: look at the rows of this step (one "
                "without a token to train on?) and at the loss settings; then " + again
            )
    assert finding is not None
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
