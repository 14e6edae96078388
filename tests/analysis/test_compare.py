"""Comparisons: which pairs are fair, what their losses can say, how the runs are run and judged."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import finetune
from finetune.analysis.compare import compare
from finetune.analysis.compare.compare import make_pair, twin_of
from finetune.analysis.compare.result import Comparison, Side, read_comparison
from finetune.analysis.compare.verdict import judge
from finetune.analysis.experiment import jobs as running
from finetune.analysis.experiment.fairness import (
    CONDITIONS,
    FREE,
    executed_differences,
    requested_differences,
)
from finetune.analysis.experiment.jobs import Watcher
from finetune.analysis.experiment.outcome import read_outcome
from finetune.analysis.report import report as writer
from finetune.analysis.report.comparison_page import comparison_page
from finetune.analysis.report.elements import PageSource
from finetune.analysis.report.run_source import RunSource
from finetune.analysis.statistics import (
    band,
    loss_gap,
    seeds_to_settle,
    speed_ratio,
    step_ratios,
    verdict_of,
    warm_up_steps,
)
from finetune.cli.app import main
from finetune.errors import ConfigError, FinetuneError, RecipeNotFoundError, UnfairPairError
from finetune.training.health.callbacks import StepTimer
from tests.analysis import pretended
from tests.analysis.pretended import receipt
from tests.benchmarks.interval_coverage import simulate_losses, simulate_speeds, wrong
from tests.conftest import CPU, H100

# -------------------------------------------------------------------------------------- statistics


@pytest.mark.slow
def test_the_interval_covers_a_known_gap_and_verdicts_err_rarely():
    """On 200 pairs an error rate of 5 % is itself known to 1.5 % only; at the margin on 4,000."""
    random = numpy.random.default_rng(0)
    for gap, seeds in itertools.product((0.0, 0.003, 0.01, 0.03), (3, 5)):
        counts = simulate_losses(gap, seeds, 200, random)
        assert 0.90 <= counts["covered"] / 200 <= 0.99
        if gap != 0.01:
            assert wrong(counts, gap) / 200 <= 0.06
    counts = simulate_losses(0.01, 3, 4000, random)
    assert 0.94 <= counts["covered"] / 4000 <= 0.96
    assert wrong(counts, 0.01) / 4000 <= 0.06


def test_verdicts_are_of_use_and_not_merely_careful():
    random = numpy.random.default_rng(1)
    assert simulate_losses(0.002, 3, 200, random)["equivalent"] > 160
    assert simulate_losses(0.03, 3, 200, random)["not equivalent"] > 190


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_interval_of_speeds_covers_where_steps_resemble_their_neighbours(seeds):
    random = numpy.random.default_rng(2)
    assert simulate_speeds(1.3, seeds, 135, 0.6, 100, random) >= 90


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.floats(-0.1, 0.1)), min_size=2, max_size=6, unique=True
    ),
    st.floats(0.1, 10),
)
@settings(max_examples=60, deadline=None)
def test_gaps_do_not_depend_on_the_unit_and_turn_around_when_sides_do(pairs, unit):
    b = [loss for loss, _ in pairs]
    a = [loss * math.exp(d) for loss, d in pairs]
    found = loss_gap(a, b, margin=0.01, confidence=0.95)
    assert found.interval is not None
    assert found.equivalence_interval is not None
    scaled = loss_gap([x * unit for x in a], [x * unit for x in b], margin=0.01, confidence=0.95)
    assert scaled.gap == pytest.approx(found.gap, abs=1e-9)
    turned = loss_gap(b, a, margin=0.01, confidence=0.95)
    assert math.log1p(turned.gap) == pytest.approx(-math.log1p(found.gap), abs=1e-9)
    low, high = found.interval
    inner_low, inner_high = found.equivalence_interval
    assert low <= inner_low <= found.gap + 1e-12
    assert found.gap - 1e-12 <= inner_high <= high


def test_students_interval_is_the_published_one():
    """t(0.975, 2) = 4.3027: mean 0.02, spread 0.01, three values."""
    a = [math.exp(d) for d in (0.01, 0.02, 0.03)]
    found = loss_gap(a, [1.0, 1.0, 1.0], margin=0.01, confidence=0.95)
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found.interval == pytest.approx((math.expm1(0.02 - half), math.expm1(0.02 + half)))


@pytest.mark.parametrize(
    ("inner", "verdict"),
    [
        ((-0.005, 0.005), "equivalent"),
        ((-0.005, 0.015), "undecided"),
        ((-0.02, 0.02), "undecided"),
        ((0.011, 0.02), "not equivalent"),
        ((-0.02, -0.011), "not equivalent"),
        ((0.0, 0.01), "undecided"),
    ],
)
def test_one_interval_gives_three_verdicts(inner, verdict):
    assert verdict_of(inner, 0.01) == verdict


def test_one_seed_gives_no_interval_and_no_verdict():
    found = loss_gap([1.0], [1.0], margin=0.01, confidence=0.95)
    assert found.interval is None
    assert found.verdict == "undecided"
    assert seeds_to_settle(found, 0.01, 0.95) is None


def test_advice_on_seeds_settles_an_undecided_gap():
    d = [0.012, 0.002, -0.002]
    found = loss_gap([math.exp(x) for x in d], [1.0] * 3, margin=0.01, confidence=0.95)
    assert found.verdict == "undecided"
    more = seeds_to_settle(found, 0.01, 0.95)
    assert more is not None
    assert more > 3
    mean, spread = sum(d) / 3, numpy.std(d, ddof=1)
    alike = [mean + spread * math.sqrt((more - 1) / more) * (-1) ** i for i in range(more)]
    again = loss_gap([math.exp(x) for x in alike], [1.0] * more, margin=0.01, confidence=0.95)
    assert again.verdict == "equivalent"


def step(number: int, seconds: float, tokens: int) -> dict[str, float]:
    """A row of `steps.jsonl`."""
    return {"step": number, "seconds": seconds, "tokens": tokens}


def test_ratios_of_speed_leave_warm_up_and_stalls_out():
    a = [step(i, 5.0 if i <= 5 else 0.1, 100) for i in range(1, 41)]
    b = [step(i, 9.0 if i in (20, 30) else 0.2, 100) for i in range(1, 41)]
    assert warm_up_steps(40) == 5
    ratios = step_ratios(a, b, 5)
    assert len(ratios) == 35
    ratio = speed_ratio([ratios], 0.95)
    assert (ratio.value, *ratio.interval) == pytest.approx((2.0, 2.0, 2.0))


def test_steps_without_tokens_or_time_have_no_ratio_of_speed():
    """A clock that stood still, or a step of padding alone, ended `compare`."""
    a = [step(1, 0.1, 100), step(2, 0.0, 100), step(3, 0.1, 0), step(4, 0.1, 100)]
    b = [step(1, 0.2, 100), step(2, 0.2, 100), step(3, 0.2, 100), step(4, 0.2, 100)]
    assert step_ratios(a, b, 0) == pytest.approx([math.log(2)] * 2)
    assert step_ratios(b, a, 0) == pytest.approx([-math.log(2)] * 2)


def test_the_band_is_what_seeds_alone_do():
    assert band([1.0, 1.1, 0.9]) == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------- fairness

WHY = {condition.name: condition.why for condition in CONDITIONS}
UNFAIR = {
    "b.model.dtype=bfloat16": "model",
    "b.model.storage=nf4": "storage of the base",
    "b.model.attention=eager": "attention",
    "b.lora.r=4": "adapters",
    "b.train.learning_rate=1e-3": "optimizer",
    "b.train.optim=adamw_8bit": "optimizer",
    "b.train.per_device_train_batch_size=4": "tokens per step",
    "b.train.packing=true": "tokens per step",
    "b.train.max_steps=10": "length of the run",
    "b.data.max_rows=100": "data and its order",
    "b.train.shuffle_dataset=true": "data and its order",
    "b.train.gradient_checkpointing=true": "checkpointing",
    "b.train.activation_offloading=true": "checkpointing",
    "b.train.use_liger_kernel=true": "fused kernels",
    "b.train.ddp_static_graph=true": "processes and sharding",
    "b.train.per_device_eval_batch_size=2": "evaluation",
    "b.eval.at_start=false": "evaluation",
    "b.precision.health_every=1": "watching",
    "b.train.label_smoothing_factor=0.1": "other training settings",
    "b.train.neftune_noise_alpha=5.0": "other training settings",
}


@pytest.mark.parametrize("override", UNFAIR)
def test_a_pair_that_asks_for_something_else_is_refused_with_the_reason(override):
    condition = UNFAIR[override]
    pair = make_pair("tiny_lora_fp8", None, [override], 3, CPU)
    with pytest.raises(UnfairPairError, match=condition) as refused:
        compare.check_pair(pair, CPU, allow=False)
    assert override[2:].partition("=")[0] in refused.value.where
    assert refused.value.why == WHY[condition]
    assert "--allow" in refused.value.fix


def test_compiling_one_side_is_refused():
    pair = make_pair(
        "tiny_full_fp8", None, ["a.precision.compile=on", "b.precision.compile=off"], 3, CPU
    )
    with pytest.raises(UnfairPairError, match=r"compile.*'?on'? and '?off"):
        compare.check_pair(pair, CPU, allow=False)


@pytest.mark.slow
@pytest.mark.long
def test_every_twin_that_ships_is_fair():
    fp8 = [name for name in finetune.list_recipes() if name.endswith("_fp8")]
    for name in fp8:
        pair = make_pair(name, None, ["~train.fsdp", "~train.fsdp_config"], 3, H100)
        assert requested_differences(pair.a.recipe.config, pair.b.recipe.config, on_cpu=True) == []


def test_a_default_written_out_is_no_difference_and_names_are_free():
    same = ["b.train.weight_decay=0.0", "b.train.run_name=x", "b.train.save_steps=7"]
    pair = make_pair("tiny_full_fp8", None, same, 3, CPU)
    assert requested_differences(pair.a.recipe.config, pair.b.recipe.config, on_cpu=True) == []


def test_free_fields_are_fields():
    from trl import SFTConfig

    assert SFTConfig.__dataclass_fields__.keys() >= FREE


RAN = {
    "trainable parameters": ("conditions", "trainable parameters", {"count": 10, "names": "x"}),
    "model": ("conditions", "model", {"type": "qwen2"}),
    "adapters": ("conditions", "adapters", {"r": 8}),
    "optimizer": ("conditions", "optimizer", {"class": "AdamW8bit", "learning rate": 1e-3}),
    "tokens per step": ("conditions", "tokens per step", {"rows": 8, "padding_free": True}),
    "length of the run": ("conditions", "length of the run", {"steps": 21}),
    "data and its order": ("conditions", "data and its order", {"rows": 396, "seed": 43}),
    "checkpointing": ("conditions", "checkpointing", {"layers": 4}),
    "attention": ("conditions", "attention", "eager"),
    "compile": ("conditions", "compile", "on"),
    "fused kernels": ("conditions", "fused kernels", {"liger": True, "adapters": ""}),
    "libraries": ("environment", "versions", {"torch": "2.12", "trl": "1.16"}),
    "device": ("environment", "device", {"kind": "cuda", "name": "H100", "capability": "9.0"}),
    "processes and sharding": ("environment", "processes", 2),
    "storage of the base": ("precision", "storage", {"nf4": 28}),
}


@pytest.mark.parametrize("condition", RAN)
def test_runs_that_did_something_else_are_told_apart(condition):
    a, b = receipt("fp8"), receipt("bf16")
    section, key, value = RAN[condition]
    b[section][key] = value
    (found,) = executed_differences(a, b)
    assert found.condition == condition
    assert found.why == WHY[condition]


def test_equal_runs_have_no_difference_and_held_fp8_is_part_of_fp8():
    a, b = receipt("fp8"), receipt("bf16")
    a["precision"]["storage"] = {"fp8": 28}
    assert executed_differences(a, b) == []
    b["precision"]["storage"] = {"fp8": 28}
    assert [d.condition for d in executed_differences(a, b)] == ["storage of the base"]


def test_steps_over_other_tokens_are_told_apart():
    steps = [step(i, 0.1, 100 + i) for i in range(1, 9)]
    other = [*steps]
    a, b = receipt("fp8"), receipt("bf16")
    assert executed_differences(a, b, steps, other) == []
    other[4] = step(5, 0.1, 99)
    (found,) = executed_differences(a, b, steps, other)
    assert (found.condition, found.where) == ("steps", "steps.jsonl: line 5")
    (found,) = executed_differences(a, b, steps, steps[:-1])
    assert (found.a, found.b) == (8, 7)


# ----------------------------------------------------------------------------------------- pairing


@pytest.mark.parametrize("name", ["tiny_full", "llama_8b_lora"])
def test_twins_find_each_other(name):
    assert twin_of(f"{name}_fp8") == f"{name}_bf16"
    assert twin_of(f"{name}_bf16") == f"{name}_fp8"


def test_a_recipe_without_a_twin_says_what_to_type():
    with pytest.raises(RecipeNotFoundError, match="no twin 'tiny_qlora_fp8'"):
        twin_of("tiny_qlora_bf16")


def test_bf16_is_the_reference_wherever_it_stands():
    for names in (("tiny_full_fp8", "tiny_full_bf16"), ("tiny_full_bf16", None)):
        pair = make_pair(*names, [], 2, CPU)
        assert (pair.a.recipe.name, pair.b.recipe.name) == ("tiny_full_fp8", "tiny_full_bf16")
        assert (pair.a.label, pair.b.label) == ("FP8", "BF16")
        assert pair.seeds == (42, 43)
        assert pair.a.recipe.config.data.seed == pair.b.recipe.config.data.seed == 42
        assert pair.a.recipe.config.train["logging_steps"] == 1


def test_compiling_is_settled_for_both_where_one_of_them_would():
    on = make_pair("tiny_lora_fp8", None, ["precision.backend=torchao"], 3, H100)
    assert [c.recipe.config.precision.compile for c in (on.a, on.b)] == ["on", "on"]
    assert any("compile=on" in note for note in on.notes)
    explicit = make_pair("tiny_lora_fp8", None, ["a.precision.compile=off"], 3, H100)
    assert [c.recipe.config.precision.compile for c in (explicit.a, explicit.b)] == ["off", "off"]
    for asked in ([], ["a.precision.emulation=forbid"]):  # its run says why
        here = make_pair("tiny_lora_fp8", None, asked, 3, CPU)
        assert [c.recipe.config.precision.compile for c in (here.a, here.b)] == ["auto", "auto"]


def test_held_out_rows_are_the_same_for_all_seeds_and_a_seed_that_draws_none_is_refused(tmp_path):
    from finetune.data.dataset import load_data
    from finetune.storage.pretrained import load_tokenizer

    config = make_pair("tiny_full_fp8", None, [], [5, 6], CPU).a.recipe.config
    tokenizer, _ = load_tokenizer(config.model)
    one, other = (load_data(config.data, tokenizer, seed) for seed in (5, 6))
    assert one.eval is not None
    assert other.eval is not None
    assert one.eval["messages"] == other.eval["messages"]
    free = config.data.model_copy(update={"seed": None})
    drawn = load_data(free, tokenizer, 6).eval
    assert drawn is not None
    assert drawn["messages"] != one.eval["messages"]
    with pytest.raises(ConfigError, match="none here"):
        finetune.load_recipe("tiny_full_fp8", ["data.seed=1", "data.eval_fraction=0"])


def test_an_override_that_one_side_cannot_take_says_how_to_give_it_to_the_other():
    with pytest.raises(ConfigError, match=r"a\.precision"):
        make_pair("tiny_full_fp8", None, ["precision.margin=2"], 3, CPU)
    assert make_pair("tiny_full_fp8", None, ["a.precision.margin=2"], 3, CPU)


def test_a_run_that_would_fall_back_to_bf16_is_no_side_of_a_comparison():
    overrides = ["a.precision.emulation=forbid", "a.precision.on_unsupported=bf16"]
    pair = make_pair("tiny_full_fp8", None, overrides, 3, CPU)
    with pytest.raises(UnfairPairError, match="would not run in the precision"):
        compare.check_pair(pair, CPU, allow=True)


def test_runs_alternate_and_share_the_machine_fairly(tmp_path):
    pair = make_pair("tiny_full_fp8", None, [], 3, CPU)
    jobs = running.plan_jobs((pair.a, pair.b), pair.seeds, tmp_path)
    assert "".join(job.file.parent.name for job in jobs) == "abbaab"
    assert [job.seed for job in jobs] == [42, 42, 43, 43, 44, 44]
    assert finetune.load_recipe(str(jobs[0].file)).config == pair.a.recipe.config
    assert running.jobs_at_once(CPU, None, 2) == (2, 1)
    assert running.jobs_at_once(CPU, None, 8) == (2, 4)
    assert running.jobs_at_once(CPU, None, 1) == (1, None)
    for gpu in (H100, replace(CPU, kind="mps")):
        assert running.jobs_at_once(gpu, None, 8) == (1, None)
    with pytest.raises(ConfigError, match="on a GPU"):
        running.jobs_at_once(H100, 2, 8)
    with pytest.raises(ConfigError, match="2 cores"):
        running.jobs_at_once(CPU, 3, 2)


# --------------------------------------------------------------------------------- runs, pretended


@pytest.fixture
def pretend(tmp_path, monkeypatch, capsys):
    """A function that calls `compare` on the command line, with runs that only pretend.

    They do so in this process, or as `processes` of their own.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(running, "RUN", (pretended.__file__,))
    drawn = writer.write_report

    def run_here(jobs, at_once, threads, watcher) -> None:
        for job in jobs:
            pretended.pretend(job.file, job.seed, job.out, os.environ, measured=False)
            watcher.finish(job)

    def call(
        *words: str, code: int, receipts: dict | None = None, report=False, processes=False,
        **environment: str,
    ):  # fmt: skip
        page = SimpleNamespace(html="report.html")  # drawing takes longer than all the rest
        monkeypatch.setattr(writer, "write_report", drawn if report else lambda _: page)
        monkeypatch.setattr(compare, "run_jobs", running.run_jobs if processes else run_here)
        made = receipts or {"fp8": receipt("fp8"), "bf16": receipt("bf16")}
        monkeypatch.setenv("RECEIPTS", json.dumps(made))
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(sys, "argv", ["finetune", "compare", *words])
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
        out, err = capsys.readouterr()
        assert ended == code, out + err
        assert "Traceback" not in err
        return out, err

    return call


