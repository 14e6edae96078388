"""Masks, token by token: every shape of rows under the chat templates of five families.

`python -m tests.data.shapes` prints what the matrix checks.
"""

from __future__ import annotations

from functools import partial

import pytest

from finetune.errors import DataError
from tests.data.shapes import (
    CALL,
    CALLS,
    FAMILIES,
    LIMIT,
    SHAPES,
    SYSTEM,
    THOUGHTS,
    TOOL,
    TURNS,
    answer,
    call_of,
    check_sums,
    counted,
    expected,
    of,
    tokenizer_of,
    trained_texts,
)

BY_COLUMNS = SHAPES[SHAPES.index("Alpaca") :]
"""Shapes that become one of the others before a template sees them: one family is enough."""
MATRIX = [
    pytest.param(shape, family, marks=pytest.mark.slow)
    if shape in BY_COLUMNS and family != "chatml"
    else (shape, family)
    for shape in SHAPES
    for family in FAMILIES
]


@pytest.fixture
def count(tmp_path, monkeypatch):
    """A function from a family and rows to these rows, tokenized and counted."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return lambda family, *rows, **settings: counted(family, tmp_path, *rows, **settings)


def texts_of(found) -> list[list[str]]:
    return [list(trained_texts(found.tokenizer, row)) for row in found.prepared]


@pytest.mark.parametrize(("shape", "family"), MATRIX)
def test_masks_and_ledger(count, shape, family) -> None:
    """Of a good, a bad and a long row: one is trained on, as written; one refused, one dropped."""
    texts = expected(family, shape)
    run = partial(count, family, *of(family)[shape], max_length=LIMIT, on_bad_row="skip")
    if isinstance(texts, str):
        with pytest.raises(DataError, match=texts):
            run()
        return
    found = run()
    assert texts_of(found) == [texts]
    check_sums(found, read=3, refused=1, dropped=1)
    assert found.ledger.stops == (shape != "tokenized")
    left_out = shape == "reasoning" and family not in THOUGHTS
    assert any("does not use 'thinking'" in note for note in found.rows.notes) == left_out


def test_system_text_stands_before_the_first_question_where_there_is_no_system_role(count) -> None:
    found = count("gemma", {"messages": [SYSTEM, *TURNS[:2]]}, {"messages": TURNS})
    asked = found.tokenizer.decode(found.prepared[0]["input_ids"])
    assert "<start_of_turn>user\nBe brief.\n\nTide?<end_of_turn>" in asked
    assert any("no system role" in note for note in found.rows.notes)


def test_a_template_that_refuses_a_row_is_told_in_its_own_words(count) -> None:
    """It was told of keys that the template does not use: with them and without, it failed."""
    rows = {"messages": TURNS}, {"messages": [TURNS[0], *TURNS]}
    with pytest.raises(DataError, match=r"refuses row 2[\s\S]*roles must alternate"):
        count("gemma", *rows)
    check_sums(count("gemma", *rows, on_bad_row="skip"), read=2, refused=1)


@pytest.mark.parametrize("family", THOUGHTS)
def test_a_call_is_the_completion_of_a_prompt(count, family) -> None:
    row = {"prompt": CALLS[:1], "completion": CALLS[1:2], "tools": [TOOL]}
    found = count(family, row)
    ((text,),) = texts_of(found)
    assert call_of(family).endswith(text)
    assert "Tide of a port." in found.tokenizer.decode(found.prepared[0]["input_ids"])


def test_reasoning_of_earlier_turns_that_is_left_out_is_said(count) -> None:
    turns = [TURNS[0], TURNS[1] | {"thinking": "Moon."}, *TURNS[2:]]
    found = count("gptoss", {"messages": turns})
    assert "'thinking' of an earlier turn of 'assistant'" in found.rows.notes[0]


def test_calls_behind_the_first_of_a_turn_are_not_left_out_in_silence(count) -> None:
    """gpt-oss has one call a turn; the second would be missing from the answer."""
    both = [CALLS[0], answer(None, tool_calls=[CALL, CALL | {"id": "2"}]), *CALLS[2:]]
    with pytest.raises(DataError, match="calls behind the first of a turn"):
        count("gptoss", {"messages": both, "tools": [TOOL]})


def test_every_token_of_a_chat_trained_on_is_a_loud_warning(count, monkeypatch):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    monkeypatch.setattr(tokenizer_of("chatml"), "chat_template", plain)
    found = count("chatml", {"messages": TURNS})
    assert (True, "100% of the tokens of chat rows are trained on: the user's turns too") in list(
        found.ledger.lines()
    )
