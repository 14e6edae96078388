"""`benchmark(recipe, vs=...)`: measure all points in turn, recipes alternating within each.

    for each point, smallest first:  for each round:  for each recipe:  one process

Alternating recipes (A B A B ...) meet the same clock, and no process inherits memory or caches.
Rows are written after each round, so that an interrupted benchmark keeps them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.analysis.benchmark.grid import Grid, Job, Point, at_point, parse_grid
from finetune.analysis.benchmark.result import Benchmark, Row
from finetune.analysis.experiment.fairness import (
    requested_differences,
    settle_checkpointing,
    settle_compile,
)
from finetune.analysis.experiment.jobs import import_path
from finetune.config.recipe import Recipe, load_recipe
from finetune.errors import ConfigError
from finetune.hardware.device import processes, this_device
from finetune.runs.folder import command_line, new_folder

PATIENCE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for the process of an interrupted point."""
POINT = "finetune.analysis.benchmark.point"
TOO_LARGE = "skipped: larger than one that did not fit"
STEPS, ROUNDS = 10, 3
Say = Callable[[str], None]
Run = Callable[[Job, Path], list[dict[str, Any]]]
"""Measures a job, with a file for the process's stderr; returns the JSON lines it printed."""


def benchmark(
    recipe: Recipe | str,
    *,
    vs: Sequence[Recipe | str] = (),
    overrides: Sequence[str] = (),
    grid: Grid | str | None = None,
    steps: int = STEPS,
    rounds: int | None = None,
    out: Path | str = "runs/benchmark",
    force: bool = False,
    all_points: bool = False,
    say: Say | None = None,
    run: Run | None = None,
) -> Benchmark:
    """Measure speed and memory of recipes side by side: random weights, synthetic tokens.

        finetune.benchmark("tiny_lora_fp8", vs=["tiny_lora_bf16"], grid="batch=1,4")

    Args:
        vs: other recipes, measured at the same points.
        overrides: `section.key=value`, for all recipes that are given by name.
        grid: micro-batches and lengths; default: the first recipe's own.
        steps: timed steps of each round.
        rounds: processes for each point and recipe; default 3 where recipes are compared (an
            interval needs two), else 1.
        force: also try points that are predicted to be far too large.
        all_points: also try points larger than one that did not fit.
        say: called with one line for each row.
        run: measures a job; default `run_apart`.

    Raises:
        FinetuneError: an invalid argument; errors at a point are in its row.
    """
    check_start(steps, rounds)
    recipes = [r if isinstance(r, Recipe) else load_recipe(r, overrides) for r in (recipe, *vs)]
    points = points_of(grid, recipes[0])
    device, names = this_device(), list[str]()
    for one in recipes:
        again = sum(name.partition("#")[0] == one.name for name in names)
        names.append(f"{one.name}#{again + 1}" if again else one.name)
    configs, compiling = settle_compile([r.config for r in recipes], device)
    configs, saving = settle_checkpointing(configs, device)
    jobs = [Job(n, c, steps, force=force) for n, c in zip(names, configs, strict=True)]
    check_points(jobs, points)
    result = Benchmark(
        references=(names[0],) if vs else (),
        differences=differences(jobs, points[0], on_cpu=device.kind == "cpu"),
        alike="; ".join(filter(None, (compiling, saving))),
    )
    folder = new_folder(Path(out) / "-vs-".join(names), Path(out))
    rounds = rounds or (ROUNDS if len(jobs) > 1 else 1)
    Runner(result, rounds, folder, run or run_apart, say, all_points).measure(jobs, points)
    return result


def check_start(steps: int, rounds: int | None) -> None:
    """Check the numbers, and that this is the only process.

    Raises:
        ConfigError: `steps` or `rounds` below 1, or started by torchrun.
    """
    for name, value in (("steps", steps), ("rounds", rounds)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}", where=f"--{name}", fix=f"--{name} 1 or more")
    if processes() > 1:
        raise ConfigError(
            "a benchmark measures one device, and was started on several",
            where=f"WORLD_SIZE={processes()}",
            fix="start it with python -m finetune benchmark, without torchrun",
        )


def points_of(grid: Grid | str | None, recipe: Recipe) -> list[Point]:
    grid = parse_grid(grid) if isinstance(grid, str) else grid or Grid()
    return grid.points(recipe.config)


def check_points(jobs: Sequence[Job], points: Sequence[Point]) -> None:
    """Raise the configuration errors of any job at any point, before anything is measured."""
    for job in jobs:
        for point in points:
            at_point(job.config, point, job.steps)


