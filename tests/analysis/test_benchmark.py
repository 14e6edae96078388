"""Benchmarks: what is measured, in which order, and that no end of a point is the end of all."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import signal
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import finetune
from finetune import load_recipe
from finetune.analysis.benchmark import benchmark
from finetune.analysis.benchmark import point as points
from finetune.analysis.benchmark.grid import (
    WARM_UP,
    Grid,
    Job,
    Point,
    at_point,
    own_point,
    parse_grid,
)
from finetune.analysis.benchmark.result import Benchmark, Row
from finetune.analysis.statistics import Ratio, student
from finetune.cli.app import main
from finetune.config.paths import TINY_LLAMA
from finetune.errors import ConfigError, ModelNotFoundError, RecipeNotFoundError
from tests.conftest import CPU, H100

FP8, BF16 = "tiny_lora_fp8", "tiny_lora_bf16"
SIZES = st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_here(job: Job, log) -> list[dict]:
    """Measure a job in this process, as its own would."""
    return in_this_process(Job, points.measure_point, job)


def in_this_process(kind, measure, job: Job) -> list[dict]:
    """The lines that a process would print."""
    from accelerate.state import AcceleratorState, GradientState

    lines: list[dict] = []
    measure(kind.from_json(job.to_json()), lines.append)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return json.loads(json.dumps(lines))


class Pretended:
    """A runner of jobs that measures nothing: FP8 takes 2 ms a step, all else 3."""

    def __init__(self, fits=lambda _: True, stop_after: int | None = None) -> None:
        self.fits, self.stop_after = fits, stop_after
        self.jobs: list[Job] = []

    def __call__(self, job: Job, log) -> list[dict]:
        if len(self.jobs) == self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        lines: list[dict] = []
        if job.forecast:
            lines.append({"kind": "forecast", "allocated_gib": 1.0, "step_seconds": 0.001})
        if not self.fits(job):
            failed = {"kind": "failed", "error": "out of memory", "out_of_memory": True}
            return [*lines, failed]
        once = 0.002 if "fp8" in job.label else 0.003
        result = {"kind": "result", "seconds": [once] * job.steps, "proven": "proven"}
        return [*lines, result | {"allocated_gib": 1.1, "environment": {"threads": 1}}]


# -------------------------------------------------------------------------------------------- grid


@given(batch=SIZES, length=SIZES, spaces=st.integers(1, 3), turned=st.booleans())
def test_a_grid_is_read_as_it_was_written(batch, length, spaces, turned) -> None:
    words = [f"{k}={','.join(map(str, v))}" for k, v in (("batch", batch), ("length", length))]
    grid = parse_grid((" " * spaces).join(reversed(words) if turned else words))
    assert grid == Grid(tuple(batch), tuple(length))
    found = grid.points(load_recipe(FP8, check_train=False).config)
    assert set(found) == {(b, n) for b in batch for n in length}
    assert [p.tokens for p in found] == sorted(p.tokens for p in found)
    for i, later in enumerate(found):  # what contains another comes after it
        assert not any(p.contains(later) and p != later for p in found[:i])


@given(text=st.text(alphabet="abchlngt=,0123456789 -.²", max_size=24))
def test_any_text_is_a_grid_or_an_error(text) -> None:
    with contextlib.suppress(ConfigError):
        grid = parse_grid(text)
        assert all(value >= 1 for value in (*grid.batch, *grid.length))
        assert grid.batch or grid.length


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"), ("lenght=4", "did you mean 'length'"), ("batch=1 batch=2", "twice"),
        ("batch=0", "'0' is no number from 1 to"), ("batch=1,,2", "'' is no"),
        ("batch", "has no values"), ("batch=1.5", "'1.5' is no"), ("length=2k", "'2k' is no"),
    ],
)  # fmt: skip
def test_a_misspelt_grid(text, said) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_grid(text)
    assert "batch=1,2,4 length=512,2048" in caught.value.fix


def test_what_a_grid_leaves_out_is_the_recipes_own() -> None:
    config = load_recipe(FP8, check_train=False).config
    assert Grid(batch=(2,)).points(config) == [(2, 128)]
    assert Grid(length=(64,)).points(config) == [(8, 64)]
    assert own_point(config.model_copy(update={"train": {}})) == (8, 1024)  # TRL's


# --------------------------------------------------------------------------------------------- job


def test_a_job_survives_its_way_into_a_process() -> None:
    config = at_point(load_recipe(FP8).config, Point(2, 64), 5)
    job = Job("a", config, 5, 2, False, True, "a note")
    assert Job.from_json(job.to_json()) == job
    assert (job.point, job.tokens) == ((2, 64), 128)


def test_a_point_keeps_the_recipes_step_and_nothing_around_it() -> None:
    changes = ["train.gradient_accumulation_steps=3", "train.packing=true", "train.optim=adafactor"]
    changes.append("eval.tasks=[hellaswag]")
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
    assert (config.precision, config.lora) == (recipe.precision, recipe.lora)
    assert Job("", config).tokens == 4 * 64 * 3


def test_padded_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="would be padded to 48") as caught:
        at_point(load_recipe(FP8).config, Point(1, 40), 1)
    assert "length=48" in caught.value.fix


def test_a_model_of_the_hub_needs_its_shape_here(tmp_path) -> None:
    def named(name: str):
        return load_recipe(BF16, [f"model.name={name}"]).config

    with pytest.raises(ModelNotFoundError, match="'some/model' is not packaged") as caught:
        at_point(named("some/model"), Point(1, 16), 1)
    assert "meta-llama/Llama-3.1-8B-Instruct" in caught.value.fix
    for name in ("openai-community/gpt2", "builtin:bdh_tiny", str(TINY_LLAMA)):
        assert at_point(named(name), Point(1, 16), 1).model.weights == "random"


# ------------------------------------------------------------------------------------------ ratios


def speed_ratio(reference: list[list[float]], other: list[list[float]]) -> Ratio | None:
    """The ratio of two rows that took so many seconds, a list for each round."""
    rows = [Row("reference", 1, 1, 1, rounds=reference), Row("other", 1, 1, 1, rounds=other)]
    return Benchmark(rows).ratio(rows[1], "reference")


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)],
)
def test_students_table(freedom, table) -> None:
    low, high = student([-1.0, 1.0] * freedom, 0.95, n=freedom + 1)
    spread = math.sqrt(2 * freedom / (2 * freedom - 1))
    assert (high, -low) == pytest.approx([table * spread / math.sqrt(freedom + 1)] * 2, rel=2e-4)


def test_a_ratio_of_known_rounds() -> None:
    slow, fast = [[2.0, 2.0, 9.0], [4.0] * 3], [[1.0] * 3, [2.0] * 3]
    ratio = speed_ratio(slow, fast)  # paired: a clock at half speed meets both
    assert (ratio.value, *ratio.interval) == pytest.approx((2.0, 2.0, 2.0))
    ratio = speed_ratio([[2.0], [2.0]], [[1.0], [2.0]])
    assert ratio.value == pytest.approx(math.sqrt(2))
    half = 12.7062 * math.log(2) / 2  # t(0.975, 1), spread ln(2) / sqrt(2)
    assert math.log(ratio.interval[1] / ratio.value) == pytest.approx(half, rel=1e-5)
    one = speed_ratio([[3.0]], [[2.0]])
    assert one == (1.5, None)
    assert str(one) == "1.50x"
    assert speed_ratio([], [[1.0]]) is None


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_the_interval_covers_the_truth_as_often_as_it_says(rounds) -> None:
    draw = np.random.default_rng(rounds)
    held = 0
    for _ in range(600):
        noise = np.exp(draw.normal(0, 0.03, (2, rounds, 1)) + draw.normal(0, 0.01, (2, rounds, 5)))
        low, high = speed_ratio((1.3 * noise[0]).tolist(), noise[1].tolist()).interval
        held += low <= 1.3 <= high
    assert 0.92 < held / 600 < 0.98


def test_a_row_is_proven_where_all_rounds_are_and_its_peak_is_the_highest() -> None:
    row = Row("a", 1, 16, 16)
    for proven, gib in (("proven", 1.0), ("not proven: no step", 3.0), ("proven", 2.0)):
        row.add({"kind": "result", "seconds": [1.0], "proven": proven, "allocated_gib": gib})
    assert (row.proven, row.state) == ("not proven: no step", "not proven")
    assert (row.allocated_gib, row.reserved_gib) == (3.0, None)
    assert len(row.rounds) == 3


# ---------------------------------------------------------------------------------- order of points


def test_rounds_alternate_and_points_go_by_size() -> None:
    run = Pretended()
    found = finetune.benchmark(FP8, vs=[BF16], grid="batch=2,1 length=64,16", rounds=2, run=run)
    order = [(j.point, j.round, j.label) for j in run.jobs]
    sizes = [(1, 16), (2, 16), (1, 64), (2, 64)]
    assert order == [(p, r, name) for p in sizes for r in (0, 1) for name in (FP8, BF16)]
    assert [j.forecast for j in run.jobs] == [j.round == 0 for j in run.jobs]
    assert [(r.label, r.key) for r in found.rows] == [(n, p) for p in sizes for n in (FP8, BF16)]
    row = found.rows[1]
    ratio = found.ratio(row, FP8)
    assert (ratio.value, *ratio.interval) == pytest.approx((2 / 3,) * 3)
    assert found.predicted_ratio(row, FP8) == 1.0
    assert row.facts()["gib_over_predicted"] == pytest.approx(1.1)
    assert row.facts()["tokens_per_s"] == pytest.approx(16 / 0.003)
    assert found.differences == []


@pytest.mark.parametrize("all_points", [False, True])
def test_larger_than_what_did_not_fit_is_not_tried(all_points) -> None:
    run = Pretended(fits=lambda job: job.label == BF16 or job.point.batch < 2)
    found = finetune.benchmark(
        FP8, vs=[BF16], grid="batch=1,2,4 length=16,32", rounds=2, run=run, all_points=all_points
    )
    tried = {(j.label, j.point) for j in run.jobs}
    skipped = {(r.label, r.key) for r in found.rows if r.error.startswith("skipped")}
    expected = {(FP8, (b, n)) for b, n in ((4, 16), (2, 32), (4, 32))}
    assert skipped == (set() if all_points else expected)
    assert not skipped & tried
    assert len(found.rows) == 12  # a row each, whatever came of it
    assert sum(j.label == FP8 and j.point == (2, 16) for j in run.jobs) == 1  # no second round
    failed = next(r for r in found.rows if r.key == (2, 16) and r.label == FP8)
    assert (failed.error, failed.predicted_gib, failed.rounds) == ("out of memory", 1.0, [])
    assert "out of memory" in found.to_markdown()


def test_what_else_two_recipes_differ_in_is_named(tmp_path) -> None:
    recipe = load_recipe(BF16, ["lora.r=4", "train.optim=adafactor", "data.max_rows=3"])
    found = finetune.benchmark(FP8, vs=[recipe], rounds=1, run=Pretended())
    assert [line.partition(" (")[0] for line in found.differences] == [
        f"lora.r: {FP8} 8, {BF16} 4", f"train.optim: {FP8} adamw_torch, {BF16} adafactor",
    ]  # fmt: skip
    assert all(line.endswith(")") for line in found.differences)  # why it matters
    assert any(line.startswith("not a pair that differs in precision") for line in found.notes())
    full = finetune.benchmark(FP8, vs=["tiny_full_bf16"], rounds=1, run=Pretended())
    assert any(line.startswith("lora") for line in full.differences)


def test_compiling_is_settled_for_all_where_one_of_them_would(monkeypatch) -> None:
    """`auto` compiles FP8 by torchao on a GPU and never BF16, which is no gain of FP8's."""
    monkeypatch.setattr(benchmark, "this_device", lambda: H100)
    monkeypatch.setattr(benchmark, "differences", lambda *_, **__: [])  # asks for a real GPU
    run, fp8 = Pretended(), load_recipe(FP8, ["precision.backend=torchao"])
    found = finetune.benchmark(fp8, vs=[BF16, BF16], rounds=1, run=run)
    assert {job.config.precision.compile for job in run.jobs} == {"on"}
    assert any("precision.compile=on on all sides" in line for line in found.notes())
    finetune.benchmark(fp8, rounds=1, run=run)
    assert run.jobs[-1].config.precision.compile == "auto"  # alone there is nothing to be fair to


