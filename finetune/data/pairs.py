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
from finetune.data.both_labels import BothLabels
from finetune.data.checks import MASKED
from finetune.data.ledger import Ledger, account
from finetune.data.preparing import (
    TOKENIZED,
    TRAPPED,
    Accounted,
    AccountedTrainer,
    endless,
    not_formatted,
)
from finetune.errors import DataError

ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")
"""Columns of token ids that TRL's trainers make of the answers of a row."""


@functools.cache
def preparing(method: Method) -> type[Accounted]:
    """TRL's trainer of a method, with ledgers of the rows that it prepares."""
    kind = method.trainer_class
    if issubclass(kind, SFTTrainer):
        return type(AccountedTrainer.__name__, (AccountedTrainer,), {"method": method})
    ordered = (BothLabels,) if "unpaired" in method.rows else ()
    return type(f"Accounted{kind.__name__}", (*ordered, AccountedPairs, kind), {"method": method})


class AccountedPairs(Accounted):
    """Mixin of a trainer that prepares its rows itself, or reads them as they are."""

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        self._tokenizer = kwargs["processing_class"]
        start = self._tokenizer.bos_token
        if not hasattr(super(), "_prepare_dataset"):
            for name in ("train", "eval"):
                if isinstance(rows := kwargs[f"{name}_dataset"], Dataset):
                    done = self._prepare_dataset(rows, self._tokenizer, args, name)
                    kept = done.select_columns(rows.column_names)
                    if name == "train":
                        self.given = kept
                    if not self.method.writes:
                        kept = kept.map(
                            partial(_as_text, self._tokenizer),
                            remove_columns=kept.column_names,
                            features=TEXTS,
                        )
                    kwargs[f"{name}_dataset"] = kept
            begins = self._tokenizer("")["input_ids"][:1] == [self._tokenizer.bos_token_id]
            if not self.method.writes and not begins:
                self._tokenizer.bos_token = None  # ORPO puts it before texts that have none
        try:
            super().__init__(model=model, args=args, **kwargs)
        finally:
            self._tokenizer.bos_token = start

    def compute_loss_context_manager(self) -> Any:
        """Autocast around the loss as around the model's forward.

        TRL's distillation (1.16) calls the model below that forward: without it float32 weights
        multiply in float32, whatever is asked.
        """
        return self.accelerator.autocast()

    def prepared(self, rows: Dataset, picked: list[int]) -> list[dict[str, Any]]:
        above: Any = super()
        if not hasattr(above, "_prepare_dataset"):  # ORPO's are those of its rows
            mapped: Any = self.train_dataset
            return list(mapped.select(picked))
        tokenizer = self._tokenizer
        return list(above._prepare_dataset(rows.select(picked), tokenizer, self.args, "look"))

    def counts(self, rows: Dataset, args: Any, name: str) -> Dataset:
        """A row for each answer."""
        state: Any = self
        state.calculate_KL = False  # of KTO: no rows for its estimate
        state.desirable_weight = state.undesirable_weight = 1.0
        return _sequences(self._prepare_dataset(rows, self._tokenizer, args, name))

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        """TRL's preparation; what it leaves is counted."""
        above: Any = super()
        try:
            if hasattr(above, "_prepare_dataset"):
                done = above._prepare_dataset(dataset, processing_class, args, name)
            elif not self.method.writes:  # ORPO would keep rows without an answer
                like: Any = SimpleNamespace(**vars(args), truncation_mode="keep_start")
                trainer: Any = self
                done = DPOTrainer._prepare_dataset(trainer, dataset, processing_class, like, name)
            else:
                done = dataset.map(partial(asked, processing_class, args=args))
        except TRAPPED as error:
            raise not_formatted(name, error) from error
        if isinstance(dataset, Dataset):
            self.ledgers[name] = self._ledger(cast("Dataset", done), len(dataset), args, name)
        return done

    def _ledger(self, done: Dataset, given: int, args: Any, name: str) -> Ledger:
        """Counts of prepared rows, of which `given` there were."""
        limit = getattr(args, "max_length", None)
        if not len(done):
            raise DataError(
                f"none of {given:,} {name} rows leaves room for an answer",
                where=f"train.max_length={limit}",
                why="rows of which no answer lies within it are left out",
                fix=f"train.max_length={4 * int(limit or 256)}; or null: nothing is cut",
            )
        found = account(
            _sequences(done), args, self._tokenizer, packing=False, vocabulary=self.vocabulary
        )
        if found.never_ends and found.trained and name == "train" and self.method.head != "score":
            raise endless(self._tokenizer, done[0])
        dropped, answers = given - len(done), found.rows // len(done)
        return replace(
            found,
            rows=given,
            dropped=dropped,
            answers=answers,
            lengths=found.lengths.of_rows(answers),
            good=sum(done["label"]) if isinstance(self, BothLabels) else None,
        )


TEXTS = Features(dict.fromkeys(("prompt", "chosen", "rejected"), Value("string")))


def _as_text(tokenizer: Any, row: dict[str, Any]) -> dict[str, str]:
    """A pair as text.

    ORPO's own maps (TRL 1.16) would write a text into the type of the turns that were there, leave
    out the tools, and add a second end behind white space that the template has behind its own.
    """
    found = maybe_apply_chat_template(row, tokenizer, tools=row.get("tools") or None)
    for key in ("chosen", "rejected"):
        ended = found[key].rstrip()
        found[key] = ended if ended.endswith(tokenizer.eos_token or "\0") else found[key]
    return found


def asked(tokenizer: Any, row: dict[str, Any], args: Any) -> dict[str, Any]:
    """Token ids of a prompt alone, under the template's arguments of all rows and of this one."""
    if isinstance(row["prompt"], str):
        return {"prompt_ids": tokenizer(row["prompt"])["input_ids"]}
    found = tokenizer.apply_chat_template(
        row["prompt"],
        add_generation_prompt=True,
        return_dict=True,
        tools=row.get("tools") or None,
        **(getattr(args, "chat_template_kwargs", None) or {})
        | (row.get("chat_template_kwargs") or {}),
    )
    return {"prompt_ids": found["input_ids"]}


def _sequences(done: Dataset) -> Dataset:
    """Prepared rows as sequences of token ids with labels, an answer each, and its name."""
    made, own = [name for name in ANSWERS if name in done.column_names], done.column_names

    def each(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": [], "labels": [], "answer": []}
        for i in range(len(rows[own[0]])):
            prompt = rows["prompt_ids"][i] if "prompt_ids" in rows else []
            for name in made or ["prompt"]:
                answer = rows[name][i] if made else []
                found["input_ids"].append([*prompt, *answer])
                found["labels"].append([*(MASKED for _ in prompt), *answer])
                label = f"label {str(rows['label'][i]).lower()}" if "label" in rows else name
                found["answer"].append(label.partition("_")[0])
        return found

    features = Features(**TOKENIZED, answer=Value("string"))
    return done.map(each, batched=True, remove_columns=own, features=features)
