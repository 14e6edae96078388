"""The folder of a run, and faults of the machine as errors with a remedy: disk, memory, processes.

A run that is left alone for days meets them; a traceback of the library in which they happened says
neither what is lost nor how to go on. Of several processes the first that fails leaves its error in
the run folder (`error-<rank>.txt`); the others, which lose their connection to it, end with that.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.optimizers import chosen, state_bytes
from finetune.config.recipe import Recipe
from finetune.config.schema import RunConfig
from finetune.errors import (
    REFUSED,
    CheckpointError,
    ConfigError,
    FinetuneError,
    MemoryShortError,
    RunFailedError,
    first_line,
)
from finetune.hardware.device import processes, rank
from finetune.runs.checkpoints import (
    CHECKPOINTS,
    Checkpoint,
    newest_checkpoint,
    resume_command,
)
from finetune.runs.folder import Run, finite, write_start
from finetune.training.preflight import Preflight
from finetune.training.scope import reads_base
from finetune.units import size

if TYPE_CHECKING:
    from torch import nn


def name_folder(out: Path, recipe: str, label: str) -> Path:
    """Return `out/<recipe>/<time>-<short id>-<precision>/`, the same on every process.

    Args:
        recipe: name of the recipe, whose precision an override may have replaced.
        label: executed precision, such as `FP8 emulated/delayed`.
    """
    from accelerate.utils import broadcast_object_list

    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    if processes() > 1:
        stamp = broadcast_object_list([stamp])[0]
    kind, _, engine = label.lower().partition(" ")
    scaling = re.sub(r"[^a-z0-9]+", "-", engine.rpartition("/")[2]).strip("-")
    return out / recipe / "-".join(part for part in (stamp, kind, scaling) if part)


def make_folder(folder: Path, recipe: Recipe, out: Path) -> None:
    """Make a run folder, which locks it, and write what a run begins with; or a `ConfigError`."""
    try:
        folder.mkdir(parents=True)
        write_start(folder, recipe.name)
        (folder / "config.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    except FileExistsError:
        holder = Run(folder).holder
        raise ConfigError(
            f"the run folder {str(folder)!r} belongs to another run",
            where=f"--out {out}",
            why=f"{holder} writes there" if holder else "it is there already",
            fix="start again, which takes a new folder, or choose another with --out",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the run folder {str(folder)!r} cannot be made: {error.strerror}",
            where=f"--out {out}",
            fix="choose another folder with --out",
        ) from None


@contextlib.contextmanager
def discarded_unless_begun(folder: Path) -> Iterator[None]:
    """Remove a run folder if a setting, the model or the rows are refused before the first step."""
    try:
        yield
    except REFUSED:
        metrics = folder / "metrics.jsonl"
        if rank() == 0 and not (metrics.is_file() and metrics.stat().st_size):
            shutil.rmtree(folder, ignore_errors=True)
        raise


# ------------------------------------------------------------------------------------ disk space


def bytes_of_weights(model: nn.Module, config: RunConfig) -> float:
    """Bytes of the saved model: adapters alone, or all of its weights."""
    saved = {id(p): p for p in model.parameters() if p.requires_grad or config.lora is None}
    ranks = 2 if reads_base(config) else 1  # files of those have twice the rank
    return ranks * float(sum(p.numel() * p.element_size() for p in saved.values()))


def bytes_of_checkpoint(model: nn.Module, config: RunConfig) -> float:
    """Bytes of a checkpoint: the saved weights and the optimizer's moments."""
    from torch import nn

    facts = chosen(config.train)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trains = {id(p): p for p in model.parameters() if p.requires_grad}.values()
    moments = sum(
        state_bytes(facts, tuple(p.shape), p.element_size(), embedding=id(p) in embeddings)
        for p in trains
    )
    moments = 0.0 if config.train.get("save_only_model") else moments
    return bytes_of_weights(model, config) + moments


