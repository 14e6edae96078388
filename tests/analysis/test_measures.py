"""What runs of other methods are judged by: compare, reports and lists read it, not the loss."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

import finetune
from finetune.analysis.compare.result import Comparison, PairOfRuns, Side, read_comparison
from finetune.analysis.experiment.fairness import requested_differences
from finetune.config.measures import MEASURES
from finetune.config.methods import METHODS
from finetune.runs.folder import RunFolder
from tests.run_folders import make_run

SEEDS = (42, 43, 44)
COLUMNS = {
    "grpo": ("reward", "reward_std", "kl", "completions/mean_length"),
    "dpo": ("rewards/accuracies", "rewards/chosen", "rewards/rejected", "rewards/margins"),
}


def run_of(method: str, folder: Path, recipe: str, seed: int, end: float, **more: float) -> Path:
    """A run whose measure rises to `end`, as TRL logs it; a share `offset` shifts its losses."""
    run = make_run(folder, recipe=recipe, seed=seed, steps=40, groups=(), **more)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"]["method"] = method
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    dice, rows = random.Random(f"{recipe} {seed}"), []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        value = end * min(1.0, row["step"] / 20) + 0.001 * dice.gauss(0, 1)
        if {"loss", "eval_loss"} & row.keys() and method == "dpo":  # one that falls to zero
            row |= {key: row[key] / 100 for key in ("loss", "eval_loss") if key in row}
        if "loss" in row:
            row |= dict.fromkeys(COLUMNS[method], value)
        if "eval_loss" in row and method == "dpo":
            row["eval_rewards/accuracies"] = value + 0.1
        rows.append(json.dumps(row) + "\n")
    (run / "metrics.jsonl").write_text("".join(rows))
    return run


def comparison(method: str, folder: Path, a: float, b: float, **more: float) -> Path:
    """Runs of both sides over three seeds, as a comparison that is still to be judged."""
    sides = {"a": ("tiny_full_fp8", a, more), "b": ("tiny_full_bf16", b, {})}
    for side, (recipe, end, shift) in sides.items():
        for seed in SEEDS:
            run_of(method, folder / side / str(seed), recipe, seed, end, **shift)
    Comparison(
        a=Side(recipe="x_fp8", label="FP8"), b=Side(recipe="x_bf16", label="BF16"),
        seeds=[*SEEDS], margin=0.01, confidence=0.95, verdict="undecided",
        runs=[PairOfRuns(seed=seed, a=f"a/{seed}", b=f"b/{seed}") for seed in SEEDS],
    ).save(folder)  # fmt: skip
    return folder


@pytest.mark.slow
def test_grpo_is_judged_by_its_reward_and_never_by_its_loss(tmp_path, cli):
    """Here FP8's loss is twice BF16's, which says nothing of what was learnt."""
    folder = comparison("grpo", tmp_path / "c", 0.60, 0.61, offset=1.0)
    done = cli("compare", folder)
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("equivalent: FP8 ends where BF16 ends, within 5 pt (reward)")
    found = read_comparison(folder)
    assert not found.losses
    assert found.scores["reward"].gap == pytest.approx(-0.01, abs=2e-3)
    assert "the reward is the mean of the last 10 steps" in found.notes
    ends = found.scores["reward"].b
    assert found.band == {"reward": pytest.approx(max(ends) - min(ends))}
    assert cli("compare", folder, "--margins", "reward=0.5pt").code == 3
    found = read_comparison(folder)
    assert found.reasons[0].startswith("reward: FP8 ends lower by more than 0.5 pt: -1.0")
    refused = cli("compare", folder, "--margins", "train=2%")
    assert refused.code == 2
    assert "judged by reward" in refused.err
    log = folder / "b" / "43" / "steps.jsonl"  # answers of its own have lengths of their own
    log.write_text(log.read_text().replace('"tokens": 4', '"tokens": 5'))
    assert "reward: " in cli("compare", folder).out
    assert read_comparison(folder).verdict == "not equivalent"
    page = (folder / "report.html").read_text("utf-8")
    assert 'title="comparison.json: scores.reward.gap">−1.0' in page
    assert 'id="plot-gap_reward"' in page
    assert 'id="plot-loss"' not in page


@pytest.mark.slow
def test_preferences_are_judged_by_the_accuracy_of_the_evaluation_too(tmp_path, cli, monkeypatch):
    folder = comparison("dpo", tmp_path / "c", 0.70, 0.80)
    assert cli("compare", folder).code == 3
    found = read_comparison(folder)
    verdicts = {name: gap.verdict for name, gap in found.gaps.items()}
    assert verdicts == {
        "loss": "equivalent", "accuracy": "not equivalent",
    }  # fmt: skip
    assert found.scores["accuracy"].a == pytest.approx([0.8] * 3, abs=0.01)  # of the evaluation
    assert cli("compare", folder, "--margins", "loss=3pt,accuracy=12pt").code == 0
    monkeypatch.chdir(tmp_path)
    run = run_of("dpo", tmp_path / "runs" / "tiny_full_fp8" / "r", "tiny_full_fp8", 1, 0.7)
    assert RunFolder(run).summary()["scores"]["accuracy"] == pytest.approx(0.8, abs=0.01)
    assert "  accuracy 0.79" in cli("ls", "--runs").out
    page = finetune.report(run).html.read_text("utf-8")
    assert "<dt>Eval rewards/accuracies</dt>" in page
    assert "Perplexity" not in page
    assert all(f'id="plot-{name}"' in page for name in ("rewards", "margins", "accuracy"))
    both = finetune.report([run, folder / "b" / "42"], tmp_path / "both").html.read_text("utf-8")
    assert all(f'id="plot-{name}"' in both for name in ("rewards", "accuracy"))


def test_a_measure_that_one_side_never_logged_is_refused(tmp_path, cli):
    folder = comparison("grpo", tmp_path / "c", 0.6, 0.6)
    log = folder / "b" / "43" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"reward"', '"other"'))
    assert "1 of 6 runs logged no reward" in cli("compare", folder).out


def test_two_methods_are_no_pair():
    sft = finetune.load_recipe("tiny_full_bf16").config
    other = finetune.load_recipe("tiny_full_bf16", check_train=False).config
    other = other.model_copy(update={"train": {"method": "orpo", "max_steps": 2}})
    found = requested_differences(sft, other, on_cpu=True)
    assert (found[0].condition, found[0].a, found[0].b) == ("method", "sft", "orpo")


def test_each_method_is_judged_by_measures_of_the_table():
    assert {name for method in METHODS.values() for name in method.judged} == {*MEASURES}
