"""Held-out questions on the packaged pictures that a run answers as their rows do, word for word.

    python -m tests.benchmarks.pictures RUN [RUN ...]

Asked is the first question of each row, of the run and of the model that it began with. Not trained
on are ships that no training picture shows, such as a red tug.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.config.paths import ASSETS
from finetune.training.asking.questions import Question
from finetune.training.asking.reload import loaded, open_trained, untrained
from finetune.training.asking.samples import answer
from tests.asset_makers.make_pictures import UNSEEN

FOLDER = ASSETS / "data"
NEW = {"A {} {}.".format(*ship) for ship in UNSEEN}


def questions() -> list[Question]:
    """The first question of each held-out row, and what its row answers."""
    found = []
    for line in (FOLDER / "pictures_held_out.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        asked, said = (turn["content"][-1]["text"] for turn in row["messages"][:2])
        picture = {"bytes": None, "path": str(FOLDER / row["images"][0])}
        found.append(Question((picture, asked), said).opened())
    return found


def right(model: Any, reader: Any, asked: list[Question], compute: Any) -> list[bool]:
    """Which answers are the rows' own."""
    said = answer(model, reader, asked, 16, compute=compute)
    return [one.answer == question.expected for one, question in zip(said, asked, strict=True)]


def counted(asked: list[Question], found: list[bool]) -> dict[str, tuple[int, int]]:
    """Right answers and questions, by question."""
    by: dict[str, list[bool]] = defaultdict(list)
    for question, good in zip(asked, found, strict=True):
        by[question.text].append(good)
        if question.expected in NEW:
            by["  of these, not trained on"].append(good)
    return {name: (sum(good), len(good)) for name, good in by.items()} | {
        "all": (sum(found), len(found))
    }


def table(folder: Path) -> Table:
    """A line for each question: right answers before and after training."""
    run, asked = open_trained(folder), questions()
    compute = run.config.precision.compute
    with loaded(run, images=True) as (model, reader):
        after = counted(asked, right(model, reader, asked, compute))
        base = untrained(run, model)
        plain = model.disable_adapter() if base is True else contextlib.nullcontext()
        with plain:
            before = counted(asked, right(model if base is True else base, reader, asked, compute))
    shown = Table("question", "before", "after", "of", title=str(folder))
    for name, (good, count) in sorted(after.items()):
        shown.add_row(name, str(before[name][0]), f"{good} ({good / count:.0%})", str(count))
    return shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for given in parser.parse_args().runs:
        Console().print(table(given))
