"""READMEs of the package's folders: what a room imports, and what is read first, as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house import ROOT, Modules

PACKAGE = ROOT / "finetune"
READMES = sorted(set(PACKAGE.rglob("README.md")) - set(PACKAGE.glob("assets/**/*")))


@pytest.fixture(scope="module")
def modules() -> Modules:
    return Modules(PACKAGE)


def named(text: str, what: str) -> set[str]:
    """Names in backticks behind `**what:**`, in one point of a list."""
    found = re.search(rf"\*\*{what}:\*\*(.*?)(?=\n\n|\n\*|\Z)", text, re.S)
    return set(re.findall(r"`([^`]+)`", found[1])) if found else set()


def imported(room: str, modules: Modules) -> set[str]:
    """What a room imports: other rooms, and of its own house rooms and files, by their paths."""
    prefix, house = f"finetune.{room.replace('/', '.')}", room.split("/")[0]
    inside = {name for name in modules.trees if f"{name}.".startswith(f"{prefix}.")}
    found = set()
    for other in {one for name in inside for one in modules.imports[name]} - inside:
        _, first, *rest = *other.split("."), ""
        if first != house:
            found.add(first)
        elif rest[0]:
            path = f"{first}/{rest[0]}"
            found.add(path if (PACKAGE / path).is_dir() else f"{path}.py")
    return found - {""}


@pytest.mark.parametrize("readme", READMES, ids=lambda file: file.parent.name)
def test_a_room_imports_what_its_readme_says(readme: Path, modules: Modules) -> None:
    room = readme.parent.relative_to(PACKAGE).as_posix()
    assert named(readme.read_text("utf-8"), "Imports") == imported(room, modules)


@pytest.mark.parametrize("readme", READMES, ids=lambda file: file.parent.name)
def test_what_is_read_first_is_there(readme: Path) -> None:
    text = readme.read_text("utf-8")
    files = named(text, "Read first") | set(re.findall(r"^\| \d+ \| .*?`(.+?)`", text, re.M))
    assert files
    assert [file for file in files if not (readme.parent / file).exists()] == []


def test_every_room_has_a_readme() -> None:
    rooms = {file.parent for file in PACKAGE.glob("*/__init__.py")}
    rooms |= {file.parent for file in PACKAGE.glob("training/*/__init__.py")}
    assert rooms == {file.parent for file in READMES}
