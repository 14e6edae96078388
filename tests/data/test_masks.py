"""Masks, token by token: what is trained on under the chat templates of five families."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trl
from transformers import AutoTokenizer
from trl import SFTConfig

from finetune.config.data import DataConfig
from finetune.config.paths import TINY_LLAMA
from finetune.data.dataset import load_data
from finetune.data.ledger import MASKED, count
from finetune.errors import DataError

MARKS = (
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
)
"""Special tokens of the families, which the packaged tokenizer does not have."""
FAMILIES = ("chatml", "llama3", "gemma", "qwen3", "gptoss")
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
TOOL = {"type": "function", "function": {
    "name": "tide", "description": "Tide of a port.",
    "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
}}  # fmt: skip


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [user("Tide?"), answer("High."), user("Wind?"), answer("West.")]
CALLS = [user("Tide?"), answer(None, tool_calls=[CALL]),
         {"role": "tool", "name": "tide", "content": "5 m"}, answer("High.")]  # fmt: skip


def end(family: str, text: str, *, last: bool, header: bool = True) -> str:
    """An answer as the family's template has it, with its stop token."""
    channel = "<|start|>assistant" * header + f"<|channel|>final<|message|>{text}"
    return {
        "chatml": f"{text}<|im_end|>" + "\n" * (not header),
        "llama3": f"{text}<|eot_id|>",
        "gemma": f"{text}<end_of_turn>\n",
        "qwen3": f"<think>\n\n</think>\n\n{text}<|im_end|>\n",
        "gptoss": channel + ("<|return|>" if last else "<|end|>"),
    }[family]


def with_thoughts(family: str) -> str:
    shown = "<|start|>assistant<|channel|>analysis<|message|>Moon.<|end|>"
    return {
        "qwen3": "<think>\nMoon.\n</think>\n\nHigh.<|im_end|>\n",
        "gptoss": shown + end("gptoss", "High.", last=True),
    }[family]


def call_of(family: str) -> str:
    arguments = '{"port": "Brest"}'
    return {
        "qwen3": "<think>\n\n</think>\n\n<tool_call>\n"
        f'{{"name": "tide", "arguments": {arguments}}}\n</tool_call><|im_end|>\n',
        "gptoss": "<|start|>assistant to=functions.tide<|channel|>commentary json<|message|>"
        f"{arguments}<|call|>",
    }[family]


@pytest.fixture(scope="module")
def tokenizers():
    """Tokenizers with the families' templates, as TRL keeps them (and as ours is: ChatML)."""
    found = {}
    for family in FAMILIES:
        tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
        tokenizer.bos_token = "<|im_start|>"
        if family != "chatml":
            file = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        found[family] = tokenizer
    return found


