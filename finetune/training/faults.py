"""Faults of the machine, as errors with a remedy: disk, memory, other processes, trackers.

A run that is left alone for days meets them; a traceback of the library in which they happened says
neither what is lost nor how to go on. Of several processes the first that fails leaves its error in
the run folder (`error-<rank>.txt`); the others, which lose their connection to it, end with that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from finetune.errors import (
    CheckpointError,
    ConfigError,
    FinetuneError,
    MemoryShortError,
    RunFailedError,
    first_line,
)
from finetune.hardware.device import processes, rank
from finetune.runs.checkpoints import CHECKPOINTS, newest_checkpoint, resume_command

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


@contextlib.contextmanager
def others_alive(out: Path) -> Iterator[None]:
    """Raise for a process that ended before there is a run folder, by a bad row for example.

    Args:
        out: folder of runs.

    Raises:
        RunFailedError: another process of the run ended.
    """
    try:
        yield
    except Exception as error:
        if lost := _connection_lost(error):
            raise _process_lost(lost, out) from error
        raise


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
    if not (folder / "run.json").is_file():  # deleted by one that failed, or not made yet
        why = "it failed, as its log says, or was killed"
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


def say_lost_processes() -> Callable[[], None]:
    """Say, under the traceback of a script, that it ends since another process has; returns undo.

    gloo's and NCCL's words are of sockets, and a launcher shows them beside those of the process
    that failed, or alone if that one was killed.
    """
    plain = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        plain(kind, error, trace)
        if _connection_lost(error):
            print(
                "! another process of this script has ended: it failed, which its own output says, "
                "or was killed (memory?). Nothing is wrong with this one; go on from the last "
                "checkpoint",
                file=sys.stderr,
            )

    def undo() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = plain

    sys.excepthook = excepthook
    return undo


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
