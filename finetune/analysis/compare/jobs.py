"""The runs of a comparison: each one a process of its own, in its own run folder.

Precision is process-wide (patches of Accelerate, compiled kernels, the allocator's peaks), so two
runs in one process would see each other. `python -m finetune run` trains each, from a complete copy
of its recipe in the comparison's folder, so that a recipe edited meanwhile changes nothing and
every other command works on the runs.

In what order matters for speed. On a GPU they run one at a time, in ABBA order: a machine that gets
slower over the hours does so for both sides. On a CPU with two cores or more two runs are under way
at any time, each with an equal share of the threads: what else the machine does meets both sides.
Speed there is that of an emulation, and no claim.

Ctrl-C reaches the runs once, from here: each finishes its step, saves and writes its receipt, as it
does when it runs alone; a second Ctrl-C stops them at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

import finetune
from finetune.analysis.compare.pairing import Pair
from finetune.config.yaml import parse_yaml, read_text
from finetune.errors import ConfigError, RunFailedError

POLL = 0.2  # seconds
INTERRUPTED = 130


@dataclass
class Job:
    """One run.

    Attributes:
        side: `a` or `b`.
        label: what to call the side.
        seed: `train.seed`.
        recipe: the complete recipe to run.
        out: folder in which it makes its run folder.
        log: file that gets what it prints.
        options: of `finetune run`.
        program: what Python runs.
        process: once it was started.
    """

    side: str
    label: str
    seed: int
    recipe: Path
    out: Path
    log: Path
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-m", "finetune")
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """`FP8, seed 42`."""
        return f"{self.label}, seed {self.seed}"

    @property
    def folder(self) -> Path | None:
        """Its run folder, once it made one."""
        made = (p for p in self.out.glob("*/*/") if (p / "config.yaml").is_file())
        return next(made, None)

    @property
    def run_folder(self) -> Path:
        """The same, of a run that ended well.

        Raises:
            RunFailedError: there is none all the same.
        """
        folder = self.folder
        if folder is None:
            raise RunFailedError("a run left no run folder", where=f"{self.name}: {self.log}")
        return folder

    @property
    def arguments(self) -> list[str]:
        """Of `python -m finetune`."""
        run = ["run", str(self.recipe), f"train.seed={self.seed}", "--out", str(self.out)]
        return [*run, "--json", *self.options]

    def start(self, threads: int | None) -> None:
        """Start the process."""
        command = [sys.executable, *self.program, *self.arguments]
        environment = os.environ | {"PYTHONPATH": _with_package(os.environ.get("PYTHONPATH", ""))}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C comes from us alone, so once
            )


def _with_package(paths: str) -> str:
    """`PYTHONPATH` by which the child imports this very package, wherever it starts."""
    home = str(Path(finetune.__file__).parent.parent)
    return os.pathsep.join(dict.fromkeys([home, *filter(None, paths.split(os.pathsep))]))


def plan_jobs(pair: Pair, folder: Path, *, force: bool = False) -> list[Job]:
    """The runs in ABBA order, with their recipes written into `folder`."""
    options = ("--force",) if force else ()
    jobs = []
    recipes = {}
    for side, recipe in (("a", pair.a), ("b", pair.b)):
        own = folder / side
        own.mkdir(parents=True)
        recipes[side] = own / f"{recipe.name}.yaml"
        recipes[side].write_text(recipe.to_yaml(), encoding="utf-8")
    for turn, seed in enumerate(pair.seeds):
        for side in ("a", "b") if turn % 2 == 0 else ("b", "a"):
            out = folder / side / f"seed-{seed}"
            log = folder / side / f"seed-{seed}.log"
            label = pair.labels["ab".index(side)]
            jobs.append(Job(side, label, seed, recipes[side], out, log, options))
    return jobs


def places(on_gpu: bool, jobs: int | None, cores: int) -> tuple[int, int | None]:
    """How many runs at once, and threads for each (None: as torch chooses).

    Raises:
        ConfigError: more at once than the machine can keep apart.
    """
    if on_gpu:
        if jobs not in (None, 1):
            raise ConfigError(
                f"{jobs} runs at once were asked on a GPU",
                where=f"--jobs {jobs}",
                why="they would slow each other down and share its memory: neither speed nor peak "
                "could be compared",
                fix="leave --jobs out",
            )
        return 1, None
    at_once = jobs if jobs is not None else min(2, cores)
    if not 1 <= at_once <= max(1, cores):
        raise ConfigError(
            f"{at_once} runs at once were asked of {cores} cores",
            where=f"--jobs {at_once}",
            why="two threads on one core wait for each other",
            fix=f"--jobs {min(2, cores)}",
        )
    return at_once, cores // at_once if at_once > 1 else None


def run_jobs(
    jobs: Sequence[Job],
    *,
    at_once: int,
    threads: int | None,
    watch: Callable[[Sequence[Job]], None],
    done: Callable[[Job], None],
) -> None:
    """Run all of them, in order.

    Args:
        jobs: of `plan_jobs`.
        at_once, threads: of `places`.
        watch: called again and again with the runs that are under way.
        done: called with each that ended well.

    Raises:
        RunFailedError: one of them did not end well; the others were stopped.
        KeyboardInterrupt: Ctrl-C; all of them have ended by then.
    """
    waiting, running = list(jobs), list[Job]()
    with _terminated_like_interrupted():
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(threads)
                watch(running)
                time.sleep(POLL)
                for job in [job for job in running if _process(job).poll() is not None]:
                    running.remove(job)
                    _check_end(job)
                    done(job)
        except BaseException:
            _stop(running)
            raise


def _process(job: Job) -> subprocess.Popen[bytes]:
    assert job.process is not None
    return job.process


def _check_end(job: Job) -> None:
    code = _process(job).returncode
    if code == INTERRUPTED:  # stopped by somebody else, and saved
        raise KeyboardInterrupt
    if code:
        raise _failure(job)


def _stop(running: Sequence[Job]) -> None:
    """Ask the runs to finish their step and save; insist when asked a second time."""
    for _ in range(2):
        _signal(running, signal.SIGTERM)  # SIGINT is ignored by what a shell started behind `&`
        with contextlib.suppress(KeyboardInterrupt):
            for job in running:
                _process(job).wait()
            return
    for job in running:
        try:
            _process(job).wait(timeout=10)
        except subprocess.TimeoutExpired:
            _process(job).kill()
            _process(job).wait()


def _signal(running: Sequence[Job], number: int) -> None:
    for job in running:
        if _process(job).poll() is None:
            _process(job).send_signal(number)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM stops the runs too, which would go on alone otherwise."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failure(job: Job) -> RunFailedError:
    """The run's own error, with where it happened."""
    code = _process(job).returncode
    with job.log.open(encoding="utf-8", errors="replace") as file:
        parts, lines = _error_in(file)
    where = f"{job.name}: {job.log}"
    if parts:
        return RunFailedError(
            parts["error"],
            where=f"{where}{'; ' + parts['where'] if 'where' in parts else ''}",
            why=parts.get("why", ""),
            fix=parts.get("fix", ""),
        )
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    memory = "; signal 9 is what the system sends when memory is out" if code == -9 else ""
    return RunFailedError(
        f"a run ended {how}{memory}",
        where=where,
        why=f"its last words: {next((line for line in reversed(lines) if line), 'none')}",
        fix="the log has all it said",
    )


