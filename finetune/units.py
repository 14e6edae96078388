"""Numbers as people read them: sizes, times, shares and counts. Imports nothing of the package.

Sizes are in binary units: a GiB is 2**30 bytes, and what vendors call an 80 GB GPU has 79.2 of
them. Where two functions do the same in other words, two places print it in other words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB = 2**20
GIB = 2**30

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
MEMORY = ("MiB", "GiB")
"""Units that memory of a GPU is shown in."""
_BYTES = {unit: 1024**power for power, unit in enumerate(BINARY)}


def size(nbytes: float, units: Sequence[str] = BINARY, *, whole_below: str = "KiB") -> str:
    """A size in the largest of the units of which it has one or more: `37.9 MiB`.

    Args:
        nbytes: 0 or more.
        units: of `BINARY`, ascending; what is smaller than the first is shown in it.
        whole_below: units below this one are shown without decimals.
    """
    unit = next((unit for unit in reversed(units) if nbytes >= _BYTES[unit]), units[0])
    digits = 0 if _BYTES[unit] < _BYTES[whole_below] else 1
    return f"{nbytes / _BYTES[unit]:.{digits}f} {unit}"


def size_of_gib(gib: float) -> str:
    """The same of a number of GiB, as receipts hold it."""
    return size(gib * GIB)


def duration(seconds: float) -> str:
    """A time that was estimated, in few digits: `45 ms`, `1.23 s`, `4 min`, `2 h 05 min`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def elapsed(seconds: float) -> str:
    """A time that was measured, to the second: `6.1 s`, `4 min 10 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def short_time(seconds: float) -> str:
    """The time of a part of a step: `1.23 s`, `45.6 ms`, `78 us`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def percent(
    share: float, digits: int | None = 1, *, sign: bool = False, space: bool = False
) -> str:
    """A share of one in percent: 0.63 is `63.0%`.

    Args:
        share: of one.
        digits: after the point; None for as many as it has, at most six in all.
        sign: `+63.0%`.
        space: `63.0 %`.
    """
    value, plus = share * 100, "+" if sign else ""
    # `z`: what rounds to zero has no minus
    text = f"{value:{plus}g}" if digits is None else f"{value:{plus}z.{digits}f}"
    return f"{text}{' ' if space else ''}%"


_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def amount(text: str) -> int | None:
    """A whole number as people type it: `10e9`, `10B`, `500M`, `1_000`, `1,000`; None if none."""
    number = text.strip().lower().replace(",", "")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        found = float(number.removesuffix(unit)) * _TIMES[unit]
    except (KeyError, ValueError):
        return None
    return int(found) if found.is_integer() else None


def count(number: float) -> str:
    """`3,303`."""
    return f"{number:,.0f}"


MOST_LOSS = 20.0
"""Losses above which perplexity is not shown: hundreds of millions of equally likely tokens."""


def perplexity(loss: float) -> str:
    """exp of a loss in nats per token: `24.5`, `4,315`; empty above `MOST_LOSS`, and of a NaN."""
    if not loss <= MOST_LOSS:
        return ""
    value = math.exp(loss)
    return f"{value:,.2f}" if value < 100 else count(value)


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters, the last of them `…` where it was longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


def plural(number: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
