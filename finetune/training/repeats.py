"""Training rows that Accelerate repeats, so that each process has a whole batch.

Accelerate 1.15 (`BatchSamplerShard`, `even_batches`) gives processes equally many batches, all of
the same size: where an epoch does not divide among them, it goes on with the first rows. Of 5 rows
in batches of 2, two processes train on 4 in the first step; in the second on the fifth, and on the
first three once more:

    process 0   1 2 | 5 1
    process 1   3 4 | 2 3

One process has a smaller last batch instead. Nothing of it stands in a log.
"""

from __future__ import annotations

from typing import Any


def repeated_rows(loader: Any, micro_steps: int) -> tuple[int, int]:
    """(rows that are repeated in each epoch, rows of an epoch) of a prepared `DataLoader`.

    Args:
        micro_steps: batches that a process will take in all: none is repeated where the first epoch
            does not end.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    inner = getattr(sampler, "batch_sampler", None)  # of a shard
    if inner is None or not getattr(sampler, "even_batches", False) or inner.drop_last:
        return 0, 0
    try:
        rows = len(inner.sampler)
        unended = micro_steps < len(loader)
    except (TypeError, AttributeError):  # of unknown length
        return 0, 0
    whole = inner.batch_size * (1 if sampler.split_batches else sampler.num_processes)
    return (0, rows) if unended else (-rows % whole, rows)


def repeats_line(loader: Any, micro_steps: int) -> str:
    """What is repeated, for a person to read; empty if nothing is."""
    repeated, rows = repeated_rows(loader, micro_steps)
    if not repeated:
        return ""
    return (
        f"each epoch of {rows:,} rows has {repeated:,} of them once more, to fill the last batch "
        "of all processes (dataloader_drop_last=true leaves out rows that fill none)"
    )
