"""Benchmarks: what is measured, in which order, and that no end of a point is the end of all."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import finetune
from finetune import load_recipe
from finetune.analysis.benchmark import benchmark, matrix, matrix_runs
from finetune.analysis.benchmark.grid import WARM_UP, Point, at_point, points_of
from finetune.analysis.benchmark.matrix import read_benchmark
from finetune.analysis.benchmark.result import BENCHMARK, Benchmark, Row
from finetune.analysis.experiment import jobs
from finetune.analysis.experiment.jobs import Job
from finetune.analysis.report.report import write_report
from finetune.analysis.statistics import Ratio, quantile, student
from finetune.cli.app import main
from finetune.config.paths import TINY_LLAMA
from finetune.errors import (
    ConfigError,
    ModelNotFoundError,
    RecipeNotFoundError,
    RehearsalError,
    RunFailedError,
)
from finetune.training.health.callbacks import exchange_of
from finetune.units import GIB
from tests.analysis.pretended import pretend, receipt
from tests.conftest import CPU, H100

FP8, BF16 = "tiny_lora_fp8", "tiny_lora_bf16"
SIZES = st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def point_of(job: Job) -> tuple[int, int]:
    train = job.variant.recipe.config.train
    return train["per_device_train_batch_size"], train["max_length"]


class Pretended:
    """Runs that measure nothing: FP8 takes 150 ms a step, BF16 100; predicted are 80 ms, 0.1 GiB.

    Attributes:
        fits: False of a job that is out of memory.
        stop_after: runs after which Ctrl-C is pressed.
    """

    def __init__(self, monkeypatch) -> None:
        self.fits: Callable[[Job], bool] = bool
        self.stop_after, self.jobs = -1, list[Job]()
        monkeypatch.setattr(benchmark, "run_jobs", self.run)
        monkeypatch.setattr(benchmark, "predict", lambda *_: prediction(0.1))

    def run(self, jobs, threads=None) -> None:
        (job,) = jobs
        if len(self.jobs) == self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        if not self.fits(job):
            raise RunFailedError("the run is out of memory", why="tried to allocate 2 GiB")
        self.threads = threads
        pretend(job.file, job.seed, job.out, os.environ, job.measured, job.gpus)


def prediction(gib: float, device=CPU) -> SimpleNamespace:
    memory = SimpleNamespace(allocated=gib * GIB, outside=0, reserved=gib * GIB)
    memory.kinds = {"optimizer": 0.02 * GIB, "weights": 0.01 * GIB}
    machine, timing = (
        SimpleNamespace(device=device),
        SimpleNamespace(seconds=0.08, traffic=None, tokens=1024),
    )
    return SimpleNamespace(footprint=memory, timing=timing, machine=machine, fit="fits")


@pytest.fixture
def runs(monkeypatch) -> Pretended:
    return Pretended(monkeypatch)


# -------------------------------------------------------------------------------------------- grid


@given(batch=SIZES, length=SIZES, gpus=SIZES, spaces=st.integers(1, 3), turned=st.booleans())
def test_a_grid_is_read_as_it_was_written(batch, length, gpus, spaces, turned) -> None:
    axes = {"batch": batch, "length": length, "gpus": gpus}
    words = [f"{key}={','.join(map(str, values))}" for key, values in axes.items()]
    text = (" " * spaces).join(reversed(words) if turned else words)
    found = points_of(text, load_recipe(FP8, check_train=False).config)
    assert set(found) == {*itertools.product(batch, length, gpus)}
    sizes = [(p.gpus, p.tokens) for p in found]
    assert sizes == sorted(sizes)
    for i, later in enumerate(found):  # what contains another comes after it
        assert not any(p.contains(later) and p != later for p in found[:i])


@given(text=st.text(alphabet="abchlngtpus=,0123456789 -.²", max_size=24))
def test_any_text_is_a_grid_or_an_error(text) -> None:
    with contextlib.suppress(ConfigError):
        found = points_of(text, load_recipe(FP8, check_train=False).config)
        assert min(map(min, found)) >= 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no"), ("lenght=4", "did you mean 'length'"), ("batch=0", "'batch=0' is no"),
        ("batch=1 batch=2", "'batch=2' is no"), ("batch", "'batch' is"), ("length=2k", "2k' is"),
    ],
)  # fmt: skip
def test_a_misspelt_grid(text, said) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        points_of(text, load_recipe(FP8, check_train=False).config)
    assert "batch=1,2,4 length=512,2048" in caught.value.fix


def test_what_a_grid_leaves_out_is_the_recipes_own() -> None:
    config = load_recipe(FP8, check_train=False).config
    assert points_of("batch=2", config) == [(2, 128, 1)]
    assert points_of("length=64", config) == [(8, 64, 1)]
    assert points_of(None, config.model_copy(update={"train": {}})) == [(8, 1024, 1)]  # TRL's


# ----------------------------------------------------------------------------------------- a point


def test_a_point_keeps_the_recipes_step_and_nothing_around_it() -> None:
    changes = ["train.gradient_accumulation_steps=3", "train.packing=true", "train.optim=adafactor"]
    changes += ["eval.tasks=[hellaswag]", "data.max_rows=3"]
    recipe = load_recipe(FP8, changes).config
    config = at_point(recipe, Point(4, 64), 7)
    train = config.train
    assert train["max_steps"] == WARM_UP + 7
    assert (train["per_device_train_batch_size"], train["max_length"]) == (4, 64)
    assert train["eval_strategy"] == train["save_strategy"] == "no"
    kept = ("gradient_accumulation_steps", "packing", "optim", "learning_rate", "seed")
    assert {k: train[k] for k in kept} == {k: recipe.train[k] for k in kept}
    assert config.model.weights == "random"
    assert (config.eval.tasks, config.eval.samples, config.eval.at_start) == ((), False, False)
    assert (config.precision, config.lora, config.data.max_rows) == (
        recipe.precision, recipe.lora, None,
    )  # fmt: skip


def test_padded_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="would be padded to 48") as caught:
        at_point(load_recipe(FP8).config, Point(1, 40), 1)
    assert "length=48" in caught.value.fix


def test_a_model_of_the_hub_needs_its_shape_here() -> None:
    def named(name: str):
        return load_recipe(BF16, [f"model.name={name}"]).config

    with pytest.raises(ModelNotFoundError, match="'some/model' is not packaged") as caught:
        at_point(named("some/model"), Point(1, 16), 1)
    assert "meta-llama/Llama-3.1-8B-Instruct" in caught.value.fix
    for name in ("openai-community/gpt2", "builtin:bdh_tiny", str(TINY_LLAMA)):
        assert at_point(named(name), Point(1, 16), 1).model.weights == "random"


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["train.packing=true"]])
def test_a_point_is_an_ordinary_run_that_saves_no_model(more, monkeypatch) -> None:
    """As a process does it, here: proven, of as many tokens as were asked for, as predicted."""

    def run(planned, threads) -> None:
        (job,) = planned
        recipe = load_recipe(str(job.file), [f"train.seed={job.seed}"])
        quiet = Console(quiet=True)
        finetune.train(recipe, out=job.out, force=True, console=quiet, save=not job.measured)

    monkeypatch.setattr(benchmark, "run_jobs", run)
    found = finetune.benchmark(
        FP8, vs=[BF16] if not more else (), grid="batch=2 length=32", steps=3, rounds=1,
        overrides=["train.gradient_accumulation_steps=2", *more],
    )  # fmt: skip
    fp8, *others = found.rows
    assert fp8.precision == "FP8 frozen/rowwise, emulated"
    assert fp8.fp8_share is not None
    assert fp8.fp8_share > 0.5
    for row in found.rows:
        assert (row.error, row.proven, row.tokens, len(row.seconds)) == ("", "proven", 128, 3)
        assert row.gib_over_predicted == pytest.approx(1, abs=0.02)
        assert row.memory == "peak of live tensors in step 3"
    for bf16 in others:
        assert bf16.precision == "BF16"
        assert found.against(bf16)[FP8].memory > 1.1
    assert not list(found.folder.rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------ matrix


def test_a_matrix_measures_every_precision_and_one_that_fails_is_a_row(runs) -> None:
    runs.fits = lambda job: job.variant.label != "NVFP4"
    found = matrix_runs.matrix("tiny_full_fp8", steps=3)
    assert [row.label for row in found.rows] == list(matrix.MATRIX)
    asked = {job.variant.label: job.variant.recipe.config for job in runs.jobs}
    assert {label: config.precision.compute for label, config in asked.items()} == {
        label: label.partition(",")[0].lower().replace("mx", "").replace("nvfp4", "fp8")
        for label in matrix.MATRIX
    }
    assert all(config.precision.emulation == "allow" for config in asked.values())
    figures, claims = (rows for _, *rows in found.tables())
    assert figures[0][2:6] == ["7.8 KiB (-100.0 %)", "10.2 MiB (+0.0 %)", *figures[0][4:6]]
    assert figures[0][5] == "81.9 MiB (-20.0 %)"
    assert figures[-1][-1] == "out of memory"
    verdicts = {(label, what): verdict for label, _, what, _, _, verdict in claims}
    assert verdicts["BF16", "optimizer"] == "refuted"  # 4000 of 8000 bytes; 100 % is said
    assert verdicts["BF16", "memory"] == "refuted"  # 125 % of FP32's
    assert {v for (_, what), v in verdicts.items() if what == "speed"} == {matrix.NOT_HERE}
    assert any(
        note.startswith("NVFP4, 8 x 128: the run is out of memory") for note in found.notes()
    )
    page = write_report(found.folder)
    assert page.verdict == found.headline == read_benchmark(found.folder / BENCHMARK).headline
    assert all(text in page.html.read_text() for text in ("81.9 MiB (-20.0 %)", "refuted"))


@pytest.mark.parametrize(("off", "verdict"), [(1.0, "confirmed"), (1.2, "refuted")])
def test_a_predicted_matrix_runs_nothing_and_judges_what_is_said(
    runs, off, verdict, monkeypatch
) -> None:
    """Predictions that are the figures in circulation, or a fifth off them."""

    def predicted(config, machine):
        (entry,) = (e for e in matrix.MATRIX.values() if _is(config, e))
        times = 1.0 if "fp32" in entry.overrides[0] else off
        found = prediction(0.1 * (entry.memory or 1) * times, machine.device)
        found.footprint.kinds["optimizer"] *= (entry.optimizer or 1) * times
        found.timing.seconds /= (entry.speed or 1) * times
        return found

    monkeypatch.setattr(benchmark, "predict", predicted)
    found = matrix_runs.matrix("tiny_full_fp8", gpu="H100", grid="batch=1,8")
    assert not runs.jobs
    claims = found.claims()
    assert len(claims) == 2 * 4 * 3  # optimizer, memory and speed of four settings
    assert {row[-1] for row in claims} == {verdict}
    assert found.headline.startswith("predicted for H100: ")
    failed = {row.label: row.error for row in found.rows if row.error}
    assert failed.keys() <= {"MXFP8", "NVFP4"}  # which a Hopper does not have
    assert "is not available" in failed["NVFP4"]
    assert "nothing was run" in " ".join(found.notes())


def _is(config, entry) -> bool:
    same = load_recipe("tiny_full_fp8", [*entry.overrides, "precision.emulation=forbid"]).config
    train = (config.train["optim"], same.train["optim"])
    settled = {"compile": same.precision.compile}  # alike for all
    return (config.precision.model_copy(update=settled), config.model.dtype, train[0]) == (
        same.precision, same.model.dtype, train[1],
    )  # fmt: skip


def test_a_trained_matrix_has_the_losses_of_each_seed(runs) -> None:
    found = matrix_runs.matrix("tiny_full_fp8", seeds=2)
    assert not any(job.measured for job in runs.jobs)
    assert {job.seed for job in runs.jobs} == {42, 43}
    assert all(len(row.losses) == len(row.eval_losses) == 2 for row in found.rows)
    head, *rows = found.tables()[0]
    at = head.index("eval loss")
    assert [row[at].endswith("(+0.0 %)") for row in rows if row[0] == "BF16"] == [True]


@pytest.mark.parametrize(
    "words", [["--matrix", "--vs", BF16], ["--gpu", "H100"], ["--matrix", "--gpu", "H10"]]
)
def test_options_that_do_not_go_together(words, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune", "benchmark", FP8, *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "fix:" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ ratios


def speed_ratio(reference: list[list[float]], other: list[list[float]]) -> Ratio | None:
    """The ratio of two rows that took so many seconds, a list for each round."""
    sides = zip(("reference", "other"), (reference, other), strict=True)
    rows = [Row(label=name, batch=1, length=1, tokens=1, rounds=r) for name, r in sides]
    found = Benchmark(rows=rows, references=["reference"]).against(rows[1])
    return Ratio(*found["reference"][:2]) if found else None


@pytest.mark.parametrize(("freedom", "table"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042)])
def test_students_table(freedom, table) -> None:
    low, high = student([-1.0, 1.0] * freedom, 0.95, n=freedom + 1)
    spread = math.sqrt(2 * freedom / (2 * freedom - 1))
    assert (high, -low) == pytest.approx([table * spread / math.sqrt(freedom + 1)] * 2, rel=2e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 29, 48])
def test_quantiles_are_scipys(freedom) -> None:
    from scipy.special import stdtrit

    for probability in (0.6, 0.9, 0.975, 0.9995):
        expected = stdtrit(freedom, probability)
        assert quantile(probability, freedom) == pytest.approx(expected, rel=1e-11)


def test_a_ratio_of_known_rounds() -> None:
    slow, fast = [[2.0, 2.0, 9.0], [4.0] * 3], [[1.0] * 3, [2.0] * 3]
    ratio = speed_ratio(slow, fast)  # paired: a clock at half speed meets both
    assert (ratio.value, *ratio.interval) == pytest.approx((2.0, 2.0, 2.0))
    ratio = speed_ratio([[2.0], [2.0]], [[1.0], [2.0]])
    assert ratio.value == pytest.approx(math.sqrt(2))
    half = 12.7062 * math.log(2) / 2  # t(0.975, 1), spread ln(2) / sqrt(2)
    assert math.log(ratio.interval[1] / ratio.value) == pytest.approx(half, rel=1e-5)
    one = speed_ratio([[3.0]], [[2.0]])
    assert (one, str(one)) == ((1.5, None), "1.50x")
    assert speed_ratio([], [[1.0]]) is None


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw, held = np.random.default_rng(3), 0
    for _ in range(600):
        noise = np.exp(draw.normal(0, 0.03, (2, 3, 1)) + draw.normal(0, 0.01, (2, 3, 5)))
        low, high = speed_ratio((1.3 * noise[0]).tolist(), noise[1].tolist()).interval
        held += low <= 1.3 <= high
    assert 0.92 < held / 600 < 0.98


def test_quartiles_are_those_of_all_rounds() -> None:
    row = Row(label="a", batch=1, length=1, tokens=1, rounds=[[1.0, 2.0], [3.0, 4.0, 5.0]])
    assert (row.step_seconds, row.step_seconds_q1, row.step_seconds_q3) == (3.0, 2.0, 4.0)
    assert Row(label="a", batch=1, length=1, tokens=1).step_seconds is None


# ---------------------------------------------------------------------------------- order of points


def test_recipes_alternate_and_points_go_by_size(runs) -> None:
    found = finetune.benchmark(FP8, vs=[BF16], grid="batch=2,1 length=64,16", rounds=2)
    order = [(point_of(j), j.seed, j.variant.label) for j in runs.jobs]
    sizes, abba = (
        [(1, 16), (2, 16), (1, 64), (2, 64)],
        ((42, FP8), (42, BF16), (43, BF16), (43, FP8)),
    )
    assert order == [(p, *run) for p in sizes for run in abba]
    assert [(r.label, r.batch, r.length) for r in found.rows] == [
        (n, *p) for p in sizes for n in (FP8, BF16)
    ]
    row = found.rows[1]
    over = found.against(row)[FP8]
    assert (over.speed, *over.interval) == pytest.approx((1.5,) * 3)
    assert over.predicted_speed == 1.0
    assert (row.gib_over_predicted, row.tokens_per_s) == pytest.approx((1.0, 16 / 0.1))
    assert found.differences == []


@pytest.mark.parametrize(("vs", "rounds"), [((), 1), ((BF16,), 3)])
def test_what_is_compared_runs_three_times_at_a_point_and_else_once(vs, rounds, runs) -> None:
    found = finetune.benchmark(FP8, vs=vs, grid="batch=1 length=16")
    assert [len(row.rounds) for row in found.rows] == [rounds] * (1 + len(vs))


# ------------------------------------------------------------------------------------ several GPUs


@pytest.fixture
def four_cores(monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "cores", lambda: 4)


@pytest.mark.parametrize(
    ("scaling", "tokens", "efficiency"), [("weak", [64, 128, 256], 1), ("strong", [64] * 3, None)]
)
def test_efficiency_is_that_of_tokens_per_second(scaling, tokens, efficiency, runs, four_cores):
    """Every step takes 100 ms, on however many: with the rows of each, or of all of them."""
    found = finetune.benchmark(
        BF16, grid="batch=1 length=16 gpus=4,1,2", scaling=scaling,
        overrides=["train.gradient_accumulation_steps=4"],
    )  # fmt: skip
    assert [(job.gpus, runs.threads) for job in runs.jobs] == [(n, 1) for n in (1, 2, 4)]
    assert [row.tokens for row in found.rows] == tokens
    one, two, four = map(found.efficiency, found.rows)
    assert (one, two, four) == pytest.approx((1, efficiency or 1 / 2, efficiency or 1 / 4))
    assert found.efficiency(found.rows[2], "predicted_seconds") == pytest.approx(four)
    written = json.loads(found.to_json())
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    for row, line, gpus in zip(written["rows"], lines, (1, 2, 4), strict=True):
        assert (row["gpus"], line["gpus"]) == (gpus, str(gpus))
        assert float(line["efficiency"]) == row["efficiency"]
        assert (line["waited"], row["exchange"]) == (("", []) if gpus == 1 else ("0.02", [0.03]))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found)
    shown = console.export_text()
    assert f"{four:.0%} (predicted {four:.0%})" in " ".join(shown.split())
    assert "20 (20%)" in shown
    assert f"{scaling} scaling: " in shown


def test_memory_of_several_processes_of_a_cpu_is_of_one_machine(runs, four_cores, monkeypatch):
    monkeypatch.setattr(benchmark, "available_gib", lambda _: 0.3)  # 0.1 GiB is predicted of each
    found = finetune.benchmark(BF16, grid="batch=1 length=16 gpus=1,2,4")
    assert [row.state for row in found.rows] == ["proven", "proven", "skipped"]


@pytest.mark.parametrize(
    ("grid", "scaling", "said", "fix"),
    [
        ("gpus=1,8", "weak", "8 processes, and 4 cores", f"estimate {BF16} --gpus 8 --gpu H100"),
        ("gpus=1,4", "strong", "6 does not divide among 4", "accumulation_steps=8, or --scaling"),
        ("batch=1", "strong", "changes nothing on one GPU", "gpus=1,2"),
        ("gpu=2", "weak", "did you mean 'gpus'", "length=512"),
    ],
)
def test_gpus_that_cannot_share_a_step(grid, scaling, said, fix, four_cores) -> None:
    overrides = ["train.gradient_accumulation_steps=6"]
    with pytest.raises(ConfigError, match=said) as caught:
        finetune.benchmark(BF16, grid=grid, scaling=scaling, overrides=overrides)
    assert fix in caught.value.fix


def test_ddp_says_what_the_backwards_that_it_samples_exchange(tmp_path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        assert exchange_of(model.module) == (0, {})
        for step in range(1, 13):
            model(torch.ones(2, 8)).sum().backward()
            iteration, times = exchange_of(model)
            assert iteration == min(step, 10)
            assert times["exchange"] >= times["waited"] >= 0
            assert times["exchange"] > 0
    finally:
        dist.destroy_process_group()


def test_processes_of_torchrun_end_with_it(tmp_path) -> None:
    """They are in sessions of their own, so that a signal to its session does not reach them."""
    import psutil

    job = Job(jobs.LabeledRecipe("a", load_recipe(BF16)), 42, tmp_path / "a.yaml", measured=True)
    job.process = subprocess.Popen(["sh", "-c", "setsid sleep 60 & wait"])
    agent = psutil.Process(job.process.pid)
    while not (children := agent.children()):
        pass
    job.stop()
    job.process.wait(timeout=10)
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fail", "the loss is NaN: it overflowed"),
        ("killed", "a run was out of memory: the system killed it (signal 9)"),
    ],
)
def test_how_one_of_several_processes_ended_is_told(how, said, four_cores, runs, monkeypatch):
    monkeypatch.setattr(benchmark, "run_jobs", jobs.run_jobs)
    monkeypatch.setattr(jobs, "RUN", (pretend.__code__.co_filename,))
    monkeypatch.setenv("PRETEND", how)
    (row,) = finetune.benchmark(BF16, grid="batch=1 length=16 gpus=2").rows
    assert row.error.startswith(said), row.error


@pytest.mark.long
def test_two_processes_are_measured_and_say_what_they_wait_for(monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "cores", lambda: 2)
    found = finetune.benchmark(
        FP8, grid="batch=2 length=32 gpus=1,2", steps=5, scaling="strong",
        overrides=["train.gradient_accumulation_steps=2"],
    )  # fmt: skip
    one, two = found.rows
    for row in found.rows:
        assert (row.error, row.proven, row.tokens, len(row.seconds)) == ("", "proven", 128, 5)
        assert row.gib_over_predicted == pytest.approx(1, abs=0.02)
    assert one.waited == []
    assert two.step_seconds > two.exchange[0] >= two.waited[0] > 0


@pytest.mark.parametrize("all_points", [False, True])
def test_larger_than_what_did_not_fit_is_not_tried(all_points, runs) -> None:
    runs.fits = lambda job: job.variant.label == BF16 or point_of(job)[0] < 2
    found = finetune.benchmark(
        FP8, vs=[BF16], grid="batch=1,2,4 length=16,32", rounds=2, all_points=all_points
    )
    tried = {(j.variant.label, point_of(j)) for j in runs.jobs}
    skipped = {(r.label, (r.batch, r.length)) for r in found.rows if r.state == "skipped"}
    expected = {(FP8, (b, n)) for b, n in ((4, 16), (2, 32), (4, 32))}
    assert skipped == (set() if all_points else expected)
    assert not skipped & tried
    assert len(found.rows) == 12  # a row each, whatever came of it
    assert sum(j.variant.label == FP8 and point_of(j) == (2, 16) for j in runs.jobs) == 1
    failed = next(r for r in found.rows if r.at == "2 x 16" and r.label == FP8)
    assert failed.error == "the run is out of memory: tried to allocate 2 GiB"
    assert (failed.state, failed.predicted_gib, failed.rounds) == ("out of memory", 0.1, [])


@pytest.mark.parametrize(
    ("device", "free", "needed", "tried"),
    [(H100, 0, 90.0, True), (H100, 0, 101.0, False), (CPU, 8.0, 7.9, True), (CPU, 8.0, 8.1, False)],
)
def test_what_is_predicted_far_too_large_is_left_out(
    device, free, needed, tried, runs, monkeypatch
):
    monkeypatch.setattr(benchmark, "this_device", lambda: device)
    monkeypatch.setattr(benchmark, "available_gib", lambda _: free)
    monkeypatch.setattr(benchmark, "predict", lambda *_: prediction(needed, device))
    for force in (False, True):
        (row,) = finetune.benchmark(BF16, grid="batch=1 length=16", force=force).rows
        assert row.predicted_gib == needed
        assert row.state == ("proven" if tried or force else "skipped")
        assert bool(row.error) is (f"predicted to hold {needed:.1f} GiB" in row.error)


def test_what_cannot_be_predicted_is_measured_all_the_same(runs, monkeypatch) -> None:
    def fails(*_):
        raise RehearsalError("the model reads a file")

    monkeypatch.setattr(benchmark, "predict", fails)
    (row,) = finetune.benchmark(BF16, grid="batch=1 length=16").rows
    assert (row.state, row.prediction) == ("proven", "not predicted: the model reads a file")


def test_a_row_is_proven_where_all_rounds_are_and_of_the_tokens_that_were_asked(
    runs, monkeypatch
) -> None:
    made = [receipt("fp8") for _ in range(3)]
    made[1] |= {"status": "not proven: no step", "memory": {"measured": "x", "measured_gib": 3.0}}

    def fits(job) -> bool:
        monkeypatch.setenv("RECEIPTS", json.dumps({"fp8": made[job.seed - 42]}))
        return True

    runs.fits = fits
    (row,) = finetune.benchmark(FP8, rounds=3).rows
    assert (row.proven, row.state) == ("not proven: no step", "not proven")
    assert (row.allocated_gib, row.reserved_gib, len(row.rounds)) == (3.0, None, 3)
    monkeypatch.setenv("TOKENS", "1")
    (row,) = finetune.benchmark(FP8, rounds=1).rows
    assert row.error == "a step had 1025 tokens, and 1024 were requested"


def test_what_else_two_recipes_differ_in_is_named(runs) -> None:
    recipe = load_recipe(BF16, ["lora.r=4", "train.optim=adafactor", "data.max_rows=3"])
    found = finetune.benchmark(FP8, vs=[recipe], rounds=1)
    assert [line.partition(" (")[0] for line in found.differences] == [
        f"lora.r: {FP8} 8, {BF16} 4", f"train.optim: {FP8} adamw_torch, {BF16} adafactor",
    ]  # fmt: skip
    assert all(line.endswith(")") for line in found.differences)  # why it matters
    assert any(line.startswith("not a pair that differs in precision") for line in found.notes())


def test_compiling_is_settled_for_all_where_one_of_them_would(monkeypatch, runs) -> None:
    """`auto` compiles FP8 by torchao on a GPU and never BF16, which is no gain of FP8's."""
    monkeypatch.setattr(benchmark, "this_device", lambda: H100)
    monkeypatch.setattr(benchmark, "differences", lambda *_, **__: [])  # asks for a real GPU
    fp8 = load_recipe(FP8, ["precision.backend=torchao"])
    found = finetune.benchmark(fp8, vs=[BF16, BF16], rounds=1)
    assert {job.variant.recipe.config.precision.compile for job in runs.jobs} == {"on"}
    assert any("precision.compile=on on all sides" in line for line in found.notes())
    found = finetune.benchmark(fp8, rounds=1)  # its steps stand for a long run
    assert runs.jobs[-1].variant.recipe.config.precision.compile == "on"
    assert not any("precision.compile" in line for line in found.notes())
    finetune.benchmark(BF16, rounds=1)
    assert runs.jobs[-1].variant.recipe.config.precision.compile == "auto"


