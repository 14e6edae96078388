"""Converters: a row of a known format, brought into one of TRL's own.

Turns reach the chat template whole, with tools, tool calls, reasoning and names. An answer that is
not to be trained on, or is empty, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, time
from typing import Any

from finetune.data import checks
from finetune.data.chat import (
    BadRowError,
    Takes,
    beside,
    check_answer,
    from_cell,
    is_trained,
    parsed,
    plain,
    turn_of,
    with_system,
    without_system,
)
from finetune.data.masks import TRAINED_TURNS

PAIRS = {
    "prompt-completion": ("prompt", "completion"),
    "prompt-response": ("prompt", "response"),
    "question-answer": ("question", "answer"),
    "question-response": ("question", "response"),
    "query-response": ("query", "response"),
    "query-answer": ("query", "answer"),
    "Alpaca": ("instruction", "output"),
    "Dolly": ("instruction", "response"),
    "input-output": ("input", "output"),
}
"""Columns of question and answer by format."""
CONTEXT = ("input", "context")
"""Columns that an instruction may have beside it."""
SYSTEM = ("system", "system_prompt")
"""Columns of a system's text, as LLaMA-Factory and OpenOrca have them."""
TURNS = ("messages", "conversations")
"""Columns of whole conversations."""
LABELS = ("label", "kto_tag")
"""Columns that are false where an answer is a bad one: TRL's and LLaMA-Factory's for KTO."""
PREFERRED, ASKED = "preferred answers", ("prompt", "instruction", "question", "query")
"""Format of preference pairs, and columns of their question."""

Converter = Callable[[dict[str, Any]], dict[str, Any]]


def tokenized(vocabulary: int, row: dict[str, Any]) -> dict[str, Any]:
    if why := checks.problem(row, vocabulary):
        raise BadRowError(why)
    return dict(row)


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A row of text alone."""
    return {"text": text_of(row, "text")}


def text_of(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if isinstance(value, date | time):  # of Parquet, which has types for them
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        empty = value is None or isinstance(value, str)
        raise BadRowError(f"{column!r} is {'empty' if empty else type(value).__name__}")
    return value


def messages(column: str, exact: bool, takes: Takes | None, row: dict[str, Any]) -> dict[str, Any]:
    """Turns, whole, and the tools that they may call."""
    _refuse_unwanted(row)
    given = from_cell(row[column] or (), column)
    exact = exact or given is not row[column]  # else what other rows have is there, with None
    given = given if isinstance(given, list | tuple) else (given,)
    given = [*given, row["chosen"]] if isinstance(row.get("chosen"), dict) else given
    turns = [turn_of(turn, exact=exact) for turn in given]
    trained = [is_trained(turn) for turn in turns if turn["role"] == "assistant"]
    if not trained:
        raise BadRowError("no assistant turn, so there is nothing to learn")
    # All answers masked by flags: the row would cost a forward and teach nothing.
    if not any(trained):
        raise BadRowError("no assistant turn is to be trained on")
    for turn in turns:
        if turn["role"] == "assistant" and is_trained(turn):
            check_answer(turn)
    assert takes is not None
    return {"messages": taken_turns(turns, takes, row), TRAINED_TURNS: trained, **beside(row)}


def taken_turns(turns: list[dict[str, Any]], takes: Takes, row: dict[str, Any]) -> list[Any]:
    """Turns as the template takes them, behind the system's text."""
    for column in SYSTEM:
        turns = with_system(turns, row.get(column))
    return [plain(turn, takes) for turn in (turns if takes.system else without_system(turns))]


def _refuse_unwanted(row: dict[str, Any]) -> None:
    """Raise `BadRowError` for an answer that its row calls a bad one (KTO)."""
    for column in LABELS:
        # SFT would train on the answer that somebody called bad.
        if row.get(column) is False or str(row.get(column)).lower() == "false":
            raise BadRowError(
                f"{column!r} is false: its answer is one not to give (train.method=kto)"
            )


def preferred(takes: Takes | None, row: dict[str, Any]) -> dict[str, Any]:
    """The preferred answer of a pair: `chosen` alone, or behind `prompt`."""
    if "prompt" in row and isinstance(row["prompt"], str) and isinstance(row["chosen"], list):
        # The turns hold the prompt, as TRL's own examples.
        row = {key: value for key, value in row.items() if key not in ASKED}
    for ask in (name for name in ASKED if name in row):
        return pair_of(ask, "chosen", takes, row)
    if isinstance(row["chosen"], list):
        if len(row["chosen"]) < 2:
            raise BadRowError("'chosen' needs a question and an answer")
        turns = row["chosen"]
        return turns_pair(turns[:-1], turns[-1:], takes, row)
    return {"text": text_of(row, "chosen")}


def pair_of(ask: str, answer: str, takes: Takes | None, row: dict[str, Any]) -> dict[str, Any]:
    _refuse_unwanted(row)
    if isinstance(row[ask], list):  # TRL's conversational prompt-completion
        if not row[ask] or not row[answer]:
            raise BadRowError(f"{ask if not row[ask] else answer!r} is empty")
        return turns_pair(row[ask], row[answer], takes, row)
    prompt, completion = text_of(row, ask), text_of(row, answer)
    if ask == "instruction":
        # Alpaca's own prompt has the input behind the instruction, with a blank line between.
        prompt = "\n\n".join([prompt, *(text_of(row, key) for key in CONTEXT if row.get(key))])
    past = [text for pair in parsed(row.get("history"), "history") or () for text in pair]
    if takes is None:
        before = [row[key] for key in SYSTEM if row.get(key)]
        # Without a template a blank line is all that parts a question from its answer.
        return {"prompt": "\n\n".join([*before, *past, prompt, ""]), "completion": completion}
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate([*past, prompt])
    ]
    return {
        "prompt": taken_turns(turns, takes, row),
        "completion": [{"role": "assistant", "content": completion}],
    }


def turns_pair(ask: Any, answer: Any, takes: Takes | None, row: dict[str, Any]) -> dict[str, Any]:
    """Turns up to an answer, and the turns of the answer, which are all trained on."""
    if takes is None:
        raise BadRowError("its turns need a chat template, and the tokenizer has none")
    prompt, completion = list(map(turn_of, ask)), list(map(turn_of, answer))
    # TRL trains on all of a completion, a user's turn in it as well.
    others = [turn["role"] for turn in completion if turn["role"] != "assistant"]
    if others:
        raise BadRowError(
            f"the completion has a turn of {others[0]!r}, which would be trained on; give messages"
        )
    if not all(map(is_trained, completion)):
        raise BadRowError("the completion is not to be trained on")
    for turn in completion:
        check_answer(turn)
    return {
        "prompt": taken_turns(prompt, takes, row),
        "completion": [plain(turn, takes) for turn in completion],
        **beside(row),
    }
