"""One malformed input: files to lay out, a command line, and the process that tries them.

Each case runs in a forked child with limits on time and memory, so that a hang, a crash of the
interpreter or a greedy allocation counts against its own case.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")

MEMORY = 6 << 30
"""Bytes of address space that a case may take besides what its parent has."""
LARGE = 1 << 18
PATIENCE = 20
"""Longest time of a case in multiples of its limit, which is one of CPU time."""
FIXES = re.compile(r"^  fix: +\S|^Try '.+ (--help|-h)'", re.MULTILINE)
"""An error's way out: ours, or that of an unknown option."""


def pick(draw: st.DrawFn, choices: Sequence[T]) -> T:
    """Draw one of several."""
    return draw(st.sampled_from(choices))


class Link(NamedTuple):
    """A symbolic link."""

    target: str


class Repeated(NamedTuple):
    """Bytes too many to write down."""

    head: bytes
    unit: bytes
    count: int
    tail: bytes = b""


class Folder(NamedTuple):
    """An empty folder where a file is expected."""


class Gone(NamedTuple):
    """A file of the copied folder that is removed."""


class Pipe(NamedTuple):
    """A named pipe, which nobody writes to."""


Content = bytes | Link | Repeated | Folder | Gone | Pipe


@dataclass(frozen=True)
class Case:
    """A command line over files.

    Attributes:
        kind: row of the table.
        words: arguments of `python -m finetune`.
        files: path in an empty working folder -> content.
        copies: path there -> name of a prepared folder (`tests.bad_inputs.prepared`).
        tolerant: the command may also end well, leaving out what it cannot read.
        needs_torch: a check of this case reads weights, rows or settings of trainers.
    """

    kind: str
    words: tuple[str, ...]
    files: dict[str, Content] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    tolerant: bool = False
    needs_torch: bool = True

    def lay_out(self, folder: Path, prepared: dict[str, Path]) -> None:
        """Write the files of the case into an empty folder."""
        for name, source in self.copies.items():
            shutil.copytree(prepared[source], folder / name, copy_function=_link_or_copy)
        for name, content in self.files.items():
            _write(folder / name, content)

    def __str__(self) -> str:
        shown = {name: _shown(content) for name, content in self.files.items()}
        return f"{' '.join(map(repr, self.words))}  {shown or ''}{self.copies or ''}"


def _link_or_copy(source: str, target: str) -> None:
    """A second name for weights, which no command writes in place; a copy of everything else."""
    if os.path.getsize(source) > LARGE:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _shown(content: Content) -> str:
    text = repr(content)
    return text if len(text) <= 200 else f"{text[:120]}... ({len(text)})"


def _write(file: Path, content: Content) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)  # a prepared file has a second name here
    match content:
        case Link(target):
            file.symlink_to(target)
        case Folder():
            file.mkdir()
        case Pipe():
            os.mkfifo(file)
        case Repeated(head, unit, count, tail):
            file.write_bytes(head + unit * count + tail)
        case bytes():
            file.write_bytes(content)


@dataclass(frozen=True)
class Outcome:
    """The end of a case.

    Attributes:
        code: exit code; None of a process that was killed for its time or by a signal.
        seconds: CPU time of the process.
        left: a run folder was left behind by a command that ended in an error.
        torch: torch was imported, by a case that needs none.
    """

    case: Case
    code: int | None
    out: str
    err: str
    seconds: float
    crashed: bool = False
    left: bool = False
    torch: bool = False

    @property
    def hung(self) -> bool:
        return self.code is None and not self.crashed

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err

    @property
    def no_help(self) -> bool:
        """A message without a fix."""
        return self.code == 2 and not FIXES.search(self.err)

    @property
    def wrong_code(self) -> bool:
        allowed = (0, 2) if self.case.tolerant else (2,)
        return self.code is not None and self.code not in allowed

    @property
    def faults(self) -> list[str]:
        names = ("wrong_code", "traceback", "crashed", "hung", "no_help", "left", "torch")
        return [name for name in names if getattr(self, name)]


def attempt(case: Case, folder: Path, prepared: dict[str, Path], limit: float) -> Outcome:
    """Try a case in a forked process, in `folder`, which is made and removed.

    Args:
        limit: seconds of CPU time after which the process is killed.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    case.lay_out(work, prepared)
    before = set(_run_folders(work))
    sys.stdout.flush()
    sys.stderr.flush()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(case, work, folder, limit)
    status, seconds = _wait(child, begun + PATIENCE * limit)
    signaled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if signaled is not None else os.waitstatus_to_exitcode(status)
    found = Outcome(
        case,
        code,
        (folder / "out").read_text("utf-8", "replace"),
        (folder / "err").read_text("utf-8", "replace"),
        seconds,
        crashed=signaled not in (None, signal.SIGKILL, signal.SIGXCPU),
        left=bool(code) and bool(set(_run_folders(work)) - before),
        torch=not case.needs_torch and (folder / "torch").exists(),
    )
    shutil.rmtree(folder)
    return found


def _run_folders(work: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (file.parent for file in work.glob("runs/*/*/config.yaml"))


def _run(case: Case, work: Path, folder: Path, limit: float) -> None:
    """The child: its output goes to files, and it never returns."""
    code, had_torch = 1, "torch" in sys.modules
    try:
        os.setsid()
        os.chdir(work)
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
        code = _exit_code(case.words)
        if "torch" in sys.modules and not had_torch:
            (folder / "torch").touch()
    except BaseException:  # noqa: BLE001  whatever it is: a traceback is what is counted
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_code(words: tuple[str, ...]) -> int:
    from finetune.cli.app import main

    sys.argv = ["finetune", *words]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _wait(child: int, end: float) -> tuple[int, float]:
    """Status of a child, killed if it does not end in time, and its CPU seconds."""
    pause = 0.001
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            return status, used.ru_utime + used.ru_stime
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
