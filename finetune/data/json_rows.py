"""Rows of JSON files, as they were written.

`datasets` 5.2 reads JSON with pyarrow (25), into columns of one type by its first rows: the text
`"2024-05-01"` becomes a timestamp, a column that is null at first cannot be text later, and one
that nobody trains on ends a run by that. Lines of `null`, and values nested 100,000 deep, end it
with a segmentation fault. Python's own reader has none of this. In a stream it takes as long; to
copy 100,000 rows (67 MB) into the cache of `datasets`, once, takes 5 instead of 1.5 seconds.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from finetune.data.checks import LONGEST, MARKS
from finetune.errors import DataError

TURNS = {"messages", "conversations", "prompt", "completion", "chosen"}
"""Columns of rows that may be lists of objects."""
MAIN = {*TURNS, "text", "input_ids"}
"""Columns that make a format."""
READ = {*MAIN, "labels", "tools", "chat_template_kwargs", "system", "system_prompt", "history"}
READ |= {"input", "context", "label", "kto_tag"}
"""Columns that change what is trained on, wherever in a file they begin."""
A_ROW = "a JSON file of rows is a list of objects, or an object a line"


def columns_of(files: Iterable[Path], most: int | None) -> dict[str, str]:
    """Columns of the first `most` rows of each file, or of all, and what they hold.

    Returns:
        `text` or `ids` (whole numbers in lists) where these rows agree; `json` otherwise, which
        holds any value.

    Raises:
        DataError: a line is no row, with its number; or files are of several formats.
    """
    found: dict[str, set[str]] = {}
    formats: dict[frozenset[str], Path] = {}
    for file in files:
        names = set[str]()
        for _, row in itertools.islice(rows_of(file), most):
            names |= row.keys()
            for name, value in row.items():
                found.setdefault(name, set()).add(_kind(value))
        if names:
            formats.setdefault(frozenset(names & MAIN), file)
    if len(formats) > 1:
        one, other, *_ = formats.values()
        raise DataError(
            f"{one.name} and {other.name} have different columns",
            where=f"{one}, {other}",
            why="a folder or glob is one table",
            fix=f"data.path=[{one},{other}], a list of files: their formats may differ",
        )
    kinds = {name: seen - {"null"} or {"json"} for name, seen in found.items()}
    return {name: seen.pop() if len(seen) == 1 else "json" for name, seen in kinds.items()}


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if value is None:
        return "null"
    numbers = isinstance(value, list) and all(type(one) is int for one in value)
    return "ids" if numbers else "json"


def features_of(columns: dict[str, str]) -> Any:
    """The columns, as `datasets` names their types."""
    from datasets import Features, Json, List, Value

    types = {"text": Value("string"), "ids": List(Value("int64")), "json": Json()}
    return Features({name: types[kind] for name, kind in columns.items()})


def cells(files: Iterable[str], columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of files for `datasets`, which keeps a value of any type as the JSON that it is.

    Raises:
        DataError: a line is no row, or has a column that changes what is trained on and that no
            row before had.
    """
    for file in map(Path, files):
        for number, row in rows_of(file):
            if late := (row.keys() & READ) - columns.keys():
                raise DataError(
                    f"{file.name} has a column {min(late)!r} that its first rows do not have",
                    where=f"{file}:{number}",
                    why="the format of a stream is that of its first rows",
                    fix="put such a row first, or read all rows before: data.streaming=false",
                )
            yield {name: _cell(row.get(name), kind) for name, kind in columns.items()}


def _cell(value: Any, kind: str) -> Any:
    """A value for a column. What is no text, late in a stream of text, is none: a bad row.

    As JSON without its quotes, a text would be read as the number that it looks like.
    """
    if kind == "json":
        return None if value is None else json.dumps(value)
    return value if kind == "ids" or isinstance(value, str) else None


# ----------------------------------------------------------------------------------------- parsing


