"""Rows: formats recognized, what they become, how they are split, and the errors of bad rows."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune import load_recipe, train
from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import DataConfig, ModelConfig
from finetune.data.counting import counted_rows
from finetune.data.dataset import load_data
from finetune.errors import DataError, DataNotFoundError, ModelNotFoundError
from finetune.storage.pretrained import load_tokenizer
from tests.data import shapes

pytestmark = pytest.mark.usefixtures("here")
ASK, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}
MESSAGES = {"messages": [ASK, ANSWER]}


def write(name: str, rows: list[dict]) -> str:
    """Save rows in the format that the file's suffix names."""
    if name.endswith(".jsonl"):
        Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    elif name.endswith(".json"):
        Path(name).write_text(json.dumps(rows), encoding="utf-8")
    elif name.endswith(".csv"):
        with Path(name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(name)
    return name


def write_text(name: str, text: str = "{}") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


@pytest.fixture
def load(tokenizer):
    """A function that loads rows, held out none unless asked."""

    def load_rows(path: str | None = None, *, seed: int = 0, tokenizer=tokenizer, **settings):
        settings = {"eval_fraction": 0.0} | settings
        return load_data(DataConfig(path=path, **settings), tokenizer, seed)

    return load_rows


def pair(prompt: str, completion: str) -> dict:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
    }


# --------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("row", "kind", "becomes"),
    [
        pytest.param(MESSAGES, "messages", MESSAGES, id="messages"),
        pytest.param(
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "a?"},
                    {"from": "gpt", "value": "b."},
                ]
            },
            "messages",
            {"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER]},
            id="sharegpt",
        ),
        pytest.param(
            {"conversations": [ASK, ANSWER]}, "messages", MESSAGES, id="conversations-of-roles"
        ),
        pytest.param(
            {"prompt": "a?", "completion": "b."},
            "prompt-completion",
            pair("a?", "b."),
            id="prompt-completion",
        ),
        pytest.param(
            {"prompt": [ASK], "completion": [ANSWER]},
            "prompt-completion",
            {"prompt": [ASK], "completion": [ANSWER]},
            id="prompt-completion-of-turns",
        ),
        pytest.param(
            {"instruction": "Add.", "input": "1, 2", "output": "3."},
            "Alpaca",
            pair("Add.\n\n1, 2", "3."),
            id="alpaca-with-input",
        ),
        pytest.param(
            {"instruction": "Sing.", "input": "", "output": "La."},
            "Alpaca",
            pair("Sing.", "La."),
            id="alpaca-with-empty-input",
        ),
        pytest.param(
            {"instruction": "Sing.", "output": "La.", "source": "x"},
            "Alpaca",
            pair("Sing.", "La."),
            id="alpaca-without-input",
        ),
        pytest.param(
            {"question": "a?", "answer": "b."},
            "question-answer",
            pair("a?", "b."),
            id="question-answer",
        ),
        pytest.param(
            {"prompt": "a?", "response": "b."},
            "prompt-response",
            pair("a?", "b."),
            id="prompt-response",
        ),
        pytest.param({"text": "Once."}, "text", {"text": "Once."}, id="text"),
    ],
)
def test_a_format_is_recognised_said_and_mapped(load, suffix, row, kind, becomes):
    rows = load(write(f"rows.{suffix}", [row, row]))
    assert list(rows.train) == [becomes, becomes]
    assert rows.eval is None
    assert rows.description.startswith(f"{kind}, 2 training rows")


@pytest.mark.parametrize(
    ("row", "becomes"),
    [
        ({"text": 'He said "no", then\nleft.'}, {"text": 'He said "no", then\nleft.'}),
        ({"instruction": "Add.", "input": "1, 2", "output": "Six."}, pair("Add.\n\n1, 2", "Six.")),
        ({"instruction": "Sing.", "input": "", "output": "La."}, pair("Sing.", "La.")),
    ],
)
def test_csv_rows_keep_quotes_commas_and_line_breaks(load, row, becomes):
    assert list(load(write("rows.csv", [row])).train) == [becomes]


