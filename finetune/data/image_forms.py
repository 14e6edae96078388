"""Rows with images, in the forms that people have, brought into one.

    form                                                     a picture is
    part {"type": "image", "image" | "path" | "url" | "base64": ...}    the part's
    part {"type": "image_url", "image_url": "..." | {"url": "..."}}     the part's (OpenAI)
    part {"type": "input_image", "image_url": "..."}                    the part's (Responses)
    part {"type": "image", "source": {"data" | "url": ...}}             the part's (Anthropic)
    part {"type": "image"}, or `<image>` in a text                      the next of the column
    no such place at all                                     all of the column, before the first
                                                             question's text, as TRL and LLaVA do

The column is `images`, `image`, or `file_name` as in the metadata of an image folder. A picture in
it, or in a part, is a path, a data URL, a URL (`data.image_urls`), bytes or `{"bytes", "path"}`.
What comes out are the converted rows of text, with contents in parts:

    {"messages": [{"role": "user", "content": "<image>\\nWhich ship?"}, ...], "image": "tug.jpg"}
    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}, ...],
     "images": [{"bytes": None, "path": "/data/tug.jpg"}]}

Between the two a picture is a mark in the text, so that every converter of text serves rows with
images, too. A line break between `<image>` and the text belongs to that form, and is left out.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import itertools
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from finetune.data.chat import BadRowError, from_cell, is_image
from finetune.data.converters import ASKED, CONTEXT, PAIRS, SYSTEM, TURNS, Converter
from finetune.data.images import Reference, opened

COLUMN = "images"
"""Column of references in converted rows."""
SEEN = "images as seen"
"""Column of a hash of each picture's numbers in prepared rows (`image_rows.seen_as`).

Prompts have it beside columns of any name, for rewards.
"""
COLUMNS, IN_METADATA = (COLUMN, "image"), ("file_name", "file_names")
"""Columns of pictures beside the text of a row; the others in the metadata of an image folder."""
OTHERS = ("videos", "video", "audios", "audio")
"""Columns beside text that nothing is trained on."""
TEXTS = ("content", "value", "text")
"""Keys of a turn, or of a part, under which there may be places for pictures."""
BARE = ("data", "base64")
HOLDS = ("image", "image_url", "url", "path", "source", *BARE)
"""Keys of a part, or of a mapping in it, under which the picture may be; of base64 alone."""
PLACE = "<image>"
"""What stands for a picture in a text."""
MARK = "\ufdd0"
"""Stands for a picture while its row is converted; Unicode has it for programs' own use."""
_PAIRED = tuple(dict.fromkeys(itertools.chain(*PAIRS.values())))
ORDER = (*SYSTEM, "history", *ASKED, *CONTEXT, *TURNS, "text", *_PAIRED, "chosen")
"""Columns that may have places for pictures, in the order of what they become."""
WALKED = (*ORDER, "rejected")
TURN_LISTS = ("messages", "prompt", "completion", "chosen", "rejected")
_BEHIND = re.compile(f"{MARK}(\r?\n)?")
_LAST = re.compile(f"\r?\n({MARK})$")


@dataclass(frozen=True)
class Rules:
    """Where the pictures of a source are, and which may be read.

    Attributes:
        folders: folders that relative paths begin in; of several, the one that has the file.
        inside: folders that files have to lie in; none: anywhere, as a user's own rows may say.
        urls: pictures are fetched from the network (`data.image_urls`).
        columns: columns of pictures, of which a row has one.
        state: what tells these files from others under the same names (`files_state`).
    """

    folders: tuple[Path, ...] = ()
    inside: tuple[Path, ...] = ()
    urls: bool = False
    columns: tuple[str, ...] = COLUMNS
    state: str = ""


# ----------------------------------------------------------------------------------- whole rows


def with_images(
    convert: Converter, read: tuple[str, ...], rules: Rules, row: dict[str, Any]
) -> dict[str, Any]:
    """A row converted, its contents in parts, and its pictures' references in `images`.

    Args:
        convert: brings the row, as one of text, into a form of TRL's.
        read: columns that it makes turns of.

    Raises:
        BadRowError: places and pictures differ in number, or a picture cannot be opened.
    """
    text, found = marked(read, rules, row)
    done = _in_parts(convert(text), len(found))
    for reference in found:
        opened(reference)
    return {**done, COLUMN: found}


