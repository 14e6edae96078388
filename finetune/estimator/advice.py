"""Advice on a run: what to change when it does not fit, and what makes it faster when it does.

Every applicable change (`finetune.estimator.knobs`) is predicted by a rehearsal, so "frees 11 GiB"
and "12 % slower" (time per token and device) hold for this run on this hardware, and savings that
two changes share are counted once. Memory is extrapolated from the model's first layers
(`predict_fast`).

*A set that fits* is found greedily (`_Advisor.together`). Kinds of changes are added until the run
fits, by rank (same training, lower precision, adapters, more GPUs) and within a rank by cost in
speed; each kind with its strongest change. Then changes that proved unnecessary are dropped, the
most expensive first, and strong ones replaced by milder ones. The set is small, not always minimal.

    A full fine-tuning needs 30 GiB of 24. Fused AdamW (free) leaves 29, checkpointing (20 % slower)
    25, micro-batches of 1 instead of 4 (8 % slower) 22: it fits. Dropping, most expensive first:
    without checkpointing it would need 27, so that stays; micro-batches of 2 need 23.5, which is
    milder and enough; without fused AdamW it would then need 24.5, so that stays, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from finetune.estimator.knobs import GAIN, RANKS, Change, as_typed, changes, speedups
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
            return _Table("to make it faster", self.faster) if self.faster else Text(nothing)
        parts: list[RenderableType] = [_Table("what to change", self.each)] if self.each else []
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
class _Table:
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
    advisor = _Advisor(asked)
    if asked.fit == "fits":
        timed = asked.pace is not None
        return Advised(asked.fit, faster=tuple(advisor.faster()), timed=timed)
    each = tuple(advisor.each())
    return Advised(asked.fit, each, advisor.together(each))


class _Pick(NamedTuple):
    """The `index`-th of the changes of a kind that apply after the preceding picks."""

    kind: str
    index: int


Made = tuple[Change, ...]
"""Changes made one after the other; none: the run as asked for."""


class _Advisor:
    """Variants of one run, each predicted once."""

    def __init__(self, asked: Prediction) -> None:
        self._asked = asked
        self._seen: dict[Made, Variant] = {}
        # kind -> most bytes that one of its changes frees alone; filled by `each`
        self._frees: dict[str, int] = {}

    def _with(self, made: Made) -> Variant:
        if made not in self._seen:
            self._seen[made] = with_changes(self._asked, made)
        return self._seen[made]

    def _offered(self, made: Made, kind: str | None = None) -> list[Change]:
        """Changes that still apply (of one kind, if given), mildest first."""
        config, place = changed(self._asked, made)
        every = changes(config, place.device, place.count)
        return [change for change in every if kind in (None, change.kind)]

    # ------------------------------------------------------------------------------ single changes

    def each(self) -> list[Variant]:
        """Single changes that free memory; of micro-batch sizes only the largest and smallest.

        To be called before `together`, which orders and skips changes by what each frees alone.
        """
        between = self._offered((), "micro-batch")[1:-1]
        found: list[Variant] = []
        for change in self._offered(()):
            if change in between:
                continue
            alone = self._with((change,))
            if alone.frees > LEAST * self._asked.footprint.allocated:
                found.append(alone)
                self._frees[change.kind] = max(alone.frees, self._frees.get(change.kind, 0))
        return sorted(found, key=lambda a: (RANKS.index(a.rank), _price(a.slower), -a.frees))

    def faster(self) -> list[Variant]:
        """At most two changes that fit and gain more than `GAIN` in speed."""
        asked, pace = self._asked, self._asked.pace
        if pace is None:
            return []
        device = asked.place.device
        every = speedups(asked.config, device, pace.share, compiled=asked.compiled)
        alone = [self._with((change,)) for change in every]
        found = [a for a in alone if a.fit == "fits" and a.times is not None and a.times - 1 > GAIN]
        best: dict[str, Variant] = {}
        for one in sorted(found, key=lambda a: (_price(a.slower), -a.frees)):
            best.setdefault(one.why, one)
        return list(best.values())[:2]

    # ------------------------------------------------------------------------------ sets of changes

    def together(self, each: Sequence[Variant]) -> Variant | None:
        """The cheapest set of changes found that fits (see the module docstring), or None."""
        picks: list[_Pick] = []
        for kind in self._order(each):
            added = self._strongest(picks, kind)
            if added is None:
                continue
            picks.append(added)
            if self._picked(picks).fit == "fits":
                return self._picked(self._without_waste(picks))
        return None

    def _order(self, each: Sequence[Variant]) -> list[str]:
        """Kinds of changes in the order in which they are tried."""
        prices: dict[str, tuple[int, float]] = {}
        costs = {one.change: one.slower for one in each}
        for number, change in enumerate(self._offered(())):
            cost = costs.get(change.typed)
            # A change that frees nothing alone comes last in its rank: combined it may.
            price = (RANKS.index(change.rank), 1e9 + number if cost is None else _price(cost))
            prices[change.kind] = min(prices.get(change.kind, price), price)
        return sorted(prices, key=lambda kind: prices[kind])

    def _strongest(self, picks: list[_Pick], kind: str) -> _Pick | None:
        """The strongest change of a kind that still frees memory after `picks`."""
        count = len(self._offered(self._made(picks), kind))
        if count and kind in self._frees and self._is_far(picks, kind):
            return _Pick(kind, count - 1)
        before = _need(self._picked(picks))
        for index in reversed(range(count)):
            if _need(self._picked([*picks, _Pick(kind, index)])) < before:
                return _Pick(kind, index)
        return None

    def _is_far(self, picks: list[_Pick], kind: str) -> bool:
        """True if twice the sum of the individual savings would not suffice."""
        freed = sum(self._frees.get(name, 0) for name in (kind, *(pick.kind for pick in picks)))
        asked = self._asked.footprint
        return asked.allocated + asked.outside - 2 * freed > self._asked.place.memory_bytes

    def _made(self, picks: Iterable[_Pick]) -> Made:
        """The picks as changes in order, without those that no longer apply."""
        made: Made = ()
        for pick in picks:
            if alike := self._offered(made, pick.kind):
                made = (*made, alike[min(pick.index, len(alike) - 1)])
        return made

    def _picked(self, picks: Iterable[_Pick]) -> Variant:
        return self._with(self._made(picks))

    def _without_waste(self, picks: list[_Pick]) -> list[_Pick]:
        """Drop unneeded picks, except faster ones; replace others by milder ones that suffice."""
        for pick in sorted(picks, key=self._cost, reverse=True):
            number = picks.index(pick)
            before, after = picks[:number], picks[number + 1 :]
            # At the edge a run may fit by its first layers, and not as a whole: one pick stays.
            if (before or after) and self._picked([*before, *after]).fit == "fits":
                if self._cost(pick) > (0, -FREE):
                    picks = [*before, *after]
            elif pick.index:
                milder = (_Pick(pick.kind, index) for index in range(pick.index + 1))
                sets = [[*before, other, *after] for other in milder]
                fitting = [s for s in sets if self._picked(s).fit == "fits"]
                picks = min(fitting, key=lambda s: _price(self._picked(s).slower))
        return picks

    def _cost(self, pick: _Pick) -> tuple[int, float]:
        """Cost of a pick: rank, then its slowdown alone."""
        alike = self._offered((), pick.kind)
        if not alike:  # applies only after another change, as a smaller base after adapters
            return RANKS.index("otherwise"), 0.0
        alone = self._with((alike[min(pick.index, len(alike) - 1)],))
        return RANKS.index(alone.rank), FREE if alone.slower is None else _price(alone.slower)


def _price(slower: float | None) -> float:
    """A slowdown to sort by, in steps of 0.001: rounding noise does not affect the order."""
    return math.inf if slower is None else round(slower, 3)


def _need(variant: Variant) -> tuple[float, float]:
    """Memory to sort by: allocated bytes, then what `nvidia-smi` shows."""
    if variant.prediction is None:
        return math.inf, math.inf
    return variant.prediction.footprint.allocated, variant.prediction.footprint.shown
