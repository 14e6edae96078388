"""TRL's preparation of rows, in two steps between which they are counted.

TRL tokenizes, masks, truncates and packs, and drops rows of which truncation leaves no trained
token without a word. `AccountedTrainer` lets it do so (`finetune.data.by_trl`) in two steps,
first everything but truncating and packing, counts what is there, and lets it finish: the prepared
rows are those of one step. Conversations it gets tokenized and masked (`finetune.data.masks`). Rows
are prepared without a model, too (`finetune.data.counting`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.data_loader import get_sampler
from datasets import Dataset, Features, List, Value
from jinja2 import TemplateError
from transformers import Trainer
from trl import SFTTrainer, is_conversational

from finetune.config.methods import METHODS, Method
from finetune.config.train_keys import ARGUMENTS, TrainerArguments
from finetune.data.by_trl import ASIDE, prepared
from finetune.data.checks import UNKNOWN
from finetune.data.doubled_tokens import each_once
from finetune.data.image_batches import ImageBatches
from finetune.data.image_forms import COLUMN
from finetune.data.image_rows import AS_TEXT, as_sequences, fitting, of_images, read
from finetune.data.ledger import Ledger, account
from finetune.data.masks import TRAINED_TURNS, masked, refuse_weights
from finetune.data.repeats import EvaluatesOnce
from finetune.data.rows import workers
from finetune.errors import ConfigError, DataError
from finetune.storage.processors import tokenizer_of

TOKENIZED = Features(input_ids=List(Value("int64")), labels=List(Value("int64")))


class Accounted(Trainer):
    """Mixin of TRL's trainers: keeps the `ledgers` of its data sets, by name (`train`, `eval`).

    Attributes:
        vocabulary: tokens of the model; without one, more than there can be.
        method: by `train.method`.
        given: training rows as they were given, before the trainer's own preparation.
        only_answers: of messages, only the assistant's turns are trained on.
    """

    method: Method = METHODS["sft"]
    given: Any = None
    vocabulary: int = UNKNOWN
    only_answers: bool = False

    @functools.cached_property
    def ledgers(self) -> dict[str, Ledger]:
        return {}

    def prepared(self, rows: Dataset, picked: list[int]) -> list[dict[str, Any]]:
        """Some of the given rows, prepared as those that are trained on, none of them packed."""
        raise NotImplementedError

    def prepare(self, rows: Any, args: Any, name: str) -> tuple[Any, Any]:
        """Rows as they are trained or evaluated on, and as TRL's trainer takes them.

        Their ledger is kept.

        Raises:
            DataError, ConfigError: they cannot be trained on.
        """
        raise NotImplementedError

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        self.processing_class = kwargs["processing_class"]
        self.given = kwargs["train_dataset"] if self.given is None else self.given
        # Of the model, not of the tokenizer, which may know fewer words than the embedding has
        # rows.
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.only_answers = TrainerArguments(args).assistant_only_loss
        if COLUMN in (kwargs["train_dataset"].column_names or ()):
            kwargs |= self.for_images(model, args)
        done: dict[str, Any] = {}
        for key, name in (("train_dataset", "train"), ("eval_dataset", "eval")):
            if kwargs.get(key) is not None:
                done[key], kwargs[key] = self.prepare(kwargs[key], args, name)
        with self.handing(args):
            super().__init__(model=model, args=args, **kwargs)
        for key, rows in done.items():
            if getattr(self, key) is kwargs[key]:  # not with a reference's scores beside them
                setattr(self, key, rows)

    def for_images(self, model: Any, args: Any) -> dict[str, Any]:
        """Arguments of TRL's trainer where rows have images; the model may get hooks."""
        own = TrainerArguments(args)
        return {
            "data_collator": ImageBatches(
                self.processing_class, limit=own.max_length, multiple=own.pad_to_multiple_of
            )
        }

    @contextlib.contextmanager
    def handing(self, args: Any) -> Iterator[None]:
        """Context manager in which a trainer of TRL is made, of rows that are prepared.

        TRL would look for a marked copy of the chat template, and has few; the tokenizer has the
        template of `chat_template_path` (`storage.pretrained.load_tokenizer`).
        """
        plain = {key: ASIDE[key] for key in ("assistant_only_loss", "chat_template_path")}
        plain |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
        names = {key: ARGUMENTS[key].name_in(args) for key in plain}
        given = {name: getattr(args, name) for name in names.values() if name}
        for key, name in names.items():
            if name:
                setattr(args, name, plain[key])
        try:
            yield
        finally:
            for name, value in given.items():
                setattr(args, name, value)

    def counts(self, rows: Dataset, args: Any, name: str) -> Dataset:
        """Rows as they are trained or evaluated on, `input_ids` and `labels`, without a model.

        Their ledger is kept.
        """
        raise NotImplementedError

    def get_train_dataloader(self) -> Any:
        """TRL's, its rows `ordered`."""
        loader: Any = super().get_train_dataloader()
        sampler: Any = get_sampler(loader)
        if (found := self.ordered(sampler)) is not sampler:
            loader.set_sampler(found)
        return loader

    def ordered(self, sampler: Any) -> Any:
        """The order of training rows, of what the trainer has chosen."""
        return sampler


