"""Hints have evidence, and noise has none; a run that stops early says where."""

from __future__ import annotations

import json

import numpy as np
import pytest

from finetune import load_recipe
from finetune.errors import ConfigError
from finetune.training.early_stopping import check_early_stopping, stopped_early, stoppers
from finetune.training.hints import falling, hints, rising

RUNS = 400


def points(values) -> list[tuple[int, float]]:
    return [(10 * (i + 1), float(value)) for i, value in enumerate(values)]


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_noise_gets_no_hint_and_a_slope_within_it_does(correlation) -> None:
    draw, said, found = np.random.default_rng(0), 0, 0
    for _ in range(RUNS):
        noise = draw.normal(size=80)
        for i in range(1, len(noise)):
            noise[i] += correlation * noise[i - 1]
        values = 2 + 0.1 * noise
        said += bool(falling(points(values))) + bool(rising(points(values[:12])))
        worse = [1.5, *np.sort(values[:12] + np.arange(12) / 10)]
        found += bool(falling(points(values - np.arange(80) / 20))) + bool(rising(points(worse)))
    assert said <= RUNS // 100  # of two tests each
    assert found > RUNS


def test_a_hint_needs_enough_that_matters() -> None:
    flat = 2 - np.arange(80) * 1e-6  # a sure slope of nothing
    assert not falling(points(flat))
    assert not rising(points([1.0, 1.5, 2.0, 2.5]))  # three evaluations after the best
    assert not falling(points([float("nan")] * 80))


def test_what_is_said_can_be_typed() -> None:
    config = load_recipe("llama_1b_lora_fp8", ["train.max_steps=80"], check_train=False).config
    rows = [{"step": i, "loss": 3 - i / 100} for i in range(1, 81)]
    (line,) = hints(config, rows, steps=80, rate=2e-4)
    assert "train.max_steps=160" in line
    load_recipe("llama_1b_lora_fp8", ["train.max_steps=160"], check_train=False)
    rows += [{"step": 10 * i, "eval_loss": 1 + i / 10 - 0.01 * (i % 2)} for i in range(8)]
    worse, rate = hints(config, rows, steps=80, rate=2e-2)
    assert "rises since step 0" in worse  # more steps are not proposed with it
    assert "usual for sft with adapters: 5e-05 to 0.0005" in rate


def test_answers_that_do_not_end_and_a_reward_that_falls_are_said() -> None:
    config = load_recipe("tiny_grpo_fp8", check_train=False).config
    cut = "completions/clipped_ratio"
    rows = [{"step": i, "loss": 3 - i / 100, cut: 1.0} for i in range(1, 81)]
    rows += [{"step": 9 * i, "eval_reward": 0.9 - i / 20 + 0.01 * (i % 2)} for i in range(8)]
    ends, falls = hints(config, rows, steps=80, rate=1e-6)
    assert ends.startswith("100% of the answers were cut at train.max_completion_length")
    assert falls.startswith("the eval reward falls since step 0, from 0.900 to 0.560: fewer steps")
    assert "train.metric_for_best_model=eval_reward" in falls
    ended = [row | {cut: 0.4} for row in rows if "loss" in row]  # its loss falls, and says nothing
    assert not list(hints(config, ended, steps=80, rate=1e-6))


class State:
    global_step, max_steps, best_global_step = 40, 100, 20


def test_early_stopping_is_refused_where_it_would_not_stop(tmp_path) -> None:
    on = {"early_stopping_patience": 2}
    for train in (on, {"early_stopping_threshold": 0.1}):
        with pytest.raises(ConfigError, match="needs a patience, evaluations"):
            check_early_stopping(train)
    check_early_stopping(on | {"load_best_model_at_end": True, "eval_strategy": "steps"})
    assert "at step 40 of 100" in stopped_early(on, State)
    assert "of step 20" in stopped_early(on, State)
    assert not stopped_early({}, State)
    counted = {"args": {}, "attributes": {"early_stopping_patience_counter": 1}}
    state = {"stateful_callbacks": {"EarlyStoppingCallback": counted}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (resumed,) = stoppers(on, tmp_path)
    assert (resumed.early_stopping_patience, resumed.early_stopping_patience_counter) == (2, 1)


@pytest.mark.slow
def test_a_run_stops_early_and_says_so(tmp_path) -> None:
    """No evaluation is better by a thousand: it ends at the second after the first."""
    from rich.console import Console

    from finetune import train

    words = ["train.max_steps=12", "train.early_stopping_patience=2", "eval.samples=false"]
    words += ["train.load_best_model_at_end=true", "train.early_stopping_threshold=1000"]
    for kind in ("eval", "save"):
        words += [f"train.{kind}_strategy=steps", f"train.{kind}_steps=2"]
    recipe = load_recipe("tiny_full_bf16", [*words, "data.max_rows=24"])
    report = train(recipe, out=tmp_path, console=Console(quiet=True))
    (line,) = report.hints
    assert line.startswith("stopped early at step ")
    assert int(line.split()[4]) in (4, 6)  # an evaluation before the first step counts
    assert report.to_json().count("stopped early") == 1
