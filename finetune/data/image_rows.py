"""Rows with images as they are trained on: their processor's own ids, and what of them counts.

A processor puts many tokens in the place of one picture, and says where. What is trained on is
found in the text before (`finetune.data.masks`), and moved by that much:

    text       <|im_start|>user <image>Which?<|im_end|> <|im_start|>assistant A tug.<|im_end|>
    as read    <|im_start|>user <image><image><image><image>Which?<|im_end|> ... A tug.<|im_end|>
    trained                                                                      A tug.<|im_end|>

Pictures are opened and read once here, for their tokens to be counted, and once more for each batch
(`finetune.data.image_batches`), which has to find what is noted here: `texts`, `ids`, and `seen`, a
hash of each picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from trl import apply_chat_template

from finetune.data.chat import BadRowError, turns_of
from finetune.data.checks import MASKED
from finetune.data.image_forms import COLUMN, SEEN, places_in
from finetune.data.images import opened, references
from finetune.data.masks import Span, answers, each_row, rendered_turns, shared, trained_characters
from finetune.data.rows import made_by, workers
from finetune.errors import ConfigError
from finetune.storage.processors import as_read, tokenizer_of

Marked = tuple[str, np.ndarray]
"""A text, and for each of its characters whether it is trained on, [characters]."""
IDS, TEXT = List(Value("int64")), Value("string")
NOTED = {"texts": List(TEXT), COLUMN: references(), SEEN: List(TEXT), "image_begins": IDS,
         "image_ends": IDS, "length": Value("int64")}  # fmt: skip
AS_TEXT = Features(input_ids=IDS, labels=IDS, **NOTED)
AS_PAIRS = Features(prompt_ids=IDS, chosen_ids=IDS, rejected_ids=IDS, **NOTED)
AS_PROMPTS = Features(prompt_ids=IDS, **NOTED)
"""Columns of prepared rows. An image has the tokens from `image_begins` to before `image_ends`."""
FIX = "fix or remove that row, or skip and count such rows: data.on_bad_row=skip"
AT_ONCE = 8
"""Rows whose pictures are in memory together."""


def read(
    rows: Any, processor: Any, made: Callable[..., Any], features: Features, **how: Any
) -> Any:
    """Rows, of a `Dataset` or a stream, as a processor reads them.

    Args:
        made: makes prepared rows of one (`as_sequences`, `as_pair`, `as_prompt`).
        how: its settings.

    Raises:
        DataError: a picture cannot be opened, or a text holds the processor's own marks of images.
        ConfigError: the processor does not say where images stand.
    """
    one, what = partial(made, reader=processor, **how), "a row with images cannot be trained on"
    each = partial(each_row, made=one, what=what, fix=FIX)
    options: dict[str, Any] = {"batched": True, "batch_size": AT_ONCE, "features": features}
    if isinstance(rows, Dataset):
        tokenizer = tokenizer_of(processor)
        code = Path(__file__).read_bytes()
        facts = (repr(processor), tokenizer.chat_template, code, made.__name__, how)
        options |= {"num_proc": workers(len(rows)), "writer_batch_size": 100}
        options["new_fingerprint"] = made_by(rows, *map(str, facts))
    return rows.map(each, remove_columns=[*next(iter(rows))], **options)


def fitting(rows: Any, limit: int | None) -> Any:
    """Rows of which no image is cut, and some of an answer is left; ids of a text are cut."""
    if limit is None:
        return rows

    def fits(row: dict[str, Any]) -> bool:
        if _cuts(limit, row["image_ends"]):
            return False
        if "prompt_ids" in row:
            return len(row["prompt_ids"]) < limit
        return any(label != MASKED for label in row["labels"][:limit])

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        kept = {key: row[key][:limit] for key in ("input_ids", "labels") if key in row}
        return {**kept, "length": min(row["length"], limit)}

    if not isinstance(rows, Dataset):
        return rows.filter(fits).map(cut)
    # Without the bytes of images, which would be read, and for `map` written, again.
    light: Any = rows.select_columns([name for name in rows.column_names if name != COLUMN])
    kept = rows.select([i for i, row in enumerate(light) if fits(row)])
    return kept.map(cut) if max(kept["length"], default=0) > limit else kept


def _cuts(limit: int | None, ends: list[int]) -> bool:
    """True if an image of a row, behind whose last token each end is, would be cut."""
    return limit is not None and max(ends, default=0) > limit


def of_images(rows: Dataset, limit: int | None) -> dict[str, int]:
    """What a ledger says of images: how many there are, their tokens, rows without and cut ones.

    Args:
        rows: all that were prepared, those that `limit` drops, too.
    """
    if COLUMN not in rows.column_names:
        return {}
    begins, ends = rows["image_begins"], rows["image_ends"]
    return {
        "images": sum(map(len, ends)),
        "image_tokens": sum(map(sum, ends)) - sum(map(sum, begins)),
        "text_alone": sum(not row for row in ends),
        "images_cut": sum(_cuts(limit, row) for row in ends),
    }


# ------------------------------------------------------------------------------------ whole rows


def as_sequences(
    row: dict[str, Any], reader: Any, *, only_answers: bool, completion_only: bool
) -> Iterator[dict[str, Any]]:
    """Prepared rows that a conversation becomes: each keeps the pictures of its own turns.

    Args:
        only_answers: else each token is trained on, but those of images.
    """
    for marked, pictures in _conversations(
        row, tokenizer_of(reader), only_answers, completion_only
    ):
        images = [opened(one) for one in pictures]
        ids, on, places = tokens_of(reader, marked, images)
        yield {
            "input_ids": ids,
            "labels": np.where(on, ids, MASKED).tolist(),
            **_noted([marked[0]], pictures, images, places),
            "length": len(ids),
        }


def _conversations(
    row: dict[str, Any], tokenizer: Any, only_answers: bool, completion_only: bool
) -> Iterator[tuple[Marked, list[Any]]]:
    turns = turns_of(row)
    if not only_answers:
        text = rendered_turns(row, len(turns), tokenizer)
        yield (text, np.ones(len(text), bool)), row[COLUMN]
        return
    for count, spans in answers(row, tokenizer, completion_only=completion_only):
        own = sum(map(places_in, turns[:count]))
        yield trained_characters(row, count, spans, tokenizer), row[COLUMN][:own]


def as_pair(row: dict[str, Any], reader: Any) -> Iterator[dict[str, Any]]:
    """A prepared pair: what both answers begin with is their prompt, as TRL has it."""
    said = apply_chat_template(
        {key: row[key] for key in ("prompt", "chosen", "rejected")}, tokenizer_of(reader),
        tools=row.get("tools") or None, **(row.get("chat_template_kwargs") or {}),
    )  # fmt: skip
    images, texts, sides = [opened(one) for one in row[COLUMN]], list[str](), []
    for key in ("chosen", "rejected"):
        texts.append(said["prompt"] + said[key])
        on = np.arange(len(texts[-1])) >= len(said["prompt"])
        sides.append(tokens_of(reader, (texts[-1], on), images))
    (chosen, on, places), (rejected, other, _) = sides
    begin = min(int(on.argmax()), int(other.argmax()), shared(chosen, rejected))
    yield {
        "prompt_ids": chosen[:begin],
        "chosen_ids": chosen[begin:],
        "rejected_ids": rejected[begin:],
        **_noted(texts, row[COLUMN], images, places),
        "length": max(len(chosen), len(rejected)),
    }


def as_prompt(
    row: dict[str, Any], reader: Any, *, template: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A prepared prompt, whose answers are written later.

    Args:
        template: arguments of the chat template for all rows.
    """
    text: Any = prompted(tokenizer_of(reader), row, template, tokenize=False)
    images = [opened(one) for one in row[COLUMN]]
    ids, _, places = tokens_of(reader, (text, np.zeros(len(text), bool)), images)
    yield {
        "prompt_ids": ids,
        **_noted([text], row[COLUMN], images, places),
        "length": len(ids),
    }


