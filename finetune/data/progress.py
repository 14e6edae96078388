"""Progress of rows that are read, converted and tokenized: how many are done, and how fast."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.logging import busy

if TYPE_CHECKING:
    from rich.console import Console

PERIOD = {True: 0.2, False: 15.0}
"""Seconds between two counts, in a terminal and in a pipe, where each is a line."""


@contextlib.contextmanager
def counting_rows(console: Console, what: str) -> Iterator[None]:
    """A sign of life that counts the rows which `datasets` reads or maps meanwhile.

    `datasets` (5.0) counts in bars of one class, also for the processes that it starts, and TRL's
    maps are among them; while this lasts the class is one that reports here.
    """
    from datasets import arrow_dataset, builder

    with busy(console, what) as status:

        def show(line: str) -> None:
            if status is None:
                console.print(line)
            else:
                status.update(f"{what}: {line} ...")

        counter = _counter(show, PERIOD[status is not None])
        modules: list[Any] = [arrow_dataset, builder]
        before = [module.hf_tqdm for module in modules]
        for module in modules:
            module.hf_tqdm = counter
        try:
            yield
        finally:
            for module, bar in zip(modules, before, strict=True):
                module.hf_tqdm = bar


def _counter(show: Any, period: float) -> Any:
    """The class of a bar that shows nothing itself."""
    from tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, desc: str | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})
            self.label = (desc or "rows").partition(" (num_proc")[0].lower()
            self.began = self.shown = time.monotonic()

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            now = time.monotonic()
            if now - self.shown >= period:
                self.shown = now
                show(line_of(self.label, int(self.n), self.total, self.n / (now - self.began)))

    return Counter


def line_of(label: str, done: int, known: float | None, rate: float) -> str:
    """`tokenizing train dataset: 12,000 of 100,000 rows, 850 rows/s`."""
    of = f" of {int(known):,}" if known else ""
    return f"{label}: {done:,}{of} rows, {rate:,.0f} rows/s"
