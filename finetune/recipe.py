"""From a recipe's name to a `RunConfig`: find, read, override, check, list.

A recipe is flat YAML without inheritance. Two habits of YAML 1.1 cost people runs, and are undone
here: `2e-5` is read as text and `no` as false. Every plain scalar is therefore read as text, and
becomes a number or a truth value by the type of the field that it is for. Each value remembers its
line, so that an error can point at it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from finetune.config import RunConfig
from finetune.errors import ConfigError, RecipeNotFoundError, nearest

Path_ = tuple[str, ...]
PACKAGE = Path(__file__).parent
SECTIONS = tuple(RunConfig.model_fields)
OWNED_BY_US = {
    "output_dir": "the run folder holds it (use --out to choose the folder of runs)",
    "bf16": "precision.compute decides it",
    "fp16": "precision.compute decides it",
    "model_init_kwargs": "the model section decides it",
}
"""Keys of `trl.SFTConfig` that a recipe may not set, and why."""


@dataclass(frozen=True)
class Recipe:
    """A recipe as found: its name, where it came from, and its checked configuration."""

    name: str
    source: Path
    config: RunConfig

    def to_yaml(self) -> str:
        """The complete configuration, every default written out; itself a recipe."""
        return dump_yaml(self.config)


# ------------------------------------------------------------------------------------- find, list


def recipes_folder() -> Path:
    """The folder of shipped recipes: inside the wheel, or beside the package in a checkout."""
    packaged = PACKAGE / "recipes"
    return packaged if packaged.is_dir() else PACKAGE.parent / "recipes"


def list_recipes() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def is_path(name: str) -> bool:
    """Whether a recipe argument means a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix in (".yaml", ".yml") or len(path.parts) > 1


def find_recipe(name: str) -> Path:
    """The YAML file of a recipe given by name or by path.

    Raises:
        RecipeNotFoundError: neither a shipped recipe nor a file; names the nearest.
    """
    path = Path(name)
    if is_path(name):
        if path.is_file():
            return path
        raise RecipeNotFoundError(
            f"there is no recipe file {name!r}",
            where=str(path.resolve()),
            fix="`python -m finetune ls` lists the shipped recipes; `cp` copies one to edit",
        )
    shipped = recipes_folder() / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    hint = nearest(name, list_recipes())
    raise RecipeNotFoundError(
        f"there is no recipe {name!r}" + (f"; {hint}" if hint else ""),
        fix="`python -m finetune ls` lists them; a path to a YAML file works too",
    )


# ------------------------------------------------------------------------------------------- read


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it was built


class _PlainLoader(_Base):
    """YAML in which every plain scalar is text, except null."""


_PlainLoader.yaml_implicit_resolvers = {}
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)


class _Text(str):
    """A plain (unquoted) scalar, whose type the field decides. Quoted text stays a `str`."""


def _build(
    node: Any,
    at: Path_,
    lines: dict[Path_, int],
    file: str,
    above: tuple[Any, ...] = (),
) -> Any:
    lines[at] = node.start_mark.line + 1
    if any(node is parent for parent in above):
        raise ConfigError(
            f"{'.'.join(at)} contains itself",
            where=f"{file}:{lines[at]}",
            fix="write the values out instead of the alias",
        )
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in result:
                raise ConfigError(
                    f"{'.'.join((*at, key))} is given twice",
                    where=f"{file}:{key_node.start_mark.line + 1}",
                    why="only one of the two values would be used",
                    fix="remove one of them",
                )
            result[key] = _build(value_node, (*at, key), lines, file, above)
            lines[(*at, key)] = key_node.start_mark.line + 1
        return result
    if isinstance(node, yaml.SequenceNode):
        return [
            _build(item, (*at, str(i)), lines, file, above) for i, item in enumerate(node.value)
        ]
    if node.tag == "tag:yaml.org,2002:null":
        return None
    return str(node.value) if node.style else _Text(node.value)


def read_text(source: Path) -> str:
    """The text of a recipe file.

    Raises:
        ConfigError: the file is not UTF-8; with file and line.
    """
    content = source.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            "the recipe is not UTF-8 text", where=f"{_shown(source)}:{line}", fix="save it as UTF-8"
        ) from None


def parse_yaml(text: str, file: str) -> tuple[Any, dict[Path_, int]]:
    """Plain data of a YAML text, and the line (from 1) of every value in it.

    Raises:
        ConfigError: malformed YAML, or a key given twice; with file and line.
    """
    lines: dict[Path_, int] = {}
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"this is not valid YAML: {problem}",
            where=f"{file}{line}",
            fix="check indentation, colons and brackets on that line and the one above",
        ) from None
    return ({} if node is None else _build(node, (), lines, file)), lines


