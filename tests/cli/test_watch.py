"""`watch`: each log line once while a run is written, and how it ended, by words and exit code."""

from __future__ import annotations

import json
import shutil
import sys

import psutil
import pytest

from finetune.config.methods import METHODS
from finetune.runs.folder import write_start
from finetune.runs.progress import log_line
from tests.run_folders import make_run


@pytest.fixture
def writing(tmp_path, monkeypatch):
    """A run of this process that writes the next row of `rows`, then its end, at each wait."""
    folder = make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261121-120000-aaaa", steps=40)
    write_start(folder)
    log, ends = folder / "metrics.jsonl", {}
    rows = log.read_text("utf-8").splitlines(keepends=True)
    for name in ("receipt.json", "report.json"):
        ends[folder / name] = (folder / name).read_text("utf-8")
        (folder / name).unlink()
    waiting = [*rows]
    log.write_text("", "utf-8")

    def wait(_: float) -> None:
        if waiting:
            row = waiting.pop(0)
            with log.open("a", encoding="utf-8") as file:
                file.write(row)
        else:
            path, text = ends.popitem()  # the report first: a run has ended when both are there
            path.write_text(text, "utf-8")

    monkeypatch.setattr("finetune.cli.watch.time.sleep", wait)
    return folder, [json.loads(row) for row in rows]


def end_by_kill(folder) -> None:
    """As `kill -9` leaves a run: no receipt, and a process that is gone."""
    for name in ("receipt.json", "report.json"):
        (folder / name).unlink(missing_ok=True)
    start = json.loads((folder / "run.json").read_text()) | {"pid": max(psutil.pids()) + 10**6}
    (folder / "run.json").write_text(json.dumps(start))


def test_each_row_is_a_line_once_and_the_end_follows(writing, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _, rows = writing
    found = cli("watch")
    assert (found.code, found.err) == (0, "")
    *lines, end, verdict, after = found.out.splitlines()
    expected = [
        f"step {row['step']}/40 | {start}"
        for row in rows
        for start, key in (
            (f"epoch {row.get('epoch', 0):.2f} | loss {row.get('loss', 0):.4f} |", "loss"),
            (f"eval loss {row.get('eval_loss', 0):.4f}", "eval_loss"),
            ("least signal over noise ", "health/mlp/x_snr_db"),
        )
        if key in row
    ]
    assert len(lines) == len(expected) == 40 + 4 + 8
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))
    assert all(line.endswith("| FP8 emulated/delayed") for line in lines if "| loss " in line)
    assert end == "finished at step 40 of 40"
    assert verdict.startswith("FP8 verified: 80.0% of matmul FLOPs")
    assert after.startswith("next: python -m finetune generate runs/tiny_full_fp8/")


ANSWERS = {"kl": -0.0123, "completions/mean_length": 211.5, "completions/clipped_ratio": 1.0}


@pytest.mark.parametrize(("method", "judged"), [("sft", "loss 0.0212"), ("rloo", "reward 0.844")])
@pytest.mark.parametrize("step", ["step 7/12", "step 10,000/100,000"])
def test_at_80_columns_a_row_is_one_line_with_what_its_method_is_judged_by(method, judged, step):
    row = {"loss": 0.0212, "reward": 0.84375, **(ANSWERS if method == "rloo" else {})}
    row |= {"grad_norm": 1.5, "learning_rate": 1e-4, "step_seconds": 1.25, "epoch": 0.07}
    row |= {"tokens_per_s": 12345, "precision": "FP8 emulated/rowwise"}
    whole, narrow = (log_line(row, step, METHODS[method], 40, width) for width in (1000, 80))
    assert len(narrow) <= 80
    assert narrow.startswith(f"{step} | {judged} | ")
    assert "| 50 s left" in narrow
    assert set(narrow.split(" | ")) < set(whole.split(" | "))
    assert ("loss" in whole, "clipped answers 100%" in whole) == (method == "sft", method == "rloo")
    evaluated = {f"eval_{key}": value for key, value in row.items()}
    line = log_line(evaluated, step, METHODS[method], width=80)
    assert line.startswith(f"{step} | eval {judged}")


