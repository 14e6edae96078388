"""Where rows come from: folders, globs, compressed files, mixtures, streams."""

from __future__ import annotations

import bz2
import copy
import gzip
import itertools
import json
import lzma
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, Value
from torch.utils.data import DataLoader

from finetune import load_recipe
from finetune.config.sections import DataConfig
from finetune.data.counting import counted_rows
from finetune.data.dataset import load_data
from finetune.data.sources import files_of
from finetune.errors import ConfigError, DataError, DataNotFoundError
from finetune.runs.fingerprint import fingerprint
from finetune.training.checkpoints.resume import rows_hash
from tests.data.shapes import answer, trained_texts, user

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def load(tokenizer):
    def run(path, **settings):
        settings = {"eval_fraction": 0.0} | settings
        return load_data(DataConfig(path=path, **settings), tokenizer, 0)

    return run


def rows_of(mark: str, count: int) -> str:
    rows = ({"prompt": f"{mark}{i}?", "completion": f"{mark}{i}."} for i in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows)


def asked(rows, count: int = 1000) -> list[str]:
    return [row["prompt"][0]["content"] for row in itertools.islice(rows, count)]


OPENERS = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}


@pytest.mark.parametrize("suffix", OPENERS)
@pytest.mark.parametrize("streaming", [False, True])
def test_compressed_files(load, suffix, streaming) -> None:
    with OPENERS[suffix](f"a.jsonl.{suffix}", "wt") as file:
        file.write(rows_of("a", 3))
    settings = {"streaming": True, "shuffle_buffer": 1} if streaming else {}
    assert asked(load(f"a.jsonl.{suffix}", **settings).train, 3) == ["a0?", "a1?", "a2?"]


def test_a_compressed_file_that_is_cut_off_is_a_data_error(load) -> None:
    whole = gzip.compress(rows_of("a", 3000).encode())
    Path("a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a.jsonl.gz is cut off or damaged[\s\S]*fix"):
        load("a.jsonl.gz")


def test_folders_globs_and_lists_in_the_order_of_their_names(load) -> None:
    Path("rows/more").mkdir(parents=True)
    for name, mark in (("b.jsonl", "b"), ("a.jsonl", "a"), ("more/c.jsonl", "c")):
        (Path("rows") / name).write_text(rows_of(mark, 1))
    Path("rows/README.md").write_text("Rows.")
    assert asked(load("rows").train) == ["a0?", "b0?", "c0?"]
    assert asked(load("rows/*.jsonl").train) == ["a0?", "b0?"]
    assert asked(load(["rows/b.jsonl", "rows/more"]).train) == ["b0?", "c0?"]
    Path("rows/d.csv").write_text("prompt,completion\nd0?,d0.\n")
    with pytest.raises(DataError, match=r"several types: .csv, .jsonl"):
        load("rows")
    assert asked(load(["rows/d.csv", "rows/b.jsonl"]).train) == ["d0?", "b0?"]
    Path("empty").mkdir()
    with pytest.raises(DataNotFoundError, match="has no data files"):
        load("empty")


def test_a_blank_json_file_has_no_rows_and_is_not_called_broken(load) -> None:
    Path("a.json").write_text(" \n")
    with pytest.raises(DataError, match=r"a\.json has no rows"):
        load("a.json")


def test_text_tables_and_saved_data_sets(load) -> None:
    Path("a.txt").write_text("One.\n\nTwo.\n")
    assert [row["text"] for row in load("a.txt").train] == ["One.", "Two."]
    Path("a.tsv").write_text("prompt\tcompletion\na, b?\t007\n")
    assert load("a.tsv").train[0]["completion"][0]["content"] == "007"
    Dataset.from_list([{"prompt": "s?", "completion": "s."}]).save_to_disk("saved")
    assert asked(load("saved").train) == ["s?"]


