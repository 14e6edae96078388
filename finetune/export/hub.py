"""`--push ID`: a finished export, or the page of `report`, in a repository of the hub.

Nothing is uploaded by accident: without `--yes` the files, their sizes and the card are shown, and
the hub is not asked. A new repository is private. An export's card (`finetune.runs.card`) has no
path of this machine; `export.json`, which has some, stays here.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError, first_line
from finetune.export.folder import RECORD
from finetune.runs.folder import json_of
from finetune.units import size

LEFT_HERE = (RECORD,)
"""Files of an export that are not uploaded: they name folders of this machine."""


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a repository can be called so.

    Example: `me/harbour-8b-fp8`.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]{0,95}", name, re.ASCII):
        raise ConfigError(
            f"{name!r} is no name of a repository on the hub",
            where=f"--push {name}",
            fix="OWNER/NAME, of letters, digits, '-', '_' and '.': --push me/my-model",
        )


def is_pushable(folder: Path, to: str, run: Path) -> bool:
    """True for a finished export of this run, which need not be made again."""
    found = json_of(folder / RECORD)
    same = (found.get("target"), found.get("run")) == (to, str(run.resolve()))
    return same and bool(found.get("finished"))


def preview(what: Path, name: str) -> str:
    """What would be uploaded of a folder, or a file: names, sizes and the card."""
    files = [what] if what.is_file() else sorted(file for file in what.rglob("*") if file.is_file())
    sizes = {f: f.stat().st_size for f in files if f.name not in LEFT_HERE}
    lines = [f"would upload to https://huggingface.co/{name} (private, if it is new):"]
    home = what.parent if what.is_file() else what
    lines += [f"  {size(nbytes):>10}  {file.relative_to(home)}" for file, nbytes in sizes.items()]
    lines += [f"  {size(sum(sizes.values())):>10}  in all"]
    if (card := what / "README.md").is_file():
        lines += ["its card:", "", card.read_text(encoding="utf-8")]
    return "\n".join([*lines, "nothing was uploaded: --yes uploads it"])


def push(what: Path, name: str, *, private: Any = None, token: Any = None) -> str:
    """Upload a folder, or a file; returns the address of the commit.

    Raises:
        ConfigError: no token, no network, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(library_name="fp8-finetune", token=token)
    common: Any = {"repo_id": name, "commit_message": "Upload by fp8-finetune"}
    try:
        api.whoami()
        api.create_repo(name, private=private is not False, exist_ok=True)
        if what.is_file():
            done: Any = api.upload_file(path_or_fileobj=what, path_in_repo=what.name, **common)
        else:
            done = api.upload_folder(folder_path=what, ignore_patterns=[*LEFT_HERE], **common)
    except (OSError, HTTPError) as error:
        fix = "what is in the folder is complete: the same command tries again"
        why = first_line(error)
        if isinstance(error, LocalTokenNotFoundError) or why.startswith("401 "):
            fix = "hf auth login, or a token that may write in HF_TOKEN; " + fix
        elif isinstance(error, OfflineModeIsEnabled):
            fix = "unset HF_HUB_OFFLINE; " + fix
        elif why.startswith("403 "):
            fix = f"a token that may write to {name.partition('/')[0]!r}; " + fix
        raise ConfigError(
            f"{name!r} could not be uploaded",
            where=f"--push {name}",
            why=why,
            fix=fix,
        ) from error
    return str(done.commit_url)


def refuse_paths(folder: Path) -> None:
    """Refuse an export that names folders of this machine: an adapter of a base that lies here.

    Raises:
        ConfigError: the file, and what it names.
    """
    paths = map(json_of(folder / RECORD).get, ("weights", "run"))
    files = {*folder.glob("*.json")} - {folder / RECORD}
    for path, file in product(filter(None, paths), sorted(files)):
        if path in file.read_text(encoding="utf-8"):
            raise ConfigError(
                f"{file.name} names a folder of this machine, and would be uploaded",
                where=f"{file}: {path}",
                why="nobody else has that folder, and its name may say who you are",
                fix="write the hub's name of that model in its place, then the same command again",
            )


def pushed(what: Path, name: str, *, yes: bool, **access: Any) -> str:
    """Upload with `yes`, and say where to; without it, say what would be uploaded."""
    refuse_paths(what)
    return f"uploaded: {push(what, name, **access)}" if yes else preview(what, name)