def folders(where: Path) -> list[Path]:
    return sorted(where.glob("runs/compare/tiny_full_fp8-vs-tiny_full_bf16/*"))


@pytest.mark.slow
def test_a_comparison_from_command_to_verdict(pretend, tmp_path):
    out, err = pretend("tiny_full_fp8", code=0, report=True, processes=True)
    assert "[6/6]" in err
    assert out.startswith("equivalent: FP8 ends where BF16 ends, within 1 %, over 3 seeds")
    assert "speed: FP8 runs at 0.667x the speed of BF16 (0.667 to 0.667)" in out
    assert "peak memory: FP8 takes 0.800x as much as BF16" in out
    assert "emulated" in out
    assert "hellaswag acc_norm" in out
    assert "Here." in out
    assert "There." in out
    (folder,) = folders(tmp_path)
    found = read_comparison(folder)
    assert found.verdict == "equivalent"
    assert found.seeds == [42, 43, 44]
    assert all((folder / run.a / "receipt.json").is_file() for run in found.runs)
    stored = json.loads((folder / "comparison.json").read_text())
    assert stored["kind"] == "comparison"
    assert stored["losses"]["train"]["a"] == found.losses["train"].a
    assert "folder" not in stored

    again, _ = pretend(str(folder), "--margin", "0.0001", "--json", code=3)
    assert json.loads(again)["margin"] == 0.0001
    assert json.loads(again)["verdict"] in ("undecided", "not equivalent")
    assert json.loads(again)["notes"].count(found.notes[0]) == 1
    assert "--out would change nothing" in pretend(str(folder), "--out", "x", code=2)[1]
    second, _ = pretend("tiny_full_fp8", "--json", code=0)
    assert json.loads(second)["losses"] == stored["losses"]
    assert len(folders(tmp_path)) == 2


