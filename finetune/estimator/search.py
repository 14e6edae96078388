"""What would fit: the largest micro-batch and row, the cheapest GPU, the smallest number of GPUs.

Memory grows with rows and with their length, so the largest that fits has a neighbour that does
not, and both are measured: the answer is a pair of neighbours, never a formula's guess. The way
there is short, because the sum is known to be nearly a polynomial: an activation is linear in
tokens, a mask of packed rows quadratic. So two or three points foretell the answer, and the rest
confirm it.

Every point is a rehearsal of the model's first layers (`measure_fast`). GPUs differ in memory and
speed, and a rehearsal knows neither: one serves all GPUs of one compute capability, and any number
of them.

"Fits" means with margin. Fragments are a guess here, so that a whole `estimate` of what was found
can call it tight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune.config import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.changes import SHARDED, rows_of, setting
from finetune.estimator.footprint import Fit, Footprint
from finetune.estimator.measure import (
    FirstLayers,
    Measured,
    check_sizes,
    measure_fast,
    rehearse_first_layers,
)
from finetune.estimator.place import Place, place_of, resolve_there
from finetune.gpus import Gpu, gpus_with_own
from finetune.model import load_shape, sketch
from finetune.recipe import with_overrides
from finetune.storage_checks import check_storage

MOST_TOKENS = 2**20
"""In a micro-batch; beyond it nothing is looked for."""
LENGTHS = 128
"""Step between row lengths that are looked at, where the model can take many of it."""
MOST_GPUS = 64
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


# -------------------------------------------------------------------------------------------- GPUs


@dataclass(frozen=True)
class Choice:
    """A run on one kind of GPU.

    Attributes:
        place: GPUs of one kind, so many of them.
        measured: memory and time there; None where the run cannot be had there.
        change: what it takes besides, as typed.
        why: why it cannot be had.
    """

    place: Place
    measured: Measured | None
    change: tuple[str, ...] = ()
    why: str = ""

    @property
    def fit(self) -> Fit:
        """Whether it fits; what cannot be had does not."""
        if self.measured is None:
            return "does not fit"
        return self.measured.footprint.fit(self.place.memory_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs together."""
        pace = self.measured.pace if self.measured else None
        return None if pace is None else pace.tokens_per_s * self.place.count

    @property
    def usd_per_million(self) -> float | None:
        """Of a million tokens; None without a price."""
        price = self.place.gpu.price_usd_per_hour if self.place.gpu else None
        if price is None or self.tokens_per_s is None:
            return None
        return price * self.place.count / 3600 / self.tokens_per_s * 1e6

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "device": str(self.place),
            "devices": self.place.count,
            "memory_bytes": self.place.memory_bytes,
            "fit": self.fit,
            "change": list(self.change),
            "allocated_bytes": self.measured.footprint.allocated if self.measured else None,
            "shown_bytes": self.measured.footprint.shown if self.measured else None,
            "tokens_per_s": self.tokens_per_s,
            "usd_per_million_tokens": self.usd_per_million,
            "why": self.why,
        }


@dataclass(frozen=True)
class Choices:
    """A run on several kinds or numbers of GPUs, the best first.

    Attributes:
        choices: those that fit, then those that are tight, then the others.
        order: what the order means.
    """

    choices: tuple[Choice, ...]
    order: str

    @property
    def best(self) -> Choice | None:
        """The first, if it fits."""
        first = self.choices[0] if self.choices else None
        return first if first is not None and first.fit == "fits" else None

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {"order": self.order, "choices": [choice.facts() for choice in self.choices]}

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=self.order,
                      title_justify="left")  # fmt: skip
        priced = any(choice.usd_per_million is not None for choice in self.choices)
        for name in ("GPU", "needs", "of", "", "tokens/s", *(["$ a million"] if priced else [])):
            table.add_column(name, justify="left" if name in ("GPU", "") else "right")
        for choice in self.choices:
            if choice.measured is None:
                table.add_row(str(choice.place), "-", "-", choice.why, style="dim")
                continue
            speed, cost = choice.tokens_per_s, choice.usd_per_million
            table.add_row(
                str(choice.place),
                f"{choice.measured.footprint.shown / 2**30:.1f}",
                f"{choice.place.memory_bytes / 2**30:.1f}",
                choice.fit,
                "?" if speed is None else f"{speed:,.0f}",
                *([f"{cost:.3f}" if cost is not None else ""] if priced else []),
                style=None if choice.fit == "fits" else "dim",
            )
        return table


