"""Batches of rows with images: pictures are opened, and the processor makes all of it at once.

    prepared rows ──> texts and pictures ──> processor ──> input_ids, pixel_values, ... and labels

Ids and pixel values are the processor's own, and so are keys that one family alone has. Its ids and
the pictures have to be those of the preparation (`finetune.data.image_rows`), by which tokens were
counted and masked: a file that has changed since is an error and not another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune.data.chat import BadRowError
from finetune.data.checks import MASKED
from finetune.data.image_forms import COLUMN, SEEN
from finetune.data.image_rows import seen_as
from finetune.data.images import name_of, opened
from finetune.errors import DataError
from finetune.storage.processors import as_read, tokenizer_of


class ImageBatches:
    """Collator of rows that `image_rows` has prepared.

    Args:
        limit: tokens of a row; what is behind them is cut, which never is a part of an image.
        multiple: length of a batch is a multiple of it.
    """

    def __init__(self, processor: Any, *, limit: int | None, multiple: int | None) -> None:
        self.processor, self.limit, self.multiple = processor, limit, multiple
        tokenizer = tokenizer_of(processor)
        if tokenizer.pad_token is None:  # as TRL does
            tokenizer.pad_token = tokenizer.eos_token

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch: tensors [rows, tokens] for text, for pictures whatever the model takes.

        Raises:
            DataError: a picture is not the one that was prepared.
        """
        pairs, sides = "prompt_ids" in rows[0], [*sides_of(rows)]
        batch = as_read(
            self.processor, [side.text for side in sides], [side.images for side in sides],
            padding=True, padding_side="right", pad_to_multiple_of=self.multiple,
            return_tensors="pt",
        )  # fmt: skip
        shape = batch["input_ids"].shape
        on = torch.zeros(shape, dtype=torch.bool)
        for i, side in enumerate(sides):
            if batch["input_ids"][i, : len(side.ids)].tolist() != side.ids:
                raise _changed(f"the row that begins {side.text!r:.60}", "it has other tokens now")
            on[i, : len(side.on)] = torch.tensor(side.on)
        labels = torch.where(on, batch["input_ids"], MASKED)
        done = dict(batch) | ({"completion_mask": on.long()} if pairs else {"labels": labels})
        return {
            key: value[:, : self.limit] if value.shape[:2] == shape else value
            for key, value in done.items()
        }


@dataclass(frozen=True)
class ReadText:
    """A text that a model reads: its ids, which of them count, and its images."""

    text: str
    ids: list[int]
    on: list[bool]
    images: list[Any]


def sides_of(rows: list[dict[str, Any]]) -> Iterator[ReadText]:
    """Texts of prepared rows: of pairs the preferred answers, then the others, as TRL has them."""
    images = [pictures_of(row) for row in rows]
    if "prompt_ids" not in rows[0]:
        for row, own in zip(rows, images, strict=True):
            on = [label != MASKED for label in row["labels"]]
            yield ReadText(row["texts"][0], row["input_ids"], on, own)
        return
    for place, key in enumerate(("chosen_ids", "rejected_ids")):
        for row, own in zip(rows, images, strict=True):
            asked, answer = row["prompt_ids"], row[key]
            on = [False] * len(asked) + [True] * len(answer)
            yield ReadText(row["texts"][place], asked + answer, on, own)


def pictures_of(row: dict[str, Any]) -> list[Any]:
    found = list[Any]()
    for reference, seen in zip(row[COLUMN], row[SEEN], strict=True):
        try:
            found.append(opened(reference))
        except BadRowError as error:
            raise _changed(name_of(reference), str(error)) from error
        if seen_as(found[-1]) != seen:
            raise _changed(name_of(reference), "its pixels are others now")
    return found


def _changed(what: str, why: str) -> DataError:
    return DataError(
        "an image has changed since its row was prepared",
        where=f"data: {what}",
        why=f"{why}; tokens of that image were counted and masked before",
        fix="leave the files of a data set as they are while a run reads them, and start it again",
    )
