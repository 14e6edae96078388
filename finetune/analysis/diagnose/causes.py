"""Causes of a step's speed: rules that read from the step's facts why FP8 is or is not faster.

FP8 speeds up only the GEMMs of linear layers, by a factor r of at most two. With T seconds of a
BF16 step, b of them in GEMMs that can run in FP8, and c seconds of added casts,

    speed = T / (T - b + b / r + c)          at best T / (T - b / 2), with free casts

Example: 60 % GEMMs at r = 1.6 and 5 % casts give 1 / (0.4 + 0.375 + 0.05) = 1.21. Causes are of two
kinds. In FP8 itself: r is small, c is large, or eligible GEMMs are missing from b; measured BF16
times of the same GEMMs decide, else the theory of `payoff_of`. In the rest of the step: the larger
T - b, the less GEMM speed matters (Amdahl's law).

To add a rule, write a function from `Facts` to a `Cause` (None if not at work) under `@rule`.
Shares overlap where one cause contains another (a recomputed cast is both). A change is a set of
recipe overrides; one that this recipe rejects is not proposed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from finetune import units
from finetune.analysis.diagnose.facts import Facts
from finetune.analysis.diagnose.groups import LayerGroup
from finetune.config.optimizers import chosen
from finetune.config.recipe import with_overrides
from finetune.config.schema import FROZEN_SCALINGS
from finetune.errors import ConfigError
from finetune.estimator.speed.step_parts import StepPart

percent = partial(units.percent, space=True)

LEAST_SHARE = {
    **{StepPart.CASTS: 0.05, StepPart.ATTENTION: 0.10, StepPart.ELEMENTWISE: 0.15},
    **{StepPart.OPTIMIZER: 0.05, StepPart.COMMUNICATION: 0.05, StepPart.HOST: 0.10},
}
"""Share of the step from which a part is reported as a cause."""
LEAST_ADAPTERS = LEAST_RECOMPUTED = 0.03
LEAST_HEAD = 0.05

Change = tuple[str, ...]


@dataclass(frozen=True)
class Cause:
    """Reason why FP8 is not faster, or no faster, here.

    Attributes:
        name: one or two words; stable.
        share: affected share of the step's time, 0 to 1.
        text: the cause in a sentence.
        evidence: measurements that support it.
        change: recipe overrides to try together; empty if nothing can be set.
        hint: further advice on the change.
    """

    name: str
    share: float
    text: str
    evidence: str
    change: Change = ()
    hint: str = ""


Rule = Callable[[Facts], Cause | None]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule to `RULES`."""
    RULES.append(function)
    return function


Advice = tuple[str, str, Change, str]
"""Text, end of the evidence, change and hint of a cause."""


def part_rule(name: str, part: StepPart) -> Callable[[Callable[[Facts], Advice]], Rule]:
    """Make a rule of advice on one part of the step, from `LEAST_SHARE` of the step on."""

    def register(advise: Callable[[Facts], Advice]) -> Rule:
        def found(facts: Facts) -> Cause | None:
            share = _large(part, facts)
            text, end, change, hint = advise(facts)
            evidence = f"{percent(share)} of the step{end}"
            return Cause(name, share, text, evidence, change, hint) if share else None

        return rule(found)

    return register


def causes_of(facts: Facts) -> list[Cause]:
    """All causes at work: emulation first, then the largest share first."""
    found = [cause for rule in RULES if (cause := rule(facts)) is not None]
    checked = [replace(cause, change=_allowed(cause.change, facts)) for cause in found]
    return sorted(checked, key=lambda cause: (cause.name != "emulation", -cause.share))


def _allowed(change: Change, facts: Facts) -> Change:
    """Return the change, or an empty one if this recipe rejects it."""
    try:
        with_overrides(facts.config, change)
    except ConfigError:
        return ()
    return change


# ------------------------------------------------------------------------------------------ FP8


@rule
def no_fp8(facts: Facts) -> Cause | None:
    """Nothing ran in FP8, although layers were eligible."""
    could = [group for group in facts.groups if group.role == "base" and group.gemm_seconds]
    best = facts.speed_best
    if facts.ran_fp8 or best is None or not could:
        return None
    share = facts.share(sum(group.gemm_seconds for group in could))
    text = f"nothing runs in FP8: this run is in {facts.config.precision.compute.upper()}"
    evidence = f"products that FP8 could take are {percent(share)} of the step"
    if not facts.device.has_fp8:
        hint = f"{facts.device.has_fp8.reason}: here FP8 can only be emulated, which is slower"
        return Cause("no FP8", share, text, evidence, hint=hint)
    evidence += (
        f"; at {facts.ratio:.2f} times their speed the step could be {best:.2f} times as fast, "
        "were casts free"
    )
    return Cause("no FP8", share, text, evidence, ("precision.compute=fp8",))


