"""The eval loss is a mean over tokens, so that it does not depend on how rows are batched."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

import finetune
from finetune import load_recipe


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_eval_loss_is_of_tokens_whatever_batches_they_are_in(packing, tmp_path, cli) -> None:
    """Also those of one row each, of the run that is loaded again."""
    rows = [{"prompt": "Say it.", "completion": " no" * (1 + 13 * (i % 4))} for i in range(22)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    losses = []
    for size in (1, 4):
        settings = [
            f"data.path={tmp_path / 'rows.jsonl'}", "~data.name", "data.eval_fraction=0.5",
            f"train.per_device_eval_batch_size={size}", "train.max_steps=1", "train.warmup_steps=0",
            "precision.compute=fp32", "model.dtype=float32", f"train.padding_free={packing}",
            "train.max_length=null", "train.eval_strategy=steps", "train.eval_steps=1",
            "eval.samples=false",
        ]  # fmt: skip
        report = finetune.train(
            load_recipe("tiny_full_bf16", settings), out=tmp_path, console=Console(quiet=True)
        )
        losses.append(report.eval_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    again = json.loads(cli("evaluate", report.folder, "--rows", "--json").out)
    assert again["held_out_rows"]["loss"] == pytest.approx(losses[1], rel=1e-6)
