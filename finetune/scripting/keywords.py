"""Keywords of these functions: keys of a recipe, by the names that Python has for them.

`alpha` of the section `lora` is `lora_alpha`, as in PEFT; `attention` of the section `model` is
`attn_implementation`, as in Transformers. Errors about a recipe's settings speak of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from finetune.config.aliases import as_argument, in_python, keyword
from finetune.config.methods import METHODS, arguments, method_of
from finetune.config.recipe import Recipe, checked, replace
from finetune.config.sections import BUILTIN
from finetune.config.train_section import elsewhere, fields_of
from finetune.config.yaml import KeyPath, PlainText
from finetune.errors import UnknownArgumentError, did_you_mean, speaking

Settings = dict[str, dict[str, Any]]
"""Values by section and key of a recipe."""
FUNCTIONS = {
    "load": ("model", "precision"),
    "add_lora": ("lora",),
    "trainer": ("train", "data", "checkpoints"),
}
"""Function -> the sections of a recipe whose keys are its keywords; earlier ones win."""


def by_section(function: str, settings: Mapping[str, Any]) -> Settings:
    """Keywords of a function by section and key.

    Raises:
        UnknownArgumentError: a keyword that is none, with the function and name that are meant.
    """
    known: dict[str, tuple[str, str]] = {}
    for section in FUNCTIONS[function]:
        if section == "train":  # what the method lacks of the usual ones is refused with it
            keys = (*arguments(method_of(settings)), *arguments(METHODS["sft"]))
        else:
            keys = fields_of(section)
        for key in keys:
            known.setdefault(keyword(section, key), (section, key))
    found: Settings = {}
    for word, value in settings.items():
        if word not in known:
            raise _unknown(function, word, value, known)
        section, key = known[word]
        found.setdefault(section, {})[key] = value
    return found


def _unknown(
    function: str, word: str, value: Any, known: Mapping[str, tuple[str, str]]
) -> UnknownArgumentError:
    there = elsewhere(word, value)
    named = re.match(r"write (\w+)\.", there)
    home = next((f for f, parts in FUNCTIONS.items() if named and named[1] in parts), function)
    return UnknownArgumentError(
        f"finetune.{function} has no argument {word!r}"
        + ("" if there else did_you_mean(word, known)),
        where=f"finetune.{function}({word}=...)",
        why="a setting that nothing reads would be ignored silently",
        fix=f"{there} in finetune.{home}(...)" if named else there or f"leave {word} out",
    )


def recipe_of(function: str, said: Settings, typed: Settings, name: str = "") -> Recipe:
    """The recipe of what was said before, and of what is typed now.

    Raises:
        ConfigError: a value that a key cannot take, or keys that do not go together.
    """
    data = {section: dict(values) for section, values in said.items()}
    for section, values in typed.items():
        data[section] = data.get(section, {}) | values
    replace(data, said, [f"{section}.{key}" for section in typed for key in typed[section]])
    data["data"] = data.get("data") or {"name": f"{BUILTIN}harbour"}  # a model alone has no rows
    precision = data["precision"] = dict(data.get("precision", {}))
    # As in shipped recipes with adapters: over a base with a scale for each row gradients are E4M3
    # too, and keep a digit more than in E5M2 (`finetune.precision.numbers.weights`).
    if precision.get("compute") == "fp8" and "lora" in data:
        precision.setdefault("scaling", "rowwise")

    def where(at: KeyPath) -> str:
        section, *keys = at
        word = keyword(section, keys[0]) if keys else section
        return f"finetune.{function}({'precision' if word == 'compute' else word}=...)"

    return Recipe(name, Path(), checked(_plain(data), where))


def _plain(value: Any) -> Any:
    """A value of Python as a recipe's file has it, where the key decides the type of a number."""
    if isinstance(value, bool | int | float):
        return PlainText(str(value).lower())
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    is_text = isinstance(value, Path) or type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_text else value


def _spoken(text: str) -> str:
    """A message about a recipe's settings as one about keywords, which have other defaults."""
    text = re.sub(r" takes the default, .*", "", text)
    text = re.sub(r"(?<![\w.])precision\.compute=(\w+)", r"precision='\1'", text)
    sections = ("model", "data", "checkpoints", "eval")
    keys = "|".join({key for section in sections for key in fields_of(section)})
    setting = rf"(?<![\w./])(~?)({'|'.join(sections)})\.({keys})\b()(?:=([^\s,;()]*[^\s,;().:]))?"
    return in_python(re.sub(setting, as_argument, text))


speaks = partial(speaking, _spoken)
"""Context manager, and decorator, in which errors name keywords."""
