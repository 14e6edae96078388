"""Scores predictions against a file of measurements, one kind of memory at a time.

    board = score_csv("measured_runs.csv")
    print_board(board, Console())
    board.to_json()         # the same, with every row

Every row of the file is in exactly one place: scored in one class, an out-of-memory verdict, or
unscored with its reason. Classes are never mixed:

* *allocated, Transformers path*: bytes of tensors under the Trainer, TRL, PEFT;
* *reserved, fixed length* and *reserved, dynamic length*: what the allocator took; with lengths
  that vary, the longest batch rules and its length is often not published.

Beside it stands, on the same rows, `accelerate estimate-memory`. Rows that were held out while all
this was made (`rows.held_out`) are scored apart.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RunFailedError
from finetune.logging import quiet_libraries
from tests.benchmarks.score.jobs import Job, Mapped, gpu_of, map_row
from tests.benchmarks.score.rows import Row, held_out, read_rows

CLASSES = (
    "allocated, Transformers path",
    "reserved, fixed length",
    "reserved, dynamic length",
)
UNDER = -0.02
"""Beyond this a prediction counts as under."""


@dataclass(frozen=True)
class Scored:
    """One row and its predictions, in 10^9 bytes; a baseline is None where it has no answer.

    `refused`: it ran, and was predicted not to fit its GPU; None where that is not known.
    """

    id: str
    line: int
    group: str
    family: str
    held_out: bool
    measured: float
    predicted: float
    where: str
    accelerate: float | None
    refused: bool | None = None

    @property
    def error(self) -> float:
        """Signed, relative."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Verdict:
    """A row that ran out of memory: was that foreseen?"""

    id: str
    line: int
    family: str
    held_out: bool
    right: bool
    predicted: float


@dataclass(frozen=True)
class Unscored:
    """A row without a score, and why."""

    id: str
    line: int
    held_out: bool
    reason: str


@dataclass(frozen=True)
class Statistics:
    """Of absolute relative errors, but `under` and `lowest`, which look at the sign.

    Attributes:
        under: share of predictions under by more than 2 %.
        lowest: the most a prediction is under; 0 when none is.
    """

    count: int
    median: float
    p90: float
    p95: float
    worst: float
    under: float
    lowest: float


