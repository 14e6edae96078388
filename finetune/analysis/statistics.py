"""What a few paired runs can say: gaps of losses with intervals, equivalence, ratios of speed.

*Losses.* A seed draws the order of rows and the initial adapters, and both sides of a pair share
it, so what seeds do to a loss is in both and cancels in d = ln(a / b). The n values of d are taken
as draws around one gap, normal in good approximation (each is a mean over many tokens), and the
interval of their mean is Student's with n - 1 degrees of freedom. It speaks of other seeds of the
same recipe on the same rows; of other data or longer runs it says nothing.

*Equivalence* is two one-sided tests (TOST; Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657):
the gap is shown to lie above -margin and below +margin, each at level alpha = 1 - confidence, which
is to say that the interval at 1 - 2 alpha lies inside the margin. Beyond the margin the same
interval is read the other way: wholly outside, the two differ by more than the margin. Where it
straddles the margin nothing was shown, and the verdict is `undecided`: a wide interval is no
evidence of equivalence. So each verdict is wrong in at most alpha of the cases, wherever the true
gap lies: where it is the margin itself, `equivalent` is said in alpha of them. That two losses have
to be equivalent, both, needs no correction (intersection-union test; Berger 1982, Technometrics
24:295). One seed has no spread, so no interval and no verdict.
`python -m tests.benchmarks.interval_coverage` prints how often each statement is right.

*Speed.* The ratio of tokens per second is taken step by step, since step s of both sides has the
same tokens; the median over the steps of a run is not moved by steps that stall or log. The times
of neighbouring steps are alike (a neighbour's load, clocks), so steps are no independent draws.
With two seeds or more a pair of runs is the unit: Student's interval over the medians of the
pairs, right whatever the steps of a run have in common, and it contains what differs from process
to process. With one pair there are only its steps: they are cut into six sections, and Student's
interval is taken over the sections' medians (batch means; Law and Kelton, Simulation Modeling and
Analysis, 9.5.3), which hardly depend on each other where a section is much longer than the time
over which steps are alike. It cannot contain what differs between processes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from finetune.analysis.compare.result import Interval, LossGap, Verdict

MOST_SEEDS = 50
"""Beyond it, more seeds are no advice."""

SECTIONS = 6
"""Of a single pair's steps; as many steps are needed at least."""


def student(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Student's interval of the mean of two values or more."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = _quantile((1 + confidence) / 2, n - 1) * spread / math.sqrt(n)
    return mean - half, mean + half


@functools.cache
def _quantile(probability: float, degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf(probability, degrees))


def _as_gap(logs: tuple[float, float]) -> Interval:
    return math.expm1(logs[0]), math.expm1(logs[1])


def loss_gap(
    a: Sequence[float], b: Sequence[float], *, margin: float, confidence: float
) -> LossGap:
    """The relative gap of paired losses, its intervals, and the verdict.

    Args:
        a, b: final losses, one a seed, in the same order; all above zero.
        margin: relative gap that counts as none, such as 0.01.
        confidence: of the interval, above 0.5; each one-sided test errs in at most 1 - confidence.
    """
    d = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    gap = math.expm1(math.fsum(d) / len(d))
    if len(d) == 1:
        return LossGap(a=list(a), b=list(b), gap=gap, verdict="undecided")
    interval = _as_gap(student(d, confidence))
    inner = _as_gap(student(d, 2 * confidence - 1))
    return LossGap(
        a=list(a),
        b=list(b),
        gap=gap,
        interval=interval,
        equivalence_interval=inner,
        verdict=verdict_of(inner, margin),
    )


def verdict_of(inner: Interval, margin: float) -> Verdict:
    """Whether the interval of the two one-sided tests is inside, outside, or astride the margin."""
    low, high = inner
    if -margin < low and high < margin:
        return "equivalent"
    return "not equivalent" if low > margin or high < -margin else "undecided"


def seeds_to_settle(found: LossGap, margin: float, confidence: float) -> int | None:
    """Seeds that would settle an undecided gap, if more of them look like these; None: too many.

    With one seed there is no spread to plan with, and the answer is None too.
    """
    n = len(found.a)
    if n == 1:
        return None
    d = [math.log(x / y) for x, y in zip(found.a, found.b, strict=True)]
    mean = math.fsum(d) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in d) / (n - 1))
    for more in range(n + 1, MOST_SEEDS + 1):
        half = _quantile(confidence, more - 1) * spread / math.sqrt(more)
        if verdict_of(_as_gap((mean - half, mean + half)), margin) != "undecided":
            return more
    return None


def band(losses: Sequence[float]) -> float:
    """What seeds alone do to a loss: (largest - smallest) / mean."""
    return (max(losses) - min(losses)) / (math.fsum(losses) / len(losses))


# ------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True)
class Step:
    """One optimizer step: its number, seconds on the device, tokens without padding."""

    step: int
    seconds: float
    tokens: int


def warm_up_steps(total: int) -> int:
    """How many first steps are no evidence of speed: witness, proof, compiling, caches.

    A tenth of the run, at least 5 and at most 20.
    """
    return min(20, max(5, total // 10))


def step_ratios(a: Sequence[Step], b: Sequence[Step], warm_up: int) -> list[float]:
    """ln of the ratio of tokens per second of a over b, for each step that both have."""
    others = {step.step: step for step in b}
    return [
        math.log((step.tokens / step.seconds) / (other.tokens / other.seconds))
        for step in a[warm_up:]
        if (other := others.get(step.step)) is not None
        if min(step.tokens, other.tokens, step.seconds, other.seconds) > 0
    ]


def speed_ratio(pairs: Sequence[Sequence[float]], confidence: float) -> tuple[float, Interval]:
    """The ratio of speeds and its interval.

    Args:
        pairs: for each seed the log ratios of its steps, in order, `SECTIONS` or more.
        confidence: of the interval.
    """
    medians = [median(steps) for steps in pairs]
    ratio = math.exp(math.fsum(medians) / len(medians))
    if len(medians) == 1:
        steps, n = pairs[0], len(pairs[0])
        cuts = [n * i // SECTIONS for i in range(SECTIONS + 1)]
        sections = [median(steps[i:j]) for i, j in itertools.pairwise(cuts)]
        low, high = student(sections, confidence)
    else:
        low, high = student(medians, confidence)
    return ratio, (math.exp(low), math.exp(high))
