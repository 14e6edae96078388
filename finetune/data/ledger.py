"""The ledger of a data set: every row and token accounted for, before the first step.

    read = refused + dropped + trained       rows
    tokens = cut + kept,  kept >= trained    tokens

What a trainer has prepared is counted between its two steps (`finetune.data.preparing`). Of a
stream, and of large files before a run, a sample is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset

from finetune.config.train_keys import TrainerArguments
from finetune.data.checks import BATCH, MASKED
from finetune.data.lengths import Lengths
from finetune.errors import DataError
from finetune.units import plural

SPLITTING = ("bfd_split", "wrapped")
"""Strategies of packing that put what is behind the end of a packed row into the next one."""


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
        images: images of these rows, dropped ones included, and `image_tokens` of them.
        text_alone: rows without an image among these.
        images_cut: rows that are dropped since an image of theirs would be cut.
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
    images: int = 0
    image_tokens: int = 0
    text_alone: int = 0
    images_cut: int = 0

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
        if self.images:
            each = self.image_tokens / self.images
            alone = f", {plural(self.text_alone, 'row')} without any" if self.text_alone else ""
            yield False, f"{plural(self.images, 'image')} of {each:,.0f} tokens on average{alone}"
        if self.images_cut:
            yield (
                True,
                f"{self.images_cut:,} {what}rows are dropped: train.max_length={self.max_length} "
                "would cut an image",
            )
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
        rows: before truncation and packing; with `image_ends`, in tokens, an image is never cut.
        tokenizer: what its special and added tokens are ends an answer.

    Raises:
        DataError: an id that the embedding does not have.
    """
    # Packing cuts at the end whatever the mode says (TRL 1.16).
    args = TrainerArguments(args)
    limit, at_start = args.max_length, args.truncation_mode in (None, "keep_start") or packing
    splits = packing and args.packing_strategy in SPLITTING
    # The tokenizer's own ends of an answer, and its marks of turns (`<|im_end|>`).
    stops = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = dict.fromkeys(
        ("rows", "dropped", "truncated", "tokens", "cut", "trained", "longest", "stops"), 0
    )
    ends, every, needed, trained = Counter[int](), [], [], np.zeros(0, np.int64)
    read = [key for key in ("input_ids", "labels", "image_ends") if key in rows.column_names]
    tables: Any = rows.select_columns(read).with_format("arrow").iter(batch_size=BATCH)
    for batch in tables:
        ids = batch["input_ids"].combine_chunks()
        given = batch["labels"].combine_chunks()
        labels = np.asarray(given.flatten())
        lengths = np.asarray(ids.value_lengths()).astype(np.int64)
        values = np.asarray(ids.flatten())
        # On a GPU an id beyond the embedding is an assertion in a kernel, without a word about
        # rows.
        if values.size and values.max() >= vocabulary:
            raise DataError(
                f"{values.max()} is no token id: the model has {vocabulary:,} tokens",
                where="the tokenizer",
                fix="take the tokenizer that belongs to this model",
            )
        # All rows of a batch as one flat array: a loop over rows in Python would take minutes a
        # million.
        starts = np.cumsum(lengths) - lengths
        position = np.arange(labels.size) - np.repeat(starts, lengths)
        inside = np.ones(labels.size, bool)
        if limit is not None and not splits:
            skipped = 0 if at_start else np.repeat(np.maximum(lengths - limit, 0), lengths)
            inside = (position >= skipped) & (position < skipped + limit)
        if limit is not None and "image_ends" in read:
            lost = [max(row, default=0) > limit for row in batch["image_ends"].to_pylist()]
            inside &= ~np.repeat(lost, lengths)
        distance = position if at_start else np.repeat(lengths, lengths) - 1 - position
        more = np.bincount(distance[labels != MASKED], minlength=trained.size)
        more[: trained.size] += trained
        trained, reach = more, np.zeros_like(lengths)
        asked = np.where(labels != MASKED, position + 1, 0)
        reach[lengths > 0] = np.maximum.reduceat(asked, starts[lengths > 0])
        every.append(lengths)
        needed.append(reach if at_start else lengths)
        counted = inside & (labels != MASKED)
        # Trained tokens of each row that lie within the limit.
        per_row = np.bincount(np.repeat(np.arange(lengths.size), lengths), counted, lengths.size)
        kept = np.minimum(lengths, limit) if limit is not None and not splits else lengths
        # As TRL does: rows of which truncation leaves nothing to learn are dropped, packed ones are
        # not.
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
    # A token that ends one row in a hundred is a way to end; a rarer one is a row that is odd.
    usual = tuple(token for token, count in ends.items() if count * 100 >= found["rows"])
    known = Lengths(np.concatenate(every), np.concatenate(needed), trained)
    return Ledger(**found, ends=usual, bins=None, max_length=limit, lengths=known)
