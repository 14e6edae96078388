"""Lines for scripts of several processes on their rows: repetitions, and shares of other sizes.

    a loop, or a stock trainer   rows that are repeated, when the first one trains on them
    evaluation by a trainer      rows that its loss counts twice
    unequal numbers of batches   an error in the first backward of every process

Loops are seen in their backward, so that loaders which only evaluate are left alone. A
recipe's own trainer says the first at its beginning (`HealthMonitor`), and counts eval rows once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.repeats import FILL, eval_line, refuse_uneven, repeats_line
from finetune.hardware.device import rank

if TYPE_CHECKING:
    from finetune.training.session import Session


def watch_loaders(running: Session) -> None:
    """Look at the loaders of a script's processes; one process alone shares nothing."""
    from accelerate.data_loader import IterableDatasetShard
    from accelerate.state import GradientState
    from transformers import Trainer

    def make_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            loader = GradientState().active_dataloader
            if loader is not None:
                refuse_uneven(loader, float("inf"))
                if rank() == 0 and (line := _line(loader)):
                    warnings.warn(line, stacklevel=2)
            return original(loss, *args, **kwargs)

        return backward

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

    running.patches.replace(torch.Tensor, "backward", make_backward)
    running.patches.replace(IterableDatasetShard, "__iter__", make_stream)
    running.patches.replace(Trainer, "evaluation_loop", make_evaluation)


BY_FILE = (
    "the stream is dealt out to processes by its files: where these differ in rows, one process is "
    "at its end before the others and waits for good, and `take` and `skip` are of each process "
    "(a stream of one file is dealt out by rows, and so is any with dispatch_batches=True)"
)


def _line(loader: Any) -> str:
    """What is repeated of the rows that are trained on; of a stream in its last batch."""
    from accelerate.data_loader import DataLoaderDispatcher
    from datasets import IterableDataset

    if isinstance(loader.dataset, IterableDataset) and not isinstance(loader, DataLoaderDispatcher):
        return BY_FILE
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
