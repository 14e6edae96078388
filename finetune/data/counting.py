"""The rows of a recipe, tokenized and counted as its trainer would, without one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from finetune.config.methods import Method, method_of
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.config.train_keys import TrainerArguments
from finetune.config.train_section import with_checkpointing
from finetune.data.dataset import Rows, reader_for, rows_for
from finetune.data.ledger import Ledger
from finetune.data.lengths import Lengths
from finetune.data.pairs import preparing
from finetune.hardware.device import this_device
from finetune.storage.pretrained import load_tokenizer
from finetune.storage.processors import tokenizer_of


@dataclass(frozen=True)
class CountedRows:
    """Rows of a recipe, and `prepared`: tokenized and cut as for training, not packed.

    `args` are those of the trainer that would read them; `ledgers` are of `train` and `eval` rows.
    """

    rows: Rows
    prepared: Dataset
    ledgers: dict[str, Ledger]
    tokenizer: Any
    args: Any

    @property
    def ledger(self) -> Ledger:
        """Counts of the training rows."""
        return self.ledgers["train"]

    @property
    def lengths(self) -> Lengths:
        """Lengths of all rows, those that are evaluated, too."""
        return Lengths.joined([found.lengths for found in self.ledgers.values()])


def counted_rows(config: RunConfig, *, sample: bool = False, tokenizer: Any = None) -> CountedRows:
    """Load, tokenize and count the training rows of a recipe, as its trainer would.

    With `sample` only the first rows of large files and of the hub; `tokenizer`: a script's own.
    """
    if tokenizer is None:
        tokenizer, _ = load_tokenizer(config.model, config.train.chat_template_path)
    rows = rows_for(config, tokenizer, sample=sample)
    reader = reader_for(config, rows, tokenizer)
    return count(rows, arguments_for(rows, config), reader, method_of(config.train))


def arguments_for(rows: Rows, config: RunConfig) -> Any:
    """Arguments of a trainer that only prepares these rows, in this process."""
    # Sharding needs the processes of the run, and says nothing about rows.
    train = {key: value for key, value in config.train.items() if not key.startswith("fsdp")}
    plain = with_checkpointing(config.model_copy(update={"train": train}), False)
    # A run that is decided by these rows keeps the process group that this makes.
    return sft_config(plain, Path("runs"), rows.settings, on_cpu=this_device().kind == "cpu")


def count(rows: Rows, args: Any, reader: Any, method: Method) -> CountedRows:
    """Tokenize and count rows as a method's trainer would; of a stream its first ones.

    Args:
        reader: tokenizer or processor (`dataset.reader_for`).
    """
    trainer = preparer(reader, method)
    first: Any = rows.train if rows.sample is None else rows.sample
    prepared = trainer.counts(first, args, "train")
    if rows.eval is not None:
        trainer.counts(rows.eval, args, "eval")
    own = whole_ledger(trainer.ledgers["train"], rows, args, method)
    return CountedRows(rows, prepared, trainer.ledgers | {"train": own}, tokenizer_of(reader), args)


def preparer(reader: Any, method: Method) -> Any:
    """A method's trainer without a model: only its `counts` can be called, and its `ledgers` read.

    It is the run's own code, so that what is counted before is what is trained.
    """
    trainer: Any = object.__new__(preparing(method))
    trainer.processing_class = reader
    return trainer


def ledgers_of(trainer: Any, rows: Rows, reader: Any, method: Method) -> dict[str, Ledger]:
    """Ledgers of a trainer's rows; the one of training counts all rows that will be read."""
    found: dict[str, Ledger] = dict(trainer.ledgers)
    if rows.sample is None:
        found["train"] = whole_ledger(found["train"], rows, trainer.args, method)
    else:
        trainer.given = rows.sample
        found["train"] = count(rows, trainer.args, reader, method).ledger
    return found


def whole_ledger(found: Ledger, rows: Rows, args: Any, method: Method) -> Ledger:
    """A ledger of training rows with those that the trainer has not seen, or leaves out.

    A trainer whose batches are of whole groups of answers leaves out what fills none.
    """
    sampled, left_out, args = rows.sampled, 0, TrainerArguments(args)
    if rows.sample is not None:
        sampled = len(rows.sample) + rows.refused
    if method.writes:
        batch = args.generation_batch_size
        if batch is None:  # of distillation: a step's batch
            batch = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        left_out = (found.rows - found.dropped) % (batch // (args.num_generations or 1))
    facts = {"refused": rows.refused, "in_eval": rows.shared}
    return replace(found, **facts, sampled=sampled, left_out=left_out)
