"""Runs of an experiment, each a process of its own with an ordinary run folder.

    folder/a/tiny_full_fp8.yaml                    complete recipe of the first variant
    folder/a/seed-42.log                           what its run with that seed printed
    folder/a/seed-42/tiny_full_fp8/20260101-.../   its run folder
    folder/b/...                                   the second variant

Precision is process-wide (patches of Accelerate, compiled kernels, the allocator's peaks), so two
runs in one process would affect each other. Each process runs `python -m finetune run` on a copy of
its complete recipe, so that later edits change nothing.

On a GPU they run one at a time in ABBA order, so that a drift of the clock affects all variants. On
a CPU with two cores or more two run at once on equal shares of the threads, so that other load
affects both; speed there is an emulation's, and no claim.

Ctrl-C reaches each run once: it finishes its step, saves and writes its receipt. A second Ctrl-C
stops the runs at once. A run that is only measured has nothing to save, and is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

import finetune
from finetune.config.recipe import Recipe
from finetune.errors import ConfigError, RunFailedError
from finetune.hardware.device import Device, processes
from finetune.runs.folder import RunFolder
from finetune.runs.progress import outcome, shown_of
from finetune.units import elapsed

POLL = 0.2  # seconds
RUN = ("-m", "finetune", "run")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
"""`torchrun`, as this interpreter starts it."""
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a run that was told to end, and saved."""


@dataclass(frozen=True)
class LabeledRecipe:
    """A recipe of an experiment, and its name there.

    Attributes:
        program: what trains it instead of `run`, as arguments of the Python interpreter; it takes
            those of `run`, and leaves a run folder.
    """

    label: str
    recipe: Recipe
    program: tuple[str, ...] = ()


@dataclass
class Job:
    """A run of an experiment.

    Attributes:
        file: the complete recipe.
        force: train even if memory seems too small.
        measured: only its speed and memory matter: it asks no hub and saves no model.
        gpus: processes that train together, each on a GPU of its own, or on a share of the cores.
    """

    variant: LabeledRecipe
    seed: int
    file: Path
    force: bool = False
    measured: bool = False
    gpus: int = 1
    process: subprocess.Popen[bytes] = field(init=False, repr=False)

    @property
    def name(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def out(self) -> Path:
        """Parent of the run folder."""
        return self.file.with_name(f"seed-{self.seed}")

    @property
    def log(self) -> Path:
        """File for stdout and stderr."""
        return self.out.with_suffix(".log")

    def folders(self) -> list[Path]:
        """The run folder, as soon as it is there."""
        return [p for p in self.out.glob("*/*/") if (p / "config.yaml").is_file()]

    @property
    def run(self) -> RunFolder:
        """The finished run.

        Raises:
            RunFailedError: the process left no run folder.
        """
        for folder in self.folders():
            return RunFolder(folder)
        raise RunFailedError(
            "a run left no run folder", where=self.name, fix=f"read its output: {self.log}"
        )

    def start(self, threads: int | None) -> None:
        words = [str(self.file), f"train.seed={self.seed}", "--out", str(self.out), "--json"]
        if self.force:
            words.append("--force")
        if self.measured:
            words.append("--no-save")
        environment = os.environ | {"PYTHONPATH": import_path()}
        if self.measured:
            # Random weights and rows need nothing of the hub, whose checks would take seconds of
            # each run.
            environment["HF_HUB_OFFLINE"] = "1"
        if threads is not None:
            # Equal shares of the cores: two runs with all of them each would wait for one another.
            environment["OMP_NUM_THREADS"] = str(threads)
        launcher = (*LAUNCHER, str(self.gpus)) if self.gpus > 1 else ()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *(self.variant.program or RUN), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,  # Ctrl-C reaches it through `stop` alone, so once
            )  # fmt: skip

    def stop(self) -> None:
        if self.process.poll() is None and self.measured:
            self.kill()
        elif self.process.poll() is None:
            # A shell starts background jobs (`&`) with SIGINT ignored.
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, and first its processes, which `torchrun` starts in sessions of their own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            # Or they would live on, and keep the GPU's memory.
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()

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
    # PYTHONPATH comes before the standard library: with site-packages in it, old backports (enum34,
    # typing) take its place.
    first = [] if package == sysconfig.get_path("purelib") else [package]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*first, *filter(None, paths)]))


def refuse_processes(verb: str, several: str = "") -> None:
    """Raise `ConfigError` in one of several processes: an experiment starts its runs itself."""
    if processes() > 1:
        raise ConfigError(
            f"{verb} was started as several processes",
            where=f"WORLD_SIZE={processes()}",
            why="it starts the runs itself",
            fix=f"call it without torchrun or accelerate launch{several}",
        )


