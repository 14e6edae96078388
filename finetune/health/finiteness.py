"""Stops a run at the first step whose loss, gradients or weights are not finite, and says where.

Checked are, of every optimizer step, the losses of its micro-batches and the gradients before the
optimizer uses them: one reduction over the gradients, and one number fetched. So weights are still
those of the step before, and the step can be run again to find where it began (`replay`,
`nonfinite`). Weights are checked before they are saved: an update itself may break them,
and a checkpoint of broken weights could push the last good one out.

FP16 loss scaling skips steps whose gradients overflow and halves its scale. Gradients are left to
it until the scale is down to `LEAST_SCALE`; a loss is judged always, since it is not scaled.

All processes decide together: one that stopped alone would leave the others waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.errors import NonFiniteError
from finetune.health.cure import advise
from finetune.health.nonfinite import Finding, all_finite, check_parameters
from finetune.health.replay import MicroBatch, first_found, random_state, replay
from finetune.precision.convert import Conversion

LEAST_SCALE = 1.0
"""FP16: at this loss scale gradients are what they are, and one that is not finite stays so."""

Named = list[tuple[str, nn.Parameter]]


def trainable(model: nn.Module) -> Named:
    """Trainable parameters by name, tied ones once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


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
        self._batches.append(MicroBatch(step, args, kwargs, random_state()))

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
        lost = not all(math.isfinite(float(loss)) for loss in self._losses)
        what = "the loss is not finite" if lost else "a gradient is not finite"
        found, at = first_found(check_parameters(self.model)), ""
        if found is None:
            count = len(self._batches)
            replayed = replay(self._batches, self.model, self.trainer.accelerator, self.conversion)
            if replayed is not None:
                found, index = replayed
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


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, if any."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    found = [path for path in found if (path / "trainer_state.json").is_file()]
    return max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def _finite_everywhere(tensors: list[Tensor]) -> bool:
    finite = all_finite(tensors)
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdict = torch.tensor(float(finite), device=tensors[0].device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        finite = bool(verdict)
    return finite