@pytest.mark.parametrize(("train", "held"), [("0.05", "0.05"), ("0.05", "0"), ("0", "0.05")])
def test_a_gap_of_either_loss_beyond_the_margin_is_not_equivalent(train, held, pretend):
    out, _ = pretend("tiny_full_fp8", code=3, GAP=train, EVAL_GAP=held)
    assert out.startswith("not equivalent")
    assert "ends higher by more than 1 %" in out


@pytest.mark.slow
def test_fp8_that_ends_in_no_number_is_not_equivalent_and_has_no_figures(pretend, tmp_path):
    out, _ = pretend("tiny_full_fp8", "--json", code=3, BROKEN="fp8", EVAL="0")
    reported = json.loads(out, parse_constant=pytest.fail)
    assert reported["verdict"] == "not equivalent"
    assert reported["reasons"] == [
        "training loss: FP8, seed 43, ends at nan",
        "eval loss: FP8, seed 43, ends at 0",
    ]
    assert (reported["losses"], reported["speed"]) == ({}, None)
    folder = folders(tmp_path)[0]
    found = read_comparison(folder)
    page = comparison_page(found, PageSource(folder, folder))
    assert page.verdict.text == "Not equivalent within 1%"
    assert 'class="facts"' not in writer.as_html(page)
    metrics = folder / found.runs[0].a / "metrics.jsonl"
    metrics.write_text("".join(x for x in metrics.read_text().splitlines(True) if "eval" not in x))
    out, _ = pretend(str(folder), code=2)
    assert "1 of 6 runs logged no eval loss" in out


