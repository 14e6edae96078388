"""What changes of a run free and cost, and whether it then fits: one table, a row a change.

Every row is predicted by a rehearsal of the model's first layers, as the run is: errors that both
share cancel, so that a ratio is more accurate than either time (`scatter_ratio` of the efficiency
table), and what two changes share is counted once. First stands the run in the other precision
(`PrecisionPair`), the others those of `finetune.estimator.changes`.

*What makes it fit*: all changes up to a rank (same training, other formats, adapters, more GPUs),
each kind with its strongest, and then without those that prove unnecessary, the dearest first.

    A full fine-tuning needs 30 GiB of 24. Fused AdamW (free), micro-batches of 1 instead of 4
    (1.1 times the time) and checkpointing (1.3 times) leave 20, so that no format has to change.
    Without checkpointing it is 26: it stays. Without the micro-batches 23, which fits: they go;
    without fused AdamW 25, too much. So: checkpointing and fused AdamW.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.estimator.changes import (
    BF16,
    CHECKPOINTED,
    COMPILED,
    FP8,
    IMAGES,
    IN_FP8,
    RANKS,
    Change,
    Rank,
    as_typed,
    changes,
    freeing,
    typed,
)
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.predict import Prediction, predict_fast, tried
from finetune.estimator.speed.roofline import shared
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import Interval, Timing, spread
from finetune.hardware.gpus import Machine
from finetune.hardware.requirements import check_optimizer_here
from finetune.logging import PIPE_WIDTH, plain_table
from finetune.units import MEMORY, duration, size

LEAST = 0.002
"""Changes that free less than this fraction of the allocated memory are no answer."""
# Fractions of a step below which a part is not named as a reason.
_CASTS, _ADAPTERS, _SENT, _REST = 0.01, 0.03, 0.03, 0.05
# Parts of a step that do not depend on the precision of linear layers.
_UNCHANGED = (
    *(StepPart.ATTENTION, StepPart.POINTWISE, StepPart.HEAD, StepPart.OPTIMIZER),
    StepPart.DEQUANTIZE,
)


@dataclass(frozen=True)
class Variant:
    """A variant of a run, compared with the run itself.

    Attributes:
        asked: the run itself.
        change: command-line parts that produce it: `--gpus N`, overrides.
        prediction: memory and time; None if it cannot run.
        why: effect and drawbacks of the change, or why it cannot run.
        rank: effect on the training (`finetune.estimator.changes`).
        tokens: tokens of a row with it for each one without, where both say the same.
    """

    asked: Prediction
    change: tuple[str, ...]
    prediction: Prediction | None
    why: str = ""
    label: str = ""
    rank: Rank = "same"
    tokens: float = 1.0

    @property
    def fit(self) -> Fit:
        """Verdict on memory; an impossible run does not fit."""
        return "does not fit" if self.prediction is None else self.prediction.fit

    @property
    def outcome(self) -> str:
        """The same in a word of the table; `cannot run` of a run that does not."""
        return self.fit if self.prediction else "cannot run"

    @property
    def allocated(self) -> int | None:
        return self.prediction.footprint.allocated if self.prediction else None

    @property
    def timing(self) -> Timing | None:
        return self.prediction.timing if self.prediction else None

    @property
    def frees(self) -> int:
        """Allocated bytes freed; negative: used."""
        return 0 if self.allocated is None else self.asked.footprint.allocated - self.allocated

    @property
    def times(self) -> float | None:
        """Speed of each device relative to the run's, on the same text; None if unknown."""
        if self.timing is None or self.asked.timing is None:
            return None
        return self.timing.tokens_per_s / self.asked.timing.tokens_per_s / self.tokens

    @property
    def speed_shown(self) -> str:
        """`0.85x`, of each of the GPUs where their number changes; `?` if unknown."""
        if self.times is None:
            return "?" if self.prediction else "-"
        return f"{self.times:.2f}x" + ", each GPU" * (self.rank == "devices")

    @property
    def freed_shown(self) -> str:
        """`3.0 GiB`, `-1.2 GiB` where it takes memory."""
        if self.allocated is None:
            return "-"
        shown = size(abs(self.frees), MEMORY, whole_below="GiB")
        return f"-{shown}" if self.frees < 0 else shown

    def facts(self) -> dict[str, Any]:
        """`trains` is its rank, the effect on the training; `frees` and `allocated` in bytes."""
        return {
            "label": self.label,
            "change": list(self.change),
            "possible": self.prediction is not None,
            "frees": self.frees,
            "allocated": self.allocated,
            "step_seconds": self.timing.seconds if self.timing else None,
            "times": self.times,
            "fit": self.fit,
            "trains": self.rank,
            "why": self.why,
        }


