"""A copy of TRL in which every private name has another one, as a next release might.

    python -m tests.renamed_trl FOLDER     then PYTHONPATH=FOLDER python script.py

Renamed are names with a leading underscore that TRL defines: functions, classes, methods, constants
and attributes. Those that the libraries below it have as well stay: a method of `Trainer` that TRL
overrides is Transformers' name. The copy says that it is version 1.17.0.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

VERSION = "1.17.0"
PRIVATE = re.compile(
    r"""(?<![\w."'/-])_[a-zA-Z]\w*|(?<=[\w\])]\.)_[a-zA-Z]\w*|(?<=["'])_[a-zA-Z]\w*(?=["'])"""
)
"""A private name by itself, behind an object, or alone in a string; not in the path of a file."""
BELOW = {
    "transformers": ("*.py", "data/*.py", "generation/*.py", "integrations/*.py", "utils/*.py"),
    "accelerate": ("**/*.py",),
    "peft": ("*.py", "utils/*.py", "tuners/tuners_utils.py"),
    "datasets": ("**/*.py",),
}
"""What TRL's classes inherit from and are called by."""
ALSO = {"_tokenizer"}
"""Of trainers; tokenizers have an attribute of this name, which TRL does not ask for."""


def home(library: str) -> Path:
    """Folder of an installed library, which is not imported."""
    spec = importlib.util.find_spec(library)
    assert spec is not None, library
    assert spec.submodule_search_locations is not None, library
    return Path(spec.submodule_search_locations[0])


def defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a module gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def of_others() -> set[str]:
    """Private words of the libraries that TRL stands on."""
    found: set[str] = set()
    for library, patterns in BELOW.items():
        for file in (file for pattern in patterns for file in home(library).glob(pattern)):
            found.update(re.findall(r"\b_[a-zA-Z]\w*", file.read_text("utf-8")))
    return found


def rename(folder: Path) -> list[str]:
    """Copy TRL to `folder` with other private names; return those that it had."""
    source, target = home("trl"), folder / "trl"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    files = list(target.rglob("*.py"))
    own = {name for file in files for name in defined(ast.parse(file.read_text("utf-8")))}
    modules = {file.stem for file in files}
    names = (
        {name for name in own if re.fullmatch(r"_[a-zA-Z]\w*", name)}
        - (of_others() - ALSO)
        - modules
    )
    for file in files:
        text = file.read_text("utf-8")
        new = PRIVATE.sub(lambda m: m[0] + "_renamed" if m[0] in names else m[0], text)
        file.write_text(new, "utf-8")
    about = folder / f"trl-{VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {VERSION}\n")
    return sorted(names)


if __name__ == "__main__":
    print(*rename(Path(sys.argv[1])), sep="\n")
