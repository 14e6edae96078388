"""Chats: turns and tools, checked, and the template that makes them text.

A template prints what it is given: a number, a picture or a call without a name would train an
answer that nobody wrote, so each part has the type that its place asks for.
What is trained on of it is the affair of `finetune.data.masks`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from finetune.errors import DataError
from finetune.storage.pretrained import TEMPLATE_ERRORS

SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function": "tool",
}  # fmt: skip
FLAGS = ("weight", "train", "loss")
"""Keys of a turn that say if it is trained on, with 0 and 1 or a truth value."""
TEXTS = ("name", "thinking", "reasoning_content", "reasoning")
"""Keys of a turn that are text where they are there."""
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of parts of a content that are pictures."""


@dataclass(frozen=True)
class Takes:
    """What a template takes, found by rendering (`probe`).

    Attributes:
        null: what stands for the content of a turn that has none.
        as_text: the arguments of a call are JSON in a text, as OpenAI has them, and no mapping.
        system: a system turn is taken, and printed.
    """

    null: dict[str, Any] = field(default_factory=dict)
    as_text: bool = False
    system: bool = True


class BadRowError(ValueError):
    """Row that cannot be converted, and what helps; `finetune.data.rows` adds its position."""

    def __init__(self, why: str, fix: str = "fix or remove that row") -> None:
        super().__init__(why)
        self.fix = fix


def turn_of(turn: Any, *, exact: bool = False) -> dict[str, Any]:
    """A turn with everything that it holds; content in parts of text becomes one text.

    Args:
        exact: keys that are None were given so, and not filled in by a column of one type.

    Raises:
        BadRowError: no turn, or a part of another type than its place asks for.
    """
    if not isinstance(turn, dict):
        raise BadRowError(f"a turn needs role and content, this one is {turn!r}")
    given = turn.get("role") or turn.get("from")
    role = SHAREGPT_ROLES.get(given, given) if isinstance(given, str) else given
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
    # Arrow fills keys that other rows have with None, which no template expects.
    rest = rest if exact else without_none(rest)
    if given == "function_call":  # LLaMA-Factory: JSON of a call, or of a list of calls
        content, calls = None, parsed(content, "function_call")
        calls = calls if isinstance(calls, list) else [calls]
        rest["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if rest.get("function_call"):  # OpenAI, before there were several calls of a turn
        rest["tool_calls"] = [{"type": "function", "function": rest.pop("function_call")}]
    content = _joined(content) if isinstance(content, list) else content
    if (
        not isinstance(role, str)
        or not role.strip()
        or not isinstance(content, str | None)
        or (content is None and not _holds(rest))
    ):
        raise BadRowError(f"a turn needs role and content, this one is {turn}")
    for key in TEXTS:
        if not isinstance(rest.get(key), str | None):
            raise BadRowError(f"{key!r} of a turn is {type(rest[key]).__name__}, and not text")
    if rest.get("tool_calls") is not None:
        rest["tool_calls"] = [_call(one) for one in _list(rest["tool_calls"], "tool_calls")]
    return {"role": role, "content": content, **rest}


def _holds(rest: dict[str, Any]) -> bool:
    """True of a turn with something besides its content, such as a call."""
    # Flags and a name say how a turn is trained on and who speaks, and are nothing to say.
    return any(rest[key] for key in rest if key not in (*FLAGS, "name"))


def _joined(parts: list[Any]) -> str:
    """Text of a content in parts of text: images are marks in it by now, where they are read."""
    for part in parts:
        if is_image(part):
            raise BadRowError(
                "it has an image, and the model or its training method reads text alone: without "
                "its image an answer about it would be a guess",
                "a model that reads images, or rows of text",
            )
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise BadRowError(f"a part of the content is no text: {str(part)[:200]}")
    return "".join(part["text"] if isinstance(part, dict) else part for part in parts)


def is_image(part: Any) -> bool:
    """True of a part of a content that is a picture, and of no turn."""
    if not isinstance(part, dict) or part.get("content") or part.get("value"):
        return False
    kind = part.get("type")
    return kind in IMAGE_PARTS or (kind is None and any(map(part.get, IMAGE_PARTS)))


def said(content: Any) -> str:
    """The text of a turn's content, which may be in parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRowError(f"{name!r} is {type(value).__name__}, and no list")
    return value


def _call(call: Any) -> dict[str, Any]:
    """A call of a tool: a name, and arguments as an object or as JSON of one."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not _is_name(inner.get("name")):
        raise BadRowError(f"a tool call needs the name of its function, this one is {call!r}")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise BadRowError(f"the arguments of a tool call are no JSON: {arguments!r}") from None
    # Templates print arguments as JSON: a list or a number would train a call that no server takes.
    if not isinstance(arguments, dict | None):
        raise BadRowError(f"the arguments of a tool call are no object: {arguments!r}")
    return call


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip())