def test_scores_are_of_metrics_that_all_runs_have_on_as_many_rows(pretend, tmp_path):
    pretend("tiny_full_fp8", code=0)
    (folder,) = folders(tmp_path)
    strict, runs = "exact_match,strict-match", read_comparison(folder).runs
    scores = {strict: 0.5, "exact_match_stderr,strict-match": 0.1, "n": 8, "version": 3.0}
    files = [folder / side / "metrics.jsonl" for run in runs for side in (run.a, run.b)]

    def log(file: Path, more: dict[str, float]) -> None:
        row = {"step": 30, "tasks": {"gsm8k": scores | more}}
        with file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")

    for number, file in enumerate(files):  # as the verb `evaluate` does
        log(file, {"of_one_run": 1.0} if not number else {})
    out, _ = pretend(str(folder), code=0)
    tasks = read_comparison(folder).tasks
    assert tasks is not None
    assert {task: [score.metric for score in found] for task, found in tasks.items()} == {
        "hellaswag": ["acc_norm"], "gsm8k": [strict],
    }  # fmt: skip
    assert tasks["gsm8k"][0].b_stderr == pytest.approx(0.1)
    assert out.count("0.5000 ± 0.1000") == 2
    shown = RunSource(files[0].parent, folder).tasks.rows
    assert [row[1] for row in shown] == ["acc_norm", strict, "of_one_run"]
    log(files[-1], {"n": 9})
    out, _ = pretend(str(folder), code=0)
    assert "no scores of gsm8k: the runs were scored on 8 and 9 rows" in out
    assert "exact_match" not in out


