"""Folders of the installed package."""

import os.path
from pathlib import Path

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
    """A path as typed, `~` replaced by the home folder; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(name))


def is_text(value: str) -> bool:
    """True if a text can be a name or be written to a file: no NUL, no half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
