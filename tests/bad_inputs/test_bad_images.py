"""Malformed rows with images, and files that are none: each has its reason, and none is lost.

Every case stands behind a good row in a file of its own, which ends with the case's row number and
reason, and all of them in one file, of which every one is skipped, counted and named.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from finetune.config.methods import METHODS
from finetune.config.paths import TINY_LLAMA
from finetune.config.sections import DataConfig
from finetune.data import rows as rows_of_a_form
from finetune.data.dataset import load_data
from finetune.errors import DataError
from tests.data.test_image_forms import ANSWER, IN_PARTS, png, user
from tests.data.test_images import OTHERS, bomb, content, drawn, frames

GOOD = {"image": "good.png", "messages": [user("<image>?"), ANSWER]}
JPEG, WEBP, GIF = (content(drawn(), kind) for kind in ("JPEG", "WEBP", "GIF"))
PNG = png("red")
ZIP = io.BytesIO()
with zipfile.ZipFile(ZIP, "w") as archive:
    archive.writestr("a.png", PNG)


def damaged(data: bytes, place: int) -> bytes:
    """Bytes with the one at a place turned over."""
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


CUT, UNKNOWN, THERE = "cut off or damaged", "no image, or damaged", "is not there"
FILES: dict[str, tuple[bytes, str]] = {
    "empty.png": (b"", "is empty"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], CUT),
    "cut.png": (content(drawn())[:150], CUT),
    "cut.webp": (WEBP[: len(WEBP) // 2], CUT),
    "cut.gif": (GIF[: len(GIF) // 2], CUT),
    "head of a jpeg.jpg": (JPEG[:20], CUT),
    "head of a gif.gif": (GIF[:8], f"{CUT}|{UNKNOWN}"),
    "signature.png": (PNG[:8], f"{CUT}|{UNKNOWN}"),
    "checksum.png": (damaged(PNG, PNG.index(b"IDAT") + 6), CUT),
    "no pixels.png": (bomb(0), f"{CUT}|{UNKNOWN}"),
    "bomb.png": (bomb(9_460), r"9,460 x 9,460 pixels, more than 89,478,485"),
    "large bomb.png": (bomb(60_000), r"more than 89,478,485 pixels"),
    "bomb.bmp": (
        b"BM" + (54).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
        + (40).to_bytes(4, "little") + (50_000).to_bytes(4, "little") * 2
        + b"\x01\0\x18\0" + bytes(24),
        "more than 89,478,485",
    ),
    "moving.gif": (frames("GIF"), "3 frames"),
    "moving.png": (frames("PNG"), "3 frames"),
    "moving.webp": (frames("WEBP"), "3 frames"),
    "pages.tiff": (frames("TIFF"), "3 frames or pages"),
    "numbers.tiff": (content(Image.new("F", (4, 4), 0.5), "TIFF"), "known to be white"),
    "whole numbers.tiff": (content(Image.new("I", (4, 4), 5), "TIFF"), "known to be white"),
    "offsets.tiff": (b"II*\0" + b"\xff" * 40, f"{CUT}|{UNKNOWN}"),
    "icon.ico": (content(drawn(), "ICO"), UNKNOWN),
    "a film.jpg": (b"\0\0\0\x18ftypmp42" + bytes(40), UNKNOWN),
    "sound.png": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), UNKNOWN),
    "table.jpg": (b"\x93NUMPY\x01\0" + bytes(40), UNKNOWN),
    "bytes.jpg": (bytes(range(256)), UNKNOWN),
    "archive.png": (ZIP.getvalue(), "a ZIP archive"),
    "packed.png": (gzip.compress(PNG), "a gzip file"),
    "words.png": (b"PNG\n", UNKNOWN),
    "profile.png": (PNG[:33] + b"\xff\xff\xff\xffiCCP" + PNG[33:], CUT),
    **{f"{number} ü.jpg": (data, what) for number, (what, data) in enumerate(OTHERS.items())},
}  # fmt: skip


def of(image: Any, text: str = "<image>?", **more: Any) -> dict[str, Any]:
    return {"image": image, "messages": [user(text), ANSWER], **more}


def part(**keys: Any) -> dict[str, Any]:
    return {"messages": [user([{"type": "text", "text": "?"}, keys]), ANSWER]}


def several(count: int, text: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"images": ["good.png"] * count, "messages": [user(text), ANSWER, *more]}


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (of("none.png"), THERE),
    "missing, unicode": (of("ほ/ü b.png"), THERE),
    "missing, Windows": (of("C:\\data\\a.png"), THERE),
    "missing, a share": (of("\\\\server\\a.png"), THERE),
    "missing, at home": (of("~/no such folder/a.png"), THERE),
    "missing, file URL": (of("file:///no/such/a%20b.png"), THERE),
    "missing, outside": (of("../../../../../no/such.png"), THERE),
    "below a file": (of("good.png/a.png"), "cannot be read|is not there"),
    "folder": (of("."), "is a folder"),
    "pipe": (of("pipe.png"), "no regular file"),
    "device": (of("/dev/zero"), "no regular file"),
    "link to itself": (of("loop.png"), "cannot be read"),
    "link to nothing": (of("dangling.png"), THERE),
    "long name": (of("x" * 400 + ".png"), "cannot be read"),
    "NUL": (of("a\0b.png"), "has a NUL"),
    "blank": (of("  "), "path of an image is empty"),
    "URL": (of("https://example.org/a.png"), "data.image_urls=true"),
    "URL in a part": (
        part(type="image_url", image_url={"url": "http://example.org/a.png"}),
        "data.image_urls=true",
    ),
    "bucket": (of("s3://bucket/a.png"), "address that is not read"),
    "ftp": (part(type="image", url="ftp://example.org/a.png"), "address that is not read"),
    "number": (of(3), "an image is int"),
    "truth": (of(True), "an image is bool"),
    "list in a list": (of([["good.png"]]), "an image is list"),
    "null in a list": (several(0, "<image>?") | {"images": [None]}, "an image is NoneType"),
    "struct of nothing": (of({"bytes": None, "path": None}), "neither bytes nor a path"),
    "struct of others": (of({"name": "good.png"}), "neither bytes nor a path"),
    "struct of no bytes": (of({"bytes": "", "path": "good.png"}), "base64 of an image is empty"),
    "data URL without a comma": (of("data:image/png;base64"), "has no comma"),
    "data URL of a page": (of("data:text/html;base64,PGh0bWw+"), "is text/html, and no image"),
    "data URL of a drawing": (of("data:image/svg+xml;utf8,<svg/>"), "an SVG drawing"),
    "data URL of nothing": (of("data:image/png;base64,"), "base64 of an image is empty"),
    "base64 with other letters": (of("data:image/png;base64,iVBO*Rw"), "base64 .* is damaged"),
    "base64 that is cut": (
        of("data:image/png;base64," + base64.b64encode(PNG).decode()[:41]), "base64 .* is damaged"
    ),
    "base64 of half a file": (
        of("data:image/png;base64," + base64.b64encode(PNG[:40]).decode()), CUT
    ),
    "base64 of words": (part(type="image", base64="d29yZHM="), UNKNOWN),
    "file_id": (part(type="input_image", file_id="file-1"), "OpenAI alone can read"),
    "fewer images than places": (several(1, "<image><image>?"), "place for image 2"),
    "more images than places": (several(3, "<image>?"), "2 of its 3 images have no place"),
    "a place and no image": (several(0, "<image>?"), "place for image 1, and there are 0"),
    "a part and no image": (part(type="image"), "place for image 1, and there are 0"),
    "images of a part and of the column": (
        of("good.png", "?") | part(type="image", image="good.png"), "have no place"
    ),
    "index too large": (part(type="image", index=4) | {"images": ["good.png"]}, "image 5"),
    "index below 0": (part(type="image", index=-1) | {"images": ["good.png"]}, "image 0"),
    "index of words": (part(type="image", index="a") | {"images": ["good.png"]}, "image 'a'"),
    "two columns": (of("good.png", images=["good.png"]), "images in 'images' and in 'image'"),
    "a film beside it": (of("good.png", videos=["a.mp4"]), "it has 'videos'"),
    "a film in a part": (part(type="video", video="a.mp4"), "is no text"),
    "sound in a part": (part(type="input_audio", input_audio={"data": ""}), "is no text"),
    "answer with an image": (
        {"images": ["good.png"], "messages": [user("?"), {**ANSWER, "content": "<image>"}]},
        "an answer has an image",
    ),
    "answer with a part": (
        {"messages": [user("?"), {"role": "assistant", "content": [
            {"type": "image", "image": "good.png"}, {"type": "text", "text": "A."}]}]},
        "an answer has an image",
    ),
    "no question": ({"image": "good.png", "messages": [ANSWER]}, "no turn of the user"),
    "the mark of a place": (of("good.png", "<image>\ufdd0"), r"U\+FDD0"),
    "no answer": ({"image": "good.png", "messages": [user("<image>?")]}, "no assistant turn"),
    "empty answer": (
        {"image": "good.png", "messages": [user("?"), {**ANSWER, "content": " "}]}, "is empty"
    ),
    **{name: (of(name), why) for name, (_, why) in FILES.items()},
}  # fmt: skip
CAPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no caption": ({"image": "good.png", "text": "<image>"}, "'text' is empty but for"),
    "blank caption": ({"image": "good.png", "text": " "}, "'text' is empty"),
    "place inside": ({"image": "good.png", "text": "A <image> tug"}, "no answer to train on"),
    "no image": ({"image": None, "text": "A tug"}, "text alone"),
    "file gone": ({"image": "none.png", "text": "A tug"}, THERE),
}
TWO = {"chosen": [ANSWER], "rejected": [{**ANSWER, "content": "A buoy."}]}
ASKED = {key: [user("<image>?"), *answer] for key, answer in TWO.items()}
PREFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "two questions' images": (
        {key: [user([{"type": "image", "image": name}]), *TWO[key]]
         for key, name in (("chosen", "good.png"), ("rejected", "also good.png"))},
        "different images",
    ),
    "rejected without one": (
        {"images": ["good.png"], "chosen": [user("<image>?"), ANSWER],
         "rejected": [user("?"), *TWO["rejected"]]},
        "different questions|different images",
    ),
    "cut": ({"images": ["cut.jpg"], **ASKED}, CUT),
    "answered with one": (
        {"images": ["good.png"], "chosen": [user("?"), {**ANSWER, "content": "<image>"}],
         "rejected": [user("?"), *TWO["rejected"]]},
        "different images|an answer has an image",
    ),
}  # fmt: skip
GOOD_PAIR = {"images": ["good.png"], **ASKED}


@pytest.fixture(scope="module")
def reader():
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokenizer.chat_template = IN_PARTS
    return tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("good.png", "also good.png"):
        Path(name).write_bytes(PNG if name == "good.png" else png("blue"))
    for name, (data, _) in FILES.items():
        Path(name).write_bytes(data)
    os.mkfifo("pipe.png")
    Path("loop.png").symlink_to("loop.png")
    Path("dangling.png").symlink_to("nowhere.png")
    return tmp_path


def load(reader: Any, rows: list[dict[str, Any]], method: str, **more: Any) -> Any:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    data = DataConfig.model_validate({"path": "rows.jsonl", "eval_fraction": 0.0} | more)
    return load_data(data, reader, 0, images=True, method=METHODS[method])


TABLES = [
    (ROWS, GOOD, "sft"),
    (CAPTIONS, {"image": "good.png", "text": "A tug."}, "sft"),
    (PREFERENCES, GOOD_PAIR, "dpo"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("table", [pytest.param(TABLES[0], marks=pytest.mark.slow), *TABLES[1:]])
def test_every_malformed_row_ends_with_its_number_and_reason(reader, table) -> None:
    cases, good, method = table
    for name, (row, why) in cases.items():
        with pytest.raises(DataError) as raised:
            load(reader, [good, row], method)
        error = raised.value
        assert error.where.endswith("row 2"), name
        assert re.search(why, error.why), f"{name}: {error.why}"
        assert "data.on_bad_row=skip" in error.fix


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("table", TABLES, ids=["turns", "captions", "preferences"])
def test_every_malformed_row_is_skipped_counted_and_named(reader, table, monkeypatch) -> None:
    cases, good, method = table
    rows = [good, *(row for row, _ in cases.values()), good]
    reasons: dict[int, str] = {}

    def kept(given: Any, refused: dict[int, str], source: str) -> Any:
        reasons.update(refused)
        return without(given, refused, source)

    without = rows_of_a_form._without
    monkeypatch.setattr(rows_of_a_form, "_without", kept)
    found = load(reader, rows, method, on_bad_row="skip")
    assert not [name for k, name in enumerate(cases, 1) if k not in reasons]
    for (name, (_, why)), reason in zip(cases.items(), reasons.values(), strict=True):
        assert re.search(why, reason), f"{name}: {reason}"
    assert (found.refused, len(found.train)) == (len(cases), 2)
    assert any(f"{len(cases):,} rows are skipped; the first: row 2: " in n for n in found.notes)


@pytest.mark.usefixtures("folder")
def test_a_stream_counts_malformed_rows_too(reader) -> None:
    bad = [row for row, _ in ROWS.values()]
    found = load(reader, [GOOD, *bad, GOOD], "sft", on_bad_row="skip", streaming=True)
    assert (found.refused, len(found.sample)) == (len(bad), 2)
    first = [row for _, row in zip(range(4), found.train, strict=False)]
    assert all(row["images"][0]["path"].endswith("good.png") for row in first)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_the_command_line_ends_with_2_or_counts_every_one(cli, streaming) -> None:
    words = ("data", "tiny_lora_fp8", "model.name=builtin:tiny_vision", "data.name=null")
    words += ("data.path=rows.jsonl", "data.eval_fraction=0", "train.packing=false")
    words += (f"data.streaming={streaming}", "train.max_steps=2", "train.warmup_steps=0")
    bad = [row for row, _ in ROWS.values()]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [GOOD, *bad, GOOD]))
    done = cli(*words)
    assert done.code == 2
    assert "row 2" in done.err
    assert "fix:" in done.err
    done = cli(*words, "data.on_bad_row=skip")
    assert done.code == 0
    assert f"{len(bad)} rows are skipped; the first: row 2: " in done.out + done.err
    assert "2 images of 16 tokens" in done.out + done.err


def test_the_corpus_is_as_large_as_it_has_to_be() -> None:
    assert len(ROWS) + len(CAPTIONS) + len(PREFERENCES) >= 60
    assert zlib.crc32(np.asarray(Image.open(io.BytesIO(PNG))).tobytes())  # the good one is good
