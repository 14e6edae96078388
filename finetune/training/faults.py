"""Faults of the machine, as errors with a fix: disk, memory, other processes.

A run that is left alone for days meets them; a traceback of the library in which they happened says
neither what is lost nor how to resume.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.errors import (
    CheckpointError,
    FinetuneError,
    MemoryShortError,
    RunFailedError,
    exited,
    first_line,
)
from finetune.hardware.device import expand_segments, processes
from finetune.runs.checkpoints import CHECKPOINTS, newest_checkpoint, resume_command

_OF_A_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM)
"""Faults of the run only where the file is one of the run folder."""
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, *_OF_A_FILE)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextlib.contextmanager
def explained(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Raise faults of disk, memory and other processes with a fix; others pass as they are.

    Args:
        folder: the run's; before it has one, the folder of all runs.
        advice: what to change so that a run needs less memory.

    Raises:
        CheckpointError: the run folder cannot be written.
        MemoryShortError: memory is full, of the GPU or of the host.
        RunFailedError: another process of the run ended.
    """
    try:
        yield
    # A library's `sys.exit` would end the run as if it had been meant to.
    except SystemExit as end:
        raise exited(end) from end
    except Exception as error:
        # TRL prepares rows between collectives: a lost connection looks like the error of a row.
        lost = error.__cause__ or error if isinstance(error, FinetuneError) else error
        # The process that failed says why; the others lose their connection a moment later.
        if processes() > 1 and _is_of_a_connection(lost):
            raise RunFailedError(
                "another process of the run has ended",
                where=str(folder),
                why=f"it failed, as its own output says, or was killed ({first_line(lost)[:200]})",
                fix=f"look at its log; {go_on(folder)}",
            ) from error
        if isinstance(error, FinetuneError):
            raise
        if is_of_the_disk(error) and _concerns(error, folder):
            raise write_failure(error, folder, "the run folder could not be written") from error
        if not _is_of_memory(error):
            raise
        import torch

        why = first_line(error) if str(error) else "the host gave no more"
        if isinstance(error, torch.OutOfMemoryError):
            # Fragments are the usual reason where less was allocated than the GPU has.
            why += f" (allocator: {expand_segments().reason})"
        raise MemoryShortError(
            "the run is out of memory",
            where=str(folder),
            why=why,
            fix=f"{advice()}; {go_on(folder)}",
        ) from error


# ----------------------------------------------------------------------------------- disk, memory


def is_of_the_disk(error: BaseException) -> bool:
    """True for errors of writing, which safetensors and torch have types of their own for."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return error.errno in _OF_A_DISK
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
    """The error of a run folder that cannot be written."""
    why = "the disk took less than was written" if _is_of_torch_save(error) else first_line(error)
    if not os.path.lexists(folder):
        why = "the folder was deleted or moved while the run was training"
    fix = (
        "make room on its disk (checkpoints.keep_last=2 keeps two and the best), in your quota or "
    )
    fix += f"in `ulimit -f`, and leave the folder writable where it is; {go_on(folder)}"
    return CheckpointError(what, where=str(folder), why=why, fix=fix)


def go_on(folder: Path) -> str:
    """How to resume after a fault: the command to resume, if something was saved."""
    if newest_checkpoint(folder / CHECKPOINTS) is None:
        return "then start again (no checkpoint was saved)"
    return f"then resume: {resume_command(folder)}"


def _concerns(error: BaseException, folder: Path) -> bool:
    # A full disk concerns the run whichever file met it; a file that is missing may be anyone's.
    if not isinstance(error, OSError) or error.errno not in _OF_A_FILE:
        return True
    return str(folder.resolve()) in str(Path(str(error.filename or "")).resolve())


def _is_of_a_connection(error: BaseException) -> bool:
    """True for what a collective raises when a process that takes part in it is gone."""
    from torch.distributed import DistError

    of_backend = any(word in str(error) for word in ("gloo/transport", "NCCL error"))
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and of_backend)


def _is_of_memory(error: BaseException) -> bool:
    import torch

    text = str(error).lower()
    of_torch = isinstance(error, RuntimeError) and any(word in text for word in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or of_torch
