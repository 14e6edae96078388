"""Why FP8 is or is not faster here: a list of causes, each read from the facts of a step.

FP8 makes one thing faster, products of linear layers, by a factor r of at most two. With T seconds
of a BF16 step, b of them in products that FP8 takes, and c seconds for the casts it adds,

    speed = T / (T - b + b / r + c)          at best T / (T - b / 2), were casts free

so there are two kinds of cause. One is in FP8 itself (`causes_fp8`): r is small, c is large, or
products that could be in b are not. The other is the rest of the step (`causes_rest`), T - b, of
which each part is told with its share.

A cause is a function from `Facts` to a `Cause` or None: to add one, write it and put it in the
list. Shares overlap where one cause is inside another (a recomputed cast is both), so they need not
add up. A change is an override of the recipe and is checked: one that this recipe refuses is not
proposed.
"""

from __future__ import annotations

from dataclasses import replace

from finetune.analysis.diagnose import causes_fp8, causes_rest
from finetune.analysis.diagnose.cause import Cause, Rule
from finetune.analysis.diagnose.facts import Facts
from finetune.config.recipe import with_overrides
from finetune.errors import ConfigError

RULES: tuple[Rule, ...] = (
    causes_fp8.not_asked,
    causes_fp8.emulated,
    causes_fp8.few_tokens,
    causes_fp8.casts_not_compiled,
    causes_fp8.casts,
    causes_fp8.small_layers,
    causes_fp8.unaligned,
    causes_fp8.kept,
    causes_fp8.kept_blocks,
    causes_fp8.mapped,
    causes_fp8.high_gemms,
    causes_rest.adapters,
    causes_rest.recompute,
    causes_rest.attention,
    causes_rest.head,
    causes_rest.optimizer,
    causes_rest.host,
    causes_rest.pointwise,
    causes_rest.communication,
)


def causes_of(facts: Facts) -> list[Cause]:
    """All causes at work: emulation before all, then the largest share first."""
    found = [cause for rule in RULES if (cause := rule(facts)) is not None]
    checked = [replace(cause, change=_allowed(cause.change, facts)) for cause in found]
    return sorted(checked, key=lambda cause: (cause.name != "emulation", -cause.share))


def _allowed(change: tuple[str, ...], facts: Facts) -> tuple[str, ...]:
    """The change, empty where this recipe cannot have it."""
    try:
        with_overrides(facts.config, change)
    except ConfigError:
        return ()
    return change


def verdict_of(facts: Facts) -> str:
    """The answer in a sentence or two: how fast FP8 is here, and how fast it could be at best."""
    now, best = facts.speed_now, facts.speed_best
    if not facts.ran_fp8:
        compute = facts.config.precision.compute.upper()
        if best is None or not facts.device.has_fp8:
            return f"Nothing ran in FP8: {compute} was asked, and FP8 cannot be faster here."
        return f"Nothing ran in FP8: {compute} was asked. At best it would be {_times(best)}."
    if now is None or best is None:
        return f"{facts.low} ran; what it gains was not measured."
    if facts.emulated:
        return (
            f"{facts.low} is emulated here, and the step takes {1 / now:.2f} times as long as it "
            "would in BF16."
        )
    step = "this step" if now >= 1 else "it"
    return (
        f"{facts.low} makes {step} {_times(now)}; were casts free and products at their best, it "
        f"would be {_times(best)}."
    )


def _times(speed: float) -> str:
    """`1.32 times as fast`, or that it is slower."""
    if speed < 0.995:
        return f"slower: {1 / speed:.2f} times as long as BF16"
    return f"{speed:.2f} times as fast as BF16"
