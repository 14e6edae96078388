"""Streams that are read whole by each process and worker, which then take their share of the rows.

`datasets` 5.2 deals a stream of several files out by file where as many processes (Accelerate 1.15)
or data loader workers ask for rows, and with it the numbers of `skip` and `take`. Two files of 30
and 10 rows, the first 8 of which are held out for evaluation, on two processes:

    process 0   rows 5 to 30 of the first file: 4 that are held out are trained on
    process 1   rows 5 to 10 of the second: 4 are lost, and each is read five times as often

Read whole, rows are dealt out one by one (`accelerate.data_loader.IterableDatasetShard`), as those
of a single file always were. The price is that each process reads, converts and tokenizes them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import IterableDataset
from datasets.iterable_dataset import SkipExamplesIterable


class OneSource(SkipExamplesIterable):
    """The rows of a stream as one source, of which none are skipped."""

    def __init__(self, ex_iterable: Any) -> None:
        super().__init__(ex_iterable, n=0)

    @property
    def num_shards(self) -> int:
        """One, whatever is inside."""
        return 1

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> OneSource:
        """All of it: asked for by the first process or worker alone, as there is one shard."""
        return self

    def shuffle_data_sources(self, generator: np.random.Generator) -> OneSource:
        """Files in another order."""
        return OneSource(self.ex_iterable.shuffle_data_sources(generator))

    def reshard_data_sources(self) -> OneSource:
        """As it is."""
        return self


def undivided(rows: IterableDataset) -> IterableDataset:
    """A stream whose files are not dealt out to processes and workers."""
    return IterableDataset(ex_iterable=OneSource(rows._ex_iterable), info=rows._info.copy())