def marked(
    read: tuple[str, ...], rules: Rules, row: dict[str, Any]
) -> tuple[dict[str, Any], list[Reference]]:
    """A row with a mark for each picture, and references of these in order.

    Pictures that no place is for are the last ones, without a mark.
    """
    for name in OTHERS:
        if row.get(name):
            raise BadRowError(f"it has {name!r}, and text and images are trained on alone")
    text = {key: value for key, value in row.items() if key not in rules.columns}
    names = [key for key in dict.fromkeys(ORDER) if key in read and key in row]
    if isinstance(row.get("prompt"), str) and isinstance(row.get("chosen"), list):
        names = [key for key in names if key not in ASKED]  # the turns hold the prompt
    sides, given = [names], _column(rules, row)
    if "rejected" in read and "rejected" in row:
        # Of the two answers each may repeat its question, with the same pictures.
        sides.append([*(key for key in names if key != "chosen"), "rejected"])
    found = list[list[Reference]]()
    for side in sides:
        walk = _Walk(rules, given)
        for key in side:  # turns may be JSON in a cell; a text that looks like it is a text
            as_turns = key in (*TURNS, "history")
            text[key] = walk.value(from_cell(row[key], key) if as_turns else row[key])
        found.append(walk.finished())
    if found[0] != found[-1]:
        raise BadRowError("'chosen' and 'rejected' have different images")
    return text, found[0]


def _column(rules: Rules, row: dict[str, Any]) -> list[Reference]:
    """References of the pictures beside the text of a row."""
    given = [key for key in rules.columns if row.get(key) not in (None, "", [])]
    if len(given) > 1:
        raise BadRowError(f"it has images in {' and in '.join(map(repr, given))}: give them in one")
    every = [from_cell(row[key], key) for key in given]
    every = every[0] if every and isinstance(every[0], list | tuple) else every
    return [reference(one, rules) for one in every]


