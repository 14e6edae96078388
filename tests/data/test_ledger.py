"""Every row and token accounted for: what is trained on, cut, dropped, skipped or refused."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTConfig

from finetune.config.paths import TINY_LLAMA
from finetune.config.sections import DataConfig
from finetune.data.checks import UNKNOWN
from finetune.data.dataset import load_data
from finetune.data.ledger import MASKED, account
from finetune.data.preparing import AccountedTrainer
from finetune.errors import DataError
from finetune.training.trl_trainer import ByLength

TOOLS_TEMPLATE = (
    "{% if tools %}T:{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}C:{{ c | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
"""A chat template that knows tools, calls and null content."""
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
OTHER = {"type": "function", "function": {"name": "wind", "arguments": {"hour": 3, "unit": None}}}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def with_tools():
    found = AutoTokenizer.from_pretrained(TINY_LLAMA)
    found.chat_template = TOOLS_TEMPLATE
    return found


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(rows, tokenizer, name="rows.jsonl", vocabulary=UNKNOWN, **settings):
        text = rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows))
        (tmp_path / name).write_text(text, encoding="utf-8")
        config = DataConfig(path=str(tmp_path / name), eval_fraction=0.0, **settings)
        return load_data(config, tokenizer, seed=0, vocabulary=vocabulary)

    return run


@pytest.fixture
def prepare(make_llama, tmp_path):
    """A function from rows to the prepared ones and their ledger, without training."""

    def run(rows, tokenizer, **settings):
        args = SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[],
            **rows.settings | settings,
        )  # fmt: skip
        model = make_llama(vocab_size=len(tokenizer))
        trainer = AccountedTrainer(
            model=model, args=args, train_dataset=rows.train, processing_class=tokenizer
        )
        return trainer.train_dataset, trainer.ledgers["train"]

    return run


def turns(question: str, **answer) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}]}


# ------------------------------------------------------------------------------------------ turns


def test_turns_reach_the_template_whole(load, with_tools) -> None:
    """Calls, tools, null content; arguments have exactly the keys of their row."""
    rows = [
        turns("Tide?", content=None, tool_calls=[CALL]) | {"tools": [TOOL]},
        turns("Wind?", content="", tool_calls=[OTHER]),
        turns("Hi", content="Hello"),
    ]
    found = load(rows, with_tools).train
    for row, given_row in zip(found, rows, strict=True):
        text = with_tools.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False
        )
        plain = with_tools.apply_chat_template(
            given_row["messages"], tools=given_row.get("tools"), tokenize=False
        )
        assert text == plain
    assert "Brest" in with_tools.apply_chat_template(found[0]["messages"], tokenize=False)


def test_calls_are_trained_on(load, prepare, with_tools) -> None:
    rows = load([turns("Tide?", content=None, tool_calls=[CALL]) | {"tools": [TOOL]}], with_tools)
    (row,), ledger = prepare(rows, with_tools)
    trained = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0]
    assert with_tools.decode(trained) == f"C:{json.dumps(CALL)}<|im_end|>"
    assert ledger.stops == 1


@pytest.mark.parametrize(("key", "value"), [("tool_calls", [CALL]), ("tools", [TOOL])])
def test_a_template_that_knows_no_tools_is_refused(load, tokenizer, key, value) -> None:
    row = turns("Tide?", content="" if key == "tool_calls" else "High.")
    (row["messages"][1] if key == "tool_calls" else row)[key] = value
    pair = {"prompt": row["messages"][:1], "completion": row["messages"][1:]}
    pair |= {"tools": value} if key == "tools" else {}
    for one in (row, pair):
        with pytest.raises(DataError, match=rf"does not use '{key}'\n[\s\S]*row 1[\s\S]*empty"):
            load([one], tokenizer)


def test_reasoning_that_a_template_drops_is_said(load, tokenizer) -> None:
    rows = load([turns("Tide?", content="High.", thinking="The moon is full.")], tokenizer)
    assert rows.notes == (
        "the chat template does not use 'thinking' of the last turn of 'assistant'",
    )


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_turn_that_asks_not_to_be_trained_on_is_not(load, prepare, tokenizer, key) -> None:
    first = turns("Tide?", content="High.", **{key: 0})["messages"]
    row = {"messages": first + turns("Wind?", content="West.", **{key: True})["messages"]}
    rows = load([row, turns("Hi", content="Ahoy.")], tokenizer)
    done, ledger = prepare(rows, tokenizer)
    trained = [[x for x in one["labels"] if x != MASKED] for one in done]
    assert [tokenizer.decode(ids).strip() for ids in trained] == [
        "West.<|im_end|>", "Ahoy.<|im_end|>"
    ]  # fmt: skip
    assert ledger.trained == sum(map(len, trained))
    with pytest.raises(DataError, match=f"{key}=0.5 on a turn: only 0 and 1"):
        load([turns("Tide?", content="High.", **{key: 0.5})], tokenizer)
    with pytest.raises(DataError, match="no assistant turn is to be trained on"):
        load([turns("Tide?", content="High.", **{key: 0})], tokenizer)


# ---------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"instruction": "Sum", "context": "1 2", "response": "3"}, "Sum\n\n1 2", "3"),
        ({"question": "Why?", "response": "So."}, "Why?", "So."),
        ({"query": "Why?", "answer": "So."}, "Why?", "So."),
        ({"input": "Why?", "output": "So."}, "Why?", "So."),
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "Why?", "So."),
        ({"chosen": turns("Why?", content="So.")["messages"], "rejected": []}, "Why?", "So."),
    ],
)
def test_further_columns(load, tokenizer, row, question, answer) -> None:
    (found,) = load([row], tokenizer).train
    assert found["prompt"][0]["content"] == question
    assert found["completion"][0]["content"] == answer


def test_columns_by_name(load, tokenizer) -> None:
    names = {"prompt": "ask", "completion": "reply"}
    rows = load([{"ask": "Why?", "reply": "So.", "prompt": "old"}], tokenizer, columns=names)
    assert rows.train[0]["prompt"][0]["content"] == "Why?"
    with pytest.raises(DataError, match=r"no column 'aks'; did you mean 'ask'\?"):
        load([{"ask": "Why?", "reply": "So."}], tokenizer, columns={"prompt": "aks"})


def test_tokenized_rows_stay_as_they_are(load, prepare, tokenizer) -> None:
    rows = load([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}], tokenizer)
    (row,), ledger = prepare(rows, tokenizer)
    assert (row["input_ids"], row["labels"]) == ([5, 6, 7], [-100, 6, 7])
    assert (ledger.tokens, ledger.trained) == (3, 2)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_ids": [1, 512]}, "512 is no token id: the model has 512 tokens"),
        ({"input_ids": [1, -1]}, "-1 is no token id: ids are whole numbers from 0"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 token ids"),
        ({"input_ids": [1, 2], "labels": [-5, 2]}, "-5 is no label: ids .*, and -100 masks one"),
        ({"input_ids": [1, 2], "labels": [1, 900]}, "900 is no label: the model has 512 tokens"),
        ({"input_ids": [], "labels": []}, "'input_ids' is empty"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_ids_that_a_model_does_not_have_are_refused_by_row(
    load, tokenizer, row, why, streaming
) -> None:
    good = {"input_ids": [5, 511], "labels": [-100, 511]}
    rows = [{key: good[key] for key in row}] * 2 + [row]
    more = {"streaming": True, "shuffle_buffer": 1} if streaming else {}
    with pytest.raises(DataError, match=rf"row 3 of .*rows.jsonl[\s\S]*why: +{why}"):
        load(rows, tokenizer, vocabulary=512, **more)
    found = load(rows, tokenizer, vocabulary=512, on_bad_row="skip", **more)
    assert (found.refused, len(found.sample if streaming else found.train)) == (1, 2)


def test_a_stream_of_ids_is_checked_where_it_is_read(load, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("finetune.data.dataset.SAMPLE", 2)
    rows = [{"input_ids": [1]}] * 3 + [{"input_ids": [600]}]
    settings = {"streaming": True, "shuffle_buffer": 1, "vocabulary": 512}
    with pytest.raises(DataError, match=r"row 4 of [\s\S]*600 is no token id"):
        list(itertools.islice(load(rows, tokenizer, **settings).train, 5))
    skipped = load(rows, tokenizer, on_bad_row="skip", **settings).train
    assert [row["input_ids"] for row in itertools.islice(skipped, 4)] == [[1]] * 4


def test_a_cell_too_many_is_refused(load, tokenizer) -> None:
    text = "prompt,completion\nWhy?,So.\nWhy?,So,indeed.\n"
    with pytest.raises(DataError, match=r"rows.csv:3\n.*row of 3 cells under 2 columns"):
        load(text, tokenizer, "rows.csv")


def test_bad_rows_are_skipped_where_asked(load, tokenizer) -> None:
    rows = [turns("Why?", content="So."), {"messages": [{"role": "user", "content": "?"}]}] * 2
    found = load(rows, tokenizer, on_bad_row="skip")
    assert (len(found.train), found.refused) == (2, 2)
    assert found.notes == (
        "2 rows are skipped; the first: row 2: no assistant turn, so there is nothing to learn",
    )
    with pytest.raises(DataError, match=r"no row of .* can be trained on"):
        load(rows[1:2], tokenizer, on_bad_row="skip")


# ----------------------------------------------------------------------------------------- ledger


KEEP_END = pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode:FutureWarning")


@KEEP_END
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_dropped_and_cut_rows_are_counted_as_trl_does(load, prepare, tokenizer, mode) -> None:
    """Rows of rising length: the ledger says what TRL's own preparation left."""
    rows = load([turns("why " * n, content="so " * 4) for n in range(1, 60, 3)], tokenizer)
    done, ledger = prepare(rows, tokenizer, max_length=48, truncation_mode=mode)
    assert ledger.rows == 20
    assert ledger.rows - ledger.dropped == len(done)
    assert ledger.kept == sum(map(len, done["input_ids"]))
    assert ledger.trained == sum(label != MASKED for row in done["labels"] for label in row)
    assert (ledger.dropped > 0) == (mode == "keep_start")
    assert ledger.truncated > 0
    said = "\n".join(line for _, line in ledger.lines())
    assert (f"{ledger.dropped} of 20 rows" in said) == (mode == "keep_start")


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_tokens_add_up(load, prepare, tokenizer, strategy) -> None:
    rows = load([turns("why " * n, content="so " * n) for n in range(1, 40, 3)], tokenizer)
    done, ledger = prepare(rows, tokenizer, max_length=48, packing=True, packing_strategy=strategy)
    assert ledger.bins == len(done)
    assert ledger.kept == sum(map(len, done["input_ids"]))
    assert ledger.trained == sum(label != MASKED for row in done["labels"] for label in row)
    assert 0.3 < ledger.efficiency <= 1


