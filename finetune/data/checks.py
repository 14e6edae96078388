"""Checks of rows: text that is not UTF-8, rows that are there twice, or were tokenized before."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import DataError

LONGEST = 64 << 20
"""Bytes of a row."""
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip"}


def not_utf8(label: str, files: Iterable[Path]) -> DataError:
    """The error for text of another encoding, with the first line that has it and a command."""
    import fsspec

    files = list(files)
    name, where, fix = Path(label).name, label, "save it as UTF-8"
    likely = "WINDOWS-1252"  # of older programs
    for file in files:
        with fsspec.open(str(file), "rb", compression="infer") as opened:
            begins = opened.read(4096)
        if b"\0" in begins and not begins.startswith(tuple(MARKS)):
            return DataError(
                f"{file.name} is no text",
                where=str(file),
                why="it has NUL bytes: another kind of file than its name says",
                fix="give the file under the name of its kind, or write its rows as text",
            )
    for file, number, start in itertools.islice(_not_decoded(files), 1):
        name, where = file.name, f"{file}:{number}"
        likely = MARKS.get(start, likely) if number == 1 else likely
        if likely in ("gzip", "zip"):
            fix = "unpack it, or write its rows as text"
        elif file.suffix in (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt"):
            command = f"iconv -f {likely} -t UTF-8 {shlex.quote(str(file))}"
            fix = f"{command} > {shlex.quote(str(file.with_name(f'utf8-{name}')))}"
    why = f"that line is not valid utf-8; most likely the file is {likely}"
    return DataError(f"{name} is not UTF-8 text", where=where, why=why, fix=fix)


def _not_decoded(files: Iterable[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """(file, number, first two bytes) of lines that are not UTF-8."""
    import fsspec

    for file in files:
        with fsspec.open(str(file), "rb", compression="infer") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    yield file, number, line[:2]


# --------------------------------------------------------------------- rows that are there twice


def shared_rows(train: Any, held_out: Any) -> int:
    """Number of evaluation rows that are also among the first `COMPARED` training rows."""
    columns = sorted({*train.column_names} & {*held_out.column_names})

    def hashes(rows: Any) -> Iterator[int]:
        for table in rows.select_columns(columns).with_format("arrow").iter(BATCH):
            yield from (hash(repr(row)) for row in table.to_pylist())

    wanted = Counter(hashes(held_out))
    there = {key for key in itertools.islice(hashes(train), COMPARED) if key in wanted}
    return sum(wanted[key] for key in there)


# ------------------------------------------------------------- rows that were tokenized before

MASKED = -100
"""Label of a token that has no part in the loss (torch's cross-entropy)."""
UNKNOWN = 2**31
"""Tokens of a vocabulary that is not known."""
BATCH = 4096
COMPARED = 100_000
"""Training rows that evaluation rows are looked for in: a second or two."""


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
