"""Steps and learning rate of a run, before it trains: how many, and what the rate gets to.

A schedule begins at a rate of zero and warms up over a number of steps, or a share of them. Where
rows are few, a number of steps from another data set is all of the run: 300 rows of 100 tokens,
packed into rows of 2,048, make 15 rows, 4 micro-batches of 4 and, accumulated by 4, one step, whose
rate is zero. The run then ends well, and has learned nothing.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from finetune.config.sft import REFUSALS
from finetune.errors import ConfigError

LEAST_SHARE = 0.5
"""Of the learning rate that was asked for: a run that stays below is refused."""
MORE = "a smaller train.per_device_train_batch_size, or more train.num_train_epochs, make more"
"""Advice of each line on too few steps."""
FEW = 50
"""Steps below which a run by epochs gets a line: an adapter or a model has hardly moved."""


@dataclass(frozen=True)
class Schedule:
    """Steps of a run on rows of known number.

    Attributes:
        args: the trainer's arguments, with the accumulation in force.
        given: the accumulation that was asked for.
        rows: rows of an epoch, as the trainer has them (packed); None of a stream.
        steps: optimizer steps.
        peak: largest share of the learning rate in them.
    """

    args: Any
    given: int
    rows: int | None
    steps: int
    peak: float

    @property
    def lowered(self) -> str:
        """A line where accumulation is lowered, else empty."""
        each = self.args.gradient_accumulation_steps
        if each >= self.given:
            return ""
        return (
            f"gradient accumulation: {each} instead of {self.given}, since rows are few "
            "(data.min_steps)"
        )

    @property
    def few(self) -> str:
        """A line where epochs over few rows make few steps, else empty."""
        by_epochs = self.args.max_steps <= 0 and self.rows is not None
        if not by_epochs or self.steps >= FEW:
            return ""
        return f"{self.steps:,} optimizer steps are few; {MORE}"

    @property
    def line(self) -> str:
        """Steps, rows of a step, and the learning rate that is reached."""
        args = self.args
        each = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
        return (
            f"steps: {self.steps:,} of {math.prod(each)} rows ({' x '.join(map(str, each))}), "
            f"learning rate up to {self.peak * args.learning_rate:.3g} of {args.learning_rate:.3g}"
        )

    def check(self) -> None:
        """Raise `ConfigError` where the learning rate stays below half of its value."""
        if self.peak >= LEAST_SHARE:
            return
        raise ConfigError(
            f"the learning rate would get to {self.peak:.0%} of its value in {self.steps:,} "
            f"step{'s' * (self.steps != 1)}",
            where=f"train.warmup_steps={self.args.warmup_steps:g}",
            why="the first step of a warm-up has a rate of zero: the run would end without having "
            "learned",
            fix=f"train.warmup_steps=0; or train.lr_scheduler_type=constant; {MORE}",
        )


def schedule_of(args: Any, rows: int | None, least: int | None = None) -> Schedule:
    """The schedule of a run.

    Args:
        args: `SFTConfig` of the run.
        rows: rows of an epoch, as they are trained on; None of a stream, which has `max_steps`.
        least: steps for which accumulation is lowered, down to 1 (`data.min_steps`); None: it stays
            as it is.

    Example: 150 packed rows in micro-batches of 4 are 38; accumulated by 4 they are 10 steps, by 1
    they are 38. With `least=50` the accumulation is 1, with `least=12` it is 3 (13 steps).
    """
    given = args.gradient_accumulation_steps
    if least is not None and rows is not None and args.max_steps <= 0:
        ways = [_accumulating(args, each) for each in range(given, 0, -1)]
        args = next((way for way in ways if steps_of(way, rows) >= least), ways[-1])
    steps = args.max_steps if rows is None else steps_of(args, rows)
    return Schedule(args, given, rows, steps, peak_of(args, steps))


def steps_of(args: Any, rows: int) -> int:
    """Optimizer steps on so many rows, as `Trainer.set_initial_training_values` has them."""
    if args.max_steps > 0:
        return args.max_steps
    batches = rows / (args.per_device_train_batch_size * args.world_size)
    batches = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    each_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return math.ceil(args.num_train_epochs * each_epoch)


def peak_of(args: Any, steps: int) -> float:
    """Largest share of the learning rate in a run of `steps`, by Transformers' own schedule.

    A schedule that Transformers refuses is reported where the trainer makes it; here it has 1.
    """
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup, kwargs = args.get_warmup_steps(steps), args.lr_scheduler_kwargs
    try:
        made = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, kwargs)
    except REFUSALS:
        return 1.0
    return reached(made, steps)


def reached(scheduler: Any, steps: int) -> float:
    """Largest factor of a scheduler in its first steps; of one that follows the loss, 1.

    Of many steps a thousand are looked at, and the last.
    """
    from torch.optim.lr_scheduler import LambdaLR

    if not isinstance(scheduler, LambdaLR):
        return 1.0
    seen = [*range(0, steps, max(1, steps // 1000)), steps - 1]
    return max(factor(step) for factor in scheduler.lr_lambdas for step in seen)


def _accumulating(args: Any, each: int) -> Any:
    """A copy of the trainer's arguments with this accumulation."""
    changed = copy.copy(args)
    changed.gradient_accumulation_steps = each
    return changed
