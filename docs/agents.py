"""`AGENTS.md` and the site's `llms.txt`: what a reader in a hurry needs, made of what is there.

    python docs/agents.py            # writes both
    python docs/agents.py --check    # exits with 1 where one is not current

Commands, places and ways to add come from `.github/CONTRIBUTING.md`, rooms from the README of each,
what may import what from the contracts in `pyproject.toml`, pages from `mkdocs.yml`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hooks import source_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
GUIDE = ".github/CONTRIBUTING.md"
MADE = "<!-- made by `python docs/agents.py` -->"
FILES = ("AGENTS.md", "docs/pages/llms.txt")


def section(title: str) -> str:
    """Text below a heading of the guide for contributors, down to the next one."""
    text = (ROOT / GUIDE).read_text("utf-8")
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None:
        raise SystemExit(f"{GUIDE} has no section {title!r}")
    return found[1].strip()


def commands() -> str:
    found = re.search(r"^```bash\n.*?^```$", section("Seven commands"), re.M | re.S)
    assert found is not None
    return found[0]


def paragraph(file: Path) -> str:
    """First paragraph below the first heading, in one line."""
    text = re.sub(r"^```.*?^```$", "", file.read_text("utf-8"), flags=re.M | re.S)
    blocks = text.split("\n\n")
    plain = (b for b in blocks if b.strip() and not re.match(r"\s*(#|<!--|!\[|\[!\[|```|\|)", b))
    return " ".join(next(plain, "").split())


def rooms() -> Iterator[str]:
    """A row for each folder of the package: what it is for, and where to begin."""
    yield "| room | what it is for | read first |"
    yield "|---|---|---|"
    for folder in sorted(file.parent for file in (ROOT / "finetune").rglob("__init__.py")):
        about, name = folder / "README.md", folder.relative_to(ROOT / "finetune").as_posix()
        if about.is_file() and name != ".":
            text = about.read_text("utf-8")
            first = re.search(r"\*\*Read first:\*\* (.*?)(?:\n\n|\n\*|\Z)", text, re.S)
            begin = " ".join(first[1].split()).rstrip(".") if first else ""
            yield f"| `{name}` | {paragraph(about)} | {begin} |"


def contracts() -> Iterator[str]:
    """The contracts of imports, a line each."""
    for one in PROJECT["tool"]["importlinter"]["contracts"]:
        if one["type"] == "layers":
            layers = " > ".join(f"`{layer}`" for layer in one["layers"])
            inside = ", ".join(f"`{each}`" for each in one.get("containers", ()))
            yield f"* {one['name']}{f' in {inside}' if inside else ''}: {layers}."
        else:
            sources = ", ".join(
                f"`{each}`" for each in one.get("source_modules", one.get("modules", ()))
            )
            targets = ", ".join(f"`{each}`" for each in one.get("forbidden_modules", ()))
            but = ", ".join(f"`{each.split()[-1]}`" for each in one.get("ignore_imports", ()))
            line = f"* {one['name']}: no import of {targets or 'each other'} in {sources}"
            yield line + (f", but of {but}." if but else ".")


def places() -> str:
    """The guide's table of questions: which file has what, and where something new goes."""
    rows = section("Where things live").partition(
        "| question | file, in `finetune/` |\n|---|---|\n"
    )[2]
    return rows.partition("\n\n")[0]


def agents() -> str:
    """The text of AGENTS.md."""
    name, about = PROJECT["project"]["name"], PROJECT["project"]["description"]
    parts = [
        f"# {name}", MADE, f"{about}.",
        f"How to write here, and what counts as evidence: [{GUIDE}]({GUIDE}). What a user reads: "
        "[README.md](README.md).",
        "## Commands", commands(),
        "## Rooms", "\n".join(rooms()),
        "## What may import what",
        "`lint-imports` checks (`a > b`: a may import b, `a : b`: each other, `a | b`: neither):",
        "\n".join(contracts()),
        "## Where something is, and where something new goes",
        "| question | file, in `finetune/` |\n|---|---|\n" + places(),
        section("How to add").partition("\n\n")[0],
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


class _Loader(yaml.SafeLoader):
    """Tags of Python that mkdocs.yml has are of no interest here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation() -> list[tuple[str, list[str]]]:
    """(title of a section, its pages) of the site."""
    config = yaml.load((ROOT / "docs/mkdocs.yml").read_text("utf-8"), _Loader)
    found = []
    for entry in config["nav"]:
        ((title, pages),) = entry.items()
        found.append((title, [pages] if isinstance(pages, str) else list(_pages(pages))))
    return found


def _pages(entries: Any) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _pages(
                value if isinstance(value := next(iter(entry.values())), list) else [value]
            )


def llms() -> str:
    """The text of llms.txt (llmstxt.org): pages of the site by section, a sentence each."""
    project = PROJECT["project"]
    lines = [f"# {project['name']}", "", f"> {project['description']}", ""]
    for title, pages in navigation():
        lines += [f"## {title}", ""]
        for page in pages:
            file = ROOT / source_of(page)
            if file.suffix != ".md":  # a notebook
                lines.append(f"- [{file.stem}]({Path(page).with_suffix('.html')})")
                continue
            text = file.read_text("utf-8")
            heading = re.search(r"^# (.+)$", text, re.M)
            name = heading[1] if heading else file.stem
            first = re.split(
                r"(?<=[.:!?]) ", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph(file))
            )[0]
            told = re.sub(r":$", ".", first)
            lines.append(f"- [{name}]({Path(page).with_suffix('.html')}): {told}")
        lines.append("")
    return "\n".join(lines)


def made() -> dict[str, str]:
    """File -> its text as it should be."""
    return dict(zip(FILES, (agents(), llms()), strict=True))


def main() -> int:
    stale = 0
    for file, text in made().items():
        path = ROOT / file
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        if "--check" in sys.argv:
            stale = 1
            print(f"{file} is not current: python docs/agents.py")
        else:
            path.write_text(text, "utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
