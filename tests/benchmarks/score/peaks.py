"""The allocated peak of a job without running all of its layers.

Layers are alike, so each stretch of a step (the forward of the first layer, the loss, the backward
of the last layer, the optimizer, ...) has a peak that grows by the same bytes with every layer. Two
short models give both numbers for every stretch; the peak of the whole is the highest. Only the
first three and the last two layers have to be looked at: between them the peak goes straight.

Tapes are also straight in the batch, kernel by kernel. Nothing here is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from finetune.estimator.trace.trace import Tape
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.shapes import shape_of
from tests.benchmarks.score.simulate import record_step

_SHORT, _LONG = 4, 6


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak, and the stretch of the step it is in."""

    nbytes: int
    where: str
    held: int


def stretches(tape: Tape, layers: int) -> dict[str, int]:
    """Peak of each stretch of a step, layers counted from both ends."""
    marks = sorted(tape.marks.items(), key=lambda mark: mark[1])
    alive = list(accumulate((e.nbytes for e in tape.events), initial=tape.held_bytes))
    starts = [0, *(at for _, at in marks), len(alive) - 1]
    found: dict[str, int] = {}
    for k, name in enumerate(["start", *(name for name, _ in marks)]):
        label = name
        if name[1:].isdigit():
            i = int(name[1:])
            if 3 <= i < layers - 1:
                continue
            label = f"{name[0]}{i}" if i < 3 else f"{name[0]}-{layers - i}"
        found[label] = max(found.get(label, 0), *alive[starts[k] : starts[k + 1] + 1])
    return found


@lru_cache(maxsize=1024)
def allocated_peak(job: Job) -> Peak:
    """The most bytes of tensors alive in a steady step of `job`."""
    count = shape_of(job.shape).l
    short, long = record_step(job, _SHORT)[0], record_step(job, _LONG)[0]
    less, more = stretches(short, _SHORT), stretches(long, _LONG)

    def extended(a: int, b: int) -> int:
        return a + (b - a) * (count - _SHORT) // (_LONG - _SHORT)

    peaks = {name: extended(value, more[name]) for name, value in less.items() if name in more}
    where = max(peaks, key=lambda name: peaks[name])
    return Peak(peaks[where], where, extended(short.held_bytes, long.held_bytes))