# --------------------------------------------------------------------------------------- override


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `section.key=value` and `~section.key` (back to the default) to plain data.

    Values are read like values in a recipe: `2e-5`, `no`, `[q_proj, v_proj]`, `null`.

    Raises:
        ConfigError: an override that is neither form, or whose section does not exist.
    """
    data = {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for item in overrides:
        key, equals, value = item.removeprefix("~").partition("=")
        path = key.split(".")
        if item.startswith("~") == bool(equals) or not all(path):
            raise ConfigError(
                f"{item!r} is not an override",
                fix="write section.key=value to set, or ~section.key to go back to the default",
            )
        if path[0] not in SECTIONS:
            hint = nearest(path[0], SECTIONS)
            raise ConfigError(
                f"{item!r}: there is no section {path[0]!r}" + (f"; {hint}" if hint else ""),
                fix=f"sections are {', '.join(SECTIONS)}",
            )
        parsed = parse_yaml(value, f"override {item!r}")[0] if equals else None
        if equals and value and parsed == {} and not value.lstrip().startswith("{"):
            parsed = value
        _set(data, path, None if value in ("", "null", "~") else parsed, remove=not equals)
    _replace_data_source(data, overrides)
    return data


def _replace_data_source(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """`data.path=mine.jsonl` alone replaces the recipe's `data.name`, and the other way round."""
    named = {item.partition("=")[0] for item in overrides}
    section = data.get("data")
    if not isinstance(section, dict):
        return
    for given, other, along in (
        ("path", "name", ("subset", "eval_split")),
        ("name", "path", ("eval_path",)),
    ):
        if f"data.{given}" in named and f"data.{other}" not in named and section.get(given):
            for key in (other, *along):
                if f"data.{key}" not in named:
                    section.pop(key, None)


def _set(data: dict[str, Any], path: list[str], value: Any, *, remove: bool) -> None:
    *parents, last = path
    for key in parents:
        child = data.get(key)
        data[key] = dict(child) if isinstance(child, dict) else {}
        data = data[key]
    if remove:
        data.pop(last, None)
    else:
        data[last] = value


# ------------------------------------------------------------------------------------------ check


def load_recipe(name: str, overrides: Sequence[str] = (), *, check_train: bool = True) -> Recipe:
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
    source = find_recipe(name)
    file = _shown(source)
    data, lines = parse_yaml(read_text(source), file)
    if not isinstance(data, dict):
        raise ConfigError(
            "a recipe is a mapping of sections", where=file, fix=f"start from {', '.join(SECTIONS)}"
        )
    overridden = {
        tuple(item.removeprefix("~").partition("=")[0].split(".")): item for item in overrides
    }
    data = apply_overrides(data, overrides)

    def where(at: Path_) -> str:
        for length in range(len(at), 0, -1):
            if at[:length] in overridden:
                return f"override {overridden[at[:length]]!r}"
            if at[:length] in lines:
                return f"{file}:{lines[at[:length]]}"
        return file

    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error, where) from None
    train = convert_train(config.train, where) if check_train else config.train
    name = _run_name(source) if (source.parent / "receipt.json").is_file() else source.stem
    return Recipe(name, source, config.model_copy(update={"train": train}))


def _run_name(source: Path) -> str:
    """`runs/<recipe>/<time>-<id>/config.yaml` keeps the name of its recipe."""
    folder = source.resolve().parent.parent.name
    return folder or source.stem


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _section_fields(at: Path_) -> Iterable[str]:
    model: type[BaseModel] = RunConfig
    for key in at:
        annotation = model.model_fields[key].annotation
        args = getattr(annotation, "__args__", (annotation,))
        model = next(a for a in args if isinstance(a, type) and issubclass(a, BaseModel))
    return model.model_fields


def _first_problem(error: ValidationError, where: Any) -> ConfigError:
    problems = error.errors()
    # A misspelt key comes before the complaint that the right one is missing.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    at = tuple(str(part) for part in first["loc"])
    dotted = ".".join(at[:2])  # what follows are list indices and members of unions
    if first["type"] == "extra_forbidden":
        known = list(_section_fields(at[:-1]))
        hint = nearest(at[-1], known)
        kind = f"section {at[-1]!r}" if len(at) == 1 else f"key {at[-1]!r} in section {at[0]!r}"
        return ConfigError(
            f"there is no {kind}" + (f"; {hint}" if hint else ""),
            where=where(at),
            why="a key that nothing reads would be ignored silently",
            fix=f"known: {', '.join(known)}",
        )
    if first["type"] == "missing":
        return ConfigError(f"{dotted} is missing", where=where(at[:-1]), fix=f"add {dotted}")
    if first["type"] == "literal_error":
        expected = re.findall(r"'([^']+)'", first.get("ctx", {})["expected"])
        hint = nearest(str(first["input"]), expected)
        return ConfigError(
            f"{dotted} cannot be {first['input']!r}" + (f"; {hint}" if hint else ""),
            where=where(at),
            fix=f"one of {', '.join(expected)}",
        )
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "value_error" else f" (given: {first['input']!r})"
    return ConfigError(f"{dotted}: {message}{given}", where=where(at))


