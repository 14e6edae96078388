"""Causes in FP8 itself: emulation, tokens, casts, small layers, layers that stayed high.

Where products were timed in BF16 beside what they took in FP8, that decides; else the theory of
`payoff` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from finetune.analysis.diagnose.cause import Cause, larger_batch, percent
from finetune.analysis.diagnose.facts import Facts
from finetune.analysis.diagnose.layer_groups import Group
from finetune.config.schema import FROZEN_SCALINGS
from finetune.estimator.speed.step_parts import StepPart

CASTS_MATTER = 0.05


def not_asked(facts: Facts) -> Cause | None:
    """Nothing ran in FP8, and something could have."""
    could = [group for group in facts.groups if group.role == "base" and group.gemm_seconds]
    best = facts.speed_best
    if facts.ran_fp8 or best is None or not could:
        return None
    share = facts.share(sum(group.gemm_seconds for group in could))
    compute = facts.config.precision.compute.upper()
    words = f"nothing runs in FP8: this run is in {compute}"
    evidence = f"products that FP8 could take are {percent(share)} of the step"
    if not facts.device.has_fp8:
        hint = f"{facts.device.has_fp8.reason}: here FP8 can only be emulated, which is slower"
        return Cause("no FP8", share, words, evidence, hint=hint)
    evidence += f"; at {facts.ratio:.2f} times their speed the step could be {best:.2f} times as"
    change = ("precision.compute=fp8",)
    return Cause("no FP8", share, words, f"{evidence} fast, were casts free", change)


def emulated(facts: Facts) -> Cause | None:
    """FP8 is emulated: numerics without speed."""
    if not facts.emulated:
        return None
    spent = sum(group.seconds for group in facts.fp8_groups)
    evidence = f"{facts.low} layers take {percent(facts.share(spent))} of the step"
    bf16, now = facts.bf16_seconds, facts.speed_now
    if bf16 and now:
        evidence += (
            f", {spent / bf16:.1f} times as long as the same products in BF16; emulation makes "
            f"the step {1 / now:.2f} times as long"
        )
    why = facts.device.has_fp8.reason if not facts.device.has_fp8 else "backend=emulated was asked"
    return Cause(
        "emulation",
        facts.share(spent),
        f"{facts.low} is emulated here and cannot be faster: {why}",
        evidence,
        ("precision.compute=bf16",),
        "to train faster here; emulation is for trying out numerics",
    )


def few_tokens(facts: Facts) -> Cause | None:
    """A micro-batch has fewer tokens than the cast of a weight, or its loading, pays for."""
    if facts.emulated or facts.payoff is None:
        return None
    held = facts.config.precision.frozen == "fp8" or facts.config.precision.fp8_params
    least = facts.payoff.least_tokens if held else facts.payoff.least
    small = [g for g in facts.fp8_groups if g.role == "base" and 0 < g.tokens < least]
    if not small:
        return None
    tokens = min(group.tokens for group in small)
    what = "products wait for their weights" if held else "casting a weight costs what it saves"
    return Cause(
        "few tokens",
        facts.share(sum(group.seconds for group in small)),
        f"too few tokens in a micro-batch: {what}",
        f"products of {tokens:,} tokens; on this GPU FP8 pays from about {least:,}",
        larger_batch(facts, math.ceil(least / tokens)),
        "if the memory allows: `python -m finetune estimate RECIPE --fit batch` says; rows that "
        "are short can be packed (train.packing=true)",
    )


def casts_not_compiled(facts: Facts) -> Cause | None:
    """Casts run as many small kernels although the compiler would fuse them."""
    p = facts.config.precision
    eager = p.backend == "torchao" or p.frozen == "fp8"
    share = facts.share(facts.parts.get(StepPart.CASTS, 0.0))
    if facts.emulated or not facts.ran_fp8 or facts.is_compiled or not eager:
        return None
    if share < CASTS_MATTER or facts.device.kind != "cuda":
        return None
    return Cause(
        "casts not compiled",
        share,
        "casts to FP8 are not fused: amax, scale, clamp and cast are a kernel each",
        f"casts take {percent(share)} of the step; compile: {facts.compiled}",
        ("precision.compile=on",),
    )


def casts(facts: Facts) -> Cause | None:
    """Casts take much of the step, fused as they are."""
    share = facts.share(facts.parts.get(StepPart.CASTS, 0.0))
    if facts.emulated or share < CASTS_MATTER or casts_not_compiled(facts):
        return None
    p, change = facts.config.precision, tuple[str, ...]()
    if facts.config.lora and facts.ran_fp8 and p.frozen != "fp8" and p.scaling in FROZEN_SCALINGS:
        change = ("precision.frozen=fp8",)
    elif p.scaling != "tensorwise" and facts.ran_fp8 and not facts.config.lora:
        change = ("precision.scaling=tensorwise",)
    what = "casts to FP8" if facts.ran_fp8 else "dequantising stored weights"
    return Cause("casts", share, f"{what} take their time", f"{percent(share)} of the step", change)


def small_layers(facts: Facts) -> Cause | None:
    """Layers whose products gain less than their casts cost."""
    if facts.emulated or not facts.ran_fp8:
        return None
    least = facts.payoff.least if facts.payoff is not None else 0

    def is_small(group: Group) -> bool:
        if group.bf16_seconds is not None and group.seconds:
            return group.seconds > group.bf16_seconds
        return min(group.shape) < least

    small = [g for g in facts.fp8_groups if g.role == "base" and all(g.shape) and is_small(g)]
    if not small or len(small) == len(facts.fp8_groups):  # then it is not their size
        return None
    shown = ", ".join(f"{g.kind} {g.shape[0]} x {g.shape[1]}" for g in small[:4])
    lost = sum(g.seconds - g.bf16_seconds for g in small if g.bf16_seconds is not None)
    evidence = f"{shown}: " + (
        f"in BF16 they would take {percent(facts.share(lost))} of the step less"
        if lost > 0
        else f"FP8 pays on this GPU where N and K are above about {least:,}"
    )
    kept = dict.fromkeys((*facts.config.precision.keep, *(g.kind for g in small)))
    return Cause(
        "small layers",
        facts.share(sum(group.seconds for group in small)),
        "layers too small for FP8: their casts cost more than their products gain",
        evidence,
        (f"precision.keep=[{', '.join(kept)}]",),
    )


def stayed_high(
    name: str, words: str, has: Callable[[str], bool], change: tuple[str, ...], hint: str = ""
) -> Callable[[Facts], Cause | None]:
    """A rule for layers of the base that stayed in high precision for some reason."""

    def rule(facts: Facts) -> Cause | None:
        groups = [g for g in facts.groups if g.role == "base" and not g.is_low and has(g.reason)]
        flops = sum(group.share for group in groups)
        if not flops or not facts.ran_fp8:
            return None
        share = facts.share(sum(group.gemm_seconds for group in groups))
        layers = sum(len(group.layers) for group in groups)
        evidence = f"{layers} layers, {percent(flops)} of the matmul FLOPs: {groups[0].reason}"
        return Cause(name, share, words, evidence, change, hint)

    return rule


unaligned = stayed_high(
    "unaligned layers",
    "layers stay in BF16 since their sizes do not fit FP8 units",
    lambda reason: "is not a multiple of" in reason,
    (),
    "their sizes are the model's",
)
kept = stayed_high(
    "kept layers",
    "layers stay in BF16 by a pattern of the recipe",
    lambda reason: reason.startswith("kept by pattern"),
    ("~precision.keep",),
)
kept_blocks = stayed_high(
    "kept blocks",
    "the first or last decoder blocks stay in BF16 by choice",
    lambda reason: reason.startswith("in a block kept by"),
    ("~precision.first_n", "~precision.last_n"),
)
mapped = stayed_high(
    "mapped layers",
    "layers stay in high precision by precision.map",
    lambda reason: reason.startswith("precision.map"),
    ("~precision.map",),
)


def high_gemms(facts: Facts) -> Cause | None:
    """Some GEMMs of FP8 layers were kept in high precision."""
    kept_high = facts.config.precision.gemms_kept_high
    mixed = [g for g in facts.fp8_groups if set(g.ran.values()) - {"fp8", "fp4"}]
    if not kept_high or not mixed:
        return None
    by_rule = not facts.config.precision.high_gemms
    change = ("precision.scaling=rowwise",) if by_rule else ("~precision.high_gemms",)
    flops = sum(group.share for group in mixed)
    return Cause(
        "GEMMs kept high",
        facts.share(sum(group.seconds for group in mixed)),
        f"{', '.join(sorted(kept_high))} of FP8 layers run in high precision",
        f"{sum(len(g.layers) for g in mixed)} layers, {percent(flops)} of the matmul FLOPs",
        change,
    )
