"""Folders of the installed package, and its recipes by name or path.

Without pydantic and YAML, so that `ls` and completion are quick.
"""

from __future__ import annotations

import json
import os.path
import shlex
from pathlib import Path
from typing import Any

from finetune.errors import RecipeNotFoundError, did_you_mean

PACKAGE = Path(__file__).parents[1]
ASSETS = PACKAGE / "assets"
"""Data alone: shapes of models, tables of GPUs, the packaged model, rows and tasks."""
SHAPES = ASSETS / "shapes"
TINY_LLAMA = ASSETS / "tiny_llama"


def shipped_shape(name: str) -> Path | None:
    """The `config.json` of a hub model's shape, for the models of our recipes."""
    path = SHAPES / f"{name.replace('/', '--')}.json"
    return path if path.is_file() else None


def shipped_shapes() -> list[str]:
    """Hub models whose shape is packaged, sorted."""
    return sorted(path.stem.replace("--", "/") for path in SHAPES.glob("*.json"))


def user_path(name: Path | str) -> Path:
    """A path as typed, `~` replaced by the home folder; an unknown user's stays as it is."""
    return Path(os.path.expanduser(name))


def recipes_folder() -> Path:
    """The folder of shipped recipes: inside the wheel, or beside the package in a checkout."""
    packaged = PACKAGE / "recipes"
    return packaged if packaged.is_dir() else PACKAGE.parent / "recipes"


def list_recipes() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def is_path(name: str) -> bool:
    """True if a recipe argument means a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix in (".yaml", ".yml") or len(path.parts) > 1


def find_recipe(name: str) -> Path:
    """The YAML file of a recipe given by name or by path; a run's is in its folder.

    Raises:
        RecipeNotFoundError: neither a shipped recipe nor a file; names the nearest.
    """
    path = Path(name)
    file = path if is_path(name) else recipes_folder() / f"{name}.yaml"
    for found in (file, path / "config.yaml"):
        if os.path.isfile(found):  # False of a name that no file can have
            return found
    refuse_folder(path)
    if is_path(name):
        raise RecipeNotFoundError(
            f"there is no recipe file {name!r}",
            where=str(path.absolute()),
            fix="`python -m finetune ls` lists the shipped recipes; `cp` copies one to edit",
        )
    raise RecipeNotFoundError(
        f"there is no recipe {name!r}" + did_you_mean(name, list_recipes()),
        fix="`python -m finetune ls` lists them; a path to a YAML file works too",
    )


def refuse_folder(path: Path) -> None:
    """Raise `RecipeNotFoundError` for a folder where a recipe is to be trained: a run's has one."""
    if os.path.isdir(path):
        own = path / "config.yaml"
        raise RecipeNotFoundError(
            f"{str(path)!r} is a folder, and a recipe is a file",
            where=str(path.absolute()),
            fix=f"its recipe: {own}; python -m finetune resume {shlex.quote(str(path))} resumes "
            "the run"
            if own.is_file()
            else "give the YAML file itself; `python -m finetune ls` lists the shipped recipes",
        )


def recipe_of(folder: Path) -> str:
    """Name of the recipe of a run folder, as it was written there, also where it was moved since.

    Older runs that have no receipt either are named by the folder above.
    """
    for file, keys in (("run.json", ("recipe",)), ("receipt.json", ("run", "name"))):
        try:
            found: Any = json.loads((folder / file).read_text(encoding="utf-8"))
            for key in keys:
                found = found[key]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        # A name and no path: new runs are written below a folder of this name.
        if isinstance(found, str) and found and found == Path(found).name and found[0] != ".":
            return found
    return folder.resolve().parent.name
