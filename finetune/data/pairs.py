"""Trainers of TRL beside `SFTTrainer`, with the ledger that a run keeps of its rows.

They tokenize rows themselves (`finetune.data.by_trl`) and drop those that leave no room for an
answer without a word. What is left is counted: an answer, its prompt before it, is one sequence.

    rows of a pair      prompt + chosen, prompt + rejected
    labelled rows       prompt + completion
    prompts             prompt alone: what is trained on is written later
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from datasets import Dataset, Features, Value
from trl import SFTTrainer, maybe_apply_chat_template

from finetune.config.methods import Method
from finetune.config.train_keys import TrainerArguments
from finetune.data.both_labels import BothLabels
from finetune.data.by_trl import as_they_are, prepared
from finetune.data.checks import MASKED
from finetune.data.image_forms import COLUMN
from finetune.data.image_prompts import (
    beside_notes,
    reading_prompts,
    refuse_uneven,
    streamed,
    with_pictures,
    without_empty,
)
from finetune.data.image_rows import (
    AS_PAIRS,
    AS_PROMPTS,
    NOTED,
    as_pair,
    as_prompt,
    fitting,
    of_images,
    prompted,
    read,
)
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
from finetune.storage.processors import tokenizer_of

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
        super().__init__(model, args, **kwargs)
        if self.method.writes and COLUMN in (kwargs["train_dataset"].column_names or ()):
            bare = partial(without_empty, token=model.config.image_token_id)
            for one in filter(None, (self.model, getattr(self, "ref_model", None))):
                one.register_forward_pre_hook(bare, with_kwargs=True)
            if self.args.world_size > 1:
                # TRL (1.16) gathers images for its table of answers, but not where a process has
                # drawn rows without any: all others would wait for it.
                self.log_multimodal = False

    @contextlib.contextmanager
    def handing(self, args: Any) -> Iterator[None]:
        """Accounted's; texts that have no start token get none."""
        tokenizer: Any = tokenizer_of(self.processing_class)
        start, texts = tokenizer.bos_token, self.method.prepared_by and not self.method.prepares
        if texts and tokenizer("")["input_ids"][:1] != [tokenizer.bos_token_id]:
            tokenizer.bos_token = None  # ORPO puts it there
        try:
            with super().handing(args):
                yield
        finally:
            tokenizer.bos_token = start

    def for_images(self, model: Any, args: Any) -> dict[str, Any]:
        """Accounted's; of prompts TRL makes batches itself, by the processor that it is handed."""
        if not self.method.writes:
            return super().for_images(model, args)
        return {"processing_class": reading_prompts(self.processing_class)}

    def compute_loss_context_manager(self) -> Any:
        """Autocast around the loss as around the model's forward.

        TRL's distillation (1.16) calls the model below that forward: without it float32 weights
        multiply in float32, whatever is asked.
        """
        return self.accelerator.autocast()

    def prepared(self, rows: Dataset, picked: list[int]) -> list[dict[str, Any]]:
        if not self.method.prepares:  # ORPO makes its own of those it was handed
            mapped: Any = self.train_dataset
            return list(mapped.select(picked))
        return list(self._fitting(self.made(rows.select(picked), self.args, "look"), self.args))

    def counts(self, rows: Dataset, args: Any, name: str) -> Dataset:
        """A row for each answer."""
        plain = {"loss_type": "apo_zero_unpaired"} if "unpaired" in self.method.rows else {}
        return _sequences(self.counted(rows, args, name, **plain))  # no rows for KTO's estimate

    def prepare(self, rows: Any, args: Any, name: str) -> tuple[Any, Any]:
        if self.method.prepares:
            done = self.counted(rows, args, name)
            again = TrainerArguments(args).precompute_ref_log_probs  # scores come by `map`
            return done, done if again else as_they_are(done)
        images = COLUMN in (rows.column_names or ())
        if not isinstance(rows, Dataset):
            if images:
                raise streamed(self.method.key)
            return rows, rows
        # Rows that TRL would drop are dropped here, where they are counted; the trainer gets those
        # that are left.
        done = self.counted(rows, args, name)
        if images:
            refuse_uneven(done, self.processing_class, self.method)
        kept = beside_notes(rows, done) if images else done.select_columns(rows.column_names)
        if name == "train":
            self.given = kept
        if images:
            kept = kept.with_transform(with_pictures)
        if self.method.prepared_by:
            told = partial(_as_text, tokenizer_of(self.processing_class))
            kept = kept.map(told, remove_columns=kept.column_names, features=TEXTS)
        return kept, kept

    def made(self, rows: Any, args: Any, name: str, **settings: Any) -> Any:
        """TRL's preparation, but that rows with images are not cut or dropped yet."""
        tokenizer, columns = tokenizer_of(self.processing_class), rows.column_names or ()
        if COLUMN in columns and self.method.prepared_by:
            return read(rows, self.processing_class, as_pair, AS_PAIRS)
        if COLUMN in columns:
            how = {"template": TrainerArguments(args).chat_template_kwargs or {}}
            return read(rows, self.processing_class, as_prompt, AS_PROMPTS, **how)
        if not self.method.prepared_by:
            return rows.map(partial(asked, tokenizer, args=args))
        if not self.method.prepares:  # ORPO would keep rows without an answer
            settings["truncation_mode"] = "keep_start"
        return prepared(self.method, rows, args, tokenizer, **settings)

    def counted(self, dataset: Any, args: Any, name: str, **settings: Any) -> Any:
        """TRL's preparation; what it leaves is counted."""
        try:
            whole = self.made(dataset, args, name, **settings)
        except TRAPPED as error:
            raise not_formatted(name, error) from error
        done = self._fitting(whole, args)
        if isinstance(dataset, Dataset):
            found = self._ledger(cast("Dataset", done), len(dataset), args, name)
            images = of_images(whole, TrainerArguments(args).max_length)
            self.ledgers[name] = replace(found, **images)
        return done

    def _fitting(self, rows: Any, args: Any) -> Any:
        """Rows as they are trained on: those without images TRL has cut."""
        images = COLUMN in (rows.column_names or ()) and self.method.prepared_by
        return fitting(rows, TrainerArguments(args).max_length) if images else rows

    def _ledger(self, done: Dataset, given: int, args: Any, name: str) -> Ledger:
        """Counts of prepared rows, of which `given` there were."""
        limit = TrainerArguments(args).max_length
        if not len(done):
            raise DataError(
                f"none of {given:,} {name} rows leaves room for an answer",
                where=f"train.max_length={limit}",
                why="rows of which no answer lies within it are left out",
                fix=f"train.max_length={4 * int(limit or 256)}; or null: nothing is cut",
            )
        found = account(
            _sequences(done),
            args,
            tokenizer_of(self.processing_class),
            packing=False,
            vocabulary=self.vocabulary,
        )
        if found.never_ends and found.trained and name == "train" and self.method.head != "score":
            raise endless(tokenizer_of(self.processing_class), done[0])
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
    template = TrainerArguments(args).chat_template_kwargs or {}
    found = prompted(tokenizer, row, template, return_dict=True)
    return {"prompt_ids": found["input_ids"]}


def _sequences(done: Dataset) -> Dataset:
    """Prepared rows as sequences of token ids with labels, an answer each, and its name."""
    shown = [name for name in ("image_begins", "image_ends") if name in done.column_names]
    others = {*NOTED} - {*shown}
    done = done.select_columns([name for name in done.column_names if name not in others])
    made, own = [name for name in ANSWERS if name in done.column_names], done.column_names

    features = Features(**TOKENIZED, answer=Value("string"), **{key: NOTED[key] for key in shown})

    def each(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {key: [] for key in features}
        for i in range(len(rows[own[0]])):
            prompt = rows["prompt_ids"][i] if "prompt_ids" in rows else []
            for name in made or ["prompt"]:
                answer = rows[name][i] if made else []
                found["input_ids"].append([*prompt, *answer])
                found["labels"].append([*(MASKED for _ in prompt), *answer])
                label = f"label {str(rows['label'][i]).lower()}" if "label" in rows else name
                found["answer"].append(label.partition("_")[0])
                for key in shown:
                    found[key].append(rows[key][i])
        return found

    return done.map(each, batched=True, remove_columns=own, features=features)
