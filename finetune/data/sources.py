"""Reading rows: files, folders, globs, compressed or not, and the hub, through `datasets`.

`datasets` copies rows into its cache on disk once and maps them into memory; a stream
(`data.streaming`) is read while it trains, and nothing of it is copied.
"""

from __future__ import annotations

import contextlib
import glob
import lzma
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from gzip import BadGzipFile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import ASSETS, user_path
from finetune.config.sections import BUILTIN, DataConfig
from finetune.data import text_rows
from finetune.data.images import PICTURES, undecoded
from finetune.data.text_rows import COMPRESSED, cells, columns_of, features_of, kind_of
from finetune.errors import (
    DataError,
    DataNotFoundError,
    FinetuneError,
    did_you_mean,
    first_line,
    nearest,
    some,
)
from finetune.runs.fingerprint import fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

LOADERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".ndjson": "json",
    ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
ADD_ROWS = 'add rows, such as {"prompt": "Where?", "completion": "Here."}'
HELD_OUT = "held_out"
"""Split of packaged rows to evaluate on, a file of its own: `pictures`, `pictures_held_out`."""
CHECKED = 10_000
"""Rows of a streamed file of text by which its columns are known."""


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

    def unread(self, *, images: bool = False) -> list[str]:
        """A line on what lies in a folder and is not read: files of other types, linked folders.

        With `images` those are read that rows name, by rows.
        """
        folder = user_path(self.label)
        if self.loader in ("hub", "saved") or not os.path.isdir(folder):
            return []
        others = [p for p in folder.rglob("*") if p.is_file() or p.is_symlink()]
        others = sorted({str(p.relative_to(folder)) for p in others if p not in self.files})
        # Hidden files are nobody's rows.
        others = [name for name in others if not re.search(r"(^|/)\.", name)]
        others = [name for name in others if not (images and name.lower().endswith(PICTURES))]
        return [f"not read in {self.label}: {some(others)}"] if others else []

    def fingerprint(self) -> str:
        """What tells its rows from others: contents of files, names of the hub."""
        return fingerprint(self.files, self.loader, *map(str, self.hub))

    def read(self, *, streaming: bool) -> Dataset | IterableDataset:
        """Rows of the source.

        Raises:
            DataError: a file cannot be read, or there are no rows.
            DataNotFoundError: the hub has no such data set.
        """
        rows: Any = self._read(streaming)
        # Pictures stay what their files are: they are opened where they are used, once.
        undecoded(rows.info.features)
        if not streaming:
            if not len(rows):
                raise self.empty()
            return rows
        with reading(self):
            if next(iter(rows), None) is None:
                raise self.empty()
            # A stream without types is read in its first rows, which decide them.
            rows = rows if rows.features else rows._resolve_features()
            undecoded(rows.info.features)
            return rows

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
            if self.loader in ("json", "csv", "text"):
                return self._read_text(streaming)
            # `datasets` takes names as patterns: `rows[1].parquet` would be another file.
            names = [glob.escape(str(file)) for file in self.files]
            # Its copy is found by path and time: other rows may have the same ones (archives).
            name = None if streaming else f"rows-{self.fingerprint()[:16]}"
            return load_dataset(
                self.loader, name, data_files=names, split="train", streaming=streaming
            )

    def _read_text(self, streaming: bool) -> Any:
        from datasets import Dataset, IterableDataset

        columns = columns_of(self.files, CHECKED if streaming else None, self.sample_by)
        if not columns:
            raise self.empty()
        files = [str(file) for file in self.files]
        given = {"files": files, "columns": columns, "sample_by": self.sample_by}
        features = features_of(columns)
        if streaming:
            return IterableDataset.from_generator(cells, features, gen_kwargs=given)
        code = Path(text_rows.__file__).read_text(encoding="utf-8")
        # With the code that reads: a better reader must not be given the rows of an older one.
        made = fingerprint(self.files, self.loader, self.sample_by, code)
        return Dataset.from_generator(cells, features, gen_kwargs=given, fingerprint=made[:16])


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
    name = f"{data.name}_{HELD_OUT}" if data.split == HELD_OUT else data.name
    if name not in packaged:
        raise DataNotFoundError(
            f"there is no packaged data set {name!r}{did_you_mean(name, packaged)}",
            where="data.name" if name == data.name else "data.eval_split",
            fix=f"packaged data sets: {', '.join(packaged)}",
        )
    return [(files_of(str(packaged[name]), "data.name"), None)]


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
        files = [file for file in _all(path) if kind_of(file) in LOADERS]
    else:
        files = sorted(map(Path, glob.glob(str(path), recursive=True)))
        files = [file for file in files if os.path.isfile(file)]
    if not files:
        raise _not_found(path, where)
    kinds = sorted({kind_of(file) for file in files})
    unknown = [kind for kind in kinds if kind not in LOADERS]
    if unknown:
        raise DataError(
            f"{path.name}: files of type {unknown[0] or '(none)'!r} cannot be read",
            where=where,
            fix=f"use {', '.join(LOADERS)}, or one of these with {', '.join(COMPRESSED)}",
        )
    if len({LOADERS[kind] for kind in kinds}) > 1:
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


def _not_found(path: Path, where: str) -> DataNotFoundError:
    if os.path.isdir(path):
        found = sorted({kind_of(file) or "(none)" for file in _all(path)})
        return DataNotFoundError(
            f"the folder {str(path)!r} has no data files",
            where=where,
            why=f"types found: {some(found)}",
            fix="a metadata.jsonl beside the images that names them, a row each: "
            '{"file_name": "a.jpg", "prompt": "Which ship?", "completion": "A tug."}'
            if {*PICTURES} & {*found}
            else f"files of one of {', '.join(LOADERS)}",
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
    known = {one.name.partition(".")[0]: one.name for one in beside if kind_of(one) in LOADERS}
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
    *(lzma.LZMAError, zlib.error),
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
    except read as error:
        if not source.files:
            raise _not_on_the_hub(source, error) from error
        names = (None, *map(str, source.files))
        # Not of a source: the cache of `datasets` is full or may not be written.
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
        fix="write or copy the file again: it is cut off, or of another kind than its name says",
    )


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
