"""Folders of an export: the original weights', and the one that is made, complete or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from finetune.config.schema import ModelConfig
from finetune.errors import ConfigError, ParityError, first_line, some, writing
from finetune.runs.folder import json_of, write_whole
from finetune.storage.pretrained import loading, locate, refuse_random_base
from finetune.training.checkpoints.resume import TOKENIZER
from finetune.training.faults import is_of_the_disk

WEIGHTS_AND_MORE = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*")
RECORD = "export.json"
"""File that marks a folder as our export, finished or not."""
UNFINISHED = '{"finished": false}\n'


def weights_folder(model: ModelConfig) -> Path:
    """Folder of a model's stored weights; hub weights are downloaded or taken from the cache.

    Raises:
        ModelNotFoundError: no such folder or hub model.
        ConfigError: the run began with random weights, which are stored nowhere.
    """
    from huggingface_hub import snapshot_download

    refuse_random_base(model)
    source = locate(model)
    if Path(source).is_dir():
        return Path(source).resolve()
    with loading(source):
        found = snapshot_download(
            source,
            revision=model.revision,
            allow_patterns=list(WEIGHTS_AND_MORE),
            ignore_patterns="consolidated*",  # a second copy, in another layout
        )
    return Path(found)


def stored_names(weights: Path) -> set[str]:
    """Names of the weights in the safetensors files of a folder."""
    names: set[str] = set()
    for file in weights.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= {*tensors.keys()}
    return names


@contextlib.contextmanager
def writing_to(out: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `out` on success.

    Until then it is `OUT.partial`. Ctrl-C or an error removes it; a failed parity check leaves it,
    with the figures, for inspection. An earlier export is moved to `OUT.earlier`, which is removed
    at the end: whenever the process is killed, one of them is there, whole.

    Args:
        out: folder of the finished export.
        force: replace an earlier export there, which is nothing but files that one has written.
        keep_clear: input folders, in which nothing may be written.

    Raises:
        ConfigError: `out` is taken or inside an input folder, or the disk is full.
    """
    out = out.resolve()  # a link stays one
    partial, earlier = (out.with_name(f"{out.name}.{state}") for state in ("partial", "earlier"))
    if _record(earlier).get("finished") and not out.exists():
        earlier.rename(out)  # killed between the two renames below
    _refuse_taken(out, (partial, earlier), force=force, keep_clear=keep_clear)
    for rest in (partial, earlier):
        if rest.exists():
            _remove(rest)
    may_not = "choose a folder that you may write to"
    with writing(f"{str(out)!r} cannot be written", where=str(out), fix=may_not):
        partial.mkdir(parents=True)
        write_whole(partial / RECORD, UNFINISHED)
    try:
        yield partial
    # Complete, but not what the run's model says: it stays in `partial`, to be looked at.
    except ParityError:
        raise
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not is_of_the_disk(error):
            raise
        raise ConfigError(
            "the export cannot be written",
            where=str(out),
            why=first_line(error),
            fix="make room there, or choose a folder on another disk",
        ) from error
    write_json(partial / RECORD, _record(partial) | {"files": _files(partial)}, indent=1)
    if replaces := _record(out):
        out.rename(earlier)
    partial.rename(out)  # also over an empty folder
    if replaces:
        _remove(earlier)


def _record(folder: Path) -> dict[str, Any]:
    """The record of an export in a folder, finished or not; empty if there is none."""
    found = json_of(folder / RECORD)
    return found if "finished" in found else {}


def _remove(folder: Path) -> None:
    """Remove an export, its record last: what a kill leaves is known as one, and not as whole."""
    write_whole(folder / RECORD, UNFINISHED)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RECORD):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def _refuse_taken(
    out: Path, rests: tuple[Path, ...], *, force: bool, keep_clear: tuple[Path, ...]
) -> None:
    where = str(out)
    for folder in (f.resolve() for f in keep_clear):
        inside = out.is_relative_to(folder)
        if inside or folder.is_relative_to(out):
            relation = "is inside" if inside else "holds"
            raise ConfigError(
                f"{str(out)!r} {relation} {str(folder)!r}, which is read",
                where=where,
                why="a run folder stays as the run left it",
                fix="choose a folder beside it",
            )
    if out.is_file():
        raise ConfigError(f"{str(out)!r} is a file", where=where, fix="choose another folder")
    ours, there = _record(out), {*_files(out)}
    others = sorted(there - {RECORD, *ours.get("files", ())} if ours else there)
    if there and (others or not force):
        raise ConfigError(
            f"{str(out)!r} is not empty",
            where=where,
            why=f"no export wrote {some(others, 3)}" if others else "an export is there already",
            fix="choose another folder" + (", or --force to replace it" if not others else ""),
        )
    for rest in rests:
        if not _record(rest) and {*_files(rest)} - {RECORD, f"{RECORD}.partial"}:
            raise ConfigError(
                f"{str(rest)!r} is in the way",
                where=str(rest),
                why="an export is kept there until another is complete",
                fix="remove it, or choose another folder",
            )


def copy_companions(source: Path, out: Path, tokenizer: Path) -> None:
    """Copy the files beside the original weights, and the run's tokenizer and processor."""
    for pattern in WEIGHTS_AND_MORE:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    _copy_tokenizer(tokenizer, out)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for pattern in (*TOKENIZER, "generation_config.json"):  # where answers end
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)


def write_adapter(adapter: Path, out: Path, base: str, revision: str | None) -> None:
    """Copy the run's adapter with the name of its base model: a hub id, or an absolute folder."""
    shutil.copyfile(adapter / "adapter_model.safetensors", out / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    named = {"base_model_name_or_path": base, "revision": revision}
    write_json(out / "adapter_config.json", config | named)
    _copy_tokenizer(adapter, out)


def write_json(path: Path, values: dict[str, Any], indent: int = 2) -> None:
    write_whole(path, json.dumps(values, indent=indent, ensure_ascii=False) + "\n")
