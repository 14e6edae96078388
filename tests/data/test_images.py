"""Pictures of references: RGB, upright, whole; or the reason why there is none."""

from __future__ import annotations

import io
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from finetune.data import images
from finetune.data.chat import BadRowError
from finetune.data.images import opened


def content(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def of(image: Image.Image, kind: str = "PNG", **more: Any) -> np.ndarray:
    """Numbers of a picture that was saved and opened."""
    found = opened({"bytes": content(image, kind, **more), "path": None})
    assert found.mode == "RGB"
    return np.asarray(found)


def test_gray_of_16_bits_keeps_its_range() -> None:
    numbers = np.array([[0, 128, 129, 257, 32_768, 65_535]], np.uint16)
    want = np.rint(numbers / 257).astype(np.uint8)
    for kind in ("PNG", "TIFF"):
        found = of(Image.fromarray(numbers), kind)
        assert (found == want[..., None]).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_known_white_are_refused(mode) -> None:
    with pytest.raises(BadRowError, match="none is known to be white"):
        of(Image.new(mode, (4, 4), 3), "TIFF")


def test_what_is_transparent_is_white() -> None:
    whole = Image.new("RGBA", (3, 1), (200, 0, 0, 0))
    whole.putpixel((1, 0), (200, 0, 0, 255))
    whole.putpixel((2, 0), (0, 0, 0, 128))
    assert of(whole).tolist() == [[[255, 255, 255], [200, 0, 0], [127, 127, 127]]]
    assert of(Image.new("LA", (1, 1), (9, 0))).tolist() == [[[255, 255, 255]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert of(palette).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert of(palette, transparency=0).tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_other_modes_become_rgb() -> None:
    assert of(Image.new("1", (1, 1), 1)).tolist() == [[[255, 255, 255]]]
    assert of(Image.new("L", (1, 1), 7)).tolist() == [[[7, 7, 7]]]
    assert of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")[0, 0].tolist() == [255, 0, 0]
    red = of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")[0, 0]
    assert red[0] > 200
    assert red[1:].max() < 60


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_upright_however_the_camera_was_held(orientation) -> None:
    # An oracle of its own: where the corner that EXIF calls "top left" lies in the stored picture.
    upright = np.zeros((40, 24, 3), np.uint8)
    upright[:8, :8] = 255  # white at the top left
    upright[-8:, :8, 0] = 255  # red at the bottom left
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.swapaxes(0, 1), 6: np.rot90(upright), 7: np.rot90(upright.swapaxes(0, 1), 2),
        8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = of(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    assert (found == upright).all()


def test_an_exif_that_cannot_be_read_turns_nothing() -> None:
    found = of(Image.new("RGB", (6, 4), "red"), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert found.shape == (4, 6, 3)


def frames(kind: str, **more: Any) -> bytes:
    several = [Image.new("RGB", (8, 8), (40 * i, 0, 0)) for i in range(3)]
    return content(several[0], kind, save_all=True, append_images=several[1:], **more)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_more_than_one_frame_is_refused(kind) -> None:
    with pytest.raises(BadRowError, match="3 frames or pages"):
        opened({"bytes": frames(kind), "path": None})
    assert of(Image.new("RGB", (8, 8), "red"), kind).shape == (8, 8, 3)


def test_of_a_photograph_with_a_preview_behind_it_the_photograph_is_taken() -> None:
    found = opened({"bytes": frames("MPO"), "path": None})
    assert np.asarray(found).max() < 20


def bomb(side: int) -> bytes:
    """A PNG that says it has `side` x `side` pixels, and has none."""

    def chunk(name: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(name + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + name + data + crc

    size = side.to_bytes(4, "big") * 2
    parts = [(b"IHDR", size + b"\x08\x02\0\0\0"), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("side", [9_460, 14_000, 100_000])
def test_a_bomb_is_refused_by_its_size_and_pillow_stays_as_it_was(side, monkeypatch) -> None:
    limit, filters = Image.MAX_IMAGE_PIXELS, [*warnings.filters]
    with pytest.raises(BadRowError, match=r"more than 89,478,485"):
        opened({"bytes": bomb(side), "path": None})
    assert (Image.MAX_IMAGE_PIXELS, [*warnings.filters]) == (limit, filters)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a script that takes any
    with pytest.raises(BadRowError, match=r"pixels, more than 89,478,485"):
        opened({"bytes": bomb(side), "path": None})


def drawn() -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((8, 8, 50, 40), "navy")
    return image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_a_picture_that_is_cut_off_anywhere_is_refused_and_never_half_taken(kind) -> None:
    whole = content(drawn(), kind)
    for share in (0.02, 0.3, 0.6, 0.9):
        with pytest.raises(BadRowError, match=r"cut off or damaged|no image|is empty"):
            opened({"bytes": whole[: int(len(whole) * share)], "path": None})


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
OTHERS = {
    "an SVG drawing": SVG, "a PDF": b"%PDF-1.7\n", "a web page": b"\n <!DOCTYPE html><html>",
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0", "no image, or damaged": b"just text",
    "a ZIP": b"PK\x03\x04",
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_file_named_jpg_is_called_what_it_is(what, tmp_path) -> None:
    file = tmp_path / "a b ü.jpg"
    file.write_bytes(OTHERS[what])
    for given in ({"bytes": None, "path": str(file)}, {"bytes": OTHERS[what], "path": "a b ü.jpg"}):
        with pytest.raises(BadRowError, match=what) as raised:
            opened(given)
        assert "a b ü.jpg" in str(raised.value)


def test_paths_without_a_picture_are_refused_at_once(tmp_path) -> None:
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for name, why in (
        ("none.png", "is not there"), ("", "is a folder"), ("empty.png", "is empty"),
        ("pipe.png", "no regular file"), ("loop.png", "cannot be read"), ("a\0b", "cannot be read"),
        ("none/a.png", "is not there"), ("x" * 300, "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(BadRowError, match=why):
            opened({"bytes": None, "path": str(tmp_path / name)})
    for nothing in ({"bytes": None, "path": None}, {"bytes": b"", "path": None}, {}):
        with pytest.raises(BadRowError, match=r"neither bytes nor a path|is empty"):
            opened(nothing)


def test_a_picture_is_known_by_its_bytes_and_not_by_its_name(tmp_path) -> None:
    file = Path(tmp_path / "photo.txt")
    file.write_bytes(content(drawn(), "JPEG"))
    assert opened({"bytes": None, "path": str(file)}).size == (64, 64)


def test_every_format_that_is_named_is_one_of_pillow() -> None:
    Image.init()
    assert {*images.FORMATS} - {"AVIF", "JPEG2000", "WEBP"} <= {*Image.OPEN}