def test_rows_that_are_all_too_long_are_an_error(load, prepare, tokenizer) -> None:
    rows = load([turns("why " * 90, content="so")] * 3, tokenizer)
    with pytest.raises(DataError, match=r"all 3 rows are cut[\s\S]*fix: +train.max_length=\d+"):
        prepare(rows, tokenizer, max_length=32)


ENDS_BY_3 = SimpleNamespace(all_special_ids=[3], added_tokens_decoder={}, decode=str)


def test_an_id_that_the_model_does_not_have_is_an_error() -> None:
    data = Dataset.from_dict({"input_ids": [[1], [9, 10]], "labels": [[1], [9, 10]]})
    args = SFTConfig(output_dir="runs", use_cpu=True, bf16=False)
    with pytest.raises(DataError, match="10 is no token id: the model has 10 tokens"):
        account(data, args, ENDS_BY_3, packing=False, vocabulary=10)


@KEEP_END
@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12), min_size=1,
        max_size=8,
    ),
    limit=st.sampled_from([None, 1, 4, 7]),
    mode=st.sampled_from(["keep_start", "keep_end"]),
)  # fmt: skip
def test_counts_equal_a_loop_over_rows(rows, limit, mode) -> None:
    ids = [[token for token, _ in row] for row in rows]
    labels = [[token if on else MASKED for token, on in row] for row in rows]
    args = SFTConfig(
        output_dir="runs", use_cpu=True, bf16=False, max_length=limit, truncation_mode=mode
    )
    data = Dataset.from_dict({"input_ids": ids, "labels": labels})
    found = account(data, args, ENDS_BY_3, packing=False, vocabulary=100)
    kept = [
        row if limit is None else (row[:limit] if mode == "keep_start" else row[-limit:])
        for row in labels
    ]
    trained = [[label for label in row if label != MASKED] for row in kept]
    assert found.rows == len(rows)
    assert found.dropped == sum(not row for row in trained)
    assert found.trained == sum(map(len, trained))
    assert found.kept == sum(len(a) for a, b in zip(kept, trained, strict=True) if b)
    assert found.stops == sum(row[-1] == 3 for row in trained if row)
    assert found.longest == max(map(len, ids))


def test_rows_by_length_come_in_another_order_each_epoch_and_again_in_the_same():
    def order(epoch: int) -> list[int]:
        like = LengthGroupedSampler(4, lengths=[1 + i % 7 for i in range(64)])
        sampler = ByLength(like, seed=3)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0) != order(1)
    assert sorted(order(1)) == list(range(64))
