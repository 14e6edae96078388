"""What a run ends with: loss, verdict, costs, folder, next; the rest when it is asked for."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

import finetune
from finetune import load_recipe
from finetune.config.methods import METHODS
from finetune.export.serving import commands
from finetune.logging import as_text
from finetune.precision.proof.row import LayerReceipt
from finetune.runs.card import model_card
from finetune.runs.progress import figures
from finetune.runs.receipt import Receipt, RunReport, Sample
from tests.conftest import slow_but


@pytest.mark.parametrize("words", slow_but([[]], [[], ["--details"]]))
def test_a_run_ends_with_five_lines_unless_more_are_asked_for(words, cli) -> None:
    settings = [
        "train.max_steps=3", "data.max_rows=12", "train.warmup_steps=0", "train.logging_steps=1",
        "train.lr_scheduler_type=constant", "train.eval_strategy=no", "data.eval_fraction=0",
    ]  # fmt: skip
    found = cli("tiny_full_bf16", *settings, *words)
    assert found.code == 0
    end = found.out.partition("\nloss ")[2].splitlines()
    assert end[-1].strip().startswith(("next:", "python -m finetune report"))
    if words:
        assert "fprop  dgrad  wgrad" in found.out
        assert found.out.count("What is the capital of France?") == 2
        return
    verdict, costs, folder, following = end[1:]
    assert verdict == "BF16 verified: no matmul ran in FP8"
    assert "peak process memory" in costs
    assert folder.startswith("run folder: runs/tiny_full_bf16/")
    assert following.startswith("next: python -m finetune generate runs/tiny_full_bf16/")


def test_warnings_are_among_the_last_lines(tmp_path) -> None:
    counts = {"before": 9, "after": 9, "in_optimizer": 4, "moved": 4}
    layer = LayerReceipt("lm_head", (8, 8), "head", "bf16", "bf16", "bf16", {}, 1, "as configured")
    receipt = Receipt("proven", {"ran": "bf16"}, trainable=counts, layers=[layer])
    report = RunReport(tmp_path, receipt, 2.0, 1.0, None, None, 1.0, 1.0, [Sample("a", "b")])
    short = as_text(report.summary)
    assert "4 in the optimizer" in short
    assert "lm_head" not in short
    assert set(short.splitlines()) <= set(str(report).splitlines())
    assert all(isinstance(line, Text) for line in receipt.verdict())


def test_rewarded_answers_end_with_rewards_and_no_loss(tmp_path) -> None:
    """The reward of the last step rose by luck: the evaluated one fell, and stands first."""
    ended = {"completions/mean_length": 12.25, "completions/clipped_ratio": 1.0, "kl": 0.021}
    rewards = [0.625, *[0.5] * 9, *[0.45] * 9, 0.844]
    rows: list[dict[str, Any]] = [{"eval_loss": 0.0, "eval_reward": 0.583}]
    rows += [{"loss": 0.02, "reward": reward, **ended} for reward in rewards]
    rows += [{"eval_loss": -0.0, "eval_reward": 0.5}]
    own = figures(rows, METHODS["grpo"])
    receipt = Receipt("proven", {"ran": "bf16"}, run={"method": "grpo"})
    report = RunReport(tmp_path, receipt, 0.02, 0.02, 0.0, None, 1.0, 1.0, own=own)
    line = as_text(report).splitlines()[0]
    said = "eval reward 0.583 -> 0.500 · reward 0.512 -> 0.489 · length 12.2 · KL 0.021 · clipped"
    assert " ".join(as_text(report).split()).startswith(f"{said} answers 100%"), line
    config = load_recipe("tiny_grpo_fp8", check_train=False).config
    card = model_card(config, {}, json.loads(report.to_json()))
    assert "| eval reward | 0.583 -> 0.500 |" in card
    assert "| method | GRPO, full fine-tuning |" in card
    assert "loss" not in card


def test_an_adapter_is_served_beside_its_base_at_its_highest_rank(tmp_path) -> None:
    adapter = {"r": 8, "rank_pattern": {"q_proj": 24}, "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    vllm, sglang = commands(tmp_path, "adapter")
    named = f"{tmp_path.name}={tmp_path}"
    assert vllm == (f"vllm serve org/base --enable-lora --max-lora-rank 32 --lora-modules {named}")
    assert sglang.endswith(f"--model-path org/base --max-lora-rank 24 --lora-paths {named}")
    assert commands(tmp_path, "nvfp4") == [f"vllm serve {tmp_path}"]
    assert f"'FROM %s\\n' {tmp_path} > Modelfile" in commands(tmp_path, "merged")[-1]


def test_serve_hands_a_folder_over_or_names_what_is_missing(tmp_path, cli, monkeypatch) -> None:
    import os

    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    known, started = "transformers.utils.import_utils.is_serve_available", []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words[3:]))
    monkeypatch.setattr(known, lambda: False)
    refused = cli("serve", tmp_path / "merged")
    assert refused.code == 2
    assert "pip install 'transformers[serving]'" in refused.err
    monkeypatch.setattr(known, lambda: True)
    assert cli("serve", tmp_path / "merged", "--port", "8001", "--", "--enable-cors").code == 0
    asked = ["serve", str(tmp_path / "merged"), "--port", "8001", "--enable-cors"]
    assert started == [asked]


class Full(io.StringIO):
    """A file whose disk fills up at the first step."""

    is_full = False

    def write(self, text: str) -> int:
        self.is_full = self.is_full or "step 1/" in text
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


@pytest.mark.slow
@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_run_whose_output_has_no_room_trains_on_and_notes_it(from_the_start, tmp_path) -> None:
    settings = [
        "train.max_steps=2", "data.max_rows=12", "train.eval_strategy=no", "data.eval_fraction=0",
        "train.logging_steps=1",
    ]  # fmt: skip
    full = Full()
    full.is_full = from_the_start
    shown = Console(file=full, width=80)
    recipe = load_recipe("tiny_full_bf16", settings)
    report = finetune.train(recipe, out=tmp_path, console=shown)
    assert shown.file is full
    assert ("run folder" in full.getvalue()) is not from_the_start
    assert "step 2/" not in full.getvalue()
    assert (report.folder / "model" / "model.safetensors").is_file()
    assert "No space left" in (report.folder / "output-lost.txt").read_text()
