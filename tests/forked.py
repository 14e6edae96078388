"""Commands of the package for tests, forked from a process that has imported the libraries.

Imports are most of what a start takes: of 30 CPU-seconds for a tiny run a forked one takes 6. Each
command is still a process of its own: it can be killed, and several can be the ranks of one run.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

LIBRARIES = ("peft", "trl.trainer.sft_trainer", "finetune.training.run.run", "finetune.api")
PATIENCE = 300.0
"""Seconds after which a process that has not ended is killed."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(LIBRARIES))


def start(
    folder: Path,
    *words: str,
    log: str = "log.txt",
    before: Callable[[], None] | None = None,
    **environment: str,
) -> BaseProcess:
    """`python -m finetune WORDS` in a folder, its output appended to a file there.

    Args:
        before: called in the process before the command.
        environment: further variables.
    """
    environment = {"HF_HUB_OFFLINE": "1", "COLUMNS": "1000", **environment}
    process = _context.Process(target=_command, args=(folder, words, log, before, environment))
    process.start()
    return process


def _command(
    folder: Path,
    words: tuple[str, ...],
    log: str,
    before: Callable[[], None] | None,
    environment: dict[str, str],
) -> None:
    import torch

    from finetune.cli.app import main

    torch.set_num_threads(1)
    os.environ.update(environment)
    output = os.open(folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    if before is not None:
        before()
    sys.argv = ["finetune", *words]
    main()


def start_ranks(
    folder: Path, *words: str, processes: int, before: Callable[[], None] | None = None
) -> list[BaseProcess]:
    """One command as the processes of one run, as `torchrun` starts them; logs are `RANK.txt`."""
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port = str(opened.getsockname()[1])
    count = str(processes)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return [
        start(folder, *words, log=f"{rank}.txt", before=before, **common, **_rank(rank))
        for rank in range(processes)
    ]


def _rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def ended(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Exit codes, once all have ended; -9 of one that was too slow."""
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]
