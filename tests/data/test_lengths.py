"""Lengths of rows before truncation, and `train.max_length: auto`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.recipe import read_recipe as as_written
from finetune.data.auto_length import load_recipe
from finetune.data.counting import counted_rows
from finetune.data.lengths import Lengths
from finetune.errors import ConfigError

OPEN = "train.max_length=auto"


def lengths_of(tokens: list[int]) -> Lengths:
    """Rows of which every token is trained on."""
    whole = np.array(tokens)
    return Lengths(whole, whole, np.array([(whole > at).sum() for at in range(max(tokens))]))


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Settings of a tiny run on rows with answers of so many words."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(words: list[int], *settings: str) -> list[str]:
        texts = [{"prompt": "Say it.", "completion": "tide " * n + "ends"} for n in words]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
        own = (f"data.path={tmp_path}/rows.jsonl", "data.eval_fraction=0")
        return [*own, "train.eval_strategy=no", *settings]

    return write


@given(st.lists(st.integers(1, 300), min_size=1, max_size=450), st.sampled_from([1, 16]))
def test_auto_cuts_nothing_or_one_very_long_row_of_two_hundred(tokens, multiple) -> None:
    chosen = lengths_of(tokens).auto(multiple, None)
    cut = [one for one in tokens if one > chosen]
    assert chosen % multiple == 0
    assert len(cut) <= len(tokens) // 200
    if cut:
        assert max(tokens) > 2 * (chosen - multiple)
    else:
        assert chosen - multiple < max(tokens)


def test_one_very_long_row_of_many_does_not_decide() -> None:
    usual = [100] * 199
    assert lengths_of([*usual, 9000]).auto(16, None) == 112
    assert lengths_of([*usual[1:], 9000]).auto(16, None) == 9008
    assert lengths_of([*usual, 200]).auto(16, None) == 208


def test_a_model_takes_no_more_than_its_positions() -> None:
    assert lengths_of([700]).auto(16, 512) == 512


def test_what_a_length_costs_is_what_the_ledger_counts(rows) -> None:
    config = load_recipe("tiny_lora_fp8", rows([*range(2, 60, 2)], "train.max_length=64")).config
    ledger = counted_rows(config).ledger
    now = next(x for x in ledger.lengths.costs(config) if "(now)" in x["train.max_length"])
    lost = int(ledger.lengths.trained.sum()) - ledger.trained
    assert ledger.truncated > 0 < lost
    assert now["rows cut"].split()[0] == str(ledger.truncated + ledger.dropped)
    assert now["trained tokens lost"].split()[0] == str(lost)
    assert now["tokens in a micro-batch"] == f"{8 * 64:,}"


def test_the_rows_decide_where_the_recipe_is_read(rows, capsys) -> None:
    given = rows([3, 50], OPEN)
    assert as_written("tiny_lora_fp8", given).config.train["max_length"] == "auto"
    config = load_recipe("tiny_lora_fp8", given).config
    ledger = counted_rows(config).ledger
    assert ledger.cut == 0
    assert config.train["max_length"] - 16 < ledger.longest <= config.train["max_length"]
    assert f"train.max_length=auto is {config.train['max_length']}" in capsys.readouterr().err


def test_a_pair_is_as_long_as_its_longer_answer(tmp_path, rows) -> None:
    given = rows([1], "train.method=dpo", "train.learning_rate=1e-5", "train.max_length=512")
    pair = {"prompt": "Say it.", "chosen": "Aye.", "rejected": "tide " * 9}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    ledger = counted_rows(load_recipe("tiny_lora_fp8", given).config).ledger
    assert ledger.lengths.whole.tolist() == [ledger.longest] * 4


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("data.streaming=true", "a stream's rows"),
        ("train.packing_strategy=wrapped", "cuts text anywhere"),
        ("train.max_length=atuo", "did you mean 'auto'"),
    ],
)
def test_a_length_that_rows_cannot_tell_is_refused(setting, why) -> None:
    with pytest.raises(ConfigError, match=why):
        load_recipe("tiny_lora_fp8", [OPEN, "train.packing=true", setting])


@pytest.mark.slow
def test_a_run_keeps_the_number_that_auto_was(rows, cli, tmp_path) -> None:
    steps = ("train.max_steps=2", "train.warmup_steps=0", "eval.samples=false")
    done = cli("tiny_lora_fp8", *rows([3, 20] * 8, OPEN), *steps)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "runs/tiny_lora_fp8").iterdir()
    ledger = json.loads((folder / "receipt.json").read_text())["data"]["train"]
    assert f"max_length: {ledger['max_length']}" in (folder / "config.yaml").read_text()
    assert ledger["cut"] == 0 < ledger["longest"] == ledger["lengths"]["100"]
