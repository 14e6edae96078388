"""Maps over rows: with several processes where there are many, cached by `datasets`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

TRAINED_TURNS = "trained_turns"
"""Column with a truth value for each turn of the assistant, where not all of them are true."""
MANY, MOST = 20_000, 16
"""Rows from which on several processes convert and tokenize, and the most of these."""


def workers(count: int) -> int | None:
    """Processes that so many rows are worth; None: this one alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST) if count >= MANY and (cores or 1) > 1 else None


def made_by(rows: Dataset, *what: Any) -> str:
    """Name of converted rows in the cache of `datasets`: of the rows, and of the code for them."""
    files = [Path(__file__).with_name(name) for name in ("mapping.py", "rows.py", "turns.py")]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return hashlib.sha256(repr((rows._fingerprint, code, *what)).encode()).hexdigest()[:16]


def mapped(rows: Dataset, convert: Any) -> Dataset:
    """Rows converted; turns keep exactly the keys that each has, whatever others have."""
    import pyarrow.compute as pc

    first = convert(dict(rows[0]), 0)
    done = rows.map(
        convert,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=workers(len(rows)),
        features=_features(first),
        new_fingerprint=made_by(rows, *_arguments(convert)),
        desc="converting",
    )
    if TRAINED_TURNS in done.column_names:
        flags = done.data.table.column(TRAINED_TURNS)
        if all(pc.all(chunk.flatten()).as_py() is not False for chunk in flags.chunks):
            return done.remove_columns(TRAINED_TURNS)
    return done


def _arguments(convert: Any) -> Iterator[Any]:
    """Functions and arguments that a converter is made of, for a name in the cache."""
    if isinstance(convert, partial):
        for part in (convert.func, *convert.args):
            yield from _arguments(part)
    else:
        yield getattr(convert, "__name__", convert)


def _features(first: dict[str, Any]) -> Any:
    """Columns of converted rows, by the first of them; None where `datasets` finds them itself."""
    from datasets import Features, Json, List, Value

    if not any(isinstance(value, list | dict) for value in first.values()):
        return None
    lists = ("messages", "prompt", "completion", "tools")
    found: dict[str, Any] = {key: List(Json()) if key in lists else Json() for key in first}
    if TRAINED_TURNS in first:
        found[TRAINED_TURNS] = List(Value("bool"))
    return Features(found)
