"""Shapes of rows under the chat templates of five families, and what is trained on in each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl
from transformers import AutoTokenizer
from trl import SFTConfig

from finetune.config.methods import METHODS
from finetune.config.paths import TINY_LLAMA
from finetune.config.sections import DataConfig
from finetune.data.checks import MASKED
from finetune.data.counting import CountedRows, count
from finetune.data.dataset import load_data

MARKS = (
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
)  # fmt: skip
"""Special tokens of the families, which the packaged tokenizer does not have."""
FAMILIES = ("chatml", "llama3", "gemma", "qwen3", "gptoss")
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
TOOL = {"type": "function", "function": {
    "name": "tide", "description": "Tide of a port.",
    "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
}}  # fmt: skip
THOUGHTS = {"qwen3": "reasoning_content", "gptoss": "thinking"}
"""Name that a family's template has for reasoning."""
TOOL_FAMILIES = tuple(THOUGHTS)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [user("Tide?"), answer("High."), user("Wind?"), answer("West.")]
CALLS = [user("Tide?"), answer(None, tool_calls=[CALL]),
         {"role": "tool", "name": "tide", "content": "5 m"}, answer("High.")]  # fmt: skip
PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "gh."}]


def end(family: str, text: str) -> str:
    """An answer as the family's template has it, with its stop token."""
    return {
        "chatml": f"{text}<|im_end|>",
        "llama3": f"{text}<|eot_id|>",
        "gemma": f"{text}<end_of_turn>\n",
        "qwen3": f"<think>\n\n</think>\n\n{text}<|im_end|>\n",
        "gptoss": f"<|channel|>final<|message|>{text}<|return|>",
    }[family]


def with_thoughts(family: str) -> str:
    shown = "<|channel|>analysis<|message|>Moon.<|end|><|start|>assistant"
    thought = "<think>\nMoon.\n</think>\n\nHigh.<|im_end|>\n"
    own = {"qwen3": thought, "gptoss": shown + end("gptoss", "High.")}
    return own.get(family, "") or end(family, "High.")


def call_of(family: str) -> str:
    arguments = '{"port": "Brest"}'
    return {
        "qwen3": "<think>\n\n</think>\n\n<tool_call>\n"
        f'{{"name": "tide", "arguments": {arguments}}}\n</tool_call><|im_end|>\n',
        "gptoss": f" to=functions.tide<|channel|>commentary json<|message|>{arguments}<|call|>",
    }[family]


# ---------------------------------------------------------------------------------------- shapes

LIMIT, LONG = 700, "why " * 500
"""`max_length`, and a question behind which no answer lies within it."""
Shape = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def pair(ask: str, reply: str, **more: Any) -> Shape:
    """A row of two columns of text, one that cannot be trained on, and one that is too long."""
    return (
        {ask: "Tide?", reply: "High.", **more}, {ask: "Tide?", reply: " ", **more},
        {ask: LONG, reply: "High.", **more},
    )  # fmt: skip


def turns(*good: dict[str, Any], **more: Any) -> Shape:
    long = [user(LONG), *good[1:]] if good[0]["role"] == "user" else [good[0], user(LONG), good[-1]]
    return {"messages": [*good], **more}, {"messages": [user("?")]}, {"messages": long, **more}