class _Walk:
    """Goes through the texts of a row, and gives each place its picture."""

    def __init__(self, rules: Rules, given: list[Reference]) -> None:
        self.rules, self.given = rules, given
        self.found: list[Reference] = []
        self.used = set[int]()
        self.next = 0

    def value(self, value: Any) -> Any:
        """A text, a part, a turn, or a list of these, with marks."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        if is_image(value):
            return self.picture(value)
        inside = [key for key in TEXTS if key in value] if isinstance(value, dict) else ()
        return value | {key: self.value(value[key]) for key in inside} if inside else value

    def picture(self, part: dict[str, Any]) -> dict[str, str]:
        """A mark in the place of a picture."""
        if any(part.get(key) not in (None, "") for key in HOLDS):
            self.found.append(reference(part, self.rules))
        elif part.get("file_id"):
            raise BadRowError("an image is a file_id, which OpenAI alone can read")
        else:
            self.take(part.get("index"))
        return {"type": "text", "text": MARK}

    def text(self, text: str) -> str:
        if MARK in text:
            raise BadRowError("its text has the character U+FDD0, which is no text")
        for _ in range(text.count(PLACE)):
            self.take()
        text = text.replace(PLACE, MARK)
        return _LAST.sub(MARK, _BEHIND.sub(MARK, text)) if MARK in text else text

    def take(self, index: Any = None) -> None:
        """The next picture of the column, or the one that the place names by its index."""
        place = self.next if index is None else index
        if not isinstance(place, int) or not 0 <= place < len(self.given):
            shown = place + 1 if isinstance(place, int) else repr(place)
            raise BadRowError(
                f"its text has a place for image {shown}, and there are {len(self.given)}"
            )
        self.used.add(place)
        self.next = place + 1
        self.found.append(self.given[place])

    def finished(self) -> list[Reference]:
        """All pictures; those of a row without any place stand behind one another."""
        if not self.found:
            return self.given
        if left := len(self.given) - len(self.used):
            raise BadRowError(
                f"{left} of its {len(self.given)} images have no place in its text, and others do"
            )
        return self.found


def _in_parts(row: dict[str, Any], images: int) -> dict[str, Any]:
    """A converted row with its contents in parts, as processors take them."""
    row = _as_caption(row, images) if "text" in row else dict(row)
    lists = [key for key in TURN_LISTS if isinstance(row.get(key), list)]
    if not lists:
        raise BadRowError("rows with images need turns, and a model with a chat template")
    for key in lists:
        row[key] = [_turn_in_parts(turn) for turn in row[key]]
        if any(turn["role"] == "assistant" and places_in(turn) for turn in row[key]):
            raise BadRowError("an answer has an image, which the model cannot write")
    asked = row[lists[0]]
    if images and not any(map(places_in, asked)):
        _put_first(asked, images)
    if (places := sum(map(places_in, asked))) != images:
        raise BadRowError(f"it has {images} images, and {places} places for them in its turns")
    return row


def places_in(turn: dict[str, Any]) -> int:
    """Pictures in a turn whose content is in parts."""
    return sum(part["type"] == "image" for part in turn.get("content") or ())


def _as_caption(row: dict[str, Any], images: int) -> dict[str, Any]:
    """Pictures with a text alone: they ask, and the text is the answer."""
    text = row.pop("text").lstrip(MARK)
    if MARK in text:
        raise BadRowError("'text' with <image> inside has no answer to train on: give messages")
    if not images:
        raise BadRowError("it has text alone, without an image or a question")
    if not text.strip():
        raise BadRowError("'text' is empty but for <image>")
    asked = {"role": "user", "content": MARK * images}
    return {**row, "prompt": [asked], "completion": [{"role": "assistant", "content": text}]}


def _turn_in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn.get("content")
    if not isinstance(content, str):
        return turn
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**turn, "content": parts}


def _put_first(turns: list[dict[str, Any]], images: int) -> None:
    """Pictures that have no place: before the text of the first question."""
    for turn in turns:
        if turn["role"] == "user":
            turn["content"] = [{"type": "image"}] * images + (turn["content"] or [])
            return
    raise BadRowError("it has images, and no turn of the user that they could stand in")


def caches() -> tuple[Path, ...]:
    """Folders in which data sets from the hub have their files."""
    from datasets import config
    from huggingface_hub import constants

    names = (constants.HF_HUB_CACHE, config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH)
    return tuple(dict.fromkeys(Path(name).absolute() for name in names))


def shows_images(rows: Iterable[Any], columns: Iterable[str]) -> bool:
    """True if any of the rows has a picture, in one of these columns or in a part of a turn."""
    names = tuple(columns)
    return any(
        any(map(row.get, names)) or any(_shows(row[key]) for key in WALKED if row.get(key))
        for row in rows
    )


def _shows(turns: Any) -> bool:
    """True of turns, also as JSON in a cell, of which one has a part that is a picture."""
    with contextlib.suppress(BadRowError):  # said where the row is converted
        turns = from_cell(turns, "turns")
    given = turns if isinstance(turns, list) else [turns]
    contents = (one.get("content") or one.get("value") for one in given if isinstance(one, dict))
    return any(isinstance(one, list) and any(map(is_image, one)) for one in contents)


def files_state(rows: Iterable[Any], read: tuple[str, ...], rules: Rules) -> str:
    """A hash of sizes and times of all pictures that are files: what is kept of them may be old."""
    found = hashlib.sha256()
    offline = replace(rules, urls=False)
    for row in rows:
        with contextlib.suppress(BadRowError, OSError):
            for one in marked(read, offline, row)[1]:
                if one["bytes"] is None:
                    facts = os.stat(one["path"])
                    found.update(f"{one['path']} {facts.st_size} {facts.st_mtime_ns}".encode())
    return found.hexdigest()[:16]


# ----------------------------------------------------------------------------------- references


def reference(given: Any, rules: Rules) -> Reference:
    """The reference of one picture, in whatever form it is given.

    Raises:
        BadRowError: it is none, or lies where it may not be read from.
    """
    if isinstance(given, dict):
        return _of_struct(given, rules)
    if isinstance(given, bytes | bytearray):
        return {"bytes": bytes(given), "path": None}
    if isinstance(given, str):
        return _of_text(given, rules)
    raise BadRowError(f"an image is {type(given).__name__}: {given!r:.80}")


def _of_struct(given: dict[str, Any], rules: Rules) -> Reference:
    """Of Hugging Face's struct, a part, OpenAI's `{"url": ...}` or Anthropic's source."""
    content, path = given.get("bytes"), given.get("path")
    if content is not None:  # as text, in JSON, they can only be base64
        content = _from_base64(content) if isinstance(content, str) else bytes(content)
        # Of the path the name is left, by which a message calls it.
        return {"bytes": content, "path": path if isinstance(path, str) else None}
    for key in HOLDS:
        if (found := given.get(key)) not in (None, ""):
            bare = key in BARE and isinstance(found, str)
            return _of_text(found, rules, bare=True) if bare else reference(found, rules)
    raise BadRowError(f"an image has neither bytes nor a path: {sorted(given)!r}")


def _of_text(text: str, rules: Rules, *, bare: bool = False) -> Reference:
    """Of a path, a URL, a data URL or base64 alone (`bare`, or where it begins as a file does)."""
    text = text.strip()
    scheme = urlsplit(text[:300].lower()).scheme if "://" in text[:40] else ""
    if not text:
        raise BadRowError("the path of an image is empty")
    if text[:5].lower() == "data:":
        return {"bytes": _of_data_url(text), "path": None}
    if bare or text.startswith(BASE64_OF):
        return {"bytes": _from_base64(text), "path": None}
    streamed = rules.inside and text.rpartition("::")[2].startswith("hf://")  # from the hub
    if scheme in ("http", "https") or streamed:
        return {"bytes": fetched(text, rules), "path": text}
    if scheme == "file":
        text, scheme = url2pathname(urlsplit(text).path), ""
    if scheme:
        raise BadRowError(f"an image has an address that is not read: {text[:200]!r}")
    return {"bytes": None, "path": _path(text, rules)}


