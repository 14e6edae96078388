"""Conversations that no chat template should be given, under one that knows tools and reasoning."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.bad_inputs.case import Case

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARTS: list[Any] = [
    3, 0.5, True, {}, {"text": "x"}, [], [3], [[]], [None], [{}], [{"type": "text"}],
    [{"type": "text", "text": 3}], [{"type": "image", "image": "x.png"}], [{"type": "nothing"}],
    [{"type": "text", "text": None}], ["a", {"type": "text", "text": "b"}],
]  # fmt: skip
"""Contents that are no text, but for the parts of `TEXT`."""
TEXT: tuple[Any, ...] = ([], PARTS[-1])
CALLS: list[Any] = [
    "f", 3, {}, [3], ["f"], [None], [[]], [{}], [{"function": 3}], [{"function": None}],
    [{"function": {}}], [{"function": {"name": None, "arguments": {}}}],
    [{"function": {"name": "f", "arguments": "no JSON"}}],
    [{"function": {"name": "f", "arguments": [1]}}], [{"function": {"name": "f"}}],
    [{"function": {"name": 3, "arguments": {}}}], [{"type": "function"}],
    [{"function": {"name": ["f"], "arguments": {}}}],
]  # fmt: skip
TOOLS: list[Any] = [
    3, "f", "{", "[3]", {"name": "f"}, [None], [3], [[]], [{}], ["f"], [{"type": "function"}],
    [{"type": "function", "function": 3}], [{"function": {}}], [{"function": {"name": 3}}],
    [{"type": "function", "function": {"parameters": {}}}],
]  # fmt: skip


@functools.cache
def _rows() -> list[dict[str, Any]]:
    def turns(*more: Any, **beside: Any) -> dict[str, Any]:
        return {"messages": list(more), **beside}

    return [
        *[turns({"role": "user", "content": part}, ANSWER) for part in PARTS if part not in TEXT],
        *[turns(USER, {"role": "assistant", "content": part}) for part in PARTS[:-1]],
        *[turns(USER, {"role": "assistant", "content": None, "tool_calls": x}) for x in CALLS],
        *[turns(USER, ANSWER, tools=tools) for tools in TOOLS],
        *[turns(USER, ANSWER | {"weight": x}) for x in ("x", [], 0.5, -1, 2, {}, "1")],
        *[turns(USER, ANSWER, chat_template_kwargs=x) for x in (3, "x", [1], [{}])],
        *[turns(USER, ANSWER | {"reasoning_content": x}) for x in (3, [1], {"a": 1})],
        *[turns(USER, {"role": role, "content": "b"}) for role in ("", " ", 3, None, ["a"], {})],
        *[turns(*some) for some in ((), (None,), (USER,), (ANSWER, USER, 3), ([USER, ANSWER],))],
        turns(USER, {"role": "assistant"}), turns(USER, {"role": "assistant", "content": ""}),
        turns(USER, {"role": "assistant", "content": "  "}), turns(USER, {"content": "b"}),
        turns(USER, {"role": "assistant", "content": None}), {"messages": {"role": "user"}},
        turns({"role": "tool", "content": "5"}), turns({"role": "system", "content": "x"}),
        {"messages": "user: a\nassistant: b"}, {"messages": None}, {"messages": [[USER], [ANSWER]]},
        {"conversations": [{"from": "alien", "value": "x"}]},
        {"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": None}]},
        {"prompt": [USER], "completion": "b"}, {"prompt": "a", "completion": [ANSWER]},
        {"prompt": [USER], "completion": [USER]}, {"prompt": [USER], "completion": []},
        {"prompt": [], "completion": [ANSWER]}, {"prompt": [3], "completion": [ANSWER]},
        {"prompt": [USER], "completion": [3]}, {"chosen": [USER]}, {"chosen": [ANSWER, 3]},
        {"chosen": 3, "rejected": 4}, {"prompt": [USER], "chosen": [USER, 3]},
    ]  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> Case:
    """A row of turns, the only one or behind a good one."""
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    row = draw(st.sampled_from(_rows()))
    rows = [{"messages": [USER, ANSWER]}] * draw(st.sampled_from([0, 0, 2])) + [row]
    streamed = draw(st.sampled_from([(), (), (), ("data.streaming=true",)]))
    verb = draw(st.sampled_from(["data", "data", "data", "run", "validate"]))
    return Case(
        "rows: turns",
        (verb, "tiny_full_bf16", "data.path=r.jsonl", "model.name=./m", "train.max_steps=2",
         *streamed),
        {"r.jsonl": "".join(json.dumps(x) + "\n" for x in rows).encode(),
         "m/chat_template.jinja": template.read_bytes()},
        {"m": "model"},
    )  # fmt: skip
