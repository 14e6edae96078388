"""What to try after a NaN or Inf, by where it began and in which precision.

Advice is ordered: what mends the cause that was found comes first. Two sayings are left out, since
they do not help. E5M2 is no cure for NaN: casts saturate in every FP8 format, so range is not what
is missing, and E5M2 has half the digits. And a larger epsilon of the optimizer only hides zeros.
"""

from __future__ import annotations

from pathlib import Path

from finetune.health.nonfinite import Finding
from finetune.precision.planner import PrecisionPlan

LOWER = "lower train.learning_rate, lengthen train.warmup_steps, or set train.max_grad_norm=1"


def advise(finding: Finding | None, plan: PrecisionPlan | None, checkpoint: Path | None) -> str:
    """What to type or change next.

    Args:
        finding: what broke first, None where running the step again showed nothing.
        plan: of the model, None where no precision was set up.
        checkpoint: the newest one, None where there is none.
    """
    again = (
        f"go on with train.resume_from_checkpoint={checkpoint}"
        if checkpoint
        else "start again (no checkpoint was saved yet)"
    )
    if finding is None:
        return (
            f"{again}; if it happens at another step, suspect kernels that are not deterministic "
            "or a faulty GPU (nvidia-smi -q -d ECC), else lower train.learning_rate"
        )
    if finding.kind == "parameter":
        return (
            "the weights were broken before this step, by the last update or already when loaded: "
            f"{again}, and {LOWER}"
        )
    if finding.kind == "input":
        return "look at the data: the model is handed values that are not finite"
    if finding.kind == "loss":
        return (
            "the logits are finite and the loss is not: look at the rows of this step (one without "
            f"a token to train on?) and at the loss settings; then {again}"
        )
    return "; ".join([*_by_precision(finding, plan), LOWER, again])


def _by_precision(finding: Finding, plan: PrecisionPlan | None) -> list[str]:
    if plan is None or plan.precision.compute in ("bf16", "fp32"):
        return []
    precision = plan.precision
    if precision.compute == "fp16":
        return ["FP16 ends at 65504: train with precision.compute=bf16"]
    cures = []
    if precision.scaling == "delayed":
        cures.append(
            f"delayed scales come from earlier amaxes: precision.margin={precision.margin + 1}, or "
            "precision.scaling=tensorwise, which has no history"
        )
    layer = finding.where.removesuffix(".weight").removesuffix(".bias")
    if layer in {low.name for low in plan.fp8_layers}:
        cures.append(f"keep this layer in high precision: precision.keep=[{layer}]")
    if precision.format != "e5m2":
        cures.append("precision.format=e5m2 is no cure")
    return cures