def test_a_recipe_beside_itself_has_rows_of_its_own() -> None:
    other = load_recipe(FP8, ["precision.scaling=tensorwise"])
    found = finetune.benchmark(FP8, vs=[other], rounds=1, run=Pretended())
    assert [r.label for r in found.rows] == [FP8, f"{FP8}#2"]
    assert found.ratio(found.rows[1], FP8) == (1.0, None)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_ctrl_c_keeps_the_rows(after, tmp_path) -> None:
    run = Pretended(stop_after=after)
    found = finetune.benchmark(FP8, vs=[BF16], grid="batch=1,2", rounds=2, run=run, out=tmp_path)
    assert found.interrupted
    assert found.folder is not None
    kept = Benchmark.from_json((found.folder / "benchmark.json").read_text())
    assert kept.interrupted
    assert len(kept.rows) == min(after, 2)
    assert sum(len(row.rounds) for row in kept.rows) == after
    assert any(line.startswith("interrupted") for line in kept.notes())


# ----------------------------------------------------------------------------------- files, display


def measured() -> Benchmark:
    return finetune.benchmark(
        FP8, vs=[BF16], grid="batch=1,2", rounds=2, run=Pretended(lambda j: j.point.batch < 2)
    )


def test_json_and_csv_say_the_same() -> None:
    found = measured()
    assert found.folder is not None
    text = (found.folder / "benchmark.json").read_text()
    assert Benchmark.from_json(text) == found
    assert Benchmark.from_json(text).to_json() + "\n" == text
    rows = json.loads(text)["rows"]
    lines = list(csv.DictReader(io.StringIO((found.folder / "benchmark.csv").read_text())))
    assert len(lines) == len(rows) == 4
    for row, line in zip(rows, lines, strict=True):
        assert (line["label"], int(line["batch"])) == (row["label"], row["batch"])
        assert line["step_seconds"] == ("" if row["error"] else str(row["step_seconds"]))
        assert line["error"] == row["error"]
    assert rows[1]["against"][FP8]["speed"] == pytest.approx(float(lines[1]["speed"]))
    assert rows[1]["against"][FP8]["interval"] == pytest.approx([2 / 3, 2 / 3])


