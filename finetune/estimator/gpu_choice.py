"""On what a run would fit: the best GPU for it, and the smallest number of them.

GPUs differ in memory and speed, and a rehearsal knows neither: one serves all GPUs of one compute
capability, and one of several GPUs any number of them. As in a search, "fits" means with margin,
and fragments are a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.knobs import SHARDED
from finetune.estimator.measure import (
    FirstLayers,
    Measured,
    check_sizes,
    rehearse_first_layers,
)
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.place import Place, place_of, resolve_there
from finetune.hardware.gpus import Gpu, gpus_with_own
from finetune.training.model import sketch
from finetune.training.preflight import check_storage

MOST_GPUS = 64


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
