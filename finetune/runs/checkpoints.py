"""Checkpoints on disk: which are whole, and the one that a user means. Imports no torch.

    checkpoints/
        .saving/checkpoint-20/       being written; renamed when everything is on the disk
        checkpoint-10/               whole
            model or adapter, tokenizer, optimizer.pt, scheduler.pt, rng_state.pth
            trainer_state.json       the trainer's step and logs
            fp8_scaling.safetensors  scaling state of the FP8 layers
            manifest.json            written last: each file with its bytes and SHA-256, and the
                                     recipe, rows and precision that resuming compares
            kept                     of `checkpoints RUN keep STEP`: no rotation deletes it

A folder with a manifest is whole if every file is as the manifest has it. One without, written by
another program, is taken if the trainer's state, its optimizer and weights are there.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.config.methods import Method, method_in
from finetune.config.paths import user_path
from finetune.errors import ConfigError
from finetune.runs.folder import RunFolder, finite, json_of
from finetune.runs.lookup import LAST, find_runs, is_run

CHECKPOINTS, SAVING = "checkpoints", ".saving"
STATE, MANIFEST, KEPT = "trainer_state.json", "manifest.json", "kept"
LATEST, BEST = (LAST, "latest"), "best"
_NAME = re.compile(r"checkpoint-(\d+)")
_NEEDED = (("optimizer.pt",), ("scheduler.pt",), ("*.safetensors", "*.bin"))
"""Files of a checkpoint without a manifest: one of each group, none of them empty."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint-<step>`, in whatever state it is."""

    folder: Path

    @property
    def step(self) -> int:
        """The step of its name."""
        found = _NAME.fullmatch(self.folder.name)
        # A copied or renamed folder still knows its step.
        return int(found[1]) if found else int(finite(self.state.get("global_step")) or 0)

    @property
    def is_kept(self) -> bool:
        """True if it stays whatever rotation deletes."""
        return (self.folder / KEPT).exists()

    @cached_property
    def state(self) -> dict[str, Any]:
        """`trainer_state.json`; empty when it is missing or not whole."""
        return json_of(self.folder / STATE)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """`manifest.json`; empty when it is missing or not whole."""
        return json_of(self.folder / MANIFEST)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def logged(self, key: str) -> float | None:
        """The last value that was logged under `key` up to its step."""
        values = (finite(row.get(key)) for row in reversed(self.log))
        return next((value for value in values if value is not None), None)

    @property
    def log(self) -> list[dict[str, Any]]:
        """The trainer's log, `log_history`; empty where it is not whole."""
        rows = self.state.get("log_history")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def method(self) -> Method:
        """The method of its run; SFT where nothing says so."""
        return method_in(self.manifest.get("config") or {})

    @property
    def columns(self) -> tuple[str, ...]:
        """Logged columns that it is judged by, of training and of evaluation."""
        every = ("loss", "reward", "eval_loss", "eval_reward")
        return tuple(key for key in every if key in self.method.columns)

    @property
    def rank(self) -> float:
        """Lower is better: the eval loss of its own step, or minus the reward; infinite of none."""
        measure = self.method.evaluated
        key, sign = measure.columns[0], -1 if measure.rises else 1
        # Only an evaluation of these very weights: an older one would rank a checkpoint by its
        # ancestor.
        own = (finite(row.get(key)) for row in self.log if row.get("step") == self.step)
        return next((sign * value for value in own if value is not None), math.inf)

    def problem(self, *, contents: bool = False) -> str:
        """Why training cannot resume from it; empty if it can. `contents`: read every file."""
        if not isinstance(self.state.get("global_step"), int):
            missing = not (self.folder / STATE).is_file()
            return f"{STATE} is {'missing' if missing else 'not whole'}"
        if next(self.folder.glob("pytorch_model_fsdp*"), None) is not None:
            # Shards are read with `pickle.load`; ours: `training.checkpoints.sharded`.
            return "it has the form that Transformers saves under FSDP, which is not read here"
        if not os.path.lexists(self.folder / MANIFEST):  # a broken one is no missing one
            return next(self._lacks(), "")
        if self.manifest.get("only_model"):
            return "it holds the model alone (train.save_only_model)"
        return self.damage(contents=contents)

    def damage(self, *, contents: bool = False, of: str = "") -> str:
        """Which file is not as it was saved; empty if all are, or no manifest says how they were.

        Args:
            contents: read every file.
            of: end of the names of files to look at; default all.
        """
        if not os.path.lexists(self.folder / MANIFEST):
            return ""
        files = self.manifest.get("files")
        if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
            return f"{MANIFEST} is not whole"
        files = {name: facts for name, facts in files.items() if name.endswith(of)}
        for name, facts in files.items():
            file = self.folder / name
            if not file.is_file():
                return f"{name} is missing"
            # Sizes first, since hashing a large model takes minutes and a cut copy shows at once.
            if (found := file.stat().st_size) != facts["bytes"]:
                return f"{name} has {found:,} bytes, not {facts['bytes']:,}"
        if contents:
            found = hashes_of([self.folder / name for name in files])
            for (name, facts), value in zip(files.items(), found, strict=True):
                if value != facts["sha256"]:
                    return f"{name} has changed since it was saved (SHA-256)"
        return ""

    def _lacks(self) -> Iterator[str]:
        """What is missing in a folder that has no manifest."""
        for patterns in _NEEDED:
            found = [f for pattern in patterns for f in self.folder.glob(pattern)]
            if not found:
                yield f"{patterns[0]} is missing"
            for file in found:
                if file.is_file() and not file.stat().st_size:
                    yield f"{file.name} is empty"


