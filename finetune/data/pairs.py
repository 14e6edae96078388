"""Trainers of TRL beside `SFTTrainer`, with the ledger that a run keeps of its rows.

They tokenize rows themselves and drop those that leave no room for an answer without a word. What
they have prepared is counted: an answer, its prompt before it, is one sequence.

    rows of a pair      prompt + chosen, prompt + rejected
    labelled rows       prompt + completion
    prompts             prompt alone: what is trained on is written later
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from datasets import Dataset, Features, Value
from trl import DPOTrainer, SFTTrainer
from trl.data_utils import maybe_apply_chat_template

from finetune.config.methods import Method
from finetune.data.checks import MASKED
from finetune.data.ledger import (
    TOKENIZED,
    TRAPPED,
    Accounted,
    AccountedTrainer,
    Ledger,
    account,
    not_formatted,
)
from finetune.errors import DataError

ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")
"""Columns of token ids that TRL's trainers make of the answers of a row."""


@functools.cache
def trainer_of(method: Method) -> type[Accounted]:
    """TRL's trainer of a method, with ledgers."""
    kind = method.trainer_class
    if issubclass(kind, SFTTrainer):
        return AccountedTrainer
    return type(f"Accounted{kind.__name__}", (AccountedPairs, kind), {})


class AccountedPairs(Accounted):
    """Mixin of a trainer that prepares its rows itself, or reads them as they are."""

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        self._tokenizer, self.ledgers = kwargs["processing_class"], {}
        if not hasattr(super(), "_prepare_dataset"):
            for name in ("train", "eval"):
                if isinstance(rows := kwargs[f"{name}_dataset"], Dataset):
                    done = self._prepare_dataset(rows, self._tokenizer, args, name)
                    kept = done.select_columns(rows.column_names)
                    kwargs[f"{name}_dataset"] = _as_texts(kept, self._tokenizer)
        super().__init__(model=model, args=args, **kwargs)

    def compute_loss_context_manager(self) -> Any:
        """Autocast around the loss as around the model's forward.

        TRL's distillation (1.16) calls the model below that forward: without it float32 weights
        multiply in float32, whatever is asked.
        """
        return self.accelerator.autocast()

    def counts(self, rows: Dataset, args: Any) -> Dataset:
        """A row for each answer."""
        state: Any = self
        state.ledgers, state.calculate_KL = {}, False  # of KTO: no rows for its estimate
        state.desirable_weight = state.undesirable_weight = 1.0
        return _sequences(self._prepare_dataset(rows, self._tokenizer, args, "train"))

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        """TRL's preparation; what it leaves is counted."""
        above: Any = super()
        try:
            if hasattr(above, "_prepare_dataset"):
                done = above._prepare_dataset(dataset, processing_class, args, name)
            elif "chosen" in dataset.column_names:  # ORPO would keep rows without an answer
                like: Any = SimpleNamespace(**vars(args), truncation_mode="keep_start")
                trainer: Any = self
                done = DPOTrainer._prepare_dataset(trainer, dataset, processing_class, like, name)
            else:
                done = dataset.map(partial(_asked, processing_class))
        except TRAPPED as error:
            raise not_formatted(name, error) from error
        if isinstance(dataset, Dataset):
            self.ledgers[name] = self._ledger(cast("Dataset", done), len(dataset), args)
        return done

    def _ledger(self, done: Dataset, given: int, args: Any) -> Ledger:
        """Counts of prepared rows, of which `given` there were."""
        limit = getattr(args, "max_length", None)
        if not len(done):
            raise DataError(
                f"none of {given:,} rows leaves room for an answer",
                where=f"train.max_length={limit}",
                why="rows of which no answer lies within it are left out",
                fix=f"train.max_length={4 * int(limit or 256)}; or null: nothing is cut",
            )
        like = SimpleNamespace(
            max_length=limit, truncation_mode=getattr(args, "truncation_mode", "keep_start")
        )
        found = account(
            _sequences(done), like, self._tokenizer, packing=False, vocabulary=self.vocabulary
        )
        # KTO makes two rows of a pair.
        given *= 2 if len(done) > given else 1
        dropped, answers = given - len(done), found.rows // len(done)
        lengths = found.lengths.of_rows(answers)
        return replace(found, rows=given, dropped=dropped, answers=answers, lengths=lengths)


def _as_texts(rows: Dataset, tokenizer: Any) -> Dataset:
    """Pairs as text; other rows as they are.

    ORPO's own maps (TRL 1.16) would write a text into the type of the turns that were there.
    """
    if "chosen" not in rows.column_names:
        return rows
    texts = Features(dict.fromkeys(("prompt", "chosen", "rejected"), Value("string")))
    return rows.map(
        partial(maybe_apply_chat_template, processing_class=tokenizer),
        remove_columns=rows.column_names,
        features=texts,
    )


def _asked(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Token ids of a prompt alone."""
    if isinstance(row["prompt"], str):
        return {"prompt_ids": tokenizer(row["prompt"])["input_ids"]}
    turns = {"add_generation_prompt": True, "return_dict": True, "tools": row.get("tools")}
    return {"prompt_ids": tokenizer.apply_chat_template(row["prompt"], **turns)["input_ids"]}


def _sequences(done: Dataset) -> Dataset:
    """Prepared rows as sequences of token ids with labels, an answer each."""
    made, own = [name for name in ANSWERS if name in done.column_names], done.column_names

    def each(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for i in range(len(rows[own[0]])):
            prompt = rows["prompt_ids"][i] if "prompt_ids" in rows else []
            for answer in [rows[name][i] for name in made] or [[]]:
                found["input_ids"].append([*prompt, *answer])
                found["labels"].append([*(MASKED for _ in prompt), *answer])
        return found

    return done.map(each, batched=True, remove_columns=own, features=TOKENIZED)
