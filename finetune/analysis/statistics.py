"""Statistics of a few paired runs: loss gaps with intervals, equivalence, ratios of speed.

*Losses.* A seed sets the order of rows and the initial adapters. Both sides of a pair share it, so
its effect on the loss cancels in d = ln(a / b). The n values of d are draws around one gap, nearly
normal (each is a mean over many tokens); the interval of their mean is Student's with n - 1 degrees
of freedom. It holds for other seeds of the same recipe and rows, not for other data or longer runs.

*Equivalence* is two one-sided tests (TOST; Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657):
the gap is above -margin and below +margin, each at level alpha = 1 - confidence; that is, the
interval at 1 - 2 alpha lies inside the margin. If it lies wholly outside, the two differ by more
than the margin; if it straddles the margin, the verdict is `undecided`: a wide interval is no
evidence of equivalence. So each verdict on a loss is wrong in at most alpha of the cases, wherever
the true gap lies. Requiring equivalence of two losses needs no correction (intersection-union test;
Berger 1982, Technometrics 24:295). That one of two differs is said wrongly in up to 2 alpha of the
cases, where both gaps are the margin itself. One seed has no spread, so no interval and no verdict.
`python -m tests.benchmarks.interval_coverage` measures the coverage of each statement.

*Speed.* Step s of both sides has the same tokens, so tokens per second are divided step by step;
the median over steps ignores those that stall or log. Times of neighboring steps correlate (other
load, clocks). With two pairs of runs or more a pair is the unit: Student's interval over the pairs'
medians is right whatever the correlation, and contains the spread between processes (memory layout,
autotuning). A single pair is cut into six sections, with Student's interval over their medians
(batch means; Law and Kelton, Simulation Modeling and Analysis, 9.5.3), nearly independent where a
section is much longer than the correlation; it lacks the spread between processes. A percentile
bootstrap of three pairs never leaves the observed range: it covers the truth in 75 % of cases where
95 % is claimed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from finetune.analysis.compare.result import EndGap, Gap, Interval, LossGap, Verdict

MOST_SEEDS = 50
"""Largest number of seeds that is recommended."""

SECTIONS = 6
"""Sections of a single pair's steps; an interval needs at least as many steps."""