def _is_entry(facts: Any) -> bool:
    """True if facts on a file in a manifest are complete."""
    types = [type(facts.get(key)) for key in ("bytes", "sha256")] if isinstance(facts, dict) else []
    return types == [int, str]


def hashes_of(files: list[Path]) -> list[str]:
    """SHA-256 of each file, several at a time (hashing releases the interpreter's lock)."""

    def one(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, files))


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> folder of every `checkpoint-<step>` in a folder, in the order of steps."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    steps = {int(name[1]): path for name, path in named if name and path.is_dir()}
    return dict(sorted(steps.items()))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in a folder whose files are all there, if any."""
    saved = reversed(checkpoints_in(folder).values())
    return next((path for path in saved if not Checkpoint(path).problem()), None)


def history(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` until a checkpoint; of another program's what the trainer logged."""
    run = checkpoint.folder.absolute().parents[1]
    rows = RunFolder(run).rows if is_run(run) else checkpoint.log
    last = checkpoint.step
    # `train_runtime` is Transformers' summary at the end of training, no step of it.
    return [row for row in rows if row.get("step", 0) <= last and "train_runtime" not in row]


def resume_command(folder: Path) -> str:
    """The command that resumes a run, in as many processes as saved its newest checkpoint."""
    newest = newest_checkpoint(folder / CHECKPOINTS)
    count = Checkpoint(newest).manifest.get("processes", 1) if newest is not None else 1
    launcher = launcher_of(count if isinstance(count, int) else 1)
    return f"{launcher} -m finetune resume {shlex.quote(str(folder))}"