_VERDICTS: tuple[Fit, ...] = ("fits", "tight", "does not fit")


def cheapest_gpu(config: RunConfig, *, gpus: tuple[Gpu, ...] | None = None) -> Choices:
    """A run on every GPU of the table: those that fit first, by what a million tokens cost.

    GPUs without a price come after those with one, the fastest first, and of equals the one with
    less memory.

    Args:
        config: the run.
        gpus: lines of the table; all, if left out.
    """
    check_sizes(config)
    seen: dict[Any, FirstLayers] = {}
    found = []
    for gpu in gpus_with_own() if gpus is None else gpus:
        place = place_of(gpu)
        try:
            found.append(Choice(place, _on(place, config, seen)))
        except FinetuneError as error:
            found.append(Choice(place, None, why=error.what))
    found.sort(key=_rank)
    priced = any(choice.usd_per_million is not None for choice in found)
    order = "the cheapest first" if priced else "those that fit, the fastest first; no prices known"
    return Choices(tuple(found), order)


def _on(place: Place, config: RunConfig, seen: dict[Any, FirstLayers]) -> Measured:
    """The run on a GPU; one rehearsal for all of one capability that compute in one precision."""
    resolution = resolve_there(config.precision, place)
    device = place.device
    key = (device.capability, device.is_rocm, resolution.precision.model_dump_json())
    if key not in seen:
        seen[key] = rehearse_first_layers(config, place)
    return replace(seen[key], resolution=resolution).at(place)


def _rank(choice: Choice) -> tuple[int, int, float, float]:
    """For sorting: verdict, then cost where it is known, then speed, then memory."""
    memory, cost, speed = choice.place.memory_bytes, choice.usd_per_million, choice.tokens_per_s
    if choice.measured is None:
        return len(_VERDICTS), 0, 0.0, memory
    verdict = _VERDICTS.index(choice.fit)
    if cost is not None:
        return verdict, 0, cost, memory
    return verdict, 1, -(speed or 0.0), memory


def fewest_gpus(config: RunConfig, gpu: str | Gpu, *, most: int = MOST_GPUS) -> Choices:
    """The smallest number of GPUs (1, 2, 4, 8, ...) on which a run fits, sharing it by FSDP2.

    Args:
        config: the run.
        gpu: which.
        most: the largest number to try.

    Returns:
        The numbers tried: the one that fits first, then those too small, downwards.

    Raises:
        FinetuneError: what the run itself would raise on one GPU.
    """
    check_sizes(config)
    place = place_of(gpu)
    alone = rehearse_first_layers(config, place)
    change = () if config.train.get("fsdp") else SHARDED
    tried: list[Choice] = []
    several: FirstLayers | None = None  # gathers weights, which one GPU does not
    while place.count <= most and not (tried and tried[-1].fit == "fits"):
        typed = (f"--gpus {place.count}", *change) if place.count > 1 else ()
        try:
            if place.count == 1:
                found = alone.at(place)
            else:
                several = several or _sharded(config, place, change)
                found = several.at(place)
            tried.append(Choice(place, found, typed))
        except FinetuneError as error:
            tried.append(Choice(place, None, typed, error.why or error.what))
            break
        place = place_of(gpu, gpus=2 * place.count)
    tried.reverse()
    tried.sort(key=lambda choice: choice.fit != "fits")
    fits = tried[0].fit == "fits"
    order = "the smallest number that fits" if fits else "none of these numbers fits"
    return Choices(tuple(tried), order)


def _sharded(config: RunConfig, place: Place, change: tuple[str, ...]) -> FirstLayers:
    """A rehearsal of one of several GPUs, whatever their number."""
    shared = with_overrides(config, change) if change else config
    check_storage(shared, sketch(shared, layers=1))
    return rehearse_first_layers(shared, place)
