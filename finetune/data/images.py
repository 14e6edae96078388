"""Pictures of rows: a reference of each, and the picture that it stands for.

A reference is what Hugging Face's `Image(decode=False)` holds, a path or the bytes of a file:

    {"bytes": None, "path": "/data/ships/tug.jpg"}
    {"bytes": b"\\x89PNG...", "path": None}

`opened` makes a picture of it, in RGB and upright, or says why there is none. What a file is
comes from its bytes, never from its name. What has no one answer is refused: of an animation one
frame would be trained on, and of numbers without a known white any brightness.

    gray of 16 bits, CMYK, a palette      brought to 8 bits of RGB, whole range to whole range
    transparent                           on white, as a browser shows it
    turned by its EXIF                    upright; an EXIF that cannot be read turns nothing
    cut off, damaged, animated, no image  `BadRowError`
    more than `MOST_PIXELS`               `BadRowError`, before it is unpacked
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import warnings
from typing import TYPE_CHECKING, Any

from finetune.data.chat import BadRowError
from finetune.storage.processors import require_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

Reference = dict[str, Any]

MOST_PIXELS = 89_478_485
"""Pixels of a picture: a quarter of a gigabyte in RGB, Pillow's own limit to warn at."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Pillow's names of what is read. Others are left out: EPS would start Ghostscript."""
PICTURES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"),
    *(".jp2", ".heic"),
)
"""Endings of names of pictures, for lines about folders: a picture is known by its bytes."""
SEEN_AS: dict[bytes, str] = {
    b"%pdf": "a PDF",
    b"<svg": "an SVG drawing, which has no pixels",
    b"<?xml": "XML, perhaps an SVG drawing, which has no pixels",
    b"<!doctype html": "a web page, as failed downloads leave one",
    b"<html": "a web page, as failed downloads leave one",
    b"version https://git-lfs": "a pointer of Git LFS (git lfs pull gets its file)",
    b"%!ps": "PostScript",
    **dict.fromkeys((b"\xff\xd8\xff", b"\x89png", b"gif8"), "cut off or damaged"),
    b"pk\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip file",
    **dict.fromkeys(
        (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1"),
        "HEIC, which Pillow does not read: save it as JPEG or PNG",
    ),
}
"""First bytes, in lower case, perhaps behind four of a size -> what Pillow does not open."""


def opened(reference: Reference) -> Image:
    """The picture of a reference, in RGB, upright by its EXIF, whole in memory.

    Raises:
        BadRowError: it is missing, damaged, animated, too large, or no picture; with its name.
        ConfigError: Pillow is not installed.
    """
    name = name_of(reference)
    content = reference.get("bytes")
    if content is None:
        _refuse_irregular(reference.get("path"), name)
    elif not content:
        raise BadRowError(f"{name} is empty")
    return _decoded(reference["path"] if content is None else io.BytesIO(content), name)


def references() -> Any:
    """The type of a column of references, as `datasets` names it."""
    from datasets import List, Value

    # Large: with offsets of 32 bits a batch of rows may hold two gigabytes, not more.
    return List({"bytes": Value("large_binary"), "path": Value("string")})


def undecoded(feature: Any) -> None:
    """Let `datasets` hand out the references of pictures, wherever in a column's type they are."""
    if isinstance(feature, dict):
        for one in feature.values():
            undecoded(one)
    elif type(feature).__name__ == "Image" and hasattr(feature, "decode"):
        feature.decode = False
    elif (inner := getattr(feature, "feature", None)) is not None:
        undecoded(inner)


def name_of(reference: Reference) -> str:
    """What a message calls a picture: its path, or how many bytes it has."""
    if path := reference.get("path"):
        return f"the image {path!r:.300}"
    return f"an image of {len(reference.get('bytes') or b''):,} bytes"


def _refuse_irregular(path: Any, name: str) -> None:
    """Raise `BadRowError` for a path without a file of some bytes."""
    if not isinstance(path, str) or not path:
        raise BadRowError("an image has neither bytes nor a path")
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise BadRowError(f"{name} is not there") from None
    except (OSError, ValueError) as error:  # the second of a NUL in it
        why = getattr(error, "strerror", None) or error
        raise BadRowError(f"{name} cannot be read: {why}") from None
    if stat.S_ISDIR(found.st_mode):
        raise BadRowError(f"{name} is a folder")
    if not stat.S_ISREG(found.st_mode):  # a pipe would never end
        raise BadRowError(f"{name} is no regular file")
    if not found.st_size:
        raise BadRowError(f"{name} is empty")


def _decoded(source: Any, name: str) -> Image:
    pillow = require_pillow()
    from PIL import ImageOps

    pillow.init()
    known = [kind for kind in FORMATS if kind in pillow.OPEN]  # that this Pillow was built with
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, and about sizes that are refused here
            with pillow.open(source, formats=known) as image:
                _refuse_shape(image, name)
                image.load()
                # An EXIF that cannot be read turns nothing; one that cannot be written has turned.
                with contextlib.suppress(Exception):
                    ImageOps.exif_transpose(image, in_place=True)
                return _in_rgb(image, name)
    except BadRowError:
        raise
    except pillow.DecompressionBombError:
        raise BadRowError(f"{name} has more than {MOST_PIXELS:,} pixels") from None
    except pillow.UnidentifiedImageError:
        raise BadRowError(f"{name} is {_seen_as(source)}") from None
    except Exception as error:  # of a damaged file a decoder raises whatever comes up
        said = str(error).strip() or type(error).__name__
        raise BadRowError(f"{name} is cut off or damaged: {said.splitlines()[0][:200]}") from error


def _refuse_shape(image: Image, name: str) -> None:
    """Raise `BadRowError` for too many pixels or frames, before any are unpacked."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise BadRowError(
            f"{name} has {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}: scale it down"
        )
    # Phones put a preview behind a photograph (MPO): the photograph is the first.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise BadRowError(
            f"{name} has {getattr(image, 'n_frames', 'several')} frames or pages; give the one "
            "that is meant as a file of its own"
        )


def _seen_as(source: Any) -> str:
    """What a file is that Pillow does not know, by its first bytes."""
    if isinstance(source, io.BytesIO):
        start = source.getvalue()[:64]
    else:
        with open(source, "rb") as file:
            start = file.read(64)
    head = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, what in SEEN_AS.items():
        if mark in (head[: len(mark)], head[4 : 4 + len(mark)]):
            return what
    return f"no image, or damaged: it begins with {start[:16]!r}"


def _in_rgb(image: Image, name: str) -> Image:
    """8 bits of RGB: the whole range of other numbers, and white behind what is transparent."""
    import numpy as np

    pillow = require_pillow()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # 65,535 is white. Pillow's `convert` cuts off at 255, or keeps a part.
        numbers = np.asarray(image).astype(np.uint32)
        image = pillow.fromarray(((numbers + 128) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise BadRowError(
            f"{name} has numbers of 32 bits ({image.mode}), of which none is known to be white"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
    return image.copy() if image.mode == "RGB" else image.convert("RGB")
