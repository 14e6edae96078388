"""What would fit: the largest micro-batch, and the longest rows.

Memory grows with rows and with their length, so the largest that fits has a neighbour that does
not, and both are measured: the answer is a pair of neighbours, never a formula's guess. The way
there is short, because the sum is known to be nearly a polynomial: an activation is linear in
tokens, a mask of packed rows quadratic. So two or three points foretell the answer, and the rest
confirm it.

Every point is a rehearsal of the model's first layers (`measure_fast`).

"Fits" means with margin. Fragments are a guess here, so that a whole `estimate` of what was found
can call it tight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.estimator.knobs import rows_of, setting
from finetune.estimator.measure import (
    Measured,
    check_sizes,
    measure_fast,
)
from finetune.estimator.memory.footprint import Footprint
from finetune.estimator.place import Place
from finetune.training.model import load_shape

MOST_TOKENS = 2**20
"""In a micro-batch; beyond it nothing is looked for."""
LENGTHS = 128
"""Step between row lengths that are looked at, where the model can take many of it."""
BISECT_AFTER = 5
"""Points after which a guess is no longer trusted, and the middle is taken."""


@dataclass(frozen=True)
class Found:
    """The largest value of one setting that fits.

    Attributes:
        setting: as typed, `train.per_device_train_batch_size`.
        value: 0 where not even the smallest fits.
        next: the next larger value, which does not fit; None where `value` is as far as it goes.
        measured: the run with `value`; None where nothing fits.
        points: values that were measured.
        others: what was set besides, as typed.
    """

    setting: str
    value: int
    next: int | None
    measured: Measured | None
    points: int
    others: tuple[str, ...] = ()

    @property
    def change(self) -> tuple[str, ...]:
        """As typed behind the recipe."""
        return (f"{self.setting}={self.value}", *self.others)

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        pace = self.measured.pace if self.measured else None
        return {
            "setting": self.setting,
            "largest": self.value,
            "too_large": self.next,
            "change": list(self.change) if self.value else None,
            "allocated_bytes": self.measured.footprint.allocated if self.measured else None,
            "tokens_per_s_and_device": pace.tokens_per_s if pace else None,
            "points": self.points,
        }

    def __rich__(self) -> RenderableType:
        if self.measured is None:
            return Text(f"{self.setting}: not even the smallest fits", "bold red")
        pace = self.measured.pace
        speed = f", {pace.tokens_per_s:,.0f} tokens/s" if pace else ""
        end = f"{self.next} does not fit" if self.next else "nothing larger was looked at"
        held = self.measured.footprint.shown / 2**30
        return Text.assemble(
            (" ".join(self.change), "bold green"), f" ({held:.1f} GiB{speed}; {end})"
        )


@dataclass(frozen=True)
class Largest:
    """How far a run can be stretched at a place.

    Attributes:
        rows: of a micro-batch, at the run's length.
        length: of a row, at the run's micro-batch.
        length_of_one: of a row that is alone in its micro-batch.
    """

    rows: Found
    length: Found
    length_of_one: Found

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {name: found.facts() for name, found in vars(self).items()}

    def __rich__(self) -> RenderableType:
        alone = () if self.length_of_one == self.length else (self.length_of_one.__rich__(),)
        return Group(
            Text("the largest that fits"), self.rows.__rich__(), self.length.__rich__(), *alone
        )


def largest(config: RunConfig, place: Place) -> Largest:
    """The largest micro-batch and the longest rows that fit.

    Raises:
        FinetuneError: what the run itself would raise.
    """
    rows, _ = rows_of(config)
    length = largest_length(config, place)
    alone = length if rows == 1 else largest_length(config, place, rows=1)
    return Largest(largest_rows(config, place), length, alone)


def largest_rows(config: RunConfig, place: Place) -> Found:
    """The largest micro-batch that fits at the run's length.

    Raises:
        FinetuneError: what the run itself would raise.
    """
    check_sizes(config)
    rows, _ = rows_of(config)
    most = max(rows, MOST_TOKENS // int(setting(config, "max_length")))
    return _largest("train.per_device_train_batch_size", config, place, rows, 1, most)


def largest_length(config: RunConfig, place: Place, rows: int | None = None) -> Found:
    """The longest rows that fit, in steps of 128 (16, for a model that takes less than 2048).

    Args:
        config: the run.
        place: where.
        rows: of a micro-batch, those of the run unless given.

    Raises:
        FinetuneError: what the run itself would raise.
    """
    others = () if rows is None else (f"train.per_device_train_batch_size={rows}",)
    config = with_overrides(config, others) if others else config
    check_sizes(config)
    asked, most = int(setting(config, "max_length")), MOST_TOKENS // rows_of(config)[0]
    shape = load_shape(config.model).get_text_config(decoder=True)
    most = min(most, getattr(shape, "max_position_embeddings", None) or most)
    step = LENGTHS if most >= 16 * LENGTHS else 16
    found = _largest("train.max_length", config, place, asked, min(step, most), max(asked, most))
    return replace(found, others=others)


def _largest(name: str, config: RunConfig, place: Place, asked: int, step: int, most: int) -> Found:
    """Search among the multiples of `step` up to `most`, from what was asked on."""
    found = search(
        lambda n: measure_fast(with_overrides(config, (f"{name}={n * step}",)), place),
        place.memory_bytes,
        start=max(1, asked // step),
        most=max(1, most // step),
    )
    return replace(
        found, setting=name, value=found.value * step, next=found.next and found.next * step
    )


def search(measure: Callable[[int], Measured], memory: int, *, start: int, most: int) -> Found:
    """The largest n of 1 to `most` that fits into so many bytes, and the next, which does not.

    Args:
        measure: the run with n.
        memory: of one device.
        start: the first n to try.
        most: the largest.
    """
    seen: dict[int, Measured] = {}
    low, high, n, stuck = 0, most + 1, min(start, most), 0
    while True:
        seen[n] = measure(n)
        if seen[n].footprint.fit(memory) == "fits":
            low = n
        else:
            high = n
        if high - low <= 1:
            break
        held = {n: found.footprint for n, found in seen.items()}
        n = _guess(held, memory, low, high)
        if n <= low or n >= high:  # at the end of what is open: ever further from there
            n = low + 2**stuck if n <= low else high - 2**stuck
            stuck += 1
        n = min(max(n, low + 1), high - 1)
    return Found("", low, high if high <= most else None, seen.get(low), len(seen))


def _guess(held: dict[int, Footprint], memory: int, low: int, high: int) -> int:
    """Where the need should reach the memory.

    What is allocated is a polynomial, put through the nearest points; what comes on top of it,
    fragments among others, is taken to be as at the nearest.
    """
    if len(held) == 1:
        return 2 * low if low else high // 2
    if len(held) > BISECT_AFTER and high in held:
        return (low + high) // 2
    needs = {n: found.shown + found.margin for n, found in held.items()}
    nearest = sorted(needs, key=lambda n: (abs(needs[n] - memory), n))[:3]
    room = memory - needs[nearest[0]] + held[nearest[0]].allocated
    (a, ya), (b, yb), *rest = [(n, held[n].allocated - room) for n in nearest]
    slope = (yb - ya) / (b - a)
    if rest:
        c, yc = rest[0]
        bend = ((yc - yb) / (c - b) - slope) / (c - a)
        # y(n) = ya + slope (n - a) + bend (n - a) (n - b), solved for its root above a.
        p = slope - bend * (a + b)
        under = p * p - 4 * bend * (ya - slope * a + bend * a * b)
        if bend > 0 and under >= 0:
            return math.floor((-p + math.sqrt(under)) / (2 * bend))
    return math.floor(a - ya / slope) if slope > 0 else 2 * max(low, 1)
