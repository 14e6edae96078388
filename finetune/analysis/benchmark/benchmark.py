"""A process for each point, and what its end says where it left no word.

Ctrl-C at a terminal reaches the process too; one that does not end by itself is ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import finetune
from finetune.analysis.benchmark.grid import Grid, Job, Point, at_point, parse_grid
from finetune.analysis.benchmark.ladders import steps_of
from finetune.analysis.benchmark.result import Benchmark, Row
from finetune.analysis.compare.fairness import asked_differences
from finetune.analysis.compare.pairing import settle_compile
from finetune.config.recipe import Recipe, load_recipe
from finetune.errors import ConfigError
from finetune.hardware.device import this_device
from finetune.training.preflight import processes

PATIENCE_S = 10.0
"""What a point's process has to end by itself when it is interrupted."""


def run_apart(job: Job, log: Path) -> list[dict[str, Any]]:
    """Measure a job in a process of its own.

    Args:
        job: at its point.
        log: where the process's stderr goes.

    Returns:
        The lines that it printed; where it ended without a result, one that says how.
    """
    package = str(Path(finetune.__file__).parents[1])
    paths = [p for p in (os.environ.get("PYTHONPATH"),) if p]
    if "site-packages" not in package:
        paths.insert(0, package)
    # No point asks the hub. What allocates is left as the user has it (PYTORCH_CUDA_ALLOC_CONF).
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "finetune.analysis.benchmark.point"]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
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
    """A process that was interrupted with us, or that has to be."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ended(code: int, log: Path) -> dict[str, Any]:
    """The line of a process that ended without a result.

    Args:
        code: as `subprocess` has it; negative is a signal.
        log: what it wrote to stderr.
    """
    if code == -signal.SIGINT or (code == 1 and _last(log).startswith("KeyboardInterrupt")):
        raise KeyboardInterrupt
    if code == -signal.SIGKILL:
        return {
            "kind": "failed",
            "out_of_memory": True,
            "error": "out of memory: killed by the system, which is how Linux ends a process that "
            "takes the last of its memory",
        }
    if code < 0:
        return {"kind": "failed", "error": f"crashed: {signal.Signals(-code).name}; see {log}"}
    return {"kind": "failed", "error": f"{_last(log) or f'exit code {code}'}; see {log}"}


def _last(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1][:300]


# ------------------------------------------------------------------------------------------
# `benchmark(recipe, vs=...)`: all points in turn, a process each, rounds of recipes alternating.
#
#     for each point, smallest first:  for each round:  for each recipe:  one process
#
# Two recipes that are compared meet the same clock that way (A B A B ...), and what an earlier
# point
# left behind meets none. Rows are written after each of them, so that an interrupted benchmark
# keeps
# what it has.


Say = Callable[[str], None]
Run = Callable[[Job, Path], list[dict[str, Any]]]
"""Measures a job, with a file for what its process says; the lines that it printed."""
TOO_LARGE = "skipped: larger than one that did not fit"
STEPS, ROUNDS = 10, 3


def benchmark(
    recipe: Recipe | str,
    *,
    vs: Sequence[Recipe | str] = (),
    overrides: Sequence[str] = (),
    grid: Grid | str | None = None,
    steps: int = STEPS,
    rounds: int | None = None,
    ladder: str | None = None,
    only: Sequence[str] = (),
    out: Path | str = "runs/benchmark",
    force: bool = False,
    all_points: bool = False,
    say: Say | None = None,
    run: Run | None = None,
) -> Benchmark:
    """Measure speed and memory of recipes side by side: random weights, synthetic tokens.

        finetune.benchmark("tiny_lora_fp8", vs=["tiny_lora_bf16"], grid="batch=1,4")

    Args:
        recipe: a recipe's name or path, or one that is loaded.
        vs: others, compared with it at its points.
        overrides: `section.key=value`, for all of them that are given by name.
        grid: micro-batches and lengths; left out, the first recipe's own.
        steps: on the clock, in each round.
        rounds: processes for each point and recipe; left out, 3 where something is compared
            (an interval needs two), else 1.
        ladder: `lora` or `full`: measure the steps of a ladder with this recipe, instead of `vs`.
        only: names of steps, or parts of several; left out, all of them.
        out: folder of benchmarks.
        force: also try what is predicted to be far too large.
        all_points: also try what is larger than a point that did not fit.
        say: told each row when it is there, one line.
        run: how a job is measured; left out, in a process of its own.

    Raises:
        FinetuneError: a mistake in what was asked; what happens at a point is its row.
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
    if ladder is not None and vs:
        raise ConfigError(
            "a ladder compares steps of one recipe, and --vs names another",
            where=f"--ladder {ladder} --vs",
            fix="leave one of them out",
        )
    if only and ladder is None:
        raise ConfigError(
            "--only would change nothing", where="--only", fix="--ladder lora or --ladder full"
        )
    recipes = [r if isinstance(r, Recipe) else load_recipe(r, overrides) for r in (recipe, *vs)]
    first = recipes[0]
    grid = parse_grid(grid) if isinstance(grid, str) else grid or Grid()
    points = grid.points(first.config)
    common: dict[str, Any] = {"steps": steps, "force": force}
    device, alike = this_device(), ""
    if ladder is not None:
        taken, references = steps_of(ladder, first.config, only)
        series = [Job(s.name, s.of(first.config), s.how, s.liger, **common) for s in taken]
        where = f"{first.name}-{ladder}-ladder"
    else:
        names = _names(recipes)
        configs, alike = settle_compile([r.config for r in recipes], device)
        pairs = zip(names, configs, strict=True)
        series = [Job(name, config, **common) for name, config in pairs]
        references, where = (names[0],) if vs else (), "-vs-".join(names)
    for job in series:  # a mistake is told before anything is measured
        for point in points:
            at_point(job.config, point, steps)
    result = Benchmark(
        references=references,
        differences=[] if ladder else differences(series, points[0], on_cpu=device.kind == "cpu"),
        alike=alike,
        command=sys.argv,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    folder = new_folder(Path(out) / where)
    rounds = rounds or (ROUNDS if len(series) > 1 else 1)
    try:
        for point in points:
            _measure(result, series, point, rounds, folder, run or run_apart, say, all_points)
    except KeyboardInterrupt:
        result.interrupted = True
    result.save(folder)
    return result


def _names(recipes: Sequence[Recipe]) -> list[str]:
    """Names of rows; a recipe that is there twice gets a number."""
    names: list[str] = []
    for recipe in recipes:
        again = sum(name.partition("#")[0] == recipe.name for name in names)
        names.append(f"{recipe.name}#{again + 1}" if again else recipe.name)
    return names


def new_folder(inside: Path) -> Path:
    """`inside/<time>-<short id>/`, made.

    Raises:
        ConfigError: it cannot be made.
    """
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    folder = inside / stamp
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {str(folder)!r} cannot be made: {error.strerror}",
            where=str(inside),
            fix="choose another folder with --out",
        ) from None
    return folder


