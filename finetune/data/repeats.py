"""Rows that Accelerate repeats, so that each process has a whole batch; and batches that one lacks.

Accelerate 1.15 (`BatchSamplerShard`, `even_batches`) gives processes equally many batches, all of
the same size: where an epoch does not divide among them, it continues with the first rows. Of 5
rows in batches of 2, two processes train on 4 in the first step; in the second on the fifth, and
on the first three once more:

    process 0   1 2 | 5 1
    process 1   3 4 | 2 3

One process has a smaller last batch instead. Nothing of it stands in a log. Without `even_batches`
the second process has no second batch. The first one then waits for its gradients, for good, or
takes for them whatever the second one sends next: `refuse_uneven`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.utils import gather_object

from finetune.config.train_keys import TrainerArguments
from finetune.data.checks import MASKED
from finetune.errors import ConfigError, DataError

FILL = "to fill the last batch of all processes"
ASKED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Shares of batches whose repetitions have been said, if there are any."""


def share_of(loader: Any) -> Any:
    """The `BatchSamplerShard` of a prepared `DataLoader`, a process's batches; None without one."""
    for name in ("batch_sampler", "sampler"):  # the second where a script's sampler makes batches
        sampler = getattr(loader, name, None)
        if isinstance(sampler, SkipBatchSampler):  # of a resumed run
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            return sampler
    return None


# -------------------------------------------------------------------------------------- repetitions


def repeated_rows(loader: Any, micro_steps: float) -> tuple[int, int]:
    """(rows that are repeated in each epoch, rows of an epoch) of a prepared `DataLoader`.

    Args:
        micro_steps: batches that a process will take in all: none is repeated where the first epoch
            does not end.
    """
    share = share_of(loader)
    # Only `even_batches` repeats rows; `drop_last` leaves them out.
    if share is None or not share.even_batches or share.drop_last:
        return 0, 0
    rows, whole = _sizes(share)
    return (0, rows) if whole == 1 or micro_steps < len(loader) else (-rows % whole, rows)


def _sizes(share: Any) -> tuple[int, int]:
    """Rows of an epoch, and of a batch of all processes; (0, 1) of batches of changing sizes."""
    try:
        whole = share.batch_size * (1 if share.split_batches else share.num_processes)
        return len(share.batch_sampler.sampler), whole
    except (TypeError, AttributeError):
        return 0, 1


def repeats_line(loader: Any, micro_steps: float) -> str:
    """What is repeated, for a person to read; empty if nothing is, or if it has been asked."""
    (repeated, rows), share = repeated_rows(loader, micro_steps), share_of(loader)
    if share is None or share in ASKED:
        return ""
    ASKED.add(share)
    if not repeated:
        return ""
    return (
        f"each epoch of {rows:,} rows has {repeated:,} of them once more, {FILL} (drop_last of the "
        "DataLoader, dataloader_drop_last of a trainer, leaves out rows that fill none)"
    )


# ----------------------------------------------------------------------------------- uneven shares


