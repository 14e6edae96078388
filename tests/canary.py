"""A canary: what the package relies on and no library promises, looked up in what is installed.

What breaks with a new release is seldom a public function. It is a private name; an argument that
is read from `**kwargs` of a hook, or that a library passes to a method of ours; a class that is
known by its name; an attribute asked for with a default. The day one of those is renamed nothing
is raised. `foreign_names.toml` says where in a library each one is at home.

    python -m tests.canary    # exits with 1 where a name is gone

The nightly run installs the newest releases first. Private names in our source that are not listed
are found, too; of public words the list is kept by hand.

Limits: a word is looked for in the source of one module, whatever it means there; names that live
in C are looked up by import.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LISTED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("foreign_names.toml").read_text(encoding="utf-8")
)
PRIVATE = re.compile(r"_[A-Za-z]\w*[A-Za-z0-9]")
OF_PYTHON = {
    "_asdict", "_exit", "_fields", "_getframe", "_make", "_replace", "_run_exitfuncs",
    "_shutdown",
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# ------------------------------------------------------------------------------------- in libraries


def resolved(name: str) -> Any:
    """What a dotted name stands for.

    Raises:
        AttributeError, ModuleNotFoundError: it is not there.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name) or end == 1:
                raise
            continue
        for part in parts[end:]:
            owner = getattr(owner, part)
        return owner
    raise ModuleNotFoundError(name)


def missing(name: str) -> bool:
    """True for a dotted name that is not there."""
    try:
        resolved(name)
    except (AttributeError, ModuleNotFoundError):
        return True
    return False


@cache
def words(module: str) -> Mapping[str, set[str]]:
    """Names in a module's source: of its `classes`, and all of them, in quotes too."""
    found: dict[str, set[str]] = defaultdict(set)
    every = found["attributes"] = found["arguments"] = set[str]()
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if isinstance(node, ast.ClassDef):
            found["classes"].add(node.name)
        for field in ("id", "attr", "arg", "name", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str) and word.isidentifier():
                every.add(word)
    return found


def parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Parameters by name; None for what takes any, or is a property."""
    if not callable(function):
        return None
    found = inspect.signature(function).parameters
    kinds = {each.kind for each in found.values()}
    return None if inspect.Parameter.VAR_POSITIONAL in kinds else found


def gone(listed: Mapping[str, Any] = LISTED) -> Iterator[str]:
    """A line for each listed name that is not where it is listed."""
    for names in listed["names"].values():
        yield from (f"{name} is gone" for name in names if missing(name))
    for kind in ("attributes", "arguments", "classes"):
        for module, names in listed[kind].items():
            if missing(module):
                yield f"{module} is gone"
                continue
            lacks = [name for name in names if name not in words(module)[kind]]
            yield from (f"{module} has no {name} among its {kind}" for name in lacks)
    for name, order in listed["signatures"].items():
        yield from _moved(name, order)
    for base, names in listed["overrides"].items():
        if missing(base):
            yield f"{base} is gone"
            continue
        for name in names:
            yield from _overridden(resolved(base), f"{base}.{name}", name)


def _moved(name: str, order: list[str]) -> Iterator[str]:
    if missing(name):
        yield f"{name} is gone"
    elif (found := parameters(resolved(name))) is not None:
        there = [*found]
        # A name that is another one at the same place is harmless.
        moved = [n for i, n in enumerate(order) if n in there and there.index(n) != i]
        if moved or len(there) < len(order):
            yield f"{name} takes {', '.join(there) or 'nothing'}"


def _overridden(base: Any, name: str, method: str) -> Iterator[str]:
    """Where a class of ours has a method with other parameters than the base calls it with."""
    if not hasattr(base, method):
        yield f"{name} is gone"
        return
    there = parameters(getattr(base, method))
    for cls in _subclasses(base):
        own = parameters(vars(cls)[method]) if method in vars(cls) else None
        if own is None or there is None:
            continue
        any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in there.values())
        named = [n for n, p in own.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        asked = [n for n in named[1:] if not n.startswith("_")]  # `_` is not read
        if lacks := [n for n in asked if n not in there and not any_name]:
            yield f"{name} takes no {', '.join(lacks)}: {cls.__module__}.{cls.__name__}"
        both = [[*there].index(n) for n in asked if n in there]
        if both != sorted(both):
            yield f"{name} has {', '.join(there)} in this order: {cls.__module__}.{cls.__name__}"


def _subclasses(base: type) -> Iterator[type]:
    """Classes of ours below a class, in whatever is imported."""
    for cls in type.__subclasses__(base):
        if cls.__module__.startswith("finetune."):
            yield cls
        yield from _subclasses(cls)


# ----------------------------------------------------------------------------------- in the package


def import_package() -> None:
    """Import each module that needs no library which is not here."""
    import finetune

    for each in pkgutil.walk_packages(finetune.__path__, "finetune."):
        try:
            importlib.import_module(each.name)
        except ImportError as error:
            if (error.name or "").startswith("finetune"):
                raise


def unlisted(package: Path = ROOT / "finetune", listed: Mapping[str, Any] = LISTED) -> list[str]:
    """Private names that the package uses, does not define and does not list: name, where."""
    used, own = private(package)
    known = OF_PYTHON | {part for each in _texts(listed) for part in each.split(".")}
    return [f"{name}: {where}" for name, where in used.items() if name not in own | known]


def unused(package: Path = ROOT / "finetune", listed: Mapping[str, Any] = LISTED) -> list[str]:
    """Names with a private part that are listed, and that the package does not use."""
    used, own = private(package)
    there = used.keys() | own  # a class of ours may define what a library looks for
    names = [
        name
        for section in listed.values()
        for module, each in section.items()
        for name in (each if module != "ours" else ())  # ends of names
    ]
    parts = {name: [*filter(PRIVATE.fullmatch, name.split("."))] for name in names}
    return [name for name, last in parts.items() if last and last[-1] not in there]


@cache
def private(package: Path) -> tuple[dict[str, str], set[str]]:
    """Private names that files of the package use, with where, and those that they define."""
    used, own = dict[str, str](), set[str]()
    for path in sorted(package.rglob("*.py")):
        file = str(path.relative_to(package.parent))
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        joined = (node.values for node in nodes if isinstance(node, ast.JoinedStr))
        parts = {id(one) for values in joined for one in values}
        for node in nodes:
            own |= set(_defined(node))
            for name in filter(PRIVATE.fullmatch, () if id(node) in parts else _used(node)):
                used.setdefault(name, f"{file}:{getattr(node, 'lineno', 1)}")
    return used, own


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        yield getattr(node, "id", getattr(node, "attr", ""))


def _used(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        if not (node.module or "").startswith("finetune"):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value  # of `getattr`, `vars(x).get`, `patches.replace`


def _texts(listed: Any) -> Iterator[str]:
    """All names in the lists, and what they are listed under."""
    for value in listed.values() if isinstance(listed, Mapping) else listed:
        yield from [value] if isinstance(value, str) else _texts(value)
    yield from listed if isinstance(listed, Mapping) else ()


def main(say: Callable[[str], None] = print) -> int:
    import_package()
    found = [*gone(), *(f"not in foreign_names.toml: {line}" for line in unlisted())]
    found += [f"in foreign_names.toml, and not used: {name}" for name in unused()]
    for line in found or ["every name is there"]:
        say(line)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