def test_the_table_in_a_terminal_and_in_a_notebook() -> None:
    found = measured()
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(found)
    shown = console.export_text()
    for text in (shown, found._repr_markdown_()):
        assert "0.67x (0.67 to 0.67)" in text
        assert "proven" in text
        assert "predicted 1.00x" in text
        assert text.count("out of memory") == 2  # a row of each recipe
    table = [line for line in found.to_markdown().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {table[0].count("|")}
    assert len(table) == 2 + 4


def test_quartiles_are_those_of_all_rounds() -> None:
    row = Row("a", 1, 1, 1, rounds=[[1.0, 2.0], [3.0, 4.0, 5.0]])
    assert (row.step, row.quartiles) == (3.0, (2.0, 4.0))
    assert Row("a", 1, 1, 1).facts()["step_seconds"] is None


# ------------------------------------------------------------------------------------------ a point


@pytest.mark.long
def test_recipes_side_by_side_for_real() -> None:
    found = finetune.benchmark(
        FP8, vs=[BF16], grid="batch=2 length=32", steps=3, rounds=1, run=run_here,
        overrides=["train.gradient_accumulation_steps=2"],
    )  # fmt: skip
    fp8, bf16 = found.rows
    assert (fp8.proven, bf16.proven) == ("proven", "proven")
    assert (fp8.precision, bf16.precision) == ("FP8 frozen/rowwise, emulated", "BF16")
    assert fp8.fp8_share is not None
    assert fp8.fp8_share > 0.5
    for row in found.rows:
        assert (row.error, row.tokens, len(row.seconds)) == ("", 128, 3)
        assert row.facts()["gib_over_predicted"] == pytest.approx(1, abs=0.02)
        assert row.memory == "peak of live tensors in step 3"
    assert found.memory_ratio(bf16, FP8) > 1.1
    assert found.environment["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_packed_rows_fill_their_bins() -> None:
    config = load_recipe(BF16, ["train.packing=true"]).config
    job = Job("a", at_point(config, Point(2, 32), 1), steps=1)
    lines = run_here(job, None)
    assert lines[-1]["kind"] == "result", lines
    assert lines[-1]["allocated_gib"] == pytest.approx(lines[0]["allocated_gib"], rel=0.02)


@pytest.mark.slow
def test_out_of_memory_is_a_row_with_the_prediction(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(points, "make_trainer", full)
    found = finetune.benchmark(BF16, grid="batch=1,2 length=16", run=run_here)
    first, second = found.rows
    assert first.error == "out of memory: CUDA out of memory. Tried to allocate 2 GiB"
    assert first.out_of_memory
    assert first.predicted_gib is not None
    assert second.error == benchmark.TOO_LARGE


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True), (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling x"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("a memory of old"), False),
    ],
)  # fmt: skip
def test_what_a_full_memory_sounds_like(error, is_it, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(points, "train_point", full)
    job = Job("a", at_point(load_recipe(BF16).config, Point(1, 16), 1), forecast=False)
    lines: list[dict] = []
    if is_it:
        points.measure_point(job, lines.append)
        assert lines[0]["out_of_memory"]
        assert lines[0]["error"].startswith("out of memory")
    else:
        with pytest.raises(RuntimeError, match="of old"):
            points.measure_point(job, lines.append)


def test_other_errors_are_not_taken_for_a_full_memory(monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(points, "make_trainer", broken)
    job = Job("a", at_point(load_recipe(BF16).config, Point(1, 16), 1), forecast=False)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        points.measure_point(job, print)


def test_a_mistake_that_only_the_point_can_see_is_its_row() -> None:
    config = load_recipe(FP8, ["precision.emulation=forbid"]).config
    lines: list[dict] = []
    points.measure_point(Job("a", at_point(config, Point(1, 16), 1)), lines.append)
    assert lines[-1]["kind"] == "failed"
    assert "cannot be had" in lines[-1]["error"]
    assert not lines[-1]["out_of_memory"]


@pytest.mark.parametrize(
    ("device", "free", "needed", "tried"),
    [(H100, 0, 90.0, True), (H100, 0, 101.0, False), (CPU, 8.0, 7.9, True), (CPU, 8.0, 8.1, False)],
)
def test_what_is_predicted_far_too_large_is_left_out(device, free, needed, tried, monkeypatch):
    expected = {"allocated_gib": needed, "needed_gib": needed}
    monkeypatch.setattr(points, "this_device", lambda: device)
    monkeypatch.setattr(points, "available_gib", lambda _: free)
    monkeypatch.setattr(points, "forecast", lambda *_: expected)
    monkeypatch.setattr(points, "train_point", lambda *_: {"seconds": [1.0]})
    config = at_point(load_recipe(BF16).config, Point(1, 16), 1)
    for force in (False, True):
        lines: list[dict] = []
        points.measure_point(Job("a", config, force=force), lines.append)
        assert lines[0]["allocated_gib"] == needed
        assert lines[1]["kind"] == ("result" if tried or force else "skipped")
        if lines[1]["kind"] == "skipped":
            assert f"predicted to hold {needed:.1f} GiB" in lines[1]["error"]


# --------------------------------------------------------------------------------------- processes


@pytest.mark.long
@pytest.mark.slow  # torch starts again in the process
def test_a_point_in_a_process_of_its_own(monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    words = ["benchmark", "tiny_full_bf16", "--grid", "batch=1 length=16", "--steps", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["finetune", *words])
    main()
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert (row["proven"], len(row["rounds"][0]), row["error"]) == ("proven", 2, "")
    assert row["gib_over_predicted"] == pytest.approx(1, abs=0.02)
    assert "tokens/s, proven" in err


@pytest.mark.parametrize(
    ("code", "log", "said", "full"),
    [
        (-signal.SIGKILL, "", "killed by the system", True),
        (-signal.SIGSEGV, "", "SIGSEGV", False),
        (1, "Traceback\n  File x\nValueError: no such thing\n", "ValueError: no such thing", False),
        (1, "torch.AcceleratorError: CUDA error\n\nCompile with X\n", "AcceleratorError", False),
        (3, "", "exit code 3", False),
    ],
)
def test_how_a_process_ended_is_told(code, log, said, full, tmp_path) -> None:
    (tmp_path / "log").write_text(log)
    line = benchmark.ended(code, tmp_path / "log")
    assert said in line["error"]
    assert bool(line.get("out_of_memory")) is full


def test_a_process_that_crashes_is_a_row(monkeypatch, tmp_path) -> None:
    crash = 'import sys; sys.stdin.read(); print(\'{"kind": "forecast"}\'); raise ValueError(7)'
    popen = benchmark.subprocess.Popen
    monkeypatch.setattr(
        benchmark.subprocess, "Popen", lambda _, **k: popen([sys.executable, "-c", crash], **k)
    )
    job = Job("a", at_point(load_recipe(BF16).config, Point(1, 16), 1))
    lines = benchmark.run_apart(job, tmp_path / "log")
    assert [line["kind"] for line in lines] == ["forecast", "failed"]
    assert lines[1]["error"].startswith("ValueError: 7")


# ----------------------------------------------------------------------------------- command line


@pytest.fixture
def cli(monkeypatch, capsys):
    """A function that runs the command line with a runner that measures nothing."""

    def call(*words: str, run=None) -> tuple[int, str, str]:
        monkeypatch.setattr(benchmark, "run_apart", run or Pretended())
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
    assert "0.67x (0.67 to 0.67)" in out
    assert err.count("tokens/s, proven") == 4
    assert len(list(tmp_path.glob("runs/benchmark/*-vs-*/*/benchmark.json"))) == 1
    assert cli(*words)[0] == 0  # a second one stands beside the first
    assert len(list(tmp_path.glob("runs/benchmark/*-vs-*/*/benchmark.csv"))) == 2
    code, out, _ = cli(*words, "--csv")
    assert [line["label"] for line in csv.DictReader(io.StringIO(out))] == [FP8, BF16]
    assert json.loads(cli(*words, "--json")[1])["kind"] == "benchmark"


def test_where_nothing_could_be_measured_the_exit_code_says_so(cli) -> None:
    code, out, _ = cli(FP8, "--grid", "batch=1", run=Pretended(fits=lambda _: False))
    assert code == 1
    assert "out of memory" in out


def test_ctrl_c_on_the_command_line(cli) -> None:
    code, out, err = cli(FP8, "--vs", BF16, "--grid", "batch=1", run=Pretended(stop_after=1))
    assert code == 130
    assert "interrupted; rows until then are in runs/benchmark/" in err.replace("\n", "")
    assert "proven" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny_lora_fp9"], "did you mean 'tiny_lora_fp8'"),
        (["tiny_lora_fp8", "--vs", "nothing.yaml"], "no recipe file"),
        (["tiny_lora_fp8", "--grid", "batch=x"], "batch=1,2,4 length=512,2048"),
        (["tiny_lora_fp8", "--grid", "length=40"], "padded to 48"),
        (["tiny_lora_fp8", "--json", "--csv"], "both"),
        (["tiny_lora_fp8", "--steps", "0"], "--steps 1 or more"),
        (["tiny_lora_fp8", "--ladder", "lora"], "tests.benchmarks.ladder lora tiny_lora_fp8"),
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
    with pytest.raises(ConfigError, match="one device"):
        finetune.benchmark(FP8, run=Pretended())


def test_errors_are_of_the_library_in_python_too() -> None:
    with pytest.raises(RecipeNotFoundError):
        finetune.benchmark("nothing", run=Pretended())
