"""What the loss sees of a run's first rows is what they say, or no step is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import load_recipe
from finetune.config.paths import TINY_LLAMA
from finetune.data.both_labels import InBlocks, spread
from finetune.errors import ConfigError, DataError
from finetune.training.health import first_batches
from finetune.training.health.first_batches import check_first_batches, different
from finetune.training.run.run import begun
from tests.benchmarks.first_batches import row_of, shapes_of, unrepaired
from tests.conftest import slow_but
from tests.data.shapes import tokenizer_of, user
from tests.families import config_of, folder_of

QUIET = Console(quiet=True)
ASKED = [user("Tide at Kiel?")]
PAIR = {"prompt": ASKED, "chosen": [{"role": "assistant", "content": "High."}],
        "rejected": [{"role": "assistant", "content": "Low."}]}  # fmt: skip


@pytest.fixture
def look(tmp_path: Path):
    """A function that looks at the first rows of a method's run, and returns its trainer."""

    def looked(method: str, rows: list[dict[str, Any]], *overrides: str) -> Any:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["~data.name", f"data.path={file}", "data.eval_fraction=0", "eval.samples=false"]
        given += ["train.eval_strategy=no", *overrides]
        name = {"sft": "full"}.get(method, method)
        with begun(
            load_recipe(f"tiny_{name}_bf16", given),
            out=tmp_path / "runs",
            console=QUIET,
            force=True,
        ) as run:
            check_first_batches(run.trainer)
            return run.trainer

    return looked


def model_with(family: str, folder: Path) -> Path:
    """A tiny model with the chat template of a family."""
    tokenizer, config = tokenizer_of(family), config_of("llama")
    tokenizer.save_pretrained(folder)
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "method",
    [
        *slow_but(["dpo"], ["dpo", "sft", "grpo"]),
        *slow_but([], ["continue", "kto", "orpo", "reward", "distill"], pytest.mark.long),
    ],
)
def test_what_rows_say_is_what_each_loss_sees(method, look):
    rows = [row_of(shapes_of("chatml")["plain"], method, good=i % 3 > 0) for i in range(24)]
    trainer = look(method, rows)
    metrics = [vars(trainer)[key] for key in vars(trainer) if key.endswith("_metrics")]
    left = [one["eval"] for one in metrics if isinstance(one, dict) and "eval" in one]
    assert not any(any(one.values()) for one in left), "the look leaves no metric behind"


def test_a_reference_is_the_model_that_training_began_with(look):
    """Random weights lie in no file that TRL could read them from again."""
    trainer = look("dpo", [PAIR] * 8, "model.weights=random")
    own, reference = (dict(m.named_parameters()) for m in (trainer.model, trainer.ref_model))
    assert all(torch.equal(own[name].cpu(), reference[name].cpu()) for name in reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", slow_but(["dpo", "sft"], ["dpo", "orpo", "kto", "sft"], pytest.mark.long)
)
def test_tools_and_thoughts_reach_the_loss(method, look, tmp_path):
    model = model_with("qwen3", tmp_path / "model")
    shapes = [shape for name, shape in shapes_of("qwen3").items() if name != "plain"]
    rows = [row_of(shapes[i % len(shapes)], method, good=i % 8 < 4) for i in range(24)]
    trainer = look(method, rows, f"model.name={model}", "train.max_length=2048")
    assert len(different(trainer.given)) == len(shapes), "each is looked at"


@pytest.mark.parametrize(
    ("method", "broken", "said"),
    slow_but(
        [("orpo", "tools", "reads other tokens")],
        [("orpo", "tools", "reads other tokens"), ("kto", "labels", "have the label true")],
    ),
)
def test_a_fault_that_is_not_repaired_ends_the_run(method, broken, said, look, tmp_path):
    shape = shapes_of("qwen3")["tools"]
    rows = [row_of(shape, method, good=i < 70) for i in range(140 if broken == "labels" else 8)]
    name = f"model.name={model_with('qwen3', tmp_path / 'model')}"
    with unrepaired(), pytest.raises(DataError, match=said):
        look(method, rows, name, "train.max_length=2048")


@pytest.mark.parametrize("method", slow_but(["sft"], ["sft", "dpo"]))
def test_a_file_whose_first_rows_are_all_too_long_is_not_refused(method, look):
    rows = [
        {"prompt": "word " * size, "completion": "High.", "chosen": "High.", "rejected": "Low."}
        for size in [200] * 300 + [3] * 300
    ]
    other = ("chosen", "rejected") if method == "sft" else ("completion",)
    rows = [{key: row[key] for key in row if key not in other} for row in rows]
    trainer = look(method, rows, "train.max_length=64")
    assert trainer.ledgers["train"].dropped == 300
    assert min(different(trainer.given)) >= 300, "none is looked at of which nothing is left"
    assert look(method, rows[:299] + rows[-1:], "train.max_length=64"), "nor is there one to see"


