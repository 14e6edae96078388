"""What a case is: a function that finds the modules of a kind in a plan, and says what they become.

    for module, mixin, facts in case(site): swap(module, mixin, **facts)

A case may change modules besides (a weight becomes codes) before it says so. `CASES` are asked in
their order, and each sees what the earlier ones have made; `finetune.precision.convert` swaps, and
undoes what was swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from finetune.precision.engines.base import Engine
from finetune.precision.engines.observers import ObservedMixin, Observer
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.model.swap import Swapped
from finetune.precision.stored.frozen import FrozenEngine


class Swap(NamedTuple):
    """A module, the mixin that comes before its class, and facts of the module for it."""

    module: nn.Module
    mixin: type[Swapped]
    facts: dict[str, Any]


@dataclass
class Site:
    """A model that is being converted.

    Attributes:
        modules: the model's, by name, as they were before.
        engine: engine of layers that keep their weights.
        frozen: engine of layers with weights stored in FP8.
        head: the output head, as TRL's fused loss multiplies by it; its case puts it here.
    """

    model: nn.Module
    plan: PrecisionPlan
    engine: Engine | None
    frozen: FrozenEngine | None
    modules: dict[str, nn.Module]
    head: Any = None
    _observers: list[Observer] = field(default_factory=list)

    @property
    def observers(self) -> list[Observer]:
        """Observers of what the root itself multiplies by, its head among them."""
        if isinstance(self.model, ObservedMixin):  # by parameters of its own, too
            return self.model.fp8_observers
        return self._observers


Case = Callable[[Site], Iterator[Swap]]
