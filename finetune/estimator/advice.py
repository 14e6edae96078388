"""Advice on a run: what to change when it does not fit, and what makes it faster when it does.

Every applicable change (`finetune.estimator.knobs`) is measured by a rehearsal, so "frees 11 GiB"
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.knobs import (
    GAIN,
    RANKS,
    Change,
    Rank,
    as_typed,
    changes,
    speedups,
    typed,
)
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.memory.sharding import shares_model
from finetune.estimator.predict import FirstLayers, Option, Prediction, rehearse_first_layers
from finetune.hardware.gpus import Place
from finetune.hardware.requirements import check_optimizer_here
from finetune.logging import PIPE_WIDTH, plain_table
from finetune.units import MEMORY, percent, size

# Changes in speed below this fraction count as none.
FREE = 0.01
# Changes that free less than this fraction of the allocated memory are not offered.
LEAST = 0.002


@dataclass(frozen=True)
class Advice(Option):
    """A measured change.

    Attributes:
        frees: Allocated bytes freed; negative: used.
        slower: Relative increase of the time per token, negative if faster; None if unknown.
    """

    frees: int
    slower: float | None
    why: str
    rank: Rank = "same"

    def facts(self) -> dict[str, Any]:
        return {
            "change": list(self.change),
            "frees_bytes": self.frees,
            "slower": self.slower,
            "fit": self.fit,
            "trains": self.rank,
            "why": self.why,
        }

    @property
    def typed(self) -> str:
        return as_typed(self.change)

    @property
    def memory(self) -> str:
        """`frees 3.0 GiB`."""
        shown = size(abs(self.frees), MEMORY, whole_below="GiB")
        return f"{'frees' if self.frees >= 0 else 'takes'} {shown}"

    @property
    def speed(self) -> str:
        """`12% slower` or `2.1x the time`, each of the GPUs where their number changes."""
        if self.slower is None:
            return "?"
        each = ", each GPU" if self.rank == "devices" else ""
        if abs(self.slower) < FREE:
            return f"as fast{each}"
        if self.slower > 0.5:
            return f"{1 + self.slower:.1f}x the time{each}"
        if self.slower > 0:
            return f"{percent(self.slower, 0)} slower{each}"
        return f"{percent(1 / (1 + self.slower) - 1, 0)} faster{each}"


@dataclass(frozen=True)
class Advised:
    """Advice on a run: single changes by rank and cost, and what makes a fitting run faster.

    `together` is the cheapest set found that makes it fit; None if it already fits or none does.
    """

    fit: Fit
    each: tuple[Advice, ...] = ()
    together: Advice | None = None
    faster: tuple[Advice, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {
            "fit": self.fit,
            "each": [advice.facts() for advice in self.each],
            "together": None if self.together is None else self.together.facts(),
            "faster": [advice.facts() for advice in self.faster],
        }

    def __rich__(self) -> RenderableType:
        if self.fit == "fits":
            nothing = f"none of the changes measured makes it {percent(GAIN, 0)} faster"
            return _Table("to make it faster", self.faster) if self.faster else Text(nothing)
        parts: list[RenderableType] = [_Table("what to change", self.each)] if self.each else []
        if (found := self.together) is None:
            nothing = (
                "no set of these changes makes it fit: a smaller model, or a GPU with more memory"
            )
            return Group(*parts, Text(nothing, "bold"))
        cost = [found.memory, *([] if found.slower is None else [found.speed])]
        cost += ["changes training"] if found.rank in ("otherwise", "adapters") else []
        line = Text.assemble(("fits with ", "bold green"), found.typed, f" ({', '.join(cost)})")
        return Group(*parts, line)


@dataclass(frozen=True)
class _Table:
    """A change per line; in a terminal its settings, and below them what comes of it."""

    title: str
    advices: Sequence[Advice]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= PIPE_WIDTH:
            titles = (self.title, "memory", "speed", "then it", "what that is")
            table = plain_table(*titles)
            for one in self.advices:
                table.add_row(one.typed, one.memory, one.speed, one.fit, one.why)
            yield table
            return
        yield Text(self.title, "bold")
        for one in self.advices:
            yield Text(one.typed)
            outcome = f"{one.memory}, {one.speed}, {one.fit}: {one.why}"
            yield Padding(Text(outcome, "dim"), (0, 0, 0, 2), expand=False)


def advise(prediction: Prediction) -> Advised:
    """Measure changes that make a run fit, or make one that fits faster."""
    advisor = _Advisor(prediction)
    if prediction.fit == "fits":
        return Advised(prediction.fit, faster=tuple(advisor.faster()))
    each = tuple(advisor.each())
    return Advised(prediction.fit, each, advisor.together(each))


class _Pick(NamedTuple):
    """The `index`-th of the changes of a kind that apply after the preceding picks."""

    kind: str
    index: int


@dataclass(frozen=True)
class _Variant:
    """The run with some changes made."""

    config: RunConfig
    made: tuple[Change, ...] = ()

    @property
    def gpus(self) -> int | None:
        """Number of GPUs, if changed."""
        return next((c.gpus for c in reversed(self.made) if c.gpus is not None), None)

    def but(self, change: Change) -> _Variant:
        """Add one change; raises ConfigError if it conflicts with the others."""
        return _Variant(with_overrides(self.config, change.overrides), (*self.made, change))


class _Advisor:
    """Variants of one run, each measured once."""

    def __init__(self, asked: Prediction) -> None:
        self._asked, self._place = asked, asked.place
        self._start = _Variant(asked.config)
        self._seen: dict[tuple[str, int], Prediction | None] = {}
        self._last: tuple[str, FirstLayers] | None = None
        self._frees: dict[str, int] = {}  # kind -> most bytes that one of its changes frees alone

    # --------------------------------------------------------------------------------- one variant

    def _there(self, variant: _Variant) -> Place:
        return self._place if variant.gpus is None else replace(self._place, count=variant.gpus)

    def _offered(self, variant: _Variant, kind: str | None = None) -> list[Change]:
        """Changes that still apply (of one kind, if given), mildest first."""
        place = self._there(variant)
        every = changes(variant.config, place.device, place.count)
        return [change for change in every if kind in (None, change.kind)]

    def _measured(self, variant: _Variant) -> Prediction | None:
        """Memory and time of a variant; None if it cannot run."""
        key = (_key(variant.config), self._there(variant).count)
        if key not in self._seen:
            try:
                self._seen[key] = self._rehearsed(variant.config, self._there(variant))
            except FinetuneError:
                self._seen[key] = None
        return self._seen[key]

    def _rehearsed(self, config: RunConfig, place: Place) -> Prediction:
        """Rehearse a variant; device counts share a rehearsal if they agree on sharding."""
        check_optimizer_here(config.train, place.device)
        key = f"{shares_model(config, place)} {_key(config, without=('fsdp', 'fsdp_config'))}"
        if self._last is None or self._last[0] != key:
            self._last = key, rehearse_first_layers(config, place)
        return replace(self._last[1], config=config).at(place)

    def _advice(self, variant: _Variant, why: str, rank: Rank) -> Advice | None:
        """Compare a variant with the unchanged run; None if it cannot run."""
        found = self._measured(variant)
        if found is None:
            return None
        frees = self._asked.footprint.allocated - found.footprint.allocated
        return Advice(typed(variant.made), found, frees, self._slower(variant), why, rank)

    def _alone(self, change: Change) -> Advice | None:
        try:
            variant = self._start.but(change)
        except FinetuneError:
            return None
        return self._advice(variant, change.why, change.rank)

    def _slower(self, variant: _Variant) -> float | None:
        """Relative increase of the time per token; None if unknown."""
        found, before = self._measured(variant), self._asked.pace
        if found is None or found.pace is None or before is None:
            return None
        return before.tokens_per_s / found.pace.tokens_per_s - 1

    def _fits(self, picks: Iterable[_Pick]) -> bool:
        found = self._measured(self._composed(picks))
        return found is not None and found.fit == "fits"

    # ------------------------------------------------------------------------------ single changes

    def each(self) -> list[Advice]:
        """Single changes that free memory; of micro-batch sizes only the largest and smallest."""
        between = self._offered(self._start, "micro-batch")[1:-1]
        found: list[Advice] = []
        for change in self._offered(self._start):
            if change in between:
                continue
            advice = self._alone(change)
            if advice is not None and advice.frees > LEAST * self._asked.footprint.allocated:
                found.append(advice)
                self._frees[change.kind] = max(advice.frees, self._frees.get(change.kind, 0))
        return sorted(found, key=lambda a: (RANKS.index(a.rank), _price(a.slower), -a.frees))

    def faster(self) -> list[Advice]:
        """At most two changes that fit and gain more than `GAIN` in speed."""
        asked, pace = self._asked, self._asked.pace
        if pace is None:
            return []
        found = []
        device = self._place.device
        for change in speedups(asked.config, device, pace.share, compiled=asked.compiled):
            advice = self._alone(change)
            if advice is None or advice.fit != "fits" or advice.slower is None:
                continue
            if 1 / (1 + advice.slower) - 1 > GAIN:
                found.append(advice)
        best: dict[str, Advice] = {}
        for advice in sorted(found, key=lambda a: (_price(a.slower), -a.frees)):
            best.setdefault(advice.why, advice)
        return list(best.values())[:2]

    # ------------------------------------------------------------------------------ sets of changes

    def together(self, each: Sequence[Advice]) -> Advice | None:
        """The cheapest set of changes found that fits (see the module docstring), or None."""
        picks: list[_Pick] = []
        for kind in self._order(each):
            added = self._strongest(picks, kind)
            if added is None:
                continue
            picks.append(added)
            if self._fits(picks):
                break
        else:
            return None
        variant = self._composed(self._without_waste(picks))
        why = "; ".join(change.why for change in variant.made)
        rank = RANKS[max(RANKS.index(change.rank) for change in variant.made)]
        return self._advice(variant, why, rank)

    def _order(self, each: Sequence[Advice]) -> list[str]:
        """Kinds of changes in the order in which they are tried."""
        prices: dict[str, tuple[int, float]] = {}
        costs = {advice.change: advice.slower for advice in each}
        for number, change in enumerate(self._offered(self._start)):
            cost = costs.get(change.typed)
            # A change that frees nothing alone comes last in its rank: combined it may.
            price = (RANKS.index(change.rank), 1e9 + number if cost is None else _price(cost))
            prices[change.kind] = min(prices.get(change.kind, price), price)
        return sorted(prices, key=lambda kind: prices[kind])

    def _strongest(self, picks: list[_Pick], kind: str) -> _Pick | None:
        """The strongest change of a kind that still frees memory after `picks`."""
        variant = self._composed(picks)
        count = len(self._offered(variant, kind))
        if count and kind in self._frees and self._is_far(picks, kind):
            return _Pick(kind, count - 1)
        before = self._measured(variant)
        for index in reversed(range(count)):
            found = self._measured(self._composed([*picks, _Pick(kind, index)]))
            if found is not None and (before is None or _need(found) < _need(before)):
                return _Pick(kind, index)
        return None

    def _is_far(self, picks: list[_Pick], kind: str) -> bool:
        """True if twice the sum of the individual savings would not suffice."""
        freed = sum(self._frees.get(name, 0) for name in (kind, *(pick.kind for pick in picks)))
        asked = self._asked.footprint
        return asked.allocated + asked.outside - 2 * freed > self._place.memory_bytes

    def _composed(self, picks: Iterable[_Pick]) -> _Variant:
        """The run with the picks applied in order, skipping those that no longer apply."""
        variant = self._start
        for pick in picks:
            if alike := self._offered(variant, pick.kind):
                variant = variant.but(alike[min(pick.index, len(alike) - 1)])
        return variant

    def _without_waste(self, picks: list[_Pick]) -> list[_Pick]:
        """Drop unneeded picks that cost speed; replace others by milder ones that suffice."""
        for pick in sorted(picks, key=self._worth, reverse=True):
            number = picks.index(pick)
            before, after = picks[:number], picks[number + 1 :]
            # At the edge a run may fit by its first layers, and not as a whole: one pick stays.
            if (before or after) and self._fits([*before, *after]):
                if self._worth(pick) > (0, -FREE):
                    picks = [*before, *after]
            elif pick.index:
                milder = (_Pick(pick.kind, index) for index in range(pick.index + 1))
                sets = [[*before, other, *after] for other in milder]
                fitting = [s for s in sets if self._fits(s)]
                picks = min(fitting, key=lambda s: _price(self._slower(self._composed(s))))
        return picks

    def _worth(self, pick: _Pick) -> tuple[int, float]:
        """Cost of a pick: rank, then its slowdown alone."""
        alike = self._offered(self._start, pick.kind)
        if not alike:  # applies only after another change: takes that one's rank
            return 1, 0.0
        change = alike[min(pick.index, len(alike) - 1)]
        slower = self._slower(self._start.but(change))
        return RANKS.index(change.rank), FREE if slower is None else _price(slower)


def _key(config: RunConfig, without: tuple[str, ...] = ()) -> str:
    train = {k: v for k, v in config.train.items() if k not in without}
    return config.model_copy(update={"train": train}).model_dump_json()


def _price(slower: float | None) -> float:
    # in steps of 0.001, so that rounding noise does not affect the order
    return float("inf") if slower is None else round(slower, 3)


def _need(prediction: Prediction) -> tuple[int, int]:
    return prediction.footprint.allocated, prediction.footprint.shown
