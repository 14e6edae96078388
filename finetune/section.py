"""The base of every section of settings: frozen, checked, and refusing with the settings that help.

Ground of the package: it imports nothing of it, and `finetune.config` and `finetune.precision` both
stand on it.
"""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen block of a recipe in which an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",
        defer_build=True,  # validators are built where a recipe is read: a tenth of a second
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name != "train":  # checked with the types of `trl.SFTConfig`
            check_text(value)
        return value

    def _changed(self, *names: str) -> list[str]:
        """The names among `names` whose value is not the default."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]


def check_text(value: Any) -> None:
    """Raise `ValueError` for text that is empty or no UTF-8, also inside lists and mappings."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("this is empty; null is no value")
        if not is_text(value):
            raise ValueError("this has a character that is no text (NUL, or half of a surrogate)")
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_text(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key)
            check_text(item)


def typed_key(word: str, section: str) -> str:
    """A setting as it is typed: `~margin` of `precision` is `~precision.margin`."""
    key = f"{section}.{word.removeprefix('~')}"
    return f"~{key}" if word.startswith("~") else key


class RefusedError(ValueError):
    """Values of a section that do not go together, with the settings that solve it.

    Args:
        what: sentence on what is wrong.
        ways: each alone is enough: `key=value` to set, `~key` to leave out, several with spaces.

    >>> print(RefusedError("margin belongs to delayed scaling", "scaling=delayed", "~margin"))
    margin belongs to delayed scaling; set scaling=delayed or leave margin out
    >>> RefusedError("margin is idle", "~margin", "eval=high ~keep").typed("precision")
    '~precision.margin, or precision.eval=high ~precision.keep'
    """

    def __init__(self, what: str, *ways: str) -> None:
        self.what, self.ways = what, ways
        super().__init__(f"{what}; {' or '.join(map(_in_words, ways))}")

    def typed(self, section: str) -> str:
        """The settings as they are typed in a shell, which would take braces apart."""

        def full(word: str) -> str:
            key = typed_key(word, section)
            return shlex.quote(key) if "{" in key else key

        return ", or ".join(" ".join(map(full, way.split())) for way in self.ways)


def _in_words(way: str) -> str:
    return " and ".join(
        f"leave {word[1:]} out" if word.startswith("~") else f"set {word}" for word in way.split()
    )


def is_text(value: str) -> bool:
    """True if a text can be a name or be written to a file: no NUL, no half of a surrogate pair."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