class AccountedTrainer(Accounted, EvaluatesOnce, SFTTrainer):
    """`SFTTrainer` with ledgers."""

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        # TRL decides by the first row; told here, so that both steps of the preparation decide
        # alike.
        given = TrainerArguments(args)
        asked = given.completion_only_loss
        given.completion_only_loss = self._only_completions(kwargs["train_dataset"], args)
        try:
            super().__init__(model=model, args=args, **kwargs)
        finally:
            given.completion_only_loss = asked

    def _only_completions(self, rows: Any, args: Any) -> bool:
        """What is trained on in rows, TRL's default where nothing is set."""
        pairs = {"prompt", "completion"} <= {*next(iter(rows))}
        asked = TrainerArguments(args).completion_only_loss
        return pairs if asked is None else asked

    def counts(self, rows: Dataset, args: Any, name: str) -> Dataset:
        """As it would be trained on, but not packed."""
        args = TrainerArguments(args)
        if args.eos_token is not None:  # as TRL does when it makes a trainer
            tokenizer_of(self.processing_class).eos_token = args.eos_token
        self.only_answers = args.assistant_only_loss
        args = copy.copy(args)
        args.completion_only_loss = only = self._only_completions(rows, args)
        if only and not {"prompt", "completion"} <= {*rows.column_names}:
            raise DataError(
                "train.completion_only_loss=true needs rows of prompt and completion",
                where="train.completion_only_loss",
                why=f"columns found: {', '.join(sorted(rows.column_names))}",
                fix="~train.completion_only_loss",
            )
        found, _ = self.prepare(rows, args, name)
        ledger = self.ledgers[name]
        if _packs(args, name):
            found = self._prepare(rows, args, name, packing=False)
        self.ledgers[name] = ledger
        return found

    def prepared(self, rows: Dataset, picked: list[int]) -> list[dict[str, Any]]:
        args = TrainerArguments(copy.copy(self.args))
        args.completion_only_loss = self.completion_only_loss
        found = self._prepare(rows.select(picked), args, "look", packing=False)
        del self.ledgers["look"]
        return list(found)

    def prepare(self, rows: Any, args: Any, name: str) -> tuple[Any, Any]:
        done = self._prepare(rows, args, name, packing=_packs(args, name))
        return done, done  # `skip_prepare_dataset`

    def _prepare(self, dataset: Any, args: Any, name: str, *, packing: bool) -> Any:
        """TRL's preparation, with rows that begin and end once, counted half-way."""
        tokenizer, args = tokenizer_of(self.processing_class), TrainerArguments(args)
        in_memory, row = isinstance(dataset, Dataset), next(iter(dataset))
        if in_memory and args.dataset_num_proc is None:
            # On a copy: the arguments are the user's, and are saved with the run.
            args = copy.copy(args)
            args.dataset_num_proc = workers(len(dataset))
        if self.only_answers and not is_conversational(row):
            raise ConfigError(
                "train.assistant_only_loss=true needs rows of messages",
                where="train.assistant_only_loss",
                why=f"columns found: {', '.join(sorted(row))}",
                fix="~train.assistant_only_loss: of prompt and completion the latter is trained on",
            )
        if tokenizer.eos_token is None and not (is_conversational(row) or "input_ids" in row):
            raise endless(tokenizer, row)  # TRL, which ends text with it, fails
        given, doubled = dataset, 0
        processes: dict[str, Any] = {"num_proc": args.dataset_num_proc} if in_memory else {}
        pairs = "prompt" in row and bool(args.completion_only_loss)
        answers = is_conversational(row) and (self.only_answers or pairs)
        made = partial(prepared, self.method, args=args.own, tokenizer=tokenizer)
        finish, images = partial(made, packing=packing), COLUMN in row
        try:
            if images:
                how = {"only_answers": answers, "completion_only": pairs}
                tokenized = read(dataset, self.processing_class, as_sequences, AS_TEXT, **how)
                finish = partial(fitting, limit=args.max_length)
            else:
                if answers:
                    mask = partial(masked, tokenizer=tokenizer, completion_only=pairs)
                    processes |= {"batched": True, "remove_columns": [*row], "features": TOKENIZED}
                    dataset = dataset.map(mask, **processes)
                elif TRAINED_TURNS in row:
                    dataset = dataset.map(refuse_weights, **processes)
                # Nothing is cut yet, so that what will be can be counted.
                tokenized = made(dataset, max_length=None, shuffle_dataset=False)
        except TRAPPED as error:
            raise not_formatted(name, error) from error
        if not (images or answers):
            tokenized, doubled = each_once(tokenized, tokenizer, **processes)
        if not in_memory:
            return finish(tokenized)
        found = account(tokenized, args, tokenizer, packing=packing, vocabulary=self.vocabulary)
        # A look at single rows may meet some that are cut.
        if not found.trained and name != "look":
            raise nothing_trained(found, name)
        if answers and name == "train" and found.never_ends:
            raise endless(tokenizer, row)
        done: Any = finish(tokenized)
        least = vars(args.own).get("least_rows", 0) if packing and name == "train" else 0
        limit = args.max_length
        while len(done) < least:  # shorter, but for the longest row, which is not cut
            length = max(found.longest + -found.longest % 16, limit * len(done) // least)
            if (length := length // 16 * 16) >= limit:
                break
            done, limit = made(tokenized, packing=packing, max_length=length), length
        self.ledgers[name] = replace(
            found,
            bins=len(done) if packing else None,
            max_length=limit,
            chat=is_conversational(row),
            doubled=doubled,
            on=" (the assistant's turns)" if self.only_answers else "",
            split=len(tokenized) - len(given),
            pad_is_stop=tokenizer.pad_token_id == tokenizer.eos_token_id,
            **of_images(tokenized, args.max_length),
        )
        return done


def _packs(args: Any, name: str) -> bool:
    """True if rows of a set are packed."""
    args = TrainerArguments(args)
    own = args.eval_packing if name == "eval" else None
    return args.packing if own is None else own


TRAPPED = (TemplateError, TypeError, LookupError, ArithmeticError, RuntimeError)
"""What a chat template raises over rows that it does not take."""


def not_formatted(name: str, error: BaseException, step: int | None = None) -> DataError:
    return DataError(
        f"a row of the {name} set cannot be put into the model's chat template"
        if step is None
        else f"the stream of rows broke off at step {step}",
        where="data",
        why=f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}",
        fix="look at the rows that have keys or roles which the template does not expect, or skip "
        "and count them: data.on_bad_row=skip",
    )


def nothing_trained(found: Ledger, name: str) -> DataError:
    """The error for rows of which no token has a part in the loss."""
    if found.max_length is not None and found.cut:
        return DataError(
            f"no token of the {name} rows would be trained on",
            where=f"train.max_length={found.max_length}",
            why=f"all {found.rows:,} rows are cut before what is trained on begins; the longest "
            f"has {found.longest:,} tokens",
            fix=f"train.max_length={found.longest}",
        )
    return DataError(
        f"no token of the {name} rows would be trained on",
        where="data",
        why=f"every token of all {found.rows:,} rows is masked",
        fix="look at the rows: python -m finetune data RECIPE --show 5",
    )


def endless(tokenizer: Any, row: Any) -> DataError:
    """The error for rows of which none ends: a model that learned them writes on and on.

    An answer ends as the chat template prints it, or with the tokenizer's end token, as text does.
    """
    loss = "train.completion_only_loss" if "prompt" in row else "train.assistant_only_loss"
    why = "the {% generation %} markers of the chat template leave the end of an answer out"
    fix = f"put {{% endgeneration %}} behind it in chat_template.jinja, or {loss}=false"
    if "prompt_ids" in row or "chosen_ids" in row:  # of a trainer that asks for no markers
        why = "the chat template prints no end behind an answer, and this method adds none"
        fix = f"print {tokenizer.eos_token} behind an answer in chat_template.jinja"
    if tokenizer.eos_token is None:
        own = sorted(map(str, tokenizer.added_tokens_decoder.values()))
        known = own or sorted(tokenizer.get_vocab())
        close = [token for token in known if re.search(r"end|eo[st]|/s", token.lower())] or known
        why = "the tokenizer has no end token, and the chat template prints none behind an answer"
        fix = f"train.eos_token={shlex.quote(close[0])}, a token of its vocabulary"
    return DataError(
        "no row ends with a trained stop token: a model that learns these rows never stops",
        where="the model's tokenizer and chat template",
        why=why,
        fix=fix,
    )
