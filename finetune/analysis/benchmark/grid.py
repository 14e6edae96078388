"""Points of a benchmark, smallest first, and the run measured at each.

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

import re
from pathlib import Path
from typing import NamedTuple

from finetune.analysis.benchmark.result import WARM_UP
from finetune.config.paths import shipped_shape, shipped_shapes
from finetune.config.schema import BUILTIN, RunConfig
from finetune.config.sft import shortened
from finetune.config.train_section import MOST_TOKENS
from finetune.data.dataset import MASKING
from finetune.errors import ConfigError, ModelNotFoundError, did_you_mean
from finetune.estimator.knobs import DEFAULTS, rows_of
from finetune.storage.pretrained import locate

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


def points_of(grid: str | None, config: RunConfig) -> list[Point]:
    """Points of a grid, fewest tokens first, then short rows before long ones.

    Args:
        grid: `batch=1,2,4 length=512,2048`; what is left out is the recipe's own, with TRL's
            defaults.

    Raises:
        ConfigError: another grid, with an example.
    """
    own = (rows_of(config)[0], int(config.train.get("max_length") or DEFAULTS["max_length"]))
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
                why=f"a grid is batch= and length=, each with numbers from 1 to {MOST_TOKENS} "
                "between commas",
                fix='--grid "batch=1,2,4 length=512,2048"',
            )
    batches, lengths = (sizes.get(k, [n]) for k, n in zip(Point._fields, own, strict=True))
    found = {Point(batch, length) for batch in batches for length in lengths}
    return sorted(found, key=lambda point: (point.tokens, point.length))


def tokens_of(config: RunConfig) -> int:
    """Tokens of an optimizer step of a recipe at a point."""
    rows, times = rows_of(config)
    return rows * times * config.train["max_length"]


def at_point(config: RunConfig, point: Point, steps: int, rows: Path = Path("rows")) -> RunConfig:
    """Configuration of a recipe at a point, with `steps` timed steps over the rows of a folder.

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
    return RunConfig.model_validate(
        config.model_dump()
        | {
            "model": config.model.model_dump() | {"weights": "random"},
            "data": {"path": str(rows.absolute()), "eval_fraction": 0.0},
            "eval": {"at_start": False, "samples": False},
            "train": train,
        }
    )
