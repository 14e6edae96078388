"""What mkdocs calls while it builds the site: generated tables, pages from elsewhere, links.

* `<!-- generated: NAME -->` becomes a table made from the code, `<!-- output: COMMAND -->` what a
  command prints (`site_reference.py`).
* The findings, the notes, what is parked and the changelog stand outside of `pages/`; they become
  pages too, and so does a notebook: its text and pictures as they are stored, code and what it
  printed folded away.
* Links are written as files of the repository, so that they work where it is read. Here a link to
  a page leads to the page, one to any other file becomes its name, and a picture comes along.
* An SVG picture is set into the page, so that its lines follow the page's colors.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import site_reference

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
ELSEWHERE = {
    "FP8_FINDINGS.md": "findings.md",
    "notebooks/07_pitfalls.ipynb": "pitfalls.md",
    "docs/changelog.md": "changelog.md",
    "docs/parked.md": "parked.md",
}
"""File of the repository -> page, besides `docs/notes/*.md`."""

LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`|^    .*?$)", re.S | re.M)


def notes() -> list[str]:
    """Notes as files of the repository: their index, then by number."""
    found = (str(path.relative_to(ROOT)) for path in ROOT.glob("docs/notes/*.md"))
    return sorted(found, key=lambda file: (not file.endswith("index.md"), file))


def page_of(file: str) -> str | None:
    """The page that shows a file of the repository: `docs/pages/fp8.md` -> `fp8.md`."""
    if file.startswith("docs/pages/"):
        return file.removeprefix("docs/pages/")
    if file.startswith("docs/notes/") and file.endswith(".md"):
        return file.removeprefix("docs/")
    return ELSEWHERE.get(file)


def source_of(page: str) -> str:
    """The file of the repository that a page shows."""
    outside = {shown: file for file, shown in ELSEWHERE.items()}
    if page in outside:
        return outside[page]
    return f"docs/{page}" if page.startswith("notes/") else f"docs/pages/{page}"


def on_config(config: Any) -> Any:
    """Put the notes into the navigation."""
    for entry in config["nav"]:
        if "Findings" in entry:
            entry["Findings"] += [{"Notes": [page_of(note) for note in notes()]}] * bool(notes())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add pages that stand outside of `pages/`, and pictures that they show."""
    from mkdocs.structure.files import File

    for file in (*ELSEWHERE, *notes()):
        text = (ROOT / file).read_text(encoding="utf-8")
        text = of_notebook(json.loads(text)) if file.endswith(".ipynb") else text
        files.append(File.generated(config, page_of(file) or "", content=text))
        for mark, _, target in LINK.findall(text):
            picture = _inside(file, target)
            if mark and picture and page_of(picture) is None:
                files.append(
                    File.generated(config, _asset(picture), abs_src_path=str(ROOT / picture))
                )
    return files


def of_notebook(notebook: dict[str, Any]) -> str:
    """The Markdown of a notebook that is stored with its outputs (nbformat 4)."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _folded("Code", source))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                code = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="plot" src="data:image/png;base64,{code}">')
            elif printed := "".join(output.get("text", []) or data.get("text/plain", [])):
                parts.append(_folded("What it printed", printed, "text"))
    return "\n\n".join(parts)


def _folded(title: str, text: str, language: str = "python") -> str:
    block = f"```{language}\n{text.rstrip()}\n```"
    return f'??? note "{title}"\n\n{textwrap.indent(block, "    ")}'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put generated tables in, and turn links into links of the site."""
    return render(markdown, page.file.src_uri)


def render(markdown: str, page: str) -> str:
    """The text of a page as the site has it."""
    parts = CODE.split(markdown)  # code stands at odd places
    parts[::2] = [LINK.sub(lambda found: _link(found, page), part) for part in parts[::2]]
    return site_reference.insert("".join(parts))


def _link(found: re.Match[str], page: str) -> str:
    mark, text, target = found.groups()
    if re.match(r"[a-z]+:|#|<", target):
        return found[0]
    path, hash_mark, anchor = target.partition("#")
    file = _inside(source_of(page), path)
    if file is None:
        raise FileNotFoundError(f"{source_of(page)} links to {target}, which is not there")
    if mark and file.endswith(".svg"):
        return _inline(ROOT / file, text)
    shown = page_of(file) or (_asset(file) if mark else None)
    if shown is None:
        return text
    here = os.path.relpath(shown, os.path.dirname(page) or ".")
    return f"{mark}[{text}]({here}{hash_mark}{anchor})"


def _inside(file: str, target: str) -> str | None:
    """The file of the repository that a link in `file` leads to."""
    path = (ROOT / file).parent / target
    return os.path.relpath(path, ROOT) if path.exists() else None


def _asset(picture: str) -> str:
    return f"pictures/{picture.replace('/', '-')}"


def _inline(picture: Path, text: str) -> str:
    """The drawing itself, with its text for those who do not see it."""
    svg = re.sub(r"<style>.*?</style>\s*", "", picture.read_text(encoding="utf-8"), flags=re.S)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f'<div class="drawing">{" ".join(svg.split())}</div>'