def test_each_metric_is_judged_by_its_own_margin(pretend, tmp_path):
    """FP8 ends 1.5 % higher in training, 2.5 % at the end, and scores a point more."""
    pretend("tiny_full_fp8", code=3, GAP="0.015", EVAL_GAP="0.025")
    (folder,) = folders(tmp_path)
    old = json.loads((folder / "comparison.json").read_text())
    del old["margins"]  # as written before there were any
    (folder / "comparison.json").write_text(json.dumps(old))

    def verdicts(margins: str, code: int, *words: str) -> list[str]:
        out, _ = pretend(str(folder), "--margins", margins, *words, code=code)
        found = read_comparison(folder)
        assert found.verdict in out
        assert found.tasks is not None
        scores = [*found.losses.values(), *found.tasks["hellaswag"]]
        return [str(one.verdict) for one in scores]

    good, bad = "equivalent", "not equivalent"
    assert verdicts("train=2%,eval=3%", 0) == [good, good, "None"]
    assert verdicts("train=2%", 3) == [good, bad, "None"]
    assert verdicts("train=2%,eval=3%,hellaswag=1.1pt", 0) == [good, good, good]
    assert verdicts("train=2%,eval=3%,tasks=0.9pt", 3) == [good, good, bad]
    assert verdicts("tasks=1.5pt", 0, "--margin", "0.03") == [good, good, good]
    found = read_comparison(folder)
    assert found.within == "3 % (train), 3 % (eval), 1.5 pt (tasks)"
    assert "hellaswag acc_norm: the gap of +1.00 pt, +1.00 pt to" in found.reasons[2]
    for text, said in (
        ("trian=2%", "did you mean 'train'"), ("hellaswg=1pt", "did you mean 'hellaswag'"),
        ("usul", "did you mean 'usual'"), ("train=2pt", "in %"), ("train=0%", "no margin"),
        ("mmlu=1pt", "eval.tasks=[mmlu]"), ("train=1%,train=2%", "each once"), ("", "no margin"),
    ):  # fmt: skip
        assert said in " ".join(pretend(str(folder), "--margins", text, code=2)[1].split())


