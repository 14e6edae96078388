"""Causes of a step's speed: rules that read from the step's facts why FP8 is or is not faster.

FP8 speeds up only the GEMMs of linear layers, by a factor r of at most two. With T seconds of a
BF16 step, b of them in GEMMs that can run in FP8, and c seconds of added casts,

    speed = T / (T - b + b / r + c)          at best T / (T - b / 2), with free casts

Example: 60 % GEMMs at r = 1.6 and 5 % casts give 1 / (0.4 + 0.375 + 0.05) = 1.21. Causes are of two
kinds. In FP8 itself: r is small, c is large, or eligible GEMMs are missing from b; measured BF16
times of the same GEMMs decide, else the theory of `payoff_of`. In the rest of the step: the larger
T - b, the less GEMM speed matters (Amdahl's law).

A cause is at work if its part of the step is at least `LEAST`. Shares overlap where one cause
contains another (a recomputed cast is both). A change is a set of recipe overrides; one that this
recipe rejects is not proposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from finetune import units
from finetune.analysis.diagnose.facts import Facts
from finetune.analysis.diagnose.groups import LOW, ObservedGroup
from finetune.config.optimizers import chosen
from finetune.config.recipe import with_overrides
from finetune.errors import ConfigError
from finetune.estimator.speed.step_parts import StepPart
from finetune.precision.facts import FASTEST
from finetune.units import short_time

percent = partial(units.percent, space=True)

LEAST = {
    **{"casts not compiled": 0.05, "casts": 0.05, "adapters": 0.03, "recomputation": 0.03},
    **{"attention": 0.10, "output head": 0.05, "optimizer": 0.05, "host": 0.10},
    **{"elementwise": 0.15, "communication": 0.05},
}
"""Share of the step from which a cause is reported; other causes are whatever their share."""

Change = tuple[str, ...]


@dataclass(frozen=True)
class Cause:
    """Reason why FP8 is not faster, or no faster, here.

    Attributes:
        name: one or two words; stable.
        share: affected share of the step's time, 0 to 1.
        text: the cause in a sentence.
        evidence: further measurements that support it, or none.
        change: recipe overrides to try together; empty if nothing can be set.
        hint: further advice on the change.
    """

    name: str
    share: float
    text: str
    evidence: str = ""
    change: Change = ()
    hint: str = ""


def causes_of(facts: Facts) -> list[Cause]:
    """All causes at work: emulation first, then the largest share first."""
    # Emulation explains every slowness by itself: what FP8 gains on hardware is no question then.
    at_work = _emulation if facts.emulated else _gains if facts.ran_fp8 else _no_fp8
    found = (*at_work(facts), *_casts(facts), *_high_precision(facts), *_rest(facts))
    large = [cause for cause in found if cause.share >= LEAST.get(cause.name, 0.0)]
    checked = [replace(cause, change=_allowed(cause.change, facts)) for cause in large]
    return sorted(checked, key=lambda cause: (cause.name != "emulation", -cause.share))


def _allowed(change: Change, facts: Facts) -> Change:
    """Return the change, or an empty one if this recipe rejects it."""
    try:
        # A change is written for recipes in general; this one may contradict it.
        with_overrides(facts.config, change)
    except ConfigError:
        return ()
    return change


# ------------------------------------------------------------------------------------------ FP8


def _no_fp8(facts: Facts) -> Iterator[Cause]:
    """Nothing ran in FP8, although layers were eligible."""
    share = facts.share_of(group for group in facts.groups if group.role == "base")
    text = f"nothing runs in FP8: this run is in {facts.config.precision.compute.upper()}"
    has_fp8 = facts.device.has_fp8
    change = ("precision.compute=fp8",) if has_fp8 else ()
    hint = "" if has_fp8 else f"{has_fp8.reason}: here FP8 can only be emulated, which is slower"
    if share:
        yield Cause("no FP8", share, text, change=change, hint=hint)


def _emulation(facts: Facts) -> Iterator[Cause]:
    """Numerics of FP8 without its speed."""
    spent, bf16 = sum(group.seconds for group in facts.fp8_groups), facts.bf16_seconds
    why = facts.device.has_fp8.reason if not facts.device.has_fp8 else "backend=emulated was asked"
    yield Cause(
        "emulation",
        facts.share(spent),
        f"{facts.low} is emulated here, exact but without the speed of its units: {why}",
        f"{spent / bf16:.1f} times as long as the same products in BF16" if bf16 else "",
        ("precision.compute=bf16",),
        "emulation is for trying out numerics, and trains slower",
    )


def _gains(facts: Facts) -> Iterator[Cause]:
    """Products that gain less in FP8 than their casts, or loading their weights, cost."""
    base = [group for group in facts.fp8_groups if group.role == "base"]
    p, payoff = facts.config.precision, facts.payoff
    stored = p.frozen == "fp8"
    # Stored weights are not cast in each step, so fewer tokens are enough: only reading them must
    # not take longer than multiplying.
    least = 0 if payoff is None else payoff.least_tokens if stored else payoff.least
    few = [group for group in base if 0 < group.tokens < least]
    if few:
        tokens = min(group.tokens for group in few)
        what = "products wait for their weights" if stored else "casting a weight costs its gain"
        yield Cause(
            "few tokens",
            facts.share_of(few),
            f"too few tokens in a micro-batch: {what}",
            f"products of {tokens:,} tokens; on this GPU FP8 pays from about {least:,}",
            _larger_batch(facts, math.ceil(least / tokens)),
            "if the memory allows: `python -m finetune estimate RECIPE --fit batch` says; rows "
            "that are short can be packed (train.packing=true)",
        )
    least = payoff.least if payoff is not None else 0
    small = [group for group in base if all(group.shape) and _is_small(group, least)]
    if small and len(small) < len(facts.fp8_groups):  # all of them: size is not the cause
        shown = ", ".join(f"{g.kind} {g.shape[0]} x {g.shape[1]}" for g in small[:4])
        lost = sum(g.seconds - g.bf16_seconds for g in small if g.bf16_seconds is not None)
        evidence = f"FP8 pays on this GPU where N and K are above about {least:,}"
        if lost > 0:
            evidence = f"in BF16 they would take {percent(facts.share(lost))} of the step less"
        # With what the recipe keeps already, since an override replaces the whole list.
        kept = dict.fromkeys((*p.keep, *(group.kind for group in small)))
        yield Cause(
            "small layers",
            facts.share_of(small),
            "layers too small for FP8: their casts cost more than their products gain",
            f"{shown}: {evidence}",
            (f"precision.keep=[{', '.join(kept)}]",),
        )


def _is_small(group: ObservedGroup, least: int) -> bool:
    """True if BF16 is faster: as measured, else by the sizes from which FP8 pays."""
    if group.bf16_seconds is not None and group.seconds:
        # Measured here, on this GPU: better than any model of it.
        return group.seconds > group.bf16_seconds
    return min(group.shape) < least


def _casts(facts: Facts) -> Iterator[Cause]:
    """Casts take much of the step: unfused, as many small kernels, or although fused."""
    p, share, change = facts.config.precision, facts.share(facts.parts[StepPart.CASTS]), Change()
    if facts.emulated:
        return
    eager = (p.engine.has_kernels and not p.engine.is_fused) or p.frozen == "fp8"
    if facts.ran_fp8 and eager and not facts.is_compiled and facts.device.kind == "cuda":
        text = "casts to FP8 are not fused: amax, scale, clamp and cast are a kernel each"
        evidence = f"compile: {facts.compiled}"
        yield Cause("casts not compiled", share, text, evidence, ("precision.compile=on",))
        return
    if facts.config.lora and facts.ran_fp8 and p.frozen != "fp8" and p.facts.stored:
        change = ("precision.frozen=fp8",)
    elif p.scaling != FASTEST and facts.ran_fp8 and not facts.config.lora:
        change = (f"precision.scaling={FASTEST}",)
    what = "casts to FP8" if facts.ran_fp8 else "dequantising stored weights"
    yield Cause("casts", share, f"{what} take their time", change=change)


STAYED_HIGH: dict[str, tuple[str, Change]] = {
    "unaligned layers": ("is not a multiple of", ()),
    "kept layers": ("kept by pattern", ("~precision.keep",)),
    "kept blocks": ("in a block kept by", ("~precision.first_n", "~precision.last_n")),
    "mapped layers": ("precision.map", ("~precision.map",)),
}
"""Base layers outside FP8: cause -> words of the planner's reason, change."""