@pytest.mark.parametrize("answer", ["4", "007", "NA"])
def test_csv_cells_are_text_whatever_they_look_like(load, answer):
    rows = load(write("sums.csv", [{"question": "2+2?", "answer": answer}]))
    assert list(rows.train) == [pair("2+2?", answer)]


@pytest.mark.parametrize(("name", "there"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ",")])
def test_a_csv_is_read_by_the_delimiter_that_it_has(load, name, there):
    write_text(name, f'prompt{there}completion\n"One{there} two, or; 3?"{there}Four.\n')
    assert next(iter(load(name).train)) == pair(f"One{there} two, or; 3?", "Four.")


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_a_line_ends_as_any_system_ends_it(load, end):
    """With a carriage return alone in a CSV that Excel for the Mac saved; cells keep theirs."""
    text = 'prompt,completion\na?,"b,\nc."\nd?,e.\n'.replace("\n", end)
    Path("mac.csv").write_text(text, newline="")
    lines = [json.dumps({"text": one}) for one in ("a", "b")]
    Path("mac.jsonl").write_text(end.join(lines), newline="")
    assert list(load("mac.csv").train) == [pair("a?", f"b,{end}c."), pair("d?", "e.")]
    assert len(load("mac.jsonl").train) == 2


def test_a_file_of_columns_is_said_to_be_one(load):
    columns = {"prompt": ["a?", "c?"], "completion": ["b.", "d."]}
    write_text("columns.json", json.dumps(columns))
    with pytest.raises(DataError, match="one object of columns") as caught:
        load("columns.json")
    assert "a list of objects" in caught.value.fix
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    write_text("rows.json", json.dumps(rows))
    assert list(load("rows.json").train) == [pair("a?", "b."), pair("c?", "d.")]


def test_a_file_of_two_sources_is_refused(load):
    for name in ("a.jsonl", "b.jsonl"):
        write(name, [MESSAGES])
    with pytest.raises(DataError, match=r"a\.jsonl is read twice"):
        load(["*.jsonl", "./a.jsonl"])


def test_without_a_chat_template_messages_are_refused(load):
    path = write("chat.jsonl", [MESSAGES] * 4)
    with pytest.raises(DataError, match="no chat template"):
        load(path, tokenizer=SimpleNamespace(chat_template=None))


@pytest.fixture
def base():
    """A folder of the packaged model without its chat template, which lies beside it."""
    shutil.copytree(TINY_LLAMA, "instruct")
    shutil.move(shutil.copytree("instruct", "base") / Path("chat_template.jinja"), "own.jinja")
    return ["model.name=./base", f"data.path={write('chat.jsonl', [MESSAGES] * 4)}"]


@pytest.mark.parametrize("source", ["own.jinja", "builtin:tiny_llama", "instruct"])
def test_a_base_model_takes_the_chat_template_that_it_is_given(base, source):
    made = load_recipe("tiny_full_bf16", [*base, f"train.chat_template_path={source}"])
    found = counted_rows(made.config)
    assert list(shapes.trained_texts(found.tokenizer, found.prepared[0])) == ["b.<|im_end|>"]


@pytest.mark.slow
def test_a_run_saves_the_chat_template_that_it_was_given(base):
    """TRL would clone the tokenizer whose template that is, and resize the embeddings."""
    given = [*base, "train.chat_template_path=instruct", "train.max_steps=2", "eval.samples=false"]
    folder = train(load_recipe("tiny_full_bf16", given), out="runs").folder
    assert (folder / "model" / "chat_template.jinja").read_text() == Path("own.jinja").read_text()


@pytest.mark.parametrize(
    ("source", "why"), [("none.jinja", "cannot be read"), ("base", "has no chat template")]
)
def test_a_chat_template_that_is_not_there_is_an_error(base, source, why):
    with pytest.raises(ModelNotFoundError, match=why):
        load_tokenizer(ModelConfig(name="./base"), source)


