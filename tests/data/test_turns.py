"""Turns: each part has the type that its place asks for."""

from __future__ import annotations

import pytest

from finetune.data.chat import BadRowError, beside, check_answer, turn_of

PARTS = [
    3, 0.5, True, {}, {"text": "x"}, [3], [[]], [None], [{}], [{"type": "text"}],
    [{"type": "text", "text": 3}], [{"type": "image", "image": "x.png"}], [{"type": "nothing"}],
]  # fmt: skip
CALLS = [
    "f", 3, {}, [3], ["f"], [None], [[]], [{}], [{"function": 3}], [{"function": {}}],
    [{"function": {"name": None, "arguments": {}}}], [{"function": {"name": 3, "arguments": {}}}],
    [{"function": {"name": "f", "arguments": "no JSON"}}], [{"type": "function"}],
    [{"function": {"name": "f", "arguments": [1]}}],
]  # fmt: skip
TOOLS = [
    3, "f", "{", "[3]", [None], [3], [[]], [{}], ["f"], [{"type": "function"}], [{"function": {}}],
    [{"type": "function", "function": 3}], [{"function": {"name": 3}}],
]  # fmt: skip


@pytest.mark.parametrize("content", PARTS)
def test_a_content_that_is_no_text_is_refused(content) -> None:
    with pytest.raises(BadRowError, match=r"needs role and content|is no text|has an image"):
        turn_of({"role": "user", "content": content})


def test_parts_of_text_become_one_text() -> None:
    parts = ["High ", {"type": "text", "text": "water"}, {"text": "."}]
    assert turn_of({"role": "assistant", "content": parts})["content"] == "High water."


@pytest.mark.parametrize("calls", CALLS)
def test_a_call_without_a_name_or_an_object_is_refused(calls) -> None:
    with pytest.raises(BadRowError, match=r"tool call|tool_calls"):
        turn_of({"role": "assistant", "content": "a", "tool_calls": calls})


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "arguments": {}},
        {"function": {"name": "f", "arguments": '{"a": 1}'}},
        {"type": "function", "id": "1", "function": {"name": "f"}},
    ],
)
def test_calls_in_use_stay_as_they_are(call) -> None:
    assert turn_of({"role": "assistant", "tool_calls": [call]})["tool_calls"] == [call]


@pytest.mark.parametrize("tools", TOOLS)
def test_tools_without_a_name_are_refused(tools) -> None:
    with pytest.raises(BadRowError, match="'tools' is"):
        beside({"tools": tools})


def test_tools_stored_as_text_are_read() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    text = '{"type": "function", "function": {"name": "f"}}'
    assert beside({"tools": f"[{text}]"})["tools"] == beside({"tools": [text]})["tools"] == [tool]


@pytest.mark.parametrize("more", [{}, {"name": "a"}, {"weight": 1}, {"thinking": ""}])
def test_an_empty_answer_is_refused(more) -> None:
    with pytest.raises(BadRowError, match="the content of an answer is empty"):
        check_answer({"role": "assistant", "content": " ", **more})
    check_answer({"role": "assistant", "content": " ", "thinking": "x", **more} | {"thinking": "x"})
