"""Prompts with images, as TRL's GRPO reads them: turns and pictures, made into tokens by itself.

    row ──> turns, references ──> TRL: turns, opened pictures ──> processor ──> to write answers
                                                              └─> processor ──> to learn of them

TRL (1.16) calls the processor in two ways, and both have to give what the row says. With a
tokenizer that pads on the right it marks the tokens of images where they are not, and it fails over
a row without images, and over a processor without videos. So it is handed one that makes both
alike, and as `finetune.data.image_rows` does, by which prompts are counted.
"""

from __future__ import annotations

import copy
from typing import Any

from datasets import Dataset, concatenate_datasets
from torch import Tensor

from finetune.config.methods import Method
from finetune.data.image_batches import pictures_of
from finetune.data.image_forms import COLUMN, SEEN
from finetune.errors import ConfigError, DataError
from finetune.storage.processors import as_read


def reading_prompts(processor: Any) -> Any:
    """The processor as GRPO's trainer takes it, around the same tokenizer."""
    found, kind = copy.copy(processor), type(processor)
    # A subclass of the same name: TRL asks for the type, and the name is saved with a run.
    own = {"__module__": kind.__module__}
    found.__class__ = type(kind.__name__, (_ReadsPrompts, kind), own)
    return found


class _ReadsPrompts:
    """Mixin of a processor: prompts stand on the right of a batch, and begin once."""

    tokenizer: Any

    def __call__(self, images: Any = None, text: Any = None, **how: Any) -> Any:
        """A batch of texts that the chat template has printed; None stands for no images, too."""
        images, inner = [one or [] for one in images or ()], super()
        how |= {"add_special_tokens": False, "padding_side": "left"}
        made: Any = inner.__call__(images=images if any(images) else None, text=text, **how)  # type: ignore
        if backend := getattr(self.tokenizer, "backend_tokenizer", None):
            backend.no_padding()  # it is remembered, and saved with the run
        return made

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = False, return_dict: bool = True, **how: Any
    ) -> Any:
        """Text of turns; or ids of each prompt as a list, and what the model takes beside them."""
        said = self.tokenizer.apply_chat_template(conversation, tokenize=False, **how)
        if not tokenize:
            return said
        images = [
            [part["image"] for turn in turns for part in turn["content"] if part["type"] == "image"]
            for turns in conversation
        ]
        made = dict(self(images=images, text=said, padding=True, return_tensors="pt"))
        whole = made["attention_mask"].bool()
        return {
            key: [row[own].tolist() for row, own in zip(value, whole, strict=True)]
            if value.shape[:2] == whole.shape
            else value
            for key, value in made.items()
        }


def beside_notes(rows: Dataset, done: Dataset) -> Dataset:
    """Rows with all of their columns, and what their pictures were when they were prepared."""
    noted = [rows.remove_columns(COLUMN), done.select_columns([COLUMN, SEEN])]
    return concatenate_datasets(noted, axis=1)


def with_pictures(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Prepared rows, with their pictures opened: a transform of `datasets`.

    A batch has each row as often as there are answers to it, and opens it once.

    Raises:
        DataError: a picture is not the one that was prepared.
    """
    opened, found = dict[Any, list[Any]](), list[list[Any]]()
    for images, seen in zip(rows[COLUMN], rows[SEEN], strict=True):
        key = tuple((one["path"], one["bytes"]) for one in images)
        if key not in opened:
            opened[key] = pictures_of({COLUMN: images, SEEN: seen})
        found.append(opened[key])
    return {key: value for key, value in rows.items() if key != SEEN} | {COLUMN: found}


def without_empty(
    _: Any, args: Any, kwargs: dict[str, Any], *, token: int
) -> tuple[Any, Any] | None:
    """Forward pre-hook: texts without images come without pixels.

    Of such a part of a batch TRL (1.16) hands over what is left of the others' pixels, no rows or
    zeros, on which towers fail.

    Args:
        token: id of the token of images.
    """
    ids = kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or kwargs.get("pixel_values") is None:
        return None
    if ids.eq(token).any():
        return None
    left = {key: value for key, value in kwargs.items() if not key.startswith(_OF_PIXELS)}
    return args, left


_OF_PIXELS = ("pixel_", "image_", "spatial_shapes")
"""What the names of a model's inputs begin with that come with images (TRL 1.16)."""


def refuse_uneven(rows: Any, processor: Any, method: Method) -> None:
    """Refuse prepared rows that have unlike many images where TRL could give them to other rows.

    SmolVLM's processor fills all rows up to the most images of one. TRL (1.16) knows that from a
    list of images by their number alone, and takes 2 + 0 images of 2 rows for a list.

    Raises:
        DataError: there are such rows, and the processor fills up.
    """
    counts = [len(ends) for ends in rows["image_ends"]]
    few, many = counts.index(min(counts)), counts.index(max(counts))
    if counts[few] == counts[many]:
        return
    # Their images are more or fewer than rows, so that a list of them is no row each.
    picked = [few, many, many][: 2 + (counts[few] + counts[many] == 2)]
    light = [rows[index] for index in picked]
    texts, images = [row["texts"][0] for row in light], [pictures_of(row) for row in light]
    made = as_read(processor, texts, images, padding=True, return_tensors="pt")
    if len(made["pixel_values"]) != len(picked):
        return
    raise DataError(
        f"rows have {counts[few]} to {counts[many]} images, and {method.key} takes of this model's "
        "as many in each",
        where=type(processor).__name__,
        why=f"it fills all rows of a batch up to the most images, and {method.trainer} could show "
        "an answer the images of another row",
        fix=f"rows with {counts[many]} images each; or a model whose images are a list, such as "
        "Qwen/Qwen3-VL-4B-Instruct; or train.method=sft or dpo",
    )


def streamed(key: str) -> ConfigError:
    """The error for prompts with images that are a stream."""
    return ConfigError(
        "prompts with images are not read as a stream",
        where=f"data.streaming and {key}",
        why="their pictures are opened by row, and checked against the preparation",
        fix="~data.streaming",
    )
