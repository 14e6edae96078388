"""Rows that were tokenized before: every id is one of the model's, every label an id or masked."""

from __future__ import annotations

from typing import Any

from finetune.errors import DataError

MASKED = -100
"""Label of a token that has no part in the loss (torch's cross-entropy)."""
UNKNOWN = 2**31
"""Tokens of a vocabulary that is not known."""
BATCH = 4096


def check_columns(rows: Any, source: str) -> None:
    """Raise `DataError` for columns that are no lists of whole numbers."""
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
    """Reason why a row cannot be trained on; empty where it can."""
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


def bad_rows(rows: Any, vocabulary: int) -> dict[int, str]:
    """Index of every row that cannot be trained on -> the reason, in batches of `BATCH`."""
    found: dict[int, str] = {}
    names = [name for name in ("input_ids", "labels") if name in rows.column_names]
    for number, table in enumerate(rows.select_columns(names).with_format("arrow").iter(BATCH)):
        if _is_sound(table, vocabulary):
            continue
        for index, row in enumerate(table.to_pylist(), number * BATCH):
            if why := problem(row, vocabulary):
                found[index] = why
    return found


def _is_sound(table: Any, vocabulary: int) -> bool:
    """True if no row of a batch can have a problem, seen without its Python objects."""
    import pyarrow.compute as pc

    columns = [column.combine_chunks() for column in table.columns]
    lengths = [pc.list_value_length(column) for column in columns]
    flat = [column.flatten() for column in columns]
    if any(part.null_count for part in (*columns, *flat)) or any(x != lengths[0] for x in lengths):
        return False
    if pc.min(lengths[0]).as_py() == 0:
        return False
    for part in flat:
        low, high = pc.min_max(part).as_py().values()
        if low < 0 and part is not flat[0]:  # labels: masked ones apart
            low = pc.min(part.filter(pc.not_equal(part, MASKED))).as_py() or 0
        if low < 0 or high >= vocabulary:
            return False
    return True
