"""Searches: the largest micro-batch, the longest rows, the best GPU, the fewest GPUs.

Every point is a rehearsal of the model's first layers (`predict_fast`). "Fits" includes the margin.
Functions raise the `FinetuneError` with which the run itself would fail.

*Largest n.* Memory grows with n, and both the largest n that fits and n + 1 are predicted. It is
nearly a line (activations linear in tokens; the mask of packed rows bends it), so few points are
needed; where a line leads nowhere, the interval is halved:

    24 GiB, start at 4 rows: 8 GiB, fits; one point gives no slope, so double. 8 rows: 12 GiB, fits.
    The line through both reaches 24 GiB at 20 rows: 25 GiB, since a mask bends it. The line from 8
    to 20 gives 19: fits. 19 and 20 are neighbors: done after 4 points.

*GPUs.* A rehearsal depends on neither memory size nor speed: one serves all GPUs of a compute
capability, another any number of GPUs. The best GPU is found by exhaustion, the fewest by doubling.

    8B in full, BF16, on RTX 4090s of 23.6 GiB: 1, 2, 4, 8, 16, 32 and 64 GPUs need 67.4, 70.6,
    48.1, 36.7, 31.0, 28.1 and 26.7 GiB each, so none fits. This takes two rehearsals: a single
    GPU, and one of several GPUs, which gather weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.config.train_section import decides_checkpointing, with_checkpointing
from finetune.estimator.changes import (
    SHARDED,
    as_typed,
    length_of,
    longest,
    rows_in_groups,
    rows_of,
)
from finetune.estimator.limits import ONE_MACHINE, of_images
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.predict import Prediction, check_sizes, predict, predict_fast, tried
from finetune.hardware.gpus import Gpu, Machine, gpus_with_own, machine_of
from finetune.logging import plain_table
from finetune.storage.pretrained import load_shape, positions
from finetune.units import GIB, count

# Upper limits of the searches: tokens per micro-batch, GPUs.
MOST_TOKENS = 2**20
MOST_GPUS = 64
# Step between candidate row lengths; 16 for models with short contexts.
LENGTHS = 128
# Points after which the search bisects instead of trusting a line.
BISECT_AFTER = 8
_VERDICTS: tuple[Fit, ...] = ("fits", "tight", "does not fit")


# ------------------------------------------------------------------------------- largest n


@dataclass(frozen=True)
class Found:
    """The largest `value` of a setting that fits, 0 if none does.

    Attributes:
        change: overrides that set it.
        prediction: memory and time with it; None if none fits.
        next: Next larger value, which does not fit; None at the upper limit of the search.
        points: Number of values predicted.
    """

    change: tuple[str, ...]
    prediction: Prediction | None
    setting: str
    value: int
    next: int | None
    points: int

    def facts(self) -> dict[str, Any]:
        found = self.prediction
        return {
            "setting": self.setting,
            "largest": self.value,
            "too_large": self.next,
            "change": list(self.change) if self.value else None,
            "allocated_bytes": found.footprint.allocated if found else None,
            "tokens_per_s_and_device": found.timing.tokens_per_s
            if found and found.timing
            else None,
            "points": self.points,
        }

    def __rich__(self) -> RenderableType:
        if self.prediction is None:
            return Text(f"{self.setting}: not even the smallest fits", "bold red")
        tokens_per_s = self.prediction.tokens_per_s
        speed = "" if tokens_per_s is None else f", {count(tokens_per_s)} tokens/s"
        end = f"{self.next} does not fit" if self.next else "nothing larger was looked at"
        shown = f"{self.prediction.footprint.shown / GIB:.1f} GiB"
        return Text.assemble((as_typed(self.change), "bold green"), f" ({shown}{speed}; {end})")


@dataclass(frozen=True)
class Largest:
    """The largest micro-batch, and the longest rows of the run's micro-batch."""

    rows: Found
    length: Found

    def facts(self) -> dict[str, Any]:
        return {name: found.facts() for name, found in vars(self).items()}

    def __rich__(self) -> RenderableType:
        return Group(Text("the largest that fits"), self.rows, self.length)


def largest(config: RunConfig, machine: Machine) -> Largest:
    """Find the largest micro-batch and the longest rows that fit."""
    return Largest(largest_rows(config, machine), largest_length(config, machine))


