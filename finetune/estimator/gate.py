"""The estimator's word in a run: refused before it loads, and told beside what was measured.

The preview answers at once, and where it leaves half of the memory free there is nothing to ask.
Otherwise the run is rehearsed, some seconds, before minutes of loading would end in a failure.
After a run, what was measured stands beside what is predicted for the very batch that it was
measured with, which rows shorter than `train.max_length` make smaller than the largest possible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError, MemoryShortError, RehearsalError
from finetune.estimator.closed_form.preview import preview
from finetune.estimator.measure import Measured, changed, measure
from finetune.estimator.memory_bound import advice
from finetune.estimator.place import Place
from finetune.hardware.device import GIB, Device, available_gib
from finetune.hardware.gpus import find_gpu
from finetune.training.memory_meter import Batch

ROOM = 2
"""How many times the preview's memory has to be free for a rehearsal to be of no use."""
_OF_NO_MATTER = ("learning_rate", "seed", "max_steps", "num_train_epochs", "logging_steps")


def here(device: Device, processes: int = 1) -> Place:
    """This machine, as a place to train at."""
    return Place(device, find_gpu(device), processes, here=True)


def check_room(config: RunConfig, device: Device, processes: int = 1) -> None:
    """Refuse a run that cannot fit into the memory that is free now, before anything is loaded.

    One that cannot be rehearsed is let through.

    Raises:
        MemoryShortError: it cannot, with what to change.
    """
    free = available_gib(device)
    quick = preview(config, gpus=processes)
    if quick is not None and quick.peak_gib * ROOM < free:
        return
    try:
        expected = _asked(config, here(device, processes))
    except RehearsalError:  # of which nothing is known is not refused
        return
    held = expected.footprint
    if held.fit(int(free * GIB)) != "does not fit":
        return
    raise MemoryShortError(
        f"{config.model.name} ({expected.parameters / 1e9:.2f}B parameters, {config.method} "
        "fine-tuning) does not fit here",
        where=f"the peak, in {held.highest}"
        + (f", most of it in passing in {held.owner}" if held.owner else ""),
        why=f"a step holds {(held.allocated + held.outside) / GIB:.1f} GiB; {device.name} has "
        f"{free:.1f} GiB free",
        fix=advice(config, device) + "; --force tries it anyway",
    )


def predicted(
    config: RunConfig, device: Device, batch: Batch | None, processes: int = 1
) -> dict[str, Any]:
    """What a receipt says of the memory that was expected, for the batch that was measured.

    Where the run itself could not be rehearsed, why not.
    """
    if batch is None:
        return {}
    rows, length, padded = batch
    if config.train.get("packing") and rows == 1:  # of all, but with `packing_strategy: wrapped`
        rows = int(config.train.get("per_device_train_batch_size", 1))
        length //= rows
    same = changed(config, train={"per_device_train_batch_size": rows, "max_length": length})
    try:
        found = _asked(same, here(device, processes), padded=padded).footprint
    except FinetuneError as error:
        return {"predicted": f"not predicted: {error.what}"}
    values: dict[str, Any] = {
        "predicted_gib": round(found.allocated / GIB, 6),
        "predicted": f"by rehearsal, for a batch of {rows} x {length} tokens"
        + (", some of them padding" if padded else ""),
    }
    if device.kind == "cuda":
        values["predicted_reserved_gib"] = round(found.reserved / GIB, 6)
    return values


@dataclass(frozen=True)
class _Asked:
    """A run at a place; two that memory cannot tell apart are equal."""

    text: str
    padded: bool | None
    config: RunConfig = field(compare=False)
    place: Place = field(compare=False)


def _asked(config: RunConfig, place: Place, *, padded: bool | None = None) -> Measured:
    train = {k: v for k, v in config.train.items() if k not in _OF_NO_MATTER}
    data = config.model_dump(exclude={"data", "eval"}) | {
        "train": train,
        "place": str(place.device),
    }
    return _rehearsed(_Asked(f"{place.count} {data}", padded, config, place))


@functools.lru_cache(maxsize=32)
def _rehearsed(asked: _Asked) -> Measured:
    """Runs of one process often ask the same."""
    return measure(asked.config, asked.place, padded=asked.padded)