@rule
def emulated(facts: Facts) -> Cause | None:
    """FP8 is emulated: numerics without speed."""
    if not facts.emulated:
        return None
    spent = sum(group.seconds for group in facts.fp8_groups)
    evidence = f"{facts.low} layers take {percent(facts.share(spent))} of the step"
    if (bf16 := facts.bf16_seconds) and (now := facts.speed_now):
        evidence += (
            f", {spent / bf16:.1f} times as long as the same products in BF16; emulation makes "
            f"the step {1 / now:.2f} times as long"
        )
    why = facts.device.has_fp8.reason if not facts.device.has_fp8 else "backend=emulated was asked"
    text = f"{facts.low} is emulated here and cannot be faster: {why}"
    hint = "to train faster here; emulation is for trying out numerics"
    return Cause("emulation", facts.share(spent), text, evidence, ("precision.compute=bf16",), hint)


@rule
def few_tokens(facts: Facts) -> Cause | None:
    """Too few tokens in a micro-batch to pay for casting, or loading, the weights."""
    if facts.emulated or facts.payoff is None:
        return None
    stored = facts.config.precision.frozen == "fp8"
    least = facts.payoff.least_tokens if stored else facts.payoff.least
    small = [g for g in facts.fp8_groups if g.role == "base" and 0 < g.tokens < least]
    if not small:
        return None
    tokens = min(group.tokens for group in small)
    what = "products wait for their weights" if stored else "casting a weight costs what it saves"
    return Cause(
        "few tokens",
        _share_of(small, facts),
        f"too few tokens in a micro-batch: {what}",
        f"products of {tokens:,} tokens; on this GPU FP8 pays from about {least:,}",
        _larger_batch(facts, math.ceil(least / tokens)),
        "if the memory allows: `python -m finetune estimate RECIPE --fit batch` says; rows that "
        "are short can be packed (train.packing=true)",
    )


@rule
def casts_not_compiled(facts: Facts) -> Cause | None:
    """Casts run as many small kernels that the compiler would fuse."""
    p, share = facts.config.precision, _large(StepPart.CASTS, facts)
    eager = p.backend == "torchao" or p.frozen == "fp8"
    on_gpu = facts.device.kind == "cuda"
    if facts.emulated or not facts.ran_fp8 or facts.is_compiled or not eager or not on_gpu:
        return None
    text = "casts to FP8 are not fused: amax, scale, clamp and cast are a kernel each"
    evidence = f"casts take {percent(share)} of the step; compile: {facts.compiled}"
    change = ("precision.compile=on",)
    return Cause("casts not compiled", share, text, evidence, change) if share else None


@rule
def casts(facts: Facts) -> Cause | None:
    """Casts take much of the step although fused."""
    share = _large(StepPart.CASTS, facts)
    if facts.emulated or not share or casts_not_compiled(facts):
        return None
    p, change = facts.config.precision, Change()
    if facts.config.lora and facts.ran_fp8 and p.frozen != "fp8" and p.scaling in FROZEN_SCALINGS:
        change = ("precision.frozen=fp8",)
    elif p.scaling != "tensorwise" and facts.ran_fp8 and not facts.config.lora:
        change = ("precision.scaling=tensorwise",)
    what = "casts to FP8" if facts.ran_fp8 else "dequantising stored weights"
    return Cause("casts", share, f"{what} take their time", f"{percent(share)} of the step", change)


@rule
def small_layers(facts: Facts) -> Cause | None:
    """Layers whose GEMMs gain less than their casts cost."""
    if facts.emulated or not facts.ran_fp8:
        return None
    least = facts.payoff.least if facts.payoff is not None else 0

    def is_small(group: LayerGroup) -> bool:
        if group.bf16_seconds is not None and group.seconds:
            return group.seconds > group.bf16_seconds
        return min(group.shape) < least

    small = [g for g in facts.fp8_groups if g.role == "base" and all(g.shape) and is_small(g)]
    if not small or len(small) == len(facts.fp8_groups):  # all of them: size is not the cause
        return None
    shown = ", ".join(f"{g.kind} {g.shape[0]} x {g.shape[1]}" for g in small[:4])
    lost = sum(g.seconds - g.bf16_seconds for g in small if g.bf16_seconds is not None)
    evidence = f"FP8 pays on this GPU where N and K are above about {least:,}"
    if lost > 0:
        evidence = f"in BF16 they would take {percent(facts.share(lost))} of the step less"
    kept = dict.fromkeys((*facts.config.precision.keep, *(g.kind for g in small)))
    text = "layers too small for FP8: their casts cost more than their products gain"
    change = (f"precision.keep=[{', '.join(kept)}]",)
    return Cause("small layers", _share_of(small, facts), text, f"{shown}: {evidence}", change)