@pytest.mark.parametrize("separate", [False, True])
def test_eval_rows_that_are_training_rows_are_counted(load, separate):
    rows = [{"text": f"row {i % 10}"} for i in range(20)]
    if separate:
        write("eval.jsonl", [*rows[:3], {"text": "new"}])
    own = {"eval_path": "eval.jsonl"} if separate else {"eval_fraction": 0.05}
    assert load(write("rows.jsonl", rows), **own).shared == 3 + (not separate)
    assert load(write("rows.jsonl", rows[:10]), eval_fraction=0.1).shared == 0


@pytest.mark.parametrize(
    ("count", "held_out"), [(50, 10), (319, 16), (320, 32), (3199, 32), (3300, 33)]
)
def test_three_rows_are_too_few_to_judge_by(load, count, held_out):
    file = write("rows.jsonl", [{"text": f"row {i}"} for i in range(count)])
    found = load(file, eval_fraction=0.01)
    assert (len(found.train), len(found.eval)) == (count - held_out, held_out)


def test_eval_rows_that_a_stream_trains_on_are_counted(load):
    rows = [{"text": f"row {i}"} for i in range(20)]
    write("eval.jsonl", [*rows[:3], {"text": "new"}])
    path, stream = write("rows.jsonl", rows), {"streaming": True, "shuffle_buffer": 1}
    assert load(path, eval_path="eval.jsonl", **stream).shared == 3
    assert load(path, eval_fraction=0.1, **stream).shared == 0


def test_rows_that_another_template_refuses_are_not_skipped(load, tokenizer):
    """Which rows are skipped is kept in the cache of `datasets`: under the template, too."""
    system = {"role": "system", "content": "Be brief."}
    with_system = {"messages": [system, *MESSAGES["messages"]]}
    path = write("rows.jsonl", [MESSAGES, with_system])
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% if messages[0].content == 'Be brief.' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    for template, refused in ((strict, 1), (tokenizer, 0), (strict, 1)):
        rows = load(path, tokenizer=template, on_bad_row="skip")
        assert (len(rows.train), rows.refused) == (2 - refused, refused)


def test_without_a_chat_template_a_pair_stays_text(load):
    path = write("rows.jsonl", [{"question": "a?", "answer": "b."}])
    rows = load(path, tokenizer=SimpleNamespace(chat_template=None))
    assert list(rows.train) == [{"prompt": "a?\n\n", "completion": "b."}]


def test_messages_bring_a_setting(load):
    assert load(write("chat.jsonl", [MESSAGES])).settings == {"assistant_only_loss": True}


def test_texts_are_split_and_not_cut_where_they_are_packed(load):
    assert load(write("a.jsonl", [{"text": "a"}])).settings == {"packing_strategy": "bfd_split"}
    assert load(write("b.jsonl", [{"prompt": "a", "completion": "b"}])).settings == {}


def test_the_packaged_rows_are_unique_conversations_that_end_with_an_answer(load):
    rows = load(name="builtin:harbour").train
    assert 300 <= len(rows) <= 500
    assert len({json.dumps(row) for row in rows}) == len(rows)
    assert {row["messages"][-1]["role"] for row in rows} == {"assistant"}
    assert rows.column_names == ["messages"]


# ----------------------------------------------------------------------------------------- split


def texts(rows) -> list[str]:
    return [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(40, 0.05, 8), (40, 0.25, 10), (10, 0.01, 2), (2, 0.5, 1), (10, 0.0, 0), (1, 0.5, 0)],
)
def test_the_held_out_share_is_taken_once_and_nothing_is_lost(load, count, fraction, held_out):
    path = write("rows.jsonl", [{"text": f"row {i}"} for i in range(count)])
    rows = load(path, eval_fraction=fraction)
    out = texts(rows.eval) if rows.eval is not None else []
    assert len(out) == held_out
    assert sorted(texts(rows.train) + out) == sorted(f"row {i}" for i in range(count))
    said = f"text, {count - held_out} training rows" + (f", {held_out} eval rows" * bool(held_out))
    assert rows.description == said


