"""The GPU hour before it meets a GPU: commands, limits, resumption, and a rehearsal."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

import finetune
from finetune import load_recipe
from finetune.analysis.benchmark.grid import tokens_of
from finetune.analysis.benchmark.result import WARM_UP
from finetune.cli.app import main
from finetune.units import GIB
from tests.analysis.pretended import pretend
from tests.benchmarks.ladder import train_stock
from tests.conftest import CPU
from tests.docs.commands import check
from tests.docs.test_findings import commands_of
from tests.gpu.hour import __main__ as hour
from tests.gpu.hour import kernels, limited, parts
from tests.gpu.hour.parts import PARTS, PROMISES, promises_markdown, read_benchmark, read_part

BY_NAME = {part.name: part for part in PARTS}
MACHINE = {"gpu": "H100", "driver": "1", "limits": "", "versions": {"torch": "2.11"}, "commit": "c"}
DOCTOR = {
    "device": {"name": "NVIDIA H100"}, "fp8": {"ok": True, "reason": "9.0"}, "gemm": None,
    "backends": {"te/delayed": {"ok": False, "reason": "not installed"}}, "known_bad": [],
    "auto": "torchao",
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """A GPU, as far as the process that starts the parts sees it."""
    facts = MACHINE | {"rehearsal": False, "date": "2026-11-22"}
    monkeypatch.setattr(hour, "environment", lambda *, rehearse: facts | {"rehearsal": rehearse})
    return facts


class Executed:
    """Executes nothing, keeps the commands, and prints what `doctor` or a measurement would."""

    def __init__(self, monkeypatch, interrupt: str = "") -> None:
        self.commands: list[list[str]] = []
        self.interrupt = interrupt
        monkeypatch.setattr(hour, "execute", self)

    def __call__(self, command, folder, limit_s, codes=(0,)) -> str:
        words = command[2:]
        self.commands.append(words)
        if words[0] == self.interrupt:
            raise KeyboardInterrupt
        printed = {"rows": [1], "markdown": "| 1 |"} if "doctor" not in words else DOCTOR
        (folder / "stdout.txt").write_text(json.dumps(printed))
        return "the time limit was reached" if "attention" in words else ""


def states(out) -> dict[str, str]:
    parts = json.loads((out / "hour.json").read_text())["parts"]
    return {name: record["status"] for name, record in parts.items()}


# ------------------------------------------------------------------------------------- the runner


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('fine')", ""),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", "last of its memory"),
        ("raise ValueError('no such shape')", "exit code 1: ValueError: no such shape"),
        pytest.param(
            "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)",
            "limit of 0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_ends_badly_is_a_reason(code, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hour, "PATIENCE_S", 2)
    started = time.monotonic()
    said = hour.execute([sys.executable, "-c", code], tmp_path, 0.5 if "limit" in reason else 60)
    assert reason in said
    assert bool(said) is bool(reason)
    assert time.monotonic() - started < 50, "what is left of it is ended, too"


def test_a_part_is_lost_alone_and_is_tried_again(machine, monkeypatch, tmp_path, capsys) -> None:
    executed = Executed(monkeypatch)
    words = ["--out", str(tmp_path), "--parts", "gemm,attention,te_full,tests"]
    assert hour.main(words) == 0
    said = capsys.readouterr().out
    assert states(tmp_path) == {
        "doctor": "measured", "tests": "not measured", "gemm": "measured",
        "attention": "measured", "te_full": "not measured",
    }  # fmt: skip
    assert "it wrote no result" in said
    assert "not measured: te_full, tests. To try them again: python -m tests.gpu.hour --out" in said
    assert len(executed.commands) == 4, "te is not installed"
    hour.main(words)
    assert [words[0] for words in executed.commands[4:]] == ["pytest"]
    text = (tmp_path / "hour.md").read_text()
    assert "Not measured: not installed." in text
    assert "| 1 |\n\nIncomplete: the time limit was reached." in text, "what it had is kept"
    assert "driver 1" in text
    assert str(tmp_path) not in text


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    machine, monkeypatch, tmp_path, capsys
) -> None:
    Executed(monkeypatch, interrupt="tests.gpu.agreement")
    monkeypatch.setattr(
        hour, "PARTS", [BY_NAME[n] for n in ("doctor", "gemm", "agreement", "te_full")]
    )
    assert hour.main(["--out", str(tmp_path)]) == hour.INTERRUPTED
    assert states(tmp_path) == {"doctor": "measured", "gemm": "measured"}
    assert f"Go on: python -m tests.gpu.hour --out {tmp_path}" in capsys.readouterr().out
    assert "Not measured: not run yet." in (tmp_path / "hour.md").read_text()


def test_a_lent_gpu_is_given_back_in_time(machine, monkeypatch, tmp_path, capsys) -> None:
    """A part that the end of the loan cuts short leaves no half result, and is begun again."""
    executed, limits = Executed(monkeypatch), []

    def short(command, folder, limit_s, codes=(0,)) -> str:
        limits.append(limit_s)
        if "gemm" in command and limit_s < 1:
            time.sleep(limit_s)
        return executed(command, folder, limit_s, codes)

    monkeypatch.setattr(hour, "execute", short)
    monkeypatch.setattr(hour, "PATIENCE_S", 0)
    monkeypatch.setattr(hour, "LEAST_S", 0.01)
    words = ["--out", str(tmp_path), "--parts", "gemm,agreement", "--within", "0.005"]
    assert hour.main(words) == hour.INTERRUPTED
    assert max(limits) <= 0.3
    assert states(tmp_path) == {"doctor": "measured"}
    assert "Go on: python -m tests.gpu.hour --out" in capsys.readouterr().out
    assert hour.main(words) == hour.INTERRUPTED
    assert hour.main(words[:-2]) == 0
    assert states(tmp_path)["gemm"] == "measured"
    monkeypatch.setattr(hour, "LEAST_S", 60)
    again = ["--out", str(tmp_path), "--parts", "te_full", "--within", "0.1"]
    assert hour.main(again) == hour.INTERRUPTED, "not begun, with so little time left"


def test_figures_of_two_machines_do_not_mix(machine, monkeypatch, tmp_path, capsys) -> None:
    Executed(monkeypatch)
    hour.main(["--out", str(tmp_path), "--parts", "gemm"])
    machine["gpu"] = "H200"
    with pytest.raises(SystemExit) as ended:
        hour.main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert f"--out {tmp_path}_2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        hour.main(["--parts", "gem"])
    assert "did you mean 'gemm'" in capsys.readouterr().err


def test_without_fp8_units_nothing_is_run(machine, monkeypatch, tmp_path) -> None:
    executed = Executed(monkeypatch)
    monkeypatch.setitem(DOCTOR, "fp8", {"ok": False, "reason": "no FP8 matrix units"})
    hour.main(["--out", str(tmp_path)])
    assert len(executed.commands) == 1
    assert (tmp_path / "hour.md").read_text().count("Not measured: no FP8 matrix units.") >= 9


def test_each_promise_has_a_figure() -> None:
    def row(part, label, seconds, gib):
        facts = {"tokens": 8192, "step_seconds": seconds, "allocated_gib": gib}
        return {"part": part, "label": label, **facts}

    text = promises_markdown(
        [
            row("lora_r8", "llama_8b_lora_bf16", 1.5, 20.0),
            row("lora_r8", "llama_8b_lora_fp8", 1.0, 14.0),
            row("stock", "stock", 2.2, 30.0),
            row("full", "llama_8b_full_fp8", 1.0, None),
        ]
    )
    assert "| LoRA r=8, FP8 over fused BF16, tokens/s | 1.50x | 1.40x, met |" in text
    assert "| LoRA r=8, FP8 over TRL and PEFT, tokens/s | 2.20x | 2.10x, met |" in text
    assert "| LoRA r=8, FP8 over fused BF16, memory | 0.70x | 0.65x, missed |" in text
    assert "| full, FP8 over BF16, tokens/s | not measured |  |" in text
    assert len(text.splitlines()) == 2 + len(PROMISES)


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        ([{"rates": {"rowwise": {"reason": "no"}, "BF16": {"reason": "no memory"}}}], "no"),
        ([{"rates": {"rowwise": {"reason": "no"}, "BF16": {"tflops": 1.0, "reason": "n"}}}], ""),
        ([{"kernel": "SDPA", "reason": "no"}, {"kernel": "varlen", "reason": "none"}], "no"),
        ([{"kernel": "SDPA", "reason": "no"}, {"kernel": "varlen", "tflops": 1.0}], ""),
    ],
)
def test_kernels_of_which_none_ran_are_tried_again(tmp_path, rows, failed) -> None:
    found = {"rows": rows, "markdown": "", "failed": kernels.why_nothing(rows)}
    (tmp_path / "stdout.txt").write_text(json.dumps(found), "utf-8")
    assert parts.read_printed(tmp_path).failed == failed


def test_copies_are_hidden_while_a_kernel_runs_and_the_gpu_waits_for_neither() -> None:
    def event(name, start, duration, kind="", **args):
        return {"ph": "X", "name": name, "ts": start, "dur": duration, "cat": kind, "args": args}

    down, up = (f"{name} (Pinned)" for name in limited.COPIES.values())
    events = [
        event(limited.WINDOW, 0, 100e6),
        event("gemm", 0, 20e6, "kernel"),
        event("norm", 10e6, 20e6, "kernel"),  # on another stream
        event(down, 20e6, 20e6, "gpu_memcpy", bytes=8e9),
        event(up, 30e6, 20e6, "gpu_memcpy", bytes=4e9),
        event("aten::mm", 0, 90e6, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = limited.transfers(events, steps=2)
    assert found["down"] == {"gb": 4.0, "seconds": 10.0, "alone": 5.0}
    assert found["up"] == {"gb": 2.0, "seconds": 10.0, "alone": 10.0}
    assert found["waits"] == 25.0


def test_failed_tests_are_counted_and_named(tmp_path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.a" name="t1"/>'
        '<testcase classname="tests.gpu.a" name="t2"><failure message="assert\n1 == 2"/></testcase>'
        '<testcase classname="b" name="t3"><skipped message="no TE"/></testcase>'
        "</testsuite></testsuites>"
    )
    result = read_part(BY_NAME["tests"], tmp_path)
    assert result is not None
    assert result.markdown.splitlines()[0] == "1 passed, 1 failed, 1 skipped"
    assert "`tests.gpu.a::t2: assert 1 == 2`" in result.markdown
    assert not result.failed
    (tmp_path / "tests.xml").write_text("<testsuites><testsuite>")
    assert read_part(BY_NAME["tests"], tmp_path) is None


# --------------------------------------------------------------------------------- real commands


def in_this_process(monkeypatch):
    """`execute` without a process, which would import torch once more."""

    def execute(command, folder, limit_s, codes=(0,)) -> str:
        monkeypatch.setattr(sys, "argv", command[2:])
        with (folder / "stdout.txt").open("w") as out, contextlib.redirect_stdout(out):
            try:
                if command[2] == "finetune":  # ends its process, which is pytest's here
                    main()
                else:
                    runpy.run_module(command[2], run_name="__main__", alter_sys=True)
            except SystemExit as error:
                return str(error.code or "")
        return ""

    monkeypatch.setattr(hour, "execute", execute)


def run_points_with(monkeypatch, run) -> None:
    """Run a benchmark's jobs by `run(job)` instead of in a process each."""
    monkeypatch.setattr(
        "finetune.analysis.benchmark.benchmark.run_jobs", lambda jobs, **_: run(*jobs)
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_real_commands_get_as_far_as_a_gpu(machine, monkeypatch, tmp_path) -> None:
    """Models, steps and settings of the 8B parts are there; only the training is pretended."""
    jobs = []

    def pretended(job) -> None:
        jobs.append(job)
        pretend(job.file, job.seed, job.out, os.environ, measured=True)

    memory = SimpleNamespace(allocated=0.1 * GIB, outside=0, reserved=0, kinds=Counter())
    expected = SimpleNamespace(
        footprint=memory, timing=SimpleNamespace(seconds=0.125, traffic=None)
    )
    expected.machine = SimpleNamespace(device=CPU)
    monkeypatch.setattr("finetune.analysis.benchmark.benchmark.predict", lambda *_: expected)
    run_points_with(monkeypatch, pretended)
    in_this_process(monkeypatch)
    monkeypatch.setattr(hour.Hour, "_lacks", lambda *_: "")
    parts = [part for part in PARTS if part.read is read_benchmark]
    monkeypatch.setattr(hour, "PARTS", parts)
    assert hour.main(["--out", str(tmp_path)]) == 0
    absent = {name for name, state in states(tmp_path).items() if state != "measured"}
    assert absent == {"te_full", "te_lora"}, "refused on a CPU"
    configs = [job.variant.recipe.config for job in jobs]
    assert {tokens_of(config) for config in configs} == {8192}
    assert {config.train["max_steps"] for config in configs} == {WARM_UP + 10}
    assert {config.model.name.split("/")[-1] for config in configs} == {"Llama-3.1-8B-Instruct"}
    ranks = [config.lora.r for config in configs if config.lora]
    assert {rank: ranks.count(rank) for rank in (8, 32)} == {8: 10, 32: 2}
    text = (tmp_path / "hour.md").read_text()
    assert "| `lora_r8` | llama_8b_lora_fp8 | 54,613 | 150 | 125 | +20.0% | 0.08 | 0.1 |" in text
    assert "0.67x (0.67 to 0.67) over llama_8b_lora_bf16, predicted 1.00x" in text


def test_every_command_is_one_that_documents_may_name(machine, monkeypatch, tmp_path) -> None:
    Executed(monkeypatch)
    hour.main(["--out", str(tmp_path), "--parts", "gemm"])
    commands = commands_of((tmp_path / "hour.md").read_text())
    assert {part.command for part in PARTS} <= commands
    for command in [*commands, *(part.rehearsal for part in PARTS)]:
        check(command)
        assert shlex.split(command)[0] == "python"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_rehearsal_runs_every_kind_of_part_once(machine, monkeypatch, tmp_path, capsys) -> None:
    """Tiny sizes in this process; the other pairs of recipes are what `lora_r8` is here."""

    def measure(job) -> None:
        if job.variant.program:
            words = [str(job.file), f"train.seed={job.seed}", "--out", str(job.out)]
            train_stock(job.variant.program[-1], *words)
        else:
            recipe = load_recipe(str(job.file), [f"train.seed={job.seed}"])
            finetune.train(recipe, out=job.out, force=True, save=False)

    run_points_with(monkeypatch, measure)
    in_this_process(monkeypatch)
    names = [p.name for p in PARTS if p.name not in ("full", "lora_r32")]
    words = ["--rehearse", "--out", str(tmp_path), "--parts", ",".join(names)]
    assert hour.main(words) == 0
    done = states(tmp_path)
    absent = {name for name, state in done.items() if state != "measured"}
    assert absent == {"tests", "te_full", "te_lora", "update", "casts"}
    text = (tmp_path / "hour.md").read_text()
    assert text.startswith("## Rehearsal of the GPU hour, no figures")
    assert text.count("Not measured: CPUs have no FP8 matrix units.") == 5
    found = json.loads((tmp_path / "hour.json").read_text())
    attention = found["parts"]["attention"]["result"]
    ran = {row["kernel"] for row in attention if "reason" not in row}
    assert {"varlen (`model.attention`)", "SDPA with a mask of T x T, one packed row"} <= ran
    assert all(row["error"] < 1e-2 for row in attention if "error" in row)
    for row in found["parts"]["gemm"]["result"]:
        assert row["rates"]["rowwise, fast"]["kernel"] == "aten::_scaled_mm"
    timed = {row["label"] for row in found["predictions"]}
    assert timed == {"tiny_lora_bf16", "tiny_lora_fp8", "stock", "fused"}
    capsys.readouterr()
    monkeypatch.setattr(hour, "execute", None)  # whatever ran would fail
    assert hour.main(words) == 0
    assert capsys.readouterr().out.count("has its result, not run again") == len(names) - 5
