"""Run folders as they are found: whole, half-written, killed, old; and the table of them."""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import psutil
import pytest

from finetune import find_runs, load_recipe
from finetune.config.paths import find_recipe
from finetune.errors import ConfigError
from finetune.runs.folder import QUIET, RunFolder, write_start
from finetune.runs.lookup import find_comparisons, find_run, read_run
from finetune.runs.receipt import Receipt
from tests.run_folders import make_comparison, make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261121-120000-aaaa", steps=40)


@pytest.fixture
def cli(cli, monkeypatch):
    """The command line, wide enough for all columns."""
    monkeypatch.setenv("COLUMNS", "160")
    return cli


def change(run, file: str, /, **values) -> None:
    """Set keys of a JSON file of a run."""
    data = json.loads((run / file).read_text())
    (run / file).write_text(json.dumps(data | values))


def age(run, seconds: float) -> None:
    """As if nothing had been written for so long."""
    for file in run.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


# ----------------------------------------------------------------------------------------- state


def test_a_whole_run_is_read(run):
    found = read_run(run)
    assert (found.recipe, found.state, found.proven) == ("tiny_full_fp8", "finished", True)
    assert found.precision == "FP8 emulated/delayed"
    assert (found.last_step, found.planned_steps) == (40, 40)
    assert found.config["train"]["max_steps"] == 40
    assert len(found.steps) == 40
    assert [step for step, _ in found.samples] == [10, 20, 30, 40, 40]
    assert found.samples[-1][1] == found.report["samples"]


@pytest.mark.parametrize("ended", [{"interrupted": True}, {"stopped": "loss is NaN"}])
def test_the_receipt_says_whether_a_run_was_stopped(run, ended):
    change(run, "receipt.json", run=ended)
    assert RunFolder(run).state == "stopped"


def test_a_run_without_an_end_lives_as_long_as_its_process(run):
    (run / "report.json").unlink()
    write_start(run)
    assert RunFolder(run).state == "running"
    (run / "receipt.json").unlink()
    assert RunFolder(run).state == "running"
    # A process that began after the run is not the one that ran it.
    began = psutil.Process().create_time() - 60
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(began))
    change(run, "run.json", started=started)
    assert RunFolder(run).state == "killed"
    dead = max(psutil.pids()) + 1_000_000
    change(run, "run.json", pid=dead, started=None)
    assert RunFolder(run).state == "killed"


def test_an_error_after_training_stops_a_run(run):
    (run / "report.json").unlink()
    age(run, 2 * QUIET)
    assert RunFolder(run).state == "stopped"


@pytest.mark.parametrize("start", [None, {"pid": 1, "host": "another machine"}])
def test_who_cannot_be_asked_is_judged_by_the_age_of_the_files(run, start):
    for name in ("report.json", "receipt.json"):
        (run / name).unlink()
    if start:
        (run / "run.json").write_text(json.dumps(start))
    assert RunFolder(run).state == "running"
    age(run, 2 * QUIET)
    assert RunFolder(run).state == "killed"


def test_what_a_start_says(tmp_path):
    write_start(tmp_path)
    start = RunFolder(tmp_path).start
    assert (start["pid"], start["host"]) == (os.getpid(), socket.gethostname())
    assert set(start) == {"started", "command", "pid", "host", "version"}
    write_start(tmp_path, "tiny_lora_fp8")
    assert RunFolder(tmp_path).start["recipe"] == RunFolder(tmp_path).recipe == "tiny_lora_fp8"
    assert abs(RunFolder(tmp_path).started - time.time()) < 60


@pytest.mark.parametrize("name", ["tiny_lora_fp8", "../../elsewhere", "", 7])
@pytest.mark.parametrize("file", ["run.json", "receipt.json"])
def test_a_moved_run_keeps_the_name_of_its_recipe(tmp_path, file, name):
    folder = tmp_path / "x" / "moved"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(find_recipe("tiny_lora_fp8").read_text())
    facts = {"recipe": name} if file == "run.json" else {"run": {"name": name}}
    (folder / file).write_text(json.dumps(facts))
    expected = name if name == "tiny_lora_fp8" else "x"
    if file == "run.json":  # a run, and found as `ls --runs` names it
        assert find_run(expected, tmp_path) == find_run("x", tmp_path) == folder
    assert load_recipe(str(folder / "config.yaml"), check_train=False).name == expected
    assert RunFolder(folder).recipe == expected


