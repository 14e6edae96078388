"""Training methods beside SFT, as recipes: proven, counted, and what is asked of each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from finetune import load_recipe, train
from finetune.config.methods import METHODS, arguments, method_of
from finetune.data.counting import counted_rows
from finetune.errors import ConfigError, DataError, PrecisionError
from finetune.export.export import export_run
from finetune.training.asking.reload import open_trained
from finetune.training.trl_trainer import give_rate
from tests.conftest import slow_but

QUIET = Console(quiet=True)
OWN = {"dpo": "rewards/accuracies", "kto": "kl", "orpo": "rewards/margins", "reward": "accuracy"}
"""A metric that TRL logs of a method alone."""
SHORT = (
    "data.max_rows=24", "data.eval_fraction=0.3", "eval.samples=false", "eval.at_start=true",
    "train.max_steps=3", "train.warmup_steps=0", "train.logging_steps=1", "train.eval_steps=3",
    "train.per_device_train_batch_size=2",
)  # fmt: skip
LORA = ("lora.r=8", "precision.scaling=rowwise", "~precision.amax_history_len")


def run(recipe: str, folder: Path, *overrides: str) -> tuple[Any, list[dict[str, Any]]]:
    """The receipt of a short run, and its metrics."""
    report = train(load_recipe(recipe, [*SHORT, *overrides]), out=folder, console=QUIET)
    lines = (report.folder / "metrics.jsonl").read_text().splitlines()
    return report, [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("method", "adapters"),
    [
        *slow_but([], [("dpo", LORA), ("kto", ())]),
        *slow_but([], [("orpo", ()), ("reward", LORA), ("continue", LORA)], pytest.mark.long),
    ],
)
def test_a_method_is_proven_counted_and_logs_its_own_metric(method, adapters, tmp_path):
    if method == "continue":
        adapters = (*adapters, "~train.embedding_learning_rate")
    report, metrics = run(f"tiny_{method}_fp8", tmp_path, *adapters)
    receipt, ledger = report.receipt, report.receipt.data["train"]
    assert (receipt.status, receipt.run["method"]) == ("proven", method)
    assert receipt.fp8_flop_share > 0.3
    t = receipt.trainable
    assert t["before"] == t["after"] == t["in_optimizer"] == t["moved"] + t["below_resolution"]
    assert 0 < ledger["trained"] <= ledger["tokens"]
    losses = [row for row in metrics if "loss" in row]
    assert len(losses) == 3
    assert all(OWN.get(method, "loss") in row for row in losses)
    if METHODS[method].reference:
        begins = next(row["eval_loss"] for row in metrics if "eval_loss" in row)
        expected = {"dpo": math.log(2), "kto": 0.5}[method]
        assert begins == pytest.approx(expected, abs=2e-4), "the policy is its reference"
        given = ["LlamaForCausalLM: in the precision of the policy, FP8 in training"]
        own = []  # the policy itself, adapters switched off
        assert receipt.precision["references"] == (own if LORA[0] in adapters else given)


@pytest.mark.slow
def test_a_policy_of_codes_and_its_reference_are_evaluated_alike(tmp_path):
    """By codes beside weights of 16 bits, the first evaluation had a loss of 0.709."""
    codes = ["precision.scaling=tensorwise", "~precision.amax_history_len", "train.max_steps=2"]
    codes += ["precision.fp8_params=true", "model.dtype=bfloat16", "train.optim=adamw_torch_8bit"]
    with pytest.raises(PrecisionError, match="different weights") as refused:
        run("tiny_dpo_fp8", tmp_path, *codes)
    assert "precision.eval=fp8" in refused.value.fix
    report, metrics = run("tiny_dpo_fp8", tmp_path, *codes, "precision.eval=fp8")
    assert report.receipt.status == "proven"
    first = next(row["eval_loss"] for row in metrics if "eval_loss" in row)
    assert first == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
def test_a_reward_model_is_saved_as_transformers_reads_it(tmp_path):
    from transformers import AutoModelForSequenceClassification

    report, _ = run("tiny_reward_bf16", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(report.folder / "model")
    assert model.config.num_labels == 1
    scores = model(input_ids=torch.tensor([[1, 5, 9]])).logits
    assert scores.shape == (1, 1)
    again, _ = run("tiny_reward_bf16", tmp_path, f"model.name={report.folder / 'model'}")
    assert again.receipt.status == "proven", "and trained on"
    with pytest.raises(ConfigError, match="scores texts, and writes none"):
        open_trained(report.folder)


@pytest.mark.slow
def test_a_run_of_labelled_answers_is_exported_with_parity(tmp_path):
    """The rows of its check are of no form that SFT reads: answers not to give are among them."""
    report, _ = run("tiny_kto_bf16", tmp_path, *LORA[:1])
    made = export_run(report.folder, "merged", tmp_path / "merged")
    assert made.target == "merged"
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_what_trl_drops_and_cuts_is_counted(tmp_path):
    """An answer of 30 words of which some lie behind the limit; a prompt that fills it."""
    rows = [
        {"prompt": "a " * asked, "chosen": "b " * given, "rejected": "c "}
        for asked, given in ((5, 5), (5, 300), (300, 5))
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["~data.name", f"data.path={file}", "data.eval_fraction=0", "train.eval_strategy=no"]
    for method in ("dpo", "orpo", "kto"):
        override = [*given, f"train.method={method}"]
        override += ["~train.pad_to_multiple_of"] * (method == "orpo")
        found = counted_rows(load_recipe("tiny_dpo_bf16", override).config)
        each = 2 if method == "kto" else 1
        assert (found.ledger.rows, found.ledger.dropped) == (3 * each, each)
        assert (found.ledger.truncated, found.ledger.max_length) == (1, 128)
        lines = [line for _, line in found.ledger.lines()]
        assert any("longer than train.max_length=128 (cut)" in line for line in lines)
        assert any(f"{each} of {3 * each} rows (33%) are dropped" in line for line in lines)
        shown = found.prepared[0]
        assert {*shown["labels"]} > {-100}
    file.write_text(json.dumps(rows[2]) + "\n")
    with pytest.raises(DataError, match="none of 1 train rows leaves room for an answer"):
        counted_rows(load_recipe("tiny_dpo_bf16", given).config)


def counted(tmp_path: Path, recipe: str, rows: list[dict[str, Any]], *given: str) -> Any:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return counted_rows(load_recipe(recipe, ["~data.name", f"data.path={file}", *given]).config)


def test_labelled_rows_to_evaluate_on_may_have_one_label(tmp_path):
    """Of few rows that are set aside by chance, all may; only training needs both."""
    rows = [{"prompt": f"{i}?", "completion": f"{i}.", "label": i % 2 > 0} for i in range(8)]
    good = tmp_path / "good.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"]))
    found = counted(tmp_path, "tiny_kto_bf16", rows, f"data.eval_path={good}")
    counts = {name: (ledger.rows, ledger.good) for name, ledger in found.ledgers.items()}
    assert counts == {"train": (8, 4), "eval": (4, 4)}


def test_rows_that_fill_no_batch_of_prompts_are_counted(tmp_path):
    """Batches of 32 are four prompts with eight answers each; distillation has one of each."""
    rows = [{"prompt": f"What is {i} + 1?", "chosen": str(i), "rejected": "no"} for i in range(55)]
    for method, left in (("grpo", 3), ("distill", 7)):
        own = ["train.per_device_train_batch_size=8"] * (method == "distill")
        given = ("data.eval_fraction=0", "train.gradient_accumulation_steps=1", *own)
        given += ("train.eval_strategy=no",)
        ledger = counted(tmp_path, f"tiny_{method}_bf16", rows, *given).ledger
        assert (ledger.read, ledger.left_out) == (55, left)
        assert any(f"{left} of 55 rows are left out" in line for _, line in ledger.lines())


def test_rows_that_are_evaluated_are_counted_as_those_that_are_trained_on(tmp_path):
    short = {"prompt": "Hi", "completion": "Aye."}
    held_out = tmp_path / "eval.jsonl"
    rows = [{"prompt": "word " * 40, "completion": "Aye."}] * 4 + [short] * 4
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"data.eval_path={held_out}", "train.max_length=48")
    found = counted(tmp_path, "tiny_full_bf16", [short] * 8, *given)
    lines = [line for warns, line in found.ledgers["eval"].lines("eval ") if warns]
    assert any(line.startswith("4 of 8 eval rows (50%) are dropped") for line in lines)
    packed = ("train.packing=true", "train.eval_packing=false")
    found = counted(tmp_path, "tiny_full_bf16", [short] * 8, *given, *packed)
    assert found.ledger.bins == 4
    assert found.ledgers["eval"].bins is None, "packed, or not, as its own key says"
    found = counted(tmp_path, "tiny_full_bf16", [short] * 8, given[0])
    needed = found.ledgers["eval"].lengths.needed.max()
    assert found.lengths.auto(1, None) == needed > found.ledger.longest


def test_embeddings_have_a_learning_rate_of_their_own():
    body, ends = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    alone = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW(
        [{"params": [body, ends], "weight_decay": 0.3}, {"params": [alone], "weight_decay": 0.0}],
        lr=1.0,
    )
    give_rate(optimizer, [ends, alone], 0.1)
    give_rate(optimizer, [ends, alone], 0.1)
    found = [(g["params"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [([body], 1.0, 0.3), ([alone], 0.1, 0.0), ([ends], 0.1, 0.3)]
    with pytest.raises(ConfigError, match="none of them trains"):
        give_rate(optimizer, [], 0.1)


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("overrides", "said", "fix"),
    [
        (["train.method=dop"], "did you mean 'dpo'?", "train.method=sft, "),
        (["train.method=dpo", "train.beat=0.2"], "trl.DPOConfig has no argument 'beat'", ".beta="),
        (["train.method=kto", "train.ld_alpha=1"], "KTOConfig has no", "train.method=dpo"),
        (["train.method=dpo", "train.packing=true"], "DPOConfig has no", "train.method=sft, con"),
        (["train.method=dpo", "train.beta=much"], "train.beta must be a number", "~train.beta"),
    ],
)
def test_keys_are_those_of_the_methods_own_configuration(overrides, said, fix):
    with pytest.raises(ConfigError) as refused:
        load_recipe("tiny_full_fp8", overrides)
    assert said in refused.value.what
    assert fix in refused.value.fix


def test_another_method_leaves_the_settings_of_sft_behind():
    found = load_recipe("llama_8b_lora_fp8", ["train.method=dpo", "train.loss_type=ipo"]).config
    assert "packing" not in found.train
    assert (found.train["loss_type"], method_of(found.train).name) == ("ipo", "dpo")
    again = load_recipe("tiny_reward_fp8", ["train.method=sft"]).config
    assert (load_recipe("tiny_reward_fp8").config.model.head, again.model.head) == ("score", None)


def test_each_row_of_the_table_names_what_trl_has():
    for name, method in METHODS.items():
        assert method.trainer_class.__name__ == method.trainer.rpartition(".")[2]
        assert {"learning_rate", "method", "embedding_learning_rate"} <= {*arguments(method)}
        assert hasattr(method.config_class("x", bf16=False, use_cpu=True), "learning_rate"), name
        low, high = method.rates
        assert not method.is_unusual(low, lora=False)
        assert method.is_unusual(40 * high, lora=True)
