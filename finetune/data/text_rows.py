"""Rows of text files, JSON, CSV or plain text, as they were written.

`datasets` 5.2 reads JSON with pyarrow (25), into columns of one type by its first rows: the text
`"2024-05-01"` becomes a timestamp, a column that is null at first cannot be text later, and one
that nobody trains on ends a run by that. Lines of `null`, and values nested 100,000 deep, end it
with a segmentation fault. CSV it reads with pandas, to which `007` is 7 and `NA` is nothing.
Python's own readers have none of this, and know the line that is wrong. In a stream they take as
long; to copy 100,000 rows (67 MB) into the cache of `datasets`, once, takes 5 instead of 1.5
seconds.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from finetune.errors import DataError

csv.field_size_limit(sys.maxsize)  # characters of a cell; 131,072 otherwise
TURNS = {"messages", "conversations", "prompt", "completion", "chosen"}
"""Columns of rows that may be lists of objects."""
MAIN = {*TURNS, "text", "input_ids"}
"""Columns that make a format."""
READ = {*MAIN, "labels", "tools", "chat_template_kwargs", "system", "system_prompt", "history"}
READ |= {"input", "context", "label", "kto_tag", "images", "image"}
"""Columns that change what is trained on, wherever in a file they begin."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
A_ROW = "a JSON file of rows is a list of objects, or an object a line"


def kind_of(file: Path) -> str:
    """The ending of a file's name, such as `.csv` of `rows.csv.gz`; empty without one."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        del suffixes[-1]
    return suffixes[-1] if suffixes else ""


def columns_of(files: Iterable[Path], most: int | None, sample_by: str) -> dict[str, str]:
    """Columns of the first `most` rows of each file, or of all, and what they hold.

    Args:
        sample_by: what a row of a plain text is: `line`, `paragraph` or `document`.

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
        for _, row in itertools.islice(rows_of(file, sample_by), most):
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
    # Null fits a column of any type.
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


def cells(
    files: Iterable[str], columns: dict[str, str], sample_by: str
) -> Iterator[dict[str, Any]]:
    """Rows of files for `datasets`, which keeps a value of any type as the JSON that it is.

    Raises:
        DataError: a line is no row, or has a column that changes what is trained on and that no
            row before had.
    """
    for file in map(Path, files):
        for number, row in rows_of(file, sample_by):
            # Columns that nothing reads may come and go.
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


def rows_of(file: Path, sample_by: str = "line") -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of its line, row) of a file; of a `.json` file with one list or object, line 1.

    Raises:
        DataError: it holds something else; with the line.
    """
    import fsspec

    with fsspec.open(str(file), "rb", compression="infer") as given:
        opened, kind = cast("IO[bytes]", given), kind_of(file)
        # Also by a carriage return alone, as Excel for the Mac saves CSV.
        lines = (part for line in opened for part in line.splitlines(True))
        if kind in (".csv", ".tsv"):
            yield from _cells_of(lines, file, "\t" if kind == ".tsv" else ",")
        elif kind == ".txt":
            yield from _texts(lines, file, sample_by)
        elif kind == ".json":
            yield from _json(opened.read(), file)
        else:
            yield from _json_lines(lines, file)


MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip"}
"""Bytes that files begin with which are no UTF-8 text."""


def _text(line: bytes, file: Path, number: int) -> str:
    """A line as text, without the mark that programs of Windows begin a file with."""
    if b"\0" in line and not line.startswith(tuple(MARKS)):
        raise DataError(
            f"{file.name} is no text",
            where=f"{file}:{number}",
            why="it has NUL bytes: another kind of file than its name says, or a damaged one",
            fix="give the file under the name of its kind, or write its rows as text",
        )
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        likely = [kind for mark, kind in MARKS.items() if line.startswith(mark)]
        raise _not_utf8(file, number, *likely) from None


def _not_utf8(file: Path, number: int, likely: str = "WINDOWS-1252") -> DataError:
    """The error for another encoding, which it most likely is, with a command."""
    target = shlex.quote(str(file.with_name(f"utf8-{file.name}")))
    return DataError(
        f"{file.name} is not UTF-8 text",
        where=f"{file}:{number}",
        why=f"that line is not valid utf-8; most likely the file is {likely}",
        fix="unpack it, or write its rows as text"
        if likely == "gzip"
        else f"iconv -f {likely} -t UTF-8 {shlex.quote(str(file))} > {target}",
    )


def _refused(file: Path, number: int, why: str, fix: str = "fix or remove that line") -> DataError:
    what = f"{file.name} cannot be read as {'CSV' if fix is CELLS else 'JSON'}"
    return DataError(what, where=f"{file}:{number}", why=why, fix=fix)


def _texts(
    lines: Iterable[bytes], file: Path, sample_by: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines, paragraphs (up to a blank line) or the whole of a text, but what is blank."""
    number, found = 0, list[str]()
    for number, line in enumerate(lines, 1):
        found.append(_text(line, file, number).rstrip("\r\n"))
        if sample_by == "line" or (sample_by == "paragraph" and not found[-1].strip()):
            yield from _joined(number, found)
            found = []
    yield from _joined(number, found)


