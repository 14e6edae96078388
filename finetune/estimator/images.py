"""Images of a run's rows, as an estimate takes them: how many in a row, and how large.

    data.images_per_row   --images 2
    data.image_size       --image-size 1024x768

What is not said is read from the first rows, where they are in files here: as many as the row with
the most has, of the size of the largest. The most expensive rows decide a peak, as those of
`train.max_length` do.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from finetune.config.methods import method_of
from finetune.config.schema import DataConfig, RunConfig
from finetune.data.chat import BadRowError
from finetune.data.dataset import rules_of
from finetune.data.image_forms import ORDER, marked
from finetune.data.sources import sources_of
from finetune.errors import ConfigError, FinetuneError
from finetune.storage.pretrained import load_shape
from finetune.storage.processors import counts_pixels, image_processor, takes_images

FIRST = 64
"""Rows of each source that are looked at."""
SMALLER, LARGER = 2, 2
"""Powers of two below and above the pixels of an image that are looked at."""


class Images(NamedTuple):
    """Images of a row, all of one size in pixels."""

    count: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.count} image{'s' * (self.count > 1)} of {self.width}x{self.height}"


def images_of(config: RunConfig) -> Images | None:
    """Images of each row that a run reads; None if its rows are text alone."""
    count, sized = config.data.images_per_row, any(config.train.pixels.values())
    if not method_of(config.train).images or not takes_images(load_shape(config.model)):
        return None
    if count is None:
        if (found := _first(config.data.model_dump_json())) is not None:
            return found
        count = int(sized)  # a setting of images alone
    if not count:
        return None
    width, _, height = config.data.image_size.partition("x")
    return Images(count, int(width), int(height))


@functools.lru_cache(maxsize=16)
def _first(data: str) -> Images | None:
    """Images of the first rows of files; None where rows are elsewhere, or of text alone."""
    counts, sizes, config = [0], [(0, 0)], DataConfig.model_validate_json(data)
    # What is wrong with them a run says, which reads all of them.
    with contextlib.suppress(FinetuneError, ImportError):
        from PIL import Image

        for source, _ in sources_of(config) if config.hub is None else ():
            rules = rules_of(source, config)
            for row in itertools.islice(source.read(streaming=True), FIRST):
                with contextlib.suppress(BadRowError, OSError):
                    _, references = marked((*ORDER, "rejected"), rules, row)
                    counts.append(len(references))
                    for one in references:
                        with Image.open(one["path"] or io.BytesIO(one["bytes"])) as image:
                            sizes.append(image.size)
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return Images(max(counts), width, height) if max(counts) else None


def with_images(config: RunConfig, count: int | None, size: str | None) -> RunConfig:
    """The run as if its rows had so many images of such a size; None: as it says itself."""
    given = {"images_per_row": count, "image_size": size}
    data = config.data.model_dump() | {k: v for k, v in given.items() if v is not None}
    return config.model_copy(update={"data": type(config.data).model_validate(data)})


def other_sizes(config: RunConfig, tokens: int) -> Iterator[tuple[int, int]]:
    """Powers of two for `train.max_pixels`, and the tokens of a row's images with each.

    An image of 640 x 480 has 300 tokens of 32 x 32 pixels: 131,072 pixels leave 117, 65,536 54.
    More pixels than it has change nothing, so that 524,288 are one for larger images alone.

    Args:
        tokens: that they have now.
    """
    images = images_of(config)
    if images is None:
        return
    size = images.height, images.width
    own, seen = image_processor(config.model, **config.train.pixels), {tokens}
    if not counts_pixels(own):
        return
    now = own.get_number_of_image_patches(*size)
    first = math.floor(math.log2(min(own.size["longest_edge"], images.width * images.height)))
    for power in range(first - SMALLER, first + LARGER + 1):
        with contextlib.suppress(ConfigError):  # fewer than `min_pixels`
            other = image_processor(config.model, **config.train.pixels | {"max_pixels": 2**power})
            found = tokens * other.get_number_of_image_patches(*size) // now
            if found not in seen:
                seen.add(found)
                yield 2**power, found