def test_a_mixture_draws_by_weight_and_holds_out_rows_that_it_never_trains_on(load) -> None:
    Path("a.jsonl").write_text(rows_of("a", 400))
    Path("b.jsonl").write_text(rows_of("b", 40))
    mixed = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}]
    found = load(mixed, eval_fraction=0.1)
    questions, held_out = asked(found.train), set(asked(found.eval))
    share = sum(question.startswith("a") for question in questions) / len(questions)
    assert share == pytest.approx(0.75, abs=0.06)
    assert len(held_out) == 40 + 8  # a tenth, and of few rows a fifth
    assert len(set(questions)) == 392  # every row that is not held out, some of `b` several times
    assert held_out.isdisjoint(questions)
    assert "mixed of 75% a.jsonl x 1" in found.description


CHAT = {"messages": [user("Low?"), answer("No."), user("High?"), answer("Yes.")]}
PAIR = {"prompt": [user("Low?"), answer("No."), user("Sure?")], "completion": [answer("Sure.")]}
MIXED = {
    "chat": (CHAT, ["No.<|im_end|>", "Yes.<|im_end|>"]),
    "pair": (PAIR, ["Sure.<|im_end|>"]),
    "alpaca": ({"instruction": "Low?", "output": "Never."}, ["Never.<|im_end|>"]),
    "text": ({"text": "Tide."}, ["Tide.<|im_end|>"]),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("names", [[*MIXED], ["pair", "alpaca", "chat"], ["chat", "text"]])
def test_rows_of_several_formats_are_each_trained_on_as_alone(names, streaming) -> None:
    for name in names:
        Path(f"{name}.jsonl").write_text(json.dumps(MIXED[name][0]) + "\n")
    sources = [f"{name}.jsonl" for name in names]
    settings = {"streaming": True} if streaming else {}
    data = {"path": sources, "eval_fraction": 0.0, **settings}
    given = [f"data.{key}={json.dumps(value)}" for key, value in data.items()]
    given += ["train.max_steps=1", "train.eval_strategy=no"]
    found = counted_rows(load_recipe("tiny_full_bf16", given).config)
    texts = [text for row in found.prepared for text in trained_texts(found.tokenizer, row)]
    assert texts == [text for name in names for text in MIXED[name][1]]


def test_text_beside_prompts_is_a_completion_of_its_own(tokenizer) -> None:
    base = copy.copy(tokenizer)
    base.chat_template = None
    Path("a.jsonl").write_text(rows_of("a", 1))
    Path("b.jsonl").write_text('{"text": "b"}\n')
    found = load_data(DataConfig(path=["a.jsonl", "b.jsonl"], eval_fraction=0.0), base, 0).train
    assert list(found) == [
        {"prompt": "a0?\n\n", "completion": "a0."},
        {"prompt": "", "completion": "b"},
    ]


def test_rows_of_token_ids_are_refused_beside_others(load) -> None:
    Path("a.jsonl").write_text(rows_of("a", 1))
    Path("b.jsonl").write_text('{"input_ids": [1, 2]}\n')
    with pytest.raises(DataError, match=r"token ids[\s\S]*b.jsonl: tokenized"):
        load(["a.jsonl", "b.jsonl"])


def test_turns_beside_text_are_not_trained_on_whole() -> None:
    for name in ("chat", "text"):
        Path(f"{name}.jsonl").write_text(json.dumps(MIXED[name][0]) + "\n")
    sources = 'data.path=["text.jsonl","chat.jsonl"]'
    made = load_recipe("tiny_full_bf16", [sources, "train.assistant_only_loss=false"])
    with pytest.raises(ConfigError, match="text and turns are in one run"):
        counted_rows(made.config)


@pytest.mark.parametrize(("by", "rows"), [("line", 4), ("paragraph", 2), ("document", 1)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_of_a_text_file_is_what_the_recipe_says(load, by, rows, streaming) -> None:
    Path("a.txt").write_text("one\ntwo\n\nthree\nfour\n")
    found = load("a.txt", sample_by=by, streaming=streaming)
    texts = (found.sample if streaming else found.train)["text"]
    assert len(texts) == rows
    assert "".join("".join(texts).split()) == "onetwothreefour"


def test_only_text_files_have_a_way_to_be_cut_into_rows(load) -> None:
    Path("a.jsonl").write_text(rows_of("a", 1))
    with pytest.raises(DataError, match="about text files"):
        load("a.jsonl", sample_by="document")


# ---------------------------------------------------------------------------------------- streams


def test_a_stream_begins_again_and_trains_on_no_row_that_is_held_out(load) -> None:
    Path("a.jsonl").write_text(rows_of("a", 30))
    found = load("a.jsonl", streaming=True, eval_fraction=0.2, shuffle_buffer=8)
    first, again = asked(found.train, 24), asked(found.train, 48)
    assert asked(found.eval) == [f"a{i}?" for i in range(6)]
    assert sorted(first) == sorted(f"a{i}?" for i in range(6, 30))
    assert first != sorted(first)
    assert again[:24] == again[24:] == first
    assert len(found.sample) == 24


def test_a_stream_goes_on_where_it_was_and_its_hash_is_of_its_files(load) -> None:
    """A resumed run skips what was trained on: the same order from the same files."""
    Path("a.jsonl").write_text(rows_of("a", 50))
    Path("b.jsonl").write_text(rows_of("b", 50))
    mixed = {"a.jsonl": 0.5, "b.jsonl": 0.5}
    one, two = load(mixed, streaming=True), load(mixed, streaming=True)
    assert asked(one.train.skip(37), 50) == asked(two.train, 87)[37:]
    assert rows_hash(one.train, fingerprint=one.fingerprint) == rows_hash(
        two.train, fingerprint=two.fingerprint
    )
    Path("b.jsonl").write_text(rows_of("c", 50))
    other = load(mixed, streaming=True)
    weighted = load({"a.jsonl": 0.5, "b.jsonl": 0.6}, streaming=True)
    assert len({one.fingerprint, other.fingerprint, weighted.fingerprint}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "buffer"),
    [
        ("rows", 1),
        (["rows/a.jsonl", "rows/b.jsonl"], 16),
        ({"rows/[ab].jsonl": 3, "e.jsonl": 1}, 16),
    ],
    ids=["folder", "list", "mixture"],
)
def test_processes_and_workers_share_the_rows_of_a_stream_and_not_its_files(
    path: Any, buffer, load
) -> None:
    """By file, rows held out were trained on, others lost, and those of a short file doubled."""
    Path("rows").mkdir()
    for name, count in (("rows/a", 30), ("rows/b", 10), ("e", 10)):
        Path(f"{name}.jsonl").write_text(rows_of(name[-1], count))
    settings = {"streaming": True, "eval_fraction": 0.2, "shuffle_buffer": buffer, "max_rows": 36}
    found = load(path, **settings)
    held_out, rows = {*asked(found.eval)}, len(found.sample)
    whole = asked(found.train, 96)
    assert not {*whole} & held_out
    if not isinstance(path, dict):
        assert (
            len({*whole[:rows]}) == rows == (40 if isinstance(path, list) else 36) - len(held_out)
        )

    def prompts(rows: list[dict]) -> list[str]:
        return [row["prompt"][0]["content"] for row in rows]

    for workers in range(3):
        shares, several = [], {"num_workers": workers, "collate_fn": prompts, "batch_size": 4}
        for index in range(2):
            one = prepare_data_loader(
                DataLoader(found.train, **several),
                num_processes=2, process_index=index, dispatch_batches=False,
            )  # fmt: skip
            shares.append(list(itertools.islice(one, 12)))
        steps = zip(*shares, strict=True)
        assert [row for step in steps for batch in step for row in batch] == whole
        loader = DataLoader(found.train, **several)
        assert [row for batch in itertools.islice(loader, 24) for row in batch] == whole


@pytest.mark.slow
def test_a_bad_row_of_a_stream_is_named_or_skipped(load) -> None:
    bad = '{"prompt": "", "completion": "x"}\n'
    Path("a.jsonl").write_text(rows_of("a", 1500) + bad + rows_of("b", 2))
    rows = load("a.jsonl", streaming=True, shuffle_buffer=1)
    with pytest.raises(DataError, match=r"row 1501 of a.jsonl"):
        asked(rows.train, 1600)
    rows = load("a.jsonl", streaming=True, shuffle_buffer=1, on_bad_row="skip")
    assert asked(rows.train, 1502)[1500:] == ["b0?", "b1?"]


@pytest.mark.slow
def test_each_row_of_a_stream_that_is_skipped_late_is_counted_once(load) -> None:
    bad = '{"prompt": "", "completion": "x"}\n'
    Path("a.jsonl").write_text(bad + rows_of("a", 1200) + bad * 2 + rows_of("b", 100) + bad)
    rows = load("a.jsonl", streaming=True, shuffle_buffer=8, on_bad_row="skip")
    loader = DataLoader(rows.train, num_workers=2, batch_size=100, collate_fn=len)
    assert sum(itertools.islice(loader, 30)) == 3000  # more than two rounds
    assert (rows.refused, *map(int, rows.late)) == (1, 3)


def test_the_hash_of_rows_does_not_depend_on_the_processes_that_made_them() -> None:
    rows = Dataset.from_dict({"text": [str(i) for i in range(2500)]})
    shards = [rows.shard(3, i, contiguous=True) for i in range(3)]
    from datasets import concatenate_datasets

    parts = concatenate_datasets([Dataset.from_list(list(shard)) for shard in shards])
    assert rows_hash(rows) == rows_hash(parts)


def test_large_files_have_a_fingerprint_of_blocks(monkeypatch) -> None:
    monkeypatch.setattr("finetune.runs.fingerprint.BLOCK", 16)
    monkeypatch.setattr("finetune.runs.fingerprint.BLOCKS", 4)
    Path("a.jsonl").write_text(rows_of("a", 100))
    before = files_of("a.jsonl", "data.path").fingerprint()
    Path("a.jsonl").write_text(rows_of("a", 99) + rows_of("z", 1))
    assert files_of("a.jsonl", "data.path").fingerprint() != before


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64])
def test_of_files_that_are_not_large_every_byte_is_in_the_fingerprint(monkeypatch, size) -> None:
    monkeypatch.setattr("finetune.runs.fingerprint.BLOCK", 16)
    monkeypatch.setattr("finetune.runs.fingerprint.BLOCKS", 4)
    file, found = Path("weights.bin"), set()
    for at in range(size + 1):  # the last is of zeros alone
        file.write_bytes(bytes(place == at for place in range(size)))
        found.add(fingerprint([file]))
    assert len(found) == size + 1