def convert_train(
    train: dict[str, Any], where: Callable[[Path_], str] = ".".join
) -> dict[str, Any]:
    """Check keys of the `train` section against `trl.SFTConfig` and convert values by field type.

    Args:
        train: key -> value as read (text for plain scalars).
        where: from a path such as `("train", "optim")` to `file:line` for messages.

    Raises:
        ConfigError: an unknown or reserved key, or a value of the wrong type.
    """
    import dataclasses
    import typing

    from trl import SFTConfig

    fields = {f.name: f for f in dataclasses.fields(SFTConfig) if f.init}
    types = typing.get_type_hints(SFTConfig)
    result: dict[str, Any] = {}
    for key, value in train.items():
        at = ("train", key)
        if key in OWNED_BY_US:
            raise ConfigError(
                f"train.{key} cannot be set here: {OWNED_BY_US[key]}",
                where=where(at),
                fix=f"remove train.{key}",
            )
        if key not in fields:
            hint = nearest(key, fields)
            raise ConfigError(
                f"trl.SFTConfig has no argument {key!r}" + (f"; {hint}" if hint else ""),
                where=where(at),
                why="the train section is handed unchanged to trl.SFTConfig",
                fix="see the SFTConfig page of the TRL documentation for its arguments",
            )
        result[key] = _convert(key, _plain(value), types[key], where(at))
    return result


def _plain(value: Any) -> Any:
    """Nested containers hold free-form data: their plain scalars are read as YAML 1.2 would."""
    if isinstance(value, dict):
        return {k: _scalar(_plain(v)) for k, v in value.items()}
    if isinstance(value, list):
        return [_scalar(_plain(v)) for v in value]
    return value


def _scalar(value: Any) -> Any:
    if not isinstance(value, _Text):
        return value
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(_SPECIAL.get(value, value))
        except ValueError:
            continue
    return str(value)


_SPECIAL = {".inf": "inf", "-.inf": "-inf", ".nan": "nan"}
"""How YAML writes what Python's float reads."""


def _convert(key: str, value: Any, annotation: Any, where: str) -> Any:
    kinds = _members(annotation)
    if not isinstance(value, _Text):
        if value is not None and type(value) not in kinds:
            names = " or ".join(sorted(k.__name__ for k in kinds & _YAML_KINDS))
            raise ConfigError(f"train.{key} must be {names}, not {value!r}", where=where)
        return value
    text = _SPECIAL.get(value, str(value)) if float in kinds else str(value)
    if text in ("true", "false") and bool not in kinds:
        return text == "true"  # fields such as `fsdp: str | None` take a truth value too
    if str in kinds and not kinds & {int, float, bool}:
        return text
    for kind in (bool, int, float):
        if kind in kinds and (kind is not bool or text.lower() not in "01"):
            try:
                return TypeAdapter(kind).validate_python(text)
            except ValidationError:
                continue
    if str in kinds or not kinds & {bool, int, float}:
        return text
    names = " or ".join(sorted(k.__name__ for k in kinds & {bool, int, float}))
    raise ConfigError(f"train.{key} must be {names}, not {text!r}", where=where)


_YAML_KINDS = {bool, int, float, str, list, dict}


def _members(annotation: Any) -> set[type]:
    args = getattr(annotation, "__args__", None)
    origin = getattr(annotation, "__origin__", None)
    if origin in (list, dict, tuple):
        return {origin}
    if args:
        return set().union(*(_members(a) for a in args))
    return {annotation} if isinstance(annotation, type) else set()


def dump_yaml(config: RunConfig) -> str:
    """A configuration as YAML that reads back equal (see `parse_yaml` for how text is kept)."""
    return yaml.dump(
        config.model_dump(mode="json"),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_scalar` would read as a number: YAML 1.1 leaves `2e-5` and `09` plain."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Double quotes also escape the line breaks that other styles would fold into spaces.
    plain = isinstance(_scalar(_Text(text)), str) and not re.search("[\r\x85\u2028\u2029]", text)
    style = None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