def _high_precision(facts: Facts) -> Iterator[Cause]:
    """GEMMs and layers that stay in high precision beside others in FP8."""
    p = facts.config.precision
    mixed = [group for group in facts.fp8_groups if set(group.ran.values()) - LOW]
    # Layers of which all GEMMs are high are another cause, below.
    if p.gemms_kept_high and mixed:
        text = f"{', '.join(sorted(p.gemms_kept_high))} of FP8 layers run in high precision"
        change = ("~precision.high_gemms",) if p.high_gemms else ("precision.scaling=rowwise",)
        yield Cause("GEMMs kept high", facts.share_of(mixed), text, _flops(mixed), change)
    if not facts.ran_fp8:
        return
    for name, (reason, change) in STAYED_HIGH.items():
        high = [g for g in facts.groups if g.role == "base" and not g.is_low and reason in g.reason]
        # Layers that did not run in the observed step cost nothing.
        if any(group.flops for group in high):
            text = f"layers stay in high precision: {high[0].reason}"
            hint = "" if change else "their sizes are the model's"
            yield Cause(name, facts.share_of(high), text, _flops(high), change, hint)


def _flops(groups: list[ObservedGroup]) -> str:
    layers, share = sum(len(g.layers) for g in groups), sum(g.share for g in groups)
    return f"{layers} layers, {percent(share)} of the matmul FLOPs"


