"""Rows of preference methods: what they become, which method they are for, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config.methods import METHODS
from finetune.config.schema import DataConfig
from finetune.data.dataset import load_data
from finetune.data.preferences import recognize
from finetune.errors import DataError
from finetune.storage.pretrained import TINY_LLAMA

ASK, GOOD, BAD = "What is 2 + 2?", "Four.", "Five."


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ASKED = [turn("user", ASK)]
PAIR = {"prompt": ASKED, "chosen": [turn("assistant", GOOD)], "rejected": [turn("assistant", BAD)]}
LABELED = {"prompt": ASKED, "completion": PAIR["chosen"], "label": True}
WHOLE = {key: [*ASKED, *PAIR[key]] for key in ("chosen", "rejected")}


@pytest.fixture
def read(tmp_path: Path):
    """A function that reads rows for a method: the first one as it is trained on, and notes."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_LLAMA)

    def load(method: str, *rows: dict[str, Any], plain: bool = False, **data: Any) -> Any:
        file = tmp_path / "mine.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig(path=str(file), eval_fraction=0, **data)
        tokenizer.chat_template = None if plain else tokenizer.chat_template
        return load_data(config, tokenizer, 0, method=METHODS[method])

    return load


@pytest.mark.parametrize(
    ("method", "row", "becomes"),
    [
        ("dpo", {"prompt": ASK, "chosen": GOOD, "rejected": BAD}, PAIR),
        ("orpo", {"instruction": ASK, "chosen": GOOD, "rejected": BAD}, PAIR),
        ("reward", WHOLE, PAIR),
        ("dpo", {"prompt": ASK, **WHOLE}, PAIR),
        ("kto", PAIR, PAIR),
        ("kto", {"question": ASK, "answer": GOOD, "label": True}, LABELED),
        ("kto", {"messages": WHOLE["chosen"], "kto_tag": "true"}, LABELED),
        ("kto", {"prompt": ASK, "completion": GOOD, "label": 1}, LABELED),
        ("grpo", {"messages": WHOLE["chosen"], "answer": "4"}, {"prompt": ASKED, "answer": "4"}),
        ("grpo", {"question": ASK, "answer": "4"}, {"prompt": ASKED, "answer": "4"}),
        ("continue", {"text": GOOD, "url": "a"}, {"text": GOOD}),
        ("grpo", {"prompt": ASK, "chosen": GOOD}, {"prompt": ASKED, "chosen": GOOD}),
    ],
)
def test_rows_become_what_trl_reads(read, method, row, becomes):
    assert [*read(method, row).train] == [becomes]


def test_a_common_beginning_of_two_texts_is_their_prompt(read):
    found = read("dpo", {"chosen": f"{ASK} {GOOD}", "rejected": f"{ASK} {BAD}"}, plain=True)
    assert [*found.train] == [{"prompt": f"{ASK} F", "chosen": "our.", "rejected": "ive."}]


@pytest.mark.parametrize(
    ("method", "row", "fits"),
    [
        ("dpo", {"prompt": ASK, "completion": GOOD}, "sft, grpo, rloo, distill"),
        ("kto", {"text": GOOD}, "sft, continue"),
        ("reward", LABELED, "sft, kto, grpo, rloo, distill"),
        ("continue", PAIR, "sft, dpo, kto, orpo, reward, grpo, rloo, distill"),
        ("grpo", {"text": GOOD}, "sft, continue"),
    ],
)
def test_rows_for_another_method_are_refused_with_what_they_fit(read, method, row, fits):
    with pytest.raises(DataError) as refused:
        read(method, row)
    assert METHODS[method].needs in refused.value.why
    assert all(name in refused.value.why for name in row)
    assert f"train.method={fits};" in refused.value.fix
    assert {read(name, row).train.num_rows for name in fits.split(", ")} == {1}, "they read them"


@pytest.mark.parametrize(
    ("method", "columns"), [("grpo", "{prompt: NAME}"), ("continue", "{text: NAME}")]
)
def test_the_columns_to_name_are_those_that_the_method_reads(read, method, columns):
    with pytest.raises(DataError) as refused:
        read(method, {"left": ASK, "right": GOOD})
    assert refused.value.fix == f"name the columns, as in 'data.columns={columns}'"


@pytest.mark.parametrize(
    ("method", "row", "why"),
    [
        ("kto", {**LABELED, "label": "maybe"}, "its label is 'maybe'"),
        ("dpo", {**WHOLE, "rejected": [turn("user", "Why?"), *PAIR["rejected"]]}, "different"),
        ("dpo", {"prompt": ASK, "chosen": GOOD, "rejected": " "}, "'rejected' is empty"),
        ("dpo", {"prompt": ASK, "chosen": GOOD, "rejected": GOOD}, "are the same"),
        ("reward", {**WHOLE, "rejected": WHOLE["chosen"]}, "are the same"),
        ("dpo", {"prompt": ASK, "chosen": PAIR["chosen"], "rejected": BAD}, "both as text"),
        ("reward", {"chosen": WHOLE["chosen"], "rejected": BAD}, "'rejected' is text"),
        ("grpo", {"messages": [turn("assistant", GOOD)]}, "no question"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_refused_or_skipped(read, method, row, why):
    good = PAIR if method == "dpo" else LABELED
    with pytest.raises(DataError, match=r"row 1 of .* cannot be trained on") as refused:
        read(method, row)
    assert why in refused.value.why
    if set(good) == set(row):
        assert read(method, good, row, on_bad_row="skip").refused == 1


@pytest.mark.parametrize(
    ("recipe", "row", "titles"),
    [
        ("tiny_dpo_bf16", PAIR, {"chosen": f"[[{GOOD}", "rejected": f"[[{BAD}"}),
        ("tiny_orpo_bf16", PAIR, {"chosen": f"[[{GOOD}", "rejected": f"[[{BAD}"}),
        ("tiny_reward_bf16", PAIR, {"chosen": GOOD, "rejected": BAD}),
        ("tiny_kto_bf16", LABELED, {"label true": f"[[{GOOD}"}),
        ("tiny_kto_bf16", LABELED, {"label false": f"[[{GOOD}"}),
        ("tiny_grpo_bf16", {"prompt": ASKED, "solution": "4"}, {"prompt": "solution='4'"}),
    ],
)
def test_data_shows_each_answer_of_a_row_and_what_is_trained_on(recipe, row, titles, cli) -> None:
    other = {**row, **({"label": False} if "label" in row else {})}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n" * 6)
    found = cli("data", recipe, "data.path=rows.jsonl", "--show", 9)
    assert found.code == 0, found.err
    parts = found.out.split("\nrow ")[1:]
    for title, text in titles.items():
        own = [part for part in parts if f", {title}, " in part.partition("\n")[0]]
        assert all(ASK in part and text in part for part in own)
        assert len(own) == 9 if "label" not in title else 0 < len(own) < 9
    assert [int(part.partition(",")[0]) for part in parts] == sorted([*range(1, 10)] * len(titles))


def test_rows_with_images_are_sent_to_methods_that_read_them_alone():
    columns, kto = {"messages", "images"}, METHODS["kto"]
    with pytest.raises(DataError) as error:
        recognize(columns, kto, None, "rows")
    named = error.value.fix.partition("train.method=")[2].partition(";")[0].split(", ")
    assert named == [name for name in named if METHODS[name].images]
    assert {"sft", "grpo"} <= {*named}
