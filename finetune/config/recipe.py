"""From a recipe's name to a `RunConfig`: read, override, check.

A recipe is flat YAML without inheritance, read by `finetune.config.yaml`. Nothing here imports
torch; checking the `train` section imports trl, and can be left out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.config.aliases import in_recipe
from finetune.config.methods import PATIENCE, arguments, method_of
from finetune.config.paths import find_recipe, recipe_of
from finetune.config.schema import RunConfig
from finetune.config.secrets import check_secrets
from finetune.config.train_keys import TrainSection
from finetune.config.train_section import (
    convert_train,
    elsewhere,
    fields_of,
    refuse_open_length,
    steps_of_tokens,
    with_stopping,
)
from finetune.config.yaml import KeyPath, PlainText, dump_yaml, parse_yaml, read_text, shown
from finetune.errors import ConfigError, did_you_mean, raise_all, speaking
from finetune.precision.facts import SCALINGS, STORED_SCALINGS
from finetune.precision.settings import FP8_ONLY, FROZEN_ONLY, plain_dtype
from finetune.section import RefusedError

SECTIONS = tuple(RunConfig.model_fields)


def _of(section: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for key in keys)


OF_SFT = (
    "packing",
    "packing_strategy",
    "eval_packing",
    "padding_free",
    "assistant_only_loss",
    "completion_only_loss",
)
"""Keys of `trl.SFTConfig` about rows of the recipe's own method."""
LENGTHS = ("train.num_train_epochs", "train.max_steps", "data.max_tokens")
"""Settings of how long a run is: one of them is in force."""
REPLACED: tuple[tuple[str, Callable[[Any, Any], bool], tuple[str, ...]], ...] = (
    # What the recipe says of its own model, or of its own rows, does not follow onto others.
    ("model.name", operator.ne, _of("model", "pad_token", "revision")),
    ("data.path", operator.ne, _of("data", "prompts")),
    ("data.name", operator.ne, _of("data", "prompts", "subset", "split", "eval_split")),
    ("data.path", lambda new, _: bool(new), _of("data", "name", "subset", "eval_split")),
    ("data.name", lambda new, _: bool(new), _of("data", "path", "eval_path")),
    # Transformers lets `max_steps` win over epochs in silence; with -1 it counts epochs.
    *((one, lambda new, _: not str(new or "-").startswith("-"), LENGTHS) for one in LENGTHS),
    # Only text that is itself trained on is packed, or has parts that are not.
    ("train.method", operator.ne, (*_of("train", *OF_SFT), "model.head")),
    # Weights belong to the rewards that were named beside them.
    ("train.reward_funcs", operator.ne, _of("train", "reward_weights")),
    # Early stopping evaluates and saves at the same steps, of which a short run has enough.
    (
        f"train.{PATIENCE}",
        lambda new, _: new is not None,
        _of("train", "eval_steps", "save_steps", "save_strategy", "load_best_model_at_end"),
    ),
    # A typed accumulation, or a larger micro-batch, stays as it is, however few the rows.
    ("train.gradient_accumulation_steps", lambda new, _: new is not None, _of("data", "min_steps")),
    (
        "train.per_device_train_batch_size",
        lambda new, old: str(new).isdigit() and int(new) > int(old or 8),
        _of("data", "min_steps"),
    ),
    *(
        (
            "precision.scaling",
            lambda new, _, name=name: new != name,
            _of("precision", *rule.settings),
        )
        for name, rule in SCALINGS.items()
        if rule.settings
    ),
    (
        "precision.scaling",
        lambda new, _: new not in STORED_SCALINGS,
        _of("precision", "frozen", *FROZEN_ONLY),
    ),
    ("precision.frozen", lambda new, _: new != "fp8", _of("precision", *FROZEN_ONLY)),
    ("precision.compute", lambda new, _: new != "fp8", _of("precision", *FP8_ONLY)),
)
"""A setting that is typed; of its new and old value, whether others of the recipe go; and these."""


