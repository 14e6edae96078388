"""Checks of rows: those that are there twice, and those that were tokenized before."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from finetune.errors import DataError

# --------------------------------------------------------------------- rows that are there twice

BATCH = 4096
"""Rows read from a table at once."""
COMPARED = 100_000
"""Training rows that evaluation rows are looked for in: a second or two."""


def shared_rows(train: Any, held_out: Any) -> int:
    """Number of evaluation rows that are also among the first `COMPARED` training rows.

    Rows are the same if they agree in the columns that both tables have.
    """
    # Sorted, since the hash of a row depends on the order of its columns.
    columns = sorted({*train.column_names} & {*held_out.column_names})

    def hashes(rows: Any) -> Iterator[int]:
        for table in rows.select_columns(columns).with_format("arrow").iter(BATCH):
            yield from (hash(repr(row)) for row in table.to_pylist())

    # Hashes in memory rather than rows: of a hundred thousand rows that is some megabytes.
    wanted = Counter(hashes(held_out))
    there = {key for key in itertools.islice(hashes(train), COMPARED) if key in wanted}
    return sum(wanted[key] for key in there)


# ------------------------------------------------------------- rows that were tokenized before

MASKED = -100
"""Label of a token that has no part in the loss (torch's cross-entropy)."""
UNKNOWN = 2**31
"""Tokens of a vocabulary that is not known."""


def check_columns(rows: Any, source: str) -> None:
    """Raise `DataError` if `input_ids` or `labels` are no lists of whole numbers."""
    for name in sorted({"input_ids", "labels"} & set(rows.features or ())):
        feature = rows.features[name]
        kind = getattr(getattr(feature, "feature", None), "dtype", "")
        if not str(kind).startswith(("int", "uint")):
            raise DataError(
                f"{name!r} of {source} is no list of token ids",
                where=source,
                why=f"its type is {str(feature)[:200]}",
                fix="whole numbers, one list a row, or text in columns prompt and completion",
            )


def problem(row: dict[str, Any], vocabulary: int) -> str:
    """Reason why a tokenized row cannot be trained on; empty where it can."""
    ids, labels = row["input_ids"], row.get("labels")
    if not ids:
        return "'input_ids' is empty"
    for token in ids:
        if token is None or not 0 <= token < vocabulary:
            return f"{token} is no token id: {_known(token, vocabulary)}"
    if "labels" not in row:
        return ""
    if labels is None or len(labels) != len(ids):
        return f"{len(labels or ())} labels for {len(ids)} token ids"
    for label in labels:
        if label is None or not (label == MASKED or 0 <= label < vocabulary):
            return f"{label} is no label: {_known(label, vocabulary)}, and {MASKED} masks one"
    return ""


def _known(token: int | None, vocabulary: int) -> str:
    if token is None or token < 0 or vocabulary == UNKNOWN:
        return "ids are whole numbers from 0"
    return f"the model has {vocabulary:,} tokens"
