"""Settings of other tools, and what says the same here.

NeMo and Megatron write `fp8_margin`, Transformer Engine wrote `interval`, Unsloth and bitsandbytes
`load_in_4bit`, older TRL `max_seq_length`. None of them is accepted under that name (a setting with
two names is one that two lines of a recipe can contradict): each error names the replacement.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterable
from typing import Any

from finetune.config.paths import ASSETS
from finetune.precision.settings import TORCH_NAMES, plain_dtype
from finetune.section import typed_key

_TABLE = tomllib.loads((ASSETS / "other_names.toml").read_text("utf-8"))
SETTINGS: dict[str, str] = _TABLE["settings"]
"""Name elsewhere -> the setting here, with the value that it then has where that is another one.

What has a space says in words what to do, with the value that was typed for `{}`.
"""
DROPPED: dict[str, str] = _TABLE["dropped"]
"""Name elsewhere -> why nothing says it here."""

FOREIGN: dict[str, dict[str, str]] = _TABLE
"""Of whole files of other tools: `files`, `columns` of data sets, and `defaults` by tool."""

ARGUMENTS = {"format": "fp8_format", "eval": "eval_precision"}
"""Key of a recipe's `precision` -> its name in `setup_fp8_mixed_precision_training`."""
_ELSEWHERE = {
    "model.attention": "attn_implementation",
    "model.dtype": "dtype",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
}
"""Key of a recipe -> its name as an argument of Transformers or PEFT, where it is another one."""
_FALSE = ("false", "no", "off", "0", "0.0", "none", "null")


def in_recipe(name: str, value: object = "...") -> str:
    """The fix for a key of another tool in a recipe; empty if no tool that we know has it.

    >>> in_recipe("max_seq_length", 512)
    'write train.max_length=512'
    >>> in_recipe("LOAD_IN_4BIT", True), in_recipe("load_in_4bit", False)
    ('write model.storage=nf4', 'leave it out')
    >>> in_recipe("COMPUTE_DTYPE", "bfloat16"), in_recipe("torch_dtype", "fp8")
    ('write precision.compute=bf16', 'write precision.compute=fp8')
    """
    name = name.lower()
    if name in DROPPED:
        return f"leave it out: {DROPPED[name]}"
    setting = SETTINGS.get(name, "")
    if "=" in setting and is_off(value):
        return "leave it out"
    if " " in setting:
        return setting.replace("{}", _flow(value))
    multiplied = plain_dtype(value).lower()  # not how weights are stored
    low = multiplied.startswith(("fp8", "float8"))
    if setting == "model.dtype" and low:
        return "write precision.compute=fp8"
    if setting == "precision.compute":
        value = "fp8" if low else TORCH_NAMES.get(multiplied, value)
    return f"write {setting}" + ("" if "=" in setting else f"={_flow(value)}") if setting else ""


def is_off(value: object) -> bool:
    """True for a value that switches off what its key is about."""
    return str(value).lower() in _FALSE


def _flow(value: object) -> str:
    """A value as it is typed in a shell."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
    return shlex.quote(text) if set(text) & set("{ ") else text


def in_script(name: str, value: object) -> str:
    """The fix for an argument of `setup_fp8_mixed_precision_training`; empty if it is unknown.

    >>> in_script("fp8_hybrid", True)
    "write fp8_format='hybrid'"
    """
    if SETTINGS.get(name, f"precision.{name}") == "precision.compute":
        return "leave it out: it is always fp8 here (BF16 and FP16 are plain Trainers' own)"
    if name in DROPPED:
        return f"leave it out: {DROPPED[name]}"
    if " " in SETTINGS.get(name, ""):
        return f"leave it out: in a recipe, {in_recipe(name)}"
    section, _, rest = SETTINGS.get(name, f"precision.{name}").partition(".")
    key, equals, fixed = rest.partition("=")
    if section != "precision":
        return f"leave it out: in a recipe it is {section}.{rest}, in a script not FP8's business"
    if name in SETTINGS or key in ARGUMENTS:
        return f"write {ARGUMENTS.get(key, key)}={(fixed if equals else value)!r}"
    return ""


def as_arguments(ways: Iterable[str]) -> str:
    """The settings of a `RefusedError` as arguments of `setup_fp8_mixed_precision_training`.

    >>> as_arguments(["format=hybrid", "~margin", "compute=bf16 ~high_gemms"])
    "fp8_format='hybrid', or leave margin out"
    """
    return ", or ".join(
        " and ".join(in_python(typed_key(word, "precision")) for word in way.split())
        for way in ways
        if "compute=" not in way  # it is always fp8 there
    )


_SETTING = re.compile(
    r"(?<![\w./])(~?)"
    r"(precision(?=\.[a-z])|train(?=\.[a-z])|lora(?=\.[a-z])|model(?=\.(?:attention|dtype)\b))"
    r"\.(\w+)(?:(?<=\.map)\.(\w+))?(?:=(\[[^\]]*\]|[^\s,;()]*[^\s,;().:]))?"
)
"""A setting of a recipe in a message; of `model` those that no module is named like."""


def in_python(text: str) -> str:
    """A message about a recipe's settings as one about the arguments of a script.

    >>> in_python("precision.keep=[a, b], or ~precision.format; train.max_grad_norm=1")
    "keep=['a', 'b'], or leave fp8_format out; max_grad_norm=1"
    """
    return _SETTING.sub(as_argument, text)


def keyword(section: str, key: str) -> str:
    """The name of a recipe's key as an argument in Python.

    >>> keyword("precision", "format"), keyword("lora", "alpha"), keyword("train", "optim")
    ('fp8_format', 'lora_alpha', 'optim')
    """
    own = ARGUMENTS if section == "precision" else {}
    return own.get(key) or _ELSEWHERE.get(f"{section}.{key}", key)


def as_argument(found: re.Match[str]) -> str:
    """A setting of a recipe as an argument: groups `~`, section, key, part of a map, value."""
    off, section, key, part, value = found.groups()
    if (section, key) == ("precision", "compute") and value not in (None, "fp8"):
        return f"{value.upper()}, without setup_fp8_mixed_precision_training()"
    name = keyword(section, key)
    if off:
        return f"leave {name} out"
    if value is None:
        return f"{name}[{part!r}]" if part else name
    shown = repr(_value(value))
    return f"{name}={{{part!r}: {shown}}}" if part else f"{name}={shown}"


def _value(text: str) -> Any:
    if text.startswith("["):
        return [item.strip() for item in text[1:-1].split(",")]
    if text in ("true", "false", "null"):
        return {"true": True, "false": False}.get(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
