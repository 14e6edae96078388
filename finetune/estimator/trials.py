"""What to change when a run does not fit, and what would make it faster when it does.

Every change that applies (`finetune.estimator.knobs`) is measured, not looked up: the run is
rehearsed with it, and the change is offered only if the run is possible and takes less. So "frees
11 GiB" and "12 % slower" are about this run at this place, and what two changes free in common is
counted once when they are made together.

Together: the cheapest set that makes the run fit. Changes that leave the training as it is come
first, those that cost the least speed before the others; then those that train otherwise; then
adapters; then more GPUs. When the run fits, whatever turned out not to be needed is taken back,
the dearest first. That is a greedy search: it finds a small set, not always the very smallest.

Slower is in time for each token and device. Memory is that of `measure_fast`: exact in what is
allocated, a guess in fragments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.advice import FREE, Advice, Advised
from finetune.estimator.knobs import (
    RANKS,
    Change,
    Rank,
    attends_by_mask,
    changes,
    rows_of,
    setting,
    with_rows,
)
from finetune.estimator.measure import FEW, FirstLayers, Measured, rehearse_first_layers
from finetune.estimator.memory.footprint import Footprint
from finetune.estimator.memory.sharded import shares_model
from finetune.estimator.place import Place
from finetune.estimator.speed.step_parts import StepPart
from finetune.hardware.requirements import check_optimizer_here
from finetune.training.model import sketch
from finetune.training.preflight import check_settings

LEAST = 0.002
"""Of what a run allocates, below which nothing is freed."""
GAIN = 0.10
"""Of speed, below which a change for its sake is not worth a line."""


def advise(measured: Measured, place: Place) -> Advised:
    """What to change about a run that does not fit or is tight; what would make another faster.

    Args:
        measured: the run as it is.
        place: where it was measured.
    """
    fit = measured.footprint.fit(place.memory_bytes)
    trials = _Trials(measured, place)
    if fit == "fits":
        return Advised(fit, faster=tuple(trials.faster()))
    each = tuple(trials.each())
    return Advised(fit, each, trials.together(each))


@dataclass(frozen=True)
class _Pick:
    """The `index`-th change of a kind that applies when its turn comes."""

    kind: str
    index: int


@dataclass(frozen=True)
class _State:
    """A run with changes.

    Attributes:
        config: of the run.
        place: where.
        made: the changes.
    """

    config: RunConfig
    place: Place
    made: tuple[Change, ...] = ()

    @property
    def expandable(self) -> bool:
        """The allocator has expandable segments."""
        return any(change.environment for change in self.made)

    @property
    def typed(self) -> tuple[str, ...]:
        """All changes as typed; of two values for one key the later."""
        before = tuple(change.environment for change in self.made if change.environment)
        counts = [change.gpus for change in self.made if change.gpus is not None]
        values = {item.partition("=")[0]: item for change in self.made for item in change.overrides}
        return (*before, *(f"--gpus {count}" for count in counts[-1:]), *values.values())

    def offered(self) -> tuple[Change, ...]:
        """Changes that still apply."""
        return changes(self.config, self.place.device, self.place.count)

    def but(self, change: Change) -> _State:
        """With one more change.

        Raises:
            ConfigError: it does not go with the others.
        """
        config, place = self.config, self.place
        if change.overrides:
            config = with_overrides(config, change.overrides)
        if change.gpus is not None:
            device = replace(place.device, count=change.gpus)
            place = replace(place, device=device, count=change.gpus)
        return _State(config, place, (*self.made, change))


class _Trials:
    """Changes tried on one run, each set once."""

    def __init__(self, asked: Measured, place: Place) -> None:
        self._asked = asked
        self._start = _State(asked.config, place)
        self._seen: dict[Any, Measured | None] = {}
        self._last: tuple[str, FirstLayers] | None = None
        self._frees: dict[str, int] = {}

    # --------------------------------------------------------------------------- one set of changes

    def _measured(self, state: _State) -> Measured | None:
        """A run with changes; None where it cannot be had."""
        key = (_key(state.config), state.place.count)
        if key not in self._seen:
            try:
                self._seen[key] = self._rehearsed(state)
            except FinetuneError:
                self._seen[key] = None
        found = self._seen[key]
        if found is None or not state.expandable:
            return found
        return replace(found, footprint=found.footprint.in_expandable_segments())

    def _rehearsed(self, state: _State) -> Measured:
        """The number of devices changes nothing in a rehearsal, but whether they share weights."""
        config = state.config
        check_optimizer_here(config.train, state.place.device)
        check_settings(config, sketch(config, layers=FEW[1]))
        shared = shares_model(config, state.place)
        key = f"{shared} {_key(config, without=('fsdp', 'fsdp_config'))}"
        if self._last is None or self._last[0] != key:
            self._last = key, rehearse_first_layers(config, state.place)
        return replace(self._last[1], config=config).at(state.place)

    def _advice(self, state: _State, found: Measured, why: str, rank: Rank) -> Advice:
        held, before = found.footprint, self._asked.footprint
        only_fragments = state.expandable and len(state.made) == 1
        frees = (
            before.reserved - held.reserved if only_fragments else before.allocated - held.allocated
        )
        fit = held.fit(state.place.memory_bytes)
        return Advice(state.typed, frees, self._slower(found), fit, why, rank)

    def _slower(self, found: Measured) -> float | None:
        before, now = self._asked.pace, found.pace
        if before is None or now is None:
            return None
        return before.tokens_per_s / now.tokens_per_s - 1

    def _fits(self, state: _State) -> bool:
        found = self._measured(state)
        return found is not None and found.footprint.fit(state.place.memory_bytes) == "fits"

    # ------------------------------------------------------------------------------- single changes

    def each(self) -> list[Advice]:
        """Single changes that free something: of many alike the mildest and the strongest."""
        offered = self._start.offered()
        found: list[Advice] = []
        least = LEAST * self._asked.footprint.allocated
        for change in _ends(offered):
            advice = self._one(change)
            if advice is not None and advice.frees > least:
                found.append(advice)
                if change.overrides:
                    most = max(advice.frees, self._frees.get(change.kind, 0))
                    self._frees[change.kind] = most
        return sorted(found, key=lambda a: (RANKS.index(a.rank), _price(a.slower), -a.frees))

    def _one(self, change: Change) -> Advice | None:
        try:
            state = self._start.but(change)
        except FinetuneError:
            return None
        measured = self._measured(state)
        if measured is None:
            return None
        return self._advice(state, measured, change.why, change.rank)

    # ------------------------------------------------------------------------------------- together

    def together(self, each: Sequence[Advice]) -> Advice | None:
        """The cheapest set of changes that fits, None where none does."""
        picks: list[_Pick] = []
        for kind in self._order(each):
            added = self._add(picks, kind, self._frees.get(kind))
            if added is None:
                continue
            picks.append(added)
            if self._fits(self._composed(picks)):
                break
        else:
            return None
        state = self._composed(self._without_waste(picks))
        measured = self._measured(state)
        assert measured is not None
        why = "; ".join(change.why for change in state.made)
        rank = RANKS[max(RANKS.index(change.rank) for change in state.made)]
        return self._advice(state, measured, why, rank)

    def _order(self, each: Sequence[Advice]) -> list[str]:
        """Kinds of changes, each once, in the order in which they are made."""
        prices: dict[str, tuple[int, float]] = {}
        costs = {advice.change: advice.slower for advice in each}
        for place, change in enumerate(self._start.offered()):
            cost = costs.get(self._start.but(change).typed) if change.overrides else 0.0
            price = (RANKS.index(change.rank), _price(cost) if cost is not None else 1e9 + place)
            prices[change.kind] = min(prices.get(change.kind, price), price)
        return sorted(prices, key=lambda kind: prices[kind])

    def _add(self, picks: list[_Pick], kind: str, frees: int | None) -> _Pick | None:
        """The strongest change of a kind that frees something; milder ones are tried at the end.

        Args:
            picks: made before.
            kind: of the change.
            frees: most that one of this kind frees alone, None where none is known to.
        """
        state = self._composed(picks)
        count = sum(change.kind == kind for change in state.offered())
        if count and frees is not None and self._is_far(picks, frees):
            return _Pick(kind, count - 1)
        before = self._measured(state)
        for index in reversed(range(count)):
            strongest = [*picks, _Pick(kind, index)]
            found = self._measured(self._composed(strongest))
            if found is not None and (before is None or _less(found.footprint, before.footprint)):
                break
        else:
            return None
        return strongest[-1]

    def _is_far(self, picks: list[_Pick], frees: int) -> bool:
        """Whether twice what the changes free one by one would still not be enough."""
        freed = frees + sum(self._frees.get(pick.kind, 0) for pick in picks)
        held = self._asked.footprint
        return held.allocated + held.outside - 2 * freed > self._start.place.memory_bytes

    def _fastest(self, sets: list[list[_Pick]]) -> list[_Pick]:
        """Of sets of changes, some of which fit, the fastest that does; of equals the first."""
        fitting = [picks for picks in sets if self._fits(self._composed(picks))]
        return min(fitting, key=lambda picks: _price(self._slowness(self._composed(picks))))

    def _slowness(self, state: _State) -> float | None:
        found = self._measured(state)
        return None if found is None else self._slower(found)

    def _composed(self, picks: Iterable[_Pick]) -> _State:
        """The run with changes made one after the other; what no longer applies is left out."""
        state = self._start
        for pick in picks:
            alike = [change for change in state.offered() if change.kind == pick.kind]
            if alike:
                state = state.but(alike[min(pick.index, len(alike) - 1)])
        return state

    def _without_waste(self, picks: list[_Pick]) -> list[_Pick]:
        """Changes that are needed, or make the run faster; milder ones where these are enough."""
        for pick in sorted(picks, key=self._worth, reverse=True):
            place = picks.index(pick)
            before, after = picks[:place], picks[place + 1 :]
            if self._fits(self._composed([*before, *after])):
                if self._worth(pick) > (0, -FREE):
                    picks = [*before, *after]
            elif pick.index:
                alike = (_Pick(pick.kind, index) for index in range(pick.index + 1))
                picks = self._fastest([[*before, other, *after] for other in alike])
        return picks

    def _worth(self, pick: _Pick) -> tuple[int, float]:
        """How dear a change is: by rank, then by what it alone costs in speed."""
        alike = [change for change in self._start.offered() if change.kind == pick.kind]
        if not alike:  # applies only after another, so it is of that one's rank
            return 1, 0.0
        change = alike[min(pick.index, len(alike) - 1)]
        found = self._measured(self._start.but(change))
        slower = None if found is None else self._slower(found)
        return RANKS.index(change.rank), _price(slower) if slower is not None else FREE

    # --------------------------------------------------------------------------------------- faster

    def faster(self) -> list[Advice]:
        """The one or two changes that make a run faster by more than a tenth, and fit."""
        found = []
        for change in _for_speed(self._asked, self._start.place):
            advice = self._one(change)
            if advice is None or advice.fit != "fits" or advice.slower is None:
                continue
            if 1 / (1 + advice.slower) - 1 > GAIN:
                found.append(advice)
        best: dict[str, Advice] = {}
        for advice in sorted(found, key=lambda a: (_price(a.slower), -a.frees)):
            best.setdefault(advice.why, advice)
        return list(best.values())[:2]


def _for_speed(measured: Measured, place: Place) -> Iterable[Change]:
    """What may make a run faster, those that apply."""
    config, pace = measured.config, measured.pace
    if pace is None:
        return
    if attends_by_mask(config, place.device) and pace.share("attention") > GAIN:
        yield Change(
            "attention",
            ("model.attention=flash_attention_2",),
            f"attention under a mask takes {pace.share('attention'):.0%} of the step; without one "
            "it works on documents alone; needs the package flash-attn",
        )
    if setting(config, "gradient_checkpointing"):
        why = "nothing is computed twice: there is room to keep the activations"
        yield Change("checkpointing", ("train.gradient_checkpointing=false",), why)
    rows, times = rows_of(config)
    if attends_by_mask(config, place.device) and rows > 1:
        why = "packed rows of a micro-batch lie in one, under a mask as long as all of them"
        yield Change("rows", with_rows(1, times * rows), why)
    for factor in sorted({2, times}):
        if times > 1 and times % factor == 0:
            why = "larger micro-batches, fewer of them: a step keeps its tokens"
            yield Change("micro-batch", with_rows(rows * factor, times // factor), why)
    chained = (StepPart.POINTWISE, StepPart.FP8_CASTS, StepPart.WAITING)
    chain = sum(pace.share(part) for part in chained)
    if place.device.kind == "cuda" and not measured.compiled and chain > GAIN:
        why = "torch.compile joins chains of small kernels; the first step takes minutes"
        yield Change("compile", ("precision.compile=on",), why)


def _key(config: RunConfig, without: tuple[str, ...] = ()) -> str:
    train = {k: v for k, v in config.train.items() if k not in without}
    return config.model_copy(update={"train": train}).model_dump_json()


def _ends(offered: Iterable[Change]) -> list[Change]:
    """Of the micro-batches the largest and the smallest; of all other kinds every change."""
    by_kind: dict[str, list[Change]] = {}
    for change in offered:
        by_kind.setdefault(change.kind, []).append(change)
    for kind, alike in by_kind.items():
        if kind == "micro-batch" and len(alike) > 2:
            by_kind[kind] = [alike[0], alike[-1]]
    return [change for alike in by_kind.values() for change in alike]


def _price(slower: float | None) -> float:
    """For sorting: in steps of a thousandth, so that noise of rounding orders nothing."""
    return float("inf") if slower is None else round(slower, 3)


def _less(a: Footprint, b: Footprint) -> bool:
    return a.allocated < b.allocated or (a.allocated == b.allocated and a.shown < b.shown)