def test_a_narrower_line_leaves_out_what_matters_least_first():
    row = {"loss": 0.5, "kl": 0.1, "grad_norm": 1.5, "learning_rate": 1e-4, "step_seconds": 1.25}
    row |= {"epoch": 0.07, "tokens_per_s": 12345, "precision": "BF16"}
    parts = log_line(row, "step 7/12", METHODS["sft"], 40, 1000).split(" | ")
    left, gone = parts, list[str]()
    for width in range(120, 0, -1):
        found = log_line(row, "step 7/12", METHODS["sft"], 40, width).split(" | ")
        gone += [part for part in left if part not in found]
        left = found
    order = ("s/step", "epoch", "lr", "grad_norm", "BF16", "tok/s", "KL", "left", "loss")
    assert [next(word for word in order if word in part) for part in gone] == [*order]
    assert left == ["step 7/12"]


def test_the_worst_of_a_health_row_is_named_in_a_line_that_no_width_cuts(writing, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    folder, rows = writing
    found = cli("watch", folder)
    row = next(row for row in rows if "health/mlp/x_snr_db" in row)
    noise = {key: value for key, value in row.items() if key.endswith("_snr_db")}
    _, group, operand = min(noise, key=lambda key: noise[key]).split("/")
    named = {"x": "activations", "w": "weights", "g": "gradients"}[operand[0]]
    said = f"step 5/40 | least signal over noise {min(noise.values()):.0f} dB ({group} {named})"
    assert said in found.out


def test_a_terminal_shows_one_table(writing, cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    folder, _ = writing
    log = folder / "metrics.jsonl"
    log.write_text(
        json.dumps(
            {"step": 4, "loss": 2.5, "step_seconds": 0.5, "tokens_per_s": 1234,
             "peak_memory_gib": 0.25, "precision": "FP8 te/delayed"}
        )
        + "\n"
    )  # fmt: skip
    seen = []
    monkeypatch.setattr("finetune.cli.watch.time.sleep", lambda _: end_by_kill(folder))
    monkeypatch.setattr("rich.live.Live.update", lambda _, table, **__: seen.append(table))
    assert cli("watch").code == 1
    running, killed = (
        dict(zip(*([str(cell) for cell in column.cells] for column in t.columns), strict=True))
        for t in seen
    )
    assert running["state"].startswith("running, last log ")
    assert (running["step"], running["loss"]) == ("4 of 40 (10%)", "2.5000")
    assert (running["speed"], running["time left"]) == ("0.50 s/step, 1,234 tok/s", "18 s")
    assert (running["memory"], running["precision"]) == ("at most 256.0 MiB", "FP8 te/delayed")
    assert killed["state"] == "killed"
    assert "time left" not in killed


@pytest.mark.parametrize("saved", [False, True])
def test_a_killed_run_says_so_and_how_to_resume(saved, writing, cli):
    folder, _ = writing
    (folder / "metrics.jsonl").write_text('{"step": 7, "loss": 2.0}\n')
    end_by_kill(folder)
    if saved:
        checkpoint = folder / "checkpoints" / "checkpoint-5"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text('{"global_step": 5}')
        for name in ("optimizer.pt", "scheduler.pt", "model.safetensors"):
            (checkpoint / name).write_text("x")
    found = cli("watch")
    assert found.code == 1
    *_, end, after = found.out.splitlines()
    assert end == "killed at step 7 of 40: its process is gone, and left no receipt"
    assert after.startswith(
        "next: python -m finetune resume runs/tiny_full_fp8/" if saved else "no complete checkpoint"
    )


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ({"interrupted": True, "stopped": ""}, "stopped at step 40 of 40 by a signal"),
        ({"stopped": "a gradient is not finite"}, "of 40: a gradient is not finite"),
    ],
)
def test_a_stopped_run_says_by_what(ended, said, tmp_path, cli):
    folder = make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261121-120000-aaaa", steps=40)
    receipt = json.loads((folder / "receipt.json").read_text()) | {"run": ended}
    (folder / "receipt.json").write_text(json.dumps(receipt))
    found = cli("watch", "tiny_full_fp8")
    assert found.code == 1
    assert said in found.out
    assert found.out.count("| loss ") <= 10  # of an earlier log the last lines


