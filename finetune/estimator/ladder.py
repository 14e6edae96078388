"""The ladder: what each setting of a run brings in speed, from the stock stack upwards.

    stock            BF16, attention under a mask, nothing compiled, gradient checkpointing
    a rung each      documents without a mask, compiled layers, no checkpointing
    the run itself   its low precision, and then its output head in FP8; no checkpointing only then
                     if BF16 does not fit without

Only settings that the run has make a rung. Each rung has all before it, so that gains multiply to
the run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.table import Table

from finetune.config.sft import padding_free
from finetune.config.train_section import CHECKPOINTING
from finetune.estimator.changes import BF16, CHECKPOINTED, COMPILED, FP8
from finetune.estimator.predict import Prediction
from finetune.estimator.trace.fake_cuda import KERNELS
from finetune.estimator.variants import Variant, variant_of
from finetune.logging import plain_table
from finetune.training.model import resolve_attention, sketch
from finetune.units import count


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
    asked: Prediction, twin: Variant | None, fitting: Variant | None = None
) -> tuple[Rung, ...]:
    """Rungs from the stock stack to the run; none where a speed is unknown.

    Args:
        twin: the run in the other precision, already predicted.
        fitting: the same with checkpoints, if it needs them: then they are left out last.
    """
    settings = list(_settings(asked)) if asked.place.device.kind == "cuda" else []
    if fitting is not None:
        twin = fitting
        settings.sort(key=lambda s: s.stock == (CHECKPOINTED,))
    rungs: list[Rung] = []
    for number, step in enumerate([*settings, None] if settings else []):
        if step is None:
            found = asked
        elif step.typed == FP8 and twin is not None and twin.pace is not None:
            found = twin.prediction
        else:
            # of two values for one key the last one counts, that of the lower rung
            stock = [item for later in reversed(settings[number:]) for item in later.stock]
            found = variant_of(asked, *stock).prediction
        if found is None or found.tokens_per_s is None:  # a rung that cannot run leaves no ladder
            return ()
        below = settings[number - 1] if number else _Setting("stock settings, BF16", "", ())
        gain = found.tokens_per_s / rungs[-1].tokens_per_s if rungs else 1.0
        rungs.append(Rung(below.label, below.typed, found.tokens_per_s, gain))
    return tuple(rungs)


def ladder_table(rungs: tuple[Rung, ...]) -> Table:
    titles = ("what brings speed here", "tokens/s", "gain", "setting")
    table = plain_table(*titles, right=("tokens/s", "gain"))
    for number, rung in enumerate(rungs):
        gain = f"{rung.gain:.2f}x" if number else ""
        table.add_row(rung.label, count(rung.tokens_per_s), gain, rung.setting)
    return table


def _settings(asked: Prediction) -> Iterator[_Setting]:
    """Settings of a run that differ from the stock stack, in the order of the rungs."""
    config, precision = asked.config, asked.config.precision
    attention = resolve_attention(config, sketch(config, layers=1), asked.place.device)
    if (name := attention.implementation) in KERNELS and padding_free(config.train):
        typed = f"model.attention={name}"
        yield _Setting("attention without a mask", typed, ("model.attention=sdpa",))
    if asked.compiled:
        yield _Setting("compiled layers", COMPILED, ("precision.compile=off",))
    if not config.train.gradient_checkpointing:
        yield _Setting("no checkpointing", f"train.{CHECKPOINTING}=false", (CHECKPOINTED,))
    if precision.compute == "fp8":
        stock = (BF16, *((COMPILED,) if asked.compiled else ()))
        yield _Setting(asked.resolution.label, FP8, stock)
        if precision.map.get("output") == "fp8":
            stock = ("~precision.map.output",)
            yield _Setting("FP8 output head", "precision.map.output=fp8", stock)
