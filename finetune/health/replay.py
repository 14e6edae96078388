"""A step's micro-batches, kept to be run once more under the finder when something is not finite.

What is kept is what the trainer holds for the running step anyway, by reference, and the state of
the random generators, so that dropout falls alike. Weights have not moved yet, so a micro-batch
computes again what it computed. Delayed FP8 scales are held still, as they were in the last
micro-batch of the step: earlier ones of an accumulation may have had others, and casts saturate, so
a NaN does not depend on them. Kernels that are not deterministic may not repeat themselves; then
that is said, instead of naming a layer that is innocent.

Every process replays alike and goes on until one of them has found something, since sharded models
and gathered metrics need all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.health.nonfinite import KINDS, Finder, Finding
from finetune.precision.convert import Conversion


@dataclass(frozen=True)
class MicroBatch:
    """One call of `Trainer.training_step`.

    Attributes:
        step: the trainer's own method.
        args, kwargs: what it was called with, the batch among it, by reference.
        random: states of torch's generators before it, by device.
    """

    step: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Tensor]


def random_state() -> dict[str, Tensor]:
    """States of torch's generators: of the CPU and, where one is in use, of this GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def replay(
    batches: list[MicroBatch],
    model: nn.Module,
    accelerator: Any,
    conversion: Conversion | None,
) -> tuple[Finding, int] | None:
    """Run the step's micro-batches again until something is not finite.

    Gradients are overwritten: the caller must not go on training.

    Args:
        batches: of the step, in order.
        model: that is trained, unwrapped.
        accelerator: whose `backward` the trainer calls.
        conversion: of the model, None where no precision was set up.

    Returns:
        The first finding of any process and the index of its micro-batch, None when all is finite.
    """
    model.zero_grad(set_to_none=True)
    with torch.compiler.set_stance("force_eager"), _scales_held_still(conversion):
        for index, batch in enumerate(batches):
            _set_random_state(batch.random)
            with Finder(model) as finder, _loss_shown_to(finder, accelerator):
                batch.step(*batch.args, **batch.kwargs)
                finder.see_gradients()
            found = first_found(finder.found)
            if found is not None:
                return found, index
    return None


def first_found(finding: Finding | None) -> Finding | None:
    """The earliest finding of all processes, on every process.

    Of two, the one that comes first in a step counts: what one process breaks, the sum of gradients
    hands to all others.
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
def _scales_held_still(conversion: Conversion | None) -> Iterator[None]:
    backend = conversion.backend if conversion is not None else None
    if backend is None:
        yield
        return
    backend.begin_step = lambda: None
    try:
        yield
    finally:
        del backend.begin_step