def of(family: str) -> dict[str, Shape]:
    """Every shape: a good row, a bad one and a long one."""
    thought = answer("High.", **{THOUGHTS.get(family, "thinking"): "Moon."})
    asked, replied = TURNS[:1], TURNS[1:2]
    sharegpt = [{"from": "human", "value": "Tide?"}, {"from": "gpt", "value": "High."}]
    return {
        "two answers": turns(*TURNS),
        "first answer not trained": turns(TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]),
        "ShareGPT": (
            {"conversations": sharegpt}, {"conversations": sharegpt[:1]},
            {"conversations": [{"from": "human", "value": LONG}, sharegpt[1]]},
        ),
        "system turn": turns(SYSTEM, *TURNS[:2]),
        "tools and calls": turns(*CALLS, tools=[TOOL]),
        "reasoning": turns(TURNS[0], thought),
        "content in parts": turns(TURNS[0], answer(None) | {"content": PARTS}),
        "prompt, completion": pair("prompt", "completion"),
        "Alpaca": pair("instruction", "output", input="Brest"),
        "question, answer": pair("question", "answer"),
        "prompt, completion in turns": (
            {"prompt": asked, "completion": replied}, {"prompt": asked, "completion": []},
            {"prompt": [user(LONG)], "completion": replied},
        ),
        "preference pair": (
            {"chosen": TURNS[:2], "rejected": [asked[0], answer("Low.")]},
            {"chosen": asked, "rejected": []}, {"chosen": [user(LONG), *replied], "rejected": []},
        ),
        "tokenized": (
            {"input_ids": [5, 6, 7], "labels": [MASKED, 6, 7]},
            {"input_ids": [5, 6], "labels": [5]},
            {"input_ids": [5] * 900, "labels": [MASKED] * 899 + [5]},
        ),
    }  # fmt: skip


SHAPES = tuple(of("chatml"))


def expected(family: str, shape: str) -> list[str] | str:
    """Texts that are trained on, or the reason why the family's template takes no such row."""
    if shape == "tools and calls":
        if family not in TOOL_FAMILIES:
            return "does not use 'tool|chat template refuses it"
        return [call_of(family), end(family, "High.")]
    return {
        "two answers": [end(family, "High."), end(family, "West.")],
        "first answer not trained": [end(family, "West.")],
        "reasoning": [with_thoughts(family)],
        "tokenized": ["".join(tokenizer_of(family).decode([6, 7]))],
    }.get(shape) or [end(family, "High.")]


# --------------------------------------------------------------------------------------- trained


_TOKENIZERS: dict[str, Any] = {}


def tokenizer_of(family: str) -> Any:
    """A tokenizer with a family's template, as TRL keeps it (and as ours is: ChatML)."""
    if family not in _TOKENIZERS:
        tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
        tokenizer.bos_token = "<|im_start|>"
        if family != "chatml":
            file = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        _TOKENIZERS[family] = tokenizer
    return _TOKENIZERS[family]


def counted(
    family: str, folder: Path, *rows: dict[str, Any], max_length: int = 1024, **settings: Any
) -> CountedRows:
    """Rows of a file, tokenized and counted under a family's template."""
    tokenizer, file = tokenizer_of(family), folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(path=str(file), eval_fraction=0.0, **settings)
    loaded = load_data(data, tokenizer, seed=0)
    args = SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], max_length=max_length,
        **loaded.settings,
    )  # fmt: skip
    return count(loaded, args, tokenizer, METHODS["sft"])


def trained_texts(tokenizer: Any, row: dict[str, Any]) -> Iterator[str]:
    """Texts of the runs of tokens that are trained on, in their order."""
    run: list[int] = []
    for token, label in zip([*row["input_ids"], 0], [*row["labels"], MASKED], strict=True):
        assert label in (MASKED, token)
        if label != MASKED:
            run.append(token)
        elif run:
            yield tokenizer.decode(run)
            run = []


def check_sums(found: CountedRows, read: int, refused: int = 0, dropped: int = 0) -> None:
    """read + split = refused + dropped + kept; tokens = cut + kept; trained as the labels say."""
    ledger, labels = found.ledger, [row["labels"] for row in found.prepared]
    assert (ledger.read, ledger.refused, ledger.dropped) == (read, refused, dropped)
    assert ledger.read + ledger.split == ledger.refused + ledger.dropped + len(labels)
    assert ledger.kept == ledger.tokens - ledger.cut == sum(map(len, labels))
    assert ledger.trained == sum(label != MASKED for row in labels for label in row)