# ---------------------------------------------------------------------------------- half-written


def test_half_a_line_and_half_a_file_are_left_out(run):
    whole = RunFolder(run).rows
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "los')
    (run / "report.json").write_text('{"folder": "x", "final')
    found = RunFolder(run)
    assert found.rows == whole
    assert found.report == {}
    assert found.summary()["loss"] == pytest.approx([r["loss"] for r in whole if "loss" in r][-1])


def test_a_file_that_somebody_spoilt_spoils_no_table(run):
    parts = dict.fromkeys(("run", "precision", "environment", "trainable", "memory"))
    (run / "receipt.json").write_text(json.dumps({"status": "proven"} | parts))
    (run / "config.yaml").write_text("train: 3\nprecision:\n")
    (run / "metrics.jsonl").write_text('{"step": 5, "loss": "x", "samples": "x"}\n')
    reported = RunFolder(run).summary()
    assert (reported["state"], reported["step"], reported["precision"]) == ("finished", 5, "")
    assert all(isinstance(answers, list) for _, answers in RunFolder(run).samples)


def test_nan_in_a_log_is_read_and_summed_up_as_missing(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": NaN}\n')
    (run / "report.json").unlink()
    assert RunFolder(run).rows[-1]["loss"] != RunFolder(run).rows[-1]["loss"]
    assert RunFolder(run).summary()["loss"] is None
    json.dumps(RunFolder(run).summary(), allow_nan=False)


def test_a_long_log_is_summed_up_from_its_end(tmp_path, monkeypatch):
    run = make_run(tmp_path / "long", steps=2000)
    found = RunFolder(run)
    monkeypatch.setattr("finetune.runs.folder.TAIL_BYTES", 2**16)
    assert (run / "metrics.jsonl").stat().st_size > 3 * 2**16
    assert len(found.tail) < len(RunFolder(run).rows) / 3
    assert found.summary()["step"] == 2000
    assert "rows" not in vars(found), "the whole file was read"


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85"])
def test_a_line_break_of_unicode_in_an_answer_ends_no_row(letter, run):
    """JSON has them as they are; `str.splitlines` cuts there, and the row was left out."""
    whole = RunFolder(run).rows
    row = {"step": 41, "samples": [{"prompt": f"a{letter}b", "answer": f"{letter}c"}]}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    assert RunFolder(run).rows == [*whole, row]
    assert RunFolder(run).last_step == 41


def test_steps_of_an_epoch_run_follow_from_its_epochs(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("max_steps: 40", "num_train_epochs: 2.0"))
    for name in ("report.json", "receipt.json"):
        (run / name).unlink()
    assert RunFolder(run).planned_steps == 100  # an epoch is 50 steps


# ------------------------------------------------------------------------------------------ find


def test_runs_are_found_newest_first_and_those_of_comparisons_are_theirs(run, tmp_path):
    older = make_run(run.parent / "20261120-120000-bbbb", steps=8)
    compared = make_comparison(tmp_path / "runs" / "compare" / "a-vs-b" / "stamp", steps=8)
    (tmp_path / "runs" / "other").mkdir()
    assert [found.folder for found in find_runs(tmp_path / "runs")] == [run, older]
    assert find_comparisons(tmp_path / "runs") == [compared]


def test_runs_of_a_comparison_that_did_not_end_are_found(run, tmp_path):
    folder = tmp_path / "runs" / "compare" / "x-vs-y" / "20261121-000000-aaaa"
    own = folder / "a" / "seed-42" / "x" / "20261121-000001-bbbb"
    own.mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (own / name).write_text("{}")
    assert own in [found.folder for found in find_runs(tmp_path / "runs")]
    (folder / "comparison.json").write_text("{}")
    assert own not in [found.folder for found in find_runs(tmp_path / "runs")]


@pytest.mark.parametrize(
    ("path", "names"), [("tiny_full_fp8/20261121-120000", "nearest"), ("tiny_full_fp8", "newest")]
)
def test_a_folder_that_is_none_names_the_nearest_run(run, tmp_path, path, names):
    with pytest.raises(ConfigError, match=f"the {names} run.*{run.name}") as caught:
        read_run(tmp_path / "runs" / path)
    assert caught.value.where
    assert caught.value.why


# -------------------------------------------------------------------------------------- ls --runs


@pytest.mark.parametrize("part", ["receipt.json", "checkpoints/checkpoint-20"])
def test_a_part_of_a_run_names_the_run(part, run):
    (run / "checkpoints" / "checkpoint-20").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no run folder") as caught:
        find_run(str(run / part))
    assert caught.value.fix.startswith(f"the run is {run} (--checkpoint N")
    assert find_run(str(run)) == run


@pytest.mark.slow
def test_a_recipe_means_its_newest_run_with_weights_and_a_newer_one_is_said(tmp_path, cli):
    """Of runs that lack them the newest is meant, and its error says that it still trains."""
    runs = [tmp_path / "runs" / "tiny_full_fp8" / f"2026112{i}-120000-aaaa" for i in (1, 2)]
    for day, folder in enumerate(runs, 1):
        make_run(folder, steps=40)
        change(folder, "run.json", started=f"2026-11-2{day}T12:00:00")
    (runs[1] / "report.json").unlink()
    (runs[1] / "receipt.json").unlink()
    write_start(runs[1])  # of this process, which lives
    refused = cli("generate", "tiny_full_fp8", "Hello.").err
    assert "it still trains at step 40 of 40" in refused
    watch = f"finetune watch runs/tiny_full_fp8/{runs[1].name}"
    assert watch in refused
    (saved := runs[1] / "checkpoints" / "checkpoint-20").mkdir(parents=True)
    refused = cli("generate", "tiny_full_fp8", "Hello.").err
    assert "it still trains" in refused
    assert "--checkpoint last, or one of 20" in refused
    assert watch not in refused
    saved.rmdir()
    (runs[0] / "model").mkdir()
    assert "it still trains" in cli("generate", "last", "Hello.").err
    done = cli("report", "tiny_full_fp8")
    said = f"! runs/tiny_full_fp8/{runs[1].name}, which is newer, has no model/: running at step 40"
    assert said in done.err
    assert f"runs/tiny_full_fp8/{runs[0].name} is taken" in done.err
    assert runs[0].name in done.out
    watched = find_run("tiny_full_fp8", tmp_path / "runs")
    assert watched == runs[1]  # one that trains has a log
    assert cli("cat", "last").out == (runs[1] / "config.yaml").read_text()


def test_a_path_that_is_no_run_is_answered_as_by_report(run, tmp_path):
    with pytest.raises(ConfigError, match="is no run folder") as caught:
        find_run(str(run)[:-2])
    assert caught.value.fix == f"the nearest run is {run}"


def test_ls_runs_shows_runs_and_comparisons(run, tmp_path, cli, monkeypatch):
    make_comparison(tmp_path / "runs" / "compare" / "a-vs-b" / "stamp", steps=8, gap=0.03)
    done = cli("ls", "--runs")
    assert done.code == 0
    line = next(line for line in done.out.splitlines() if run.name in line)
    for shown in ("tiny_full_fp8", "FP8 emulated/delayed", "yes", "40/40", "1,312"):
        assert shown in line
    assert "not equivalent" in done.out
    assert "+3.00%" in done.out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = cli("ls", "--runs").out
    line = next(line for line in narrow.splitlines() if run.name in line)
    assert line.split()[:3] == [f"tiny_full_fp8/{run.name}", "yes", "40/40"]
    assert "…" not in narrow
    listed = json.loads(cli("ls", "--runs", "--json").out)
    assert [r["run"] for r in listed["runs"]] == [run.name]
    assert listed["comparisons"][0]["verdict"] == "not equivalent"


def test_ls_runs_says_where_bf16_ran_for_fp8(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261123-000000-0000")
    receipt = json.loads((folder / "receipt.json").read_text())
    receipt["precision"] |= {"ran": "bf16", "fallback": "FP8 was requested; this GPU has none"}
    (folder / "receipt.json").write_text(json.dumps(receipt))
    shown = cli("ls", "--runs").out
    assert "fell back" in shown
    assert "yes" not in shown
    (listed,) = json.loads(cli("ls", "--runs", "--json").out)["runs"]
    assert listed["proven"]
    assert listed["fallback"].startswith("FP8 was requested")


def test_ls_runs_shows_the_reward_of_rl_and_no_loss(run, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = (run / "config.yaml").read_text().replace("\ntrain:\n", "\ntrain:\n  method: rloo\n")
    (run / "config.yaml").write_text(config)
    rows = [{"step": 10, "loss": 0.01, "reward": 0.75}, {"step": 10, "eval_loss": 0.0}]
    rows[1]["eval_reward"] = 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for width in ("80", "160"):
        monkeypatch.setenv("COLUMNS", width)
        shown = cli("ls", "--runs").out
        assert "loss" not in shown
        assert "reward 0.500" in shown
        assert "…" not in shown
    (listed,) = json.loads(cli("ls", "--runs", "--json").out)["runs"]
    assert (listed["loss"], listed["eval_loss"], listed["scores"]) == (None, None, {"reward": 0.5})


def test_ls_runs_where_there_are_none(cli, tmp_path):
    assert "no runs in runs/ yet" in cli("ls", "--runs").out
    assert json.loads(cli("ls", "--runs", "--json").out) == {"runs": [], "comparisons": []}


@pytest.mark.parametrize("text", ["[1]", '{"losses": {"train": 3}}', '{"verdict": 3}', "{"])
def test_ls_runs_says_which_comparison_cannot_be_read(text, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "compare" / "a-vs-b" / "stamp"
    folder.mkdir(parents=True)
    (folder / "comparison.json").write_text(text)
    done = cli("ls", "--runs")
    assert done.code == 0
    assert "cannot be read" in done.out
    missing = cli("ls", "--runs", "--out", "elsewhere")
    assert missing.code == 2
    assert "there is no folder of runs 'elsewhere'" in missing.err
    assert cli("ls", "--out", "runs").code == 2


def test_ls_runs_needs_no_torch_and_little_of_a_run(run, tmp_path):
    """Ten runs: files opened of each, and what is imported."""
    import subprocess

    for number in range(9):
        other = run.parent / f"20261101-1200{number:02d}-cccc"
        other.mkdir()
        for file in run.iterdir():
            os.link(file, other / file.name)
    code = (
        "import collections, os, sys; sys.argv = ['finetune', 'ls', '--runs', '--json']\n"
        "from finetune.cli.app import main\n"
        "opened = collections.Counter()\n"
        "def count(event, found):\n"
        "    if event == 'open' and '/runs/tiny_full_fp8/' in os.path.abspath(str(found[0])):\n"
        "        opened[os.path.abspath(str(found[0]))] += 1\n"
        "sys.addaudithook(count); main()\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & sys.modules.keys()\n"
        "print(len(opened), max(opened.values()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)["runs"]) == 10
    files, most = map(int, done.stderr.split())
    assert files <= 10 * len(list(run.iterdir()))
    assert most <= 2  # once to see what it is, once to show it


@pytest.mark.parametrize(
    ("kind", "gemm", "engine"),
    [
        ("cuda", "emulated", "frozen base, row-wise scales, emulated"),
        ("cuda", "CUTLASS rowwise", "frozen base, row-wise scales"),
        ("cpu", "emulated", "frozen base, row-wise scales, emulated"),
    ],
)
def test_emulated_fp8_is_said_in_the_first_line(kind, gemm, engine) -> None:
    facts = {"ran": "fp8", "backend": "frozen", "scaling": "rowwise", "gemm": gemm}
    found = Receipt("proven", facts, 0.5, environment={"device": {"kind": kind}})
    assert found.headline == f"FP8 verified: 50.0% of matmul FLOPs ({engine})"


@pytest.mark.parametrize("finished", [True, False])
def test_the_command_after_checkpoints_is_one_that_works(
    tmp_path, cli, finished, monkeypatch
) -> None:
    """Of a finished run no step is left: going on would be an error."""
    run = make_run(tmp_path / "runs" / "tiny_full_fp8" / "20260101-000000-aaaa", steps=8)
    (run / "checkpoints" / "checkpoint-8").mkdir(parents=True)
    if not finished:
        (run / "report.json").unlink()
    last = cli("checkpoints", run).out.splitlines()[-1]
    monkeypatch.setenv("COLUMNS", "40")
    narrow = " ".join(cli("checkpoints", run).out.split())
    assert narrow.startswith(
        "8 loss -, eval loss -, precision , size 0 B, state trainer_state.json"
    )
    generates = f'next: python -m finetune generate {run} "..."'  # the checkpoint is not whole
    assert last == (generates if finished else f"next: python -m finetune resume {run}")