def variant_of(asked: Prediction, *overrides: str, label: str = "") -> Variant:
    """A run with these overrides."""
    return with_changes(asked, (Change(label, overrides, ""),))


def with_changes(asked: Prediction, made: Sequence[Change]) -> Variant:
    """A run with some changes made, one after the other."""
    label = made[0].kind if made else ""
    # Several changes train as differently as the one that changes most.
    change, rank = typed(made), RANKS[max((RANKS.index(c.rank) for c in made), default=0)]

    def predict() -> Prediction:
        config, machine = changed(asked, made)
        # A rehearsal would step with an optimizer that needs a GPU or an extra which is not there.
        check_optimizer_here(config.train, machine.device)
        return predict_fast(config, machine)

    found, why_not = tried(predict)
    why = "; ".join(c.why for c in made) if found else why_not
    return Variant(asked, change, found, why, label, rank, math.prod(c.tokens for c in made))


def changed(asked: Prediction, made: Iterable[Change]) -> tuple[RunConfig, Machine]:
    """The configuration and machine that changes lead to, made one after the other.

    Raises:
        ConfigError: one conflicts with the others.
    """
    config, machine = asked.config, asked.machine
    for one in made:
        config = with_overrides(config, one.overrides)
        # One after the other: a later change may need what an earlier one set (a backend and its
        # scaling).
        machine = replace(machine, count=one.gpus or machine.count)
    return config, machine


# ------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Changes:
    """Changes of a run, predicted.

    Attributes:
        fit: verdict on the run itself.
        rows: by rank and cost.
        together: the cheapest set found that makes it fit; None if it already fits or none does.
    """

    fit: Fit
    rows: tuple[Variant, ...] = ()
    together: Variant | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "rows": [row.facts() for row in self.rows],
            "fits_with": None if self.together is None else self.together.facts(),
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [_ChangeTable(self.rows)] if self.rows else []
        if self.fit != "fits":
            parts.append(self._answer())
        return Group(*parts)

    def _answer(self) -> Text:
        found = self.together
        if found is None:
            nothing = "no set of these changes makes it fit: "
            return Text(f"{nothing}a smaller model, or a GPU with more memory", "bold")
        cost = f" (frees {found.freed_shown}, {found.speed_shown} the speed"
        cost += ", changes training)" if found.rank in ("otherwise", "adapters") else ")"
        return Text.assemble(("fits with ", "bold green"), as_typed(found.change), cost)


@dataclass(frozen=True)
class _ChangeTable:
    """A change per line; in a narrow terminal its settings, and below them what comes of it."""

    rows: Sequence[Variant]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= PIPE_WIDTH:
            titles = ("this change", "frees", "speed", "then it", "what that is")
            table = plain_table(*titles, right=("frees", "speed"))
            for row in self.rows:
                cells = as_typed(row.change), row.freed_shown, row.speed_shown, row.outcome
                table.add_row(*cells, row.why or row.label, style=None if row.prediction else "dim")
            yield table
            return
        yield Text("this change: frees, speed, then it", "bold")
        for row in self.rows:
            yield Text(as_typed(row.change))
            outcome = f"{row.freed_shown}, {row.speed_shown}, {row.outcome}: {row.why or row.label}"
            yield Padding(Text(outcome, "dim"), (0, 0, 0, 2), expand=False)


def changes_of(
    asked: Prediction, pair: PrecisionPair | None = None, *, every: bool = False
) -> Changes:
    """Predict what changes do.

    Args:
        pair: the run beside its twin, which make the first rows of one that fits.
        every: of all ranks, also where the run fits; by default those that train the same, one of
            each kind, with sizes of images, and where it does not fit all that free memory.
    """
    fits = asked.fit == "fits"
    offered = changes(
        asked.config, asked.machine.device, asked.machine.count,
        compiled=asked.compiled, image_tokens=asked.image_tokens,
    )  # fmt: skip
    if fits and not every:
        shown = (one for one in offered if one.rank == "same" or one.kind == IMAGES)
        # Reversed: of several changes of one kind the first stays, the mildest; all of images.
        mild = {
            one.overrides if one.kind == IMAGES else one.kind: one for one in reversed([*shown])
        }
        offered = tuple(mild.values()) if asked.timing else ()
    elif not every:
        offered = tuple(one for one in offered if one.memory)
    alone = sorted((with_changes(asked, (one,)) for one in offered), key=_cost)
    if fits or every:
        twins = pair.rows if pair else ()
        # The twin is among the changes as well, by another name.
        known = {row.change for row in twins}
        rows = [*twins, *(row for row in alone if row.change not in known)]
    else:
        rows = [row for row in alone if row.frees > LEAST * asked.footprint.allocated]
    return Changes(asked.fit, tuple(rows), None if fits else _together(asked, alone))