@rule
def high_gemms(facts: Facts) -> Cause | None:
    """Some GEMMs of FP8 layers were kept in high precision."""
    kept_high = facts.config.precision.gemms_kept_high
    mixed = [g for g in facts.fp8_groups if set(g.ran.values()) - {"fp8", "fp4"}]
    if not kept_high or not mixed:
        return None
    by_rule = not facts.config.precision.high_gemms
    change = ("precision.scaling=rowwise",) if by_rule else ("~precision.high_gemms",)
    flops = sum(group.share for group in mixed)
    text = f"{', '.join(sorted(kept_high))} of FP8 layers run in high precision"
    layers = sum(len(g.layers) for g in mixed)
    evidence = f"{layers} layers, {percent(flops)} of the matmul FLOPs"
    return Cause("GEMMs kept high", _share_of(mixed, facts), text, evidence, change)


STAYED_HIGH: dict[str, tuple[str, str, Change]] = {
    "unaligned layers": (
        "layers stay in BF16 since their sizes do not fit FP8 units",
        *("is not a multiple of", ()),
    ),
    "kept layers": (
        "layers stay in BF16 by a pattern of the recipe",
        *("kept by pattern", ("~precision.keep",)),
    ),
    "kept blocks": (
        "the first or last decoder blocks stay in BF16 by choice",
        *("in a block kept by", ("~precision.first_n", "~precision.last_n")),
    ),
    "mapped layers": (
        "layers stay in high precision by precision.map",
        *("precision.map", ("~precision.map",)),
    ),
}
"""Base layers outside FP8: cause -> text, words of the planner's reason, change."""


def _stayed_high(name: str, facts: Facts) -> Cause | None:
    text, reason, change = STAYED_HIGH[name]
    high = [g for g in facts.groups if g.role == "base" and not g.is_low and reason in g.reason]
    flops = sum(group.share for group in high)
    if not flops or not facts.ran_fp8:
        return None
    share = facts.share(sum(group.gemm_seconds for group in high))
    layers = sum(len(group.layers) for group in high)
    evidence = f"{layers} layers, {percent(flops)} of the matmul FLOPs: {high[0].reason}"
    hint = "" if change else "their sizes are the model's"
    return Cause(name, share, text, evidence, change, hint)


RULES += [partial(_stayed_high, name) for name in STAYED_HIGH]


# -------------------------------------------------------------------------- rest of the step

_NOT_FUSED = re.compile(r"\d+ as PEFT has them: (.+?)(?:;|$)")
_FUSED_BY: dict[str, Change] = {
    "dropout": ("lora.dropout=0",),
    "adapter with a bias": ("lora.bias=none",),
    "DoraLinearVariant": ("lora.use_dora=false",),
}
"""Overrides that let adapters be fused with their base, by the receipt's reason against it."""


@rule
def adapters(facts: Facts) -> Cause | None:
    """Adapters have small GEMMs and much memory traffic."""
    share = facts.share(facts.adapter_seconds)
    if facts.config.lora is None or share < LEAST_ADAPTERS:
        return None
    flops = sum(group.share for group in facts.groups if group.role == "adapter")
    evidence = f"{percent(share)} of the step for {percent(flops)} of the matmul FLOPs"
    why = _NOT_FUSED.search(facts.adapters)
    if not facts.config.precision.fused_adapters:
        change, text = ("precision.fused_adapters=true",), "adapters run eager: fusing is off"
    elif why is not None:
        change = _FUSED_BY.get(why[1].strip(), ())
        text = f"adapters run as PEFT has them, not with their base: {why[1].strip()}"
    elif facts.device.kind == "cuda" and not facts.is_compiled:
        change, text = ("precision.compile=on",), "adapters run eager, though with their base"
    else:
        change, text = (), "adapters are many small products, whatever their rank"
    hint = "" if change else "fewer lora.target_modules"
    evidence += f"; adapters: {facts.adapters}" if facts.adapters else ""
    return Cause("adapters", share, text, evidence, change, hint)


