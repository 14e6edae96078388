"""Output to a terminal or a pipe: our consoles, signs of life, and libraries kept quiet."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import io
import json
import logging
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from finetune.errors import first_line

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, Group
    from rich.status import Status
    from rich.table import Table


PIPE_WIDTH = 1000
"""Columns of an output that is no terminal: a row of a table, or a sentence, is one line there."""


def output(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that wraps lines between words in a terminal, and nowhere in a pipe or file.

    What it prints is text: markup would drop the `[te]` of what is to be installed, and of paths.
    """
    fit_streams()
    console = safe_console(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not console.is_jupyter and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


class _Dropping:
    """A stream of which lines are dropped that cannot be written, with a note of the first."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.lost, self.note = stream, "", None

    def say_in(self, folder: Path) -> None:
        """Note what is lost, and was until now, in a folder."""
        self.note = folder / "output-lost.txt"
        if self.lost:
            self.note.write_text(self.lost, encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, method: Any, *words: str) -> Any:
        try:
            return method(*words)
        except BrokenPipeError:  # nobody reads any more: the run stops (`GracefulStop`)
            raise
        except OSError as error:
            if not self.lost:
                said = f"the output could not be written ({error}): lines are dropped from here on"
                self.lost = f"{said}; metrics.jsonl has the losses\n"
                if self.note is not None:
                    self.note.write_text(self.lost, encoding="utf-8")
            return None


@contextlib.contextmanager
def keeps_going(console: Console, *, prints: bool) -> Iterator[_Dropping]:
    """Let a run train on where its output's disk is full; `prints`: also where rewards print."""
    stream, kept = console.file, _Dropping(console.file)
    console.file = kept  # pyright: ignore
    try:
        with contextlib.redirect_stdout(kept) if prints and stream is sys.stdout else nullcontext():  # pyright: ignore
            yield kept
    finally:
        console.file = stream


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys, and those that turn the direction of text around."""


def safe_console(**settings: Any) -> Console:
    """A console that shows control characters of what it prints as text, such as `\\x1b`."""
    from rich.console import Console
    from rich.segment import Segment

    def as_text(found: re.Match[str]) -> str:
        return found[0].encode("unicode_escape").decode()

    class SafeConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            """Rich's, whose own colors are put around the text later."""
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else CONTROLS.sub(as_text, text), style, control)

    return SafeConsole(**settings)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """JSON's escapes of letters that an output's encoding lacks: a document of JSON stays one."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("finetune.escaped", _escaped)


def fit_streams() -> None:
    """Let standard output and error take any text: a letter must not end a run.

    Outside UTF-8 (`LANG=C` in a job, `PYTHONIOENCODING`) Python raises at the first letter that the
    encoding lacks, such as one of a sample answer. A closed stream (`>&-`) is None.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):
            stream.reconfigure(errors="finetune.escaped")


@contextlib.contextmanager
def json_alone(wanted: bool) -> Iterator[None]:
    """Keep standard output for a document of JSON, where one is wanted.

    Trackers print there when a run begins (trackio), and from a process of their own when ours ends
    (wandb 0.31): that goes to standard error.
    """
    if not wanted:
        yield
        return
    number, kept = 1, None
    with contextlib.suppress(OSError, ValueError):  # a notebook's output has no number
        if sys.stdout.fileno() == number:
            sys.stdout.flush()
            kept = os.dup(number)
            os.dup2(2, number)  # also of processes that are started now
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, number)
            os.close(kept)
        # Exit functions run in reverse order: this one before those made inside.
        atexit.register(lambda: setattr(sys, "stdout", sys.stderr))


def busy(console: Console, what: str) -> AbstractContextManager[Status | None]:
    """A sign of life in a terminal while something slow runs: what it is, and a spinner."""
    from rich.text import Text

    return console.status(Text(f"{what} ...")) if console.is_terminal else nullcontext()


def whole(line: str, style: str = "") -> Group:
    """A line with a path or command to copy, to be printed with `crop=False`: never wrapped.

    A console joins texts that it prints (rich 15), and wraps what comes of it; not so a group.
    """
    from rich.console import Group
    from rich.text import Text

    return Group(Text(line, style=style, no_wrap=True, overflow="ignore"))


def as_text(thing: Any) -> str:
    """What a console shows of an object with `__rich__`, without colors: for its `__str__`."""
    from io import StringIO

    from rich.console import Console

    shown = StringIO()
    plain: Any = {"highlight": False, "markup": False, "emoji": False}
    Console(file=shown, width=output().width, **plain).print(thing)
    return "\n".join(line.rstrip() for line in shown.getvalue().strip("\n").splitlines())


