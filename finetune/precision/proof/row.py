"""What a proof says of a layer and of updates, as receipts hold it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class LayerReceipt:
    """One linear layer: the precision in which each GEMM really ran, `none` where it did not.

    Attributes:
        name: dotted module name.
        shape: (N, K).
        role: base, head, adapter or router.
        fprop, dgrad, wgrad: `fp8`, `bf16`, ... or `none`.
        calls: GEMM calls of each kind in the observed micro-step.
        flops: floating point operations of the observed micro-step.
        reason: why this precision was planned.
    """

    name: str
    shape: tuple[int, int]
    role: str
    fprop: str
    dgrad: str
    wgrad: str
    calls: dict[str, int]
    flops: int
    reason: str


def changed_numbers(movement: dict[str, Any]) -> tuple[int, int]:
    """Numbers of `Receipt.movement` that have changed, and all of them; zeros if none was seen."""
    groups = (movement.get("now") or {}).get("groups", [])
    return sum(g["changed"] for g in groups), sum(g["numbers"] for g in groups)


def still_line(movement: dict[str, Any]) -> str:
    """What to do where most numbers of BF16 matrices stand still; empty where they move.

    Not of embeddings, whose rows wait for their tokens. Weights rounded by chance move on average.
    """
    now = movement.get("now") or {}
    low = [g for g in now.get("groups", []) if (g["kind"], g["type"]) == ("matrices", "bfloat16")]
    every, changed = (sum(g[key] for g in low) for key in ("numbers", "changed"))
    if movement.get("rounding") != "nearest" or changed >= every / 2:
        return ""
    return (
        f"{changed / every:.1%} of the numbers in BF16 matrices have changed in {now['steps']} "
        "steps: the other updates are smaller than BF16 can hold, and lost. "
        'train.optim=adamw_torch_8bit (in a script with optim_args="bf16_stochastic_round=True") '
        "rounds by chance, which loses none on average; model.dtype=float32 holds them"
    )
