"""Reading rows: files, folders, globs, compressed or not, and the hub, through `datasets`.

`datasets` copies rows into its cache on disk once and maps them into memory; a stream
(`data.streaming`) is read while it trains, and nothing of it is copied.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import itertools
import json
import lzma
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from gzip import BadGzipFile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import ASSETS, user_path
from finetune.config.section import BUILTIN, DataConfig
from finetune.data import json_rows
from finetune.data.checks import LONGEST, not_utf8
from finetune.data.json_rows import cells, columns_of, features_of
from finetune.errors import (
    DataError,
    DataNotFoundError,
    FinetuneError,
    did_you_mean,
    first_line,
    nearest,
    some,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

LOADERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".ndjson": "json",
    ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
ADD_ROWS = 'add rows, such as {"prompt": "Where?", "completion": "Here."}'
DELIMITERS = ",;\t|"
CHECKED = 10_000
"""Lines of a streamed CSV whose cells are counted before it is read."""
BLOCK, BLOCKS = 1 << 20, 64
"""Bytes of a block, and blocks of a large file that its fingerprint is of."""


@dataclass(frozen=True)
class Source:
    """Files of one kind, or a part of a hub data set.

    Attributes:
        label, where: as it was given, and the setting that names it.
        loader: name of the reader in `datasets`; `saved`: a folder by `Dataset.save_to_disk`.
        hub: name, subset and split on the hub.
        sample_by: what a row of a text file is, as `datasets` names it.
    """

    label: str
    where: str
    files: tuple[Path, ...] = ()
    loader: str = "hub"
    hub: tuple[str, str | None, str] = ("", None, "")
    sample_by: str = "line"

    @property
    def size(self) -> int | None:
        """Bytes of all files; None for the hub."""
        return sum(file.stat().st_size for file in self.files) if self.files else None

    def unread(self) -> list[str]:
        """A line on what lies in a folder and is not read: files of other types, linked folders."""
        folder = user_path(self.label)
        if self.loader in ("hub", "saved") or not os.path.isdir(folder):
            return []
        others = [p for p in folder.rglob("*") if p.is_file() or p.is_symlink()]
        others = sorted({str(p.relative_to(folder)) for p in others if p not in self.files})
        others = [name for name in others if not re.search(r"(^|/)\.", name)]
        return [f"not read in {self.label}: {some(others)}"] if others else []

    def fingerprint(self) -> str:
        """SHA-256 of the files' contents: of evenly spaced blocks where a file is large."""
        found = hashlib.sha256(json.dumps([self.loader, *self.hub]).encode())
        for path in self.files:
            size = path.stat().st_size
            found.update(str(size).encode())
            count = min(BLOCKS, -(-size // BLOCK))
            with path.open("rb") as file:
                for index in range(count):
                    file.seek((size - BLOCK) * index // (count - 1) if count > 1 else 0)
                    found.update(file.read(BLOCK))
        return found.hexdigest()

    def read(self, *, streaming: bool) -> Dataset | IterableDataset:
        """Rows of the source.

        Raises:
            DataError: a file cannot be read, or there are no rows.
            DataNotFoundError: the hub has no such data set.
        """
        rows: Any = self._read(streaming)
        if not streaming:
            if not len(rows):
                raise self.empty()
            return rows
        with reading(self):
            if next(iter(rows), None) is None:
                raise self.empty()
            return rows if rows.features else rows._resolve_features()

    def empty(self) -> DataError:
        """The error for a source without rows."""
        if not self.files:
            return DataError(
                f"{self.label} has no rows in split {self.hub[2]!r}",
                where=self.where,
                fix="data.split=NAME of a split that has rows; the data set's page lists them",
            )
        where = f"{self.where}: {self.label}"
        return DataError(f"{Path(self.label).name} has no rows", where=where, fix=ADD_ROWS)

    def _read(self, streaming: bool) -> Any:
        from datasets import load_dataset, load_from_disk

        with reading(self):
            if self.loader == "hub":
                name, subset, split = self.hub
                return load_dataset(name, subset, split=split, streaming=streaming)
            if self.loader == "saved":
                rows: Any = load_from_disk(str(self.files[0].parent))
                return rows.to_iterable_dataset() if streaming else rows
            options = _csv_options(self, streaming) if self.loader == "csv" else {}
            if self.loader == "text":
                options["sample_by"] = self.sample_by
            if self.loader == "json":
                return self._read_json(streaming)
            names = [glob.escape(str(file)) for file in self.files]
            # Its copy is found by path and time: other rows may have those of before (archives).
            options |= {} if streaming else {"name": f"rows-{self.fingerprint()[:16]}"}
            found: Any = load_dataset(
                self.loader, data_files=names, split="train", streaming=streaming, **options
            )
            # A blank line separates rows of text.
            return found.filter(_has_text) if self.loader == "text" else found

    def _read_json(self, streaming: bool) -> Any:
        from datasets import Dataset, IterableDataset

        columns = columns_of(self.files, CHECKED if streaming else None)
        given = {"files": [str(file) for file in self.files], "columns": columns}
        features = features_of(columns)
        if not columns:
            raise self.empty()
        if streaming:
            return IterableDataset.from_generator(cells, features, gen_kwargs=given)
        code = Path(json_rows.__file__).read_text(encoding="utf-8")
        name = hashlib.sha256(f"{self.fingerprint()}{code}".encode()).hexdigest()[:16]
        return Dataset.from_generator(cells, features, gen_kwargs=given, fingerprint=name)


def _has_text(row: dict[str, Any]) -> bool:
    return bool(row["text"].strip())


# ---------------------------------------------------------------------------------------- sources


def sources_of(data: DataConfig) -> list[tuple[Source, float | None]]:
    """Sources of the training rows and their weights (None: all of it, once)."""
    if data.path is not None:
        found = [files_of(path, "data.path", data.sample_by) for path in data.sources]
        _refuse_twice(found)
        if data.sample_by != "line" and all(source.loader != "text" for source in found):
            raise DataError(
                "data.sample_by is about text files, and none of these is one",
                where=f"data.sample_by={data.sample_by}",
                fix="~data.sample_by, or files that end with .txt",
            )
        return list(zip(found, data.sources.values(), strict=True))
    assert data.name is not None
    if data.hub is not None:
        return [
            (Source(data.name, "data.name", hub=(data.name, subset or None, data.split)), weight)
            for subset, weight in data.sources.items()
        ]
    packaged = {BUILTIN + file.stem: file for file in (ASSETS / "data").glob("*.jsonl")}
    if data.name not in packaged:
        raise DataNotFoundError(
            f"there is no packaged data set {data.name!r}{did_you_mean(data.name, packaged)}",
            where="data.name",
            fix=f"packaged data sets: {', '.join(packaged)}",
        )
    return [(files_of(str(packaged[data.name]), "data.name"), None)]


def _refuse_twice(sources: list[Source]) -> None:
    """Refuse a file of several sources: rows that one holds out, another would train on."""
    first: dict[Path, Source] = {}
    for source in sources:
        for file in source.files:
            other = first.setdefault(file.resolve(), source)
            if other is not source:
                raise DataError(
                    f"{file.name} is read twice",
                    where=f"{source.where}: {other.label} and {source.label}",
                    why="rows that are held out of the one would be trained on in the other",
                    fix='name it once; \'data.path={"a.jsonl":2,"b.jsonl":1}\' draws by weight',
                )


def files_of(given: str, setting: str, sample_by: str = "line") -> Source:
    """The files that a path, folder or glob stands for; `sample_by` is of text files."""
    path = user_path(given)
    where = f"{setting}: {path}"
    if os.path.isfile(path / "state.json"):
        return Source(given, setting, (path / "dataset_info.json", *_all(path, ".arrow")), "saved")
    if os.path.isfile(path / "dataset_dict.json"):
        raise DataError(
            f"{path} holds several splits",
            where=where,
            fix=f"name one: {setting}={path / 'train'}",
        )
    if os.path.isfile(path):  # False of a name that no file can have
        files = [path]
    elif os.path.isdir(path):
        files = [file for file in _all(path) if _kind(file) in LOADERS]
    else:
        files = sorted(map(Path, glob.glob(str(path), recursive=True)))
        files = [file for file in files if os.path.isfile(file)]
    if not files:
        raise _not_found(path, where)
    kinds = sorted({_kind(file) for file in files})
    unknown = [kind for kind in kinds if kind not in LOADERS]
    if unknown:
        raise DataError(
            f"{path.name}: files of type {unknown[0] or '(none)'!r} cannot be read",
            where=where,
            fix=f"use {', '.join(LOADERS)}, or one of these with {', '.join(COMPRESSED)}",
        )
    if len({LOADERS[kind] for kind in kinds}) > 1 or (len(kinds) > 1 and ".tsv" in kinds):
        raise DataError(
            f"{path} holds files of several types: {', '.join(kinds)}",
            where=where,
            fix=f"name one, such as '{path if path.is_dir() else path.parent}/*{kinds[0]}', or "
            "give a list of them",
        )
    for file in files:
        if file.stat().st_size == 0:
            raise DataError(f"{file.name} is empty", where=where, fix=ADD_ROWS)
        if file.suffix == ".zst" and find_spec("zstandard") is None:
            raise DataError(
                "files with .zst need the package zstandard",
                where=where,
                fix="pip install zstandard, or compress them with gzip",
            )
    return Source(given, setting, tuple(files), LOADERS[kinds[0]], sample_by=sample_by)


def _all(folder: Path, suffix: str = "") -> list[Path]:
    """Files below a folder, without hidden ones, sorted."""
    return sorted(
        file
        for file in folder.rglob(f"*{suffix}")
        if file.is_file() and not any(x.startswith(".") for x in file.relative_to(folder).parts)
    )


def _kind(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        del suffixes[-1]
    return suffixes[-1] if suffixes else ""


def _not_found(path: Path, where: str) -> DataNotFoundError:
    if os.path.isdir(path):
        found = sorted({_kind(file) or "(none)" for file in _all(path)})
        return DataNotFoundError(
            f"the folder {str(path)!r} has no data files",
            where=where,
            why=f"types found: {some(found)}",
            fix=f"files of one of {', '.join(LOADERS)}",
        )
    if os.path.exists(path):
        return DataNotFoundError(
            f"{str(path)!r} is no regular file",
            where=where,
            why="a pipe, socket or device is read once, and rows are read several times",
            fix=f"write its rows to a file first: cat {shlex.quote(str(path))} > saved.jsonl",
        )
    beside = sorted(path.parent.iterdir()) if os.path.isdir(path.parent) else []
    # By their names without endings, most of which are alike.
    known = {one.name.partition(".")[0]: one.name for one in beside if _kind(one) in LOADERS}
    close = known.get(nearest(path.name.partition(".")[0], known) or "")
    return DataNotFoundError(
        f"there is no data file {str(path)!r}" + (f"; did you mean {close!r}?" if close else ""),
        where=where.replace(str(path), str(path.absolute())),
        fix="give a JSONL, JSON, CSV, Parquet or text file, a folder or a glob, absolute or "
        "relative to this folder",
    )


# ---------------------------------------------------------------------------------------- reading


_UNREADABLE = (
    *(ValueError, OSError, TypeError, LookupError, AttributeError, EOFError),
    *(csv.Error, lzma.LZMAError, zlib.error),
)
"""Errors by which `datasets` and what it calls refuse a file."""
_NO_ROWS = ("corresponds to no data", "BatchSize must be greater than 0")
"""What `datasets` 5.0 says of a file without rows; the second of Parquet without a row group."""


@contextlib.contextmanager
def reading(source: Source) -> Iterator[None]:
    """Turn what `datasets` raises while it reads a source into our errors."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from pyarrow import ArrowException

    read = (DatasetGenerationError, DatasetNotFoundError, ArrowException, *_UNREADABLE)
    try:
        yield
    except FinetuneError:
        raise
    except StopIteration:  # of a compressed file without a line
        raise source.empty() from None
    except read as error:
        if not source.files:
            raise _not_on_the_hub(source, error) from error
        names = (None, *map(str, source.files))
        if isinstance(error, OSError) and error.filename not in names:
            raise DataError(
                f"{Path(source.label).name} could not be cached",
                where=str(error.filename),
                why=str(error.strerror),
                fix="set HF_HOME to a folder that can be written, or data.streaming=true",
            ) from error
        if any(words in f"{error} {error.__cause__}" for words in _NO_ROWS):
            raise source.empty() from None
        raise _unreadable(source, error) from error


def _unreadable(source: Source, error: BaseException) -> DataError:
    name = Path(source.label).name
    where = source.label
    if isinstance(error.__cause__ or error, UnicodeDecodeError):
        return not_utf8(source.label, source.files)
    why = (str(error.__cause__ or error).strip() or repr(error)).splitlines()[0]
    if len(source.files) > 1 and why == "Couldn't cast":  # what `datasets` 5.0 says first
        return DataError(
            f"the files of {source.label} have different columns",
            where=where,
            why="a folder or glob is one table",
            fix=f"{source.where}=[{', '.join(map(str, source.files[:2]))}], a list of files: their "
            "columns may differ",
        )
    if isinstance(error.__cause__ or error, EOFError | zlib.error | lzma.LZMAError | BadGzipFile):
        return DataError(
            f"{name} is cut off or damaged",
            where=where,
            why=why,
            fix="copy or download it again; `gzip -t FILE` (xz, bzip2, zstd -t) checks a file",
        )
    return DataError(
        f"{name} cannot be read as {source.loader}",
        where=where,
        why=why,
        fix="fix that line; every row needs the same columns with the same types"
        if source.loader == "csv"
        else "write or copy the file again: it is cut off, or of another kind than its name says",
    )


def _csv_options(source: Source, streaming: bool) -> dict[str, Any]:
    """Options that read every cell as text: `007` keeps its zeros, and `NA` is not missing."""
    import fsspec
    from datasets import Features, Value

    csv.field_size_limit(LONGEST // 2)  # of a cell; 131,072 characters otherwise
    columns: list[str] = []
    separator = _separator(source.files[0])
    for path in source.files:
        with fsspec.open(
            str(path), "rt", compression="infer", newline="", encoding="utf-8-sig"
        ) as file:
            lines = csv.reader(file, delimiter=separator)
            first = next(lines, [])
            if "\0" in "".join(first):
                raise not_utf8(source.label, [path])
            if not "".join(first).strip():
                raise DataError(
                    f"the first line of {path.name} is blank",
                    where=f"{path}:1",
                    why="the names of the columns stand there",
                    fix="remove the lines before them",
                )
            # pandas writes its index under no name, and reads it under such a one.
            header = [name or f"Unnamed: {i}" for i, name in enumerate(first)]
            counts = Counter(header)
            if twice := [name for name in header if counts[name] > 1][:1]:
                raise DataError(
                    f"{path.name} has two columns of the name {twice[0]!r}",
                    where=f"{path}:1",
                    why="only one of them would be read",
                    fix="rename one of them in the first line",
                )
            columns = columns or header
            for cells in itertools.islice(lines, CHECKED if streaming else None):
                if cells and len(cells) != len(header):
                    raise DataError(
                        f"{path.name} has a row of {len(cells)} cells under {len(header)} columns",
                        where=f"{path}:{lines.line_num}",
                        why="its columns would be shifted",
                        fix="quote cells that hold a comma or a line break, or remove the row",
                    )
    features = Features({column: Value("string") for column in columns})
    text = {"features": features, "keep_default_na": False} if columns else {}
    return {"sep": separator, **text}


def _separator(path: Path) -> str:
    """What separates the cells of the first line: as the name says, or the only one it has."""
    import fsspec

    usual = "\t" if _kind(path) == ".tsv" else ","
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig") as file:
        header = next(csv.reader(file, delimiter=usual), [])
    found = Counter(c for c in "".join(header) if c in DELIMITERS) if len(header) == 1 else {}
    return max(found, key=lambda c: found[c], default=usual)


def _not_on_the_hub(source: Source, error: BaseException) -> DataNotFoundError:
    name, subset, split = source.hub
    part = f"subset {subset!r}, split {split!r}" if subset else f"split {split!r}"
    return DataNotFoundError(
        f"the data set {name!r} could not be loaded",
        where=f"data.name ({part})",
        why=first_line(error),
        fix="check the name, split and your connection, or use a file: data.path=mine.jsonl "
        "data.name=null",
    )
