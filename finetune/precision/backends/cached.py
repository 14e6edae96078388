"""Codes of weights that are cast once per optimizer step (`precision.fp8_params`).

A weight changes at an optimizer step and is multiplied more often: in each micro-batch, and again
where checkpointing recomputes. Here its codes are kept in between, at one byte a number beside the
parameter, which stays the optimizer's master.

Stale codes would train on a weight that is gone. So codes serve again only as long as

* no optimizer has stepped, whichever way it writes (`Updates`);
* the weight is the same memory, in the same version, which every write in place counts up.

A write through `.data` between two micro-batches of one step leaves neither trace, and shows at the
next step. Merges of adapters and averages of weights come behind a step, whose count has dropped
the codes. A recomputation in backward belongs to the forward before it: steps are not looked at.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from finetune.config.schema import PrecisionConfig
from finetune.precision.backends.base import Backend, Fp8Mixin, Passes, feed, in_backward
from finetune.precision.planner import LayerPlan
from finetune.precision.swap import weight_matrix

T = TypeVar("T")


class Updates:
    """Counter of the steps of all optimizers during its lifetime."""

    def __init__(self) -> None:
        self.count = 0
        this = weakref.ref(self)

        def stepped(*_: Any) -> None:
            alive = this()
            if alive is not None:
                alive.count += 1

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)


@dataclass
class _Entry(Generic[T]):
    """Codes of one matrix.

    Attributes:
        weight: the matrix; keeps its memory, so that no other gets its address.
        version, step: its version and the number of optimizer steps when it was cast.
        used_in: forward pass of the last use.
        codes: result of each way to cast it.
    """

    weight: Tensor
    version: int
    step: int
    used_in: int
    codes: dict[Hashable, T] = field(default_factory=dict)


class WeightCache(Generic[T]):
    """Codes of the weights of an engine.

    Attributes:
        fused: True if a compiled function casts, in two readings.
    """

    def __init__(self) -> None:
        self.fused = False
        self.updates = Updates()
        self._entries: dict[Hashable, _Entry[T]] = {}
        self.passes = Passes()
        self._checked, self._step = 0, 0

    def get(self, w: Tensor, way: Hashable, cast: Callable[[Tensor], T]) -> T:
        """Codes of a weight [N, K], kept or cast again.

        Args:
            w: a parameter or a view of one; what is computed from one has no lasting address, and
                is cast at each use.
            way: names one of several casts of a weight.
            cast: makes the codes.
        """
        whole = w if w._base is None else w._base
        if not isinstance(whole, nn.Parameter) or w.is_inference():
            return cast(w)
        storage = w.untyped_storage()._cdata
        address = storage, w.storage_offset(), w.shape, w.stride(), w.dtype
        recomputes = in_backward()
        if not recomputes:
            self._look(address)
        entry = self._entries.get(address)
        step = self.updates.count
        if entry is not None:
            stepped = entry.step != step and not recomputes
            entry = None if stepped or entry.version != w._version else entry
        if entry is None:
            # A graph that still waits for its backward keeps the codes that it was made with.
            kept = w.detach()
            entry = _Entry(kept, w._version, step, self.passes.number)
            self._entries[address] = entry
        entry.used_in = self.passes.number
        if way not in entry.codes:
            with torch.inference_mode(False), torch.no_grad():
                entry.codes[way] = cast(entry.weight)
        return entry.codes[way]

    def _look(self, address: Hashable) -> None:
        """Begin a forward pass where one begins, and drop what nothing uses."""
        entry = self._entries.get(address)
        number = self.passes.of_use(entry.used_in if entry is not None else None)
        if self._checked == number:
            return
        self._checked = number
        if self._step != self.updates.count:
            used = {k: e for k, e in self._entries.items() if e.step >= self._step}
            self._entries, self._step = used, self.updates.count


@functools.cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `torch.compile`, the same at each call."""
    return torch.compile(function)


class CachedBackend(Backend):
    """A backend that can keep the codes of its weights.

    Attributes:
        cache: the codes, None where weights are cast at each use.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        super().__init__(precision)
        self.cache: WeightCache[Any] | None = WeightCache() if precision.fp8_params else None

    def attributes(self, module: nn.Module, layer: LayerPlan) -> dict[str, Any]:
        return {"fp8_codes": ()}

    def region(self) -> contextlib.AbstractContextManager[None]:
        return super().region() if self.cache is None else self.cache.passes.whole_model()

    def codes_for(self, layer: Any, w: Tensor) -> tuple[Any, ...]:
        """Codes of the weight [N, K] of a layer with these attributes, () without a cache.

        In a compiled region they are inputs, which `compiled` has put there.
        """
        if torch.compiler.is_compiling():
            return layer.fp8_codes
        return () if self.cache is None else self.kept_codes(layer, w, self.cache)

    def kept_codes(self, layer: Any, w: Tensor, cache: WeightCache[Any]) -> tuple[Any, ...]:
        """The same from the cache."""
        raise AssertionError("each of these backends casts its weights")

    def compiled(self, layer: nn.Module) -> None:
        if self.cache is None:
            return
        self.cache.fused = True
        inside: list[Any] = [m for m in layer.modules() if isinstance(m, Fp8Mixin)]

        def codes(_: Tensor) -> Iterator[tuple[nn.Module, Any]]:
            for m in inside:
                if m.runs_low and m.fp8_backend is self:
                    yield m, self.codes_for(m, weight_matrix(m))

        feed(layer, "fp8_codes", codes)