@rule
def recompute(facts: Facts) -> Cause | None:
    """Checkpointing computes the forward of each layer a second time."""
    share = facts.share(facts.recompute_seconds)
    if share < LEAST_RECOMPUTED:
        return None
    return Cause(
        "recomputation",
        share,
        "checkpointing computes forwards a second time, in FP8 as in BF16",
        f"{percent(share)} of the step runs inside a recomputation",
        ("train.gradient_checkpointing=false",),
        "if the memory allows: `python -m finetune estimate RECIPE` with the same change says",
    )


@part_rule("attention", StepPart.ATTENTION)
def attention(facts: Facts) -> Advice:
    """Attention runs in BF16 whatever the linear layers do."""
    if facts.masked and facts.device.kind == "cuda":
        text = "attention multiplies what its mask throws away: packed rows are one long row"
        if facts.config.model.attention in ("sdpa", "eager"):
            return text, "", ("model.attention=auto",), ""
        times = facts.micro_batches * facts.rows
        by_row = f"train.gradient_accumulation_steps={times}"
        return text, "", ("train.per_device_train_batch_size=1", by_row), "rows of their own"
    if facts.config.model.attention == "eager":
        return "attention runs eager", "", ("model.attention=sdpa",), ""
    return "attention stays in BF16", "", (), ""


@rule
def head(facts: Facts) -> Cause | None:
    """The output head stays in high precision by policy."""
    heads = [group for group in facts.groups if group.role == "head" and group.gemm_seconds]
    share = facts.share(sum(group.gemm_seconds for group in heads))
    if share < LEAST_HEAD:
        return None
    (n, k), flops = heads[0].shape, sum(group.share for group in heads)
    return Cause(
        "output head",
        share,
        "the output head stays in high precision: its rounding goes straight into the loss",
        f"{n:,} x {k:,}: {percent(share)} of the step, {percent(flops)} of the matmul FLOPs",
        _with_liger(facts),
        "it is a smaller share of a larger model",
    )


@part_rule("optimizer", StepPart.OPTIMIZER)
def optimizer(facts: Facts) -> Advice:
    """The optimizer step takes as long in FP8 as in BF16."""
    change, hint = _fewer_updates(facts)
    if chosen(facts.config.train).name == "adamw_torch":
        change, hint = ("train.optim=adamw_torch_fused",), ""
    evidence = f" for {facts.trainable:,} trainable parameters"
    return "the update of the weights has nothing to do with FP8", evidence, change, hint


@part_rule("host", StepPart.HOST)
def host(facts: Facts) -> Advice:
    """The device waits for Python (launch bound)."""
    change, rest = _larger_batch(facts, 2), ": too little work in one operator"
    if facts.device.kind != "cuda":
        evidence = " is between operators that compute"
        return "Python, views and allocations" + rest, evidence, change, ""
    change = change if facts.is_compiled else (*change, "precision.compile=on")
    return "the GPU waits for the host" + rest, " no kernel runs", change, ""


@part_rule("elementwise", StepPart.ELEMENTWISE)
def elementwise(facts: Facts) -> Advice:
    """Norms, activations, rotary embeddings and the loss are memory bound."""
    text = "norms, activations, rotary embeddings and the loss move bytes"
    change = _with_liger(facts)
    hint = "needs the extra `liger`" if change else ""
    return f"{text}, which FP8 does not change", "", change, hint


@part_rule("communication", StepPart.COMMUNICATION)
def communication(facts: Facts) -> Advice:
    """GPUs wait for each other."""
    evidence = " in communication that no computation hides"
    return "GPUs wait for each other", evidence, *_fewer_updates(facts)


# ------------------------------------------------------------------------------ shared helpers


def _large(part: StepPart, facts: Facts) -> float:
    """Share of the step that a part takes, 0.0 below its threshold."""
    share = facts.share(facts.parts.get(part, 0.0))
    return share if share >= LEAST_SHARE[part] else 0.0


def _share_of(groups: Iterable[LayerGroup], facts: Facts) -> float:
    return facts.share(sum(group.seconds for group in groups))


def _larger_batch(facts: Facts, times: int) -> Change:
    """Micro-batches `times` as large, with as many tokens per step where possible."""
    change = (f"train.per_device_train_batch_size={facts.rows * times}",)
    if facts.micro_batches == 1:
        return change
    return (*change, f"train.gradient_accumulation_steps={max(1, facts.micro_batches // times)}")


def _fewer_updates(facts: Facts) -> tuple[Change, str]:
    change = (f"train.gradient_accumulation_steps={2 * facts.micro_batches}",)
    return change, "makes the batch twice as large"


def _with_liger(facts: Facts) -> Change:
    liger = facts.device.kind != "cuda" or facts.config.train.get("use_liger_kernel")
    return () if liger else ("train.use_liger_kernel=true",)
