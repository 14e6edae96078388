"""A run that cannot learn is refused before it begins; few rows get steps enough."""

from __future__ import annotations

import json
import math
import random
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from finetune import load_recipe, train
from finetune.config.train_keys import BATCH
from finetune.training.run.schedule import peak_of, schedule_of, steps_of

WORDS = [
    "harbour", "boat", "crane", "cargo", "tide", "keel",
    "rope", "pier", "anchor", "captain", "sail", "port",
]  # fmt: skip


def args_of(**values):
    from trl import SFTConfig

    usual = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    usual |= {"use_cpu": True, "report_to": "none", "num_train_epochs": 1}
    return SFTConfig(**{"output_dir": "unused", **usual, **values})


@pytest.fixture
def chat(tmp_path):
    """A function that writes rows of one question and one answer, of about 60 tokens."""

    def write(count: int) -> str:
        draw = random.Random(0)
        file = tmp_path / f"chat{count}.jsonl"
        with file.open("w", encoding="utf-8") as lines:
            for _ in range(count):
                asked = draw.choices(WORDS, k=5)
                turns = [
                    ("user", "Sort " + " ".join(asked)),
                    ("assistant", " ".join(sorted(asked))),
                ]
                row = {"messages": [{"role": who, "content": text} for who, text in turns]}
                lines.write(json.dumps(row) + "\n")
        return file.name

    return write


OF_8B = (
    "llama_8b_lora_bf16", "model.name=builtin:tiny_llama", "~model.pad_token",
    "model.dtype=float32", "eval.samples=false", "train.save_strategy=no",
    "train.optim=adamw_torch", "train.max_length=128", "lora.target_modules=all-linear",
    "precision.compute=fp32", "train.gradient_checkpointing=false",
)  # fmt: skip


@pytest.mark.slow
def test_own_rows_under_a_recipe_of_eight_billion_are_learned(cli, chat, tmp_path) -> None:
    """They were 3 steps in 20 of warm-up: the loss stayed where it was."""
    words = (*OF_8B, f"data.path={chat(200)}")
    ran = cli(*words)
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    smaller = [f"train.{key}=1 for 4" for key in BATCH]
    assert f"since rows are few (data.min_steps): {', '.join(smaller)}" in said
    assert "steps are few" not in said
    (folder,) = (tmp_path / "runs" / words[0]).iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert losses[-1] < losses[0] - 0.1
    receipt = json.loads((folder / "receipt.json").read_text())
    step = receipt["conditions"]["tokens per step"]
    assert (step["rows"], step["accumulation"]) == (1, 1)
    assert any("smaller steps" in note for note in receipt["notes"])


@pytest.mark.slow
def test_a_resumed_run_keeps_the_smaller_steps_of_its_checkpoint(chat, tmp_path, monkeypatch):
    """With twenty epochs alone, a step would have sixteen rows, and pass over others."""
    monkeypatch.chdir(tmp_path)
    quiet: Any = {"out": tmp_path, "console": Console(quiet=True)}
    own = [*OF_8B[1:], f"data.path={chat(60)}", "train.save_strategy=steps", "train.max_length=256"]
    own += ["train.eval_strategy=no"]
    began = train(load_recipe(OF_8B[0], own), until=2, **quiet)
    more = [f"train.resume_from_checkpoint={began.folder}", "train.num_train_epochs=20"]
    more += ["resume.allow=[train.num_train_epochs]"]
    again = train(load_recipe(f"{began.folder}/config.yaml", more), until=3, **quiet)
    for report in (began, again):
        step = report.receipt.conditions["tokens per step"]
        assert (step["rows"], step["accumulation"], step["processes"]) == (1, 1, 1)
        ledger = report.receipt.data["train"]
        assert ledger["longest"] <= ledger["max_length"] == 48
        assert 48 <= ledger["bins"] <= ledger["rows"] == 48
        assert ledger["truncated"] == ledger["cut"] == 0
    assert not any("global batch" in note for note in again.receipt.notes)


def test_few_rows_are_accumulated_less_and_what_is_typed_stays(cli, chat) -> None:
    words = ("data", *OF_8B, f"data.path={chat(200)}", "--show", "0")
    few = "62 steps of 1 row (1 x 1 x 1), highest learning rate 0.0002\n"
    assert few in cli(*words).out
    typed = cli(*words, "train.gradient_accumulation_steps=4")
    assert "4 steps of 16 rows" in typed.out
    hint = "To make more: data.min_steps=50 (smaller steps), or train.num_train_epochs="
    assert hint in " ".join(typed.out.split())
    assert few in cli(*words, "train.gradient_accumulation_steps=4", "data.min_steps=50").out
    assert "of 32 rows (8 x 4 x 1)" in cli(*words, "train.per_device_train_batch_size=8").out
    many = cli(*words, "train.num_train_epochs=13")
    assert "52 steps of 16 rows" in many.out, "nothing to lower where steps are enough"