def test_a_gap_above_ten_percent_has_failed_and_one_above_five_has_a_cause(pretend, tmp_path):
    for gap, verdict in (("0.12", "not equivalent"), ("0.07", "undecided"), ("0.04", "undecided")):
        pretend("tiny_full_fp8", "--seeds", "1", "--out", gap, code=3, GAP=gap)
        (folder,) = (tmp_path / gap).glob("compare/*/*")
        found = read_comparison(folder)  # a seed alone decides nothing else
        assert found.verdict == verdict
        assert ("above 10 % it has failed" in found.reasons[0]) == (gap == "0.12")
        assert any("above 5 % has a cause" in note for note in found.notes) == (gap != "0.04")
    pretend(str(folder), "--margins", "train=15%,eval=15%", code=3)
    assert "straddles" not in read_comparison(folder).reasons[0]


@pytest.mark.slow
def test_a_reference_that_ends_in_no_number_is_refused(pretend, tmp_path):
    out, _ = pretend("tiny_full_fp8", code=2, BROKEN="bf16")
    assert "training loss: BF16, seed 43, ends at nan" in out
    folder = folders(tmp_path)[0]
    page = comparison_page(read_comparison(folder), PageSource(folder, folder))
    assert page.verdict.text == "Refused"
    html = writer.as_html(page)
    assert 'class="facts"' not in html
    assert "differ in more than" not in html


def test_one_seed_is_undecided_and_says_why(pretend):
    out, _ = pretend("tiny_full_fp8", "--seeds", "1", code=3)
    assert out.startswith("undecided")
    assert "one seed, which has no spread to judge by" in out


def test_equal_runs_of_several_seeds_are_one(pretend):
    out, _ = pretend("tiny_full_fp8", code=3, DRAWN="7")
    assert out.startswith("undecided")
    assert "the seeds changed nothing: runs of a side are equal" in out


@pytest.mark.slow
def test_runs_that_differ_are_refused_after_the_fact_unless_allowed(pretend, tmp_path):
    made = {"fp8": receipt("fp8"), "bf16": receipt("bf16")}
    made["fp8"]["trainable"]["in_optimizer"] = 10
    out, _ = pretend("tiny_full_fp8", code=2, receipts=made)
    assert out.startswith("refused")
    assert "trainable parameters" in out
    assert "speed" not in out.partition("trainable parameters")[0]
    (folder,) = folders(tmp_path)
    assert read_comparison(folder).speed is None
    out, _ = pretend(str(folder), "--allow", code=0)
    assert out.startswith("equivalent")
    assert "not the same on both sides, allowed" in out
    assert read_comparison(folder).speed is not None


def test_a_comparison_on_disk_that_is_not_whole_is_an_error(pretend, tmp_path):
    """No margin is chosen after the fact in silence, either."""
    pretend("tiny_full_fp8", code=0)
    (folder,) = folders(tmp_path)
    out, _ = pretend(str(folder), "--margin", "0.02", "--json", code=0)
    assert "while they trained the margin was 1 %" in out
    out, _ = pretend(str(folder), "--margin", "0.03", "--json", code=0)
    assert "while they trained the margin was 1 %" in out
    stored = json.loads((folder / "comparison.json").read_text())
    (folder / stored["runs"][0]["a"] / "steps.jsonl").unlink()
    _, err = pretend(str(folder), code=2)
    assert "steps.jsonl is missing" in err
    (folder / "comparison.json").unlink()  # as after Ctrl-C
    assert "when all runs of a comparison have ended" in pretend(str(folder), code=2)[1]


