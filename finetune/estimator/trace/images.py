"""Images of a rehearsal's batch: blank ones of the data's size, through the model's own processor.

Nothing of a family is modeled here. Its image processor makes the arrays, and its tower says how
many tokens of a row they take, since a model refuses any other number. One image of 1024 x 768 a
row, for Qwen3-VL, in a batch of 2 rows:

    pixel_values     [2 * 3072, 1536]          without memory: 48 x 64 patches of 16 x 16 an image
    image_grid_thw   [[1, 48, 64]] * 2         real: code branches by small integers
    input_ids        image token 768 times, then a text token, then the row as it was; these tokens
                     are not learned

Floating-point arrays, and integers too many to branch by (masks of pixels), have no values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.images import Images, images_of
from finetune.estimator.trace.batch import Batch
from finetune.estimator.trace.trace import Recorder
from finetune.precision.model.layers import without_adapters
from finetune.storage.processors import image_processor
from finetune.training.health.memory_meter import arrays_of, without_values

_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Inputs of a model that mark the tokens of images by 1."""
_LEARNED = {"labels": -100, "completion_mask": 0}


def with_images(
    trainer: Any, model: Any, config: RunConfig, arrays: Mapping[str, Tensor] | None
) -> int:
    """Put images into a trainer's rows, if a run's have any; tokens of those of a row.

    Args:
        arrays: of the images of a batch, those on meta without values; None: blank images as the
            run's settings say (`finetune.estimator.images`).
    """
    tokens, measured = 0, arrays is not None
    with unset_fake_temporarily():  # rows are read
        images = None if measured else images_of(config)
    if images is not None:
        processor = image_processor(config.model, **config.train.pixels)
        rows = trainer.rows if trainer.answer else len(trainer.batches[0]["input_ids"])
        arrays = blank_images(processor, images, rows)
    if arrays and trainer.answer:
        return in_prompts(trainer, model, arrays, beside=not measured)
    for batch in trainer.batches if arrays else ():
        tokens = add_images(batch, model, arrays or {}) // len(batch["input_ids"])
    return tokens


def in_prompts(trainer: Any, model: Any, arrays: Mapping[str, Tensor], *, beside: bool) -> int:
    """Put arrays of a micro-batch's images into the prompts of a trainer whose model writes.

    Args:
        beside: prompts get longer by their images; else these stand in place of text.

    Returns:
        tokens of the images of a row.
    """
    plain: Any = without_adapters(model)
    arrays = {name: _bare(arrays[name]) for name in arrays_of(plain) & arrays.keys()}
    tokens = _tokens_of(plain, arrays)
    with unset_fake_temporarily():
        each = -(-(sum(tokens) + len(tokens)) // trainer.rows)
        where = _places(tokens, torch.Size((trainer.rows, each))).tolist()
    marks = {*_OF_TOKENS}.intersection(inspect.signature(plain.forward).parameters)
    trainer.show(arrays, where, marks, beside=beside)
    return sum(tokens) // trainer.rows


def blank_images(processor: Any, images: Images, rows: int) -> dict[str, Tensor]:
    """What a processor makes of a batch's rows of blank images."""
    from PIL import Image

    # Not quite black: rows and images of zeros are padding for some models.
    blank = Image.new("RGB", (images.width, images.height), (1, 1, 1))
    with unset_fake_temporarily():
        return dict(processor([[blank] * images.count] * rows, return_tensors="pt"))


def _bare(array: Tensor) -> Tensor:
    """An array that may be read on this machine, but without values if none are needed."""
    kept = without_values(array)
    if not kept.is_meta:
        with unset_fake_temporarily():
            return kept.cpu()
    return torch.empty(array.shape, dtype=array.dtype)


def add_images(batch: Batch, model: Any, arrays: Mapping[str, Tensor]) -> int:
    """Put arrays of images into a batch of real ids, in place, and their tokens into its rows.

    Inside of `without_memory`.

    Returns:
        tokens of all images.

    Raises:
        ConfigError: a row has no room for them.
    """
    plain: Any = without_adapters(model)
    arrays = {name: _bare(arrays[name]) for name in arrays_of(plain) & arrays.keys()}
    tokens = _tokens_of(plain, arrays)
    where = _places(tokens, batch["input_ids"].shape)
    with unset_fake_temporarily():
        batch["input_ids"][where] = plain.config.image_token_id
        for name in _LEARNED.keys() & batch.keys():
            batch[name][where] = _LEARNED[name]
        for name in set(_OF_TOKENS).intersection(inspect.signature(plain.forward).parameters):
            batch[name] = where.long()
    batch |= arrays
    return sum(tokens)


def _places(images: list[int], shape: torch.Size) -> Tensor:
    """Where the tokens of images, in their order, stand in rows that have alike many of them.

    Behind each is a token of text: neighbors would be one image for a mask that lets the tokens of
    an image see each other. Three images of 2 tokens in rows of 8: `xx.xx...` and `xx......`.
    """
    rows, length = shape
    with unset_fake_temporarily():
        where, row, at = torch.zeros(rows, length, dtype=torch.bool), 0, 0
        share = -(-(sum(images) + len(images)) // rows)
        for tokens in images:
            if at and row + 1 < rows and (at >= share or at + tokens + 1 > length):
                row, at = row + 1, 0
            if at + tokens + 1 > length:
                raise ConfigError(
                    f"images take {at + tokens:,} tokens of a row",
                    where=f"train.max_length={length}",
                    why="an image is never cut: such rows could not be trained on",
                    fix=f"train.max_length={-(-(share + 1) // 128) * 128} or more, or fewer or "
                    "smaller images (--images, --image-size)",
                )
            where[row, at : at + tokens] = True
            at += tokens + 1
    return where


def _tokens_of(model: Any, arrays: dict[str, Tensor]) -> list[int]:
    """Tokens of each image, or of each row's images, that a model takes arrays for."""
    with Recorder(model), torch.no_grad():
        found = model.get_image_features(**arrays).pooler_output
    return [x.numel() // x.shape[-1] for x in found]