# ------------------------------------------------------------------------- what others have written


def test_the_index_that_pandas_writes_is_one_more_column(load) -> None:
    Path("a.csv").write_text(",prompt,completion\n0,a0?,a0.\n1,a1?,a1.\n")
    assert asked(load("a.csv").train) == ["a0?", "a1?"]


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16"])
@pytest.mark.parametrize("name", ["ein Übel.csv", "a.jsonl"])
def test_text_of_another_encoding_is_readable_after_the_command_of_the_error(
    load, name, encoding
) -> None:
    rows = "prompt,completion\na0?,a0.\ncafé?,é\n" if name.endswith("csv") else rows_of("a", 3)
    rows = rows.replace("a2?", "café?")
    Path(name).write_text(rows, encoding=encoding)
    with pytest.raises(DataError) as caught:
        load(name)
    assert caught.value.where == f"{name}:{1 if encoding == 'utf-16' else 3}"
    subprocess.run(caught.value.fix, shell=True, check=True)
    assert "café?" in asked(load(f"utf8-{name}").train)


def test_columns_that_only_one_file_of_a_folder_has_are_taken(load) -> None:
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text(rows_of("a", 1))
    Path("rows/b.jsonl").write_text('{"prompt": "b0?", "completion": "b0.", "score": [1]}\n')
    assert asked(load("rows").train) == ["a0?", "b0?"]


