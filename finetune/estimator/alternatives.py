"""Alternatives to a run (precisions, storages, optimizers), the gain from FP8, and the ladder.

All are rehearsed from the model's first layers, so shared errors cancel: a ratio is more accurate
than either time (`scatter_ratio` of the efficiency table).

*The ladder* is what each setting of a run brings in speed, from the stock stack upwards.

    stock            BF16, attention under a mask, adapters as PEFT has them, nothing compiled,
                     gradient checkpointing
    a rung each      documents without a mask, fused adapters, compiled layers, no checkpointing
    the run itself   its low precision, and then its output head in FP8; no checkpointing only then
                     if BF16 does not fit without

Only settings that the run has make a rung. Each rung has all before it, so that gains multiply to
the run's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.table import Table

from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.config.sft import padding_free
from finetune.config.train_section import CHECKPOINTING
from finetune.errors import FinetuneError
from finetune.estimator.knobs import IN_FOUR_BITS, IN_FP8, LORA, as_typed, setting
from finetune.estimator.predict import (
    FirstLayers,
    Option,
    Prediction,
    predict_fast,
    rehearse_first_layers,
)
from finetune.estimator.speed.roofline import shared
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import Interval, Pace, spread
from finetune.estimator.trace.fake_cuda import KERNELS
from finetune.hardware.gpus import Place
from finetune.hardware.requirements import resolve_there
from finetune.logging import plain_table
from finetune.training.model import resolve_attention, sketch
from finetune.units import MEMORY, count, size

# Fractions of a step below which a part is not named as a reason.
_CASTS, _ADAPTERS, _SENT, _REST = 0.01, 0.03, 0.03, 0.05
# Parts of a step that do not depend on the precision of linear layers.
_UNCHANGED = (
    *(StepPart.ATTENTION, StepPart.POINTWISE, StepPart.HEAD, StepPart.OPTIMIZER),
    StepPart.DEQUANTIZE,
)


FP8, BF16, COMPILED = "precision.compute=fp8", "precision.compute=bf16", "precision.compile=on"
CHECKPOINTED = f"train.{CHECKPOINTING}=true"


@dataclass(frozen=True)
class Alternative(Option):
    """Variant of a run.

    Attributes:
        speed: Speed relative to the original run, if known.
        memory: Allocated memory relative to the original run.
        why: Reasons for the difference in speed, or why it is impossible.
    """

    label: str
    speed: Interval | None = None
    memory: float | None = None
    why: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "change": list(self.change),
            "possible": self.prediction is not None,
            "fit": self.fit,
            "allocated": self.allocated,
            "step_seconds": self.pace.seconds if self.pace else None,
            "speed": list(self.speed) if self.speed else None,
            "memory": self.memory,
            "why": list(self.why),
        }


def table_of(alternatives: Sequence[Alternative]) -> Table:
    titles = ("alternative", "allocated", "speed", "range", "settings")
    table = plain_table(*titles, right=("allocated", "speed"))
    for other in alternatives:
        if other.allocated is None:
            table.add_row(other.label, "-", "-", "", other.why[0], style="dim")
            continue
        speed, within = "1x" if other.pace else "?", ""
        if other.speed:
            speed = f"{other.speed.value:.2f}x"
            within = f"{other.speed.low:.2f} to {other.speed.high:.2f}"
        memory = size(other.allocated, MEMORY)
        memory += "" if other.fit != "does not fit" else " (too much)"
        table.add_row(other.label, memory, speed, within, as_typed(other.change))
    return table


def twin_of(prediction: Prediction) -> Alternative | None:
    """Measure an FP8 run in BF16 and a BF16 run in FP8; None for other compute types.

    If FP8 compiles its layers, so does the BF16 twin: the gain from compiling is not FP8's.
    """
    config = prediction.config
    match config.precision.compute:
        case "fp8":
            return _in_bf16(prediction)
        case "bf16" if config.model.storage is None:
            return _alternative(prediction, "FP8", *(IN_FP8 if config.lora else (FP8,)))
        case _:
            return None


def _in_bf16(prediction: Prediction, *more: str) -> Alternative:
    """The BF16 twin of an FP8 run, with further settings."""
    label, typed = "BF16", (BF16,)
    if prediction.compiled:
        label, typed = "BF16, compiled", (*typed, COMPILED)
    return _alternative(prediction, label + ", checkpointed" * bool(more), *typed, *more)


def fitting_twin_of(prediction: Prediction, twin: Alternative | None) -> Alternative | None:
    """The BF16 twin with gradient checkpointing, if without it an FP8 run fits and BF16 does not.

    FP8 saves about a third less for backward, so there is a range of GPUs and batches in which
    only BF16 has to compute forward twice.
    """
    low = prediction.config.precision.compute == "fp8" and prediction.fit != "does not fit"
    if not low or twin is None or twin.prediction is None or twin.fit != "does not fit":
        return None
    if setting(prediction.config, CHECKPOINTING):
        return None
    other = _in_bf16(prediction, CHECKPOINTED)
    return None if other.fit == "does not fit" else other


def alternatives_of(prediction: Prediction) -> Iterator[Alternative]:
    """Measure other backends, scalings, storages and optimizers."""
    lora = prediction.config.lora is not None
    yield _alternative(prediction, "BF16", BF16)
    cast_each_time = ("precision.frozen=bf16",) if lora else ()
    for scaling in ("tensorwise", "rowwise"):
        typed = (FP8, "precision.backend=torchao", f"precision.scaling={scaling}", *cast_each_time)
        yield _alternative(prediction, f"FP8 torchao {scaling}", *typed)
    typed = (FP8, "precision.backend=te", "precision.scaling=delayed")
    yield _alternative(prediction, "FP8 Transformer Engine delayed", *typed)
    if lora:
        yield _alternative(prediction, "FP8 frozen base", *IN_FP8, "precision.frozen=fp8")
        yield _alternative(prediction, "QLoRA", *IN_FOUR_BITS)
    else:
        yield _alternative(prediction, "this, 8-bit optimizer", "train.optim=adamw_torch_8bit")
        yield _alternative(prediction, "this, LoRA r=16", *LORA)


def _alternative(asked: Prediction, label: str, *typed: str) -> Alternative:
    """Measure a run with these overrides."""
    try:
        other = predict_fast(with_overrides(asked.config, typed), asked.place)
    except FinetuneError as error:
        return Alternative(typed, None, label, why=(error.why or error.what,))
    memory = other.footprint.allocated / asked.footprint.allocated
    if other.pace is None or asked.pace is None:
        return Alternative(typed, other, label, memory=memory)
    ratio = asked.pace.seconds / other.pace.seconds
    # `scatter_ratio` comes from published pairs that differ in precision only.
    same = all(item.startswith("precision.") for item in typed)
    scatter = shared().scatter_ratio if same else shared().scatter_time
    speed = spread(ratio, scatter) if not math.isclose(ratio, 1) else None
    fp8_first, why = asked.config.precision.compute == "fp8", ()
    if same and (other.config.precision.compute == "fp8") != fp8_first:
        why = explain(*((asked.pace, other.pace) if fp8_first else (other.pace, asked.pace)))
        if asked.compiled != other.compiled:
            why += (
                "layers are compiled in FP8 only, whose casts need it; precision.compile=on would "
                "give BF16 its fused pointwise kernels too",
            )
    return Alternative(typed, other, label, speed, memory, why)


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


# ------------------------------------------------------------------------------------------ ladder


class _Setting(NamedTuple):
    """A setting of the run, and the overrides that put stock values in its place."""

    label: str
    typed: str
    stock: tuple[str, ...]


class Rung(NamedTuple):
    """Speed of all devices with a setting and those before it; `gain` is over the rung before."""

    label: str
    setting: str
    tokens_per_s: float
    gain: float


def ladder_of(
    prediction: Prediction, twin: Alternative | None, fitting: Alternative | None = None
) -> tuple[Rung, ...]:
    """Rungs from the stock stack to the run; none where a speed is unknown.

    Args:
        twin: the run in the other precision, already measured.
        fitting: the same with checkpoints, if it needs them: then they are left out last.
    """
    settings = list(_settings(prediction)) if prediction.place.device.kind == "cuda" else []
    if fitting is not None:
        twin = fitting
        settings.sort(key=lambda s: s.stock == (CHECKPOINTED,))
    if not settings or prediction.tokens_per_s is None:
        return ()
    speeds: list[float] = []
    seen: dict[str, FirstLayers] = {}
    try:
        for number in range(len(settings)):
            is_twin = settings[number].typed == FP8
            if is_twin and twin and twin.prediction and twin.pace:
                speeds.append(twin.pace.tokens_per_s * prediction.place.count)
                continue
            # of two values for one key the last one counts, that of the lower rung
            stock = [item for later in reversed(settings[number:]) for item in later.stock]
            config = with_overrides(prediction.config, stock)
            speeds.append(_tokens_per_s(config, prediction.place, seen))
    except FinetuneError:  # a rung that cannot run leaves no ladder
        return ()
    speeds.append(prediction.tokens_per_s)
    rungs = [Rung("stock settings, BF16", "", speeds[0], 1.0)]
    for step, speed, before in zip(settings, speeds[1:], speeds, strict=False):
        rungs.append(Rung(step.label, step.typed, speed, speed / before))
    return tuple(rungs)


def ladder_table(rungs: tuple[Rung, ...]) -> Table:
    titles = ("what brings speed here", "tokens/s", "gain", "setting")
    table = plain_table(*titles, right=("tokens/s", "gain"))
    for number, rung in enumerate(rungs):
        gain = f"{rung.gain:.2f}x" if number else ""
        table.add_row(rung.label, count(rung.tokens_per_s), gain, rung.setting)
    return table


def _settings(prediction: Prediction) -> Iterator[_Setting]:
    """Settings of a run that differ from the stock stack, in the order of the rungs."""
    config, precision = prediction.config, prediction.config.precision
    model = sketch(config, layers=1)
    attention = resolve_attention(config, model, prediction.place.device).implementation
    if attention in KERNELS and padding_free(config.train):
        typed = f"model.attention={attention}"
        yield _Setting("attention without a mask", typed, ("model.attention=sdpa",))
    if config.lora is not None and precision.fused_adapters and config.model.storage != "nf4":
        stock = ("precision.fused_adapters=false",)
        yield _Setting("fused adapters", "precision.fused_adapters=true", stock)
    if prediction.compiled:
        yield _Setting("compiled layers", COMPILED, ("precision.compile=off",))
    if not setting(config, CHECKPOINTING):
        yield _Setting("no checkpointing", f"train.{CHECKPOINTING}=false", (CHECKPOINTED,))
    if precision.compute == "fp8":
        stock = (BF16, *((COMPILED,) if prediction.compiled else ()))
        yield _Setting(prediction.resolution.label, FP8, stock)
        if precision.map.get("output") == "fp8":
            stock = ("~precision.map.output",)
            yield _Setting("FP8 output head", "precision.map.output=fp8", stock)


def _tokens_per_s(config: RunConfig, place: Place, seen: dict[str, FirstLayers]) -> float:
    """Speed of a variant on all devices; compiled and uncompiled ones share a rehearsal."""
    key = config.model_dump_json(exclude={"precision": {"compile"}})
    if key not in seen:
        seen[key] = rehearse_first_layers(config, place)
    resolution = resolve_there(config.precision, place)
    found = replace(seen[key], config=config, resolution=resolution).at(place)
    assert found.tokens_per_s is not None
    return found.tokens_per_s