def uneven_batches(loader: Any) -> tuple[int, int] | None:
    """Fewest and most batches of an epoch that processes have; None if all have as many.

    Example: 5 rows in batches of 2 are three batches, of which two processes have 2 and 1.
    """
    share = share_of(loader)
    if share is None or share.even_batches or share.drop_last:
        return None
    count = share.num_processes
    try:
        batches = len(share.batch_sampler)
        if share.split_batches:  # the last one, in parts of which some may be empty
            size = share.batch_size or 1
            last = len(share.batch_sampler.sampler) % size
            fewest, most = batches - (0 < last <= size // count * (count - 1)), batches
        else:
            fewest, most = batches // count, -(-batches // count)
    except (TypeError, AttributeError):
        return None
    return (fewest, most) if fewest < most else None


def refuse_uneven(loader: Any, micro_steps: float) -> None:
    """Reject rows that give one process more batches than another, in every process alike.

    Args:
        micro_steps: batches that a process will take in all.

    Raises:
        ConfigError: an epoch ends for one process and not for another.
    """
    found = uneven_batches(loader)
    if found is None or micro_steps <= found[0]:
        return
    fewest, most = found
    raise ConfigError(
        f"an epoch has fewer batches for one process than for another: {fewest:,} and {most:,}",
        where="even_batches=False (accelerator_config, DataLoaderConfiguration, or "
        "join_uneven_inputs)",
        why="the process that has more waits for the other's gradients for good, or takes for them "
        "what the other one sends in its next epoch",
        fix="leave even_batches out: some rows are trained on once more; or drop_last=True of the "
        "DataLoader (dataloader_drop_last=True of a Trainer): rows that fill no batch are left out",
    )


def refuse_no_batch(loader: Any, args: Any) -> None:
    """Reject rows that fill no batch of all processes, where such a batch is left out.

    Args:
        args: the trainer's.

    Raises:
        DataError: no step would be trained; Transformers logs that, and saves the model.
    """
    try:
        rows = len(loader.dataset) if len(loader) == 0 else 0
    except (TypeError, AttributeError):  # a stream
        return
    if rows:
        args = TrainerArguments(args)
        raise DataError(
            f"{rows:,} rows fill no batch, and no step would be trained",
            where="dataloader_drop_last",
            why=f"a batch takes {args.per_device_train_batch_size * args.world_size:,}, of all "
            "processes, and a smaller one is left out",
            fix="~train.dataloader_drop_last (of a script: leave it out), more rows, or a smaller "
            "per_device_train_batch_size",
        )


# --------------------------------------------------------------------------------------- evaluation

ROW_LENGTHS = "finetune_row_lengths"
"""Key of an eval batch in one sequence: tokens of each row, in order."""


class EvaluatesOnce:
    """Mixin of a trainer whose eval loss counts each token once, whatever batches it is in.

    Transformers 5.23 takes the mean of each batch's mean, weighted by rows: a short row's token
    counts for more, and another size of batches, or number of processes, gives another loss.
    """

    args: Any
    accelerator: Any
    data_collator: Any
    padding_free: bool
    evaluated: list[float]
    """Sum of the losses of tokens in this evaluation, and their number, on this process."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, with the mean over all tokens of all processes for a loss.

        Raises where processes have unequal batches: they would wait for good.
        """
        refuse_uneven(dataloader, float("inf"))
        self.evaluated = [0.0, 0]
        above: Any = super()
        output = above.evaluation_loop(dataloader, *args, **kwargs)
        losses, tokens = map(sum, zip(*gather_object([self.evaluated]), strict=True))
        for key in [key for key in output.metrics if key.endswith("loss") and tokens]:
            output.metrics[key] = losses / tokens
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, without the rows that Accelerate repeats to give each a whole batch.

        Of 37 rows in batches of 4, two processes have 4 and 1 in the last step, and the second one
        three of the first rows once more: these stood in the last row's loss.
        """
        state, labels = self.accelerator.gradient_state, inputs.get("labels")
        size = TrainerArguments(self.args).per_device_eval_batch_size
        lengths = inputs.pop(ROW_LENGTHS, None)
        several = self.accelerator.num_processes > 1 and state.end_of_dataloader
        if several and state.remainder > 0 and labels is not None:
            # `remainder` is how many rows of the last batch of all processes are not repetitions;
            # they come first.
            own = max(0, state.remainder - self.accelerator.process_index * size)
            inputs = {**inputs, "labels": labels.clone()}
            if lengths is not None:  # [1, tokens]
                inputs["labels"][:, int(lengths[:own].sum()) :] = MASKED
            elif len(labels) == size:
                inputs["labels"][own:] = MASKED
        above: Any = super()
        loss, *rest = above.prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and labels is not None:
            # No token comes before the first label to predict it: the mean is over one token less.
            tokens = int((inputs["labels"][:, 1:] != MASKED).sum())
            self.evaluated[0] += float(loss) * tokens if tokens else 0.0
            self.evaluated[1] += tokens
        return loss, *rest

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, of all rows: `dataloader_drop_last` is about those that are trained on.

        Batches of one sequence, packed or without padding, say how long their rows are:
        `prediction_step` could not tell otherwise which of them are repeated.
        """
        given = TrainerArguments(self.args)
        plain, drops = self.data_collator, given.dataloader_drop_last
        given.dataloader_drop_last = False
        if self.padding_free and self.accelerator.num_processes > 1:
            self.data_collator = partial(_with_lengths, plain)
        above: Any = super()
        try:
            return above.get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator, given.dataloader_drop_last = plain, drops


def _with_lengths(collate: Callable[..., Any], examples: list[dict[str, Any]]) -> Any:
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    return {**collate(examples), ROW_LENGTHS: lengths}
