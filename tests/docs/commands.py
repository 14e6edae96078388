"""Commands of documents: found in code blocks and in running text, and parsed, not run.

A block that begins with `bash title="on an FP8 GPU"` is marked: its commands need a GPU or the hub,
or take too long for a test, as its title says to the reader. They are parsed only.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from finetune import load_recipe
from finetune.cli.app import MODULES, command_of
from finetune.config.paths import list_recipes

ROOT = Path(__file__).parents[2]
STARTS = ("python -m ", "python docs/", "python -c ", "pytest ", "torchrun ", "accelerate launch ")
PLACEHOLDERS = {
    "RECIPE": "tiny_lora_fp8",
    "RUN": "runs/x",
    "last": "tiny_lora_fp8",  # the newest run
    "OUT": "out",
    "RUN/config.yaml": "tiny_lora_fp8",  # a run saves its recipe there
}
OF_OTHERS = ("sglang.launch_server",)
"""Modules of tools that a document names and nothing here needs."""
BLOCK = re.compile(r'^```bash(?: title="([^"]+)")?\n(.*?)^```', re.S | re.M)


class Command(NamedTuple):
    """A command of a document.

    Attributes:
        text: As written, without the comment.
        document: File of the repository.
        mark: Why it is not run: title of the block, "inline", or "output" (run when the site is
            built); empty if a test has to run it.
    """

    text: str
    document: str
    mark: str


def documents() -> list[Path]:
    """The README and the pages of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]


def commands_of(path: Path) -> list[Command]:
    """Every command of a document."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    found = [
        Command(line.partition("  #")[0].strip(), name, title)
        for title, block in BLOCK.findall(text)
        for line in block.splitlines()
        if line.startswith(STARTS)
    ]
    found += [Command(x, name, "output") for x in re.findall(r"<!-- output: ([^\n]+) -->", text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    inline = [x for x in re.findall(r"`([^`\n]+)`", prose) if x.startswith(STARTS)]
    return found + [Command(x, name, "inline") for x in inline]


def check(command: str) -> None:
    """What a command names is there: verb, options, recipe, settings, file, test."""
    words = shlex.split(command)
    if words[0] in ("torchrun", "accelerate") and "-m" in words:
        words = ["python", *words[words.index("-m") :]]
    match [PLACEHOLDERS.get(word, word) for word in words]:
        case ["python", "-m", "finetune", *rest]:
            check_finetune(rest)
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            check_pytest(rest)
        case ["python", "-m", module, *rest]:
            if module not in OF_OTHERS:
                check_module(module, rest)
        case ["python", "-c", code]:
            compile(code, "<document>", "exec")
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{script} is not there"


def check_finetune(words: list[str]) -> None:
    """The verb and its options parse; a recipe takes the settings."""
    if words and words[0] not in MODULES:
        words = ["run", *words]
    if not words:
        return
    verb, *rest = words
    context = command_of(verb).make_context(verb, rest)
    recipe = context.params.get("recipe")
    own = str(recipe).endswith(".yaml")  # a file that the reader has
    assert recipe is None or own or recipe in list_recipes()
    if recipe is not None and not own and (overrides := context.params.get("overrides")):
        load_recipe(recipe, overrides)


def check_pytest(words: list[str]) -> None:
    """Folders, files, functions, and words of -k that a test of those files carries."""
    files = [word for word in words if word.startswith("tests/")]
    text = ""
    for word in files:
        file, _, name = word.partition("::")
        if (ROOT / file).is_dir():
            continue
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