def differences(jobs: Sequence[Job], point: Point, *, on_cpu: bool) -> list[str]:
    """What recipes do otherwise than the first that a fair pair shares, besides precision.

    The conditions are those of a comparison, less what a benchmark replaces: data and evaluation.
    """
    first, *others = (at_point(job.config, point, job.steps) for job in jobs)
    found = []
    for job, config in zip(jobs[1:], others, strict=True):
        for one in asked_differences(first, config, on_cpu=on_cpu):
            if not one.where.startswith("data."):
                parts = _parts(one.where, one.a, one.b)
                told = (f"{where}: {jobs[0].label} {a}, {job.label} {b}" for where, a, b in parts)
                found += [f"{line} ({one.why})" for line in told]
    return found


def _parts(where: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Of two sections, their keys that differ; of other values, themselves."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys((*a, *b))
        return [(f"{where}.{k}", a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)]
    return [(where, "none" if a is None else a, "none" if b is None else b)]


def _measure(
    result: Benchmark,
    series: Sequence[Job],
    point: Point,
    rounds: int,
    folder: Path,
    run: Run,
    say: Say | None,
    all_points: bool,
) -> None:
    """All rounds of one point. Rows that have begun stay, also when it is interrupted."""
    rows: dict[str, Row] = {}
    for number in range(rounds):
        for job in series:
            if number == 0:
                tokens = _at(job, point, 0).tokens
                row = rows[job.label] = Row(job.label, point.batch, point.length, tokens)
                if not all_points and _is_larger(result, row):
                    row.error = TOO_LARGE
                    result.rows.append(row)
                    continue
            row = rows[job.label]
            if row.error:
                continue
            log = folder / "logs" / f"{_slug(job.label)}-{point.batch}x{point.length}-{number}.log"
            log.parent.mkdir(exist_ok=True)
            for line in run(_at(job, point, number), log):
                row.add(line)
                result.environment = line.get("environment") or result.environment
            if row not in result.rows:
                result.rows.append(row)
            result.save(folder)
            if say is not None:
                say(_told(row, number, rounds))


def _at(job: Job, point: Point, number: int) -> Job:
    config = at_point(job.config, point, job.steps)
    return Job(
        job.label, config, job.how, job.liger, job.steps, number, number == 0, job.force, job.note
    )


def _is_larger(result: Benchmark, row: Row) -> bool:
    at = Point(*row.key)
    return any(
        other.label == row.label and other.out_of_memory and at.contains(Point(*other.key))
        for other in result.rows
    )


def _told(row: Row, number: int, rounds: int) -> str:
    at = f"{row.label}, {row.batch} x {row.length}"
    if rounds > 1:
        at += f", round {number + 1} of {rounds}"
    if row.error:
        return f"{at}: {row.error}"
    return f"{at}: {row.facts()['tokens_per_s']:,.0f} tokens/s, {row.proven}"


def _slug(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label)