def _together(asked: Prediction, alone: Sequence[Variant]) -> Variant | None:
    """The cheapest set found that fits (see the module docstring), or None."""
    tried = functools.cache(functools.partial(with_changes, asked))

    @functools.cache
    def made(kinds: tuple[str, ...]) -> tuple[Change, ...]:
        """The strongest change of each kind that can run after those of the kinds before it."""
        if not kinds:
            return ()
        before = made(kinds[:-1])
        config, machine = changed(asked, before)
        # Asked for again after each step: what applies depends on what was changed before (a base
        # is stored otherwise once there are adapters).
        offered = freeing(config, machine.device, machine.count, asked.image_tokens)
        alike = [(*before, one) for one in offered if one.kind == kinds[-1]]
        return next((some for some in reversed(alike) if tried(some).prediction), before)

    for rank in RANKS:
        cheaper = [row for row in alone if RANKS.index(row.rank) <= RANKS.index(rank)]
        kinds = tuple(dict.fromkeys(row.label for row in cheaper))
        if tried(made(kinds)).fit != "fits":
            continue
        # From the dearest on, each that is left out as long as the rest still fits.
        for dear in reversed(kinds):
            without = tuple(kind for kind in kinds if kind != dear)
            kinds = without if tried(made(without)).fit == "fits" else kinds
        fitting = [row for row in cheaper if row.fit == "fits"]  # a weaker change may be enough
        return min([*fitting, tried(made(kinds))], key=_cost)
    return None


def _cost(one: Variant) -> tuple[int, float, int]:
    """Variants by rank, then time a token in steps of 0.001 (no noise), then memory freed."""
    price = math.inf if one.times is None else round(1 / one.times, 3)
    return RANKS.index(one.rank), price, -one.frees


# -------------------------------------------------------------------------------- other precisions