def checkpoints_at_once(config: RunConfig, begun: Checkpoint | None = None) -> tuple[int, int]:
    """The most checkpoints of a run on the disk at one time, and of these the ones that stay.

    One more than are kept, since one is deleted when the next is whole. Of a run whose number of
    steps is known only from its rows, two. A run of 1000 steps that saves each 100 and goes on from
    step 800 makes two: earlier ones lie in the folder of the run before, already.

    Args:
        begun: checkpoint that the run goes on from.
    """
    train, kept = config.train, config.checkpoints
    strategy = str(train.get("save_strategy", "steps"))
    if strategy in ("no", "False", "false"):
        return 0, 0
    every, steps = train.get("save_steps", 500), train.get("max_steps", -1)
    made = 1
    if strategy == "steps" and steps > 0:
        every = every if every >= 1 else every * steps
        made = math.ceil(steps / every) - (int(begun.step // every) if begun else 0)
    elif strategy == "epoch":
        past = finite(begun.state.get("epoch")) if begun else None
        made = max(1, math.ceil(train.get("num_train_epochs", 3)) - int(past or 0))
    limit: Any = train.get("save_total_limit")
    if kept.keep_last is not None:
        limit = kept.keep_last + kept.keep_best
    stay = min(made, limit or made)
    return stay + (made > stay or kept.first_step), stay


def check_disk(run: Preflight, out: Path, begun: Checkpoint | None = None) -> None:
    """Raise `CheckpointError` for a run whose checkpoints and model have no room on their disk.

    Args:
        begun: checkpoint that the run goes on from.
    """
    config = run.config
    each, model = bytes_of_checkpoint(run.sketch, config), bytes_of_weights(run.sketch, config)
    most, stay = checkpoints_at_once(config, begun)
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(place).free
    # The model is saved when no checkpoint is being written any more.
    need = max(most * each, stay * each + model)
    if need <= free:
        return
    room = int((free - model) // each) if each else 0
    fix = "make room there, or choose another folder with --out"
    if stay > 1 and room > 1:
        fix = f"checkpoints.keep_last={max(1, room - 2)}, or {fix}"
    raise CheckpointError(
        f"what the run will save has no room on the disk: {size(need)}, and {size(free)} are free",
        where=str(place),
        why=f"{most} checkpoints of {size(each)} at one time, and a model of {size(model)}",
        fix=f"{fix}; --force starts anyway",
    )


# ------------------------------------------------------------------------------------------ faults

_REMEDIES = {
    errno.ENOSPC: "make room on its disk (checkpoints.keep_last=2 keeps two and the best)",
    errno.EDQUOT: "make room in your quota (checkpoints.keep_last=2 keeps two and the best)",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f unlimited`)",
    errno.EROFS: "make the folder writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
    errno.ENOENT: "leave the folder where it is while the run lives, or choose another with --out",
    errno.EIO: "the disk may be failing: choose another with --out",
    errno.ESTALE: "the network disk was lost: mount it again, or choose another with --out",
}
_OF_A_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM)
"""Faults of the run only where the file is one of the run folder."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextlib.contextmanager
def explained(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Raise faults of disk, memory and other processes with a remedy; others pass as they are.

    Args:
        folder: the run's.
        advice: what to change so that a run needs less memory.

    Raises:
        CheckpointError: the run folder cannot be written.
        MemoryShortError: memory is full, of the GPU or of the host.
        RunFailedError: another process of the run ended.
    """
    try:
        yield
    except Exception as error:
        if lost := _connection_lost(error):
            raise _process_lost(lost, folder) from error
        found = _explanation(error, folder, advice)
        if processes() > 1:
            with contextlib.suppress(OSError):  # the fault may be that of the folder
                _error_file(folder, rank()).write_text(str(found), encoding="utf-8")
        if found is error:
            raise
        raise found from error


def _explanation(error: Exception, folder: Path, advice: Callable[[], str]) -> Exception:
    if isinstance(error, FinetuneError):
        return error
    if is_of_the_disk(error) and _concerns(error, folder):
        return write_failure(error, folder, "the run folder could not be written")
    if not _is_of_memory(error):
        return error
    return MemoryShortError(
        "the run is out of memory",
        where=str(folder),
        why=first_line(error) if str(error) else "the host gave no more",
        fix=f"{advice()}; {go_on(folder)}",
    )


# ------------------------------------------------------------------------------- other processes


def _error_file(folder: Path, number: int) -> Path:
    return folder / f"error-{number}.txt"


def _connection_lost(error: BaseException) -> BaseException | None:
    """What a collective raised when a process that takes part in it was gone.

    Also behind an error of ours: one in a library's preparation of rows looks like one of a row.
    """
    from torch.distributed import DistError

    if isinstance(error, FinetuneError) and error.__cause__ is not None:
        error = error.__cause__
    of_backend = any(word in str(error) for word in ("gloo/transport", "NCCL error"))
    lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and of_backend)
    return error if lost and processes() > 1 else None


def _process_lost(error: BaseException, folder: Path) -> RunFailedError:
    """The error of a process whose connection to another broke, with what that one left."""
    own, why = _error_file(folder, rank()), "it was killed, or its machine is gone"
    left = sorted(file for file in folder.glob("error-*.txt") if file != own)
    if left:
        number = left[0].stem.rpartition("-")[2]
        why = f"process {number}: {left[0].read_text('utf-8')}"
    return RunFailedError(
        "another process of the run has ended",
        where=str(folder),
        why=f"{why} ({first_line(error)[:200]})" if not left else why,
        fix=f"look at its log; {go_on(folder)}",
    )


# ----------------------------------------------------------------------------------- disk, memory


def is_of_the_disk(error: BaseException) -> bool:
    """True for errors of writing, which safetensors and torch have types of their own for."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return _number(error) in _REMEDIES
    if isinstance(error, SafetensorError):  # one of reading has "while deserializing"
        return "while serializing" in str(error)
    return _is_of_torch_save(error)


def _is_of_torch_save(error: BaseException) -> bool:
    """True for what `torch.save` raises where a write is cut short, which does not say why.

    torch 2.13: "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534".
    """
    of_writer = any(word in str(error) for word in ("PytorchStreamWriter", "unexpected pos"))
    return isinstance(error, RuntimeError) and of_writer


def write_failure(error: BaseException, folder: Path, what: str) -> CheckpointError:
    """The error of a run folder that cannot be written, by its cause."""
    number = _number(error)
    if isinstance(error, FileNotFoundError) or not os.path.lexists(folder):
        what, number = f"{what}: it was deleted or moved while the run went on", errno.ENOENT
    remedy = _REMEDIES.get(number, "make room there and make the folder writable")
    why = "the disk took less than was written" if _is_of_torch_save(error) else first_line(error)
    return CheckpointError(what, where=str(folder), why=why, fix=f"{remedy}; {go_on(folder)}")


def go_on(folder: Path) -> str:
    """How to go on after a fault: the command to resume, if something was saved."""
    if newest_checkpoint(folder / CHECKPOINTS) is None:
        return "then start again (no checkpoint was saved)"
    return f"then go on: {resume_command(folder)}"


def _number(error: BaseException) -> int:
    """The system's error number; libraries written in Rust and C++ have it in their text."""
    if isinstance(error, OSError):
        return error.errno or 0
    text = str(error)
    return next((n for n in _REMEDIES if f"os error {n})" in text), 0)


def _concerns(error: BaseException, folder: Path) -> bool:
    if not isinstance(error, OSError) or error.errno not in _OF_A_FILE:
        return True
    return str(folder.resolve()) in str(Path(str(error.filename or "")).resolve())


def _is_of_memory(error: BaseException) -> bool:
    import torch

    text = str(error).lower()
    of_torch = isinstance(error, RuntimeError) and any(word in text for word in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or of_torch


# --------------------------------------------------------------------------------------- trackers


def guard_trackers(trainer: Any, say: Callable[[str], None]) -> None:
    """Keep a tracker's failure from ending a run: later ones are said once, the first is an error.

    When training begins somebody is there to put it right; in the third night nobody is, and the
    run's own `metrics.jsonl` has every row.
    """
    from transformers.integrations import get_reporting_integration_callbacks

    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    for callback in trainer.callback_handler.callbacks:
        if kinds and isinstance(callback, kinds):
            down: list[str] = []
            for event in (name for name in dir(callback) if name.startswith("on_")):
                method = partial(_report, getattr(callback, event), event, down, say)
                setattr(callback, event, method)


def _report(
    method: Any, event: str, down: list[str], say: Callable[[str], None], *args: Any, **kwargs: Any
) -> Any:
    if down:
        return None
    try:
        return method(*args, **kwargs)
    except Exception as error:
        name, why = type(method.__self__).__name__.removesuffix("Callback"), first_line(error)
        if event in ("on_init_end", "on_train_begin"):
            raise ConfigError(
                f"the tracker {name} does not answer",
                where="train.report_to",
                why=f"{type(error).__name__}: {why}",
                fix="start it or log in, or train.report_to=none (metrics.jsonl has every row)",
            ) from error
        down.append(event)
        say(f"the tracker {name} failed and gets no more rows ({why}); metrics.jsonl has them all")
        return None
