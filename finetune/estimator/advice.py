"""Advice on a run: what to change when it does not fit, and what makes it faster when it does.

Every change (`finetune.estimator.changes`) is predicted by a rehearsal, so "frees 11 GiB"
and "12 % slower" (time per token and device) hold for this run on this hardware, and savings that
two changes share are counted once. Memory is extrapolated from the model's first layers
(`predict_fast`).

*A set that fits* is found greedily (`_together`). Kinds of changes are added until the run fits, by
rank (same training, lower precision, adapters, more GPUs) and within a rank by cost in speed; each
kind with its strongest change. Then those that proved unnecessary are dropped, the most expensive
first. A single change of the same rank that fits and is cheaper comes before the set.

    A full fine-tuning needs 30 GiB of 24. Fused AdamW (free) leaves 29, micro-batches of 1 instead
    of 4 (8 % slower) 26, checkpointing (20 % slower) 22: it fits. Without the micro-batches it
    needs 25, so these stay; then without fused AdamW 23, so that is dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from finetune.estimator.changes import GAIN, RANKS, Change, as_typed, changes, speedups
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.predict import Prediction
from finetune.estimator.variants import Variant, changed, with_changes
from finetune.logging import PIPE_WIDTH, plain_table
from finetune.units import MEMORY, percent, size

FREE = 0.01
"""Changes in speed below this fraction count as none."""
LEAST = 0.002
"""Changes that free less than this fraction of the allocated memory are not offered."""


def facts_of(advice: Variant) -> dict[str, Any]:
    """One change in `--json`; `trains` is its rank, the effect on the training."""
    return {
        "change": list(advice.change),
        "frees_bytes": advice.frees,
        "slower": advice.slower,
        "fit": advice.fit,
        "trains": advice.rank,
        "why": advice.why,
    }


def memory_of(advice: Variant) -> str:
    """`frees 3.0 GiB`."""
    shown = size(abs(advice.frees), MEMORY, whole_below="GiB")
    return f"{'frees' if advice.frees >= 0 else 'takes'} {shown}"


def speed_of(advice: Variant) -> str:
    """`12% slower` or `2.1x the time`, each of the GPUs where their number changes."""
    slower, each = advice.slower, ", each GPU" if advice.rank == "devices" else ""
    if slower is None:
        return "?"
    if abs(slower) < FREE:
        return f"as fast{each}"
    if slower > 0.5:
        return f"{1 + slower:.1f}x the time{each}"
    if slower > 0:
        return f"{percent(slower, 0)} slower{each}"
    return f"{percent(1 / (1 + slower) - 1, 0)} faster{each}"


@dataclass(frozen=True)
class Advised:
    """Advice on a run.

    Attributes:
        fit: verdict on the run itself.
        each: single changes by rank and cost, of one that does not fit.
        together: the cheapest set found that makes it fit; None if it already fits or none does.
        faster: changes that make a run faster that fits.
    """

    fit: Fit
    each: tuple[Variant, ...] = ()
    together: Variant | None = None
    faster: tuple[Variant, ...] = ()
    timed: bool = True

    def facts(self) -> dict[str, Any]:
        return {
            "fit": self.fit,
            "each": [*map(facts_of, self.each)],
            "together": None if self.together is None else facts_of(self.together),
            "faster": [*map(facts_of, self.faster)],
        }

    def __rich__(self) -> RenderableType:
        if self.fit == "fits":
            nothing = f"none of the changes looked at makes it {percent(GAIN, 0)} faster"
            if not self.timed:
                nothing = "no time is predicted here, so nothing is known to make it faster"
            return _ChangeTable("to make it faster", self.faster) if self.faster else Text(nothing)
        parts: list[RenderableType] = (
            [_ChangeTable("what to change", self.each)] if self.each else []
        )
        if (found := self.together) is None:
            nothing = (
                "no set of these changes makes it fit: a smaller model, or a GPU with more memory"
            )
            return Group(*parts, Text(nothing, "bold"))
        cost = [memory_of(found), *([] if found.slower is None else [speed_of(found)])]
        cost += ["changes training"] if found.rank in ("otherwise", "adapters") else []
        line = Text.assemble(
            ("fits with ", "bold green"), as_typed(found.change), f" ({', '.join(cost)})"
        )
        return Group(*parts, line)


@dataclass(frozen=True)
class _ChangeTable:
    """A change per line; in a terminal its settings, and below them what comes of it."""

    title: str
    advices: Sequence[Variant]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= PIPE_WIDTH:
            titles = (self.title, "memory", "speed", "then it", "what that is")
            table = plain_table(*titles)
            for one in self.advices:
                table.add_row(as_typed(one.change), memory_of(one), speed_of(one), one.fit, one.why)
            yield table
            return
        yield Text(self.title, "bold")
        for one in self.advices:
            yield Text(as_typed(one.change))
            outcome = f"{memory_of(one)}, {speed_of(one)}, {one.fit}: {one.why}"
            yield Padding(Text(outcome, "dim"), (0, 0, 0, 2), expand=False)


def advise(asked: Prediction) -> Advised:
    """Predict changes that make a run fit, or make one that fits faster."""
    if asked.fit == "fits":
        timed = asked.pace is not None
        return Advised(asked.fit, faster=tuple(_faster(asked)), timed=timed)
    offered = changes(asked.config, asked.place.device, asked.place.count)
    alone = sorted((with_changes(asked, (change,)) for change in offered), key=_cost)
    each = [one for one in alone if one.frees > LEAST * asked.footprint.allocated]
    return Advised(asked.fit, tuple(each), _together(asked, alone))


def _faster(asked: Prediction) -> list[Variant]:
    """At most two changes that fit and gain more than `GAIN` in speed."""
    if asked.pace is None:
        return []
    device, share = asked.place.device, asked.pace.share
    every = speedups(asked.config, device, share, compiled=asked.compiled)
    alone = [with_changes(asked, (change,)) for change in every]
    found = [a for a in alone if a.fit == "fits" and a.times is not None and a.times - 1 > GAIN]
    best = {one.why: one for one in sorted(found, key=_cost, reverse=True)}
    return sorted(best.values(), key=_cost)[:2]


def _together(asked: Prediction, alone: Sequence[Variant]) -> Variant | None:
    """The cheapest set of changes found that fits (see the module docstring), or None."""

    tried = functools.cache(functools.partial(with_changes, asked))

    @functools.cache
    def made(kinds: tuple[str, ...]) -> tuple[Change, ...]:
        """The strongest change of each kind that can run after those of the kinds before it."""
        if not kinds:
            return ()
        before = made(kinds[:-1])
        config, place = changed(asked, before)
        alike = [c for c in changes(config, place.device, place.count) if c.kind == kinds[-1]]
        for change in reversed(alike):
            if tried((*before, change)).prediction is not None:
                return (*before, change)
        return before

    kinds: tuple[str, ...] = ()
    for kind in dict.fromkeys(one.label for one in alone):
        kinds = (*kinds, kind)
        if tried(made(kinds)).fit == "fits":
            break
    else:
        return None
    for dear in kinds[-2::-1]:
        without = tuple(kind for kind in kinds if kind != dear)
        kinds = without if tried(made(without)).fit == "fits" else kinds
    fitting = [one for one in alone if one.fit == "fits"]
    return min([*fitting, tried(made(kinds))], key=_cost)


def _cost(one: Variant) -> tuple[int, float, int]:
    """Variants by rank, then slowdown in steps of 0.001 (no rounding noise), then memory freed."""
    price = math.inf if one.slower is None else round(one.slower, 3)
    return RANKS.index(one.rank), price, -one.frees
