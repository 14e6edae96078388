"""The folder an export is written to: complete and checked, or not there.

Everything is written to `OUT.partial` and moved to `OUT` at the end. Ctrl-C or an error takes the
partial folder away; a failed parity check leaves it, with the figures, to be looked at.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import ConfigError, ParityError

RECORD = "export.json"
"""The file that marks a folder as an export of ours, finished or not."""


@contextlib.contextmanager
def writing_to(out: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when the body ends well.

    Args:
        out: where the export shall be.
        force: replace an earlier export there.
        keep_clear: folders that are read, in which nothing may be written.

    Raises:
        ConfigError: `out` is taken, or inside a folder that is read.
    """
    partial = out.parent / f"{out.name}.partial"
    _check(out, partial, force=force, keep_clear=keep_clear)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        (partial / RECORD).write_text('{"finished": false}\n', encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{str(out)!r} cannot be written: {error.strerror}", where=str(out.resolve())
        ) from None
    try:
        yield partial
    except ParityError:
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)  # empty, or an earlier export and --force
    partial.rename(out)


def _check(out: Path, partial: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> None:
    where = str(out.resolve())
    for folder in (f.resolve() for f in keep_clear):
        inside = out.resolve().is_relative_to(folder)
        if inside or folder.is_relative_to(out.resolve()):
            relation = "is inside" if inside else "holds"
            raise ConfigError(
                f"{str(out)!r} {relation} {str(folder)!r}, which is read",
                where=where,
                why="a run folder stays as the run left it",
                fix="choose a folder beside it",
            )
    if out.is_file():
        raise ConfigError(f"{str(out)!r} is a file", where=where, fix="choose another folder")
    ours = (out / RECORD).is_file()
    if out.is_dir() and any(out.iterdir()) and not (force and ours):
        raise ConfigError(
            f"{str(out)!r} is not empty",
            where=where,
            why="an export is there already" if ours else "what is in it is not an export",
            fix="choose another folder, or --force to replace it" if ours else "choose another",
        )
    if partial.exists() and not (partial / RECORD).is_file():
        raise ConfigError(
            f"{str(partial)!r} is in the way",
            where=str(partial.resolve()),
            why="the export is written there until it is complete",
            fix="remove it, or choose another folder",
        )