def test_a_folder_with_the_name_of_a_recipe_is_no_comparison(pretend, tmp_path):
    """As `runs/` has one for each recipe that was trained."""
    (tmp_path / "tiny_full_fp8").mkdir()
    assert pretend("tiny_full_fp8", "--seeds", "1", code=3)[0].startswith("undecided")


@pytest.mark.slow
def test_a_run_that_is_not_proven_is_no_evidence(pretend):
    made = {"fp8": receipt("fp8") | {"status": "not proven: no step"}, "bf16": receipt("bf16")}
    out, _ = pretend("tiny_full_fp8", "--allow", code=2, receipts=made)
    assert "not proven" in out


@pytest.mark.slow
def test_allowing_a_difference_shows_it(pretend):
    out, _ = pretend("tiny_full_fp8", "b.train.learning_rate=1e-3", "--allow", code=0)
    assert "optimizer (train.learning_rate): 0.0005 and 0.001" in out


@pytest.mark.slow
def test_a_run_that_fails_tells_its_own_error(pretend, tmp_path):
    _, err = pretend("tiny_full_fp8", code=2, processes=True, PRETEND="fail")
    assert "the loss is NaN" in err
    assert "FP8, seed 42" in err or "BF16, seed 42" in err  # they run at once
    assert "lower it" in err
    (folder,) = folders(tmp_path)
    assert (folder / "a" / "seed-42.log").is_file()


def test_runs_that_a_scheduler_ends_are_interrupted_and_have_not_failed(pretend):
    """Each process of a job gets SIGTERM, and a run may have ended before this one hears of it."""
    _, err = pretend("tiny_full_fp8", "--seeds", "1", code=130, processes=True, PRETEND="stopped")
    assert "0 of 2 runs are complete" in err


def test_ctrl_c_stops_the_runs_and_keeps_what_they_saved(pretend, tmp_path):
    def interrupt_once_they_began() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("begun"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_once_they_began, daemon=True).start()
    # A process started in the background by a shell ignores Ctrl-C, and so would this test.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _, err = pretend("tiny_full_fp8", "--jobs", "2", code=130, processes=True, PRETEND="wait")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "0 of 6 runs are complete" in err
    begun = list(tmp_path.rglob("begun"))
    assert len(begun) == 2
    assert all((file.parent / "saved").is_file() for file in begun)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny_ful_fp8"], "tiny_full_fp8"),
        (["tiny_full_fp8", "nowhere.yaml"], "nowhere.yaml"),
        (["tiny_full_fp8", "tiny_full_bf16", "tiny_lora_fp8"], "3 were given"),
        (["tiny_full_fp8", "--seeds", "42,many"], "one seed or more"),
        (["tiny_full_fp8", "--seeds", "0"], "one seed or more"),
        (["tiny_full_fp8", "--seeds", "1,4294967296"], "from 0 to"),
        (["tiny_full_fp8", "--seeds", "4,4"], "one seed or more"),
        (["tiny_full_fp8", "--margin", "0"], "margin"),
        (["tiny_full_fp8", "--confidence", "95"], "confidence"),
        (["tiny_full_fp8", "data.path=no.jsonl"], "no.jsonl"),
        (["tiny_full_fp8", "precision.emulation=forbid"], "is not available"),
        (["tiny_full_fp8", "tiny_lora_bf16"], "differ"),
    ],
)
def test_mistakes_end_before_anything_runs(pretend, tmp_path, words, message):
    _, err = pretend(*words, code=2)
    assert message in " ".join(err.split())
    assert not (tmp_path / "runs").exists()


def test_a_result_reads_back_and_a_broken_one_is_told(tmp_path):
    side = Side(recipe="x_fp8", label="FP8")
    made = Comparison(
        a=side, b=Side(recipe="x_bf16", label="BF16"), seeds=[1], margin=0.01, confidence=0.95,
        verdict="undecided",
    )  # fmt: skip
    made.save(tmp_path)
    assert read_comparison(tmp_path) == made
    Console(quiet=True).print(made)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(FinetuneError, match="cannot be read"):
        read_comparison(tmp_path)
    with pytest.raises(ConfigError, match="holds no comparison"):
        read_comparison(tmp_path / "none")


def test_neighbours_of_an_installed_package_do_not_come_before_pythons_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    here = str(Path(running.finetune.__file__).parent.parent)
    assert running.import_path() == os.pathsep.join([here, "mine"])
    monkeypatch.setattr(running.sysconfig, "get_path", {"purelib": here}.get)  # not with -e
    assert running.import_path() == "mine"