def test_the_seed_decides_which_rows_are_held_out(load):
    path = write("rows.jsonl", [{"text": f"row {i}"} for i in range(100)])
    first, again, other = (
        texts(load(path, eval_fraction=0.1, seed=seed).eval) for seed in (1, 1, 2)
    )
    assert first == again
    assert set(first) != set(other)


def test_a_file_of_held_out_rows_replaces_the_share(load):
    path = write("rows.jsonl", [{"text": f"row {i}"} for i in range(10)])
    held = write("held.csv", [{"text": "held"}])
    rows = load(path, eval_path=held, eval_fraction=0.5)
    assert (len(rows.train), texts(rows.eval)) == (10, ["held"])
    assert rows.description == "text, 10 training rows, 1 eval rows"


def test_max_rows_takes_the_first_rows_before_the_split(load):
    path = write("rows.jsonl", [{"text": f"row {i}"} for i in range(10)])
    assert texts(load(path, max_rows=3).train) == ["row 0", "row 1", "row 2"]
    assert len(load(path, max_rows=99).train) == 10
    rows = load(path, max_rows=4, eval_fraction=0.25)
    assert sorted(texts(rows.train) + texts(rows.eval)) == [f"row {i}" for i in range(4)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_is_left_to_train_on_whatever_the_share(load, streaming):
    path = write("rows.jsonl", [{"text": f"row {i}"} for i in range(10)])
    rows = load(path, eval_fraction=0.99, streaming=streaming)
    assert len(rows.eval) == 9
    assert next(iter(rows.train))["text"]


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_may_change_places(load, streaming):
    row = {"prompt": "a", "completion": "b", "reply": "c"}
    path = write("rows.jsonl", [row] * 3)
    names = {"prompt": "completion", "completion": "prompt"}
    swapped = load(path, streaming=streaming, columns=names)
    moved = load(path, streaming=streaming, columns=names | {"completion": "reply"})
    assert next(iter(swapped.train)) == pair("b", "a")
    assert next(iter(moved.train)) == pair("b", "c")
    with pytest.raises(DataError, match=r"the column 'reply' of rows\.jsonl cannot be two"):
        load(path, streaming=streaming, columns={"prompt": "reply", "completion": "reply"})


def test_max_rows_leaves_held_out_rows_alone(load):
    path = write("rows.jsonl", [{"text": f"row {i}"} for i in range(10)])
    rows = load(path, max_rows=2, eval_path=path)
    assert (len(rows.train), len(rows.eval)) == (2, 10)


# ---------------------------------------------------------------------- nothing is left out unsaid


@pytest.mark.parametrize("settings", [{}, {"streaming": True}])
@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"question": "Who?", "context": "Ann sails.", "answer": "Ann"}, "'context'"),
        ({"system_prompt": "Short.", "question": "Who?", "response": "Ann"}, ""),
        ({"system": "Ahoy", "conversations": [ASK, ANSWER], "tools": None, "id": 1}, "'id'"),
        ({"instruction": "a", "input": "b", "context": "c", "output": "d", "id": 1}, "'id'"),
        ({"prompt": "a", "completion": "b", "tools": "hammer"}, "'tools'"),
        ({"input_ids": [1, 2], "position": [0, 1]}, ""),
    ],
    ids=["squad", "orca", "sharegpt", "alpaca", "pair", "tokenized"],
)
def test_columns_that_are_not_used_are_said(load, row, unused, settings):
    found = load(write("rows.jsonl", [row]), **settings).notes
    assert found == ((f"columns of rows.jsonl that are not used: {unused}",) if unused else ())


