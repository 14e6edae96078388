"""FP8_FINDINGS.md and the notes can be followed: their commands, numbers and links lead somewhere.

Nothing is run here. A command line is parsed by the parser that would run it; a benchmark is a file
that defines the options; a test is a function in the file. A command beside a commit has left since
and is taken as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, STARTS, check

SUMMARY = ROOT / "FP8_FINDINGS.md"
NOTES = sorted((ROOT / "docs" / "notes").glob("[0-9]*.md"))
DOCUMENTS = [SUMMARY, ROOT / "docs" / "notes" / "index.md", *NOTES]
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
FINDINGS = TEXTS[SUMMARY]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
PAST = re.compile(
    r"^    .*  # commit [0-9a-f]{7}\b.*$|`[^`\n]+`\s\(commit [0-9a-f]{7}\)", re.MULTILINE
)
"""A command that stands beside the commit in which it is, in a block and in running text."""


def commands_of(text: str) -> set[str]:
    """Indented command lines, without variables before and comments after them, and inline ones."""
    text = re.sub(r" \\\n +", " ", text)  # a command of several lines
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += re.findall(r"`([^`\n]+)`", text)
    bare = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).partition("  #")[0].strip() for line in lines]
    return {line for line in bare if line.startswith(STARTS)}


COMMANDS = sorted(set().union(*(commands_of(PAST.sub("", text)) for text in TEXTS.values())))


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_names_is_there(command) -> None:
    check(command)


def anchors(path: Path) -> set[str]:
    """Anchors written out, and those that headings get."""
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    return headings | set(re.findall(r'<a id="(\w+)">', text))


def test_notes_are_numbered_without_a_gap() -> None:
    numbers = [int(path.name.partition("-")[0]) for path in NOTES]
    assert numbers == list(range(1, len(NOTES) + 1))


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_note_asks_answers_and_dates_its_figures(path) -> None:
    """Question, answer, and a date and a machine below each heading; a command somewhere."""
    text = TEXTS[path]
    question, _, answer = text.splitlines()[:3]
    assert re.fullmatch(rf"# {int(path.name.partition('-')[0])}\. .+\?", question)
    assert answer.startswith("**")
    for section in text.split("\n## ")[1:]:
        assert re.match(r".+\n\n\*.*\d+ November 2026 · .*\b[CG]PU\b.*\*\n", section), section[:80]
    assert commands_of(text)


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "README.md"], ids=lambda path: path.stem)
def test_links_and_pictures_lead_somewhere(path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{target} is not there"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{target}#{anchor}"


def test_notes_named_in_code_are_there() -> None:
    named = {
        name
        for folder in ("finetune", "notebooks", "tests", "recipes")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".yaml", ".ipynb") and path != Path(__file__)
        for name in re.findall(r"docs/notes/([\w-]+\.md)", path.read_text(encoding="utf-8"))
    }
    assert named <= {path.name for path in DOCUMENTS}


def test_every_note_is_in_both_indexes() -> None:
    """The summary has a line for each finding; the index of the notes has each question."""
    row = r"(?m)^\| \[.+\]\(docs/notes/((\d+)-[\w-]+\.md)#[\w-]+\) \| (\d+) \|$"
    listed = re.findall(row, FINDINGS)
    assert all(int(shown) == int(number) for _, number, shown in listed)
    assert list(dict.fromkeys(name for name, _, _ in listed)) == [path.name for path in NOTES]
    index = TEXTS[ROOT / "docs" / "notes" / "index.md"]
    for path in NOTES:
        number, _, question = TEXTS[path].splitlines()[0].removeprefix("# ").partition(". ")
        assert f"\n{number}. [{question}]({path.name})\n" in index


def test_the_summary_has_ten_answers_and_a_verdict_for_each_claim() -> None:
    answers = FINDINGS.partition("## What circulates")[0].split("\n### ")[1:]
    assert len(answers) == 10
    for position, answer in enumerate(answers, 1):
        assert answer.startswith(f"{position}. ")
        assert commands_of(answer)
        assert "Verdict: **" in answer
        assert "docs/notes/" in answer
    ledger = FINDINGS.partition("## What circulates")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!claim \|).*", ledger, re.MULTILINE)
    assert len(rows) >= 50
    verdicts = r" \*\*(confirmed|refuted|not measured yet|not measurable here)\b"
    for row in rows:
        _, _, circulates, verdict, evidence, _ = re.split(r"(?<!\\)\|", row)
        assert circulates.strip(), row
        assert re.match(verdicts, verdict), row
        assert commands_of(evidence) or LINK.search(evidence), row
