"""A canary: what the package uses of libraries and no library promises, looked up in their sources.

What breaks with a new release is seldom a public function. It is a private name; an argument that
is read from `**kwargs` of a hook, or that a library passes to a method of ours; a class that is
known by its name; an attribute asked for with a default. The day one of those is renamed nothing
is raised. This module finds all of them in our source; `foreign_names.toml` says where in a
library each one is at home; `test_canary.py` compares the two. Sources are parsed, never imported:
a name in a comment, a docstring or a decorator (`@deprecate_kwarg("old", new_name="new")`) is not
there.

    python -m tests.canary                   # what is installed: exits with 1 where a name is gone
    python -m tests.canary newest            # wheels of the newest releases, downloaded and read
    python -m tests.canary newest --torch    # torch's too: hundreds of megabytes
    python -m tests.canary newest trl==1.17  # these; a wheel's path will do
    python -m tests.canary --package PATH    # another state of our package

Needs no list, as both sides are read: imports, keywords of functions that an import names, classes
compared with their module, and parameters of methods that override a library's.

Limits: a name is looked for in one module, whatever it means there. Strings are followed through
constants and loops, and dictionaries of arguments into one call, not further; private names are
found in any string. What a function takes that stands in for a library's (`patches.replace`) is
compared only if `signatures` lists it. Names that live in C are looked up where torch is
installed, by import.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LISTED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("foreign_names.toml").read_text(encoding="utf-8")
)
NEWEST = ("transformers", "trl", "peft", "accelerate", "torchao", "datasets")
_OF_CLASSES = {"_asdict", "_fields", "_make", "_replace"}
"""What `typing.NamedTuple` documents."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# ------------------------------------------------------------------------------------------ sources


class Signature(NamedTuple):
    """Parameters of a function: those by position, all named ones, and whether it takes others."""

    positions: tuple[str, ...]
    names: frozenset[str]
    is_open: bool


OPEN = Signature((), frozenset(), True)