CALL = {"name": "tide", "arguments": {"port": "Brest"}}
LLAMA_FACTORY = {
    "system": "Be brief.", "tools": json.dumps([{"name": "tide", "parameters": {}}]),
    "conversations": [
        {"from": "human", "value": "a?"}, {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "5 m"}, {"from": "gpt", "value": "b."},
    ],
}  # fmt: skip


def test_llama_factorys_columns_and_roles_are_turns(load):
    known = shapes.tokenizer_of("qwen3")
    row = load(write("rows.jsonl", [LLAMA_FACTORY]), tokenizer=known).train[0]
    system, ask, call, tool, answer = row["messages"]
    assert (system["content"], ask, tool["role"], answer) == ("Be brief.", ASK, "tool", ANSWER)
    assert call["tool_calls"] == [{"type": "function", "function": CALL}]
    assert not call.get("content")
    alpaca = {"instruction": "c?", "input": "", "output": "d.", "system": "Be brief."}
    path = write("alpaca.jsonl", [alpaca | {"history": [["a?", "b."]]}])
    rows = load(path)
    assert rows.notes == ()
    assert rows.train[0]["prompt"] == [system, ASK, ANSWER, {"role": "user", "content": "c?"}]
    bare = load(path, tokenizer=SimpleNamespace(chat_template=None)).train[0]
    assert bare == {"prompt": "Be brief.\n\na?\n\nb.\n\nc?\n\n", "completion": "d."}


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "wants text"])
def test_arguments_of_a_call_are_json_once(load, family):
    """OpenAI's own rows have them as JSON in a text, which most templates write as JSON again."""
    name, known = family, copy.deepcopy(shapes.tokenizer_of("chatml"))
    known.chat_template = (
        "{% for m in messages %}{{ m.content or '' }}{% generation %}{% for c in m.tool_calls or []"
        " %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endgeneration %}{% endfor %}"
    )
    known = known if family == "wants text" else shapes.tokenizer_of(name)
    texts = []
    for arguments in (CALL["arguments"], json.dumps(CALL["arguments"])):
        function = {"name": "tide", "arguments": arguments}
        calling = {"role": "assistant", "content": None,
                   "tool_calls": [{"type": "function", "function": function}]}  # fmt: skip
        rows = load(write("rows.jsonl", [{"messages": [ASK, calling]}]), tokenizer=known)
        turns = rows.train[0]["messages"]
        texts.append(known.apply_chat_template(turns, tokenize=False))
    assert '{"port": "Brest"}' in texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("settings", [{}, {"streaming": True, "shuffle_buffer": 1}])
def test_answers_that_a_row_calls_bad_are_refused_or_skipped(load, settings):
    good, bad = ({"prompt": "a?", "completion": f"{x}", "label": x} for x in (True, False))
    path = write("rows.jsonl", [good, bad])
    with pytest.raises(DataError) as caught:
        list(itertools.islice(load(path, **settings).train, 2))
    assert (caught.value.where, "kto" in caught.value.why) == ("rows.jsonl: row 2", True)
    rows = load(path, on_bad_row="skip", **settings)
    assert list(itertools.islice(rows.train, 1)) == [pair("a?", "True")]
    assert rows.refused == 1


@pytest.mark.parametrize("ask", [{"prompt": "a?"}, {"instruction": "a?", "input": ""}])
def test_preference_pairs_say_what_is_learned(load, ask):
    rows = load(write("rows.jsonl", [{**ask, "chosen": "b.", "rejected": "c."}]))
    assert list(rows.train) == [pair("a?", "b.")]
    (note,) = rows.notes
    assert "rejected ones are not used" in note


def test_a_column_that_another_takes_the_place_of_is_said(load):
    row = {"prompt": "old", "ask": "new", "completion": "b"}
    rows = load(write("rows.jsonl", [row]), columns={"prompt": "ask"})
    assert rows.notes == ("columns of rows.jsonl that are not used: 'prompt'",)


