"""What every mapping from a row to a job needs."""

from __future__ import annotations

from finetune.errors import ConfigError
from tests.benchmarks.score.rows import Row
from tests.benchmarks.score.shapes import shape_of


class UnmappedError(Exception):
    """A row that cannot be mapped; its text is the reason."""


def shape_name(row: Row) -> str:
    """Name of the shape of a row's model."""
    try:
        return shape_of(row.model).name
    except ConfigError:
        raise UnmappedError(f"shape of {row.model!r} is not known") from None


def sizes(row: Row) -> tuple[int, int]:
    """Batch per GPU and length of a row."""
    if row.batch is None or row.length is None:
        raise UnmappedError(
            f"batch {row.batch_text!r} or length {row.length_text!r} is not a number"
        )
    return row.batch, row.length
