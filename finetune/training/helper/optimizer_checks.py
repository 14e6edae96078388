"""Checks before each optimizer step of a session: what is trained must have been prepared.

What was never prepared is not converted, and would train in high precision, past plan and receipt:

    no model was prepared                             an error at the first step
    the optimizer's model was not, or is plain again  an error
    most of its matrices belong to no prepared model  an error; of fewer, a warning
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.optim import Optimizer

from finetune.errors import OrderError


class OptimizerChecks:
    """The hook of optimizer steps, and what it knows of a session.

    Attributes:
        models: what `accelerator.prepare` was given, with or without layers to convert.
        optimizers: those that Accelerate has prepared.
    """

    def __init__(self, session: Any) -> None:
        """Check under a `Session`."""
        self._session = session
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook of every optimizer's steps.

        Raises:
            OrderError: what it trains was not prepared, or is plain again.
        """
        session, is_prepared = self._session, optimizer in self.optimizers
        if is_prepared or session.has_prepared:
            self._check_owner(optimizer, is_prepared=is_prepared)
        # Vectors alone (a temperature, prompt lengths) have no product that could run in FP8.
        matrices = any(p.dim() > 1 for group in optimizer.param_groups for p in group["params"])
        if not matrices or session.patches.are_aside or session.precision.compute != "fp8":
            return
        if session.has_prepared or is_prepared:
            self._check_graded(optimizer, is_prepared=is_prepared)
            return
        raise OrderError(
            "an optimizer steps, and no model was prepared",
            where="optimizer.step() after setup_fp8_mixed_precision_training()",
            why="nothing was converted: the model would train in its own precision",
            fix="accelerator = setup_fp8_mixed_precision_training(...), then model, optimizer = "
            "accelerator.prepare(model, optimizer); or build a Trainer; or call "
            "teardown_fp8_mixed_precision_training() first",
        )

    def _check_owner(self, optimizer: Optimizer, *, is_prepared: bool) -> None:
        """Reject a step of an optimizer whose model was never prepared, or is plain again."""
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        of_it = [
            conversion
            for conversion in list(self._session.conversions)
            if any(id(p) in owned for p in conversion.tree.parameters())
        ]
        # An optimizer of a model that nobody prepared is judged by what it trains, below.
        if any(conversion.is_applied for conversion in of_it) or not (of_it or is_prepared):
            return
        if of_it:
            raise OrderError(
                "an optimizer steps for a model that has its plain layers back",
                where="finetune.revert(model) while it trains",
                why="it would train on in another precision than the receipt says",
                fix="accelerator.prepare(model, optimizer) once more, or "
                "teardown_fp8_mixed_precision_training() to train on without FP8",
            )
        raise OrderError(
            "an optimizer steps for a model that was never prepared",
            where="accelerator.prepare(optimizer) without its model, nn.DataParallel, or weights "
            "put in place of those prepared (load_state_dict(..., assign=True))",
            why="the model was not converted, or the optimizer has weights that it no longer uses",
            fix="pass model and optimizer to accelerator.prepare, and load weights before; on "
            "several GPUs start with torchrun, or show one with CUDA_VISIBLE_DEVICES=0",
        )

    def _check_graded(self, optimizer: Optimizer, *, is_prepared: bool) -> None:
        """Judge the first step of an optimizer that has gradients."""
        every = (p for group in optimizer.param_groups for p in group["params"])
        graded = [p for p in every if p.dim() > 1 and p.grad is not None]
        # FSDP puts parameters of its own, shards, into the place of a model's.
        if optimizer in self._judged or not graded or {*map(type, graded)} - {nn.Parameter}:
            return
        self._judged.add(optimizer)
        trees = map(self._session.tree_of, self.models)
        prepared = {id(p) for tree in trees for p in tree.parameters()}
        others = [p for p in graded if id(p) not in prepared]
        size, left = sum(p.numel() for p in graded), sum(p.numel() for p in others)
        if not left or (left == size and is_prepared):  # for `_check_owner`
            return
        shapes = ", ".join(str(list(p.shape)) for p in others[:3])
        where = f"{len(others)} of {len(graded)} matrices with gradients: {shapes}"
        # Fewer are a warning: a small model beside the prepared one may be meant to stay as it is.
        if left < size < 2 * left:
            raise OrderError(
                "most of what an optimizer trains belongs to no prepared model",
                where=where,
                why="what was never prepared is not converted: it would train in high precision, "
                "past the plan and the receipt",
                fix="pass every model to accelerator.prepare, in one call with its optimizer",
            )
        warnings.warn(
            f"an optimizer trains {left:,} numbers that belong to no prepared model ({where}): "
            "they are in no plan and no receipt. Pass every model to accelerator.prepare",
            stacklevel=2,
        )


def drop(group: dict[str, Any], settings: Collection[str], is_gone: Callable[[Any], bool]) -> None:
    """Take parameters out of an optimizer's group, and of the lists beside them.

    Torch's `param_names` and those of PEFT's LoRA-FA (`names`, `scaling_factors`) go by order.

    Args:
        group: one of `optimizer.param_groups`.
        settings: names of what is no such list (`optimizer.defaults`): betas may be one of two.
        is_gone: tells the parameters.
    """
    stays = [not is_gone(p) for p in group["params"]]
    for name, values in group.items():
        # Lists beside `params` (names, in Transformers) go by position, so they lose the same
        # entries.
        if isinstance(values, list) and len(values) == len(stays) and name not in settings:
            group[name] = [value for value, kept in zip(values, stays, strict=True) if kept]