def test_a_terminal_shows_each_run_as_far_as_it_wrote(tmp_path):
    terminal = Console(force_terminal=True, file=io.StringIO(), width=100)
    pair = make_pair("tiny_full_fp8", None, [], 1, CPU)
    jobs = running.plan_jobs((pair.a, pair.b), pair.seeds, tmp_path)
    folder = jobs[0].out / "tiny_full_fp8" / "20260101-000000-abcd"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 7, "loss": 1.25}\n{"step": 8, "lo')
    report = {"first_loss": 5.0, "final_loss": 1.0, "eval_loss": None, "seconds": 3.0}
    (folder / "report.json").write_text(json.dumps(report | {"status": "proven"}))
    watcher = Watcher(terminal, len(jobs))
    with watcher.bars:
        watcher.look(jobs)
        with metrics.open("a") as file:
            file.write('ss": 1.125}\n')
        watcher.look(jobs)
        time.sleep(0.3)  # ten frames a second are drawn
        watcher.finish(jobs[0])
    shown = terminal.file.getvalue()
    assert "step 8  loss 1.1250" in shown
    assert "[1/2] FP8, seed 42: loss 5.000 -> 1.000 · 3.0 s, proven" in shown


def test_on_a_gpu_steps_are_timed_by_events_that_nothing_waits_for(tmp_path, monkeypatch):
    clock_ms, waits = itertools.count(0, 250), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock_ms)

        def elapsed_time(self, end: Event) -> float:
            assert waits, "read before the device was waited for"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))

    class Model(torch.nn.Module):
        def forward(self, **inputs):
            return inputs

    model = Model()
    clock = StepTimer("cuda", tmp_path / "steps.jsonl")
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    clock.on_train_begin(None, state, None, model=model)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    for step in (1, 2):
        clock.on_step_begin(None, state, None)
        for _ in range(2):  # micro-batches
            model(input_ids=mask, attention_mask=mask)
        model.eval()
        model(input_ids=mask, attention_mask=mask)  # is no training
        model.train()
        state.global_step = step
        clock.on_step_end(None, state, None)
    assert not waits
    assert clock.rows == []
    clock.on_log(None, state, None, logs={"loss": 1.0})
    assert clock.rows == [
        {"step": 1, "seconds": 0.25, "tokens": 8},
        {"step": 2, "seconds": 0.25, "tokens": 8},
    ]
    clock.on_train_end(None, state, None)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2


# --------------------------------------------------------------------------------- a run, for real


@pytest.mark.long
def test_what_really_ran_is_in_the_receipt_and_steps_are_timed(tmp_path):
    """One short run each, in this process; the same judge as of separate ones."""
    outcomes = []
    for name in ("tiny_lora_fp8", "tiny_lora_bf16"):
        short = ["train.max_steps=3", "train.logging_steps=1", "eval.samples=false"]
        recipe = finetune.load_recipe(name, [*short, "train.gradient_accumulation_steps=2"])
        report = finetune.train(recipe, out=tmp_path, console=Console(quiet=True))
        outcome = read_outcome(report.folder)
        outcomes.append(outcome)
        rows = [json.loads(x) for x in (report.folder / "metrics.jsonl").read_text().splitlines()]
        counted = [row["num_tokens"] for row in rows if "loss" in row]
        assert [s["step"] for s in outcome.steps] == [1, 2, 3]
        assert list(itertools.accumulate(s["tokens"] for s in outcome.steps)) == counted
        assert 0 < sum(s["seconds"] for s in outcome.steps) < rows[-1]["seconds"]
        conditions = outcome.receipt["conditions"]
        assert conditions["trainable parameters"]["count"] == report.receipt.trainable["after"]
        assert conditions["tokens per step"]["accumulation"] == 2
        assert conditions["adapters"]["r"] == 8
        assert conditions["optimizer"]["class"] == "torch.optim.adamw.AdamW"
        assert conditions["attention"] == "sdpa"
        assert conditions["checkpointing"]["layers"] == 0
    a, b = outcomes
    assert executed_differences(a.receipt, b.receipt, a.steps, b.steps) == []
    frozen = copy.deepcopy(a.receipt)
    frozen["conditions"]["trainable parameters"]["count"] -= 1
    assert executed_differences(frozen, b.receipt)
    sides = {"a": Side(recipe="a", label="FP8"), "b": Side(recipe="b", label="BF16")}
    found = judge(
        Comparison(**sides, seeds=[42], margin=0.01, confidence=0.95, verdict="undecided"), [(a, b)]
    )
    assert abs(found.losses["eval"].gap) < 0.05
    assert found.memory is not None
    assert found.memory.ratio < 1
    assert any("no speed" in note for note in found.notes)