def test_a_rate_that_stays_near_zero_is_refused_before_a_model_is_loaded(cli, tmp_path) -> None:
    words = ("tiny_lora_bf16", "train.max_steps=12", "train.warmup_steps=40", "data.max_rows=40")
    for verb in ((), ("validate",)):
        refused = cli(*verb, *words)
        assert refused.code == 2
        assert "the learning rate would get to 28% of its value in 12 steps" in refused.err
    assert not (tmp_path / "runs").exists()
    fix = refused.err.partition("fix:")[2].split(";")[0]
    assert cli("validate", *words, *shlex.split(fix)).code == 0


@given(
    steps=st.integers(1, 60),
    warmup=st.one_of(st.integers(0, 80), st.floats(0, 0.99)),
    kind=st.sampled_from(["cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"]),
)
@settings(max_examples=60, deadline=None)
def test_the_peak_is_that_of_the_trainers_schedule(steps, warmup, kind):
    """Against the rates that an optimizer really gets."""
    import torch
    from transformers import get_scheduler

    args = args_of(warmup_steps=warmup, lr_scheduler_type=kind)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made = get_scheduler(kind, optimizer, args.get_warmup_steps(steps), steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert peak_of(args, steps) == pytest.approx(max(seen))


@given(
    rows=st.integers(1, 3000),
    batch=st.integers(1, 8),
    accumulation=st.integers(1, 8),
    epochs=st.sampled_from([0.5, 1, 3]),
    least=st.integers(1, 100),
)
@settings(max_examples=60, deadline=None)
def test_steps_are_made_no_smaller_than_needed(rows, batch, accumulation, epochs, least):
    args = args_of(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
    )  # fmt: skip
    found = schedule_of(args, rows, least)
    each, size = (getattr(found.args, key) for key in BATCH)
    assert 1 <= each <= accumulation == args.gradient_accumulation_steps
    assert 1 <= size <= batch == args.per_device_train_batch_size
    assert size == batch or each == 1, "accumulation goes down first"
    assert found.steps == steps_of(found.args, rows)
    assert found.steps >= least or (each, size) == (1, 1)
    pairs = zip(BATCH, (each, size), (accumulation, batch), strict=True)
    said = [f"train.{key}={now} for {was}" for key, now, was in pairs if now != was]
    assert found.lowered.partition(": ")[2] == ", ".join(said), "only what became smaller is said"
    if (each, size) != (accumulation, batch):
        args.gradient_accumulation_steps = each + 1 if size == batch else 1
        args.per_device_train_batch_size = min(size + 1, batch)
        assert steps_of(args, rows) < least
    loader = math.ceil(rows / size)
    assert found.steps == math.ceil(epochs * math.ceil(loader / each))


@pytest.mark.slow
def test_a_script_is_told_and_trains(make_llama, setup_backend, tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    from tests.conftest import batch

    setup_backend("emulated")
    rows = [{key: value[0] for key, value in batch(1, seed=i).items()} for i in range(8)]
    args = TrainingArguments(
        str(tmp_path), max_steps=3, warmup_steps=20, report_to="none", use_cpu=True,
        per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Trainer(make_llama(), args, train_dataset=rows).train()
    lines = [str(one.message) for one in said]
    assert any("the learning rate gets to 10% of its value in 3 steps" in line for line in lines)


def test_what_a_recipe_says_of_its_own_model_and_rows_stays_with_them(cli) -> None:
    def sections(*words: str) -> str:
        return cli("cat", "llama_8b_lora_fp8", *words, "--resolved").out

    assert "pad_token: <|fine" in sections("data.max_rows=4").replace('"', "").replace("'", "")
    own = sections("model.name=meta-llama/Llama-3.1-8B-Instruct")
    assert "finetune_right_pad_id" in own, "the same model"
    assert "finetune_right_pad_id" not in sections("model.name=./mine")
    assert "right_pad_id" in sections("model.name=./mine", "model.pad_token=<|right_pad_id|>")
    assert "capital of France" in sections("model.name=./mine")
    assert "capital of France" not in sections("data.path=mine.jsonl")
    assert "Hello" in sections("data.path=mine.jsonl", "data.prompts=[Hello]")


@pytest.mark.slow
def test_no_evaluation_is_none_also_at_the_end_and_runs_stay_in_their_folder(cli, tmp_path) -> None:
    """The recipe's file is named `...yaml`, whose stem is the folder above."""
    row = {"prompt": "Where?", "completion": "In the harbour."}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 400, encoding="utf-8")
    (tmp_path / "inside").mkdir()
    file = tmp_path / "...yaml"
    file.write_text(cli("cat", "tiny_full_bf16").out)
    found = cli(
        "run", f"{file}", "data.path=rows.jsonl", "train.max_steps=2", "eval.samples=false",
        "train.eval_strategy=no", "--out", "inside/runs",
    )  # fmt: skip
    assert found.code == 0, found.err
    (folder,) = (tmp_path / "inside" / "runs").rglob("metrics.jsonl")
    assert "eval_loss" not in folder.read_text()
    assert [one.name for one in (tmp_path / "inside").iterdir()] == ["runs"]