class Sources:
    """Sources of libraries by the name of a module: in wheels or folders, or as installed."""

    def __init__(self, places: Iterable[Path] = ()) -> None:
        self._homes: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._versions: dict[str, str] = {}
        self._trees: dict[str, ast.Module | None] = {}
        self._members: dict[str, tuple[dict[str, ast.AST], list[str]]] = {}
        for place in places:
            root = zipfile.Path(place) if place.is_file() else place
            for each in root.iterdir():
                if (each / "__init__.py").is_file():
                    self._homes[each.name] = each
                    self._versions[each.name] = (
                        place.name.split("-")[1] if place.is_file() else "of a folder"
                    )
        self.given = frozenset(self._homes)

    def version(self, library: str) -> str:
        return self._versions.get(library) or importlib.metadata.version(library)

    def _file(self, module: str) -> Any:
        if module not in self._files:
            home, *rest = self._home(_library(module)), *module.split(".")[1:]
            for part in rest[:-1]:
                home = home and home / part
            names = [f"{rest[-1]}.py", f"{rest[-1]}/__init__.py"] if rest else ["__init__.py"]
            files = (home / name for name in names if home)
            self._files[module] = next((file for file in files if file.is_file()), None)
        return self._files[module]

    def _home(self, library: str) -> Any:
        if library not in self._homes:
            spec = importlib.util.find_spec(library)
            found = spec and spec.submodule_search_locations
            self._homes[library] = Path(next(iter(found))) if found else None
        return self._homes[library]

    def has(self, module: str) -> bool:
        return self._file(module) is not None

    def tree(self, module: str, word: str = "") -> ast.Module | None:
        """A module's syntax; None for none of this name, or with a `word` that its text lacks."""
        if module not in self._trees:
            if (file := self._file(module)) is None:
                self._trees[module] = None
            else:
                text = file.read_text(encoding="utf-8")
                if word and file.name != "__init__.py" and word not in text:
                    return None
                self._trees[module] = ast.parse(text)
        return self._trees[module]

    def _table(self, module: str, word: str = "") -> tuple[dict[str, ast.AST], list[str]]:
        """What a module defines or imports at its top, and modules of which it imports all."""
        if module in self._members:
            return self._members[module]
        if (tree := self.tree(module, word)) is None:
            return {}, []
        defined: dict[str, ast.AST] = {}
        all_of: list[str] = []
        for node in _at_top(tree):
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        all_of.append(origin)
                    else:
                        target = ast.Name(f"{origin}.{alias.name}")
                        defined.setdefault(alias.asname or alias.name, target)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.partition(".")[0]
                    defined.setdefault(alias.asname or target, ast.Name(target))
            elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                if not any("overload" in ast.unparse(each) for each in node.decorator_list):
                    defined[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for name in _bound(node):
                    defined.setdefault(name, node)
        return self._members.setdefault(module, (defined, all_of))

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._file(module).name == "__init__.py"
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def find(self, name: str, seen: frozenset[str] = frozenset()) -> tuple[str, ast.AST] | None:
        """The module that defines a dotted name and the node that does; imports are followed."""
        if name in seen:
            return None
        parts, seen = name.split("."), seen | {name}
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if self.has(module):
                if end < len(parts):
                    return self._member(module, parts[end:], seen)
                return module, self.tree(module) or ast.Module([], [])
        return None

    def _member(
        self, module: str, path: list[str], seen: frozenset[str]
    ) -> tuple[str, ast.AST] | None:
        first, rest = path[0], path[1:]
        defined, all_of = self._table(module, first)
        node = defined.get(first)
        if node is None:
            tries = (self.find(".".join([each, *path]), seen) for each in all_of)
            return next((found for found in tries if found), None)
        if isinstance(node, ast.Name):
            return self.find(".".join([node.id, *rest]), seen)
        if not rest:
            return module, node
        if isinstance(node, ast.ClassDef):
            return self.method(module, node, rest[0])
        value = getattr(node, "value", None)  # `NAME = Class()`, `name = other`
        value = value.func if isinstance(value, ast.Call) else value
        if isinstance(value, (ast.Name, ast.Attribute)):
            return self._member(module, [*ast.unparse(value).split("."), *rest], seen)
        return None

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef] | None]:
        """A class and those it inherits from, depth first; None for one that is not found."""
        yield module, node
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._member(module, ast.unparse(base).split("."), frozenset())
            if found and isinstance(found[1], ast.ClassDef):
                yield from self.bases(found[0], found[1])
            elif ast.unparse(base) not in ("object", "ABC", "Generic", "Protocol", "str", "Enum"):
                yield None

    def method(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        for found in self.bases(module, node):
            for each in found[1].body if found else ():
                if name in _bound(each):
                    return found[0], each  # type: ignore[index]
        return None

    def signature(self, name: str) -> Signature | None:
        """Parameters of a function or class; `OPEN` for what cannot be told."""
        if (found := self.find(name)) is None:
            return None
        module, node = found
        if isinstance(node, ast.ClassDef):
            return self._of_class(module, node)
        return _signature(node)

    def _of_class(self, module: str, node: ast.ClassDef) -> Signature:
        for found in self.bases(module, node):
            if found is None:
                return OPEN
            cls = found[1]
            for each in cls.body:
                if isinstance(each, _FUNCTIONS) and each.name == "__init__":
                    made = _signature(each)
                    return Signature(made.positions[1:], made.names, made.is_open)
            said = [*cls.decorator_list, *cls.bases]
            if any(re.search("dataclass|NamedTuple|strict", ast.unparse(each)) for each in said):
                return self._of_fields(*found)
        return OPEN

    def _of_fields(self, module: str, node: ast.ClassDef) -> Signature:
        every = [*self.bases(module, node)]
        fields = [_bound(n) for found in reversed(every) if found for n in found[1].body
                  if isinstance(n, ast.AnnAssign)]  # fmt: skip
        names = tuple(dict.fromkeys(name for each in fields for name in each))
        return Signature(names, frozenset(names), None in every)

    @cache  # noqa: B019 (one for a run)
    def words(self, module: str) -> dict[str, set[str]]:
        """Names in a module, by what they are there: of classes, arguments, attributes."""
        found: dict[str, set[str]] = defaultdict(set)
        if (tree := self.tree(module)) is None:
            return found
        found["attributes"] |= {*self._table(module)[0]}
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            left_out = getattr(node, "decorator_list", ())
            waiting += (each for each in ast.iter_child_nodes(node) if each not in left_out)
            by_name = _asked_by_name(node)
            found["attributes"] |= by_name
            found["arguments"] |= by_name
            if isinstance(node, ast.ClassDef):
                found["classes"].add(node.name)
                found["attributes"].update(*map(_bound, node.body))
            elif isinstance(node, _FUNCTIONS):
                found["attributes"].add(node.name)
            elif isinstance(node, (ast.arg, ast.keyword)):
                found["arguments"].add(node.arg or "")
            elif isinstance(node, ast.Attribute):
                found["attributes"].add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found["arguments"].add(node.target.id)
        return found

    @cache  # noqa: B019
    def functions(self, module: str) -> dict[str, list[Signature]]:
        """Functions and methods of a module by name."""
        found: dict[str, list[Signature]] = defaultdict(list)
        for node in ast.walk(self.tree(module) or ast.Module([], [])):
            if isinstance(node, _FUNCTIONS):
                found[node.name].append(_signature(node))
        return found


def _at_top(node: ast.AST) -> Iterator[ast.AST]:
    for each in ast.iter_child_nodes(node):
        yield each
        if isinstance(each, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _at_top(each)


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}


def _asked_by_name(node: ast.AST) -> set[str]:
    """Strings in `x["n"]`, `"n" in x`, `x.get("n")`, `getattr(x, "n")`, `{"n": 1}`."""
    asked: list[ast.AST | None] = []
    if isinstance(node, ast.Subscript):
        asked = [node.slice]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        asked = [node.left]
    elif isinstance(node, ast.Dict):
        asked = [*node.keys]
    elif isinstance(node, ast.Call):
        name = _last(node.func)
        asked = [*node.args[:1]] if name in ("get", "pop", "setdefault") else []
        asked = [*node.args[1:2]] if name in ("getattr", "setattr", "hasattr") else asked
    return {n.value for n in asked if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _signature(node: ast.AST) -> Signature:
    if not isinstance(node, _FUNCTIONS):
        return OPEN
    each = node.args
    positions = tuple(a.arg for a in (*each.posonlyargs, *each.args))
    if any(ast.unparse(d) == "classmethod" for d in node.decorator_list):
        positions = positions[1:]
    names = frozenset((*positions, *(a.arg for a in each.kwonlyargs)))
    return Signature(positions, names, bool(each.kwarg))


# ------------------------------------------------------------------------------ uses in our package


class Uses:
    """What a package uses of libraries, by kind and name, and where: `precision/scaling.py:12`.

    Kinds are the sections of `foreign_names.toml`, and `imports`, which are not listed.
    """

    def __init__(self, package: Path, listed: dict[str, Any] = LISTED) -> None:
        self.libraries, self.elsewhere = frozenset(listed["names"]), _listed(listed, "elsewhere")
        stub = package / "__init__.pyi"  # users call what it names
        named = re.findall(r" as (\w+)", stub.read_text("utf-8")) if stub.exists() else ()
        self.public = frozenset(named)
        self.found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.keywords: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """Of functions by dotted name, and of methods by `.name`."""
        self.constants: dict[str, set[str]] = {}
        self.defined, self.called = set[str](), set[str]()
        self.own = set(_OF_CLASSES)
        """Private attributes that the package defines; public ones are mostly a library's too."""
        self.classes: dict[str, tuple[str, ast.ClassDef, dict[str, str]]] = {}
        self.handed: dict[str, set[int]] = defaultdict(set)
        """Positions at which functions of ours are given foreign arguments as a dictionary."""
        scopes: list[_Scope] = []
        for path in sorted(package.rglob("*.py")):
            text, file = path.read_text(encoding="utf-8"), str(path.relative_to(package.parent))
            nodes = _nodes(ast.parse(text))
            scopes.append(
                _Scope(self, file, nodes, says="__name__" in text or "__module__" in text)
            )
            self._define(nodes)
        for _ in range(2):  # the second time it is known what functions of ours are handed
            self.found.clear()
            self.keywords.clear()
            for each in scopes:
                each.read()
        for each in scopes:
            self._called_from_outside(each)
        names = self.found["names"]
        for name in [n for n in names if any(each.startswith(n + ".") for each in names)]:
            del names[name]
        own = self.own | self.defined | {part for name in names for part in name.split(".")}
        ours = {"attributes": {n for n in own if _is_private(n)}, "classes": self.defined}
        for kind in ("attributes", "arguments", "classes"):
            for name in [*self.found[kind]]:
                if name in ours.get(kind, ()) or not _is_word(name):
                    del self.found[kind][name]

    def _define(self, nodes: _Nodes) -> None:
        for node in nodes.told:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                self.own |= _bound(node)
                if isinstance(nodes.scope, ast.Module):
                    texts = _texts(node.value, self.constants)
                    self.constants |= dict.fromkeys(_bound(node), texts)
            elif isinstance(node, ast.ClassDef):
                self.defined.add(node.name)
                self.own.update(*map(_bound, node.body))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.own |= {node.attr} if _last(node.value) in ("self", "cls") else set()
            elif isinstance(node, ast.Call):
                self.called.add(_last(node.func))
        for each in nodes.inner:
            self.defined.add(each.scope.name)  # type: ignore[attr-defined]
            self._define(each)

    def _called_from_outside(self, file: _Scope) -> None:
        """Add parameters of functions that take any others, and that the package never calls."""
        inside = [
            n for node in file.nodes.told if isinstance(node, ast.ClassDef) for n in node.body
        ]
        asked = self.called | self.elsewhere | self.public
        for node in (each.scope for each in file.nodes.inner):
            made = _signature(node)
            if made.is_open and node not in inside and node.name not in asked:  # type: ignore
                file.add("arguments", made.names, node)

    def lineage(self, name: str) -> tuple[list[str], list[str]]:
        """Classes of the package that one consists of, and dotted names of their foreign bases."""
        _, node, known = self.classes[name]
        ours, foreign = [name], list[str]()
        for base in (n.value if isinstance(n, ast.Subscript) else n for n in node.bases):
            if (last := _last(base)) in self.classes and last != name:
                both = self.lineage(last)
                ours, foreign = ours + both[0], foreign + both[1]
            elif full := _full(base, known):
                foreign.append(full)
        return ours, foreign


class _Scope:
    """A file or function, where names stand for imports, strings, or foreign arguments."""

    def __init__(
        self, uses: Uses, file: str, nodes: _Nodes, outer: _Scope | None = None, says: bool = True
    ) -> None:
        self.uses, self.file, self.nodes = uses, file, nodes
        self.says = outer.says if outer else says
        self.known: dict[str, str] = dict(outer.known) if outer else {}
        self.texts: dict[str, set[str]] = dict(outer.texts) if outer else {}
        self.given: set[str] = set(outer.given) if outer else set()
        self.kinds: set[str] = set()  # names of classes
        self.local: set[str] = set()

    def add(self, kind: str, names: Iterable[str], node: ast.AST) -> None:
        for name in names:
            self.uses.found[kind][name].append(f"{self.file}:{node.lineno}")  # type: ignore

    def read(self) -> None:
        if isinstance(self.nodes.scope, _FUNCTIONS):
            self._parameters(self.nodes.scope)
        for node in self.nodes.told:
            self._bind(node)
        for node in self.nodes.told:
            self._use(node)
        for each in self.nodes.inner:
            _Scope(self.uses, self.file, each, self).read()

    def _parameters(self, scope: Any) -> None:
        each = scope.args
        names = [a.arg for a in (*each.posonlyargs, *each.args)]
        for name in names:
            self.texts.pop(name, None)
        self.given |= {n for n in (*names, each.kwarg and each.kwarg.arg) if n == "kwargs"}
        names = names[names[:1] in (["self"], ["cls"]) :]
        self.given |= {names[i] for i in self.uses.handed[scope.name] if i < len(names)}

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                self.known[alias.asname or first] = alias.name if alias.asname else first
                self._dotted(alias.name, node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self._dotted(f"{node.module}.{alias.name}", node)
                if node.module.startswith("finetune") and alias.name in self.uses.constants:
                    self.texts[alias.asname or alias.name] = self.uses.constants[alias.name]
        elif isinstance(node, (ast.For, ast.comprehension)):
            target, items = node.target, node.iter
            if isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
                if isinstance(items, ast.Call) and ast.unparse(items).endswith(".items()"):
                    self._text(target.elts[0].id, items.func.value)  # type: ignore[attr-defined]
            elif isinstance(target, ast.Name):
                self._text(target.id, items)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value:
            for name in _bound(node):
                self._text(name, node.value)
                if isinstance(node.value, ast.Attribute) and _is_given(node.value):
                    self.given.add(name)
            if self.says and _says_name(node.value):
                self.kinds |= _bound(node)

    def _text(self, name: str, value: ast.expr) -> None:
        before = self.texts.get(name, set()) if name in self.local else set()
        self.texts[name] = before | _texts(value, self.texts)
        self.local.add(name)

    def _dotted(self, name: str, node: ast.AST) -> None:
        library, *rest = name.split(".")
        if library not in self.uses.libraries:
            return
        self.add("names" if any(map(_is_private, rest)) else "imports", [name], node)

    def _use(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            full = _full(node, self.known)
            if any(map(_is_private, full.split("."))):
                self._dotted(full, node)
            elif _is_private(node.attr) and _library(full) not in sys.stdlib_module_names:
                self.add("attributes", [node.attr], node)
        elif isinstance(node, ast.Constant):
            self.add("attributes", [node.value], node)  # `patches.replace(Trainer, "_save", ...)`
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Subscript) and self._is_dict(node.value):
            self.add("arguments", _texts(node.slice, self.texts), node)
        elif self.says and isinstance(node, ast.Subscript) and _says_name(node.slice):
            self._kinds(_texts(node.value, self.texts), node)
        elif isinstance(node, ast.Compare):
            self._compare(node)
        elif isinstance(node, ast.ClassDef):
            self.uses.classes[node.name] = self.file, node, self.known
            if any(_library(_full(base, self.known)) in NEWEST for base in node.bases):
                for each in node.body:  # `_skip_keys_device_placement = ["past_key_values"]`
                    if isinstance(getattr(each, "value", None), (ast.List, ast.Tuple, ast.Set)):
                        names = _texts(each.value, self.texts) - self.uses.defined  # type: ignore
                        self.add("arguments", names, each)

    def _is_dict(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.given
        return isinstance(node, ast.Attribute) and _is_given(node)

    def _compare(self, node: ast.Compare) -> None:
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            if self._is_dict(right):
                self.add("arguments", _texts(left, self.texts), node)
                return
            if isinstance(left, ast.Constant) and not isinstance(right, ast.Name):
                return  # part of a name
        for one, other in ((left, right), (right, left)):
            if (self.says and _says_name(one)) or (
                isinstance(one, ast.Name) and one.id in self.kinds
            ):
                self._kinds(_texts(other, self.texts), node)

    def _kinds(self, names: set[str], node: ast.AST) -> None:
        for name in names:
            if "." in name:
                self._dotted(name, node)
            else:
                self.add("classes", [name], node)

    def _call(self, node: ast.Call) -> None:
        func, args = node.func, node.args
        if isinstance(func, ast.Name) and func.id in ("getattr", "hasattr") and len(args) > 1:
            names = _texts(args[1], self.texts)
            asks = func.id == "hasattr" or len(args) > 2 or bool(node.keywords)
            of_python = isinstance(args[0], ast.Name) and args[0].id in sys.stdlib_module_names
            if module := _full(args[0], self.known):
                for name in names if asks else ():
                    self._dotted(f"{module}.{name}", node)
            elif not of_python:
                self.add("attributes", (n for n in names if asks or _is_private(n)), node)
        elif isinstance(func, ast.Attribute) and func.attr in ("get", "pop", "setdefault") and args:
            if isinstance(func.value, ast.Call) and _last(func.value.func) == "vars":
                self.add("attributes", _texts(args[0], self.texts), node)
            elif self._is_dict(func.value):
                self.add("arguments", _texts(args[0], self.texts), node)
        if isinstance(func, (ast.Name, ast.Attribute)):
            name = _last(func)
            for i, each in enumerate(args):
                if isinstance(each, ast.Name) and each.id in self.given:
                    self.uses.handed[name].add(i)
        full = _full(func, self.known)
        where = f"{self.file}:{node.lineno}"
        if _library(full) in self.uses.libraries:
            for each in node.keywords:
                if each.arg:
                    self.uses.keywords[full][each.arg].append(where)
            if len(args) > 1 and _library(full) in NEWEST:
                self.add("signatures", [full], node)
        elif not full and isinstance(func, ast.Attribute) and func.attr not in self.uses.defined:
            for each in node.keywords:
                if each.arg:
                    self.uses.keywords[f".{func.attr}"][each.arg].append(where)


class _Nodes(NamedTuple):
    """Nodes of a file or function that say something, outer ones first, and functions in it."""

    scope: ast.AST
    told: list[ast.AST]
    inner: list[_Nodes]


_TELL = (
    *(ast.Import, ast.ImportFrom, ast.For, ast.comprehension, ast.Assign, ast.AnnAssign),
    *(ast.NamedExpr, ast.Attribute, ast.Call, ast.Subscript, ast.Compare, ast.ClassDef),
)


_PRIVATE = re.compile(r"_[a-zA-Z]\w*[a-zA-Z0-9]")


def _nodes(scope: ast.AST) -> _Nodes:
    found = _Nodes(scope, [], [])
    waiting = [scope]
    for node in waiting:
        for field in node._fields:
            value = getattr(node, field, None)
            for each in value if isinstance(value, list) else (value,):
                if isinstance(node, ast.JoinedStr) and isinstance(each, ast.Constant):
                    continue  # part of a name
                if isinstance(each, _FUNCTIONS):
                    found.inner.append(_nodes(each))
                elif isinstance(each, ast.AST) and not isinstance(each, ast.expr_context):
                    waiting.append(each)
        private = isinstance(node, ast.Constant) and _PRIVATE.fullmatch(str(node.value))
        if private or isinstance(node, _TELL):
            found.told.append(node)
    return found


def _library(name: str) -> str:
    return name.partition(".")[0]


def _last(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _full(node: ast.expr, known: dict[str, str]) -> str:
    """The dotted name of an expression that begins with an import, or nothing."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return ""
    return ".".join([known[node.id], *reversed(parts)])


def _is_word(name: str) -> bool:
    return name.isidentifier() and not name.startswith("__") and name != "self"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_given(node: ast.Attribute) -> bool:
    """True for `node.kwargs`, `signature.bind(...).arguments`, `signature(f).parameters`."""
    return node.attr in ("kwargs", "arguments", "parameters")


def _says_name(node: ast.AST) -> bool:
    """True for an expression with `type(x).__name__` in it, or a module's."""
    return any(
        getattr(n, "attr", getattr(n, "value", None)) in ("__name__", "__module__")
        for n in ast.walk(node)
        if isinstance(n, (ast.Attribute, ast.Constant))
    )


def _texts(node: ast.AST | None, known: dict[str, set[str]]) -> set[str]:
    """Strings that an expression stands for, or has as items or keys."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.Name):
        return known.get(node.id, set())
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return set().union(*(_texts(each, known) for each in node.elts))
    if isinstance(node, ast.Dict):
        return set().union(*(_texts(each, known) for each in node.keys))
    if isinstance(node, ast.Starred):
        return _texts(node.value, known)
    if isinstance(node, ast.BinOp):
        return _texts(node.left, known) | _texts(node.right, known)
    makes = isinstance(node, ast.Call) and len(node.args) == 1 and ast.unparse(node.func)
    if makes in ("frozenset", "set", "tuple", "list", "sorted"):
        return _texts(node.args[0], known)  # type: ignore[union-attr]
    return set()


# ------------------------------------------------------------------------------------------ look-up


class Canary:
    """Compares what a package uses with sources of libraries.

    Attributes:
        gone: a line for each name that is not where it is listed, or that a signature lacks.
        unlisted: a line for each name that `foreign_names.toml` does not know.
    """

    def __init__(self, uses: Uses, sources: Sources, listed: dict[str, Any] = LISTED) -> None:
        self.uses, self.sources, self.listed = uses, sources, listed
        self.gone: list[str] = []
        self.unlisted: list[str] = []
        self.needed = {kind: dict(names) for kind, names in uses.found.items()}
        self._functions()
        self._methods()
        self._overrides()
        self._signatures()
        self._names()
        self._words()

    def _looks(self, name: str) -> bool:
        """True for a name of a library that is to be looked at: a given one, or if none is, all."""
        library = _library(name)
        given = self.sources.given or self.listed["names"]
        return library in given and self.sources.has(library)

    def _lost(self, name: str, what: str, where: Iterable[str]) -> None:
        version = self.sources.version(_library(name))
        self.gone.append(f"{_library(name)} {version}: {what}: {_places(where)}")

    def _takes(self, name: str, made: Signature, argument: str, where: list[str]) -> None:
        """Note an argument of a function: it has it, hands it on unseen, or has it no more."""
        if argument not in made.names:
            if not made.is_open:
                self._lost(name, f"{name} takes no {argument}", where)
            else:
                self.needed.setdefault("arguments", {}).setdefault(argument, []).extend(where)

    def _functions(self) -> None:
        for name, arguments in self.uses.keywords.items():
            if _library(name) in NEWEST and self._looks(name):
                made = self.sources.signature(name)
                if made and made.names:
                    for argument, where in arguments.items():
                        self._takes(name, made, argument, where)

    def _methods(self) -> None:
        for module, names in self.listed["methods"].items():
            for name in names if self._looks(module) else ():
                made = self.sources.functions(module).get(name, [])
                for argument, where in self.uses.keywords[f".{name}"].items():
                    both = Signature(
                        (),
                        frozenset().union(*(m.names for m in made)),
                        any(m.is_open for m in made),
                    )
                    self._takes(f"{module}: {name}", both, argument, where)
        known = {f".{n}" for kind in ("methods", "elsewhere") for n in _listed(self.listed, kind)}
        for name in {n for n in self.uses.keywords if n.startswith(".")} - known:
            where = [each for places in self.uses.keywords[name].values() for each in places]
            self.unlisted.append(f"methods: {name[1:]}: {_places(where)}")

    def _overrides(self) -> None:
        for name in self.uses.classes:
            ours, foreign = self.uses.lineage(name)
            for base in (each for each in foreign if self._looks(each)):
                private = any(map(_is_private, base.split(".")))
                found = self.sources.find(base) if private or _library(base) in NEWEST else None
                if found and isinstance(found[1], ast.ClassDef):
                    for each in ours:
                        file, node, _ = self.uses.classes[each]
                        for method in (n for n in node.body if isinstance(n, _FUNCTIONS)):
                            self._override(base, *found, method, f"{file}:{method.lineno}")

    def _override(self, base: str, module: str, cls: ast.ClassDef, ours: Any, where: str) -> None:
        if ours.name.startswith("__"):
            return
        found, name = self.sources.method(module, cls, ours.name), f"{base}.{ours.name}"
        if found is None:
            if ours.name in self.listed["overrides"].get(base, ()):
                self._lost(base, f"{base} has no {ours.name}", [where])
            return
        self.needed.setdefault("overrides", {}).setdefault(name, []).append(where)
        made, own = _signature(found[1]), _signature(ours)
        for argument in sorted(own.names - {*own.positions[:1]}):
            if not argument.startswith("_"):
                self._takes(name, made, argument, [where])
        order = [made.positions.index(each) for each in own.positions if each in made.positions]
        if order != [*range(len(order))]:
            self._lost(base, f"{name} has {', '.join(made.positions)} in this order", [where])

    def _signatures(self) -> None:
        for name, listed in self.listed["signatures"].items():
            if not self._looks(name):
                continue
            made = self.sources.signature(name) or Signature((), frozenset(), False)
            # A name that is another one at the same place is harmless.
            moved = [
                n
                for i, n in enumerate(listed)
                if n in made.positions and made.positions.index(n) != i
            ]
            if moved or len(made.positions) < len(listed):
                where = self.uses.found["signatures"].get(name, ["foreign_names.toml"])
                self._lost(name, f"{name} takes {', '.join(made.positions) or 'nothing'}", where)
        for name in self.uses.found["signatures"]:
            if (made := self.sources.signature(name)) is None or len(made.positions) < 2:
                self.needed["signatures"].pop(name)

    def _names(self) -> None:
        used = {name: self._used(name) for name in _listed(self.listed, "names")}
        used |= self.uses.found["names"]
        if self.sources.given:  # else imports are checked by whatever test imports us
            used |= self.uses.found["imports"]
        for name, where in used.items():
            is_there = not where or not self._looks(name) or self.sources.find(name)
            if not is_there and not self._is_in_c(name):
                self._lost(name, f"{name} is gone", where)

    def _is_in_c(self, name: str) -> bool:
        """True for a name that a library has, and that no source of it in Python defines."""
        if _library(name) in NEWEST:
            return False
        return not (Sources().find(name) if self.sources.given else missing(name))

    def _used(self, name: str) -> list[str]:
        """Where a listed name is used, if only as an attribute: `torch.Tensor._base`."""
        return self.uses.found["attributes"].get(name.rpartition(".")[2], [])

    def _words(self) -> None:
        for kind in ("attributes", "arguments", "classes"):
            for module, names in self.listed[kind].items():
                for name in names if self._looks(module) else ():
                    where = self.needed.get(kind, {}).get(name, [])
                    if _is_private(name):  # also those that we define for a library to read
                        where = where or ["foreign_names.toml"]
                    if where and name not in self.sources.words(module)[kind]:
                        self._lost(module, f"{module} has no {name} among {kind}", where)
        for kind in ("names", "attributes", "arguments", "classes", "signatures", "overrides"):
            known = _listed(self.listed, kind) | _listed(self.listed, "elsewhere")
            if kind == "attributes":
                known |= {name.rpartition(".")[2] for name in _listed(self.listed, "names")}
            for name in sorted({*self.needed.get(kind, {})} - known):
                self.unlisted.append(f"{kind}: {name}: {_places(self.needed[kind][name])}")


def look(
    package: Path = ROOT / "finetune",
    sources: Sources | None = None,
    listed: dict[str, Any] = LISTED,
) -> Canary:
    """Compare a package with sources of libraries, those installed by default."""
    gc.disable()  # of millions of nodes none can go: twice as fast
    try:
        return Canary(Uses(package, listed), sources or Sources(), listed)
    finally:
        gc.enable()


def _listed(listed: dict[str, Any], kind: str) -> set[str]:
    """All names of a section."""
    if kind == "signatures":
        return {*listed[kind]}
    if kind == "overrides":
        return {f"{base}.{name}" for base, names in listed[kind].items() for name in names}
    return {name for names in listed[kind].values() for name in names}


def _places(where: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(where))


def missing(name: str) -> bool:
    """True for a dotted name that is not there in what is installed, which is imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[end:]:
            if not hasattr(owner, part):
                return True
            owner = getattr(owner, part)
        return False
    return True


# ----------------------------------------------------------------------------------------- commands


def wheels(folder: Path, wanted: Iterable[str]) -> list[Path]:
    """Wheels of releases, downloaded to a folder; a path stands for itself."""
    wanted = [*wanted]
    paths = [Path(each) for each in wanted if each.endswith(".whl")]
    if asked := [each for each in wanted if not each.endswith(".whl")]:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--disable-pip-version-check", "-d", str(folder), *asked], check=True)
    return [*paths, *sorted(folder.glob("*.whl"))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.canary")
    parser.add_argument("what", nargs="*", help="newest [RELEASE...]")
    parser.add_argument("--torch", action="store_true", help="newest: torch too")
    parser.add_argument("--package", type=Path, default=ROOT / "finetune")
    asked = parser.parse_args()
    what, *releases = asked.what or ["installed"]
    if what not in ("installed", "newest"):
        parser.error(f"newest, not {what}")
    releases = [*(releases or NEWEST), *(["torch"] if asked.torch else [])]
    with tempfile.TemporaryDirectory() as folder:
        sources = Sources(wheels(Path(folder), releases) if what == "newest" else ())
        canary = look(asked.package.resolve(), sources)
    for library in sorted(sources.given & {*LISTED["names"]}):
        print(f"read: {library} {sources.version(library)}")
    said = [*canary.gone, *(f"not in foreign_names.toml: {line}" for line in canary.unlisted)]
    print(*(said or ["every name is there"]), sep="\n")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