# -------------------------------------------------------------------------- rest of the step

_NOT_FUSED = re.compile(r"\d+ as PEFT has them: (.+?)(?:;|$)")
_FUSED_BY: dict[str, Change] = {
    "dropout": ("lora.dropout=0",),
    "adapter with a bias": ("lora.bias=none",),
    "DoraLinearVariant": ("lora.use_dora=false",),
}
"""Overrides that let adapters be fused with their base, by the receipt's reason against it."""


def _rest(facts: Facts) -> Iterator[Cause]:
    """Parts of the step that take as long in FP8 as in BF16."""
    run, on_gpu = facts.config, facts.device.kind == "cuda"
    liger = ("train.use_liger_kernel=true",)
    liger = liger if on_gpu and not run.train.use_liger_kernel else Change()
    fewer_updates = (f"train.gradient_accumulation_steps={2 * facts.micro_batches}",)
    twice = "makes the batch twice as large"
    parts = {part: facts.share(seconds) for part, seconds in facts.parts.items()}

    if run.lora is not None:
        yield _adapters(facts)
    yield Cause(
        "recomputation",
        facts.share(facts.recompute_seconds),
        "checkpointing computes forwards a second time, in FP8 as in BF16",
        change=("train.gradient_checkpointing=false",),
        hint="if the memory allows: `python -m finetune estimate RECIPE` with the same change says",
    )
    yield _attention(facts, parts[StepPart.ATTENTION])
    heads = [group for group in facts.groups if group.role == "head" and group.gemm_seconds]
    if heads:
        text = "the output head stays in high precision: its rounding goes straight into the loss"
        hint = "it is a smaller share of a larger model"
        (n, k), flops = heads[0].shape, sum(group.share for group in heads)
        evidence = f"{n:,} x {k:,}: {percent(flops)} of the matmul FLOPs"
        yield Cause("output head", facts.share_of(heads), text, evidence, liger, hint)
    eager = chosen(run.train).name == "adamw_torch"
    yield Cause(
        "optimizer",
        parts[StepPart.OPTIMIZER],
        "the update of the weights has nothing to do with FP8",
        f"{facts.trainable:,} trainable parameters",
        ("train.optim=adamw_torch_fused",) if eager else fewer_updates,
        "" if eager else twice,
    )
    yield _host(facts, parts[StepPart.HOST])
    yield Cause(
        "elementwise",
        parts[StepPart.ELEMENTWISE],
        "norms, activations, rotary embeddings and the loss move bytes, which FP8 does not change",
        change=liger,
        hint="needs the extra `liger`" if liger else "",
    )
    yield Cause(
        "communication",
        parts[StepPart.COMMUNICATION],
        "GPUs wait for each other, in communication that no computation hides",
        change=fewer_updates,
        hint=twice,
    )