@dataclass(frozen=True)
class Recipe:
    """A recipe: its name, its file, and its checked configuration."""

    name: str
    source: Path
    config: RunConfig

    def to_yaml(self) -> str:
        """The complete configuration, every default written out; itself a recipe."""
        return dump_yaml(self.config.model_dump(mode="json"))


# --------------------------------------------------------------------------------------- override


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` and `~section.key` (back to the default) to plain data.

    Values are read like values in a recipe: `2e-5`, `no`, `[q_proj, v_proj]`, `null`.

    Raises:
        ConfigError: an override that is neither form, or whose section does not exist.
    """
    written, data = data, {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for item in overrides:
        key, equals, value = item.removeprefix("~").partition("=")
        path = key.split(".")
        if item.startswith("~") == bool(equals) or not all(path):
            raise ConfigError(
                f"{item!r} is not an override",
                where=f"override {item!r}",
                fix="write section.key=value to set, or ~section.key to go back to the default",
            )
        if path[0] not in SECTIONS:
            raise _no_section(item, path, value)
        section, (*parents, last) = data, path
        for parent in parents:
            child = section.get(parent)
            if not equals and not isinstance(child, dict):
                break  # nothing to take back: an empty `lora` would switch adapters on
            section[parent] = dict(child) if isinstance(child, dict) else {}
            section = section[parent]
        else:
            if equals:
                section[last] = _override_value(value, item)
            else:
                section.pop(last, None)
    replace(data, written, overrides)
    return data


def _no_section(item: str, path: Sequence[str], value: str) -> ConfigError:
    """The error for a key of another tool, one without its section, or a misspelt section."""
    dotted = re.sub("[:/]", ".", ".".join(path))
    sections = f"sections are {', '.join(SECTIONS)}"
    replacement = "" if item.startswith("~") else elsewhere(path[-1], value)
    if dotted.partition(".")[0] in SECTIONS:
        replacement = f"write {dotted}={value}"
    return ConfigError(
        f"{item!r}: there is no section {path[0]!r}"
        + did_you_mean(path[0], () if replacement and len(path) == 1 else SECTIONS),
        why="a setting is typed with its section" if len(path) == 1 else "",
        fix=replacement or sections,
    )


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A checked configuration with values as typed on the command line, checked again.

    Raises:
        ConfigError: as `apply_overrides`, or the values do not go together.
    """
    data = apply_overrides(config.model_dump(), overrides)
    train = data.get("train") or {}
    typed = {tuple(_key(item).split(".")[:2]) for item in overrides}
    other_method = ("train", "method") in typed  # other keys are another configuration's now
    new = {key: value for key, value in train.items() if other_method or ("train", key) in typed}
    if new:
        data["train"] = {**train, **convert_train(new, method=method_of(train))}
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise _problems(error, lambda _: " ".join(overrides))[0] from None


def _key(override: str) -> str:
    return override.removeprefix("~").partition("=")[0]


def _override_value(text: str, item: str) -> Any:
    """A value as in a recipe, except that ` #` begins no comment: file names may hold it."""
    if not text.strip():
        raise ConfigError(
            f"{item!r} gives no value",
            where=f"override {item!r}",
            why="a variable of a script may have been empty",
            fix=f"~{_key(item)} takes the default, {_key(item)}=null means none",
        )
    if text in ("null", "~"):
        return None
    # Lists, mappings and quoted texts as YAML has them; any other text is meant as it stands.
    if text[0] in "[{\"'":
        return parse_yaml(text, f"override {item!r}")[0]
    return PlainText(text)


