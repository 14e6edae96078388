"""Replay (`resume --verify`): a piece of a run trained again, to the same bits or not.

Before a run of days goes on, a change of the machine shows here: other versions of libraries,
another GPU, rows that were replaced. The piece lies between two checkpoints, since the later one
has both the losses that were logged until there and the SHA-256 of the weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from rich.console import Console

from finetune.config.recipe import Recipe
from finetune.errors import ProofError
from finetune.hardware.device import rank
from finetune.logging import whole
from finetune.runs.checkpoints import CHECKPOINTS, Checkpoint, checkpoints_in, resume_command
from finetune.runs.folder import json_of
from finetune.runs.receipt import RunReport

COMPARED = ("loss", "grad_norm")
PLACE = ".replay"
"""Folder in the run's, deleted afterwards; one that all processes know."""


def checkpoint_before(checkpoint: Checkpoint) -> Checkpoint | None:
    """The whole checkpoint next before another of the same run, if there is one."""
    saved = reversed(checkpoints_in(checkpoint.folder.parent).values())
    earlier = (Checkpoint(path) for path in saved)
    found = (one for one in earlier if one.step < checkpoint.step)
    return next((one for one in found if not one.problem(contents=True)), None)


def replay(
    recipe: Recipe,
    end: Checkpoint,
    begin: int,
    train: Callable[..., RunReport],
    console: Console,
    *,
    force: bool = False,
) -> str:
    """Train from one step to a checkpoint's again: the same losses and weights to the bit, or not.

    Example: checkpoints of steps 20 and 30, a loss logged every 4 steps. Training goes on from step
    20 to 30 in a folder of its own. The loss logged at step 24 is the mean of steps 21 to 24 and is
    compared, and that of 28; those of steps 32 and later are not reached.

    Args:
        recipe: of the run, which goes on from the checkpoint of step `begin`, or begins.
        end: the later checkpoint.
        train: `finetune.train`.

    Returns:
        What was compared, in a line.

    Raises:
        ProofError: something differs, with the first step and both values.
    """
    run = end.folder.parent.parent
    console.print(whole(f"replaying steps {begin + 1} to {end.step} of {run}"), crop=False)
    try:
        report = train(recipe, out=run / PLACE, force=force, console=console, until=end.step)
        again = Checkpoint(report.folder / CHECKPOINTS / end.folder.name)
        found = _differences(end, again, begin)
        if found:
            raise ProofError(
                f"the run does not repeat itself: {found[0]}",
                where=str(end.folder),
                why=_changed(json_of(run / "receipt.json"), report),
                fix="bring back what changed (`environment` in receipt.json), or go on knowing "
                f"that: {resume_command(run)}",
            )
    finally:
        if rank() == 0:
            shutil.rmtree(run / PLACE, ignore_errors=True)
    losses, files = len(_comparable(end, begin)), _weights(end)
    return (
        f"verified: steps {begin + 1} to {end.step} replayed, {losses} logged losses equal to the "
        f"digit, {len(files)} files of weights and scales equal to the bit"
    )


def _differences(end: Checkpoint, again: Checkpoint, begin: int) -> list[str]:
    """Each difference in words, earliest step first."""
    rows, found = {row["step"]: row for row in _losses(again)}, list[str]()
    for row in _comparable(end, begin):
        step, other = row["step"], rows.get(row["step"], {})
        found += [
            f"{key} at step {step} is {other.get(key)}, and {row[key]} was logged"
            for key in COMPARED
            if key in row and row[key] != other.get(key)
        ]
    new = _weights(again)
    found += [
        f"{name} of step {end.step} has other contents"
        for name, value in _weights(end).items()
        if new.get(name) != value
    ]
    if not _comparable(end, begin) and not _weights(end):
        found.append(f"nothing of steps {begin + 1} to {end.step} was logged or has a SHA-256")
    return found


def _comparable(end: Checkpoint, begin: int) -> list[dict[str, Any]]:
    """Rows whose loss is a mean over steps after `begin` alone."""
    rows = _losses(end)
    since = [0, *(row["step"] for row in rows)]
    return [row for row, last in zip(rows, since, strict=False) if last >= begin]


def _losses(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    log = checkpoint.state.get("log_history", [])
    return [row for row in log if "loss" in row and "step" in row]


def _weights(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of files of weights and of scaling state, which have no dates in them."""
    files = checkpoint.manifest.get("files", {})
    return {n: facts["sha256"] for n, facts in files.items() if n.endswith(".safetensors")}


def _changed(receipt: dict[str, Any], report: RunReport) -> str:
    """Versions and device that differ from those of the run's receipt."""
    was, now = receipt.get("environment"), report.receipt.environment
    if not was:
        return "the run ended without a receipt: what it ran on is not known"
    then, today = ({**one["versions"], "device": one["device"]["name"]} for one in (was, now))
    changed = [
        f"{key} was {then.get(key)}, is {today.get(key)}"
        for key in sorted({*then, *today})
        if then.get(key) != today.get(key)
    ]
    return "; ".join(changed) or (
        "versions and device are the same: some kernel of it is not deterministic "
        "(train.full_determinism=true), or a file of the model has changed"
    )