def _error_in(file: IO[str]) -> tuple[dict[str, str], list[str]]:
    """The last `error:` with its `where:`, `why:` and `fix:`, as the command line prints them."""
    parts: dict[str, str] = {}
    lines = [line.rstrip() for line in file]
    for line in lines:
        label, colon, text = line.strip().partition(":")
        if line.startswith("error:"):
            parts = {"error": text.strip()}
        elif parts and colon and line.startswith("  ") and label in ("where", "why", "fix"):
            parts[label] = text.strip()
    return parts, lines


# ------------------------------------------------------------------------------------------
# What is shown while the runs of a comparison train: a line for each.
#
# The runs are other processes, so their progress is read where they write it: `metrics.jsonl`.


class Watcher:
    """Follows runs on a terminal, or prints a line when one ends.

    Attributes:
        finished: runs that ended well, in the order in which they did.
    """

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self.console, self.jobs = console, jobs
        self.finished: list[Job] = []
        self._bars: Progress | None = None
        self._tasks: dict[int, TaskID] = {}
        self._read: dict[int, int] = {}
        self._last: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Watcher:
        if self.console.is_terminal:
            bars = self._bars = Progress(
                TextColumn("{task.description:14s}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[facts]}"),
                console=self.console,
            )
            bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def look(self, running: Sequence[Job]) -> None:
        """Show how far the runs are."""
        for job in running if self._bars is not None else ():
            self._show(job)

    def _show(self, job: Job) -> None:
        assert self._bars is not None
        key, folder = id(job), job.folder
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(job.name, total=None, facts="starting")
        row = self._newest(key, folder / "metrics.jsonl") if folder is not None else None
        if row is not None and "loss" in row:
            facts = f"step {row['step']}  loss {row['loss']:.4f}"
            self._bars.update(
                self._tasks[key], completed=row["step"], total=_steps(job), facts=facts
            )

    def _newest(self, key: int, file: Path) -> dict[str, Any] | None:
        """The last whole line that was written, reading only what is new."""
        if not file.is_file():
            return None
        with file.open("rb") as lines:
            lines.seek(self._read.get(key, 0))
            new = lines.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[key] = self._read.get(key, 0) + len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        with_loss = [row for row in rows if "loss" in row]
        if with_loss:
            self._last[key] = with_loss[-1]
        return self._last.get(key)

    def finish(self, job: Job) -> None:
        """Show what a run came to."""
        self.finished.append(job)
        report = json.loads((job.run_folder / "report.json").read_text("utf-8"))
        facts = [f"loss {report['first_loss']:.3f} -> {report['final_loss']:.3f}"]
        if report["eval_loss"] is not None:
            facts.append(f"held-out {report['eval_loss']:.4f}")
        facts.append(f"{report['seconds']:.0f} s, {report['status']}")
        line = f"[{len(self.finished)}/{len(self.jobs)}] {job.name}: {', '.join(facts)}"
        if self._bars is not None and id(job) in self._tasks:
            self._bars.remove_task(self._tasks.pop(id(job)))
        self.console.print(line, highlight=False, soft_wrap=True)


def _steps(job: Job) -> float | None:
    """`max_steps` of a run; None where its epochs decide."""
    train = parse_yaml(read_text(job.recipe), str(job.recipe))[0].get("train") or {}
    steps = int(train.get("max_steps", -1))
    return steps if steps > 0 else None
