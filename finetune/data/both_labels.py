"""Order of labelled rows (KTO): both labels in nearly every batch, another order in each epoch.

TRL 1.16 reads these rows one behind another, the same way in each epoch, since the answers that
its KL term is estimated by are those of the batch, moved on by one row, and are prepared before
training. Pairs it unpairs a thousand at a time, the good answers first. So a short run sees one
label alone, and so does one whose file is sorted by label:

    file    + + + + + + - - -        batches of 3    + + + | + + + | - - -
    here    + + - + + - + + -                        + + - | + + - | + + -

Each label's rows are shuffled by the seed and spread evenly before the trainer prepares them. Then
batches stay together, and trade places from epoch to epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import Sampler, SequentialSampler
from trl import unpair_preference_dataset

from finetune.config.train_keys import TrainerArguments
from finetune.errors import DataError


def order_seed(args: Any) -> int:
    """Seed of the order of rows, as Transformers has it: `data_seed`, else `seed`."""
    args = TrainerArguments(args)
    return args.seed if args.data_seed is None else args.data_seed


def unpaired(rows: Dataset) -> Dataset:
    """Labelled rows, two of a pair."""
    return unpair_preference_dataset(rows) if "chosen" in rows.column_names else rows


def spread(rows: Dataset, seed: int) -> Dataset:
    """The rows with both labels evenly among each other, those of each shuffled by `seed`.

    Raises:
        DataError: all rows have the same label.
    """
    rows = unpaired(rows)
    labels, draw = np.asarray(rows["label"], bool), np.random.default_rng(seed)
    if len({*labels.tolist()}) < 2:
        raise DataError(
            f"all {len(rows):,} rows have the label {str(bool(labels[0])).lower()}",
            where="data",
            why="KTO learns from answers to give beside answers not to give",
            fix="rows of both labels; or, to learn from answers to give alone, train.method=sft",
        )
    place = np.empty(len(labels))
    for label in (True, False):
        own = draw.permutation(np.flatnonzero(labels == label))
        # Each label at equal distances over 0 to 1, from an offset of its own: sorted, they
        # alternate in the ratio of their numbers.
        place[own] = (np.arange(own.size) + draw.random()) / own.size
    return rows.select(np.argsort(place, kind="stable"))


class InBlocks(Sampler[int]):
    """Rows in blocks of `size` that follow each other; the order of blocks is the epoch's own.

    The last block, if it is smaller, stays the last.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed, self.epoch = count, size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Accelerate's loaders."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        whole = self.count // self.size
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        for block in torch.randperm(whole, generator=draw).tolist():
            yield from range(block * self.size, (block + 1) * self.size)
        # The last, shorter block stays last: in the middle it would shift all batches behind it.
        yield from range(whole * self.size, self.count)


class BothLabels:
    """Mixin of a trainer that reads labelled rows in order."""

    args: Any

    def counted(self, rows: Any, args: Any, name: str, **settings: Any) -> Any:
        """The trainer's, of rows that are spread; its batches are those of one process.

        Rows that are evaluated may have one label, and any order.
        """
        if isinstance(rows, Dataset):
            rows = spread(rows, order_seed(args)) if name == "train" else unpaired(rows)
        above: Any = super()
        return above.counted(rows, args, name, **settings)

    def ordered(self, sampler: Any) -> Any:
        """The trainer's, where it is not the rows' own order."""
        above: Any = super()
        found, args = above.ordered(sampler), TrainerArguments(self.args)
        if not isinstance(found, SequentialSampler):
            return found
        return InBlocks(len(found), args.per_device_train_batch_size, order_seed(args))