def plain_table(
    *titles: str,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    fold: Collection[str] = (),
    gap: int = 2,
    **options: Any,
) -> Table:
    """A table without lines, its columns `gap` spaces apart, whose cells are text in notebooks too.

    Args:
        right, whole, fold: titles of columns that are right-aligned, never wrapped, or broken
            anywhere.
        options: of `rich.table.Table`.
    """
    from rich.table import Column, Table
    from rich.text import Text

    class Plain(Table):
        def add_row(self, *cells: Any, **options: Any) -> None:
            texts = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
            super().add_row(*texts, **options)

    columns = (
        Column(
            title,
            justify="right" if title in right else "left",
            no_wrap=title in whole,
            overflow="fold" if title in fold else "ellipsis",
        )
        for title in titles
    )
    return Plain(*columns, box=None, pad_edge=False, padding=(0, gap, 0, 0), **options)


def print_rows(
    console: Console,
    rows: Sequence[dict[str, Any]],
    *,
    right: Collection[str] = (),
    least: int | None = None,
    gap: int = 2,
) -> None:
    """Print rows as a table with their keys for titles, and no cell broken in two.

    Where a terminal is too narrow, columns behind the first `least` (None: all) are left out; where
    these do not fit either, a row is its first cell, whole, and then the rest:

        tiny_full
          fp8 ≥GiB 0.7, bf16 ≥GiB 0.7
    """
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.text import Text

    titles, width = list(rows[0]), -gap
    fitting = list[str]()
    for title in titles:
        width += gap + max(map(cell_len, [*title.split(), *(str(row[title]) for row in rows)]))
        fitting += [title] if width <= console.width else []
    if len(fitting) >= (least or len(titles)):
        unbroken = [title for title in fitting if title not in right]
        table = plain_table(*fitting, right=right, whole=unbroken, gap=gap)
        for row in rows:
            table.add_row(*(row[title] for title in fitting))
        console.print(table)
        return
    for row in rows:
        (_, name), *others = row.items()
        console.print(whole(str(name)), crop=False)
        facts = (Text.assemble(f"{title} ", cell) for title, cell in others)
        console.print(Padding(Text(", ").join(facts), (0, 0, 0, 2), expand=False))


HIDDEN = (FutureWarning, DeprecationWarning)
HIDDEN_WARNINGS: Counter[str] = Counter()
"""Warnings that users do not see: what a library is going to change, for those who call it."""
LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(__file__))
"""Parts of the paths of code that a script does not change."""


def quiet_libraries() -> None:
    """For a process whose output people read. Before the libraries are imported.

    Warnings of `HIDDEN` kinds are counted instead of shown; the receipt has them.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Reports of TRL and of the hub's library, and the hub's count of loads of each data set: no
    # connection is made unless a hub name or a tracker is configured.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    for name in ("accelerate", "trl", "lm_eval", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs the error that it raises, which stands in ours.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    for category in HIDDEN:
        warnings.filterwarnings("default", category=category)  # once per line of code
    quiet_imports(bars=False, paths=("",))


def quiet_imports(*, bars: bool = True, paths: tuple[str, ...] = LIBRARIES) -> None:
    """For a script, before the libraries are imported: what they say about themselves is not shown.

    What they say about the script, in its training too, is.

    Args:
        bars: show bars of loading and mapping.
        paths: parts of the paths of code whose `HIDDEN` warnings are counted, not shown.
    """
    if not bars:
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # Transformers', too
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    others = warnings.showwarning

    def show(message: Any, category: type[Warning], file: str, *where: Any, **more: Any) -> None:
        if not issubclass(category, HIDDEN) or not any(part in file for part in paths):
            others(message, category, file, *where, **more)
            return
        HIDDEN_WARNINGS[f"{category.__name__}: {first_line(message)}"] += 1

    warnings.showwarning = show


COUNT_PERIOD, COUNT_PERIOD_OF_LINES = 0.2, 15.0
"""Seconds between two counts, in a terminal and in a pipe, where each is a line."""


@contextlib.contextmanager
def counting_rows(console: Console, what: str) -> Iterator[None]:
    """A sign of life that counts the rows which `datasets` reads or maps meanwhile.

    `datasets` (5.0) counts in bars of one class, also for the processes that it starts, and TRL's
    maps are among them; while this lasts the class is one that reports here.
    """
    from datasets import arrow_dataset, builder
    from rich.text import Text
    from tqdm import tqdm

    with busy(console, what) as status:
        period = COUNT_PERIOD_OF_LINES if status is None else COUNT_PERIOD

        class Counter(tqdm):
            """A bar that shows nothing itself."""

            def __init__(self, *args: Any, desc: str | None = None, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs | {"disable": True})
                self.label = (desc or "rows").partition(" (num_proc")[0].lower()
                self.began = self.shown = time.monotonic()

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0
                now = time.monotonic()
                if now - self.shown < period:
                    return
                self.shown = now
                of = f" of {int(self.total):,}" if self.total else ""
                rate = self.n / (now - self.began)
                line = f"{self.label}: {int(self.n):,}{of} rows, {rate:,.0f} rows/s"
                if status is None:
                    console.print(line)
                else:
                    status.update(Text(f"{what}: {line} ..."))

        modules: list[Any] = [arrow_dataset, builder]
        before = [module.hf_tqdm for module in modules]
        for module in modules:
            module.hf_tqdm = Counter
        try:
            yield
        finally:
            for module, bar in zip(modules, before, strict=True):
                module.hf_tqdm = bar
