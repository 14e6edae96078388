"""How many times as fast: a ratio over paired rounds, with the interval that the rounds allow.

Rounds of two recipes alternate (A B A B ...), so that a clock that drifts, or a neighbour that
comes and goes, meets both. Of each round i the ratio r_i = median step of A / median step of B is
one observation; steps inside of a round are not independent of each other (they share a process,
its memory layout and its autotuning), so they add none. The interval is Student's on ln r_i:

    exp( mean ± t(0.975, n - 1) · s / √n )

A percentile bootstrap of so few rounds is not used: it never leaves the range that was seen, and
covers the truth in 75 % of cases with three rounds where 95 % is claimed (tests hold that of this
one). One round has no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """A ratio and the interval that holds it in 95 of 100 cases; None where there is one round."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def speed_ratio(
    reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> Ratio | None:
    """How many times as fast `other` is, from step times of paired rounds.

    Args:
        reference, other: round -> seconds of its steps, at as many tokens a step.

    Returns:
        None where either has no round. Rounds that one of them lacks are left out.
    """
    medians = [
        (statistics.median(a), statistics.median(b))
        for a, b in zip(reference, other, strict=False)
        if a and b
    ]
    if not medians:
        return None
    logs = [math.log(a / b) for a, b in medians]
    middle = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(middle))
    half = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t, within 0.2 %.

    One and two degrees of freedom in closed form, others by the expansion around the normal
    distribution (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5).
    """
    p = 0.975
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    x = statistics.NormalDist().inv_cdf(p)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))
