"""The ledger of a data set: every row and token accounted for, before the first step.

    read = refused + dropped + trained       rows
    tokens = cut + kept,  kept >= trained    tokens

TRL tokenizes, masks, truncates and packs (`SFTTrainer._prepare_dataset`), and drops rows of which
truncation leaves no trained token without a word. `AccountedTrainer` lets it do so in two steps,
first everything but truncating and packing, counts what is there, and lets it finish: the prepared
rows are those of one step. Conversations it gets tokenized and masked (`finetune.data.masks`). Of a
stream, and of large files before a run, a sample is counted.
"""

from __future__ import annotations

import copy
import functools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from jinja2 import TemplateError
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTTrainer
from trl.data_utils import is_conversational

from finetune.config.methods import METHODS, Method
from finetune.config.sft import refused_by
from finetune.data.both_labels import order_seed
from finetune.data.checks import BATCH, MASKED, UNKNOWN
from finetune.data.doubled_tokens import each_once
from finetune.data.lengths import Lengths
from finetune.data.masks import TRAINED_TURNS, masked, refuse_weights
from finetune.data.repeats import EvaluatesOnce
from finetune.data.rows import workers
from finetune.errors import ConfigError, DataError, FinetuneError, first_line
from finetune.storage.ends import save_ends
from finetune.storage.pretrained import TEMPLATE_ERRORS
from finetune.units import plural

SPLITTING = ("bfd_split", "wrapped")
"""Strategies of packing that put what is behind the end of a packed row into the next one."""
TOKENIZED = Features(input_ids=List(Value("int64")), labels=List(Value("int64")))


