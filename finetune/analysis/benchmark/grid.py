"""Points of a benchmark, smallest first, and the job measured at each.

    batch=1,2 length=512,1024    is, in this order,    1 x 512, 2 x 512, 1 x 1024, 2 x 1024

A key left out is the first recipe's own. Once a point ran out of memory, points at least as large
in both directions are skipped: their activations are no smaller.

A recipe keeps its optimizer, accumulation, checkpointing, attention, packing and fused kernels.
Weights are random, rows synthetic; nothing is evaluated, saved or logged; the learning rate is
constant, so that the proof is complete after two steps. A row of exactly `length` tokens fills a
packed row, so a step has batch x length x accumulation tokens, all with a loss. Packed rows of real
data hold several texts, which varlen attention computes faster.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

from finetune.config.paths import shipped_shape, shipped_shapes
from finetune.config.schema import BUILTIN, EvalConfig, RunConfig
from finetune.config.sft import shortened
from finetune.config.train_section import MOST_TOKENS
from finetune.data.dataset import MASKING
from finetune.errors import ConfigError, ModelNotFoundError, did_you_mean
from finetune.estimator.knobs import DEFAULTS, rows_of
from finetune.storage.pretrained import locate

KEYS = ("batch", "length")
WARM_UP = 5
"""Steps before timing: the first has the witness, the second completes the proof and compiles, on
a CPU the third counts its tensors, and two are for autotuning.
"""
_LEFT_OUT = ("lr_scheduler_kwargs", "warmup_ratio", "neftune_noise_alpha", *MASKING)
"""Trainer settings of another learning rate, other rows or another loss."""


class Point(NamedTuple):
    """Rows of a micro-batch, and tokens of each row."""

    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def contains(self, other: Point) -> bool:
        return self.batch >= other.batch and self.length >= other.length


@dataclass(frozen=True)
class Grid:
    """Values to combine; an empty tuple is the recipe's own."""

    batch: tuple[int, ...] = ()
    length: tuple[int, ...] = ()

    def points(self, config: RunConfig) -> list[Point]:
        """List all combinations, fewest tokens first, then short rows before long ones."""
        own = own_point(config)
        batches, lengths = self.batch or (own.batch,), self.length or (own.length,)
        found = {Point(b, n) for b in batches for n in lengths}
        return sorted(found, key=lambda point: (point.tokens, point.length))


def own_point(config: RunConfig) -> Point:
    """Point that a recipe trains at, with TRL's defaults."""
    rows, _ = rows_of(config)
    return Point(rows, int(config.train.get("max_length") or DEFAULTS["max_length"]))


def parse_grid(text: str) -> Grid:
    """Parse `batch=1,2,4 length=512,2048`; either may be left out.

    Raises:
        ConfigError: anything else, with an example.
    """
    try:
        return _parsed(text)
    except ValueError as error:
        raise ConfigError(
            str(error),
            where=f"--grid {text!r}",
            why="a grid is batch= and length=, each with whole numbers between commas",
            fix='--grid "batch=1,2,4 length=512,2048"',
        ) from None


def _parsed(text: str) -> Grid:
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split():
        key, equals, values = word.partition("=")
        if key not in KEYS:
            raise ValueError(f"{word!r} is no part of a grid" + did_you_mean(key, KEYS))
        if not equals:
            raise ValueError(f"{key} has no values")
        if key in found:
            raise ValueError(f"{key} is given twice")
        for value in values.split(","):
            if not (value.isascii() and value.isdigit() and 0 < int(value[:20]) <= MOST_TOKENS):
                raise ValueError(f"{word!r}: {value!r} is no number from 1 to {MOST_TOKENS}")
        found[key] = tuple(map(int, values.split(",")))
    if not found:
        raise ValueError("the grid is empty")
    return Grid(**found)


# -------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Job:
    """Measurement that one process does.

    Attributes:
        config: the recipe at its point (`at_point`).
        steps: timed steps.
        round: number of the process at this point, from 0.
        forecast: predict memory and time before training.
        force: train even if the prediction is far beyond the device.
    """

    label: str
    config: RunConfig
    steps: int = 10
    round: int = 0
    forecast: bool = True
    force: bool = False
    note: str = ""

    @property
    def point(self) -> Point:
        train = self.config.train
        return Point(train["per_device_train_batch_size"], train["max_length"])

    @property
    def tokens(self) -> int:
        _, times = rows_of(self.config)
        return self.point.tokens * times

    def to_json(self) -> str:
        data = {k: v for k, v in asdict(self).items() if k != "config"}
        return json.dumps(data | {"config": self.config.model_dump(mode="json")})

    @classmethod
    def from_json(cls, line: str) -> Self:
        data = json.loads(line)
        return cls(**data | {"config": RunConfig.model_validate(data["config"])})


def at_point(config: RunConfig, point: Point, steps: int) -> RunConfig:
    """Configuration of a recipe at a point, with `steps` timed steps.

    Raises:
        ConfigError: rows of that length would be padded.
        ModelNotFoundError: the shape of the model is neither packaged nor in a local folder.
    """
    source = locate(config.model.model_copy(update={"weights": "random"}))
    here = config.model.name.startswith(BUILTIN) or Path(source).is_dir()
    if not here and shipped_shape(source) is None:
        raise ModelNotFoundError(
            f"the shape of {source!r} is not packaged",
            where="model.name",
            why="a benchmark asks no hub: it needs the model's config.json alone",
            fix="a local folder with its config.json (model.name=./folder), or one of "
            f"{', '.join(shipped_shapes())}",
        )
    multiple = int(config.train.get("pad_to_multiple_of") or 1)
    if point.length % multiple:
        up = -(-point.length // multiple) * multiple
        raise ConfigError(
            f"rows of {point.length} tokens would be padded to {up}",
            where=f"train.pad_to_multiple_of: {multiple}",
            why="padding is computed and is no token: tokens/s would say too little",
            fix=f"length={up}, or ~train.pad_to_multiple_of",
        )
    train = shortened(config.train, WARM_UP + steps, _LEFT_OUT) | {
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "per_device_train_batch_size": point.batch,
        "max_length": point.length,
    }
    nothing = EvalConfig(at_start=False, samples=False).model_dump()
    data = config.model_dump()
    data["model"] = {**data["model"], "weights": "random"}
    return RunConfig.model_validate(data | {"train": train, "eval": nothing})
