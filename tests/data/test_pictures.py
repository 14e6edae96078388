"""The packaged pictures: what is held out is new, and no question answers itself."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from PIL import Image, ImageChops

from finetune.config.paths import ASSETS
from finetune.config.schema import DataConfig
from finetune.data.sources import HELD_OUT, sources_of
from finetune.errors import DataNotFoundError
from tests.asset_makers.make_pictures import SUBJECTS, UNSEEN, pictures

FOLDER = ASSETS / "data"
PARTS = ("pictures", "pictures_held_out")


def rows(part: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text("utf-8").splitlines()]


def answers(part: str) -> dict[str, Counter[str]]:
    """Question -> its answers, and how often each is given."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows(part):
        texts = [turn["content"][-1]["text"] for turn in row["messages"]]
        for question, answer in zip(texts[::2], texts[1::2], strict=True):
            found[question][answer] += 1
    return found


def test_each_picture_belongs_to_one_row_of_one_part() -> None:
    named = [name for part in PARTS for row in rows(part) for name in row["images"]]
    files = [file for part in PARTS for file in (FOLDER / part).iterdir()]
    assert sorted(named) == sorted(str(file.relative_to(FOLDER)) for file in files)
    assert len({file.read_bytes() for file in files}) == len(files)


def test_a_question_does_not_answer_itself() -> None:
    for part in PARTS:
        for question, given in answers(part).items():
            chance = 1 / len(given)
            assert max(given.values()) / given.total() < 2.5 * chance, (part, question, given)


def test_ships_that_are_held_out_are_in_no_training_picture() -> None:
    trained, held = (
        {answer for given in answers(part).values() for answer in given} for part in PARTS
    )
    words = {word for answer in trained for word in answer.rstrip(".").split()}
    for ship in UNSEEN:
        assert "A {} {}.".format(*ship) in held - trained
        assert set(ship) <= words, "her color is, and her kind"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_maker_draws_the_packaged_pictures(subject) -> None:
    turns = {row["images"][0]: row["messages"] for row in rows("pictures_held_out")}
    for index, (image, said) in enumerate(pictures(subject, held_out=True)[:5], start=1):
        name = f"pictures_held_out/{subject}_{index:03}.png"
        with Image.open(FOLDER / name) as packaged:
            both = image.convert("RGB"), packaged.convert("RGB")
        assert not ImageChops.difference(*both).getbbox()
        assert turns[name] == said


def test_packaged_rows_may_have_a_split_to_evaluate_on() -> None:
    data = DataConfig(name="builtin:pictures", split=HELD_OUT)
    [(source, _)] = sources_of(data)
    assert [file.name for file in source.files] == ["pictures_held_out.jsonl"]
    with pytest.raises(DataNotFoundError, match=r"no packaged data set 'builtin:sums_held_out'"):
        sources_of(data.model_copy(update={"name": "builtin:sums"}))
