"""Recipes by name or path. Without pydantic and YAML, so that `ls` and completion are quick."""

from __future__ import annotations

import os
from pathlib import Path

from finetune.config.paths import PACKAGE
from finetune.errors import RecipeNotFoundError, did_you_mean


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
    """The YAML file of a recipe given by name or by path.

    Raises:
        RecipeNotFoundError: neither a shipped recipe nor a file; names the nearest.
    """
    path = Path(name)
    if is_path(name):
        if os.path.isfile(path):  # False of a name that no file can have
            return path
        raise RecipeNotFoundError(
            f"there is no recipe file {name!r}",
            where=str(path.absolute()),
            fix="`python -m finetune ls` lists the shipped recipes; `cp` copies one to edit",
        )
    shipped = recipes_folder() / f"{name}.yaml"
    if os.path.isfile(shipped):
        return shipped
    raise RecipeNotFoundError(
        f"there is no recipe {name!r}" + did_you_mean(name, list_recipes()),
        fix="`python -m finetune ls` lists them; a path to a YAML file works too",
    )
