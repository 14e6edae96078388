"""Which micro-batches and lengths are measured, smallest first.

    batch=1,2,4 length=512,2048

is six points. What is left out is the first recipe's own. Points go by their tokens, so that what
fits is measured before what may not, and once a recipe did not fit, points that are at least as
large in both directions are not tried: their activations are no smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from finetune.config import RunConfig
from finetune.errors import ConfigError, nearest

KEYS = ("batch", "length")
EXAMPLE = '--grid "batch=1,2,4 length=512,2048"'


class Point(NamedTuple):
    """Rows of a micro-batch, and tokens of each row."""

    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.length

    def contains(self, other: Point) -> bool:
        """Whether it is at least as large in both directions."""
        return self.batch >= other.batch and self.length >= other.length


@dataclass(frozen=True)
class Grid:
    """Values to combine; an empty tuple stands for the recipe's own."""

    batch: tuple[int, ...] = ()
    length: tuple[int, ...] = ()

    def points(self, config: RunConfig) -> list[Point]:
        """All combinations, those of fewest tokens first, short rows before long ones."""
        own = own_point(config)
        batches, lengths = self.batch or (own.batch,), self.length or (own.length,)
        found = {Point(b, n) for b in batches for n in lengths}
        return sorted(found, key=lambda point: (point.tokens, point.length))


def own_point(config: RunConfig) -> Point:
    """What a recipe trains with, TRL's defaults included."""
    batch = config.train.get("per_device_train_batch_size", 8)
    return Point(int(batch), int(config.train.get("max_length") or 1024))


def parse_grid(text: str) -> Grid:
    """Read `batch=1,2,4 length=512,2048`; either may be left out.

    Raises:
        ConfigError: anything else, with an example.
    """
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split():
        key, equals, values = word.partition("=")
        if key not in KEYS or not equals:
            hint = nearest(key, KEYS)
            raise _refused(text, f"{word!r} is no part of a grid" + (f"; {hint}" if hint else ""))
        if key in found:
            raise _refused(text, f"{key} is given twice")
        found[key] = tuple(_number(value, word, text) for value in values.split(","))
    if not found:
        raise _refused(text, "the grid is empty")
    return Grid(**found)


def _number(value: str, word: str, text: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value)):
        raise _refused(text, f"{word!r}: {value!r} is no whole number from 1 on")
    return int(value)


def _refused(text: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=f"--grid {text!r}",
        why="a grid is batch= and length=, each with whole numbers between commas",
        fix=EXAMPLE,
    )