@dataclass(frozen=True)
class Ledger:
    """Counts of one data set.

    Attributes:
        rows: rows that were tokenized.
        dropped: rows of which truncation left no trained token.
        truncated: rows longer than `max_length`, without the dropped ones.
        tokens: tokens before truncation.
        cut: tokens behind `max_length`, those of dropped rows included.
        trained: tokens with a part in the loss, after truncation.
        longest: tokens of the longest row.
        stops: rows whose last trained token, white space apart, is one that ends an answer.
        ends: ids of these tokens, those that end at least one row of a hundred.
        doubled: rows of which a second start or end token is cut.
        bins: packed rows; None without packing.
        max_length: the limit; None without one.
        refused: rows that could not be read and were skipped (`data.on_bad_row`).
        chat: True if the rows are turns of a conversation.
        on: which tokens of a conversation are trained on, for a line.
        split: rows more than there are conversations, of which some have become several.
        sampled: rows that were looked at, where these are not all.
        pad_is_stop: True if the padding token is the end-of-text token.
        answers: answers of a row that are trained on, each counted as a row is where it is cut.
        left_out: rows that each epoch leaves out, since they fill no batch of prompts.
        good: rows whose answer is one to give, of labelled rows.
        late: rows of a stream that were skipped behind these, while it was read.
        in_eval: evaluation rows that are also training rows (`Rows.shared`).
        lengths: tokens of each row before truncation, without rows that TRL drops uncounted.
    """

    rows: int
    dropped: int
    truncated: int
    tokens: int
    cut: int
    trained: int
    longest: int
    stops: int
    bins: int | None
    max_length: int | None
    lengths: Lengths = field(repr=False, compare=False)
    ends: tuple[int, ...] = ()
    doubled: int = 0
    refused: int = 0
    chat: bool = False
    on: str = ""
    split: int = 0
    sampled: int | None = None
    pad_is_stop: bool = False
    in_eval: int = 0
    late: int = 0
    answers: int = 1
    left_out: int = 0
    good: int | None = None

    @property
    def read(self) -> int:
        """Rows that were read: refused, dropped or trained on."""
        return self.rows + self.refused - self.split

    @property
    def kept(self) -> int:
        """Tokens that enter the model in an epoch."""
        return self.tokens - self.cut

    @property
    def share(self) -> float:
        """Share of these that have a part in the loss."""
        return self.trained / self.kept if self.kept else 0.0

    @property
    def never_ends(self) -> bool:
        """True if no row ends with a trained stop token, although some are not cut."""
        return not self.stops and self.truncated + self.dropped < self.rows

    @property
    def efficiency(self) -> float | None:
        """Share of packed rows that is not padding; None without packing."""
        if self.bins is None or not self.max_length:
            return None
        return self.kept / (self.bins * self.max_length) if self.bins else 0.0

    def lines(self, what: str = "") -> Iterator[tuple[bool, str]]:
        """(is a warning, line) for the console.

        Args:
            what: stands before "rows": `eval ` for those that are evaluated.
        """
        if self.sampled is not None:
            yield False, f"the first {self.sampled:,} rows, which stand for all:"
        facts = [f"{self.kept:,} tokens", f"{self.share:.1%} of them trained{self.on}"]
        if not self.trained:  # refused, but for prompts
            facts = [f"{self.tokens:,} tokens of prompts, whose answers are written in training"]
        facts.append(f"longest row {self.longest:,}")
        facts[0] = f"{what}rows: {facts[0]}" if what else facts[0]
        if self.efficiency is not None:
            facts.append(f"packed into {self.bins:,} rows, {self.efficiency:.0%} full")
        yield False, ", ".join(facts)
        if self.split:
            yield (
                False,
                f"{self.rows - self.split:,} conversations are {self.rows:,} rows: an answer that "
                "the chat template alters when others follow it has a row of its own",
            )
        if self.refused:
            yield True, f"{self.refused:,} {what}rows could not be read and are skipped"
        if self.in_eval:
            yield (
                True,
                f"{self.in_eval:,} eval rows are also training rows: the eval loss says less of "
                "new text",
            )
        if self.dropped:
            share = self.dropped / self.rows
            yield (
                True,
                f"{self.dropped:,} of {self.rows:,} {what}rows ({share:.0%}) are dropped: no "
                f"trained {'token' if self.answers == 1 else 'answer'} lies within "
                f"train.max_length={self.max_length}",
            )
        if self.truncated:
            share = self.cut / self.tokens
            few = f"; {share:.1%} of all tokens are not trained on" if share >= 0.001 else ""
            one = what + ("row" if self.answers == 1 else "answer")
            rows = f"{plural(self.truncated, one)} longer than train.max_length={self.max_length}"
            yield bool(few), f"{rows} (cut){few}"
        if self.good is not None:
            yield (
                False,
                f"{self.good:,} {what}rows have an answer to give, "
                f"{self.rows - self.dropped - self.good:,} one not to give",
            )
        if self.left_out:
            yield (
                True,
                f"{self.left_out:,} of {self.rows - self.dropped:,} rows are left out of each "
                "epoch, others in each: they fill no batch of prompts",
            )
        if self.chat and self.trained == self.kept:
            yield (
                True,
                f"100% of the tokens of {what}chat rows are trained on: the user's turns too",
            )
        if self.doubled:
            yield (
                False,
                f"{self.doubled:,} {what}rows had a start or an end token twice: one is kept",
            )
        if not self.stops and self.trained:
            yield True, f"no {what}row ends with a trained stop token: answers may not end"
        if self.pad_is_stop and not what:
            yield False, "padding is the end-of-text token; only padding is masked, not ends"

    def as_json(self) -> dict[str, Any]:
        """For the receipt."""
        facts = {"trained_share": self.share, "packing_efficiency": self.efficiency}
        facts |= {"lengths": self.lengths.percentiles()}
        return vars(self) | facts | {"read": self.read, "stop_token_trained": self.stops > 0}