def plan_jobs(
    variants: Sequence[LabeledRecipe], seeds: Sequence[int], folder: Path, *, force: bool = False,
    measured: bool = False, gpus: int = 1,
) -> list[Job]:  # fmt: skip
    """List the runs in ABBA order, and write the recipes into `folder`.

    Two variants and the seeds 42, 43 and 44 run as a42 b42 b43 a43 a44 b44.
    """
    sides = []
    for number, variant in enumerate(variants):
        file = folder / chr(ord("a") + number) / f"{variant.recipe.name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(variant.recipe.to_yaml(), encoding="utf-8")
        sides.append((variant, file))
    return [
        Job(variant, seed, file, force, measured, gpus)
        # ABBA: a clock that falls as the machine gets warm is met by both sides alike.
        for turn, seed in enumerate(seeds)
        for variant, file in (sides if turn % 2 == 0 else reversed(sides))
    ]


def jobs_at_once(device: Device, jobs: int | None, cores: int) -> tuple[int, int | None]:
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


def run_jobs(
    jobs: Sequence[Job],
    at_once: int = 1,
    threads: int | None = None,
    watcher: Watcher | None = None,
) -> None:
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
                if watcher is not None:
                    watcher.look(running)
                time.sleep(POLL)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    job.check_end()
                    if watcher is not None:
                        watcher.finish(job)
        except BaseException:
            _stop(running)
            raise


def _stop(running: Sequence[Job]) -> None:
    """Let the runs finish their step and save; a second interrupt stops them."""
    # The first round lets each save; an interrupt while waiting begins the second.
    for _ in range(2):
        for job in running:
            job.stop()
        with contextlib.suppress(KeyboardInterrupt):
            for job in running:
                job.process.wait()
            return
    for job in running:
        try:
            job.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            job.kill()
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


_TORCHRUN = re.compile(r"^.* failed \(exitcode: (-?\d+)\)", re.MULTILINE)
"""Where `torchrun` (torch 2.13) begins to say, below what they said, how its processes ended."""


def _failure(job: Job) -> RunFailedError:
    """Build an error from the last `error:` in a run log, with its `where:`, `why:`, `fix:`."""
    # torchrun's own error comes last and says less than the error of the process that failed.
    text, *told = _TORCHRUN.split(job.log.read_text("utf-8", errors="replace"), maxsplit=1)
    lines = [line for line in text.splitlines() if line.strip()]
    said, where, read = dict[str, str](), f"{job.name}: {job.log}", f"read its output: {job.log}"
    for line in lines:
        if found := re.match(r"(error|  where|  why|  fix): *(.*)", line):
            # A later error replaces an earlier one with all of its lines.
            said = said if line.startswith(" ") else {}
            said[found[1].strip()] = found[2].strip()
    if "error" in said:
        where = "; ".join(filter(None, (where, said.get("where"))))
        return RunFailedError(
            said["error"], where=where, why=said.get("why", ""), fix=said.get("fix", read)
        )
    code = int(told[0]) if told else job.process.returncode
    if code == -signal.SIGKILL:
        return RunFailedError(
            "a run was out of memory: the system killed it (signal 9)",
            where=where,
            why="that is how Linux ends a process that takes the last of the machine's memory",
            fix=f"{read}; then --jobs 1, or a smaller train.per_device_train_batch_size",
        )
    # Libraries print advice below some of their errors.
    words = [x for x in lines if re.match(r"[\w.]*(Error|Exception)\b", x)] or lines or ["none"]
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    why = f"its last words: {words[-1][:300]}"
    return RunFailedError(f"a run ended {how}", where=where, why=why, fix=read)


class Watcher:
    """Shows the progress of runs on a terminal, and prints a line when one ends."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0
        self.bars = Progress(
            TextColumn("{task.description:14s}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def look(self, running: Sequence[Job]) -> None:
        for job in () if self.bars.disable else running:
            if job.name not in self._tasks:
                self._tasks[job.name] = self.bars.add_task(job.name, total=None, facts="starting")
            for run in map(RunFolder, job.folders()):
                for row in [row for row in run.tail if "loss" in row][-1:]:
                    facts = "  ".join([f"step {row['step']}", *shown_of(row, run.method)])
                    done = {"completed": row["step"], "total": run.planned_steps}
                    self.bars.update(self._tasks[job.name], **done, facts=facts)

    def finish(self, job: Job) -> None:
        self.finished += 1
        report = job.run.report
        facts = [*map(" ".join, outcome(report, job.run.method)), elapsed(report["seconds"])]
        if job.name in self._tasks:
            self.bars.remove_task(self._tasks.pop(job.name))
        line = f"[{self.finished}/{self.total}] {job.name}: {' · '.join(facts)}, {report['status']}"
        self.console.print(line, highlight=False)
