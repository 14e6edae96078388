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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from finetune.errors import ConfigError
from finetune.estimator.images import Images
from finetune.estimator.trace.batch import Batch
from finetune.estimator.trace.trace import Recorder
from finetune.precision.model.layers import without_adapters

BRANCHED_BY = 2**16
"""Most elements of an array of integers whose values code may branch by."""
_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Inputs of a model that mark the tokens of images by 1."""
_LEARNED = {"labels": -100, "completion_mask": 0}


def add_images(
    batch: Batch,
    model: Any,
    processor: Any,
    images: Images,
    *,
    bare: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Put images into each row of a batch of real ids, in place. Inside `without_memory`.

    Args:
        bare: what takes the values from an array; default: those that code cannot branch by.

    Raises:
        ConfigError: a row has no room for them.
    """
    plain: Any = without_adapters(model)
    rows, length = batch["input_ids"].shape
    taken = inspect.signature(plain.get_image_features).parameters
    made = _blank(processor, images, rows)
    arrays = {name: (bare or _bare)(made[name]) for name in made.keys() & taken}
    tokens = _tokens_of(plain, arrays) // rows
    if tokens + images.count > length:
        raise ConfigError(
            f"{images} take {tokens:,} tokens of a row",
            where=f"train.max_length={length}",
            why="an image is never cut: such rows could not be trained on",
            fix=f"train.max_length={-(-(tokens + images.count) // 128) * 128} or more, or smaller "
            "images (--image-size)",
        )
    with unset_fake_temporarily():
        # Apart by a token of text: neighbors would be one image for a mask that lets the tokens of
        # an image see each other.
        one = [True] * (tokens // images.count) + [False]
        where = torch.tensor(one * images.count)
        here = slice(None), slice(len(where))
        batch["input_ids"][here][:, where] = plain.config.image_token_id
        for name in _LEARNED.keys() & batch.keys():
            batch[name][here][:, where] = _LEARNED[name]
        for name in set(_OF_TOKENS).intersection(inspect.signature(plain.forward).parameters):
            batch[name] = torch.zeros_like(batch["input_ids"])
            batch[name][here][:, where] = 1
    batch |= arrays


def _blank(processor: Any, images: Images, rows: int) -> dict[str, Tensor]:
    """What the processor makes of one row of blank images, for each of a number of rows."""
    from PIL import Image

    # Not quite black: rows and images of zeros are padding for some models.
    blank = Image.new("RGB", (images.width, images.height), (1, 1, 1))
    with unset_fake_temporarily():
        return dict(processor([[blank] * images.count] * rows, return_tensors="pt"))


def _bare(array: Tensor) -> Tensor:
    """An array without values, unless code may branch by them."""
    if not array.is_floating_point() and array.numel() <= BRANCHED_BY:
        return array
    return torch.empty(array.shape, dtype=array.dtype)


def _tokens_of(model: Any, arrays: dict[str, Tensor]) -> int:
    """Tokens that a model takes arrays of images for."""
    with Recorder(model), torch.no_grad():
        found = model.get_image_features(**arrays).pooler_output
    each = found if isinstance(found, list | tuple) else [found]
    return sum(x.numel() // x.shape[-1] for x in each)