@dataclass(frozen=True)
class PrecisionPair:
    """A run in FP8 and in BF16, alike in all other settings: batch, checkpointing, compiled layers.

    Attributes:
        asked: the run itself, in one of the two.
        twin: the run in the other precision.
        compiled: the BF16 run with compiled layers, if it has none and its FP8 twin has.
        fitting: the BF16 twin with gradient checkpointing, if it fits with that alone.
    """

    asked: Prediction
    twin: Variant
    compiled: Variant | None = None
    fitting: Variant | None = None

    @property
    def rows(self) -> tuple[Variant, ...]:
        return tuple(one for one in (self.compiled, self.twin, self.fitting) if one)

    @property
    def timings(self) -> tuple[Timing, Timing] | None:
        """Speeds of FP8 and of BF16; None if one cannot run or is not known."""
        found = [self.asked.timing, self.twin.timing]
        if self.asked.config.precision.compute == "bf16":
            found = [self.twin.timing, self.compiled.timing if self.compiled else self.asked.timing]
        # A BF16 run is compared as compiled if its FP8 twin is: else the ratio would show
        # compiling.
        fp8, bf16 = found
        return None if fp8 is None or bf16 is None else (fp8, bf16)

    @property
    def gain(self) -> Interval | None:
        """Speed of FP8 relative to BF16, and its range; None if unknown."""
        if self.timings is None:
            return None
        fp8, bf16 = self.timings
        return spread(fp8.tokens_per_s / bf16.tokens_per_s, shared().scatter_ratio)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why FP8 is faster or slower than BF16, or why one of them cannot run."""
        if self.twin.prediction is None:
            return (self.twin.why,)
        return explain(*self.timings) if self.timings else ()

    @property
    def alike(self) -> str:
        """What FP8 and BF16 both have."""
        compiled = (self.compiled.prediction if self.compiled else None) or self.asked
        saving = self.asked.config.train.gradient_checkpointing
        return (
            f"both {'' if compiled.compiled else 'un'}compiled, "
            f"{'with' if saving else 'without'} gradient checkpointing"
        )

    @property
    def unlike(self) -> tuple[str, ...]:
        """What BF16 does with other settings, which no ratio is made of."""
        said = []
        if self.fitting is not None and self.fitting.timing is not None:
            seconds = duration(self.fitting.timing.seconds)
            said.append(f"BF16 does not fit so: with checkpointing a step takes {seconds}")
        if self.compiled is not None and self.asked.timing is not None:
            said.append(f"BF16 as asked, uncompiled: {duration(self.asked.timing.seconds)} a step")
        return tuple(said)

    def facts(self) -> dict[str, Any]:
        return {
            "rows": [one.facts() for one in self.rows],
            "fp8_over_bf16": list(self.gain) if self.gain else None,
            "why": [*self.unlike, *self.reasons],
        }


def pair_of(asked: Prediction) -> PrecisionPair | None:
    """A run beside its twin in the other precision; None for compute types other than FP8 and BF16.

    If FP8 compiles its layers, so does BF16: what compiling gains is not FP8's.
    """
    config = asked.config
    match config.precision.compute:
        case "fp8":
            twin = _in_bf16(asked)
            return PrecisionPair(asked, twin, fitting=_fitting(asked, twin))
        case "bf16" if config.model.storage is None:
            twin = variant_of(asked, *(IN_FP8 if config.lora else (FP8,)), label="FP8")
            # As the run is; a BF16 run that is not compiled is shown compiled beside it.
            if twin.prediction is None or twin.prediction.compiled == asked.compiled:
                return PrecisionPair(asked, twin)
            twin = replace(twin, label="FP8, compiled")
            return PrecisionPair(asked, twin, variant_of(asked, COMPILED, label="BF16, compiled"))
        case _:
            return None


def _in_bf16(asked: Prediction, *more: str) -> Variant:
    """The BF16 twin of an FP8 run, with further settings."""
    label, overrides = "BF16", (BF16,)
    if asked.compiled:
        label, overrides = "BF16, compiled", (BF16, COMPILED)
    return variant_of(asked, *overrides, *more, label=label + ", checkpointed" * bool(more))


def _fitting(asked: Prediction, twin: Variant) -> Variant | None:
    """The BF16 twin with gradient checkpointing, if without it an FP8 run fits and BF16 does not.

    FP8 saves about a third less for backward, so there is a range of GPUs and batches in which
    only BF16 has to compute forward twice.
    """
    if asked.fit == "does not fit" or twin.prediction is None or twin.fit != "does not fit":
        return None
    if asked.config.train.gradient_checkpointing:
        return None
    other = _in_bf16(asked, CHECKPOINTED)
    return None if other.fit == "does not fit" else other


def explain(fp8: Timing, plain: Timing) -> tuple[str, ...]:
    """Explain the speed of FP8 relative to BF16, part by part."""
    reasons = []
    before, after = plain.classes.get(StepPart.LINEARS, 0.0), fp8.classes.get(StepPart.LINEARS, 0.0)
    # Without products of linear layers, as where all are kept high, there is no gain to explain.
    if before and after:
        reasons.append(
            f"products of linear layers are {before / plain.seconds:.0%} of the BF16 step; FP8 "
            f"makes them {before / after:.2f} times as fast"
        )
    if (casts := fp8.share(StepPart.FP8_CASTS)) > _CASTS:
        gained, cost = before - after, fp8.classes[StepPart.FP8_CASTS]
        # A gain of zero or below would give a share without a meaning.
        eaten = "more than" if cost > gained else f"{cost / gained:.0%} of what"
        reasons.append(f"casts to FP8 take {casts:.0%} of the step, {eaten} the products gain")
    if (adapters := fp8.share(StepPart.ADAPTERS)) > _ADAPTERS:
        reasons.append(f"{adapters:.0%} of the step is adapter traffic, whatever the rank")
    sent = [p.classes.get(StepPart.COMMUNICATION, 0.0) for p in (fp8, plain)]
    if sent[1] - sent[0] > _SENT * fp8.seconds:
        reasons.append(
            f"GPUs wait {sent[0] / fp8.seconds:.0%} of the step for each other, and "
            f"{sent[1] / plain.seconds:.0%} of the BF16 step: FP8 weights are half as much to send"
        )
    rest = [f"{part} {fp8.share(part):.0%}" for part in _UNCHANGED if fp8.share(part) > _REST]
    if rest:
        reasons.append(f"what FP8 leaves as it is: {', '.join(rest)}")
    if (waiting := fp8.share(StepPart.WAITING)) > _REST:
        reasons.append(
            f"the GPU waits for the host {waiting:.0%} of the step: too few tokens in one"
        )
    return tuple(reasons)
