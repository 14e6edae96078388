"""Hints at the end of a run, each with its evidence; none where there is nothing to say.

A loss falls, or an evaluation rises, if a line through its values has a slope of `SURE` standard
errors and changes it by `MATTERS`. Errors are wider where values follow one another: with lag-1
correlation r of what the line leaves, by sqrt((1 + r) / (1 - r)). Of noise without a slope no
series in 400 gets a hint, and 3 in 400 where it is correlated by 0.5 (`test_hints.py`).

Example: ten losses that fall by 0.05 in all, each off the line by 0.01, have an error of 0.011 over
that span: 5 errors, and no hint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from finetune.config.methods import ADAPTERS, method_of
from finetune.config.schema import RunConfig

SURE, MATTERS = 6.0, 0.01
FEWEST_LOSSES, FEWEST_EVALUATIONS = 10, 6
Point = tuple[int, float]
"""A step and its value."""


def hints(
    config: RunConfig, rows: Sequence[dict[str, Any]], *, steps: int, rate: float
) -> Iterator[str]:
    """Lines for the end of a run of `steps` steps with this peak learning rate.

    Args:
        rows: of `metrics.jsonl`.
    """
    worse = rising([(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row])
    if worse:
        yield worse + ": fewer steps, or train.early_stopping_patience=3"
    elif better := falling([(row["step"], row["loss"]) for row in rows if "loss" in row]):
        more = f"train.num_train_epochs={2 * float(config.train.get('num_train_epochs') or 3):g}"
        more = f"train.max_steps={2 * steps}" if config.train.get("max_steps") else more
        yield f"{better}: more steps may lower it further ({more})"
    # The usual rates are those of published weights: others, and packaged toys, take larger ones.
    published = config.model.weights != "random" and not config.model.name.startswith("builtin:")
    method, lora = method_of(config.train), config.lora is not None
    if published and method.is_unusual(rate, lora=lora):
        low, high = (ADAPTERS**lora * limit for limit in method.rates)
        yield (
            f"train.learning_rate={rate:g} is far from what is usual for {method.name} "
            f"with {'adapters' if lora else 'all weights'}: {low:g} to {high:g}"
        )


def falling(losses: Sequence[Point]) -> str:
    """How the training loss still fell in the last quarter of a run; empty if nobody can say."""
    quarter = losses[-(len(losses) // 4) :]
    if len(quarter) < FEWEST_LOSSES:
        return ""
    change, error = trend(quarter)
    if change > -SURE * error or change > -MATTERS * abs(quarter[0][1]):
        return ""
    span = f"steps {quarter[0][0]:,} to {quarter[-1][0]:,}"
    return f"the loss still fell at the end, by {-change:.3f} ± {2 * error:.3f} in {span}"


def rising(evaluations: Sequence[Point]) -> str:
    """Since when the evaluation loss rises; empty if nobody can say."""
    best = min(range(len(evaluations)), key=lambda i: evaluations[i][1], default=0)
    after = evaluations[best + 1 :]
    if len(after) < FEWEST_EVALUATIONS:
        return ""
    (step, lowest), last = evaluations[best], after[-1][1]
    change, error = trend(after)
    if change < SURE * error or last - lowest < MATTERS * abs(lowest):
        return ""
    return f"the eval loss rises since step {step:,}, from {lowest:.3f} to {last:.3f}"


def trend(points: Sequence[Point]) -> tuple[float, float]:
    """Change over the span of the points by a line through them, and its standard error."""
    steps, values = np.asarray(points, dtype=np.float64).T
    if not np.isfinite(values).all():
        return 0.0, np.inf
    (slope, start), covariance = np.polyfit(steps, values, 1, cov=True)
    rest = values - slope * steps - start
    follows = float(rest[:-1] @ rest[1:]) / max(float(rest @ rest), 1e-300)
    follows, span = min(max(follows, 0.0), 0.9), steps[-1] - steps[0]
    error = np.sqrt(covariance[0, 0] * (1 + follows) / (1 - follows))
    return float(slope * span), float(error * span)
