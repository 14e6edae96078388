"""Turns of a conversation and the tools beside it, checked, in the form of chat templates.

A template prints what it is given: a number, a picture or a call without a name would train an
answer that nobody wrote, so each part has the type that its place asks for.
"""

from __future__ import annotations

import json
from typing import Any

SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool",
}  # fmt: skip
FLAGS = ("weight", "train", "loss")
"""Keys of a turn that say if it is trained on, with 0 and 1 or a truth value."""
TEXTS = ("name", "thinking", "reasoning_content", "reasoning")
"""Keys of a turn that are text where they are there."""
TEXT_PARTS = ("text", "input_text", "output_text")

Null = dict[str, Any]
"""What a turn without content has for it, as its template takes it."""


class BadRowError(ValueError):
    """Row that cannot be converted; `finetune.data.rows` adds its position."""


def turn_of(turn: Any, *, exact: bool = False) -> dict[str, Any]:
    """A turn with everything that it holds; content in parts of text becomes one text.

    Args:
        exact: keys that are None were given so, and not filled in by a column of one type.

    Raises:
        BadRowError: no turn, or a part of another type than its place asks for.
    """
    if not isinstance(turn, dict):
        raise BadRowError(f"a turn needs role and content, this one is {turn!r}")
    role = turn.get("role") or turn.get("from")
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
    rest = rest if exact else without_none(rest)
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
    return any(rest[key] for key in rest if key not in (*FLAGS, "name"))


def _joined(parts: list[Any]) -> str:
    """Text of a content in parts, which not every template takes.

    Raises:
        BadRowError: a part is no text: pictures and sound are not trained on here.
    """
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise BadRowError(f"a part of the content is no text: {str(part)[:200]}")
    return "".join(part["text"] if isinstance(part, dict) else part for part in parts)


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
    if not isinstance(arguments, dict | None):
        raise BadRowError(f"the arguments of a tool call are no object: {arguments!r}")
    return call


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip())


def check_answer(turn: dict[str, Any]) -> None:
    """Refuse an answer that is trained on and says nothing.

    Raises:
        BadRowError: blank content, without a call or reasoning.
    """
    if not (turn["content"] or "").strip() and not _holds(turn | {"role": "", "content": ""}):
        raise BadRowError("the content of an answer is empty")


def plain(turn: dict[str, Any], null: Null) -> dict[str, Any]:
    """A turn without flags, and with null content as the template takes it."""
    found = {key: value for key, value in turn.items() if key not in FLAGS}
    if found["content"] is None:
        del found["content"]
        return {"role": found.pop("role"), **null, **found}
    return found


def is_trained(turn: dict[str, Any]) -> bool:
    """True unless a flag of the turn is 0 or false.

    Raises:
        BadRowError: a weight between, which no mask can express.
    """
    given = {key: turn[key] for key in FLAGS if turn.get(key) is not None}
    for key, value in given.items():
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
        tools = without_none(_parsed(row["tools"]))
        found["tools"] = [_tool(tool) for tool in _list(tools or [], "tools")]
    if "chat_template_kwargs" in row:
        found["chat_template_kwargs"] = without_none(row["chat_template_kwargs"] or {})
        if not isinstance(found["chat_template_kwargs"], dict):
            raise BadRowError("'chat_template_kwargs' is no mapping of names to values")
    return found


def _parsed(text: Any) -> Any:
    """Tools, or one of them, that a set stores as text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"'tools' is not JSON: {error}") from None


def _tool(given: Any) -> dict[str, Any]:
    tool = _parsed(given)
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(inner, dict) or not _is_name(inner.get("name")):
        raise BadRowError(f"'tools' is no list of tools: {given!r} has no name of a function")
    return tool


def without_none(value: Any) -> Any:
    """Without keys that only other rows have: a column of one type fills them with None."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value