def largest_rows(config: RunConfig, machine: Machine) -> Found:
    """Find the largest micro-batch that fits at the run's `max_length`."""
    check_sizes(config)
    (rows, _), step = rows_of(config), rows_in_groups(config)
    # A recipe above the limit of the search is still looked at as it is.
    most = max(rows, MOST_TOKENS // int(length_of(config)))
    return _largest("train.per_device_train_batch_size", config, machine, rows, step, most)


def largest_length(config: RunConfig, machine: Machine) -> Found:
    """Find the longest rows that fit, in steps of 128 (16 for a context below 2048).

    Raises:
        FinetuneError: the run itself would fail with it.
    """
    check_sizes(config)
    (key, asked), most = longest(config), MOST_TOKENS // rows_of(config)[0]
    most = min(most, positions(load_shape(config.model)) or most)
    # A row length is rounded so that a short context still has candidates.
    step = LENGTHS if most >= 16 * LENGTHS else 16
    return _largest(f"train.{key}", config, machine, asked, min(step, most), max(asked, most))


def _largest(
    name: str, config: RunConfig, machine: Machine, asked: int, step: int, most: int
) -> Found:
    """Search the multiples of `step` up to `most`, starting at the configured value."""
    # With `auto` each point could decide otherwise, and memory would not grow with n.
    config = _saving(config)
    value, too_large, seen = search(
        lambda n: predict_fast(with_overrides(config, (f"{name}={n * step}",)), machine),
        machine.memory_bytes,
        start=max(1, asked // step),
        most=max(1, most // step),
    )
    change, following = (f"{name}={value * step}",), too_large and too_large * step
    return Found(change, seen.get(value), name, value * step, following, len(seen))


def _saving(config: RunConfig) -> RunConfig:
    """The run with checkpointing on where it is left open: what fits at all fits with it."""
    return with_checkpointing(config, True) if decides_checkpointing(config) else config


def search(
    predict: Callable[[int], Prediction], memory: int, *, start: int, most: int
) -> tuple[int, int | None, dict[int, Prediction]]:
    """Find the largest n in 1..`most` that fits into `memory` bytes (example: module docstring).

    Returns:
        n, 0 if none fits; n + 1, None if that is above `most`; all that was predicted.
    """
    seen: dict[int, Prediction] = {}
    low, high, n = 0, most + 1, min(start, most)
    while True:
        seen[n] = predict(n)
        if seen[n].footprint.fit(memory) == "fits":
            low = n
        else:
            high = n
        if high - low <= 1:
            return low, high if high <= most else None, seen
        needs = {n: found.footprint.needed for n, found in seen.items()}
        # Strictly between, so that each point narrows the interval and the search ends.
        n = min(max(_guess(needs, memory, low, high), low + 1), high - 1)


def _guess(needs: dict[int, int], memory: int, low: int, high: int) -> int:
    """The n at which a line through the two needs nearest to the memory reaches it."""
    # Nothing was too large yet: doubling reaches any size in few steps.
    halfway = (low + high) // 2 if high in needs else 2 * low
    if not 1 < len(needs) <= BISECT_AFTER:
        return halfway
    a, b = sorted(needs, key=lambda n: (abs(needs[n] - memory), n))[:2]
    slope = (needs[b] - needs[a]) / (b - a)
    # A slope of zero or less comes from rounding between near points, or from a change of kernels.
    n = math.floor(a + (memory - needs[a]) / slope) if slope > 0 else halfway
    return n if low <= n <= high else halfway


# ------------------------------------------------------------------------------------------ GPUs


@dataclass(frozen=True)
class GpuChoice:
    """A run on one machine, with the overrides it needs; `why` says why it is impossible."""

    change: tuple[str, ...]
    machine: Machine
    prediction: Prediction | None
    why: str = ""

    @property
    def fit(self) -> Fit:
        return self.prediction.fit if self.prediction else "does not fit"

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all GPUs."""
        return self.prediction.tokens_per_s if self.prediction else None

    @property
    def usd_per_million(self) -> float | None:
        """Cost of a million tokens; None without a price."""
        price = self.machine.gpu.price_usd_per_hour if self.machine.gpu else None
        if price is None or self.tokens_per_s is None:
            return None
        return price * self.machine.count / 3600 / self.tokens_per_s * 1e6

    def facts(self) -> dict[str, Any]:
        memory = self.prediction.footprint if self.prediction else None
        return {
            "device": str(self.machine),
            "devices": self.machine.count,
            "memory_bytes": self.machine.memory_bytes,
            "fit": self.fit,
            "change": list(self.change),
            "allocated_bytes": memory.allocated if memory else None,
            "shown_bytes": memory.shown if memory else None,
            "tokens_per_s": self.tokens_per_s,
            "usd_per_million_tokens": self.usd_per_million,
            "why": self.why,
        }


@dataclass(frozen=True)
class GpuChoices:
    """A run on several kinds or numbers of GPUs, best first; `order` describes it for display."""

    choices: tuple[GpuChoice, ...]
    order: str

    @property
    def best(self) -> GpuChoice | None:
        first = self.choices[0] if self.choices else None
        return first if first is not None and first.fit == "fits" else None

    @property
    def notes(self) -> list[str]:
        """What the choices have in common: images of rows, and GPUs in one machine."""
        found = next((one.prediction for one in self.choices if one.prediction), None)
        many = any(choice.machine.count > 8 for choice in self.choices)
        return [*(of_images(found) if found else ()), *([ONE_MACHINE] if many else ())]

    def facts(self) -> dict[str, Any]:
        choices = [choice.facts() for choice in self.choices]
        return {"order": self.order, "choices": choices, "notes": self.notes}

    def __rich__(self) -> RenderableType:
        priced = any(choice.usd_per_million is not None for choice in self.choices)
        right = ("needs GiB", "of GiB", "tokens/s", "$ a million")
        titles = ("GPU", *right[:2], "", *(right[2:] if priced else right[2:3]))
        table = plain_table(*titles, right=right, title=self.order, title_justify="left")
        for choice in self.choices:
            cells = ["-", "-", choice.why]
            if choice.prediction is not None:
                speed, cost = choice.tokens_per_s, choice.usd_per_million
                sizes = (choice.prediction.footprint.shown, choice.machine.memory_bytes)
                cells = [f"{nbytes / GIB:.1f}" for nbytes in sizes]
                cells += [choice.fit, "?" if speed is None else count(speed)]
                cells += [f"{cost:.3f}" if cost is not None else ""] if priced else []
            style = None if choice.fit == "fits" else "dim"
            table.add_row(str(choice.machine), *cells, style=style)
        lines: list[RenderableType] = [table]
        if self.best is not None and self.best.change:
            lines.append(Text(f"settings: {as_typed(self.best.change)}"))
        return Group(*lines, *(Text(f"! {note}", "yellow") for note in self.notes))


def cheapest_gpu(config: RunConfig, *, gpus: tuple[Gpu, ...] | None = None) -> GpuChoices:
    """Rank GPUs (by default all of the table): those that fit first, by cost per million tokens.

    GPUs without a price come last, fastest first; ties go to the GPU with less memory. An L4 at 0.8
    an hour with 1,000 tokens/s (0.22 per million) comes before an H100 at 3.0 with 2,500 (0.33),
    and both before an H200 without a price.
    """
    return compared(config, map(machine_of, gpus_with_own() if gpus is None else gpus))


def compared(config: RunConfig, machines: Iterable[Machine]) -> GpuChoices:
    """Rank machines as `cheapest_gpu` does."""
    check_sizes(config)
    found = sorted(
        (GpuChoice((), machine, *tried(predict, config, machine)) for machine in machines),
        key=_rank,
    )
    priced = any(choice.usd_per_million is not None for choice in found)
    order = "the cheapest first" if priced else "the fastest that fits first; no prices known"
    return GpuChoices(tuple(found), order)


def _rank(choice: GpuChoice) -> tuple[float, ...]:
    """Sort key: verdict, then cost if known, then speed, then memory."""
    memory, cost, speed = choice.machine.memory_bytes, choice.usd_per_million, choice.tokens_per_s
    if choice.prediction is None:
        return len(_VERDICTS), 0, 0.0, memory
    order = (1, -(speed or 0.0)) if cost is None else (0, cost)
    return _VERDICTS.index(choice.fit), *order, memory


def fewest_gpus(config: RunConfig, gpu: str | Gpu) -> GpuChoices:
    """Find the smallest number of GPUs (1, 2, 4, ..., 64) on which a run fits, sharded by FSDP2.

    Returns:
        The number that fits, followed by the smaller ones tried, in descending order.

    Raises:
        FinetuneError: the run itself would fail with it on one GPU.
    """
    check_sizes(config)
    config, machine = _saving(config), machine_of(gpu)
    alone = tuple(f"~train.{key}" for key in config.train if "fsdp" in key)  # refused on one GPU
    shared = () if config.train.fsdp else SHARDED

    def sharded(machine: Machine) -> Prediction:
        return predict_fast(with_overrides(config, shared), machine)

    # One GPU without `tried`: what fails there (a recipe's error) would fail on any number.
    found = [GpuChoice(alone, machine, predict_fast(config, machine))]
    while found[-1].fit != "fits" and found[-1].prediction and machine.count < MOST_GPUS:
        machine = replace(machine, count=2 * machine.count)
        found.append(
            GpuChoice((f"--gpus {machine.count}", *shared), machine, *tried(sharded, machine))
        )
    # The number that fits first, then the largest that did not.
    found.sort(key=lambda choice: (choice.fit != "fits", -choice.machine.count))
    fits = found[0].fit == "fits"
    order = "the smallest number that fits" if fits else "none of these numbers fits"
    return GpuChoices(tuple(found), order)