def replace(data: dict[str, Any], written: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Take out what the recipe says beside a setting that is typed, and that belonged to it.

    Args:
        data: sections with what was typed, changed in place; `written`: without.
        overrides: `section.key=value`, or the keys alone.

    What is typed itself stays. Of `precision.map`, parts in FP8 go with FP8 compute.
    """
    named = set(map(_key, overrides))

    def value(whole: Mapping[str, Any], setting: str) -> Any:
        section, _, key = setting.partition(".")
        return part.get(key) if isinstance(part := whole.get(section), dict) else None

    for setting, go, others in REPLACED:
        if setting in named and go(value(data, setting), value(written, setting)):
            for section, _, key in (other.partition(".") for other in {*others} - named):
                if isinstance(data.get(section), dict):
                    data[section].pop(key, None)
    parts = value(data, "precision.map")
    low = "precision.compute" not in named or value(data, "precision.compute") == "fp8"
    if isinstance(parts, dict) and not low and "precision.map" not in named:
        data["precision"]["map"] = {
            part: kind
            for part, kind in parts.items()
            if kind != "fp8" or f"precision.map.{part}" in named
        }


# ------------------------------------------------------------------------------------------ check


@speaking(str)
def read_recipe(name: str, overrides: Sequence[str] = (), *, check_train: bool = True) -> Recipe:
    """Read, override and check a recipe.

    Args:
        name: a shipped recipe's name or a path to a YAML file.
        overrides: `section.key=value` and `~section.key` items.
        check_train: also check and convert the `train` section against `trl.SFTConfig`, which
            imports trl (seconds).

    Raises:
        RecipeNotFoundError: no such recipe.
        ConfigError: an unknown key or a value of the wrong type, with file, line and nearest name.
    """
    if not isinstance(name, str | Path):
        raise ConfigError(
            f"a recipe is given by its name or path here, not by {type(name).__name__}",
            fix="its name, 'tiny_lora_fp8', and settings as overrides",
        )
    if isinstance(overrides, str):
        raise ConfigError("overrides are a list", where=overrides, fix=f"[{overrides!r}]")
    source = find_recipe(str(name))
    file = shown(source)
    data, lines = parse_yaml(read_text(source), file)
    if not isinstance(data, dict):
        raise ConfigError(
            "a recipe is a mapping of sections", where=file, fix=f"start from {', '.join(SECTIONS)}"
        )
    overridden = {tuple(_key(item).split(".")): item for item in overrides}
    written, data = data, apply_overrides(data, overrides)
    _check_unset(written, data, overrides, check_train=check_train)
    # Before anything is written: the recipe is kept in each run folder, which may be shared.
    check_secrets(data)

    def where(at: KeyPath) -> str:
        for length in range(len(at), 0, -1):
            if at[:length] in overridden:
                return f"override {overridden[at[:length]]!r}"
            if at[:length] in lines:
                return f"{file}:{lines[at[:length]]}"
        return file

    config = checked(data, where, check_train=check_train)
    # `runs/<recipe>/<time>-<id>/config.yaml` keeps the name of its recipe.
    ran = any((source.parent / file).is_file() for file in ("receipt.json", "run.json"))
    # It names a folder of runs, which `..` (of `...yaml`) would be outside of.
    name = (recipe_of(source.parent) if ran else "") or source.stem.strip(".") or "recipe"
    return Recipe(name, source, config)


def checked(
    data: Mapping[str, Any], where: Callable[[KeyPath], str], *, check_train: bool = True
) -> RunConfig:
    """Configuration of plain data, section -> key -> value as read from a file.

    Args:
        where: from a path such as `("train", "optim")` to its place for messages.

    Raises:
        ConfigError: as `read_recipe`; all that are wrong, the first with the others.
    """
    errors, config, train = list[ConfigError](), None, TrainSection()
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        errors += _problems(error, where)
    given = config.train if config else data.get("train")
    try:
        if check_train and isinstance(given, dict):
            train = convert_train(given, where)
    except ConfigError as error:
        errors.append(error)
    raise_all(errors)
    assert config is not None
    if not check_train:
        return config
    train = with_stopping(train)
    refuse_open_length(train, streams=config.data.streaming, where=where)
    if tokens := config.data.max_tokens:
        train["max_steps"] = steps_of_tokens(train, tokens, where)
    return config.model_copy(update={"train": train})


def _check_unset(
    written: Mapping[str, Any],
    data: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    check_train: bool,
) -> None:
    """Reject `~section.key` that removes nothing because no such key exists: most likely misspelt.

    A key that exists and is at its default may be unset; so may an unknown one that the recipe has.
    """
    for item in overrides:
        section, _, key = _key(item).partition(".")
        if not item.startswith("~") or not key or "." in key:
            continue
        if section == "train" and not check_train:  # its names need trl
            continue
        if section == "train":
            train = data.get("train")
            known = arguments(method_of(train if isinstance(train, dict) else {}))
        else:
            known = tuple(fields_of(section))
        if key not in known and key not in (written.get(section) or ()):
            raise ConfigError(
                f"there is no key {key!r} in section {section!r}" + did_you_mean(key, known),
                where=f"override {item!r}",
                why="it would take nothing back, and the recipe's value would stay silently",
                fix="write the key as the recipe has it: `python -m finetune cat RECIPE` shows it",
            )


def _problems(error: ValidationError, where: Any) -> list[ConfigError]:
    """What is wrong with sections and keys; keys that are not there come first.

    A misspelt key's right name is not missing beside it.
    """
    problems = sorted(error.errors(), key=lambda p: p["type"] != "extra_forbidden")
    unknown = {p["loc"][0] for p in problems if p["type"] == "extra_forbidden"}
    unknown |= {*SECTIONS} if any(p["loc"][0] not in SECTIONS for p in problems) else set()
    kept = [p for p in problems if p["type"] != "missing" or p["loc"][0] not in unknown]
    return [_problem(first, where) for first in kept]


def _problem(first: Any, where: Any) -> ConfigError:
    at = tuple(str(part) for part in first["loc"])
    dotted = ".".join(at[:2])  # what follows are list indices and members of unions
    if first["type"] == "extra_forbidden":
        known = list(SECTIONS if len(at) == 1 else fields_of(at[0]))
        replacement = elsewhere(at[-1], first["input"])
        kind = f"section {at[-1]!r}" if len(at) == 1 else f"key {at[-1]!r} in section {at[0]!r}"
        return ConfigError(
            f"there is no {kind}" + did_you_mean(at[-1], () if replacement else known),
            where=where(at),
            why="a key that nothing reads would be ignored silently",
            fix=replacement or f"known: {', '.join(known)}",
        )
    if first["type"] == "missing":
        return ConfigError(f"{dotted} is missing", where=where(at[:-1]), fix=f"add {dotted}")
    if first["type"] == "literal_error":
        expected = re.findall(r"'([^']+)'", first.get("ctx", {})["expected"])
        given = plain_dtype(first["input"])
        hint = f"; write {given}" if given in expected else did_you_mean(given, expected)
        return ConfigError(
            f"{dotted} cannot be {first['input']!r}{hint}",
            where=where(at),
            fix=f"one of {', '.join(expected)}",
        )
    if first["type"] in ("model_type", "model_attributes_type"):
        return ConfigError(
            f"{at[0]} is a section, and has no value of its own (given: {first['input']!r})",
            where=where(at),
            fix=in_recipe(at[0]) or _usual(at, first),
        )
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, RefusedError):
        return ConfigError(f"{dotted}: {refusal.what}", where=where(at), fix=refusal.typed(at[0]))
    return ConfigError(
        f"{dotted}: {first['msg'].removeprefix('Value error, ')} (given: {first['input']!r})",
        where=where(at),
        fix=_usual(at, first),
    )


def _usual(at: KeyPath, problem: Any) -> str:
    """The fix for a value that a key cannot take: a list, its default, or what the key is."""
    if problem["type"] == "tuple_type" and isinstance(problem["input"], str):
        return f"{'.'.join(at)}=[{problem['input']}]"
    if len(at) == 1:
        return f"write {at[0]}.key=value for each key of the section"
    field = fields_of(at[0])[at[1]]
    if field.is_required():
        return f"{'.'.join(at[:2])} is a {field.description}"
    return f"~{'.'.join(at[:2])} takes the default, {field.default}"