def check_answer(turn: dict[str, Any]) -> None:
    """Raise `BadRowError` for an answer with blank content, without a call or reasoning."""
    if not (turn["content"] or "").strip() and not _holds(turn | {"role": "", "content": ""}):
        raise BadRowError("the content of an answer is empty")


def plain(turn: dict[str, Any], takes: Takes) -> dict[str, Any]:
    """A turn without flags; null content, and the arguments of calls, as the template takes them.

    A template that writes arguments as JSON makes a text of a text:
    `"parameters": "{\\"city\\": ...}"`.
    """
    found = {key: value for key, value in turn.items() if key not in FLAGS}
    if found.get("tool_calls"):
        found["tool_calls"] = [_with_arguments(call, takes.as_text) for call in found["tool_calls"]]
    if found["content"] is None:
        del found["content"]
        return {"role": found.pop("role"), **takes.null, **found}
    return found


def _with_arguments(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    inner = call.get("function", call)
    given = inner.get("arguments")
    if given is None or isinstance(given, str) == as_text:
        return call
    made = json.dumps(given, ensure_ascii=False) if as_text else json.loads(given.strip() or "{}")
    inner = {**inner, "arguments": made}
    return {**call, "function": inner} if "function" in call else inner


def with_system(turns: list[dict[str, Any]], text: Any) -> list[dict[str, Any]]:
    """Turns behind the text of a column for the system's, unless they have their own."""
    # A conversation's own system turn is nearer to it than a column of the file.
    if not isinstance(text, str) or not text.strip() or turns[0]["role"] == "system":
        return turns
    return [{"role": "system", "content": text}, *turns]


def without_system(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns with the system's text before the first question, as Gemma's own template has it."""
    if len(turns) < 2 or (turns[0]["role"], turns[1]["role"]) != ("system", "user"):
        return turns
    system, asked = (turn["content"] or "" for turn in turns[:2])
    if isinstance(asked, list):  # with images
        content: Any = [*as_content(system, True), *as_content("\n\n", True), *asked]
    else:
        content = f"{system}\n\n{asked}"
    return [{**turns[1], "content": content}, *turns[2:]]


def is_trained(turn: dict[str, Any]) -> bool:
    """True unless a flag of the turn is 0 or false; `BadRowError` for a weight between."""
    given = {key: turn[key] for key in FLAGS if turn.get(key) is not None}
    for key, value in given.items():
        # A weight between would have to scale a loss that TRL (1.16) takes as a mean over tokens.
        if value not in (0, 1):
            raise BadRowError(f"{key}={value!r} on a turn: only 0 and 1 can be honored")
    return all(given.values())


def beside(row: dict[str, Any]) -> dict[str, Any]:
    """Columns beside the turns that a template takes: tools, and arguments of its own.

    Raises:
        BadRowError: they are none.
    """
    found: dict[str, Any] = {}
    if "tools" in row:
        tools = without_none(parsed(row["tools"], "tools"))
        found["tools"] = [_tool(tool) for tool in _list(tools or [], "tools")]
    if "chat_template_kwargs" in row:
        found["chat_template_kwargs"] = without_none(row["chat_template_kwargs"] or {})
        if not isinstance(found["chat_template_kwargs"], dict):
            raise BadRowError("'chat_template_kwargs' is no mapping of names to values")
    return found


def parsed(text: Any, name: str) -> Any:
    """Turns or tools, or one of these, that a set stores as text, as a CSV does."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{name!r} is not JSON: {error}") from None


def from_cell(value: Any, name: str) -> Any:
    """A list or a mapping that is JSON in a cell, as CSV and some Parquet files have them."""
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    return parsed(value, name) if is_json else value


def _tool(given: Any) -> dict[str, Any]:
    tool = parsed(given, "tools")
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not _is_name(inner.get("name")):
        raise BadRowError(f"'tools' is no list of tools: {given!r} has no name of a function")
    return tool


def without_none(value: Any) -> Any:
    """Without keys that only other rows have: a column of one type fills them with None."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------- templates

SILENT = ("name", "thinking", "reasoning_content", "reasoning", "tool_call_id")
"""Keys of a turn that a template may leave out without making the turn another one."""
TRIED = 2000
"""Rows in which keys are looked for that a template may leave out."""
FAILED = "\0"
"""Begins what stands for a conversation that cannot be rendered."""
PROBED = {"of": "a probe"}


def refusal(row: dict[str, Any], tokenizer: Any) -> str:
    """Reason why the template takes no such conversation; empty where it does."""
    text = rendered(turns_of(row), row.get("tools") or [], tokenizer)
    return text.removeprefix(FAILED) if text.startswith(FAILED) else ""


def turns_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a row of messages, or of a prompt and its answer, if it has one, in turns."""
    answers = (row.get(key) for key in ("completion", "chosen"))
    answer = next((one for one in answers if one and not isinstance(one, str)), ())
    return row.get("messages") or [*row["prompt"], *answer]


def probe(tokenizer: Any, *, in_parts: bool = False) -> Takes:
    """How a template takes calls, turns without content and a system turn, by rendering some.

    With `in_parts` contents are lists of parts, as rows with images have them.

    Some print None, some add it to a text, some test for it: null, no key and an empty text are
    tried in this order, with arguments as a mapping first. A system turn that is refused, or left
    out, is not taken.
    """
    ask = {"role": "user", "content": as_content("?", in_parts)}
    system = [{"role": "system", "content": as_content("probed system", in_parts)}, ask]
    taken = "probed system" in rendered(system, [], tokenizer)
    forms: tuple[dict[str, Any], ...] = ({"content": None}, {}, {"content": [] if in_parts else ""})
    plainly: dict[str, Any] = {}
    for arguments in (PROBED, json.dumps(PROBED)):
        call = {"type": "function", "function": {"name": "probed_call", "arguments": arguments}}
        for form in forms:
            turns = [ask, {"role": "assistant", **form, "tool_calls": [call]}]
            text = rendered(turns, [], tokenizer)
            # Signs of a template that prints Python's None, a dictionary's repr, or JSON in quotes
            # once more.
            if any(part in text for part in ("None", "{'of'", '\\"of', FAILED)):
                continue
            if "probed_call" in text:
                return Takes(form, isinstance(arguments, str), taken)
            plainly = plainly or form  # of a template that knows no calls, which is said later
    return Takes(plainly or forms[0], system=taken)


def as_content(text: Any, in_parts: bool) -> Any:
    """A text as the content of a turn; what is in parts already as it is."""
    return [{"type": "text", "text": text}] if in_parts and isinstance(text, str) else text


def unused_parts(rows: Iterable[Any], tokenizer: Any, source: str) -> list[str]:
    """Parts of turns that the template leaves out, each tried where it first occurs.

    A part is a key of a turn by its role, the last turn apart. An answer is the last one of its own
    row (`finetune.data.masks`). Calls behind the first of a turn are a part of their own.

    Raises:
        DataError: tools or tool calls are left out: a turn that calls one would be empty.
    """
    seen: set[Any] = set()
    notes: list[str] = []
    for index, row in enumerate(itertools.islice(rows, TRIED)):
        turns, tools = turns_of(row), row.get("tools") or []
        if why := refusal(row, tokenizer):
            raise DataError(
                f"the model's chat template refuses row {index + 1} of {source}",
                where=f"{source}: row {index + 1}",
                why=f"in its own words: {why}",
                fix="change that row, take a model whose template takes it, or skip and count such "
                "rows: data.on_bad_row=skip",
            )
        for part, changed, others in _without_parts(turns, tools):
            if part in seen:
                continue
            seen.add(part)
            key, role, when = part
            shown = turns[: len(changed)]
            # Used, if leaving it out changes the text.
            if rendered(shown, tools, tokenizer) != rendered(changed, others, tokenizer):
                continue
            if key in ("name", "tool_call_id"):  # templates without them lose no text
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
        # Some templates print an answer's reasoning at the end alone, so it is looked at where it
        # is last.
        shown = turns[: position + 1] if turn["role"] == "assistant" else turns
        when = "the last" if position == len(shown) - 1 else "an earlier"
        for key in turn:
            if key == "role" or not turn[key]:
                continue
            if key == "tool_calls" and isinstance(turn[key], list) and len(turn[key]) > 1:
                only = turn | {key: turn[key][:1]}
                yield (
                    (key, turn["role"], "calls behind the first of a turn"),
                    _with(shown, position, only),
                    tools,
                )
            if key == "content":
                other = turn | {key: "another text"} if isinstance(turn[key], str) else None
                bare = "a calling" if turn.get("tool_calls") else when
                if other is not None and turn[key].strip():
                    yield (key, turn["role"], bare), _with(shown, position, other), tools
                continue
            without = {k: v for k, v in turn.items() if k != key}
            label = when if key in SILENT else ""
            yield (key, turn["role"], label), _with(shown, position, without), tools


def _with(turns: list[Any], position: int, turn: dict[str, Any]) -> list[Any]:
    return [*turns[:position], turn, *turns[position + 1 :]]


def rendered(turns: list[Any], tools: list[Any], tokenizer: Any, **options: Any) -> str:
    """A conversation as text; what went wrong, if it cannot be rendered."""
    try:
        return tokenizer.apply_chat_template(turns, tools=tools or None, tokenize=False, **options)
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        return f"{FAILED}{type(error).__name__}: {error}"
