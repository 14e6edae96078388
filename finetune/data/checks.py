"""Checks of rows before others read them: JSON files, and rows that were tokenized before.

pyarrow 25 ends with a segmentation fault on lines of `null`, and on values nested 100,000 deep,
since its parser and its types call themselves once a level.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import DataError

DEEPEST = 64
"""Levels of lists and mappings; conversations with tools have about ten."""
LONGEST = 64 << 20
"""Bytes of a row."""
TURNS = {"messages", "conversations", "prompt", "completion", "chosen", "tools"}
"""Columns of rows that may be lists of objects."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # the last may have no end
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip"}


def check_lines(lines: Iterable[bytes], file: Path | str) -> None:
    """Check the lines of a JSONL file; about a second for a million rows.

    Args:
        lines: with or without their ends.
        file: for the message.

    Raises:
        DataError: a line is no JSON object, is nested too deep or too long, or is no UTF-8 text.
    """
    for number, line in enumerate(lines, 1):
        start = line[:64].lstrip()[:1] or line.lstrip()[:1]
        if number == 1:
            _check_start(line, file)
            start = line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if not start:
            continue
        if number == 1 and start == b"[":
            why, fix = "it begins with a list; each line must be one JSON object", "one list of "
            raise _refused(file, 1, why, fix + "objects is a .json file: give it that name")
        if start != b"{":
            raise _refused(file, number, "each line must be one JSON object")
        if len(line) > LONGEST:
            raise _refused(file, number, f"this row is longer than {LONGEST >> 20} MiB")
        if line.count(b"{") + line.count(b"[") > DEEPEST:
            _check_depth(line, file, number)


def check_document(text: bytes, file: Path | str) -> None:
    """Check a `.json` file, as `check_lines`: a list of objects, one object, or objects by line.

    Raises:
        DataError: it is none of these, is nested too deep, or is no UTF-8 text.
    """
    _check_start(text, file)
    start = text.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"{":
        _refuse_inner(_parsed(text), file)
    if start == b"[":
        _check_depth(text, file, 1)
        for number, row in enumerate(_parsed(text), 1):
            if not isinstance(row, dict):
                raise _refused(file, 1, f"item {number} of the list is no JSON object")
    elif start != b"{" and start:
        raise _refused(file, 1, "a JSON file of rows is a list of objects, or an object a line")
    elif not _is_one(text):
        check_lines(text.splitlines(), file)
    elif text.count(b"{") + text.count(b"[") > DEEPEST:
        _check_depth(text, file, 1)


def _refuse_inner(found: Any, file: Path | str) -> None:
    """Refuse an object that holds the rows, which would be one row: `{"data": [{...}, {...}]}`."""
    lists = found.items() if isinstance(found, dict) else ()
    if lists and all(
        isinstance(rows, list) and rows and isinstance(rows[0], str) for _, rows in lists
    ):
        each = "for row in zip(*found.values())"
        raise DataError(
            f"{Path(file).name} is one object of columns, not rows",
            where=f"{file}:1",
            why="a JSON file of rows is a list of objects, or an object a line",
            fix=_command(file, f"[print(json.dumps(dict(zip(found, row)))) {each}]"),
        )
    inner = [key for key, rows in lists if isinstance(rows, list) and _are_objects(rows)]
    if not inner or TURNS & found.keys():
        return
    fix = f"a list of objects: what stands under {inner[0]!r}, in a file of its own"
    if Path(file).suffix == ".json":  # not compressed
        fix = _command(file, f"[print(json.dumps(row)) for row in found[{inner[0]!r}]]")
    raise DataError(
        f"the rows of {Path(file).name} are inside {inner[0]!r}",
        where=f"{file}:1",
        why="a JSON file of rows is a list of objects, or an object a line",
        fix=fix,
    )


def _command(file: Path | str, code: str) -> str:
    """The fix that writes the rows of an object, `found`, as lines."""
    if Path(file).suffix != ".json":
        return "unpack it: the command that makes rows of it is in the error then"
    read = f"import json; found = json.load(open({str(file)!r}, encoding='utf-8')); {code}"
    rows = shlex.quote(str(Path(file).with_suffix(".jsonl")))
    return f"python -c {shlex.quote(read)} > {rows}, and take that"


def _are_objects(rows: list[Any]) -> bool:
    return bool(rows) and all(isinstance(row, dict) for row in rows)


def _is_one(text: bytes) -> bool:
    """True if an object goes on behind the first line, so that these are no rows by line."""
    return _parsed(text.lstrip().partition(b"\n")[0]) == []


def _parsed(text: bytes) -> Any:
    """A value; nothing where it is no JSON, which its reader will say."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []


def _check_start(text: bytes, file: Path | str) -> None:
    for mark, kind in _MARKS.items():
        if text.startswith(mark):
            raise _refused(file, 1, f"this is {kind}, not UTF-8 text", "save it as UTF-8 JSON")
    if b"\0" in text[:4096]:
        raise _refused(file, 1, "this is no text: it has NUL bytes", "save it as UTF-8 JSON")


def _check_depth(text: bytes, file: Path | str, number: int) -> None:
    """Refuse a value by the most brackets that are open at once, those in strings left out."""
    marks = _STRING.sub(b"", text).translate(None, delete=_NO_BRACKETS)
    steps = (1 if byte in b"[{" else -1 for byte in marks)
    if max(itertools.accumulate(steps), default=0) > DEEPEST:
        raise _refused(file, number, f"it is nested more than {DEEPEST} levels deep")


def _refused(
    file: Path | str, number: int, why: str, fix: str = "fix or remove that line"
) -> DataError:
    name = Path(file).name
    return DataError(f"{name} cannot be read as JSON", where=f"{file}:{number}", why=why, fix=fix)


def not_utf8(label: str, files: Iterable[Path]) -> DataError:
    """The error for text of another encoding, with the first line that has it and a command."""
    import fsspec

    files = list(files)
    name, where, fix = Path(label).name, label, "save it as UTF-8"
    likely = "WINDOWS-1252"  # of older programs
    for file in files:
        with fsspec.open(str(file), "rb", compression="infer") as opened:
            begins = opened.read(4096)
        if b"\0" in begins and not begins.startswith(tuple(_MARKS)):
            return DataError(
                f"{file.name} is no text",
                where=str(file),
                why="it has NUL bytes: another kind of file than its name says",
                fix="give the file under the name of its kind, or write its rows as text",
            )
    for file, number, start in _not_decoded(files):
        name, where = file.name, f"{file}:{number}"
        likely = _MARKS.get(start, likely) if number == 1 else likely
        if likely in ("gzip", "zip"):
            fix = "unpack it, or write its rows as text"
        elif file.suffix in (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt"):
            command = f"iconv -f {likely} -t UTF-8 {shlex.quote(str(file))}"
            fix = f"{command} > {shlex.quote(str(file.with_name(f'utf8-{name}')))}"
        break
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
