"""Rows of the methods that learn from more than one answer to give, mapped to TRL's forms.

    columns                                          form          becomes
    chosen, rejected (+ prompt | instruction | ...)  preference    prompt, chosen, rejected
    prompt, completion (or a pair of columns that
      SFT knows, or messages) and label | kto_tag    unpaired      prompt, completion, label
    prompt | question | messages, ...                prompts       prompt, and all other columns
    text                                             text          text

Without a prompt, that is what `chosen` and `rejected` have in common at their start: the turns
before the last one, or text, where TRL's own rule finds it. With a chat template a prompt of text
is a turn of the user.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from finetune.config.methods import FORMS, METHODS, Method, RowForm
from finetune.data.chat import BadRowError, Takes, turn_of
from finetune.data.converters import (
    ASKED,
    LABELS,
    PAIRS,
    TURNS,
    Converter,
    as_text,
    pair_of,
    preferred,
    taken_turns,
    text_of,
    turns_pair,
)
from finetune.data.image_forms import COLUMNS
from finetune.errors import DataError

TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""A label as it is read -> whether its answer is one to give."""

NAMED: dict[RowForm, tuple[str, ...]] = {
    "answers": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
}
"""Form of rows -> columns to name where a file has others."""


def forms_of(columns: set[str]) -> list[RowForm]:
    """Forms that rows with these columns have."""
    chat, asked = {*TURNS} & columns, {*ASKED} & columns
    paired = any({*pair} <= columns for pair in PAIRS.values())
    has: dict[RowForm, Any] = {
        "answers": chat or paired or "text" in columns or "chosen" in columns,
        "text": "text" in columns,
        "preference": {"chosen", "rejected"} <= columns,
        "unpaired": (chat or paired) and {*LABELS} & columns,
        "prompts": chat or asked,
    }
    return [form for form in FORMS if has[form]]


def recognize(
    columns: set[str], method: Method, takes: Takes | None, source: str
) -> tuple[RowForm, Converter]:
    """The form of rows, and what brings them into it.

    Raises:
        DataError: the method does not read rows with such columns.
    """
    there = forms_of(columns)
    for form in method.rows:
        if form in there:
            pair = next((pair for pair in PAIRS.values() if {*pair} <= columns), None)
            converters: dict[RowForm, Converter] = {
                "text": as_text,
                "preference": partial(_preference, takes),
                "unpaired": partial(_unpaired, pair, takes),
                "prompts": partial(_prompts, takes),
            }
            return form, converters[form]
    others = ", ".join(
        name
        for name, other in METHODS.items()
        if {*there} & {*other.rows} and (other.images or not {*COLUMNS} & columns)
    )
    names = ", ".join(f"{column}: NAME" for column in NAMED[method.rows[0]])
    raise DataError(
        f"train.method={method.name} does not read rows like those of {source}",
        where=source,
        why=f"it needs {method.needs}; columns found: {', '.join(sorted(columns))}",
        fix=(f"these rows fit train.method={others}; or " if others else "")
        + f"name the columns, as in 'data.columns={{{names}}}'",
    )


def _preference(takes: Takes | None, row: dict[str, Any]) -> dict[str, Any]:
    kinds = ["turns" if isinstance(row[key], list) else "text" for key in ("chosen", "rejected")]
    if kinds[0] != kinds[1] and None not in (row["chosen"], row["rejected"]):
        what = f"'chosen' is {kinds[0]} and 'rejected' is {kinds[1]}"
        raise BadRowError(f"{what}; give both as turns, or both as text")
    if isinstance(row["chosen"], str) and not {*ASKED} & {*row}:
        from trl import extract_prompt

        texts: dict[str, Any] = {key: text_of(row, key) for key in ("chosen", "rejected")}
        # TRL's rule: the longest common beginning, up to a space before what differs.
        found = dict(extract_prompt(texts)) if texts["chosen"] != texts["rejected"] else texts
    else:
        good, bad = (_answered(takes, row, key) for key in ("chosen", "rejected"))
        # A pair of answers to two questions says nothing about either.
        if good["prompt"] != bad["prompt"]:
            raise BadRowError("'chosen' and 'rejected' answer different questions")
        found = {**good, "rejected": bad["chosen"]}
    if found["chosen"] == found["rejected"]:
        raise BadRowError("'chosen' and 'rejected' are the same")
    return found


def _answered(takes: Takes | None, row: dict[str, Any], key: str) -> dict[str, Any]:
    """A row with one of its two answers, as `chosen`."""
    try:
        found = preferred(takes, {**row, "chosen": row[key]})
    except BadRowError as error:
        raise BadRowError(str(error).replace("'chosen'", repr(key))) from error
    found["chosen"] = found.pop("completion")
    return found


def _unpaired(
    pair: tuple[str, str] | None, takes: Takes | None, row: dict[str, Any]
) -> dict[str, Any]:
    given = next(row[name] for name in LABELS if name in row)
    if (label := TRUTH.get(str(given).lower())) is None:
        raise BadRowError(f"its label is {given!r}, and neither true nor false")
    rest = {key: value for key, value in row.items() if key not in LABELS}
    if pair is not None:
        return {**pair_of(*pair, takes, rest), "label": label}
    turns = next(rest[name] for name in TURNS if name in rest) or ()
    return {**turns_pair(turns[:-1], turns[-1:], takes, rest), "label": label}


def _prompts(takes: Takes | None, row: dict[str, Any]) -> dict[str, Any]:
    turns = next((row[name] for name in TURNS if name in row), None)
    ask = next((name for name in ASKED if name in row), "")
    if turns is not None:
        if takes is None:
            raise BadRowError("its turns need a chat template, and the tokenizer has none")
        asked = list(map(turn_of, turns))
        # The answer of a row that is used as a prompt would be read as the beginning of what is
        # written.
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        prompt: Any = taken_turns(asked, takes, row)
    else:
        reply: Any = [{"role": "assistant", "content": "-"}] if isinstance(row[ask], list) else "-"
        prompt = pair_of(ask, "completion", takes, {**row, "completion": reply})["prompt"]
    if not prompt:
        raise BadRowError("there is no question in it")
    kept = {key: value for key, value in row.items() if key not in (*TURNS, ask, "completion")}
    return {**kept, "prompt": prompt}
