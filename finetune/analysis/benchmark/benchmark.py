"""`benchmark(recipe, vs=...)`: measure all points in turn, recipes alternating within each.

    for each point, smallest first:  recipes x rounds (a seed each), an ordinary run each

Alternating recipes (ABBA) meet the same clock, and no process inherits memory or caches. Rows are
written after each run, so that an interrupted benchmark keeps them. Memory and time of a point are
predicted before its runs: what is far too large is not tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from finetune.analysis.benchmark.grid import Point, at_point, points_of, tokens_of
from finetune.analysis.benchmark.result import OUT_OF_MEMORY, Benchmark, Row
from finetune.analysis.compare.result import as_text
from finetune.analysis.experiment.fairness import requested_differences, settle
from finetune.analysis.experiment.jobs import (
    Job,
    LabeledRecipe,
    plan_jobs,
    refuse_processes,
    run_jobs,
)
from finetune.analysis.experiment.outcome import read_outcome
from finetune.config.recipe import Recipe
from finetune.config.schema import RunConfig
from finetune.data.auto_length import load_recipe
from finetune.data.dataset import random_rows
from finetune.errors import ConfigError, FinetuneError, RunFailedError
from finetune.estimator.predict import predict
from finetune.hardware.device import available_gib, cores, this_device
from finetune.hardware.gpus import Machine, this_machine
from finetune.runs.folder import command_line, new_folder
from finetune.units import size_of_gib

FAR = 1.25
"""Largest predicted share of a GPU's memory that is tried, since predictions err. On a CPU it is 1:
running out of host memory takes the machine down.
"""
TOO_LARGE = "skipped: larger than one that did not fit"
STEPS, ROUNDS = 10, 3
FIRST_SEED = 42
Say = Callable[[str], None]


def benchmark(
    recipe: Recipe | str,
    *,
    vs: Sequence[Recipe | str] = (),
    overrides: Sequence[str] = (),
    grid: str | None = None,
    scaling: Literal["weak", "strong"] = "weak",
    steps: int = STEPS,
    rounds: int | None = None,
    out: Path | str = "runs/benchmark",
    force: bool = False,
    all_points: bool = False,
    say: Say | None = None,
) -> Benchmark:
    """Measure speed and memory of recipes side by side: random weights, synthetic tokens.

        finetune.benchmark("tiny_lora_fp8", vs=["tiny_lora_bf16"], grid="batch=1,4")

    Args:
        vs: other recipes, measured at the same points.
        overrides: `section.key=value`, for all recipes that are given by name.
        grid: micro-batches, lengths and GPUs; default: the first recipe's own, on one GPU.
        scaling: what stays on several GPUs: `weak` the rows of each, `strong` the rows of a step.
        steps: timed steps of each round.
        rounds: processes for each point and recipe; default 3 where recipes are compared (an
            interval needs two), else 1.
        force: also try points that are predicted to be far too large.
        all_points: also try points larger than one that did not fit.
        say: called with one line for each row.

    Raises:
        FinetuneError: an invalid argument; errors at a point are in its row.
    """
    recipes = [r if isinstance(r, Recipe) else load_recipe(r, overrides) for r in (recipe, *vs)]
    names = [one.name for one in recipes]
    # A recipe may be measured beside itself, as a check of the method: the second is `name#2`.
    labels = [f"{n}#{k}" if (k := names[: i + 1].count(n)) > 1 else n for i, n in enumerate(names)]
    device = this_device()
    configs, notes = settle([one.config for one in recipes], device)
    variants = [
        LabeledRecipe(label, replace(one, config=config))
        for label, one, config in zip(labels, recipes, configs, strict=True)
    ]
    measuring = Measuring(
        variants,
        points_of(grid, configs[0]),
        this_machine(device),
        steps,
        strong=scaling == "strong",
        # A speed alone needs no interval; a ratio without one says nothing.
        rounds=rounds if rounds is not None else ROUNDS if vs else 1,
        force=force,
        all_points=all_points,
        say=say,
    )
    result = Benchmark(scaling=scaling, references=labels[:1] if vs else [], alike="; ".join(notes))
    result.differences = differences(variants, measuring.points[0], on_cpu=device.kind == "cpu")
    return measuring.measure(result, new_folder(Path(out) / "-vs-".join(labels), out))


def differences(variants: Sequence[LabeledRecipe], point: Point, *, on_cpu: bool) -> list[str]:
    """List differences from the first recipe besides precision, data and evaluation."""
    first, *others = (at_point(variant.recipe.config, point, 1) for variant in variants)
    return [
        f"{d.where}: {variants[0].label} {as_text(d.a)}, {variant.label} {as_text(d.b)} ({d.why})"
        for variant, config in zip(variants[1:], others, strict=True)
        for d in requested_differences(first, config, on_cpu=on_cpu)
    ]


@dataclass
class Measuring:
    """Measures variants at points, or predicts them for another machine, and writes the rows.

    Raises:
        ConfigError: `steps` or `rounds` below 1, a point at which a recipe cannot be measured, more
            GPUs than are here, or one of several processes.
    """

    variants: Sequence[LabeledRecipe]
    points: Sequence[Point]
    machine: Machine
    steps: int
    rounds: int
    strong: bool = False
    force: bool = False
    all_points: bool = False
    say: Say | None = None
    unpredicted: Sequence[str] = ()
    """Labels of variants that the estimator does not model."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why some cannot run, by label."""
    seeds: Sequence[int] = ()
    """Train on the recipe's own rows with these, instead of measuring at points."""

    def __post_init__(self) -> None:
        refuse_processes("benchmark", '; for several GPUs: --grid "gpus=1,2"')
        if self.machine.here:
            self._check_gpus()
        for name, value in (("steps", self.steps), ("rounds", self.rounds)):
            if value < 1:
                raise ConfigError(f"--{name} {value}", where=f"--{name}", fix=f"--{name} 1 or more")
        # All points are checked before the first one runs, which may take hours.
        for variant in () if self.seeds else self.variants:
            for point in self.points:
                at_point(variant.recipe.config, point, self.steps, strong=self.strong)
        self.trained = bool(self.seeds)
        self.seeds = self.seeds or range(FIRST_SEED, FIRST_SEED + self.rounds)

    def _check_gpus(self) -> None:
        most, on_cpu = self.most, self.machine.device.kind == "cpu"
        here, what = (cores(), "cores") if on_cpu else (self.machine.device.count, "GPUs")
        name = self.variants[0].recipe.name
        if most > here:
            raise ConfigError(
                f"{most} processes, and {here} {what} are here",
                where=f"--grid gpus={most}",
                why="two processes on one would wait for each other",
                fix=f"gpus={here} or less; others are predicted: "
                f"python -m finetune estimate {name} --gpus {most}"
                + (" --gpu H100" if on_cpu else ""),
            )
        if self.strong and most == 1:
            raise ConfigError(
                "--scaling strong changes nothing on one GPU",
                where="--scaling",
                fix='--grid "gpus=1,2", or leave it out',
            )

    @property
    def most(self) -> int:
        """Processes of the grid's largest point."""
        return max(point.gpus for point in self.points)

    def measure(self, result: Benchmark, folder: Path) -> Benchmark:
        """Measure all variants at all points; after Ctrl-C the rows until then are kept."""
        self.result, self.folder = result, folder
        result.command, result.started = command_line(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            for point in self.points:
                self._measure_point(point)
        except KeyboardInterrupt:
            result.interrupted = True
        # After Ctrl-C as well, whatever was measured.
        result.save(folder)
        return result

    def _measure_point(self, point: Point) -> None:
        folder = self.folder / "x".join(map(str, point if self.most > 1 else point[:2]))
        rows, tried = dict[str, Row](), list[LabeledRecipe]()
        for number, variant in enumerate(self.variants):
            rows_at, config = folder / f"rows-{number}", variant.recipe.config
            if not self.trained:
                # Rows of each variant in a folder of its own: vocabularies differ, and with them
                # random ids.
                config = at_point(config, point, self.steps, rows_at, strong=self.strong)
            tokens = 0 if self.trained else tokens_of(config) * point.gpus
            row = rows[variant.label] = Row(label=variant.label, **point._asdict(), tokens=tokens)
            row.error = self.refused.get(row.label) or self._unfit(row, config)
            if row.error or not self.machine.here:
                self.result.rows.append(row)
                continue
            if not self.trained:
                count = config.train.max_steps * row.tokens // point.length
                random = random_rows(config.model, count, point.length, 0)
                random.save_to_disk(str(rows_at))
            tried.append(replace(variant, recipe=replace(variant.recipe, config=config)))
        # `force`: whether a point is worth trying was decided above, with another limit.
        kept = {"force": True, "measured": not self.trained, "gpus": point.gpus}
        for job in plan_jobs(tried, self.seeds, folder, **kept):
            if not rows[job.variant.label].error:
                self._measure_run(job, rows[job.variant.label])

    def _unfit(self, row: Row, config: RunConfig) -> str:
        """Predict memory and time of a point; the reason why it is not tried, or nothing."""
        full = [r for r in self.result.rows if r.label == row.label and r.out_of_memory]
        # A crash for lack of memory takes as long as a measurement, and tells nothing new.
        if not self.all_points and any(_at(row).contains(_at(r)) for r in full):
            return TOO_LARGE
        if row.label in self.unpredicted:
            row.prediction = "kernels or conversion of another library are not modelled"
            return ""
        device = self.machine.device
        try:
            found = predict(config, replace(self.machine, count=row.gpus))
        except FinetuneError as error:
            row.prediction = f"not predicted: {error.what}" if self.machine.here else ""
            # Here the run itself shows whether it works; elsewhere the prediction is all there is.
            return "" if self.machine.here else reason(error)
        needed, on_gpu = row.predict(found), device.kind == "cuda"
        if not self.machine.here:
            row.note = found.fit if found.fit == "does not fit" else ""
            return ""
        needed *= 1 if on_gpu else row.gpus  # which share the memory of a CPU
        there = device.memory_gib if on_gpu else available_gib(device)
        if self.force or needed <= there * (FAR if on_gpu else 1):
            return ""
        return (
            f"skipped: predicted to hold {size_of_gib(needed)}, and {device.name} has "
            f"{size_of_gib(there)}{'' if on_gpu else ' free'}; --force tries it"
        )

    def _measure_run(self, job: Job, row: Row) -> None:
        try:
            run_jobs([job], threads=cores() // self.most if self.most > 1 else None)
            outcome = read_outcome(job.run.folder)
            row.add(outcome, trained=self.trained)
            self.result.environment = outcome.receipt["environment"]
        except RunFailedError as error:
            row.error = reason(error)
            # The run was another process, of which the error's text is what is left.
            row.out_of_memory = OUT_OF_MEMORY in error.what
        if row not in self.result.rows:
            self.result.rows.append(row)
        self.result.save(self.folder)
        if self.say is not None:
            at, several = f"{row.label}, {row.at}", len(self.seeds) > 1
            done = self.seeds.index(job.seed) + 1
            at += f", round {done} of {len(self.seeds)}" if several else ""
            rate = row.error or f"{row.tokens_per_s:,.0f} tokens/s, {row.proven}"
            self.say(f"{at}: {rate}")


def _at(row: Row) -> Point:
    return Point(row.batch, row.length, row.gpus)


def reason(error: FinetuneError) -> str:
    """What and why, in the line of a row."""
    return f"{error.what}: {error.why}" if error.why else error.what
