"""Variants of a run: other settings or more GPUs, each predicted beside the run itself.

All are rehearsed from the model's first layers, so errors that both share cancel: a ratio is more
accurate than either time (`scatter_ratio` of the efficiency table). Here are the twin in the other
precision and the alternatives; `finetune.estimator.advice` looks for changes that make a run fit,
`finetune.estimator.ladder` takes a run's settings away one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.estimator.knobs import (
    BF16,
    CHECKPOINTED,
    COMPILED,
    FP8,
    IN_FOUR_BITS,
    IN_FP8,
    LORA,
    RANKS,
    Change,
    Rank,
    as_typed,
    typed,
)
from finetune.estimator.memory.footprint import Fit
from finetune.estimator.predict import Prediction, predict_fast, tried
from finetune.estimator.speed.roofline import shared
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import Interval, Pace, spread
from finetune.hardware.gpus import Place
from finetune.hardware.requirements import check_optimizer_here
from finetune.logging import plain_table
from finetune.units import MEMORY, size

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
        rank: effect on the training (`finetune.estimator.knobs`).
    """

    asked: Prediction
    change: tuple[str, ...]
    prediction: Prediction | None
    why: str = ""
    label: str = ""
    rank: Rank = "same"

    @property
    def fit(self) -> Fit:
        """Verdict on memory; an impossible run does not fit."""
        return "does not fit" if self.prediction is None else self.prediction.fit

    @property
    def allocated(self) -> int | None:
        return self.prediction.footprint.allocated if self.prediction else None

    @property
    def pace(self) -> Pace | None:
        return self.prediction.pace if self.prediction else None

    @property
    def frees(self) -> int:
        """Allocated bytes freed; negative: used."""
        return 0 if self.allocated is None else self.asked.footprint.allocated - self.allocated

    @property
    def times(self) -> float | None:
        """Speed of each device relative to the run's; None if unknown."""
        if self.pace is None or self.asked.pace is None:
            return None
        return self.pace.tokens_per_s / self.asked.pace.tokens_per_s

    @property
    def slower(self) -> float | None:
        """Relative increase of the time per token, negative if faster; None if unknown."""
        return None if self.times is None else 1 / self.times - 1

    @property
    def speed(self) -> Interval | None:
        """`times` and its range; None if unknown or one."""
        if self.times is None or math.isclose(self.times, 1):
            return None
        # `scatter_ratio` comes from published pairs that differ in precision only.
        table = shared()
        return spread(self.times, table.scatter_ratio if self._same else table.scatter_time)

    @property
    def gain(self) -> Interval | None:
        """Speed of FP8 relative to BF16, whichever of the two the run is, and its range."""
        if self.speed is None or self.asked.config.precision.compute != "fp8":
            return self.speed
        value, low, high = self.speed
        return Interval(1 / value, 1 / high, 1 / low)

    @property
    def _same(self) -> bool:
        """True if it differs from the run in precision alone."""
        return all(item.startswith("precision.") for item in self.change)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the difference in speed between FP8 and BF16, or why it is impossible."""
        if self.prediction is None:
            return (self.why,)
        pair = {x.config.precision.compute == "fp8": x for x in (self.asked, self.prediction)}
        if not self._same or len(pair) == 1:
            return ()
        fp8, plain = pair[True], pair[False]
        if fp8.pace is None or plain.pace is None:
            return ()
        found = explain(fp8.pace, plain.pace)
        if fp8.compiled == plain.compiled:
            return found
        return (
            *found,
            "layers are compiled in FP8 only, whose casts need it; precision.compile=on would "
            "give BF16 its fused pointwise kernels too",
        )

    def facts(self) -> dict[str, Any]:
        asked = self.asked.footprint.allocated
        return {
            "label": self.label,
            "change": list(self.change),
            "possible": self.prediction is not None,
            "fit": self.fit,
            "allocated": self.allocated,
            "step_seconds": self.pace.seconds if self.pace else None,
            "speed": list(self.speed) if self.speed else None,
            "memory": None if self.allocated is None else self.allocated / asked,
            "why": list(self.reasons),
        }


def variant_of(asked: Prediction, *overrides: str, label: str = "") -> Variant:
    """A run with these overrides."""
    return with_changes(asked, (Change(label, overrides, ""),))


def with_changes(asked: Prediction, made: Sequence[Change]) -> Variant:
    """A run with some changes made, one after the other."""
    label = made[0].kind if made else ""
    change, rank = typed(made), RANKS[max((RANKS.index(c.rank) for c in made), default=0)]

    def predict() -> Prediction:
        config, place = changed(asked, made)
        check_optimizer_here(config.train, place.device)
        return predict_fast(config, place)

    found, why_not = tried(predict)
    why = "; ".join(c.why for c in made) if found else why_not
    return Variant(asked, change, found, why, label, rank)


def changed(asked: Prediction, made: Iterable[Change]) -> tuple[RunConfig, Place]:
    """The configuration and place that changes lead to, made one after the other.

    Raises:
        ConfigError: one conflicts with the others.
    """
    config, place = asked.config, asked.place
    for one in made:
        config = with_overrides(config, one.overrides)
        place = replace(place, count=one.gpus or place.count)
    return config, place


def table_of(variants: Sequence[Variant]) -> Table:
    titles = ("alternative", "allocated", "speed", "range", "settings")
    table = plain_table(*titles, right=("allocated", "speed"))
    for other in variants:
        if other.allocated is None:
            table.add_row(other.label, "-", "-", "", other.why, style="dim")
            continue
        speed, within = "1x" if other.pace else "?", ""
        if other.speed:
            speed = f"{other.speed.value:.2f}x"
            within = f"{other.speed.low:.2f} to {other.speed.high:.2f}"
        memory = size(other.allocated, MEMORY)
        memory += "" if other.fit != "does not fit" else " (too much)"
        table.add_row(other.label, memory, speed, within, as_typed(other.change))
    return table


# -------------------------------------------------------------------------------- other precisions


def twin_of(asked: Prediction) -> Variant | None:
    """An FP8 run in BF16 and a BF16 run in FP8; None for other compute types.

    If FP8 compiles its layers, so does the BF16 twin: the gain from compiling is not FP8's.
    """
    config = asked.config
    match config.precision.compute:
        case "fp8":
            return _in_bf16(asked)
        case "bf16" if config.model.storage is None:
            return variant_of(asked, *(IN_FP8 if config.lora else (FP8,)), label="FP8")
        case _:
            return None


def _in_bf16(asked: Prediction, *more: str) -> Variant:
    """The BF16 twin of an FP8 run, with further settings."""
    label, overrides = "BF16", (BF16,)
    if asked.compiled:
        label, overrides = "BF16, compiled", (BF16, COMPILED)
    return variant_of(asked, *overrides, *more, label=label + ", checkpointed" * bool(more))


def fitting_twin_of(asked: Prediction, twin: Variant | None) -> Variant | None:
    """The BF16 twin with gradient checkpointing, if without it an FP8 run fits and BF16 does not.

    FP8 saves about a third less for backward, so there is a range of GPUs and batches in which
    only BF16 has to compute forward twice.
    """
    low = asked.config.precision.compute == "fp8" and asked.fit != "does not fit"
    if not low or twin is None or twin.prediction is None or twin.fit != "does not fit":
        return None
    if asked.config.train.gradient_checkpointing:
        return None
    other = _in_bf16(asked, CHECKPOINTED)
    return None if other.fit == "does not fit" else other


def alternatives_of(asked: Prediction) -> Iterator[Variant]:
    """Other backends, scalings, storages and optimizers."""
    lora = asked.config.lora is not None
    yield variant_of(asked, BF16, label="BF16")
    cast_each_time = ("precision.frozen=bf16",) if lora else ()
    for scaling in ("tensorwise", "rowwise"):
        yield variant_of(
            asked,
            *(FP8, "precision.backend=torchao", f"precision.scaling={scaling}", *cast_each_time),
            label=f"FP8 torchao {scaling}",
        )
    te = ("precision.backend=te", "precision.scaling=delayed", "precision.power_of_two_scales=null")
    yield variant_of(asked, FP8, *te, label="FP8 Transformer Engine delayed")
    if lora:
        yield variant_of(asked, *IN_FP8, "precision.frozen=fp8", label="FP8 frozen base")
        yield variant_of(asked, *IN_FOUR_BITS, label="QLoRA")
    else:
        yield variant_of(asked, "train.optim=adamw_torch_8bit", label="this, 8-bit optimizer")
        yield variant_of(asked, *LORA, label="this, LoRA r=16")


def explain(fp8: Pace, plain: Pace) -> tuple[str, ...]:
    """Explain the speed of FP8 relative to BF16, part by part."""
    reasons = []
    before, after = plain.classes.get(StepPart.LINEARS, 0.0), fp8.classes.get(StepPart.LINEARS, 0.0)
    if before and after:
        reasons.append(
            f"products of linear layers are {before / plain.seconds:.0%} of the BF16 step; FP8 "
            f"makes them {before / after:.2f} times as fast"
        )
    if (casts := fp8.share(StepPart.FP8_CASTS)) > _CASTS:
        gained, cost = before - after, fp8.classes[StepPart.FP8_CASTS]
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
