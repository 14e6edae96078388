"""Runs of a comparison, each a process with its own run folder.

Precision is process-wide (patches of Accelerate, compiled kernels, the allocator's peaks), so two
runs in one process would affect each other. Each process runs `python -m finetune run` on a copy of
its complete recipe, so that later edits change nothing.

On a GPU they run one at a time in ABBA order, so that a drift of the clock affects both sides. On a
CPU with two cores or more two run at once on equal shares of the threads, so that other load
affects both; speed there is that of an emulation, and no claim.

Ctrl-C reaches each run once: it finishes its step, saves and writes its receipt. A second Ctrl-C
stops the runs at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

import finetune
from finetune.config.recipe import Recipe
from finetune.errors import ConfigError, RunFailedError
from finetune.hardware.device import Device
from finetune.runs.folder import Run
from finetune.units import elapsed

POLL = 0.2  # seconds
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a run that was told to end, and saved."""


@dataclass
class Job:
    """A run of the comparison.

    Attributes:
        recipe: file of the complete recipe.
        out: parent of the run folder.
        steps: optimizer steps; None if set by the number of epochs.
        options: further options of `finetune run`.
        program: arguments of the Python interpreter.
    """

    side: str
    label: str
    seed: int
    recipe: Path
    out: Path
    steps: int | None = None
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-m", "finetune")
    process: subprocess.Popen[bytes] = field(init=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """File for stdout and stderr."""
        return self.out.with_suffix(".log")

    @property
    def folder(self) -> Path | None:
        return next((p for p in self.out.glob("*/*/") if (p / "config.yaml").is_file()), None)

    @property
    def run_folder(self) -> Path:
        """Run folder of a finished run.

        Raises:
            RunFailedError: the process left none.
        """
        if (folder := self.folder) is None:
            raise RunFailedError(
                "a run left no run folder", where=self.name, fix=f"read its output: {self.log}"
            )
        return folder

    def start(self, threads: int | None) -> None:
        run = ["run", str(self.recipe), f"train.seed={self.seed}", "--out", str(self.out)]
        environment = os.environ | {"PYTHONPATH": import_path()}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, *run, "--json", *self.options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,  # Ctrl-C reaches it through `_stop` alone, so once
            )  # fmt: skip

    def check_end(self) -> None:
        """Raise if the ended process did not succeed."""
        if self.process.returncode in INTERRUPTED:  # from outside, as a scheduler does
            raise KeyboardInterrupt
        if self.process.returncode:
            raise _failure(self)


def import_path() -> str:
    """`PYTHONPATH` with which a child process imports this package from any working directory.

    A package that is installed is found anyhow: its neighbours are not to come before Python's own.
    """
    package = str(Path(finetune.__file__).parent.parent)
    first = [] if package == sysconfig.get_path("purelib") else [package]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*first, *filter(None, paths)]))


def plan_jobs(
    recipes: tuple[Recipe, Recipe],
    labels: tuple[str, str],
    seeds: Sequence[int],
    folder: Path,
    *,
    force: bool = False,
) -> list[Job]:
    """List the runs in ABBA order, and write their recipes into `folder`.

    Seeds 42, 43 and 44 run as a42 b42 b43 a43 a44 b44.
    """
    options = ("--force",) if force else ()
    sides = []
    for side, recipe, label in zip("ab", recipes, labels, strict=True):
        file = folder / side / f"{recipe.name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(recipe.to_yaml(), encoding="utf-8")
        steps = int(recipe.config.train.get("max_steps", -1))
        sides.append((side, label, file, steps if steps > 0 else None))
    return [
        Job(side, label, seed, file, file.with_name(f"seed-{seed}"), steps, options)
        for turn, seed in enumerate(seeds)
        for side, label, file, steps in (sides if turn % 2 == 0 else reversed(sides))
    ]