def test_files_of_a_folder_that_are_not_read_are_said(load, tmp_path):
    write_text("rows/a.txt", "One.\n")
    assert load("rows").notes == ()
    for name in ("rows/b.md", "rows/deep/c.pdf", "rows/.hidden/d.md", "elsewhere/e.txt"):
        write_text(name, "Two.\n")
    Path("rows/linked").symlink_to(tmp_path / "elsewhere")
    assert load("rows").notes == ("not read in rows: b.md, deep/c.pdf, linked",)


def test_eval_rows_that_are_skipped_are_counted(load):
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}
    paths = write("rows.jsonl", [good]), write("held.jsonl", [good, bad, bad])
    rows = load(paths[0], eval_path=paths[1], on_bad_row="skip")
    assert (len(rows.eval), rows.refused) == (1, 0)
    assert rows.notes == ("2 eval rows are skipped; the first: row 2: 'completion' is empty",)


def test_a_file_that_is_listed_twice_is_refused(load):
    write("a.jsonl", [MESSAGES])
    with pytest.raises(ValueError, match=r"'a.jsonl' stands in the list more than once"):
        load(["a.jsonl", "b.jsonl", "a.jsonl"])


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_turns_may_be_json_in_a_text(load, name):
    rows = load(write(name, [{"messages": json.dumps(MESSAGES["messages"])}]))
    assert rows.train[0]["messages"] == MESSAGES["messages"]
    with pytest.raises(DataError, match=r"row 1 [\s\S]*'messages' is not JSON"):
        load(write(name, [{"messages": '[{"role": "user"'}]))


# -------------------------------------------------------------------------------------- mistakes


def test_a_missing_file_names_its_nearest_sibling(load, here):
    write("mine.jsonl", [MESSAGES])
    with pytest.raises(DataNotFoundError, match=r"did you mean 'mine\.jsonl'") as caught:
        load("mien.jsonl")
    assert caught.value.where == f"data.path: {here / 'mien.jsonl'}"
    assert isinstance(caught.value, FileNotFoundError)


def test_a_missing_file_in_a_missing_folder_gets_no_guess(load, here):
    with pytest.raises(DataNotFoundError) as caught:
        load("no/such.jsonl")
    assert "did you mean" not in str(caught.value)
    assert str(here / "no" / "such.jsonl") in caught.value.where


