"""What scripts of several processes are told of their rows: repetitions, and shares of other sizes.

    a loop, or a stock trainer   rows that are repeated, when the first one trains on them
    evaluation by a trainer      rows that its loss counts twice
    unequal numbers of batches   an error in every process, where the first one has none left

Loops are seen in their backward, so that loaders which only evaluate are left alone. A
recipe's own trainer says the first at its beginning (`HealthMonitor`), and counts eval rows once.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.repeats import (
    FILL,
    eval_line,
    refuse_uneven,
    repeats_line,
    uneven_batches,
)
from finetune.errors import OrderError
from finetune.hardware.device import rank
from finetune.precision.convert import conversion_of

if TYPE_CHECKING:
    from finetune.training.session import Session


def watch_loaders(running: Session) -> None:
    """Look at the loaders of a script's processes; one process alone shares nothing."""
    from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
    from accelerate.state import GradientState
    from transformers import Trainer

    trained: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders, in this process

    def see_backward() -> None:
        loader = GradientState().active_dataloader
        if loader is None:
            return
        for accelerator in running.accelerators:
            if any(joins(model) for model in accelerator._models):
                _refuse_joined(accelerator)
                return
        trained.add(loader)
        if rank() == 0 and (line := _line(loader)):
            warnings.warn(line, stacklevel=3)

    def make_shard(original: Callable[..., Any]) -> Callable[..., Any]:
        def batches(loader: Any) -> Iterator[Any]:
            uneven, taken = uneven_batches(loader), 0

            def judge() -> None:
                trains = torch.is_grad_enabled() and (not taken or loader in trained)
                if uneven and taken == uneven[0] and trains:
                    refuse_uneven(loader, uneven[1])

            for batch in original(loader):
                judge()
                taken += 1
                yield batch
            judge()

        return batches

    def make_stream(original: Callable[..., Any]) -> Callable[..., Any]:
        def rows(shard: Any) -> Iterator[Any]:
            counted = copy.copy(shard)
            counted.dataset = seen = _Counted(shard.dataset)
            yield from original(counted)
            whole = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
            repeated = -seen.rows % whole
            if repeated and not shard.drop_last and shard.process_index == 0:
                warnings.warn(_of_stream(seen.rows, repeated), stacklevel=2)

        return rows

    def make_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluation_loop(trainer: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_uneven(dataloader, float("inf"))
            if rank() == 0 and (line := eval_line(dataloader)):
                warnings.warn(line, stacklevel=2)
            return original(trainer, dataloader, *args, **kwargs)

        return evaluation_loop

    running.before_backward = see_backward
    running.patches.replace(DataLoaderShard, "__iter__", make_shard)
    running.patches.replace(IterableDatasetShard, "__iter__", make_stream)
    running.patches.replace(Trainer, "evaluation_loop", make_evaluation)


def _line(loader: Any) -> str:
    """What is repeated of the rows that are trained on; of a stream in its last batch."""
    from accelerate.data_loader import DataLoaderDispatcher

    if not isinstance(loader, DataLoaderDispatcher):
        return repeats_line(loader, float("inf"))
    if not loader.end_of_dataloader:
        return ""
    repeated = -loader.remainder % loader.state.num_processes
    return _of_stream(None, repeated) if repeated else ""


def _of_stream(rows: int | None, repeated: int) -> str:
    of = "the stream's end" if rows is None else f"the end of {rows:,} streamed rows"
    return (
        f"at {of} {repeated:,} of its first rows came once more, {FILL} (drop_last=True of the "
        "DataLoader leaves out rows that fill none)"
    )


class _Counted:
    """Rows of a data set, and how many of them have been read."""

    def __init__(self, rows: Any) -> None:
        self._of, self.rows = rows, 0

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self._of:
            self.rows += 1
            yield row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


# -------------------------------------------------------------------------- torch's own uneven rows


def joins(model: Any) -> bool:
    """True inside `accelerator.join_uneven_inputs`, where DDP stands in for processes that end."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


def _refuse_joined(accelerator: Any) -> None:
    for model in accelerator._models:
        conversion = conversion_of(accelerator.unwrap_model(model))
        precision = conversion.plan.precision if conversion is not None else None
        if precision is not None and precision.scaling == "delayed" and precision.reduce_amax:
            raise OrderError(
                "delayed scales of all processes were requested of processes that end early",
                where="accelerator.join_uneven_inputs(...), with reduce_amax=True",
                why="a process without rows left would still be waited for in each forward",
                fix="reduce_amax=False, or another scaling, in "
                "setup_fp8_mixed_precision_training(...)",
            )
