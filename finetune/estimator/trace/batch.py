"""The batch of a rehearsal: synthetic rows of the largest size, joined by the trainer's collator.

A row has the columns of every method, so that one list of rows serves all trainers: SFT reads
`input_ids` and `labels`, DPO `prompt_ids`, `chosen_ids` and `rejected_ids`. All ids are 1, real
numbers rather than fake ones: a collator and a loss decide by values. Two rows of 4 tokens at most:

    padded     1 1 1 1     a row of full length, and the others one token shorter: the longest
               1 1 1 .     decides the peak, and Transformers passes a mask
    packed     1 1|1 1     rows filled by documents of equal length (`seq_lengths`), at most
               1 1|1 1     `DOCUMENTS` in each

Rows that the model writes are in `finetune.estimator.trace.writing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from finetune.config.train_keys import TrainerArguments

Batch = dict[str, Any]

DOCUMENTS = 8
"""Documents per packed row, where a mask keeps them apart: then their number costs nothing. Where
they cost only themselves, one fills its row, which is the most that it can take.
"""


def synthetic_rows(args: TrainerArguments, *, padded: bool, documents: int) -> list[dict[str, Any]]:
    """A batch of the maximum length; with padding only the first row has it.

    With packing a row is filled by documents of equal length. Each has the columns of all methods,
    as their trainers make them of rows of any form.
    """
    rows = []
    ones = [1] * args.max_length  # one list for all rows: there may be many
    shorter = ones[:-1] if padded else ones
    for i in range(args.per_device_train_batch_size):
        # The first row alone has the full length: the longest decides the shape of a padded batch.
        ids = shorter if i else ones
        length, row = len(ids), {**dict.fromkeys(_COLUMNS, ids), "label": i % 2 == 0}
        row |= {"prompt_ids": ids[:0]}
        if args.packing:
            count = min(documents, length)
            lengths = [length // count] * count
            # What does not divide goes to the last document, so that the row is full.
            lengths[-1] += length - sum(lengths)
            row["seq_lengths"] = lengths
        rows.append(row)
    return rows


_TRAINED = ("input_ids", "chosen_input_ids", "rejected_input_ids")
"""Inputs of a model in batches of any method, whose tokens count."""
_COLUMNS = (
    "input_ids", "labels", "completion_ids", "KL_completion_ids", "chosen_ids", "rejected_ids",
    *(f"{of}_{what}" for of in ("prompt", "chosen", "rejected") for what in
      ("input_ids", "attention_mask", "labels")),
)  # fmt: skip


def collated(rows: Any, collator: Any) -> Batch:
    """The rows as one batch of real tensors: what a model is called with, by name."""
    with unset_fake_temporarily():
        found = collator(list(rows))
    return {k: v for k, v in found.items() if isinstance(v, Tensor | int)}


def tokens_of(batch: Batch) -> int:
    """Tokens that a model reads of a batch, padding included."""
    return sum(x.numel() for name, x in batch.items() if name in _TRAINED)


def tensors_of(batches: list[Batch]) -> list[Tensor]:
    """Tensors of batches; rows that the model writes are none yet."""
    found = (value for batch in batches if isinstance(batch, dict) for value in batch.values())
    return [value for value in found if isinstance(value, Tensor)]


def copied(tensor: Tensor) -> Tensor:
    """A tensor of its own, with values if the other has them."""
    if isinstance(tensor, FakeTensor):
        return torch.empty_like(tensor)
    with unset_fake_temporarily():
        return tensor.clone()
