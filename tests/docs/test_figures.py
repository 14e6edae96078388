"""A page says the figures of its source, and a source is what its command prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import Any

import figures
import pytest

from finetune.cli import listing
from tests.docs.commands import check

PREDICTED = [one for one in figures.sources() if one.facts["kind"] == "predicted"]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_a_page_says_what_its_sources_say(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.written(page, text) == text, "python docs/figures.py"


def test_what_ls_shows_as_measured_is_what_the_source_says() -> None:
    assert figures.MEASURED.read_text(encoding="utf-8") == figures.measured()


def test_another_figure_on_a_page_is_found() -> None:
    """In a sentence, in a table, and a sentence that is not there any more."""
    page = figures.ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    for figure, other in (("BF16's 862", "BF16's 826"), ("| 20,540 |", "| 22,540 |")):
        changed = text.replace(figure, other)
        assert text != changed
        assert figures.written(page, changed) == text
    with pytest.raises(ValueError, match=r"README.md says 0 times, not once: took 1,200 ms"):
        figures.written(page, text.replace("took 1,200 ms", "took a second"))


@pytest.mark.parametrize("source", figures.sources(), ids=lambda source: source.name)
def test_a_source_says_how_it_was_made(source) -> None:
    assert source.facts.keys() == {"command", "commit", "date", "machine", "kind"}
    assert source.facts["kind"] in ("measured", "predicted")
    check(source.facts["command"])


def test_stored_ratios_of_ls_are_those_of_the_tables() -> None:
    """One ratio for a recipe and a GPU, in `ls` and in the table of speeds."""
    _, _, ratios = listing._speeds()
    rows = {row[0]: row for row in figures.read("speeds").rows}
    for recipe in ("llama_8b_lora32", "llama_1b_full", "qwen_7b_lora"):
        shown = float(rows[f"`{recipe}`, H100"][3])
        assert ratios[f"{recipe}_fp8"] == pytest.approx(shown, abs=0.006)


@pytest.mark.long
@pytest.mark.parametrize("source", PREDICTED, ids=lambda source: source.name)
def test_a_prediction_is_what_its_command_prints_today(source) -> None:
    """But for blanks, and for the name of the folder that a matrix is kept in."""
    words = [sys.executable, *shlex.split(source.facts["command"])[1:]]
    # A pipe has no width; readline, which pytest imports, sets one behind Python's back.
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    caught: Any = {"capture_output": True, "text": True, "check": True, "cwd": figures.ROOT}
    done = subprocess.run(words, env=env, **caught)
    printed, stored = (
        re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "", text).split() for text in (done.stdout, source.text)
    )
    assert printed == stored, f"python docs/figures.py --run {source.name}"
