"""One cause of a verdict: its share of the step, in words, on what evidence, what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from finetune.analysis.diagnose.facts import Facts


@dataclass(frozen=True)
class Cause:
    """Why FP8 is not faster, or no faster, here.

    Attributes:
        name: one or two words; stable.
        share: of the step's time that it is about, 0 to 1.
        words: what it is.
        evidence: what was measured that says so.
        change: overrides of the recipe to try, together; empty where there is nothing to set.
        hint: what else to do or to know of the change.
    """

    name: str
    share: float
    words: str
    evidence: str
    change: tuple[str, ...] = ()
    hint: str = ""


Rule = Callable[[Facts], Cause | None]
"""Reads the facts of a step; None where the cause is not at work."""


def percent(share: float) -> str:
    """`12.3 %`."""
    return f"{share:.1%}".replace("%", " %")


def larger_batch(facts: Facts, times: int) -> tuple[str, ...]:
    """Micro-batches that many times as large, with as many tokens in a step where that goes."""
    train = facts.config.train
    rows = int(train.get("per_device_train_batch_size", 8)) * times
    change = [f"train.per_device_train_batch_size={rows}"]
    accumulation = int(train.get("gradient_accumulation_steps", 1))
    if accumulation > 1:
        fewer = max(1, accumulation // times)
        change.append(f"train.gradient_accumulation_steps={fewer}")
    return tuple(change)
