"""YAML without the two habits of YAML 1.1 that cost people runs: `2e-5` as text, `no` as false.

Every plain scalar is read as `PlainText`, and becomes a number or a truth value only by the type of
the field it is for. Each value remembers its line, so that an error can point at it. What is
written (`dump_yaml`) reads back equal.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import ConfigError

KeyPath = tuple[str, ...]

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where it was built


class _PlainLoader(_Base):
    """YAML in which every plain scalar is text, except null."""


_PlainLoader.yaml_implicit_resolvers = {}
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)


class PlainText(str):
    """A plain (unquoted) scalar, whose type the field decides. Quoted text stays a `str`."""


MOST_BYTES, MOST_VALUES, DEEPEST = 1 << 20, 20_000, 50
"""Of a file: a recipe is a page, rows or weights are none, and aliases grow without end."""


def _build(node: Any, at: KeyPath, lines: dict[KeyPath, int], file: str) -> Any:
    lines[at] = node.start_mark.line + 1
    if len(lines) > MOST_VALUES or len(at) > DEEPEST:
        raise ConfigError(
            f"this YAML has more than {MOST_VALUES:,} values, or more than {DEEPEST} levels",
            where=f"{file}:{lines[at]}",
            why="aliases that contain aliases, or themselves, multiply without end",
            fix="write the values out instead of the aliases, and close the brackets",
        )
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    "a key is a list or a mapping",
                    where=f"{file}:{key_node.start_mark.line + 1}",
                    fix="write it as key: value, without `?` and brackets",
                )
            key = str(key_node.value)
            # `{mlp:fp8}` is one word without a value.
            word, colon, rest = key.partition(":")
            missing = isinstance(value_node, yaml.ScalarNode) and not value_node.value
            if node.flow_style and colon and missing and not (key_node.style or value_node.style):
                raise ConfigError(
                    f"{key!r} is a key without a value",
                    where=f"{file}:{key_node.start_mark.line + 1}",
                    why="in brackets, too, a colon ends a key only before a space",
                    fix=f"write {word}: {rest}",
                )
            if key in result:
                raise ConfigError(
                    f"{'.'.join((*at, key))} is given twice",
                    where=f"{file}:{key_node.start_mark.line + 1}",
                    why="only one of the two values would be used",
                    fix="remove one of them",
                )
            result[key] = _build(value_node, (*at, key), lines, file)
            lines[(*at, key)] = key_node.start_mark.line + 1
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*at, str(i)), lines, file) for i, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:null":
        return None
    return str(node.value) if node.style else PlainText(node.value)


def read_text(source: Path) -> str:
    """The text of a recipe or another file of ours; a `ConfigError` names file and line."""
    try:
        with source.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{source.name} cannot be read: {error.strerror}",
            where=shown(source),
            fix="give a text file that you may read; `python -m finetune ls` lists the recipes",
        ) from None
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{source.name} is larger than {MOST_BYTES >> 20} MiB, so it is no recipe",
            where=shown(source),
            fix="give the YAML file of a recipe; rows belong in a file of their own (data.path)",
        )
    if b"\0" in content:
        raise ConfigError(
            "the file is not UTF-8 text, but most likely UTF-16",
            where=f"{shown(source)}:1",
            fix=f"iconv -f UTF-16 -t UTF-8 {shlex.quote(str(source))} > utf8.yaml",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            "the file is not UTF-8 text", where=f"{shown(source)}:{line}", fix="save it as UTF-8"
        ) from None


def parse_yaml(text: str, file: str) -> tuple[Any, dict[KeyPath, int]]:
    """Plain data of a YAML text, and the line (from 1) of every value in it.

    Raises:
        ConfigError: malformed YAML, or a key given twice; with file and line.
    """
    lines: dict[KeyPath, int] = {}
    try:
        node = _PlainLoader(text).get_single_node()
    except (yaml.YAMLError, RecursionError) as error:  # libyaml has a limit, Python's has none
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"this is not valid YAML: {problem}",
            where=f"{file}{line}",
            fix="check indentation, colons and brackets on that line and the one above",
        ) from None
    return ({} if node is None else _build(node, (), lines, file)), lines


def shown(path: Path) -> str:
    """A path as a person would type it: relative to this folder if it lies below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def plain_data(value: Any) -> Any:
    """Free-form data, whose plain scalars inside containers are read as YAML 1.2 would."""
    if isinstance(value, dict):
        return {k: scalar(plain_data(v)) for k, v in value.items()}
    if isinstance(value, list):
        return [scalar(plain_data(v)) for v in value]
    return value


def scalar(value: Any) -> Any:
    if not isinstance(value, PlainText):
        return value
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(SPECIAL_FLOATS.get(value, value))
        except ValueError:
            continue
    return str(value)


SPECIAL_FLOATS = {".inf": "inf", "-.inf": "-inf", ".nan": "nan"}
"""Special floats: as YAML writes them -> as Python's float reads them."""


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that reads back equal (see `parse_yaml` for how text is kept)."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def with_values(text: str, data: dict[str, Any]) -> str:
    """The text of a recipe with the values of `data`: lines and comments of all others stay.

    Only lines of settings that differ are rewritten, new ones below the last of their section, new
    sections at the end.
    A file that is not of such lines (`train: {max_steps: 1}`) is written whole, without comments.
    """
    old, lines = parse_yaml(text, "")
    instead: dict[int, str] = {}  # line, from 1 -> what stands there now
    rows = [f"{row}\n" for row in text.splitlines()]
    for section, values in data.items():
        own = [line for path, line in lines.items() if path[0:1] == (section,)]
        before = old.get(section) or {}
        if own and values and not before:
            instead[min(own)] = f"{section}:\n"  # it was `precision: {}`
        for key in {**before, **(values or {})} if own else ():
            if (new := (values or {}).get(key, ...)) == before.get(key, ...):
                continue
            entry = dump_yaml(plain_data({"": {key: new}})[""]) if new is not ... else ""
            entry = "".join(f"  {row}\n" for row in entry.splitlines())
            if at := [line for path, line in lines.items() if path[:2] == (section, key)]:
                instead |= dict.fromkeys(range(min(at), max(at) + 1), "") | {min(at): entry}
            else:
                instead[max(own)] = instead.get(max(own), rows[max(own) - 1]) + entry
    new = {section: values for section, values in data.items() if values and section not in old}
    edited = "".join(instead.get(number, row) for number, row in enumerate(rows, 1))
    edited += dump_yaml(plain_data({"": new})[""]) if new else ""
    wanted = plain_data({"": data})
    with contextlib.suppress(ConfigError):
        if plain_data({"": parse_yaml(edited, "")[0]}) == wanted:
            return edited
    return dump_yaml(wanted[""])


class _Dumper(yaml.SafeDumper):
    """Quotes text that `scalar` would read as a number: YAML 1.1 leaves `2e-5` and `09` plain."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Double quotes also escape the line breaks that other styles would fold into spaces.
    plain = isinstance(scalar(PlainText(text)), str) and not re.search("[\r\x85\u2028\u2029]", text)
    style = None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