def launcher_of(processes: int) -> str:
    """What starts a module as so many processes, on as many machines as this one of them runs on.

    `python` for one; `torchrun --standalone --nproc_per_node=8` for 8; within a run of 16, 8 of
    them on this machine, `torchrun --nnodes=2 --nproc_per_node=8 --rdzv_endpoint=HOST:PORT`.
    """
    if processes == 1:
        return "python"
    # `LOCAL_WORLD_SIZE` and `WORLD_SIZE` are set by torchrun, for each process it starts.
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or processes)
    if here < processes and os.environ.get("WORLD_SIZE") == str(processes):
        # Rounded up.
        nodes = -(-processes // here)
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
        return f"torchrun --nnodes={nodes} --nproc_per_node={here} {rendezvous}"
    return f"torchrun --standalone --nproc_per_node={processes}"


def scaling_file(process: int) -> str:
    """Name of a process's file of FP8 scaling state in a checkpoint."""
    return f"fp8_scaling{f'_{process}' if process else ''}.safetensors"


def best_of(saved: list[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints by the evaluation at their step, best first; those without one last."""
    return sorted(saved, key=lambda checkpoint: (checkpoint.rank, -checkpoint.step))


def superfluous(
    saved: list[Checkpoint], keep_last: int, keep_best: int = 0, *, named: str = ""
) -> list[Checkpoint]:
    """Checkpoints to delete: neither among the newest, nor among the best, nor `named`, nor kept.

    Of steps 10, 20, 30, 40 with eval losses 3, 1, 2, 4, `keep_last=1` and `keep_best=1` leave 40
    and 20. By step, not by the time of a file, since clocks jump. What a user keeps does not count.

    Args:
        saved: oldest first.
        named: folder of one that the trainer calls its best; it counts towards `keep_last`, as in
            `train.save_total_limit`, but the newest stays too.
    """
    saved = [one for one in saved if not one.is_kept]
    evaluated = [one for one in saved if math.isfinite(one.rank)]
    kept = best_of(evaluated)[:keep_best]
    # The newest is never deleted, so it need not count as the best as well.
    kept += [one for one in saved[:-1] if named and one.folder.name == Path(named).name]
    # Transformers counts its best checkpoint among `save_total_limit`; at least one newest stays,
    # or a run could not resume.
    newest = saved[-max(1, keep_last - bool(named and kept)) :]
    return [one for one in saved if one not in newest and one not in kept]


def find_checkpoint(name: str, out: Path | str = "runs") -> tuple[Checkpoint, dict[Path, str]]:
    """The checkpoint to resume from, and those that were passed over.

    Args:
        name: a run folder, its `checkpoints` folder (the newest whole checkpoint of either), one of
            both followed by `/best`, `/last` or `/latest`, one checkpoint, or `last` alone: of the
            newest run that saved one.
        out: folder of runs, for `last`.

    Returns:
        A checkpoint whose files are all as they were saved; broken ones before it, with the reason.

    Raises:
        ConfigError: there is none that is whole.
    """
    where, folder, which = "train.resume_from_checkpoint", user_path(name), LAST
    # A folder that is really called `last` or `best` is meant as it is.
    if not folder.exists() and folder.name in (*LATEST, BEST):
        which, folder = folder.name, folder.parent
        if len(Path(name).parts) == 1:
            folder = _newest_run_with_checkpoints(Path(out), name)
    if (folder / CHECKPOINTS).is_dir():
        folder = folder / CHECKPOINTS
    saved = [Checkpoint(path) for path in reversed(checkpoints_in(folder).values())]
    if not saved and (folder / STATE).exists() | (folder / MANIFEST).exists():
        saved = [Checkpoint(folder)]  # one checkpoint, whatever its name
    elif not saved and _NAME.fullmatch(folder.name) and folder.is_dir():
        saved = [Checkpoint(folder)]
    if which == BEST:
        saved = best_of(saved)
    broken: dict[Path, str] = {}
    for checkpoint in saved:
        problem = checkpoint.problem(contents=True)
        if not problem:
            return checkpoint, broken
        broken[checkpoint.folder] = problem
    if broken:
        raise ConfigError(
            f"no checkpoint in {str(folder)!r} is complete",
            where=where,
            why="; ".join(f"{path.name}: {problem}" for path, problem in broken.items()),
            fix="an earlier one of the run (`python -m finetune checkpoints` lists them), or start "
            "again",
        )
    raise ConfigError(
        f"there is no checkpoint in {name!r}",
        where=where,
        why="the run saved none (train.save_strategy=no, or it ended before)"
        if folder.is_dir()
        else "there is no such folder",
        fix="give a run folder, its checkpoints/ folder, or one checkpoint-N folder (`python -m "
        "finetune ls --runs` lists runs); or start again with train.save_strategy=steps",
    )


def _newest_run_with_checkpoints(out: Path, name: str) -> Path:
    runs = find_runs(out) if out.is_dir() else []
    for run in runs:
        if checkpoints_in(run.folder / CHECKPOINTS):
            return run.folder
    raise ConfigError(
        f"there is no checkpoint {name!r}: no run in {str(out)!r} saved one",
        where="train.resume_from_checkpoint",
        fix="give a run folder, or train with train.save_strategy=steps train.save_steps=100",
    )
