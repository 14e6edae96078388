"""The learning rate that a schedule gets to: one that stays near zero trains nothing."""

from __future__ import annotations

from typing import Any

LEAST_SHARE = 0.5
"""Of the learning rate that was asked for: a run that stays below is refused."""


def reached(scheduler: Any, steps: int) -> float:
    """Largest factor of a scheduler in its first steps; of one that follows the loss, 1.

    Of many steps a thousand are looked at, and the last.
    """
    from torch.optim.lr_scheduler import LambdaLR

    if not isinstance(scheduler, LambdaLR):
        return 1.0
    # A thousand points and the last: a schedule's peak is no narrower.
    seen = [*range(0, steps, max(1, steps // 1000)), steps - 1]
    return max(factor(step) for factor in scheduler.lr_lambdas for step in seen)