@pytest.fixture
def trained(tmp_path, monkeypatch, tokenizers):
    """A function from rows to the texts of each row that are trained on, and the ledger."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(family: str, *rows: dict, **settings):
        tokenizer, file = tokenizers[family], tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = DataConfig(path=str(file), eval_fraction=0.0, **settings)
        loaded = load_data(data, tokenizer, seed=0)
        args = SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **loaded.settings
        )
        found = count(loaded, args, tokenizer)
        return [list(_runs(tokenizer, row)) for row in found.prepared], found

    return run


def _runs(tokenizer, row):
    """Texts of the runs of tokens that are trained on, in their order."""
    run: list[int] = []
    for token, label in zip([*row["input_ids"], 0], [*row["labels"], MASKED], strict=True):
        assert label in (MASKED, token)
        if label != MASKED:
            run.append(token)
        elif run:
            yield tokenizer.decode(run)
            run = []


def _adds_up(found, rows: int) -> None:
    ledger, labels = found.ledger, [row["labels"] for row in found.prepared]
    assert (ledger.read, ledger.rows, ledger.dropped) == (rows, rows, 0)
    assert ledger.tokens == ledger.kept == sum(map(len, labels))
    assert ledger.trained == sum(label != MASKED for row in labels for label in row)
    assert ledger.stops == rows
    assert not any("stop token" in line for _, line in ledger.lines())


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_their_stop_tokens_are_trained_on(trained, family) -> None:
    """Two answers of one row, one turn of which is not to be trained on in the second row."""
    flagged = [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]
    texts, found = trained(family, {"messages": TURNS}, {"messages": flagged})
    first, last = end(family, "High.", last=False), end(family, "West.", last=True)
    assert texts == [[first, last], [last]]
    _adds_up(found, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_completion_of_a_prompt_is_trained_on(trained, family) -> None:
    rows = ({"prompt": "Tide?", "completion": "High."}, {"prompt": "Wind?", "completion": "West."})
    texts, found = trained(family, *rows)
    expected = [end(family, text, last=True, header=False) for text in ("High.", "West.")]
    assert [one for (one,) in texts] == expected
    _adds_up(found, 2)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma"])
def test_a_system_turn_is_not_trained_on(trained, family) -> None:
    texts, found = trained(family, {"messages": [SYSTEM, *TURNS[:2]]})
    assert texts == [[end(family, "High.", last=True)]]
    _adds_up(found, 1)


def test_a_template_that_refuses_system_turns_says_so_or_skips_them(trained) -> None:
    rows = {"messages": [SYSTEM, *TURNS[:2]]}, {"messages": TURNS}
    with pytest.raises(DataError, match="System role not supported"):
        trained("gemma", *rows)
    texts, found = trained("gemma", *rows, on_bad_row="skip")
    assert (len(texts), found.ledger.refused, found.ledger.read) == (1, 1, 2)


@pytest.mark.parametrize("family", ["qwen3", "gptoss"])
def test_calls_of_turns_without_content_are_trained_on(trained, family) -> None:
    """In rows of messages, and beside a prompt: a call is an answer, and a tool's result is not."""
    texts, found = trained(family, {"messages": CALLS, "tools": [TOOL]})
    assert texts == [[call_of(family), end(family, "High.", last=True)]]
    _adds_up(found, 1)
    pair = {"prompt": CALLS[:1], "completion": CALLS[1:2], "tools": [TOOL]}
    (texts,), found = trained(family, pair)
    assert call_of(family).endswith(texts[0])
    assert "Tide of a port." in found.tokenizer.decode(found.prepared[0]["input_ids"])


@pytest.mark.parametrize(
    ("family", "key"), [("qwen3", "reasoning_content"), ("gptoss", "thinking")]
)
def test_reasoning_is_trained_on(trained, family, key) -> None:
    texts, found = trained(family, {"messages": [user("Tide?"), answer("High.", **{key: "Moon."})]})
    assert texts == [[with_thoughts(family)]]
    assert found.rows.notes == ()
    _adds_up(found, 1)


def test_reasoning_of_earlier_turns_that_is_left_out_is_said(trained) -> None:
    turns = [TURNS[0], TURNS[1] | {"thinking": "Moon."}, *TURNS[2:]]
    _, found = trained("gptoss", {"messages": turns})
    assert "'thinking' of an earlier turn of 'assistant'" in found.rows.notes[0]


def test_calls_behind_the_first_of_a_turn_are_not_left_out_in_silence(trained) -> None:
    """gpt-oss has one call a turn; the second would be missing from the answer."""
    both = [CALLS[0], answer(None, tool_calls=[CALL, CALL | {"id": "2"}]), *CALLS[2:]]
    with pytest.raises(DataError, match="calls behind the first of a turn"):
        trained("gptoss", {"messages": both, "tools": [TOOL]})


def test_every_token_of_a_chat_trained_on_is_a_loud_warning(trained, tokenizers, monkeypatch):
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    monkeypatch.setattr(tokenizers["chatml"], "chat_template", plain)
    _, found = trained("chatml", {"messages": TURNS})
    assert (True, "100% of the tokens of chat rows are trained on: the user's turns too") in list(
        found.ledger.lines()
    )