def test_ctrl_c_leaves_the_run_alone(writing, cli, monkeypatch):
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.cli.watch.time.sleep", interrupted)
    found = cli("watch")
    assert (found.code, found.err) == (130, "")
    assert "no longer watched; the run is in runs/tiny_full_fp8/" in found.out


def test_a_run_that_removed_its_folder_is_no_traceback(writing, cli, monkeypatch):
    folder, _ = writing
    monkeypatch.setattr("finetune.cli.watch.time.sleep", lambda _: shutil.rmtree(folder))
    found = cli("watch")
    assert found.code == 2
    assert "ended before its first step" in found.err


# ------------------------------------------------------------------------------------ TensorBoard

WRITER = """
import json, os
class EventFileWriter:
    def __init__(self, folder):
        os.makedirs(folder)
        self.file = open(os.path.join(folder, "events"), "a")
    def add_event(self, event):
        for value in event.summary.value:
            self.file.write(json.dumps([value.tag, event.step, value.simple_value]) + "\\n")
    def flush(self):
        self.file.flush()
    def close(self):
        self.file.close()
"""
MAIN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--logdir") + 1])
log = pathlib.Path(pathlib.Path("log").read_text())
def wait(step):
    for _ in range(600):
        time.sleep(0.05)
        found = {f.parent.name: [json.loads(x) for x in f.read_text().splitlines()]
                 for f in sorted(folder.glob("*/events"))}
        shown = {(tag, at) for events in found.values() for tag, at, _ in events}
        if len(found) == 2 and ("train/loss", step) in shown:
            return found
wait(40)
with log.open("a") as file:
    file.write('{"step": 41, "loss": 0.125}\\n')
pathlib.Path("seen.json").write_text(json.dumps(wait(41)))
"""


def test_tensorboard_shows_all_runs_and_follows_them(tmp_path, cli, monkeypatch):
    """The real one was tried by hand; here a stand-in of its writer and server, in its folders."""
    library = tmp_path / "library" / "tensorboard"
    event = "from types import SimpleNamespace as Event\n"
    summary = "from types import SimpleNamespace\n"
    summary += "class Summary(SimpleNamespace):\n    Value = SimpleNamespace\n"
    for name, text in {
        "compat/proto/event_pb2": event, "compat/proto/summary_pb2": summary,
        "summary/writer/event_file_writer": WRITER, "main": MAIN,
    }.items():  # fmt: skip
        file = library / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(library.parent))
    monkeypatch.setenv("PYTHONPATH", str(library.parent))
    monkeypatch.setattr("finetune.cli.tensorboard.PERIOD", 0.1)
    one = make_run(tmp_path / "runs" / "tiny_full_fp8" / "20261121-120000-aaaa", steps=40)
    two = "20261121-120001-bbbb-bf16"
    make_run(tmp_path / "runs" / "tiny_full_bf16" / two, recipe="tiny_full_bf16", steps=40)
    (tmp_path / "log").write_text(str(one / "metrics.jsonl"))
    assert cli("watch", "--tensorboard").code == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    fp8, bf16 = "tiny_full_fp8-20261121-120000-aaaa-fp8-emulated-delayed", f"tiny_full_bf16-{two}"
    assert seen.keys() == {fp8, bf16}
    rows = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    for tag, key in (("train/loss", "loss"), ("eval/loss", "eval_loss")):
        shown = [(step, value) for name, step, value in seen[fp8] if name == tag]
        assert shown == [(row["step"], row[key]) for row in rows if key in row]
    assert "health/mlp/x_snr_db" in {name for name, _, _ in seen[fp8]}


def test_tensorboard_that_is_missing_names_its_command(writing, cli, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    found = cli("watch", "--tensorboard")
    assert found.code == 2
    assert "TensorBoard is not installed" in found.err
    assert "[tracking]" in found.err