def differences(jobs: Sequence[Job], point: Point, *, on_cpu: bool) -> list[str]:
    """List differences from the first recipe besides precision, data and evaluation."""
    first, *others = (at_point(job.config, point, job.steps) for job in jobs)
    return [
        f"{where}: {jobs[0].label} {a}, {job.label} {b} ({one.why})"
        for job, config in zip(jobs[1:], others, strict=True)
        for one in requested_differences(first, config, on_cpu=on_cpu)
        if not one.where.startswith("data.")
        for where, a, b in _parts(one.where, one.a, one.b)
    ]


def _parts(where: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys((*a, *b))
        return [(f"{where}.{k}", a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)]
    return [(where, "none" if a is None else a, "none" if b is None else b)]


# ------------------------------------------------------------------------------------------ runner


@dataclass
class Runner:
    """Measures jobs at points, and writes the rows to `folder` after each round."""

    result: Benchmark
    rounds: int
    folder: Path
    run: Run
    say: Say | None = None
    all_points: bool = False

    def measure(self, jobs: Sequence[Job], points: Sequence[Point]) -> None:
        """Measure all jobs at all points; after Ctrl-C the rows until then are kept."""
        result = self.result
        result.command, result.started = command_line(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            for point in points:
                self._measure_point(jobs, point)
        except KeyboardInterrupt:
            result.interrupted = True
        result.save(self.folder)

    def _measure_point(self, jobs: Sequence[Job], point: Point) -> None:
        rows: dict[str, Row] = {}
        for number in range(self.rounds):
            for job in jobs:
                config = at_point(job.config, point, job.steps)
                job = replace(job, config=config, round=number, forecast=number == 0)
                if number == 0:
                    row = rows[job.label] = Row(job.label, *point, job.tokens)
                    if not self.all_points and self._is_larger(row):
                        row.error = TOO_LARGE
                        self.result.rows.append(row)
                if not rows[job.label].error:
                    self._measure_round(job, rows[job.label])

    def _measure_round(self, job: Job, row: Row) -> None:
        name = "".join(c if c.isalnum() else "_" for c in row.label)
        log = self.folder / "logs" / f"{name}-{row.batch}x{row.length}-{job.round}.log"
        log.parent.mkdir(exist_ok=True)
        for line in self.run(job, log):
            row.add(line)
            self.result.environment = line.get("environment") or self.result.environment
        if row not in self.result.rows:
            self.result.rows.append(row)
        self.result.save(self.folder)
        if self.say is not None:
            at = f"{row.label}, {row.batch} x {row.length}"
            at += f", round {job.round + 1} of {self.rounds}" if self.rounds > 1 else ""
            rate = row.error or f"{row.facts()['tokens_per_s']:,.0f} tokens/s, {row.proven}"
            self.say(f"{at}: {rate}")

    def _is_larger(self, row: Row) -> bool:
        """True if a point in which the same recipe ran out of memory is contained in this one."""
        at = Point(*row.key)
        return any(
            other.label == row.label and other.out_of_memory and at.contains(Point(*other.key))
            for other in self.result.rows
        )


# ----------------------------------------------------------------------------------------- process


def run_apart(job: Job, log: Path, program: Sequence[str] = (POINT,)) -> list[dict[str, Any]]:
    """Run a job in a process, `python -m *program`; returns the JSON lines it printed.

    If it ended without a result, the last line is `ended(...)`.
    """
    # Allocator settings (PYTORCH_CUDA_ALLOC_CONF) stay the user's.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": import_path()}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, encoding="utf-8", env=environment,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(job.to_json() + "\n")
        except KeyboardInterrupt:
            _end(process)
            raise
    lines = [json.loads(line) for line in printed.splitlines()]
    if not lines or lines[-1]["kind"] == "forecast":
        lines.append(ended(process.returncode, log))
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the process, which got Ctrl-C too; then SIGTERM, then SIGKILL."""
    for patience, insist in ((1.0, process.terminate), (PATIENCE_S, process.kill)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        if process.poll() is None:
            insist()
    process.wait()


def ended(code: int, log: Path) -> dict[str, Any]:
    """Give the line for a process without a result, from its exit code (negative: signal) and log.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it.
    """
    if code == -signal.SIGINT or (code == 1 and _last(log).startswith("KeyboardInterrupt")):
        raise KeyboardInterrupt
    if code == -signal.SIGKILL:
        error = "out of memory: killed by the system, which is how Linux ends a process that takes "
        return {"kind": "failed", "out_of_memory": True, "error": error + "the last of its memory"}
    error = f"crashed: {signal.Signals(-code).name}" if code < 0 else _last(log)
    return {"kind": "failed", "error": f"{error or f'exit code {code}'}; see {log}"}


def _last(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1][:300]
