"""Causes outside of FP8: what it leaves as it is, and what more of it would not help.

Amdahl's law: FP8 speeds up products of linear layers and nothing else. The larger the rest of the
step, the less it matters how fast they are.
"""

from __future__ import annotations

import re

from finetune.analysis.diagnose.cause import Cause, larger_batch, percent
from finetune.analysis.diagnose.facts import Facts
from finetune.config.optimizers import chosen
from finetune.estimator.speed.step_parts import StepPart

ADAPTERS_MATTER = RECOMPUTE_MATTERS = 0.03
OPTIMIZER_MATTERS = HEAD_MATTERS = COMMUNICATION_MATTERS = 0.05
ATTENTION_MATTERS = HOST_MATTERS = 0.10
POINTWISE_MATTERS = 0.15

_NOT_FUSED = re.compile(r"\d+ as PEFT has them: (.+?)(?:;|$)")
_CURES = {
    "dropout": ("lora.dropout=0",),
    "adapter with a bias": ("lora.bias=none",),
    "DoraLinearVariant": ("lora.use_dora=false",),
}


def adapters(facts: Facts) -> Cause | None:
    """Adapters are small products and much traffic."""
    share = facts.share(facts.adapter_seconds)
    if facts.config.lora is None or share < ADAPTERS_MATTER:
        return None
    flops = sum(group.share for group in facts.groups if group.role == "adapter")
    evidence = f"{percent(share)} of the step for {percent(flops)} of the matmul FLOPs"
    why = _NOT_FUSED.search(facts.adapters)
    if not facts.config.precision.fused_adapters:
        change, words = ("precision.fused_adapters=true",), "adapters run eager: fusing is off"
    elif why is not None:
        reason = why[1].strip()
        change = _CURES.get(reason, ())
        words = f"adapters run as PEFT has them, not with their base: {reason}"
    elif facts.device.kind == "cuda" and not facts.is_compiled:
        change, words = ("precision.compile=on",), "adapters run eager, though with their base"
    else:
        change, words = (), "adapters are many small products, whatever their rank"
    hint = "" if change else "fewer lora.target_modules"
    if facts.adapters:
        evidence += f"; adapters: {facts.adapters}"
    return Cause("adapters", share, words, evidence, change, hint)


def recompute(facts: Facts) -> Cause | None:
    """Checkpointing computes the forward of each layer a second time."""
    share = facts.share(facts.recompute_seconds)
    if share < RECOMPUTE_MATTERS:
        return None
    return Cause(
        "recomputation",
        share,
        "checkpointing computes forwards a second time, in FP8 as in BF16",
        f"{percent(share)} of the step runs inside a recomputation",
        ("train.gradient_checkpointing=false",),
        "if the memory allows: `python -m finetune estimate RECIPE` with the same change says",
    )


def attention(facts: Facts) -> Cause | None:
    """Attention runs in BF16 whatever the layers do."""
    share = facts.share(facts.parts.get(StepPart.ATTENTION, 0.0))
    if share < ATTENTION_MATTERS:
        return None
    rows = int(facts.config.train.get("per_device_train_batch_size", 8))
    accumulation = int(facts.config.train.get("gradient_accumulation_steps", 1))
    evidence, words = f"{percent(share)} of the step", "attention stays in BF16"
    change, hint = tuple[str, ...](), ""
    if facts.masked and facts.device.kind == "cuda":
        words = "attention multiplies what its mask throws away: packed rows are one long row"
        change = ("model.attention=flash_attention_2",)
        hint = "needs the package flash-attn"
        if rows > 1:
            hint += (
                "; or micro-batches of one row: train.per_device_train_batch_size=1 "
                f"train.gradient_accumulation_steps={accumulation * rows}"
            )
    elif facts.config.model.attention == "eager":
        words, change = "attention runs eager", ("model.attention=sdpa",)
    return Cause("attention", share, words, evidence, change, hint)


def head(facts: Facts) -> Cause | None:
    """The output head stays in high precision by policy."""
    heads = [group for group in facts.groups if group.role == "head" and group.gemm_seconds]
    share = facts.share(sum(group.gemm_seconds for group in heads))
    if share < HEAD_MATTERS:
        return None
    (n, k), flops = heads[0].shape, sum(group.share for group in heads)
    fused = facts.device.kind == "cuda" and not facts.config.train.get("use_liger_kernel")
    return Cause(
        "output head",
        share,
        "the output head stays in high precision: its rounding goes straight into the loss",
        f"{n:,} x {k:,}: {percent(share)} of the step, {percent(flops)} of the matmul FLOPs",
        ("train.use_liger_kernel=true",) if fused else (),
        "it is a smaller share of a larger model",
    )


def optimizer(facts: Facts) -> Cause | None:
    """The update takes as long in FP8 as in BF16."""
    share = facts.share(facts.parts.get(StepPart.OPTIMIZER, 0.0))
    if share < OPTIMIZER_MATTERS:
        return None
    change, hint = tuple[str, ...](), ""
    if chosen(facts.config.train).name == "adamw_torch":
        change = ("train.optim=adamw_torch_fused",)
    else:
        steps = int(facts.config.train.get("gradient_accumulation_steps", 1))
        change = (f"train.gradient_accumulation_steps={2 * steps}",)
        hint = "makes the batch twice as large"
    return Cause(
        "optimizer",
        share,
        "the update of the weights has nothing to do with FP8",
        f"{percent(share)} of the step for {facts.trainable:,} trainable parameters",
        change,
        hint,
    )


def host(facts: Facts) -> Cause | None:
    """The device waits for Python."""
    share = facts.share(facts.parts.get(StepPart.HOST, 0.0))
    if share < HOST_MATTERS:
        return None
    on_gpu = facts.device.kind == "cuda"
    change = larger_batch(facts, 2)
    if on_gpu and not facts.is_compiled:
        change = (*change, "precision.compile=on")
    words = "the GPU waits for the host" if on_gpu else "Python, views and allocations"
    return Cause(
        "host",
        share,
        f"{words}: too little work in one operator",
        f"{percent(share)} of the step no kernel runs"
        if on_gpu
        else f"{percent(share)} of the step is between operators that compute",
        change,
    )


def pointwise(facts: Facts) -> Cause | None:
    """Norms, activations, rotary embeddings and the loss are bound by memory."""
    share = facts.share(facts.parts.get(StepPart.ELEMENTWISE, 0.0))
    if share < POINTWISE_MATTERS:
        return None
    change = tuple[str, ...]()
    if facts.device.kind == "cuda" and not facts.config.train.get("use_liger_kernel"):
        change = ("train.use_liger_kernel=true",)
    return Cause(
        "elementwise",
        share,
        "norms, activations, rotary embeddings and the loss move bytes, which FP8 does not change",
        f"{percent(share)} of the step",
        change,
        "needs the extra `liger`" if change else "",
    )


def communication(facts: Facts) -> Cause | None:
    """GPUs wait for each other."""
    share = facts.share(facts.parts.get(StepPart.COMMUNICATION, 0.0))
    if share < COMMUNICATION_MATTERS:
        return None
    steps = int(facts.config.train.get("gradient_accumulation_steps", 1))
    return Cause(
        "communication",
        share,
        "GPUs wait for each other",
        f"{percent(share)} of the step in communication that no computation hides",
        (f"train.gradient_accumulation_steps={2 * steps}",),
        "makes the batch twice as large",
    )
