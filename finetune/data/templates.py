"""Chat templates: the one that formats training rows, and what it leaves out of them.

TRL trains messages with the tokenizer's template where that marks the assistant's parts
(`{% generation %}`), and else with a marked copy of its own, if it knows the template
(`trl.chat_template_utils`, TRL 1.16). Rows are checked against the one that is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError

from finetune.errors import DataError
from finetune.storage.pretrained import TEMPLATE_ERRORS

SILENT = ("name", "thinking", "reasoning_content", "reasoning", "tool_call_id")
"""Keys of a turn that a template may leave out without making the turn another one."""
TRIED = 2000
"""Rows in which keys are looked for that a template may leave out."""
FAILED = "\0"
"""Begins what stands for a conversation that cannot be rendered."""
CALL = {"type": "function", "function": {"name": "probed_call", "arguments": {"of": "a probe"}}}


def training_template(tokenizer: Any) -> str | None:
    """Template that messages are trained with; None if nothing marks the assistant's parts."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    given = tokenizer.chat_template
    given = given.get("default") if isinstance(given, dict) else given
    if has_generation_markers(tokenizer.chat_template):
        return given
    try:
        return get_training_chat_template(tokenizer)
    except (TemplateError, *TEMPLATE_ERRORS):  # TRL does not know this template
        return None


def refusal(row: dict[str, Any], tokenizer: Any, template: str | None) -> str:
    """Reason why the template takes no such conversation; empty where it does."""
    turns = row.get("messages") or [*row["prompt"], *row["completion"]]
    text = _rendered(turns, row.get("tools") or [], tokenizer, template)
    return text.removeprefix(FAILED) if text.startswith(FAILED) else ""


def null_content(tokenizer: Any) -> dict[str, Any]:
    """Form in which a template takes a turn without content, beside its tool calls.

    Some print None, some add it to a text, some test for it: null, no key and an empty text are
    tried in this order.
    """
    forms: tuple[dict[str, Any], ...] = ({"content": None}, {}, {"content": ""})
    for form in forms:
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", **form, "tool_calls": [CALL]},
        ]
        text = _rendered(turns, [], tokenizer, training_template(tokenizer))
        if "probed_call" in text and "None" not in text:
            return form
    return forms[0]


def unused_parts(rows: Iterable[Any], tokenizer: Any, source: str) -> list[str]:
    """Parts of turns that the template leaves out, each tried where it first occurs.

    A part is a key of a turn by its role, the last turn apart: some templates leave the reasoning
    out of earlier ones. Calls behind the first of a turn are a part of their own.

    Raises:
        DataError: tools or tool calls are left out: a turn that calls one would be empty.
    """
    template = training_template(tokenizer)
    seen: set[Any] = set()
    notes: list[str] = []
    for index, row in enumerate(itertools.islice(rows, TRIED)):
        turns, tools = row["messages"], row.get("tools") or []
        for part, changed, others in _without_parts(turns, tools):
            if part in seen:
                continue
            seen.add(part)
            key, role, when = part
            if _rendered(turns, tools, tokenizer, template) != _rendered(
                changed, others, tokenizer, template
            ):
                continue
            if key in SILENT or key == "content":
                note = f"the chat template does not use {key!r} of {when} turn of {role!r}"
                notes += [note] if note not in notes else []
                continue
            raise DataError(
                f"the model's chat template does not use {key!r}" + f" ({when})" * bool(when),
                where=f"{source}: row {index + 1}",
                why="it would be left out in silence, and a turn that consists of it would train "
                "an empty answer",
                fix="take a model whose template knows it, put a chat_template.jinja beside the "
                "tokenizer, or remove the key from the rows",
            )
    return notes


def _without_parts(
    turns: list[dict[str, Any]], tools: list[Any]
) -> Iterator[tuple[tuple[str, str, str], list[dict[str, Any]], list[Any]]]:
    """(key, role and which turn; the turns without it; the tools)."""
    if tools:
        yield ("tools", "", ""), turns, []
    for position, turn in enumerate(turns):
        when = "the last" if position == len(turns) - 1 else "an earlier"
        for key in turn:
            if key == "role" or not turn[key]:
                continue
            if key == "tool_calls" and isinstance(turn[key], list) and len(turn[key]) > 1:
                only = turn | {key: turn[key][:1]}
                yield (
                    (key, turn["role"], "calls behind the first of a turn"),
                    _with(turns, position, only),
                    tools,
                )
            if key == "content":
                other = turn | {key: "another text"} if isinstance(turn[key], str) else None
                bare = "a calling" if turn.get("tool_calls") else when
                if other is not None and turn[key].strip():
                    yield (key, turn["role"], bare), _with(turns, position, other), tools
                continue
            without = {k: v for k, v in turn.items() if k != key}
            label = when if key in SILENT else ""
            yield (key, turn["role"], label), _with(turns, position, without), tools


def _with(turns: list[Any], position: int, turn: dict[str, Any]) -> list[Any]:
    return [*turns[:position], turn, *turns[position + 1 :]]


def _rendered(turns: list[Any], tools: list[Any], tokenizer: Any, template: str | None) -> str:
    """A conversation as text; what went wrong, if it cannot be rendered."""
    try:
        return tokenizer.apply_chat_template(
            turns, tools=tools or None, chat_template=template, tokenize=False
        )
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        return f"{FAILED}{type(error).__name__}: {error}"
