"""Points of a benchmark, smallest first, and the run measured at each.

    batch=1,2 length=512,1024    is, in this order,    1 x 512, 2 x 512, 1 x 1024, 2 x 1024
    gpus=1,2                     is the recipe's own micro-batch on one GPU, then on two

A key left out is the first recipe's own. Once a point ran out of memory, points at least as large
in both directions are skipped: their activations are no smaller.

A recipe keeps its optimizer, accumulation, checkpointing, attention, packing and fused kernels.
Weights are random, rows synthetic; nothing is evaluated, saved or logged; the learning rate is
constant, so that the proof is complete after two steps. A row of exactly `length` tokens fills a
packed row, so a step has batch x length x accumulation tokens, all with a loss. Packed rows of real
data hold several texts, which varlen attention computes faster.

*Several GPUs* are so many processes under `torchrun`; on a CPU they share its cores, as many to
each process as at the grid's largest point, so that one process is the same device at every point.
Under weak scaling each has the rows of one, and the step so many times as many. Under strong
scaling the step keeps its rows: accumulation is divided.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import NamedTuple

from finetune.analysis.benchmark.result import WARM_UP
from finetune.config.paths import shipped_shape, shipped_shapes
from finetune.config.schema import RunConfig
from finetune.config.sections import BUILTIN
from finetune.config.sft import shortened
from finetune.config.train_keys import TrainSection
from finetune.config.train_section import MOST_TOKENS
from finetune.data.dataset import MASKING
from finetune.errors import ConfigError, ModelNotFoundError, did_you_mean
from finetune.estimator.changes import rows_of
from finetune.storage.pretrained import locate

_LEFT_OUT = ("lr_scheduler_kwargs", "warmup_ratio", "neftune_noise_alpha", *MASKING)
"""Trainer settings of another learning rate, other rows or another loss."""


class Point(NamedTuple):
    """Rows of a micro-batch, tokens of each row, and processes that train together."""

    batch: int
    length: int
    gpus: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def contains(self, other: Point) -> bool:
        """True if each process holds no less; a sharded model's share depends on their number."""
        larger = self.batch >= other.batch and self.length >= other.length
        return larger and self.gpus == other.gpus


def points_of(grid: str | None, config: RunConfig) -> list[Point]:
    """Points of a grid, fewest GPUs first, then fewest tokens, then short rows before long ones.

    Args:
        grid: `batch=1,2,4 length=512,2048 gpus=1,2`; what is left out is the recipe's own, with
            TRL's defaults, on one GPU.

    Raises:
        ConfigError: another grid, with an example.
    """
    own = (rows_of(config)[0], int(config.train.max_length or TrainSection.max_length.default), 1)
    sizes: dict[str, list[int]] = {}
    for word in [""] if grid == "" else (grid or "").split():
        key, _, values = word.partition("=")
        is_list = re.fullmatch(r"[0-9]{1,20}(,[0-9]{1,20})*", values)
        sizes[key] = [*map(int, values.split(","))] if is_list and key not in sizes else []
        inside = all(0 < size <= MOST_TOKENS for size in sizes[key])
        if key not in Point._fields or not sizes[key] or not inside:
            close = "" if key in Point._fields else did_you_mean(key, Point._fields)
            raise ConfigError(
                f"{word!r} is no part of a grid{close}",
                where=f"--grid {grid!r}",
                why="a grid is batch=, length= and gpus=, each with numbers from 1 to "
                f"{MOST_TOKENS} between commas",
                fix='--grid "batch=1,2,4 length=512,2048"',
            )
    axes = (sizes.get(key, [own]) for key, own in zip(Point._fields, own, strict=True))
    found = {Point(*sizes) for sizes in itertools.product(*axes)}
    return sorted(found, key=lambda point: (point.gpus, point.tokens, point.length))


def tokens_of(config: RunConfig) -> int:
    """Tokens of one process in an optimizer step of a recipe at a point."""
    rows, times = rows_of(config)
    return rows * times * config.train.max_length


def at_point(
    config: RunConfig, point: Point, steps: int, rows: Path = Path("rows"), *, strong: bool = False
) -> RunConfig:
    """Configuration of a recipe at a point, with `steps` timed steps over the rows of a folder.

    Args:
        strong: divide the accumulation among the GPUs, so that a step has the rows of one GPU.

    Raises:
        ConfigError: rows of that length would be padded, or accumulation does not divide.
        ModelNotFoundError: the shape of the model is neither packaged nor in a local folder.
    """
    # Random weights need a shape alone, which is packaged for the models of shipped recipes.
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
    multiple = config.train.row_multiple
    # Rows are of equal length, so that what is computed and what is counted are the same tokens.
    if point.length % multiple:
        up = -(-point.length // multiple) * multiple
        raise ConfigError(
            f"rows of {point.length} tokens would be padded to {up}",
            where=f"train.pad_to_multiple_of: {multiple}",
            why="padding is computed and is no token: tokens/s would say too little",
            fix=f"length={up}, or ~train.pad_to_multiple_of",
        )
    batches, sharing = rows_of(config)[1], point.gpus if strong else 1
    if batches % sharing:
        up = -(-batches // sharing) * sharing
        raise ConfigError(
            f"an accumulation of {batches} does not divide among {sharing} GPUs",
            where="train.gradient_accumulation_steps",
            why="strong scaling keeps the rows of a step, and each GPU has as many of them",
            fix=f"train.gradient_accumulation_steps={up}, or --scaling weak",
        )
    train = shortened(config.train, WARM_UP + steps, _LEFT_OUT) | {
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        # Joules are counted where something is logged: before the timed steps, and behind them.
        "logging_strategy": "steps",
        "logging_steps": math.gcd(WARM_UP, steps),
        "per_device_train_batch_size": point.batch,
        "gradient_accumulation_steps": batches // sharing,
        "max_length": point.length,
    }
    return RunConfig.model_validate(
        config.model_dump()
        | {
            "model": config.model.model_dump() | {"weights": "random"},
            "data": {"path": str(rows.absolute()), "eval_fraction": 0.0},
            "eval": {"at_start": False, "samples": False},
            "train": train,
        }
    )
