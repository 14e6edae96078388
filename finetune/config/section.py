"""Base of the sections of a recipe: checks of any value, and refusals."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from finetune.config.paths import is_text

LARGEST = 2**53
"""Largest magnitude of a whole number: what a float holds exactly, and tensors never reach."""
FLOAT32_MAX = 3.4e38
"""Largest magnitude of others: what a tensor can hold."""


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

    @field_validator("*", mode="after")
    @classmethod
    def _is_in_range(cls, value: Any) -> Any:
        most = FLOAT32_MAX if isinstance(value, float) else LARGEST
        if isinstance(value, (int, float)) and abs(value) > most:
            raise ValueError("this number is larger than anything that can be counted")
        return value

    def _changed(self, *names: str) -> list[str]:
        """Those of `names` whose value is not the default."""
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
        """The settings as they are typed on the command line."""
        return ", or ".join(
            " ".join(
                f"{'~' * word.startswith('~')}{section}.{word.removeprefix('~')}"
                for word in way.split()
            )
            for way in self.ways
        )


def _in_words(way: str) -> str:
    return " and ".join(
        f"leave {word[1:]} out" if word.startswith("~") else f"set {word}" for word in way.split()
    )