def test_a_recipe_beside_itself_has_rows_of_its_own(runs) -> None:
    other = load_recipe(FP8, ["precision.scaling=tensorwise"])
    found = finetune.benchmark(FP8, vs=[other], rounds=1)
    assert [r.label for r in found.rows] == [FP8, f"{FP8}#2"]
    assert found.against(found.rows[1])[FP8][:2] == (1.0, None)


# ----------------------------------------------------------------------------------- files, display


def measured(runs) -> Benchmark:
    runs.fits = lambda job: point_of(job)[0] < 2
    return finetune.benchmark(FP8, vs=[BF16], grid="batch=1,2", rounds=2)


def test_json_and_csv_say_the_same(runs) -> None:
    found = measured(runs)
    text = (found.folder / "benchmark.json").read_text()
    assert Benchmark.model_validate_json(text) == found
    assert Benchmark.model_validate_json(text).to_json() + "\n" == text
    rows = json.loads(text)["rows"]
    lines = list(csv.DictReader(io.StringIO((found.folder / "benchmark.csv").read_text())))
    assert len(lines) == len(rows) == 4
    for row, line in zip(rows, lines, strict=True):
        assert (line["label"], int(line["batch"])) == (row["label"], row["batch"])
        assert line["step_seconds"] == ("" if row["error"] else str(row["step_seconds"]))
        assert line["error"] == row["error"]
    assert rows[1]["against"][FP8]["speed"] == pytest.approx(float(lines[1]["speed"]))
    assert rows[1]["against"][FP8]["interval"] == pytest.approx([1.5, 1.5])


