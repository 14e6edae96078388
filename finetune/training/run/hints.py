"""Hints at the end of a run, each with its evidence; none where there is nothing to say.

What is judged is what the method is judged by: an evaluated loss that rises, a reward that falls.
Of answers that the model writes, TRL (1.16) logs the shares that were cut, and of groups whose
rewards are equal, from which nothing is learned.

A loss falls, or an evaluation rises, if a line through its values has a slope of `SURE` standard
errors and changes it by `MATTERS`. Errors are wider where values follow one another: with lag-1
correlation r of what the line leaves, by sqrt((1 + r) / (1 - r)). Of noise without a slope no
series in 400 gets a hint, and 3 in 400 where it is correlated by 0.5 (`test_hints.py`).

Example: ten losses that fall by 0.05 in all, each off the line by 0.01, have an error of 0.011 over
that span: 5 errors, and no hint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from finetune.config.measures import MEASURES, Measure, ends
from finetune.config.methods import ADAPTERS, method_of
from finetune.config.schema import RunConfig
from finetune.training.asking.rewards import FLAT, MAKE_DIFFER
from finetune.units import plural

SURE, MATTERS = 6.0, 0.01
FEWEST_LOSSES, FEWEST_EVALUATIONS = 10, 6
OF_ANSWERS = {
    "completions/clipped_ratio": (
        "of the answers were cut at train.max_completion_length before they ended",
        "raise it; or the model does not write its end token (eos_token_id of the "
        "generation_config.json), which a few steps of SFT teach",
    ),
    FLAT: ("of the groups had equal rewards, from which nothing is learned", MAKE_DIFFER),
}
"""Share that TRL logs -> what it is of, and what to do; said where it is above `MOST`."""
MOST = 0.5
Point = tuple[int, float]
"""A step and its value."""


def hints(
    config: RunConfig, rows: Sequence[dict[str, Any]], *, steps: int, rate: float
) -> Iterator[str]:
    """Lines for the end of a run of `steps` steps with this peak learning rate.

    Args:
        rows: of `metrics.jsonl`.
    """
    method = method_of(config.train)
    yield from _of_answers(rows)
    column, losses = method.evaluated.columns[0], "loss" in method.columns
    evaluations = [(row["step"], row[column]) for row in rows if column in row]
    # More steps are not proposed to a run whose evaluation gets worse.
    worse = rising(evaluations, method.evaluated)
    if worse:
        watched = f"train.metric_for_best_model={column} " if not losses else ""
        yield f"{worse}: fewer steps, or {watched}train.early_stopping_patience=3"
    elif better := falling([(r["step"], r["loss"]) for r in rows if losses and "loss" in r]):
        more = f"train.num_train_epochs={2 * float(config.train.num_train_epochs):g}"
        more = f"train.max_steps={2 * steps}" if int(config.train.max_steps) > 0 else more
        yield f"{better}: more steps may lower it further ({more})"
    # The usual rates are for published weights: others, and packaged toys, take larger ones.
    published = config.model.weights != "random" and not config.model.name.startswith("builtin:")
    lora = config.lora is not None
    if published and method.is_unusual(rate, lora=lora):
        low, high = (ADAPTERS**lora * limit for limit in method.rates)
        yield (
            f"train.learning_rate={rate:g} is far from what is usual for {method.name} "
            f"with {'adapters' if lora else 'all weights'}: {low:g} to {high:g}"
        )


def _of_answers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for key, (what, cure) in OF_ANSWERS.items():
        last = ends(key, rows)[1]
        if last and (share := fmean(last)) > MOST:
            yield f"{share:.0%} {what} ({key}, mean of {plural(len(last), 'log')}): {cure}"


def falling(losses: Sequence[Point]) -> str:
    """How the training loss still fell in the last quarter of a run; empty if nobody can say."""
    # The last quarter: a schedule that ends at zero flattens every loss at its very end.
    quarter = losses[-(len(losses) // 4) :]
    if len(quarter) < FEWEST_LOSSES:
        return ""
    change, error = trend(quarter)
    if change > -SURE * error or change > -MATTERS * abs(quarter[0][1]):
        return ""
    span = f"steps {quarter[0][0]:,} to {quarter[-1][0]:,}"
    return f"the loss still fell at the end, by {-change:.3f} ± {2 * error:.3f} in {span}"


def rising(evaluations: Sequence[Point], measure: Measure = MEASURES["eval"]) -> str:
    """Since when evaluations get worse, a loss rises or a reward falls; empty if nobody can say."""
    sign = -1 if measure.rises else 1
    best = min(range(len(evaluations)), key=lambda i: sign * evaluations[i][1], default=0)
    after = evaluations[best + 1 :]
    if len(after) < FEWEST_EVALUATIONS:
        return ""
    (step, least), last = evaluations[best], after[-1][1]
    change, error = trend(after)
    if sign * change < SURE * error or sign * (last - least) < MATTERS * abs(least):
        return ""
    name, way = f"eval {measure.name.removeprefix('eval ')}", "falls" if measure.rises else "rises"
    return f"the {name} {way} since step {step:,}, from {least:.3f} to {last:.3f}"


def trend(points: Sequence[Point]) -> tuple[float, float]:
    """Change over the span of the points by a line through them, and its standard error."""
    steps, values = np.asarray(points, dtype=np.float64).T
    if not np.isfinite(values).all():
        return 0.0, np.inf
    (slope, start), covariance = np.polyfit(steps, values, 1, cov=True)
    rest = values - slope * steps - start
    # Correlation of neighbors in what the line leaves; 1e-300 for a loss that lies on a line.
    follows = float(rest[:-1] @ rest[1:]) / max(float(rest @ rest), 1e-300)
    # Negative correlation is taken as none, which errs on the side of no hint.
    follows, span = min(max(follows, 0.0), 0.9), steps[-1] - steps[0]
    error = np.sqrt(covariance[0, 0] * (1 + follows) / (1 - follows))
    return float(slope * span), float(error * span)
