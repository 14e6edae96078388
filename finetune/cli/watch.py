"""The verb `watch`: follow a run from another terminal. Imports no torch.

It reads nothing but the run's folder, again each time, so that it works on a run of another
terminal, of `nohup` or of another machine's disk, leaves nothing behind and cannot disturb the run.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from finetune.cli import INTERRUPTED, RunName, RunsFolder
from finetune.cli.listing import DEFAULT_OUT
from finetune.cli.tensorboard import serve
from finetune.config.methods import SHOWN
from finetune.errors import ConfigError
from finetune.logging import output, plain_table, whole
from finetune.runs.checkpoints import CHECKPOINTS, newest_checkpoint, resume_command
from finetune.runs.folder import RunFolder, finite
from finetune.runs.lookup import LAST, find_run, newest_runs
from finetune.runs.progress import health_line, log_line, named
from finetune.runs.receipt import Receipt
from finetune.units import elapsed, percent, size_of_gib

PERIOD = 1.0
"""Seconds between two looks."""
BEFORE = 10
"""Lines shown of what was logged before."""
UNFINISHED = 1
"""Exit code where the run was stopped or killed."""


def watch(
    run: RunName = LAST,
    out: RunsFolder = DEFAULT_OUT,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Open TensorBoard: all runs, or RUN's.")
    ] = False,
) -> None:
    """Follow a run from another terminal: loss, speed, health, time left."""
    folder, console = find_run(run, out), output()
    if tensorboard:
        recipe = None if run == LAST else run
        if code := serve(lambda: newest_runs(out, recipe) or [folder]):
            sys.exit(code)
        return
    try:
        follow = _in_place if console.is_terminal else _line_by_line
        ended = follow(console, folder)
    except KeyboardInterrupt:
        console.print(whole(f"no longer watched; the run is in {folder}"), crop=False)
        sys.exit(INTERRUPTED)
    for line in _end(ended):
        console.print(line, crop=False)
    if ended.state != "finished":
        sys.exit(UNFINISHED)


def _looks(folder: Path) -> Iterator[RunFolder]:
    """The run as it is, once in each `PERIOD`; at last as it ended.

    Raises:
        ConfigError: it ended before its first step, and has removed its folder.
    """
    while True:
        try:
            now = RunFolder(folder)
            if now.state != "running":
                # Once more: this look may have missed a receipt that was written while it lasted.
                now = RunFolder(folder)
            running = now.state == "running"
        except FileNotFoundError:
            raise ConfigError(
                "the run ended before its first step, and has removed its folder",
                where=str(folder),
                fix="its own output says why",
            ) from None
        yield now
        if not running:
            return
        time.sleep(PERIOD)


def _line_by_line(console: Console, folder: Path) -> RunFolder:
    """Print each row that is logged, as the run does itself, and health below it."""
    told, now = set[tuple[float, bool, bool]](), RunFolder(folder)
    for now in _looks(folder):
        new = dict[tuple[float, bool, bool], str]()
        for row in now.tail:
            # Of each kind a step has one row.
            key = row["step"], "loss" in row, "eval_loss" in row
            if key not in told and (line := _line(row, now, console.width)):
                new[key] = line
        for line in [*new.values()][0 if told else -BEFORE :]:
            console.print(whole(line), crop=False)
        told.update(new)
    return now


def _line(row: dict[str, Any], run: RunFolder, width: int) -> str:
    """A row in a line; empty for samples and scores."""
    planned = run.planned_steps
    step = f"step {row['step']:.0f}/{planned or '?'}"
    health = health_line(row)
    left = max(0, planned - int(row["step"])) if planned else None
    return f"{step} | {health}" if health else log_line(row, step, run.method, left, width)


def _in_place(console: Console, folder: Path) -> RunFolder:
    """Show one table until the run ends."""
    now = RunFolder(folder)
    with Live(console=console, auto_refresh=False) as live:
        for now in _looks(folder):
            live.update(_table(now), refresh=True)
    return now


def _table(run: RunFolder) -> Table:
    planned, seconds = run.planned_steps, finite(run.logged("step_seconds"))
    left = planned - run.last_step if planned else None
    health = next(filter(None, map(health_line, reversed(run.tail))), "")
    log, quiet = run.folder / "metrics.jsonl", ""
    if log.exists() and run.state == "running":
        quiet = f", last log {elapsed(max(0.0, time.time() - log.stat().st_mtime))} ago"

    def shown(key: str, form: str) -> str:
        value = finite(run.logged(key))
        return "" if value is None else form.format(value)

    share = f" ({percent(run.last_step / planned, 0)})" if planned else ""
    speed = shown("step_seconds", "{:.2f} s/step"), shown("tokens_per_s", "{:,.0f} tok/s")
    memory = finite(run.logged("peak_memory_gib"))
    figured = dict.fromkeys((*run.method.columns, *SHOWN))
    facts = {
        "run": f"{run.recipe}/{run.name}",
        "state": run.state + quiet,
        "step": f"{run.last_step} of {planned or '?'}{share}",
        **{named(key)[0]: shown(key, f"{{:{named(key)[1]}}}") for key in figured},
        "speed": ", ".join(filter(None, speed)),
        "time left": elapsed(seconds * left) if left and seconds and run.state == "running" else "",
        "memory": f"at most {size_of_gib(memory)}" if memory else "",
        "health": health,
        "precision": run.precision,
    }
    table = plain_table("", "", show_header=False)
    for name, fact in facts.items():
        if fact:
            table.add_row(Text(name, style="dim"), fact)
    return table


def _end(run: RunFolder) -> Iterator[Any]:
    """How it ended, on what evidence, and the next command."""
    ended, name = run.receipt.get("run", {}), shlex.quote(str(run.folder))
    by_error = f": {ended.get('stopped') or 'after training; its own output says why'}"
    why = {
        "stopped": " by a signal" if ended.get("interrupted") else by_error,
        "killed": ": its process is gone, and left no receipt",
    }.get(run.state, "")
    style = "bold green" if run.state == "finished" else "bold yellow"
    yield Text(f"{run.progress}{why}", style)
    if run.state == "finished":
        yield Text(Receipt.read(run.receipt).headline)
        yield from (Text(f"hint: {hint}", "yellow") for hint in run.report.get("hints", ()))
        yield whole(f'next: python -m finetune generate {name} "..."')
    elif newest_checkpoint(run.folder / CHECKPOINTS) is not None:
        yield whole(f"next: {resume_command(run.folder)}")
    else:
        yield whole("no complete checkpoint was saved, so it cannot be resumed")