BASE64_OF = ("/9j/4", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""Begin of JPEG, PNG, GIF and WebP in base64, which many rows have without `data:`."""


def _of_data_url(text: str) -> bytes:
    head, comma, body = text[5:].partition(",")
    if not comma:
        raise BadRowError(f"a data URL has no comma: {text[:60]!r}")
    kind = head.partition(";")[0].strip().lower()
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise BadRowError(f"a data URL is {kind}, and no image")
    if head.lower().rstrip().endswith("base64"):
        return _from_base64(body)
    return unquote_to_bytes(body)


def _from_base64(text: str) -> bytes:
    """Bytes of base64, with or without line breaks and padding, of either alphabet."""
    plain = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        content = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRowError(f"the base64 of an image is damaged: {error}") from None
    if not content:
        raise BadRowError("the base64 of an image is empty")
    return content


def _path(text: str, rules: Rules) -> str:
    """The absolute path of a picture; `BadRowError` if it may not be read, or is ambiguous."""
    if "\0" in text:
        raise BadRowError(f"the path of an image has a NUL: {text[:80]!r}")
    path = Path(text).expanduser() if text.startswith("~/") and not rules.inside else Path(text)
    if not path.is_absolute() and not rules.folders:
        raise BadRowError(
            f"the image {text[:200]!r} has no folder to lie in: data.image_folder=FOLDER"
        )
    found = _candidates(path, rules)
    if not found and "\\" in text:  # written on Windows
        found = _candidates(Path(PureWindowsPath(text).as_posix()), rules)
    if len(found) > 1:
        raise BadRowError(
            f"the image {text[:200]!r} is in several folders, {found[0].parent} and "
            f"{found[1].parent}: data.image_folder=FOLDER"
        )
    # What is not there is said with the place where it was looked for.
    whole = found[0] if found else (rules.folders or (Path(),))[0] / path
    if rules.inside and not _is_inside(whole, rules.inside):
        raise BadRowError(
            f"the image {text[:200]!r} lies outside of its data set, whose rows may name no "
            "other files"
        )
    return os.path.abspath(whole)


def _candidates(path: Path, rules: Rules) -> list[Path]:
    """Existing files that a path may be, one for each folder that it can begin in."""
    places = [path] if path.is_absolute() else [folder / path for folder in rules.folders]
    return [place for place in places if os.path.lexists(place)]


def _is_inside(path: Path, folders: Iterable[Path]) -> bool:
    whole = path.resolve()  # links and `..` followed
    return any(whole.is_relative_to(folder.resolve()) for folder in folders)


# -------------------------------------------------------------------------------------- network

MOST_BYTES = 64 << 20
"""Bytes of a file that is fetched: a photograph of the most pixels has about 30 MB."""
TRIES, WAITS, TIME_LIMIT = 3, 1.0, 20.0
"""Times that a server is asked, seconds between, and seconds that it may be silent."""


def fetched(address: str, rules: Rules) -> bytes:
    """The file at a URL, or of a data set on the hub, perhaps in an archive, as `datasets` has it.

    Raises:
        BadRowError: it cannot be had, or none may be.
    """
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    import fsspec

    shown, content, why = address[:200], None, ""
    remote = address.lower().startswith(("http://", "https://"))
    if remote and not rules.urls:
        raise BadRowError(
            f"the image {shown!r} is on the network, which is not asked unless data.image_urls=true"
        )
    for number in range(TRIES):
        time.sleep(WAITS * number)
        try:
            asked = Request(address, headers={"User-Agent": "fp8-finetune"}) if remote else None
            there: Any = urlopen(asked, timeout=TIME_LIMIT) if asked else fsspec.open(address, "rb")
            with there as file:
                content = file.read(MOST_BYTES + 1)
            break
        except (OSError, HTTPException, ValueError) as error:
            why = str(error) or type(error).__name__
            code = getattr(error, "code", 404 if isinstance(error, FileNotFoundError) else 503)
            if code < 500 and code != 429:
                break
    if content is None:
        raise BadRowError(f"the image {shown!r} could not be fetched: {why}")
    if len(content) > MOST_BYTES:
        raise BadRowError(f"the image {shown!r} has more than {MOST_BYTES >> 20} MiB")
    return content
