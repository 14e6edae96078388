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


def number(path: Path) -> int:
    """The number of a note, from its file name."""
    return int(path.name.partition("-")[0])


def test_a_number_is_that_of_one_note() -> None:
    assert len({number(path) for path in NOTES}) == len(NOTES)
    for path in NOTES:
        assert TEXTS[path].startswith(f"# {number(path)}. ")


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_note_has_a_command_a_date_a_machine_and_a_status(path) -> None:
    text = TEXTS[path]
    assert commands_of(text) or re.search(r"`tests/[\w/]+\.py", text)
    dated = re.fullmatch(
        r"\*\d+ November 2026 · .*\b[CG]PU\b.* · status: (.+)\*", text.splitlines()[2]
    )
    assert dated
    if "superseded" in dated[1]:
        assert LINK.search(dated[1]), "a superseded note names the one that replaces it"


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "README.md"], ids=lambda path: path.stem)
def test_links_and_pictures_lead_somewhere(path) -> None:
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{target} is not there"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{target}#{anchor}"


def test_finding_numbers_named_anywhere_have_an_anchor() -> None:
    """Links of the README, the documents, the notebooks, and in messages of the code."""
    files = [ROOT / "README.md"]
    for folder in ("docs", "notebooks", "finetune", "tests", "recipes"):
        files += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".md", ".py", ".yaml", ".ipynb")
        ]
    named = {
        anchor
        for path in files
        for anchor in re.findall(r"FP8_FINDINGS\.md#(f\d+)", path.read_text(encoding="utf-8"))
    }
    assert named <= anchors(SUMMARY)


def test_every_note_is_in_both_indexes() -> None:
    listed = re.findall(
        r'(?m)^\| <a id="f(\d+)"></a>(\d+) \| \[(.+)\]\(docs/notes/([^)]+)\) \| (.+) \|$', FINDINGS
    )
    assert [row[3] for row in listed] == [path.name for path in NOTES]
    for path, (anchor, shown, title, _, status) in zip(NOTES, listed, strict=True):
        first, _, dated = TEXTS[path].splitlines()[:3]
        assert int(anchor) == int(shown) == number(path)
        assert first == f"# {shown}. {title}"
        assert dated.endswith(f"status: {status.replace('docs/notes/', '')}*")
    index = TEXTS[ROOT / "docs" / "notes" / "index.md"]
    for path in NOTES:
        title = TEXTS[path].splitlines()[0].removeprefix("# ")
        shown, _, rest = title.partition(". ")
        assert f"\n* {shown}. [{rest}]({path.name})\n" in index


def test_the_summary_has_ten_answers_and_a_verdict_for_each_claim() -> None:
    answers = FINDINGS.partition("## What circulates")[0].split("\n### ")[1:]
    assert len(answers) == 10
    for position, answer in enumerate(answers, 1):
        assert answer.startswith(f"{position}. ")
        assert commands_of(answer)
        assert "Verdict: **" in answer
        assert "docs/notes/" in answer
    ledger = FINDINGS.partition("## What circulates")[2].partition("\n## ")[0]
    rows = [line for line in ledger.splitlines() if line.startswith("| ")][1:]
    verdicts = r"confirmed|refuted|predicted as|not measured|explained|true of"
    for row in rows:
        _, _, verdict, evidence, _ = re.split(r"(?<!\\)\|", row)
        assert re.search(verdicts, verdict), row
        assert commands_of(evidence) or LINK.search(evidence), row