def account(rows: Dataset, args: Any, tokenizer: Any, *, packing: bool, vocabulary: int) -> Ledger:
    """Count a tokenized data set with the columns `input_ids` and `labels`.

    Args:
        rows: before truncation and packing.
        tokenizer: what its special and added tokens are ends an answer.

    Raises:
        DataError: an id that the embedding does not have.
    """
    mode = getattr(args, "truncation_mode", "keep_start")
    limit, at_start = getattr(args, "max_length", None), mode == "keep_start" or packing
    splits = packing and args.packing_strategy in SPLITTING
    # The tokenizer's own ends of an answer, and its marks of turns (`<|im_end|>`).
    stops = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = dict.fromkeys(
        ("rows", "dropped", "truncated", "tokens", "cut", "trained", "longest", "stops"), 0
    )
    ends, every, needed, trained = Counter[int](), [], [], np.zeros(0, np.int64)
    tables: Any = rows.with_format("arrow").iter(batch_size=BATCH)
    for batch in tables:
        ids = batch["input_ids"].combine_chunks()
        given = batch["labels"].combine_chunks()
        labels = np.asarray(given.flatten())
        lengths = np.asarray(ids.value_lengths()).astype(np.int64)
        values = np.asarray(ids.flatten())
        if values.size and values.max() >= vocabulary:
            raise DataError(
                f"{values.max()} is no token id: the model has {vocabulary:,} tokens",
                where="the tokenizer",
                fix="take the tokenizer that belongs to this model",
            )
        starts = np.cumsum(lengths) - lengths
        position = np.arange(labels.size) - np.repeat(starts, lengths)
        inside = np.ones(labels.size, bool)
        if limit is not None and not splits:
            skipped = 0 if at_start else np.repeat(np.maximum(lengths - limit, 0), lengths)
            inside = (position >= skipped) & (position < skipped + limit)
        distance = position if at_start else np.repeat(lengths, lengths) - 1 - position
        more = np.bincount(distance[labels != MASKED], minlength=trained.size)
        more[: trained.size] += trained
        trained, reach = more, np.zeros_like(lengths)
        asked = np.where(labels != MASKED, position + 1, 0)
        reach[lengths > 0] = np.maximum.reduceat(asked, starts[lengths > 0])
        every.append(lengths)
        needed.append(reach if at_start else lengths)
        counted = inside & (labels != MASKED)
        per_row = np.bincount(np.repeat(np.arange(lengths.size), lengths), counted, lengths.size)
        kept = np.minimum(lengths, limit) if limit is not None and not splits else lengths
        drops = (per_row == 0) & (not packing)
        # White space, which some templates have behind the end.
        known = (int(label) for label in np.unique(labels) if label >= 0)
        blank = [label for label in known if not str(tokenizer.decode([label])).strip()]
        solid = counted & ~np.isin(labels, blank)
        last = np.maximum.reduceat(np.where(solid, np.arange(labels.size), -1), starts[lengths > 0])
        found["rows"] += lengths.size
        found["dropped"] += int(drops.sum())
        found["truncated"] += int(((kept < lengths) & ~drops).sum())
        found["tokens"] += int(lengths.sum())
        found["cut"] += int((lengths - np.where(drops, 0, kept)).sum())
        found["trained"] += int(per_row.sum())
        found["longest"] = max(found["longest"], int(lengths.max(initial=0)))
        found["stops"] += int(np.isin(labels[last[last >= 0]], list(stops)).sum())
        uncut = (last >= 0) & ((kept == lengths)[lengths > 0] | (not at_start))
        ends.update(token for token in labels[last[uncut]].tolist() if token in stops)
    usual = tuple(token for token, count in ends.items() if count * 100 >= found["rows"])
    known = Lengths(np.concatenate(every), np.concatenate(needed), trained)
    return Ledger(**found, ends=usual, bins=None, max_length=limit, lengths=known)


