"""What a run makes once and hands on: its resolution."""

from __future__ import annotations

import pytest
from rich.console import Console

import finetune
from finetune import load_recipe
from finetune.estimator.trace import rehearsal
from finetune.hardware import requirements
from finetune.hardware.requirements import resolve
from finetune.training.helper import session
from finetune.training.run import preflight

SHORT = (
    "train.max_steps=2", "train.warmup_steps=0", "train.eval_strategy=no", "eval.samples=false",
    "data.max_rows=12", "train.max_length=32",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["tiny_lora_fp8", pytest.param("tiny_full_fp8", marks=pytest.mark.long)]
)
def test_a_run_is_resolved_once(recipe, tmp_path, monkeypatch) -> None:
    calls = []

    def counted(function):
        return lambda *args: (calls.append(function.__name__), function(*args))[1]

    for module in (preflight, session, requirements):
        monkeypatch.setattr(module, "resolve", counted(resolve))
    rehearsed = []
    monkeypatch.setattr(
        rehearsal, "meta_model", lambda *a, **k: rehearsed.append(a) or meta_model(*a, **k)
    )
    report = finetune.train(load_recipe(recipe, SHORT), out=tmp_path, console=Console(quiet=True))
    assert calls == ["resolve"]
    assert report.receipt.status == "proven"
    assert rehearsed, "the prediction takes what the run has"
    assert report.receipt.memory["predicted_gib"] > 0


meta_model = rehearsal.meta_model