def test_the_table(runs) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(measured(runs))
    shown = console.export_text()
    assert "1.50x (1.50 to 1.50)" in shown
    assert "predicted 1.00x" in shown
    # 600 W in the timed steps: what compiling drew before them is no part of it.
    rows = [row for row in measured(runs).rows if row.tokens_per_joule]
    assert rows
    assert {round(row.tokens_per_s / row.tokens_per_joule) for row in rows} == {600}
    assert sum(line.endswith("out of memory") for line in shown.splitlines()) == 2


# ----------------------------------------------------------------------------------- command line


@pytest.fixture
def cli(monkeypatch, capsys, runs):
    """A function that runs the command line with runs that measure nothing."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["finetune", "benchmark", *words])
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        return code, *capsys.readouterr()

    return call


def test_a_benchmark_on_the_command_line(cli, tmp_path) -> None:
    words = (FP8, "--vs", BF16, "--grid", "batch=1", "--rounds", "2", "train.seed=3")
    code, out, err = cli(*words)
    assert code == 0
    assert "1.50x (1.50 to 1.50)" in out
    assert err.count("tokens/s, proven") == 4
    code, out, _ = cli(*words, "--csv")  # a second one stands beside the first
    assert [line["label"] for line in csv.DictReader(io.StringIO(out))] == [FP8, BF16]
    assert len(list(tmp_path.glob("runs/benchmark/*-vs-*/*/benchmark.json"))) == 2
    assert json.loads(cli(*words, "--json")[1])["kind"] == "benchmark"


def test_where_nothing_could_be_measured_the_exit_code_says_so(cli, runs) -> None:
    runs.fits = lambda _: False
    code, out, _ = cli(FP8, "--grid", "batch=1")
    assert code == 1
    assert "out of memory" in out


@pytest.mark.parametrize("after", [0, 1, 3])
def test_ctrl_c_keeps_the_rows(after, cli, runs, tmp_path) -> None:
    runs.stop_after = after
    code, out, err = cli(FP8, "--vs", BF16, "--grid", "batch=1,2", "--rounds", "2")
    assert code == 130
    assert "interrupted; rows until then are in runs/benchmark/" in err.replace("\n", "")
    assert "interrupted: what was measured until then is kept" in out
    (file,) = tmp_path.rglob("benchmark.json")
    kept = Benchmark.model_validate_json(file.read_text())
    assert kept.interrupted
    assert len(kept.rows) == min(after, 2)
    assert sum(len(row.rounds) for row in kept.rows) == after


@pytest.mark.parametrize(
    ("how", "state", "said"),
    [
        ("fail", "failed", "the loss is NaN: it overflowed"),
        ("crash", "failed", "a run ended with code 1: its last words: SystemError: boom"),
        ("killed", "out of memory", "a run was out of memory: the system killed it (signal 9)"),
    ],
)
def test_how_a_process_ended_is_told(how, state, said, cli, runs, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "run_jobs", jobs.run_jobs)
    monkeypatch.setattr(jobs, "RUN", (pretend.__code__.co_filename,))
    monkeypatch.setenv("PRETEND", how)
    (row,) = finetune.benchmark(BF16, grid="batch=1 length=16").rows
    assert (row.state, row.error.startswith(said)) == (state, True), row.error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny_lora_fp9"], "did you mean 'tiny_lora_fp8'"),
        (["tiny_lora_fp8", "--vs", "nothing.yaml"], "no recipe file"),
        (["tiny_lora_fp8", "--grid", "batch=x"], "batch=1,2,4 length=512,2048"),
        (["tiny_lora_fp8", "--grid", "length=40"], "padded to 48"),
        (["tiny_lora_fp8", "--json", "--csv"], "both"),
        (["tiny_lora_fp8", "--steps", "0"], "--steps 1 or more"),
        (["tiny_lora_fp8", "--rounds", "0"], "--rounds 1 or more"),
        (["tiny_lora_fp8", "--out", "file"], "cannot be made"),
        (["tiny_lora_fp8", "model.name=some/model"], "not packaged"),
    ],
)
def test_a_mistake_exits_with_2(cli, tmp_path, words, said) -> None:
    (tmp_path / "file").touch()
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_several_processes_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="benchmark was started as several processes"):
        finetune.benchmark(FP8)


def test_errors_are_of_the_library_in_python_too() -> None:
    with pytest.raises(RecipeNotFoundError):
        finetune.benchmark("nothing")
