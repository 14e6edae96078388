"""The rows of a recipe, tokenized and counted as its trainer would, without one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from finetune.config.methods import Method, method_of
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config
from finetune.config.train_section import with_checkpointing
from finetune.data.dataset import Rows, rows_for
from finetune.data.ledger import Ledger
from finetune.data.pairs import trainer_of
from finetune.hardware.device import this_device
from finetune.storage.pretrained import load_tokenizer


@dataclass(frozen=True)
class CountedRows:
    """Rows of a recipe, and `prepared`: tokenized and cut as for training, not packed.

    `args` are those of the trainer that would read them.
    """

    rows: Rows
    prepared: Dataset
    ledger: Ledger
    tokenizer: Any
    args: Any


def counted_rows(config: RunConfig, *, sample: bool = False, tokenizer: Any = None) -> CountedRows:
    """Load, tokenize and count the training rows of a recipe, as its trainer would.

    With `sample` only the first rows of large files and of the hub; `tokenizer`: a script's own.
    """
    if tokenizer is None:
        tokenizer, _ = load_tokenizer(config.model, config.train.get("chat_template_path"))
    rows = rows_for(config, tokenizer, sample=sample)
    return count(rows, arguments_for(rows, config), tokenizer, method_of(config.train))


def arguments_for(rows: Rows, config: RunConfig) -> Any:
    """Arguments of a trainer that only prepares these rows, in this process."""
    train = {key: value for key, value in config.train.items() if not key.startswith("fsdp")}
    plain = with_checkpointing(config.model_copy(update={"train": train}), False)
    # A run that is decided by these rows keeps the process group that this makes.
    return sft_config(plain, Path("runs"), rows.settings, on_cpu=this_device().kind == "cpu")


def count(rows: Rows, args: Any, tokenizer: Any, method: Method) -> CountedRows:
    """Tokenize and count training rows as a method's trainer would; of a stream its first ones."""
    trainer: Any = object.__new__(trainer_of(method))  # preparing rows needs no model
    trainer._tokenizer = tokenizer
    held: Any = rows.train if rows.sample is None else rows.sample
    prepared = trainer.counts(held, args)
    sampled = rows.sampled if rows.sample is None else len(held) + rows.refused
    ledger = replace(
        trainer.ledgers["train"], refused=rows.refused, sampled=sampled, in_eval=rows.shared
    )
    return CountedRows(rows, prepared, ledger, tokenizer, args)
