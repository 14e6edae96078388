"""FP8_FINDINGS.md can be followed: what its commands name is there, its numbers and links too.

Nothing is run here. A command line is parsed by the parser that would run it; a benchmark is a file
that defines the options; a test is a function in the file.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from finetune.cli.app import app
from finetune.config.recipe import list_recipes, load_recipe

ROOT = Path(__file__).parents[2]
FINDINGS = (ROOT / "FP8_FINDINGS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
STARTS = ("python -m ", "python -c ", "pytest ")
INDENTED = [
    line.strip().partition("  #")[0].strip()
    for line in FINDINGS.splitlines()
    if line.startswith("    ") and line.strip().startswith(STARTS)
]
INLINE = [text for text in re.findall(r"`([^`\n]+)`", FINDINGS) if text.startswith(STARTS)]
COMMANDS = sorted({*INDENTED, *INLINE})
PLACEHOLDERS = {"RECIPE": "tiny_lora_fp8", "RUN": "runs/x", "OUT": "out"}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_names_is_there(command) -> None:
    match [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]:
        case ["python", "-m", "finetune", *rest]:
            check_finetune(rest)
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            check_pytest(rest)
        case ["python", "-m", module, *rest]:
            check_module(module, rest)
        case ["python", "-c", code]:
            compile(code, "<finding>", "exec")


def check_finetune(words: list[str]) -> None:
    """The verb and its options parse; a recipe takes the settings."""
    group = typer.main.get_command(app)
    if words and words[0] not in group.commands:
        words = ["run", *words]
    if not words:
        return
    verb, *rest = words
    context = group.commands[verb].make_context(verb, rest)
    recipe = context.params.get("recipe")
    assert recipe is None or recipe in list_recipes()
    if recipe is not None and (overrides := context.params.get("overrides")):
        load_recipe(recipe, overrides)


def check_pytest(words: list[str]) -> None:
    """Files, functions, and words of -k that a test of those files carries."""
    files = [word for word in words if word.startswith("tests/")]
    text = ""
    for word in files:
        file, _, name = word.partition("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in content, f"no test {name} in {file}"
        text += content
    if "-k" in words:
        for part in re.findall(r"\w+", words[words.index("-k") + 1]):
            assert part in ("or", "and", "not") or re.search(rf"def test_\w*{part}", text), part


def check_module(module: str, words: list[str]) -> None:
    """The file is there, and names the options."""
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert file.is_file(), f"{module} is not there"
    text = file.read_text(encoding="utf-8")
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert re.search(rf"{option}\b", text), f"{module} has no option {option}"


def sections() -> dict[int, str]:
    """Number -> text of each finding."""
    parts = re.split(r"(?m)^## (\d+)\. ", FINDINGS)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_findings_are_numbered_from_one_without_gaps() -> None:
    assert list(sections()) == list(range(1, len(sections()) + 1))


@pytest.mark.parametrize("number", sections())
def test_a_finding_has_a_command_a_place_and_a_date(number) -> None:
    text = sections()[number]
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    named = re.search(r"`(python -m|pytest|tests/)[^`]*`|`tests/[\w/]+\.py", text)
    assert named or any(line.strip().startswith(STARTS) for line in indented)
    last = [line for line in text.splitlines() if line and not line.startswith("<a id")][-1]
    assert re.fullmatch(r"\*.*(CPU|GPU).*2026.*\*", last), f"finding {number} ends with {last!r}"


def test_links_lead_somewhere() -> None:
    anchors = set(re.findall(r'<a id="(\w+)">', FINDINGS))
    assert anchors == {f"f{number}" for number in sections()}
    linked = set(re.findall(r"\]\((?:FP8_FINDINGS\.md)?#(f\d+)\)", FINDINGS + README))
    assert linked
    assert linked <= anchors
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", FINDINGS):
        assert (ROOT / picture).is_file()
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in README.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= headings


def test_every_finding_is_in_the_index() -> None:
    index = FINDINGS.partition("## 1. ")[0]
    assert {int(n) for n in re.findall(r"\]\(#f(\d+)\)", index)} == set(sections())