class ByLength(LengthGroupedSampler):
    """Rows grouped by length, in an order that seed and epoch make.

    Transformers (5.23) draws it from torch's global generator, which has gone further in a run that
    goes on in mid-epoch: of another order, some rows are trained on again and others never.
    """

    def __init__(self, like: LengthGroupedSampler, seed: int) -> None:
        super().__init__(like.batch_size, lengths=like.lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Accelerate's loaders."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class Accounted(Trainer):
    """Mixin of TRL's trainers: keeps the `ledgers` of its data sets, by name (`train`, `eval`).

    Attributes:
        vocabulary: tokens of the model; without one, more than there can be.
        method: that of `train.method`.
        given: training rows as they were given, before the trainer's own preparation.
        only_answers: of messages, only the assistant's turns are trained on.
        embedding_learning_rate: that of embeddings and output head, where it is another one.
    """

    method: Method = METHODS["sft"]
    given: Any = None
    vocabulary: int = UNKNOWN
    only_answers: bool = False
    embedding_learning_rate: float | None = None

    @functools.cached_property
    def ledgers(self) -> dict[str, Ledger]:
        return {}

    def prepared(self, rows: Dataset, picked: list[int]) -> list[dict[str, Any]]:
        """Some of the given rows, prepared as those that are trained on, none of them packed."""
        raise NotImplementedError

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        self.given = kwargs["train_dataset"] if self.given is None else self.given
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.only_answers = getattr(args, "assistant_only_loss", False)
        # TRL would look for a marked copy of the chat template, and has few; the tokenizer has the
        # template of `chat_template_path` (`storage.pretrained.load_tokenizer`).
        plain = {"assistant_only_loss": False, "chat_template_path": None}
        given = {key: getattr(args, key) for key in plain if hasattr(args, key)}
        for key in given:
            setattr(args, key, plain[key])
        try:
            super().__init__(model=model, args=args, **kwargs)
        finally:
            for key, value in given.items():
                setattr(args, key, value)

    def counts(self, rows: Dataset, args: Any, name: str) -> Dataset:
        """Rows as they are trained or evaluated on, `input_ids` and `labels`, without a model.

        Their ledger is kept.
        """
        raise NotImplementedError

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers'; rows by length in an order that a resumed run makes again."""
        found = super()._get_train_sampler(*args, **kwargs)
        by_length = isinstance(found, LengthGroupedSampler)
        return ByLength(found, order_seed(self.args)) if by_length else found

    def get_train_dataloader(self) -> Any:
        """TRL's; settings of workers that torch refuses are a `ConfigError`."""
        fix = "take back the settings train.dataloader_... that it names"
        with refused_by("torch's DataLoader", fix=fix):
            return super().get_train_dataloader()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, embeddings in groups of their own; what it refuses is a `ConfigError`."""
        with refused_by("the optimizer", fix="~train.optim_args, or ~train.optim"):
            made = super().create_optimizer(*args, **kwargs)
        if self.embedding_learning_rate is not None:
            give_rate(made, embeddings_of(self.model), self.embedding_learning_rate)
        return made

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; what the learning rate's schedule refuses is a `ConfigError`."""
        fix = "~train.lr_scheduler_kwargs, or ~train.lr_scheduler_type"
        with refused_by("the learning rate's schedule", fix=fix):
            return super().create_scheduler(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """TRL's; beside an adapter, too, stands where its answers end."""
        super()._save(output_dir, state_dict)
        folder, model = Path(output_dir or str(self.args.output_dir)), self.model
        if (folder / "adapter_config.json").is_file():
            save_ends(self.accelerator.unwrap_model(model), folder)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Next batches; what is wrong with a stream's rows shows when they are read."""
        try:
            return super().get_batch_samples(*args, **kwargs)
        except (TemplateError, *TEMPLATE_ERRORS, RuntimeError, OSError, EOFError) as error:
            if "dispatch_batches" in str(error):
                raise ConfigError(
                    "one process was to read batches for all, and theirs differ in length",
                    where="train.accelerator_config: dispatch_batches",
                    why=first_line(error),
                    fix="~train.accelerator_config",
                ) from error
            if isinstance(error, FinetuneError) or isinstance(self.train_dataset, Dataset):
                raise
            raise not_formatted("train", error, step=self.state.global_step) from error


def embeddings_of(model: Any) -> list[torch.nn.Parameter]:
    """Parameters of embeddings and output head that train."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [p for end in ends if end is not None for p in end.parameters() if p.requires_grad]


def give_rate(optimizer: Any, parameters: list[Any], rate: float) -> None:
    """Move parameters of an optimizer into groups with a learning rate of their own.

    Raises:
        ConfigError: there are none.
    """
    if not parameters:
        raise ConfigError(
            "a learning rate is given for embeddings, and none of them trains",
            where="train.embedding_learning_rate",
            why="adapters leave them as they are",
            fix="lora.modules_to_save=[embed_tokens, lm_head], or ~train.embedding_learning_rate",
        )
    own = {id(p) for p in parameters}
    for group in list(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in own]
        if len(inside) == len(group["params"]):
            group["lr"] = rate if inside else group["lr"]
        elif inside:
            group["params"] = [p for p in group["params"] if id(p) not in own]
            optimizer.add_param_group({**group, "params": inside, "lr": rate})


class AccountedTrainer(Accounted, EvaluatesOnce, SFTTrainer):
    """`SFTTrainer` with ledgers."""

    def counts(self, rows: Dataset, args: Any, name: str) -> Dataset:
        """As it would be trained on, but not packed."""
        state: Any = self
        packing = args.packing
        if name == "eval" and args.eval_packing is not None:
            packing = args.eval_packing
        if args.eos_token is not None:  # as TRL does when it makes a trainer
            self._tokenizer.eos_token = args.eos_token
        self.only_answers, state.chat_template = args.assistant_only_loss, None
        pairs = {"prompt", "completion"} <= set(rows.column_names)
        asked = args.completion_only_loss
        state.completion_only_loss = pairs if asked is None else asked
        if asked and not pairs:
            raise DataError(
                "train.completion_only_loss=true needs rows of prompt and completion",
                where="train.completion_only_loss",
                why=f"columns found: {', '.join(sorted(rows.column_names))}",
                fix="~train.completion_only_loss",
            )
        tokenizer = self._tokenizer
        found = self._prepare_dataset(rows, tokenizer, args, packing, None, name)
        ledger = self.ledgers[name]
        if packing:
            found = self._prepare_dataset(rows, tokenizer, args, False, None, name)
        self.ledgers[name] = ledger
        return found

    def prepared(self, rows: Dataset, picked: list[int]) -> list[dict[str, Any]]:
        args, tokenizer = self.args, self._tokenizer
        found = self._prepare_dataset(rows.select(picked), tokenizer, args, False, None, "look")
        del self.ledgers["look"]
        return list(found)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool,
        formatting_func: Any, dataset_name: str,
    ) -> Any:  # fmt: skip
        """TRL's preparation, with rows that begin and end once, counted half-way."""
        prepare = super()._prepare_dataset
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        held, row = isinstance(dataset, Dataset), next(iter(dataset))
        if held and args.dataset_num_proc is None:
            args = copy.copy(args)
            args.dataset_num_proc = whole.dataset_num_proc = workers(len(dataset))
        if self.only_answers and not is_conversational(row):
            raise ConfigError(
                "train.assistant_only_loss=true needs rows of messages",
                where="train.assistant_only_loss",
                why=f"columns found: {', '.join(sorted(row))}",
                fix="~train.assistant_only_loss: of prompt and completion the latter is trained on",
            )
        tokenizer = self._tokenizer
        if tokenizer.eos_token is None and not (is_conversational(row) or "input_ids" in row):
            raise endless(tokenizer, row)  # TRL, which ends text with it, fails
        given, doubled = dataset, 0
        processes: dict[str, Any] = {"num_proc": args.dataset_num_proc} if held else {}
        pairs = "prompt" in row and bool(self.completion_only_loss)
        answers = is_conversational(row) and (self.only_answers or pairs)
        try:
            if answers:
                mask = partial(masked, tokenizer=tokenizer, completion_only=pairs)
                processes |= {"batched": True, "remove_columns": [*row], "features": TOKENIZED}
                dataset = dataset.map(mask, **processes)
            elif TRAINED_TURNS in row:
                dataset = dataset.map(refuse_weights, **processes)
            tokenized: Any = prepare(
                dataset, processing_class, whole, False, formatting_func, dataset_name
            )
        except TRAPPED as error:
            raise not_formatted(dataset_name, error) from error
        if not answers:
            tokenized, doubled = each_once(tokenized, tokenizer, **processes)
        if not held:
            return prepare(tokenized, processing_class, args, packing, None, dataset_name)
        found = account(tokenized, args, tokenizer, packing=packing, vocabulary=self.vocabulary)
        if not found.trained and dataset_name != "look":
            raise nothing_trained(found, dataset_name)
        if answers and dataset_name == "train" and found.never_ends:
            raise endless(tokenizer, row)
        done: Any = prepare(tokenized, processing_class, args, packing, None, dataset_name)
        least = args.__dict__.get("least_rows", 0) if packing and dataset_name == "train" else 0
        while len(done) < least:  # shorter, but for the longest row, which is not cut
            length = max(found.longest + -found.longest % 16, args.max_length * len(done) // least)
            if (length := length // 16 * 16) >= args.max_length:
                break
            args = copy.copy(args)
            args.max_length = length
            done = prepare(tokenized, processing_class, args, packing, None, dataset_name)
        self.ledgers[dataset_name] = replace(
            found,
            bins=len(done) if packing else None,
            max_length=args.max_length,
            chat=is_conversational(row),
            doubled=doubled,
            on=" (the assistant's turns)" if self.only_answers else "",
            split=len(tokenized) - len(given),
            pad_is_stop=tokenizer.pad_token_id == tokenizer.eos_token_id,
        )
        return done


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