def student(values: Sequence[float], confidence: float, n: int = 0) -> Interval:
    """Student's interval of the mean: mean +- t((1 + confidence) / 2, n - 1) * stdev / sqrt(n).

    Another `n` than `len(values)` plans for n observations with the same spread.
    """
    n = n or len(values)
    mean = fmean(values)
    half = quantile((1 + confidence) / 2, n - 1) * stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def quantile(probability: float, freedom: int) -> float:
    """Student's t below which a value lies with a probability of 0.5 or more.

    The probability of |T| < t is a finite sum in the angle atan(t / sqrt(freedom)) (Abramowitz and
    Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4), which is halved until it is met.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term = total = cosine if freedom % 2 else 1.0
        for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        inside = sine * (total if freedom > 1 else 0.0)
        if freedom % 2:
            inside = 2 / math.pi * (angle + inside)
        low, high = (angle, high) if inside < 2 * probability - 1 else (low, angle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def loss_gap(
    a: Sequence[float],
    b: Sequence[float],
    *,
    margin: float,
    confidence: float,
    kind: type[EndGap] = LossGap,
) -> EndGap:
    """Relative gap of paired losses (one a seed, above zero), its intervals, and the verdict.

    `margin` is the relative gap that counts as none, such as 0.01. Each one-sided test errs in at
    most 1 - `confidence` (above 0.5) of the cases. Of another `kind` the gap is a difference.
    """
    found = kind(a=list(a), b=list(b))
    return found.model_copy(update=tested(found, margin=margin, confidence=confidence))


def tested(found: Gap, *, margin: float, confidence: float) -> dict[str, Any]:
    """Gap, its two intervals and the verdict, of the paired values that a gap has."""
    d, gap = found.pairs, found.as_gap
    if len(d) == 1:
        return {"gap": gap(fmean(d)), "verdict": "undecided"}
    low, high = student(d, confidence)
    inner_low, inner_high = student(d, 2 * confidence - 1)
    inner = gap(inner_low), gap(inner_high)
    return {
        "gap": gap(fmean(d)),
        "interval": (gap(low), gap(high)),
        "equivalence_interval": inner,
        "verdict": verdict_of(inner, margin),
    }


def verdict_of(inner: Interval, margin: float) -> Verdict:
    """Verdict from the two one-sided tests: interval inside, outside or astride the margin."""
    low, high = inner
    if -margin < low and high < margin:
        return "equivalent"
    return "not equivalent" if low > margin or high < -margin else "undecided"


def seeds_to_settle(found: Gap, margin: float, confidence: float) -> int | None:
    """Number of seeds that would settle an undecided gap, if more of them spread like these.

    With the log ratios 0.012, 0.002 and -0.002 at a margin of 1 %, three seeds give an interval up
    to 1.6 %; with the same mean (0.4 %) and spread, six are the first to end below 1 %.

    Returns:
        None if more than `MOST_SEEDS` would be needed, or with one seed, which has no spread.
    """
    d = found.pairs
    if len(d) == 1:
        return None
    for more in range(len(d) + 1, MOST_SEEDS + 1):
        low, high = student(d, 2 * confidence - 1, more)
        if verdict_of((found.as_gap(low), found.as_gap(high)), margin) != "undecided":
            return more
    return None


def band(losses: Sequence[float]) -> float:
    """Relative range of a loss over seeds: (max - min) / mean."""
    return (max(losses) - min(losses)) / fmean(losses)


# ------------------------------------------------------------------------------------------- speed


class Ratio(NamedTuple):
    """A ratio of speeds and its interval; None with too few steps."""

    value: float
    interval: Interval | None = None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x ({self.interval[0]:.2f} to {self.interval[1]:.2f})"


def warm_up_steps(total: int) -> int:
    """Number of first steps left out of speed (witness, proof, compiling): a tenth, 5 to 20."""
    return min(20, max(5, total // 10))


Steps = Sequence[dict[str, Any]]
"""Rows of `Run.steps`."""


def step_ratios(a: Steps, b: Steps, warm_up: int) -> list[float]:
    """ln(tokens per second of a / of b), for each step of both."""
    others = {step["step"]: step for step in b}
    pairs = ((step, others[step["step"]]) for step in a[warm_up:] if step["step"] in others)
    return [
        math.log((x["tokens"] / x["seconds"]) / (y["tokens"] / y["seconds"]))
        for x, y in pairs
        if min(x["tokens"], y["tokens"], x["seconds"], y["seconds"]) > 0
    ]


def speed_ratio(pairs: Sequence[Sequence[float]], confidence: float = 0.95) -> Ratio:
    """Ratio of speeds from the log ratios of each pair's steps, and its interval.

    Three pairs with medians 0.68, 0.70 and 0.69 (ln): the ratio is exp(0.69) = 1.99, and with
    t(0.975, 2) = 4.303 the interval is exp(0.69 +- 4.303 * 0.01 / sqrt(3)), 1.94 to 2.04. A single
    pair of fewer than `SECTIONS` steps has no interval.
    """
    medians = [median(steps) for steps in pairs]
    value = math.exp(fmean(medians))
    if len(medians) == 1:
        steps, n = pairs[0], len(pairs[0])
        if n < SECTIONS:
            return Ratio(value)
        cuts = [n * i // SECTIONS for i in range(SECTIONS + 1)]
        medians = [median(steps[i:j]) for i, j in itertools.pairwise(cuts)]
    low, high = student(medians, confidence)
    return Ratio(value, (math.exp(low), math.exp(high)))