def _joined(number: int, lines: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    if text := "\n".join(lines).strip("\n"):
        yield number, {"text": text}


# -------------------------------------------------------------------------------------------- CSV

DELIMITERS = ",;\t|"
CELLS = "quote cells that hold a comma or a line break, or remove the row"


def _cells_of(
    lines: Iterable[bytes], file: Path, usual: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table, each cell as text; separated by what separates the names of its columns."""
    texts = (_text(line, file, number) for number, line in enumerate(lines, 1))
    first = next(texts, "")
    names = next(csv.reader([first], delimiter=usual), [])
    # Only where the usual separator finds one column: a comma in a name is no reason to look
    # further.
    found = Counter(c for c in first if c in DELIMITERS) if len(names) == 1 else {}
    separator = max(found, key=lambda c: found[c], default=usual)
    table = csv.reader(itertools.chain([first], texts), delimiter=separator)
    try:
        header = _header(next(table), file)
        for row in table:
            # pandas would shift the cells of such a row, or take the first for an index.
            if row and len(row) != len(header):
                why = f"a row of {len(row)} cells under {len(header)} columns would be shifted"
                raise _refused(file, table.line_num, why, CELLS)
            if row:
                yield table.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _refused(file, table.line_num, str(error), CELLS) from None


def _header(names: list[str], file: Path) -> list[str]:
    """Names of columns; pandas writes its index under no name, and reads it under such a one."""
    if not "".join(names).strip():
        raise DataError(
            f"the first line of {file.name} is blank",
            where=f"{file}:1",
            why="the names of the columns stand there",
            fix="remove the lines before them",
        )
    header = [name or f"Unnamed: {i}" for i, name in enumerate(names)]
    if twice := [name for name in header if header.count(name) > 1]:
        raise DataError(
            f"{file.name} has two columns of the name {twice[0]!r}",
            where=f"{file}:1",
            why="only one of them would be read",
            fix="rename one of them in the first line",
        )
    return header


# ------------------------------------------------------------------------------------------- JSON


def _json_lines(lines: Iterable[bytes], file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        text = _text(line, file, number)
        if not text.strip():
            continue
        row = _parsed(text, file, number)
        if number == 1 and isinstance(row, list):
            why, fix = "it begins with a list; each line must be one JSON object", "one list of "
            raise _refused(file, 1, why, fix + "objects is a .json file: give it that name")
        if not isinstance(row, dict):
            raise _refused(file, number, "each line must be one JSON object")
        yield number, row


def _json(content: bytes, file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a `.json` file: a list of objects, one object, or an object a line."""
    if not (text := _text(content, file, 1)).strip():
        return
    try:
        found = _parsed(text, file, 1)
    except DataError as error:
        if "Extra data" not in error.why:
            raise
        yield from _json_lines(io.BytesIO(content), file)
        return
    if isinstance(found, dict):
        _refuse_inner(found, file)
        found = [found]
    if not isinstance(found, list):
        raise _refused(file, 1, A_ROW)
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise _refused(file, 1, f"item {number} of the list is no JSON object")
        yield 1, row


def _parsed(text: str, file: Path, number: int) -> Any:
    try:
        found = json.loads(text.rstrip())
        # Half of a surrogate pair is valid JSON, and no text that can be written anywhere.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        number, why = number + error.lineno - 1, f"not JSON: {error.msg}"
    except RecursionError:
        why = "it is nested too deeply"
    except UnicodeEncodeError:
        why = "a character is half of one (a lone surrogate, such as \\ud83d)"
    except ValueError as error:  # a number of thousands of digits
        why = str(error).partition(";")[0]
    else:
        return found
    raise _refused(file, number, why)


def _refuse_inner(found: dict[str, Any], file: Path) -> None:
    """Refuse an object that holds the rows, as columns or in a list: it would be one row."""
    lists = {key: rows for key, rows in found.items() if isinstance(rows, list) and rows}
    inner = [key for key, rows in lists.items() if all(isinstance(row, dict) for row in rows)]
    if found and all(isinstance(lists.get(key, [None])[0], str) for key in found):
        what = f"{file.name} is one object of columns, not rows"
        fix = (
            "write its rows as a list of objects (pandas: to_json(orient='records')), and take that"
        )
    elif inner and not TURNS & found.keys():
        what = f"the rows of {file.name} are inside {inner[0]!r}"
        fix = f"write the list {inner[0]!r} alone to a file, and take that"
    else:
        return
    raise DataError(what, where=f"{file}:1", why=A_ROW, fix=fix)
