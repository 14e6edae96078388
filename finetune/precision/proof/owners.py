"""Owners: the optimizers that step for a model, and trainable parameters that none of them has.

The proof's first steps show that every parameter is in an optimizer. Later two things part them:

    replaced     a parameter is put in the place of another (`load_state_dict(..., assign=True)`):
                 the optimizer updates what the model no longer uses. An error at the step after the
                 one that meets it, when each of several optimizers has had its turn
    left behind  an optimizer steps in the place of another, and has fewer parameters: a warning
                 after `TURNS` steps
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable

from torch import nn
from torch.optim.optimizer import Optimizer

from finetune.errors import some

TURNS = 64
"""Steps within which each optimizer of a model has its turn; critics step five times as often."""


class Owners:
    """Compares a model's parameters with those of its optimizers."""

    def __init__(self, model: nn.Module, fail: Callable[..., None]) -> None:
        """Begin without any; `fail` raises an error of what, where, why and fix."""
        self.model, self._fail = model, fail
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._in_place: dict[str, nn.Parameter] = {}
        self._said = False

    def replaced(self, known: set[int]) -> bool:
        """Note trainable parameters that are not `known` by their id; True if there are any."""
        named = self.model.named_parameters()
        self._in_place |= {n: p for n, p in named if p.requires_grad and id(p) not in known}
        return bool(self._in_place)

    def before_step(self, optimizer: Optimizer, step: int) -> None:
        """Judge at the beginning of a step, whose number it is."""
        self._last[optimizer] = step
        if self._in_place:
            self._judge_replaced()
        if step % TURNS == 0 and not self._said:
            self._look_behind(step)

    def _judge_replaced(self) -> None:
        owned = self._owned(since=0)
        now = dict(self.model.named_parameters())
        left = [n for n, p in self._in_place.items() if now.get(n) is p and id(p) not in owned]
        self._in_place = {}
        if left:
            self._fail(
                "weights were put in place of those that train, and no optimizer has them",
                where=some(left),
                why="load_state_dict(..., assign=True), or layer.weight = nn.Parameter(...): the "
                "optimizer updates weights that the model no longer uses",
                fix="write into them, load_state_dict(...) without assign=True or "
                "weight.data.copy_(...); or prepare the model again together with its optimizer",
            )

    def _look_behind(self, step: int) -> None:
        owned = self._owned(since=step - TURNS + 1)
        left = [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and p.grad is not None and id(p) not in owned
        ]
        if left:
            self._said = True
            warnings.warn(
                f"! {len(left)} trainable parameters have gradients, and no optimizer that has "
                f"them has stepped for {TURNS} steps ({some(left, 3)}): they train no more",
                stacklevel=2,
            )

    def _owned(self, since: int) -> set[int]:
        owners = [optimizer for optimizer, last in self._last.items() if last >= since]
        return {id(p) for o in owners for group in o.param_groups for p in group["params"]}