def prompted(tokenizer: Any, row: dict[str, Any], template: dict[str, Any], **how: Any) -> Any:
    """A prompt of turns under the template's arguments of all rows and of this one."""
    return tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, tools=row.get("tools") or None, **how,
        **template | (row.get("chat_template_kwargs") or {}),
    )  # fmt: skip


def _noted(
    texts: list[str], pictures: list[Any], images: list[Any], places: list[Span]
) -> dict[str, Any]:
    return {
        "texts": texts, COLUMN: pictures, SEEN: [seen_as(one) for one in images],
        "image_begins": [begin for begin, _ in places], "image_ends": [end for _, end in places],
    }  # fmt: skip


def seen_as(picture: Any) -> str:
    """A hash of a picture's numbers: another picture under the same name is another row."""
    return hashlib.blake2b(picture.tobytes(), digest_size=8).hexdigest() + str(picture.size)


# ----------------------------------------------------------------------------------- one text


def tokens_of(
    processor: Any, marked: Marked, images: list[Any]
) -> tuple[list[int], np.ndarray, list[Span]]:
    """(ids; which are trained on, [ids]; (begin, end) of each image, in ids).

    Raises:
        BadRowError: images and the places for them differ.
        ConfigError: the processor does not say where images stand.
    """
    text, on = marked
    try:
        found = as_read(
            processor, [text], [images],
            return_offsets_mapping=True, return_text_replacement_offsets=True,
        )  # fmt: skip
    except ValueError as error:
        raise BadRowError(str(error).splitlines()[0]) from error
    if "text_replacement_offsets" not in found:
        raise ConfigError(
            f"{type(processor).__name__} does not say where images stand in a text",
            where="model.name",
            why="what is trained on is found by that, and would be guessed without it",
            fix="another family, such as Qwen/Qwen3-VL-4B-Instruct; or rows of text alone",
        )
    swaps = next(iter(found["text_replacement_offsets"]), [])
    ids = list(found["input_ids"][0])
    begins, ends = np.asarray(found["offset_mapping"][0]).reshape(-1, 2).T
    kept, at, places = list[np.ndarray](), 0, list[Span]()
    for swap in swaps:
        (begin, end), (first, last) = swap["span"], swap["new_span"]
        kept += [on[at:begin], np.zeros(last - first, bool)]
        at = end
        inside = np.flatnonzero((begins >= first) & (begins < last))
        places.append((int(inside[0]), int(inside[-1]) + 1))
    before = np.concatenate([[0], *kept, on[at:]]).cumsum()
    of_images = {i for begin, end in places for i in range(begin, end)}
    marks = {*np.flatnonzero(np.isin(ids, processor.image_token_ids)).tolist()}
    if len(places) != len(images) or marks - of_images:
        raise BadRowError("its text has the token of an image where no image is meant")
    return ids, before[ends] > before[begins], places
