"""Hints have evidence, and noise has none; a run that stops early says where."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from finetune import load_recipe
from finetune.config.train_keys import TrainSection
from finetune.errors import ConfigError
from finetune.training.run.early_stopping import (
    check_early_stopping,
    never_stops,
    stopped_early,
    stoppers,
    stopping,
)
from finetune.training.run.hints import falling, hints, rising

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


@pytest.mark.parametrize(
    ("typed", "implied"),
    [
        ("", "eval_strategy=steps eval_steps=0.05 save_strategy=steps save_steps=0.05"),
        ("eval_steps=7", "eval_steps=7 save_steps=7"),
        ("save_steps=9", "eval_steps=9 save_steps=9"),
        ("eval_strategy=epoch", "eval_strategy=epoch save_strategy=epoch"),
        ("save_total_limit=5 eval_steps=4", "save_total_limit=5 load_best_model_at_end=true"),
    ],
)
@pytest.mark.parametrize("recipe", ["tiny_full_bf16", "llama_8b_lora_fp8"])
def test_a_patience_alone_implies_what_it_needs(recipe, typed, implied) -> None:
    """The recipes save nothing, or at other steps than they evaluate at."""
    words = [f"train.{word}" for word in typed.split()]
    found = load_recipe(recipe, ["train.early_stopping_patience=3", *words]).config
    check_early_stopping(found.train)
    for word in ("load_best_model_at_end=true", *implied.split()):
        key, _, value = word.partition("=")
        assert str(found.train[key]).lower().removesuffix(".0") == value
    rewarded = load_recipe("tiny_rloo_bf16", ["train.early_stopping_patience=3"]).config
    assert rewarded.train["metric_for_best_model"] == "reward"
    line = stopping(found.train)
    assert line.startswith("early stopping: evaluates and saves every ")
    assert "ends after 3 evaluations that are no better" in line


@pytest.mark.parametrize(
    "typed", ["save_strategy=no", "eval_strategy=no", "load_best_model_at_end=false"]
)
def test_what_contradicts_a_patience_is_refused_and_the_fix_works(typed, cli) -> None:
    words = ["validate", "tiny_lora_bf16", "train.early_stopping_patience=3", "data.max_rows=40"]
    refused = cli(*words, f"train.{typed}")
    assert refused.code == 2
    fix = refused.err.partition("fix:")[2].split()
    assert f"~train.{typed.partition('=')[0]}" in fix
    kept = [word for word in (f"train.{typed}",) if f"~{word.partition('=')[0]}" not in fix]
    assert cli(*words, *kept).code == 0


def test_a_run_that_evaluates_too_seldom_to_be_stopped_is_told() -> None:
    train = TrainSection(early_stopping_patience=3)
    args = SimpleNamespace(eval_strategy="steps", eval_steps=100)
    assert "0 evaluations in 50 steps" in never_stops(train, args, 50)
    assert not never_stops(train, args, 500)
    assert not never_stops(train, SimpleNamespace(eval_strategy="steps", eval_steps=0.05), 17)
    assert not never_stops(TrainSection(), args, 50)


class State:
    global_step, max_steps, best_global_step = 40, 100, 20


def test_early_stopping_is_refused_where_it_would_not_stop(tmp_path) -> None:
    on = TrainSection(early_stopping_patience=2)
    against = [{"load_best_model_at_end": False}, {"eval_strategy": "no"}, {"save_strategy": "no"}]
    for train in (*(on | one for one in against), {"early_stopping_threshold": 0.1}):
        with pytest.raises(ConfigError, match="needs a patience, evaluations"):
            check_early_stopping(TrainSection(train))
    check_early_stopping(on)
    assert "at step 40 of 100" in stopped_early(on, State)
    assert "from step 20" in stopped_early(on, State)
    assert not stopped_early(TrainSection(), State)
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
    words += ["train.early_stopping_threshold=1000", "train.eval_steps=2"]
    recipe = load_recipe("tiny_full_bf16", [*words, "data.max_rows=24"])
    report = train(recipe, out=tmp_path, console=Console(quiet=True))
    (line,) = report.hints
    assert line.startswith("stopped early at step ")
    assert int(line.split()[4]) in (4, 6)  # an evaluation before the first step counts
    assert report.to_json().count("stopped early") == 1