def test_an_unknown_packaged_set_names_the_nearest(load):
    with pytest.raises(DataNotFoundError, match="did you mean 'builtin:harbour'") as caught:
        load(name="builtin:harbor")
    assert caught.value.where == "data.name"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        pytest.param("a.jsonl", "", ["a.jsonl is empty", "data.path"], id="empty"),
        pytest.param("a.jsonl", "\n \n", ["a.jsonl has no rows", "add rows"], id="blank-lines"),
        pytest.param("a.json", "[]", ["a.json has no rows"], id="empty-list"),
        pytest.param(
            "a.jsonl",
            '{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n',
            [
                "a.jsonl cannot be read as JSON",
                "where: a.jsonl:3",
                "not JSON",
                "fix or remove that line",
            ],
            id="broken-line",
        ),
        pytest.param(
            "a.jsonl",
            '{"text": "a"}\n{"text": "b \\ud83c"}\n',
            ["where: a.jsonl:2", "half of one"],
            id="half-of-a-surrogate",
        ),
        pytest.param("a.json", '[{"text": "a"}, {]', ["a.json cannot be read as JSON"], id="json"),
        pytest.param(
            "a.parquet",
            "text",
            ["a.parquet cannot be read as parquet", "copy the file"],
            id="parquet",
        ),
        pytest.param(
            "a.doc", "Once.", ["type '.doc' cannot be read", ".jsonl, .json, .csv"], id="suffix"
        ),
        pytest.param(
            "a.jsonl",
            '{"foo": "a", "bar": "b"}\n',
            ["no prompt and answer columns found in a.jsonl", "found: bar", "messages; prompt and"],
            id="unknown-columns",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(load, name, content, said):
    Path(name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(name)
    for part in said:
        assert part in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_inside_of_an_object_are_said_to_be_there(load, indent):
    Path("a b.json").write_text(json.dumps({"version": 1, "data": [MESSAGES] * 3}, indent=indent))
    with pytest.raises(DataError, match=r"the rows of a b\.json are inside 'data'") as caught:
        load("a b.json")
    assert "the list 'data' alone" in caught.value.fix
    Path("rows.json").write_text(json.dumps([MESSAGES] * 3, indent=indent))
    assert len(load("rows.json").train) == 3
    write_text("one.json", json.dumps(MESSAGES, indent=indent))
    assert len(load("one.json").train) == 1


def test_parquet_without_rows_is_said_to_have_none(load, caplog):
    """`datasets` refuses it by the size of its batches, and logs that on its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from finetune.logging import quiet_libraries

    quiet_libraries()
    pq.write_table(pa.table({"text": ["a"]}).slice(0, 0), "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no rows"):
        load("a.parquet")
    assert not caplog.records


TURN = "a turn needs role and content"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        pytest.param({"messages": [ASK, ANSWER | {"content": None}]}, TURN, id="null-content"),
        pytest.param({"messages": [ASK | {"role": None}, ANSWER]}, TURN, id="null-role"),
        pytest.param({"messages": [ASK]}, "no assistant turn", id="no-answer"),
        pytest.param({"messages": []}, "no assistant turn", id="no-turns"),
        pytest.param({"messages": None}, "no assistant turn", id="null-messages"),
    ],
)
def test_a_bad_conversation_is_named_by_its_row(load, row, why):
    path = write("rows.jsonl", [MESSAGES, row, MESSAGES])
    with pytest.raises(DataError, match=r"row 2 of rows\.jsonl cannot be trained on") as caught:
        load(path)
    assert caught.value.where == "rows.jsonl: row 2"
    assert why in caught.value.why


@pytest.mark.parametrize("blank", ["", "  ", "\n", None])
def test_a_blank_text_is_named_by_its_row_and_called_empty(load, blank):
    path = write("rows.jsonl", [{"text": "a"}, {"text": "b"}, {"text": blank}])
    with pytest.raises(DataError, match=r"row 3 of rows\.jsonl") as caught:
        load(path)
    assert caught.value.why == "'text' is empty"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": None, "completion": "b"}, "'prompt' is empty"),
        ({"prompt": "a", "completion": None}, "'completion' is empty"),
        ({"prompt": "a", "completion": 4}, "'completion' is int"),
    ],
)
def test_half_a_pair_is_named_by_its_row(load, row, why):
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(DataError) as caught:
        load(write("rows.jsonl", [good, row]))
    assert caught.value.where == "rows.jsonl: row 2"
    assert caught.value.why == why


def test_a_bad_held_out_row_is_named_in_its_own_file(load):
    path, held = write("rows.jsonl", [MESSAGES]), write("held.jsonl", [{"messages": [ASK]}])
    with pytest.raises(DataError) as caught:
        load(path, eval_path=held)
    assert caught.value.where == "held.jsonl: row 1"


def test_held_out_rows_with_other_columns_are_refused_by_name(load):
    path, held = write("rows.jsonl", [MESSAGES]), write("held.jsonl", [{"foo": "a"}])
    with pytest.raises(DataError, match=r"held\.jsonl") as caught:
        load(path, eval_path=held)
    assert "foo" in str(caught.value)


@pytest.mark.parametrize("source", [{"path": "rows.jsonl"}, {"name": "builtin:harbour"}])
def test_a_hub_split_of_a_file_is_refused_rather_than_training_rows_held_out(load, source):
    write("rows.jsonl", [MESSAGES])
    with pytest.raises(ValueError, match="eval_split"):
        load(**source, eval_split="test")
    with pytest.raises(ValueError, match="subset is about a hub data set"):
        load(**source, subset="main")
    with pytest.raises(ValueError, match="split is about a hub data set"):
        load(**source, split="test")
