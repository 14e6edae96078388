"""Long series, drawn short and honestly.

A page has some eight hundred points of width; a run may have ten thousand steps. Taking every
tenth would hide a spike of one step. So a long series is cut into buckets of equal numbers of
steps, and of each bucket the smallest and the largest value are kept, where they stand: the line
touches every extreme that the full series has (`envelope`). What is smooth is computed from all
steps first, and only then thinned. Values that are not finite are no points: their steps are told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BUCKETS = 300
"""Of a wide plot, each with two points."""


def series_of(rows: Iterable[dict[str, Any]], key: str) -> tuple[Floats, Floats]:
    """Steps and values [n] of the rows that have a key, what is not finite included."""
    pairs = [
        (row["step"], row[key])
        for row in rows
        if isinstance(row.get(key), (int, float)) and not isinstance(row[key], bool)
    ]
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def split(x: Floats, y: Floats) -> tuple[Floats, Floats, tuple[float, ...]]:
    """The finite part of a series, and the steps at which it is not finite."""
    good = np.isfinite(y)
    return x[good], y[good], tuple(float(step) for step in x[~good])


def envelope(x: Floats, y: Floats, buckets: int = BUCKETS) -> tuple[Floats, Floats]:
    """The smallest and the largest of each bucket, in their order: at most 2 `buckets` points.

    The first and the last point stay. Short series come back as they are.
    """
    n = len(y)
    if n <= 2 * buckets:
        return x, y
    kept = {0, n - 1}
    for part in np.array_split(np.arange(n), buckets):
        kept |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    index = np.asarray(sorted(kept))
    return x[index], y[index]


def window_of(n: int) -> int:
    """Points that a smoothed line averages: a fiftieth of them, an odd number; 1 is none."""
    return 1 if n < 20 else max(3, (n // 50) | 1)


def smoothed(y: Floats, window: int) -> Floats:
    """Mean over the `window` points around each [n], fewer at the ends."""
    if window <= 1:
        return y
    half = window // 2
    sums = np.concatenate(([0.0], np.cumsum(y)))
    at = np.arange(len(y))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(y))
    return (sums[high] - sums[low]) / (high - low)


def said(n: int, window: int = 1, buckets: int = BUCKETS) -> str:
    """What was done to `n` points, for the line under the plot."""
    parts = []
    if window > 1:
        parts.append(f"smoothed: mean of {window} logged points")
    if n > 2 * buckets:
        share = math.ceil(n / buckets)
        parts.append(f"{n:,} points drawn as the lowest and highest of every {share}")
    return "; ".join(parts)