def _host(facts: Facts, share: float) -> Cause:
    """Nothing that the profile saw accounts for part of the step."""
    if facts.device.kind != "cuda":
        text = "Python, views and allocations: too little work in one operator"
        return Cause("host", share, text, change=_larger_batch(facts, 2))
    # The profiler slows the host and not the kernels: a step that is as fast under it did not wait
    # for the host.
    under = f"a step takes {short_time(facts.profiled_seconds)} under the profiler, "
    if not facts.waits:
        text = "kernels are slower without the profiler's pauses, as at a GPU's limit of power"
        return Cause("host", share, text, f"{under}no longer than without: it does not wait")
    compiles = Change() if facts.is_compiled else ("precision.compile=on",)
    return Cause(
        "host",
        share,
        "the GPU waits for the host (too little work in one operator), or runs kernels slower "
        "than under the profiler",
        f"{under}which slows the host",
        (*_larger_batch(facts, 2), *compiles),
    )


def _adapters(facts: Facts) -> Cause:
    """Adapters have small GEMMs and much memory traffic."""
    why, change = _NOT_FUSED.search(facts.adapters), Change()
    text = "adapters are many small products, whatever their rank"
    if why is not None:
        change = _FUSED_BY.get(why[1].strip(), ())
        text = f"adapters run as PEFT has them, not with their base: {why[1].strip()}"
    elif facts.device.kind == "cuda" and not facts.is_compiled:
        change, text = ("precision.compile=on",), "adapters run eager, though with their base"
    flops = sum(group.share for group in facts.groups if group.role == "adapter")
    evidence = f"{percent(flops)} of the matmul FLOPs"
    evidence += f"; adapters: {facts.adapters}" if facts.adapters else ""
    hint = "" if change else "fewer lora.target_modules"
    return Cause("adapters", facts.share(facts.adapter_seconds), text, evidence, change, hint)


def _attention(facts: Facts, share: float) -> Cause:
    """Attention runs in BF16 whatever the linear layers do."""
    chosen_kernel, hint = facts.config.model.attention, ""
    if facts.masked and facts.device.kind == "cuda":
        text = "attention multiplies what its mask throws away: packed rows are one long row"
        change = ("model.attention=auto",)
        if chosen_kernel not in ("sdpa", "eager"):
            # One row at a time has no other row to be kept apart from; the step keeps its rows.
            by_row = f"train.gradient_accumulation_steps={facts.micro_batches * facts.rows}"
            change, hint = ("train.per_device_train_batch_size=1", by_row), "rows of their own"
    elif chosen_kernel == "eager":
        text, change = "attention runs eager", ("model.attention=sdpa",)
    else:
        text, change = "attention stays in BF16", Change()
    return Cause("attention", share, text, change=change, hint=hint)


def _larger_batch(facts: Facts, times: int) -> Change:
    """Micro-batches `times` as large, with as many tokens per step where possible."""
    change = (f"train.per_device_train_batch_size={facts.rows * times}",)
    if facts.micro_batches == 1:
        return change
    return (*change, f"train.gradient_accumulation_steps={max(1, facts.micro_batches // times)}")
