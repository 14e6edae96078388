"""Images of a run's rows, as an estimate takes them: how many in a row, and how large.

    data.images_per_row   --images 2               none are left out
    data.image_size       --image-size 1024x768

Settings say it, since the most expensive rows decide a peak, as those of `train.max_length` do.
"""

from __future__ import annotations

from typing import NamedTuple

from finetune.config.methods import method_of
from finetune.config.schema import RunConfig

PIXELS = ("max_pixels", "min_pixels")


class Images(NamedTuple):
    """Images of a row, all of one size in pixels."""

    count: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.count} image{'s' * (self.count > 1)} of {self.width}x{self.height}"


def images_of(config: RunConfig) -> Images | None:
    """Images of each row that a run reads; None if its rows are text alone, or it writes them."""
    count = config.data.images_per_row
    if count is None:  # settings of images alone
        count = int(any(config.train.get(key) for key in PIXELS))
    if not count or method_of(config.train).writes:
        return None
    width, _, height = config.data.image_size.partition("x")
    return Images(count, int(width), int(height))


def pixels_of(config: RunConfig) -> dict[str, int | None]:
    """The number of pixels that an image has at most and at least, by `train`'s settings."""
    return {key: config.train.get(key) for key in PIXELS}


def with_images(config: RunConfig, count: int | None, size: str | None) -> RunConfig:
    """The run as if its rows had so many images of such a size; None: as it says itself."""
    given = {"images_per_row": count, "image_size": size}
    data = config.data.model_dump() | {k: v for k, v in given.items() if v is not None}
    return config.model_copy(update={"data": type(config.data).model_validate(data)})