def places(device: Device, jobs: int | None, cores: int) -> tuple[int, int | None]:
    """Give the number of concurrent runs, and the threads of each (None: torch's default).

    On a CPU with 4 cores: two runs of 2 threads each. On a GPU: one run.

    Raises:
        ConfigError: more runs than the machine can run without slowing each other down.
    """
    if device.kind != "cpu":
        if jobs not in (None, 1):
            raise ConfigError(
                f"{jobs} runs at once were requested on a GPU",
                where=f"--jobs {jobs}",
                why="they would slow each other down and share its memory: neither speed nor peak "
                "could be compared",
                fix="leave --jobs out",
            )
        return 1, None
    at_once = jobs if jobs is not None else min(2, cores)
    if not 1 <= at_once <= max(1, cores):
        raise ConfigError(
            f"{at_once} runs at once were requested of {cores} cores",
            where=f"--jobs {at_once}",
            why="two threads on one core wait for each other",
            fix=f"--jobs {min(2, cores)}",
        )
    return at_once, cores // at_once if at_once > 1 else None


def run_jobs(jobs: Sequence[Job], at_once: int, threads: int | None, watcher: Watcher) -> None:
    """Run all jobs in order, `at_once` at a time.

    Raises:
        RunFailedError: a run failed; the others were stopped.
        KeyboardInterrupt: Ctrl-C; all runs have ended.
    """
    waiting, running = list(jobs), list[Job]()
    with _terminated_like_interrupted():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(threads)
                watcher.look(running)
                time.sleep(POLL)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    job.check_end()
                    watcher.finish(job)
        except BaseException:
            _stop(running)
            raise


def _stop(running: Sequence[Job]) -> None:
    """Let the runs finish their step and save; a second interrupt stops them."""
    for _ in range(2):
        for job in running:
            if job.process.poll() is None:
                # A shell starts background jobs (`&`) with SIGINT ignored.
                job.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(KeyboardInterrupt):
            for job in running:
                job.process.wait()
            return
    for job in running:
        try:
            job.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that no run outlives this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(job: Job) -> RunFailedError:
    """Build an error from the last `error:` in a run log, with its `where:`, `why:`, `fix:`."""
    lines = [x.rstrip() for x in job.log.read_text("utf-8", errors="replace").splitlines()]
    parts: dict[str, str] = {}
    for line in lines:
        label, colon, text = line.strip().partition(":")
        if line.startswith("error:"):
            parts = {"error": text.strip()}
        elif parts and colon and line.startswith("  ") and label in ("where", "why", "fix"):
            parts[label] = text.strip()
    where = f"{job.name}: {job.log}"
    if parts:
        where += f"; {parts['where']}" if "where" in parts else ""
        why, fix = parts.get("why", ""), parts.get("fix", f"read its output: {job.log}")
        return RunFailedError(parts["error"], where=where, why=why, fix=fix)
    code = job.process.returncode
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    memory = "; signal 9 is what the system sends when memory is out" if code == -9 else ""
    return RunFailedError(
        f"a run ended {how}{memory}",
        where=where,
        why=f"its last words: {next((line for line in reversed(lines) if line), 'none')}",
        fix=f"read its output: {job.log}"
        + ("; then --jobs 1, or a smaller train.per_device_train_batch_size" if memory else ""),
    )


class Watcher:
    """Shows the progress of runs on a terminal, and prints a line when one ends."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console, self.total, self.finished = console, len(jobs), 0
        self.bars = Progress(
            TextColumn("{task.description:14s}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Watcher:
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def look(self, running: Sequence[Job]) -> None:
        for job in () if self.bars.disable else running:
            if job.name not in self._tasks:
                self._tasks[job.name] = self.bars.add_task(job.name, total=None, facts="starting")
            rows = Run(job.folder).tail if job.folder is not None else []
            if row := next((row for row in reversed(rows) if "loss" in row), None):
                facts = f"step {row['step']}  loss {row['loss']:.4f}"
                self.bars.update(
                    self._tasks[job.name], completed=row["step"], total=job.steps, facts=facts
                )

    def finish(self, job: Job) -> None:
        self.finished += 1
        report = Run(job.run_folder).report
        facts = [f"loss {report['first_loss']:.3f} -> {report['final_loss']:.3f}"]
        if report["eval_loss"] is not None:
            facts.append(f"eval loss {report['eval_loss']:.4f}")
        facts.append(f"{elapsed(report['seconds'])}, {report['status']}")
        if job.name in self._tasks:
            self.bars.remove_task(self._tasks.pop(job.name))
        line = f"[{self.finished}/{self.total}] {job.name}: {', '.join(facts)}"
        self.console.print(line, highlight=False)
