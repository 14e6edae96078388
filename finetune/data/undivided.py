"""Streams of which each process and data loader worker reads every row, in one order.

`datasets` 5.2 deals a stream of several files out by file: to the processes (Accelerate 1.15) and
workers that ask for rows, and to its own `shuffle` of streams behind one another. The numbers of
`skip` and `take` are dealt out with the files. Of three files of 67 rows, the first 20 of which are
held out for evaluation:

    first file     rows 8 to 67: 13 that are held out are trained on
    second, third  rows 8 to 67 and 7 to 67: 13 are lost

A worker also draws the order of rows from another seed than the main process does, so a run that
goes on with another number of workers would train on some rows again and on others never.

Read whole, rows are dealt out one by one (`accelerate.data_loader.IterableDatasetShard`), as those
of a single file always were. The price is that each process reads, converts and tokenizes them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from datasets.iterable_dataset import ExamplesIterable


def undivided(rows: IterableDataset) -> IterableDataset:
    """A stream as one source: nothing inside is dealt out, shuffled or given another seed."""
    one = ExamplesIterable(_each, {"rows": rows._ex_iterable})
    return IterableDataset(ex_iterable=one, info=rows.info.copy())


def _each(rows: Any) -> Iterator[Any]:
    rows._init_state_dict()  # from the first row, wherever an earlier look at them has ended
    yield from rows