def test_a_folder_of_several_formats_can_be_given_as_a_list(load) -> None:
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text(rows_of("a", 1))
    Path("rows/b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(DataError, match=r"a.jsonl and b.jsonl have different columns") as caught:
        load("rows")
    assert caught.value.fix.startswith("data.path=[rows/a.jsonl,rows/b.jsonl], a list")
    assert len(load(["rows/a.jsonl", "rows/b.jsonl"]).train) == 2


DATES = [f"2024-05-{day:02}" for day in range(1, 13)]


DATED = ("a.jsonl", "a.json", "a.parquet", "typed.parquet")


@pytest.mark.parametrize(
    ("name", "streaming"), [("a.csv", False), *itertools.product(DATED, [False, True])]
)
def test_dates_and_numbers_that_are_text_stay_text(load, name, streaming) -> None:
    rows = [{"prompt": str(n), "completion": date} for n, date in enumerate(DATES)]
    if name.endswith(".jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        Path(name).write_text(json.dumps(rows))
    else:
        made = Dataset.from_list(rows)
        if name == "typed.parquet":
            made = made.cast_column("completion", Value("date32"))
        made.to_csv(name) if name == "a.csv" else made.to_parquet(name)
    found = load(name, streaming=streaming)
    found = found.sample if streaming else found.train
    texts = [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in found]
    assert texts == list(zip(map(str, range(len(DATES))), DATES, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_is_not_used_cannot_fail(load, streaming) -> None:
    values = [7, "seven", None, {"a": [1, "b"]}]
    unset = dict.fromkeys(map(str, range(len(values))))
    rows = [json.loads(line) | unset for line in rows_of("a", 12_000).splitlines()]
    for number, late in enumerate(values):
        rows[11_000 + number][str(number)] = late
        rows[11_001 + number][f"other{number}"] = late
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"streaming": True, "shuffle_buffer": 1} if streaming else {}
    found = load("a.jsonl", **more).train
    assert asked(found, 12_000) == [f"a{n}?" for n in range(12_000)]


@pytest.mark.slow
def test_a_column_of_a_stream_that_begins_late_and_counts_is_an_error(load) -> None:
    rows = [json.loads(line) for line in rows_of("a", 12_000).splitlines()]
    rows[11_000]["system"] = "Be brief."
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load("a.jsonl").train[11_000]["prompt"][0]["content"] == "Be brief."
    found = load("a.jsonl", streaming=True, shuffle_buffer=1).train
    with pytest.raises(DataError, match="a column 'system' that its first") as caught:
        asked(found, 12_000)
    assert caught.value.where == "a.jsonl:11001"


def test_a_list_of_objects_in_a_file_of_lines_wants_another_name(load) -> None:
    text = json.dumps([json.loads(line) for line in rows_of("a", 2).splitlines()])
    Path("a.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"is a \.json file: give it that name"):
        load("a.jsonl")
    assert asked(load(str(Path("a.jsonl").rename("a.json"))).train) == ["a0?", "a1?"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_other_rows_with_the_time_of_before_are_read(load, name) -> None:
    """`datasets` took its copy of the rows before, as after unpacking an archive."""
    for text in ("one", "two"):
        lines = {"a.jsonl": json.dumps({"text": text}), "a.csv": f"text\n{text}", "a.txt": text}
        Path(name).write_text(f"{lines[name]}\n")
        os.utime(name, (1e9, 1e9))
        assert load(name).train[0]["text"] == text