def statistics(errors: Iterable[float]) -> Statistics | None:
    """Of signed relative errors; None of none. Quantiles are the smallest error that covers
    them."""
    signed = list(errors)
    if not signed:
        return None
    sizes = sorted(abs(e) for e in signed)

    def quantile(q: float) -> float:
        return sizes[min(len(sizes) - 1, max(0, -int(-q * len(sizes) // 1) - 1))]

    return Statistics(
        count=len(sizes),
        median=quantile(0.5),
        p90=quantile(0.9),
        p95=quantile(0.95),
        worst=sizes[-1],
        under=sum(e < UNDER for e in signed) / len(signed),
        lowest=min(0.0, *signed),
    )


@dataclass(frozen=True)
class Scoreboard:
    """All rows of a file, each in one place."""

    file: str
    rows: int
    scored: tuple[Scored, ...]
    verdicts: tuple[Verdict, ...]
    unscored: tuple[Unscored, ...]

    def of(self, group: str, *, apart: bool) -> list[Scored]:
        """Scored rows of a class, those held out or the others."""
        return [s for s in self.scored if s.group == group and s.held_out is apart]

    def table(self, *, apart: bool) -> dict[str, dict[str, Statistics | None]]:
        """Class -> who predicts -> statistics. The baselines are scored where they answer."""
        table: dict[str, dict[str, Statistics | None]] = {}
        for group in CLASSES:
            rows = self.of(group, apart=apart)
            table[group] = {
                "traced": statistics(s.error for s in rows),
                "accelerate": statistics(
                    s.accelerate / s.measured - 1 for s in rows if s.accelerate is not None
                ),
            }
        return table

    def right(self, *, apart: bool) -> tuple[int, int]:
        """Out-of-memory rows foreseen, and all of them."""
        rows = [v for v in self.verdicts if v.held_out is apart]
        return sum(v.right for v in rows), len(rows)

    def false_alarms(self, *, apart: bool) -> tuple[int, int]:
        """Rows that ran and were predicted not to fit, and all that ran on a known GPU."""
        known = [s.refused for s in self.scored if s.held_out is apart and s.refused is not None]
        return sum(known), len(known)

    def reasons(self) -> dict[str, int]:
        """Why rows are unscored, the most frequent first."""
        counts: dict[str, int] = {}
        for row in self.unscored:
            counts[row.reason] = counts.get(row.reason, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        """Plain data: statistics of both parts, and every row."""
        parts = {}
        for name, apart in (("developed_on", False), ("held_out", True)):
            right, count = self.right(apart=apart)
            parts[name] = {
                "classes": {
                    group: {who: asdict(s) if s else None for who, s in line.items()}
                    for group, line in self.table(apart=apart).items()
                },
                "out_of_memory": {"right": right, "rows": count},
                "ran_but_refused": dict(
                    zip(("rows", "of"), self.false_alarms(apart=apart), strict=True)
                ),
            }
        return {
            "file": self.file,
            "rows": self.rows,
            **parts,
            "scored": [{**asdict(s), "error": s.error} for s in self.scored],
            "verdicts": [asdict(v) for v in self.verdicts],
            "unscored": [asdict(u) for u in self.unscored],
        }


Result = Scored | Verdict | Unscored


def score_csv(
    path: str | Path,
    *,
    progress: Callable[[str], None] | None = None,
    baselines: bool = True,
    processes: int = 0,
    only: Callable[[Mapped], bool] | None = None,
) -> Scoreboard:
    """Predict every row of a file that can be mapped.

    Args:
        path: a csv file, see `rows`.
        progress: called with a line after each group of rows.
        baselines: also ask `accelerate`.
        processes: that share the work; 0: this one does it. Rows of one job are one piece of work.
        only: rows to look at; all, if left out.

    Raises:
        DataNotFoundError, ConfigError: the file is not there or not of that form.
        RunFailedError: a worker died; names the rows it may have been at.
    """
    rows = [m for m in map(map_row, read_rows(path)) if only is None or only(m)]
    batches: dict[Job | None, list[Row]] = {}
    for mapped in rows:
        batches.setdefault(mapped.job, []).append(mapped.row)
    work = _in_turn if processes == 0 else _in_workers
    placed: dict[str, Result] = {}
    for results in work(list(batches.values()), baselines, processes):
        placed |= {result.id: result for result in results}
        if progress is not None:
            progress(f"{len(placed)} of {len(rows)} rows")
    ordered = [placed[mapped.row.id] for mapped in rows]
    return Scoreboard(
        str(path),
        len(rows),
        tuple(r for r in ordered if isinstance(r, Scored)),
        tuple(r for r in ordered if isinstance(r, Verdict)),
        tuple(r for r in ordered if isinstance(r, Unscored)),
    )


def _in_turn(batches: list[list[Row]], baselines: bool, _: int) -> Iterator[list[Result]]:
    for batch in batches:
        yield place(batch, baselines)


def _in_workers(
    batches: list[list[Row]], baselines: bool, processes: int
) -> Iterator[list[Result]]:
    """As many batches at a time as there are workers, so that a death can be traced to a row."""
    # A fork of a process with threads (torch has some) may hang.
    context = multiprocessing.get_context("spawn")
    waiting = batches[::-1]
    running: dict[Future[list[Result]], list[Row]] = {}
    with ProcessPoolExecutor(processes, context, quiet_libraries) as workers:
        while waiting or running:
            while waiting and len(running) < processes:
                batch = waiting.pop()
                running[workers.submit(place, batch, baselines)] = batch
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            try:
                for future in done:
                    yield future.result()
            except BrokenProcessPool:
                rows = ", ".join(
                    f"{row.id} (line {row.line})" for b in running.values() for row in b
                )
                raise RunFailedError(
                    "a process that scores rows has died",
                    where=f"one of: {rows}",
                    why="it was killed from outside, as for want of memory, or crashed",
                    fix="fewer --processes; with 0 the rows are scored in turn, in this process",
                ) from None
            for future in done:
                del running[future]


def place(rows: list[Row], baselines: bool) -> list[Result]:
    """Predict some rows, or say why they are not."""
    found: list[Result] = []
    for row in rows:
        result = _judge(map_row(row), baselines=baselines)
        if isinstance(result, str):
            result = Unscored(row.id, row.line, held_out(row.id), result)
        found.append(result)
    return found


def _group(mapped: Mapped) -> str:
    kind = mapped.row.mem_kind
    if kind == "allocated":
        return "allocated, Transformers path"
    return "reserved, dynamic length" if mapped.dynamic else "reserved, fixed length"


def _judge(mapped: Mapped, *, baselines: bool) -> Scored | Verdict | str:
    row, job = mapped.row, mapped.job
    if job is None:
        return mapped.reason
    gpu = gpu_of(row.gpu)
    if row.out_of_memory and gpu is None:
        return f"out of memory on a GPU that is not known: {row.gpu!r}"
    if row.peak_gb is None and not row.out_of_memory:
        return "no memory was measured"
    if row.peak_gb is not None and row.mem_kind not in ("allocated", "reserved"):
        return f"kind of memory is {row.mem_kind or 'not said'}: not scored"
    from tests.benchmarks.score.memory import CannotRunError, memory_of, overflow

    try:
        if row.peak_gb is None:
            assert gpu is not None
            size = overflow(job, gpu)
            right = size is not None
            apart = held_out(row.id)
            return Verdict(row.id, row.line, mapped.family, apart, right, (size or 0) / 1e9)
        found = memory_of(job, whole=row.mem_kind == "reserved")
        refused = None
        if gpu is not None and row.mem_kind == "allocated":
            refused = overflow(job, gpu) is not None
    except CannotRunError as error:
        return str(error)
    predicted = found.allocated if row.mem_kind == "allocated" else found.reserved
    return Scored(
        id=row.id,
        line=row.line,
        group=_group(mapped),
        family=mapped.family,
        held_out=held_out(row.id),
        measured=row.peak_gb,
        predicted=predicted / 1e9,
        where=found.phase,
        accelerate=_accelerate(job) if baselines else None,
        refused=refused,
    )


def _accelerate(job: Job) -> float:
    from tests.benchmarks.score.baselines import accelerate_gb

    return accelerate_gb(job.shape, "float32" if job.float32_shards else "bfloat16")