@pytest.mark.filterwarnings("ignore:.*truncation mode is deprecated:FutureWarning")
def test_answers_of_which_the_end_is_kept_are_as_the_rows_say(look):
    """Their first token is one of the answer, and nothing foresees it."""
    look("dpo", [PAIR] * 8, "train.max_length=3", "train.truncation_mode=keep_end")


def test_a_column_that_the_trainer_does_not_read_is_refused(look, tmp_path):
    rows = [{"prompt": ASKED, "tools": shapes_of("qwen3")["tools"]["tools"]}] * 8
    model = model_with("qwen3", tmp_path / "model")
    with pytest.raises(DataError, match="reads other tokens") as caught:
        look("grpo", rows, f"model.name={model}")
    assert "'tools'" in str(caught.value)


def test_a_loss_on_other_tokens_is_refused(look, monkeypatch):
    """A collator that forgets the mask of the prompt, as one of a script may."""
    kind = first_batches._seen

    def forgetful(trainer: Any, prepared: list[Any], size: int | None) -> Any:
        plain = trainer.data_collator

        def collate(rows: list[Any]) -> Any:
            batch = plain(rows)
            batch["completion_mask"] = batch["attention_mask"]
            return batch

        monkeypatch.setattr(trainer, "data_collator", collate)
        return kind(trainer, prepared, size)

    monkeypatch.setattr(first_batches, "_seen", forgetful)
    with pytest.raises(DataError, match="the loss is on other tokens"):
        look("dpo", [PAIR] * 8)


@pytest.mark.slow
def test_prompts_behind_padding_are_scored_as_alone(look, tmp_path):
    """GPT-2 has learned positions, which the trainer does not give; recurrent states have none."""
    rows = [{"prompt": [user("Tide?" * (1 + 7 * (i % 2)))]} for i in range(8)]
    made = {}
    for family in ("gpt2", "mamba"):
        folder = made[family] = folder_of(family, tmp_path)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    name = [f"model.name={made['gpt2']}", f"train.teacher_model_name_or_path={made['gpt2']}"]
    trainer = look("distill", rows, *name)
    trainer.model.eval()
    short, long = (trainer._tokenize_prompts([row["prompt"]])[0][0] for row in rows[:2])
    alone, beside = (first_batches._padded(0, rows) for rows in ([short], [short, long]))
    assert first_batches._change(trainer, alone, beside) < first_batches.ROUNDED
    with unrepaired(), pytest.raises(ConfigError, match="otherwise behind padding"):
        look("distill", rows, *name)


def test_labels_alternate_in_every_order_and_epochs_differ():
    from datasets import Dataset

    rows = Dataset.from_dict({"label": [True] * 60 + [False] * 20, "n": list(range(80))})
    once, again, other = (spread(rows, seed)["n"] for seed in (1, 1, 2))
    assert list(once) == list(again) != list(other)
    assert sorted(once) == list(range(80)), "each row once"
    labels = spread(rows, 1)["label"]
    assert all({True, False} == {*labels[i : i + 8]} for i in range(0, 80, 8))
    blocks = InBlocks(11, 4, seed=0)
    first = list(blocks)
    blocks.set_epoch(1)
    assert sorted(first) == sorted(blocks) == list(range(11))
    assert first[-3:] == [8, 9, 10], "a smaller block stays last"
    orders = []
    for epoch in range(6):
        blocks.set_epoch(epoch)
        orders.append(tuple(blocks))
        assert {orders[-1][:4], orders[-1][4:8]} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert len({*orders}) == 2, "blocks trade places"
    with pytest.raises(DataError, match="all 60 rows have the label true"):
        spread(rows.select(range(60)), 0)


def test_pairs_are_unpaired_before_they_are_spread():
    from datasets import Dataset

    rows = Dataset.from_list([{key: str(value) for key, value in PAIR.items()}] * 30)
    labels = spread(rows, 0)["label"]
    assert len(labels) == 60
    assert all(sum(labels[i : i + 2]) == 1 for i in range(0, 60, 2))


def test_a_teacher_with_other_words_is_refused(look, tmp_path):
    folder = tmp_path / "teacher"
    AutoTokenizer.from_pretrained(TINY_LLAMA).save_pretrained(folder)
    for file in TINY_LLAMA.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).write_bytes(file.read_bytes())
    known = json.loads((folder / "tokenizer.json").read_text())
    words = known["model"]["vocab"]
    one, two = [word for word in words if len(word) > 3][:2]
    words[one], words[two] = words[two], words[one]
    (folder / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="differ in 2 of them") as caught:
        look("distill", [{"prompt": ASKED}] * 8, f"train.teacher_model_name_or_path={folder}")
    assert repr(min(one, two)) in str(caught.value)
