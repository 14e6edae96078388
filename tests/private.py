"""Names of libraries that begin with an underscore, found in the source of the package.

No library promises them to anybody. `private_names.toml` lists them; `test_bounds.py` compares the
two, and looks each name up in what is installed.

    python -m tests.private   # what is installed: exits with 1 where a name is missing
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LISTED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("private_names.toml").read_text(encoding="utf-8")
)
_OF_CLASSES = {"_asdict", "_fields", "_replace"}
"""What `typing.NamedTuple` documents."""


# ------------------------------------------------------------------------------------------- names


def names() -> set[str]:
    """Dotted names with a private part, as files import them: `torch._dynamo.utils.counters`."""
    found: set[str] = set()
    for tree in _sources():
        found.update(_names(tree, {}))
    return {name for name in found if not any(n.startswith(name + ".") for n in found)}


def _sources() -> Iterator[ast.Module]:
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _names(scope: ast.AST, outer: dict[str, str]) -> Iterator[str]:
    """Names used in a scope, where `outer` says what local names are: `config` in two functions."""
    known = dict(outer)
    inner: list[ast.AST] = []
    for node in _of_scope(scope, inner):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
                yield from _if_private(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _if_private(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute):
            yield from _if_private(_dotted(node, known))
    for each in inner:
        yield from _names(each, known)


def _of_scope(scope: ast.AST, inner: list[ast.AST]) -> Iterator[ast.AST]:
    """Nodes of a scope, imports first; functions in it go to `inner`."""
    nodes, waiting = [], [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner.append(node)
            continue
        nodes.append(node)
        waiting += ast.iter_child_nodes(node)
    yield from sorted(nodes, key=lambda node: not isinstance(node, (ast.Import, ast.ImportFrom)))


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return ""
    return ".".join([known[node.id], *reversed(parts)])


def _if_private(name: str) -> Iterator[str]:
    library, *rest = name.split(".")
    if library in LISTED["names"] and any(_is_private(part) for part in rest):
        yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def attributes() -> set[str]:
    """Private attributes of objects that the package reads, and defines nowhere."""
    read, own, of_names = set[str](), set(_OF_CLASSES), set[str]()
    for name in names():
        of_names.update(name.split("."))
    for tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                python = (
                    isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names
                )
                (own if isinstance(node.ctx, ast.Store) or python else read).add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                read |= _asked(node)
    return {name for name in read - own - of_names if _is_private(name)}


def _asked(call: ast.Call) -> set[str]:
    """The name in `getattr(x, "_name", None)`, which says nothing where it is gone."""
    if not isinstance(call.func, ast.Name) or call.func.id not in ("getattr", "hasattr"):
        return set()
    name = call.args[1]
    return {name.value} if isinstance(name, ast.Constant) and isinstance(name.value, str) else set()


def missing(name: str) -> bool:
    """True for a dotted name that is not there."""
    owner, rest = _imported(name)
    for part in rest:
        if not hasattr(owner, part):
            return True
        owner = getattr(owner, part)
    return False


def _imported(name: str) -> tuple[Any, list[str]]:
    """The innermost module of a dotted name, and the rest of the name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:end])), parts[end:]
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(name)


def unread(module: str, attribute: str) -> bool:
    """True for an attribute of objects that the source of a module does not name."""
    found, rest = _imported(module)
    return bool(rest) or not re.search(rf"\b{attribute}\b", inspect.getsource(found))


def all_missing() -> list[str]:
    """Listed names that what is installed does not have."""
    found = [name for listed in LISTED["names"].values() for name in listed if missing(name)]
    for module, listed in LISTED["attributes"].items():
        found += [f"{module}: {each}" for each in listed if unread(module, each)]
    return found


if __name__ == "__main__":
    gone = all_missing()
    print(*(gone or ["every private name is there"]), sep="\n")
    sys.exit(bool(gone))
