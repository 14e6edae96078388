"""Rests: layers that are not called in a step, and layers that are called and get no gradient.

Both are allowed: branches and experts rest, and a loss need not use every output. Counted for the
receipt, and said once where they look like a fault:

    bypassed   a layer rests while all those beside it in one module run, as they did in the
               witnessed step: something may multiply by its weight past it. Its weight tells
               nothing where it is frozen, or tied to another's
    cut off    a layer was called in `TURNS` steps behind one another, and its weight never had a
               gradient: something detaches its output, and it trains no more
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

from torch import nn

from finetune.errors import some

TURNS = 64
_LISTS = (nn.ModuleList, nn.ModuleDict)


class Rests:
    """Counts of one model.

    Attributes:
        steps: layer -> steps in which it was not called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, Counter[str]()
        self._cut = Counter[str]()
        self._said = set[str]()

    def note(self, ran: Collection[Any], resting: Collection[Any]) -> None:
        """Note the layers (`sentinel.Held`) that ran, and those that rested, in one step."""
        self.steps.update(held.layer.name for held in resting)
        if bypassed := self._beside(ran, resting):
            self._say(
                bypassed,
                "rest while those beside them run, as they did not in the first step: if something "
                "multiplies by their weights past them, it does so in BF16",
            )
        for held in ran:
            weights = held.evidence
            if weights and weights[0].grad is None and all(p.grad is None for p in weights):
                self._cut[held.layer.name] += 1
            elif self._cut:
                self._cut.pop(held.layer.name, None)
        if cut := [name for name, steps in self._cut.items() if steps == TURNS]:
            self._say(
                cut,
                f"were called in the last {TURNS} steps and got no gradient: something detaches "
                "their outputs, and they train no more",
            )

    def _beside(self, ran: Collection[Any], resting: Collection[Any]) -> list[str]:
        """Names of resting layers whose neighbours all ran."""
        if not resting:
            return []
        running, left = defaultdict[str, int](int), defaultdict[str, list[str]](list)
        for held in ran:
            running[_parent(held.layer.name)] += 1
        for held in resting:
            if held.first and not held.evidence:
                left[_parent(held.layer.name)].append(held.layer.name)
        return [
            names[0]
            for parent, names in left.items()
            if running[parent] and len(names) == 1
            if not isinstance(self.model.get_submodule(parent), _LISTS)
        ]

    def _say(self, names: list[str], what: str) -> None:
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new:
            warnings.warn(f"! {len(new)} layers {what} ({some(new, 3)})", stacklevel=2)


def _parent(name: str) -> str:
    return name.removesuffix(".base_layer").rpartition(".")[0]
