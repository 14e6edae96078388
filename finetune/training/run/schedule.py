"""Steps and learning rate of a run, before it trains: how many, and what the rate gets to.

A schedule begins at a rate of zero and warms up over a number of steps, or a share of them. Where
rows are few, a number of steps from another data set is all of the run: 300 rows of 100 tokens,
packed into rows of 2,048, make 15 rows, 4 micro-batches of 4 and, accumulated by 4, one step, whose
rate is zero. The run then ends well, and has learned nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.methods import METHODS, Method
from finetune.config.sft import REFUSALS
from finetune.config.train_keys import BATCH, TrainerArguments
from finetune.errors import ConfigError
from finetune.training.health.learning_rate import LEAST_SHARE, reached
from finetune.units import plural

FEW = 50
"""Steps below which a run by epochs gets a line: an adapter or a model has hardly moved."""


@dataclass(frozen=True)
class Schedule:
    """Steps of a run on rows of known number.

    Attributes:
        args: the trainer's arguments, with the batch in force.
        given: those that were asked for.
        rows: rows of an epoch, as the trainer has them (packed); None of a stream.
        steps: optimizer steps.
        peak: largest share of the learning rate in them.
        length: tokens of a packed row, where these are fewer than were asked for.
        least: steps for which steps were made smaller (`data.min_steps`).
    """

    args: TrainerArguments
    given: TrainerArguments
    rows: int | None
    steps: int
    peak: float
    length: int | None = None
    least: int = 0

    @property
    def lowered(self) -> str:
        """A line where steps are made of less than was asked for, else empty."""
        pairs = {key: (getattr(self.args, key), getattr(self.given, key)) for key in BATCH}
        if self.length is not None:
            pairs["max_length"] = self.length, self.given.max_length
        changed = [f"train.{key}={now} for {was}" for key, (now, was) in pairs.items() if now < was]
        why = "smaller steps, since rows are few (data.min_steps): "
        return why + ", ".join(changed) if changed else ""

    @property
    def few(self) -> str:
        """A line where epochs over few rows make few steps, else empty."""
        by_epochs = self.args.max_steps <= 0 and self.rows is not None
        if not by_epochs or self.steps >= FEW:
            return ""
        return f"{self.steps:,} optimizer steps are few. To make more: {self.more}"

    @property
    def more(self) -> str:
        """What to type for `FEW` steps."""
        if self.args.max_steps > 0:
            return f"train.max_steps={max(FEW, 2 * self.steps)}"
        longer = copy.copy(self.args)
        longer.num_train_epochs = math.ceil(self.args.num_train_epochs * FEW / self.steps)
        epochs = f"train.num_train_epochs={longer.num_train_epochs}"
        if self.rows is not None:
            epochs += f" ({steps_of(longer, self.rows):,} steps)"
        divides = self.least < FEW and math.prod(getattr(self.args, key) for key in BATCH) > 1
        return f"data.min_steps={FEW} (smaller steps), or {epochs}" if divides else epochs

    @property
    def line(self) -> str:
        """Steps, rows of a step, and the learning rate that is reached."""
        args = self.args
        each = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
        rows, rate = math.prod(each), f"{self.peak * args.learning_rate:.3g}"
        rate += f" of {args.learning_rate:.3g}" if rate != f"{args.learning_rate:.3g}" else ""
        return (
            f"{self.steps:,} steps of {plural(rows, 'row')} "
            f"({' x '.join(map(str, each))}), highest learning rate {rate}"
        )

    def check(self) -> None:
        """Raise `ConfigError` where the learning rate stays below half of its value."""
        if self.peak >= LEAST_SHARE:
            return
        raise ConfigError(
            f"the learning rate would get to {self.peak:.0%} of its value in "
            f"{plural(self.steps, 'step')}",
            where=f"train.warmup_steps={self.args.warmup_steps:g}",
            why="the first step of a warm-up has a rate of zero: the run would end without having "
            "learned",
            fix=f"train.warmup_steps=0; or train.lr_scheduler_type=constant; {self.more}",
        )


def schedule_of(
    args: Any,
    rows: int | None,
    least: int | None = None,
    *,
    method: Method = METHODS["sft"],
    length: int | None = None,
    kept: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of a run.

    Args:
        args: `SFTConfig` of the run.
        rows: rows of an epoch, as they are trained on; None of a stream, which has `max_steps`.
        least: steps for which accumulation, and then the micro-batch, is lowered, down to 1
            (`data.min_steps`); None: they stay as they are.
        method: the run's: of answers that are written, or compared in a batch, the
            micro-batch stays.
        length: tokens of a packed row, of which fewer were taken for the same reason.
        kept: accumulation and micro-batch of the checkpoint that is resumed from.

    Example: 150 packed rows in micro-batches of 4 are 38; accumulated by 4 they are 10 steps, by 1
    they are 38. With `least=50` micro-batches of 3 make 50 steps, with `least=12` an accumulation
    of 3 makes 13.
    """
    args = TrainerArguments(args)
    given = copy.copy(args)
    length = length if length != args.max_length else None
    if least is not None and rows is not None and args.max_steps <= 0:
        count, size = (getattr(args, key) for key in BATCH)
        # Where rows come in groups (answers to a prompt, both labels) a smaller micro-batch would
        # split them.
        by_row = method.is_text or method.rows == ("preference",)
        smaller = range(size - 1, 0, -1) if by_row else ()
        # Accumulation first, which changes no memory; then smaller micro-batches.
        pairs = [(each, size) for each in range(count, 0, -1)] + [(1, each) for each in smaller]
        ways = [_batched(args, pair) for pair in ([kept] if kept else pairs)]
        # The first way that is enough changes least.
        args = next((way for way in ways if steps_of(way, rows) >= least), ways[-1])
    steps = args.max_steps if rows is None else steps_of(args, rows)
    return Schedule(args, given, rows, steps, peak_of(args, steps), length, least or 0)


def steps_of(args: TrainerArguments, rows: int) -> int:
    """Optimizer steps on so many rows, as `Trainer.set_initial_training_values` has them."""
    if args.max_steps > 0:
        return args.max_steps
    batches = rows / (args.per_device_train_batch_size * args.world_size)
    batches = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    each_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return math.ceil(args.num_train_epochs * each_epoch)


def peak_of(args: TrainerArguments, steps: int) -> float:
    """Largest share of the learning rate in a run of `steps`, by Transformers' own schedule.

    A schedule that Transformers refuses is reported where the trainer makes it; here it has 1.
    """
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup, kwargs = args.get_warmup_steps(steps), args.lr_scheduler_kwargs
    try:
        made = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, kwargs)
    # What the schedule's arguments are refused for is said by the trainer, which knows their names.
    except REFUSALS:
        return 1.0
    return reached(made, steps)


def _batched(args: TrainerArguments, batch: Sequence[int]) -> TrainerArguments:
    """A copy of the trainer's arguments with this accumulation and micro-batch."""
    changed = copy.copy(args)
    for key, value in zip(BATCH, batch, strict=True):
        setattr(changed, key, value)
    return changed