def rows_of(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of its line, row) of a file of lines, or of a `.json` file with a list or an object.

    Raises:
        DataError: it holds something else; with the line.
    """
    import fsspec

    with fsspec.open(str(file), "rb", compression="infer") as given:
        opened = cast("IO[bytes]", given)
        kinds = [suffix.lower() for suffix in file.suffixes]
        found = _whole(opened.read(), file) if ".json" in kinds else None
        if found is not None:
            yield from ((1, row) for row in found)
            return
        opened.seek(0)
        yield from _by_line(opened, file)


def _by_line(lines: IO[bytes], file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if number == 1:
            _check_start(line, file)
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > LONGEST:
            raise _refused(file, number, f"this row is longer than {LONGEST >> 20} MiB")
        if not line.strip():
            continue
        row = _parsed(line, file, number)
        if number == 1 and isinstance(row, list):
            why, fix = "it begins with a list; each line must be one JSON object", "one list of "
            raise _refused(file, 1, why, fix + "objects is a .json file: give it that name")
        if not isinstance(row, dict):
            raise _refused(file, number, "each line must be one JSON object")
        yield number, row


def _whole(text: bytes, file: Path) -> list[dict[str, Any]] | None:
    """Rows of a `.json` file; None of one with an object a line."""
    _check_start(text, file)
    text = text.removeprefix(b"\xef\xbb\xbf").strip()
    first, _, others = text.partition(b"\n")
    if others and text.startswith(b"{"):
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            pass  # an object that goes on behind the first line
        else:
            return None
    found = _parsed(text, file, 1) if text else []
    if isinstance(found, dict):
        _refuse_inner(found, file)
        return [found]
    if not isinstance(found, list):
        raise _refused(file, 1, A_ROW)
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise _refused(file, 1, f"item {number} of the list is no JSON object")
    return found


def _parsed(line: bytes, file: Path, number: int) -> Any:
    try:
        found = json.loads(line.strip().decode(), object_pairs_hook=_once)
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        number += error.lineno - 1
        raise _refused(file, number, f"not JSON: {error.msg}") from None
    except RecursionError:
        raise _refused(file, number, "it is nested too deeply") from None
    except UnicodeEncodeError:
        why = "a character is half of one (a lone surrogate, such as \\ud83d)"
        raise _refused(file, number, why) from None
    except UnicodeDecodeError:
        raise  # said with the encoding that it most likely is
    except ValueError as error:  # a key twice, or a number of thousands of digits
        raise _refused(file, number, str(error).partition(";")[0]) from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose keys are there once."""
    if len(found := dict(pairs)) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _check_start(text: bytes, file: Path) -> None:
    for mark, kind in MARKS.items():
        if text.startswith(mark):
            raise _refused(file, 1, f"this is {kind}, not UTF-8 text", "save it as UTF-8 JSON")
    if b"\0" in text[:4096]:
        raise _refused(file, 1, "this is no text: it has NUL bytes", "save it as UTF-8 JSON")


def _refused(file: Path, number: int, why: str, fix: str = "fix or remove that line") -> DataError:
    where = f"{file}:{number}"
    return DataError(f"{file.name} cannot be read as JSON", where=where, why=why, fix=fix)


def _refuse_inner(found: dict[str, Any], file: Path) -> None:
    """Refuse an object that holds the rows, which would be one row: `{"data": [{...}, {...}]}`."""
    lists = found.items()
    if lists and all(
        isinstance(rows, list) and rows and isinstance(rows[0], str) for _, rows in lists
    ):
        each = "for row in zip(*found.values())"
        raise DataError(
            f"{file.name} is one object of columns, not rows",
            where=f"{file}:1",
            why=A_ROW,
            fix=_command(file, f"[print(json.dumps(dict(zip(found, row)))) {each}]"),
        )
    inner = [key for key, rows in lists if isinstance(rows, list) and _are_objects(rows)]
    if not inner or TURNS & found.keys():
        return
    raise DataError(
        f"the rows of {file.name} are inside {inner[0]!r}",
        where=f"{file}:1",
        why=A_ROW,
        fix=_command(file, f"[print(json.dumps(row)) for row in found[{inner[0]!r}]]"),
    )


def _command(file: Path, code: str) -> str:
    """The fix that writes the rows of an object, `found`, as lines."""
    if file.suffix != ".json":
        return "unpack it: the command that makes rows of it is in the error then"
    read = f"import json; found = json.load(open({str(file)!r}, encoding='utf-8')); {code}"
    rows = shlex.quote(str(file.with_suffix(".jsonl")))
    return f"python -c {shlex.quote(read)} > {rows}, and take that"


def _are_objects(rows: list[Any]) -> bool:
    return bool(rows) and all(isinstance(row, dict) for row in rows)
