"""Questions: text, with images where the model takes them, as the inputs of `generate`.

    Question(("harbour.jpg", "Which signal?"))
        turn      {"role": "user", "content": [{"type": "image", ...}, {"type": "text", ...}]}
        encode    the template's text, then the processor: ids, mask, pixel values and what else
                  the family needs; of a turn without images the tokenizer alone

An image is in its turn, as Transformers has it in a conversation, so that a turn which is dropped
takes its images along.

Limits: images of the assistant's turns are not asked with.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.paths import user_path
from finetune.data.chat import BadRowError, as_content, rendered, turns_of
from finetune.errors import ConfigError, first_line
from finetune.storage.processors import as_read, reads_text, tokenizer_of

SIDE, QUALITY = 320, 85
"""Longest side in pixels, and JPEG quality, of the small copies that a report shows: some 15 kB."""
BEGINNING = 64
"""Characters of a text without a question that a model can continue in its style."""


@dataclass(frozen=True)
class Question:
    """What a model is asked.

    Attributes:
        parts: text, and images as rows refer to them (`finetune.data.images`) or opened, in order.
        expected: the answer that the question's row has.
    """

    parts: tuple[Any, ...]
    expected: str = ""

    @classmethod
    def of(cls, prompt: str | Question) -> Question:
        return cls((prompt,)) if isinstance(prompt, str) else prompt

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> list[Any]:
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells questions of rows apart."""
        parts = (p if isinstance(p, str) else (p["path"], p["bytes"]) for p in self.parts)
        return tuple(map(hash, parts))

    def opened(self) -> Question:
        """The same with its images read, once for all evaluations: files may go.

        Raises:
            BadRowError: says what is wrong with one.
        """
        from finetune.data.images import opened

        whole = (opened(p) if isinstance(p, dict) else p for p in self.parts)
        return replace(self, parts=tuple(whole))

    @property
    def turn(self) -> dict[str, Any]:
        """The user's turn; its content is text where there is no image."""
        if not self.images:
            return {"role": "user", "content": self.text}
        content = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
            for p in self.parts
        ]
        return {"role": "user", "content": content}

    def keep_copies(self, folder: Path, name: str) -> tuple[str, ...]:
        """Write small copies of the images, `samples/<name>-1.jpg`; return their names."""
        names = [f"samples/{name}-{i}.jpg" for i in range(1, len(self.images) + 1)]
        for file, image in zip(names, self.images, strict=True):
            small = image.convert("RGB")  # a copy
            small.thumbnail((SIDE, SIDE))
            (folder / "samples").mkdir(exist_ok=True)
            small.save(folder / file, quality=QUALITY)
        return tuple(names)


def question_of(row: dict[str, Any]) -> Question:
    """A row's question: its first user turn, its prompt, or the start of its text."""
    given = row.get("messages") or row.get("prompt") or row.get("text", "")[:BEGINNING]
    if isinstance(given, str):
        return Question((given,))
    told = [*_told(row)]
    place = next((i for i, (role, _) in enumerate(told) if role == "user"), None)
    if place is None:
        return Question((told[0][1].text[:BEGINNING],))
    asked = told[place][1]
    if not asked.images:
        return Question((asked.text,))
    return replace(asked, expected=told[place + 1][1].text if told[place + 1 :] else "")


def asked_of(row: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Turns before a row's first answer, their images opened, and that answer.

    Nothing of a row without turns, and of one whose answer may call a tool.

    Raises:
        BadRowError: says what is wrong with an image.
    """
    asked = list[dict[str, Any]]()
    of_turns = isinstance(row.get("messages") or row.get("prompt"), list)
    for role, found in _told(row) if of_turns and not row.get("tools") else ():
        if role == "assistant":
            return asked, found.text
        asked.append(found.opened().turn | {"role": role})
    return [], ""


def _told(row: dict[str, Any]) -> Iterator[tuple[str, Question]]:
    """Turns of a row, by role: text and images, these taken off those of the row."""
    images = iter(row.get("images") or ())
    for turn in turns_of(row):
        content = as_content(turn.get("content") or "", in_parts=True)
        parts = (next(images) if p["type"] == "image" else p["text"] or "" for p in content)
        yield turn["role"], Question(tuple(parts))


# -------------------------------------------------------------------------------------- as inputs


def reads_images(reader: Any) -> bool:
    """True of a processor; a tokenizer reads text alone."""
    return hasattr(reader, "image_processor")


def length_of(reader: Any, prompt: str | Question) -> int:
    """Tokens of a question in its template, its images' included; 0 of an empty one."""
    asked = Question.of(prompt)
    empty = not asked.text and not asked.images
    return 0 if empty else encode(reader, asked)["input_ids"].shape[1]


def encode(reader: Any, prompt: str | Question | list[dict[str, Any]]) -> dict[str, Any]:
    """Inputs of `generate` for a question, or for turns behind which an answer is due.

    Without a chat template a prompt is text, and turns are the text that they make together.

    Args:
        reader: a tokenizer, or the processor of a model that takes images.

    Returns:
        Token ids and mask, [1, T]; with images also what the processor makes of them.

    Raises:
        ConfigError: images for a model that takes none, or one that its processor refuses.
    """
    tokenizer = tokenizer_of(reader)
    turns = prompt if isinstance(prompt, list) else [Question.of(prompt).turn]
    contents = [turn["content"] for turn in turns]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part["image"] for part in parts if part["type"] == "image"]
    if images:
        refuse_images(reader)
    if bare := not tokenizer.chat_template:
        text = "".join(contents)
    else:  # which writes the special tokens, too
        printed = _as_printed(turns, tokenizer)
        text = tokenizer.apply_chat_template(printed, add_generation_prompt=True, tokenize=False)
    if not images:
        found = tokenizer(text, return_tensors="pt", add_special_tokens=bare)
        return {key: found[key] for key in ("input_ids", "attention_mask") if key in found}
    try:
        return dict(as_read(reader, [text], [images], return_tensors="pt"))
    except ValueError as error:
        sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
        raise ConfigError(
            "the model's processor refuses an image",
            where=f"{sizes} pixels",
            why=first_line(error),
            fix="an image of usual sides, or fewer of them",
        ) from error


def refuse_images(reader: Any) -> None:
    """Reject images for a model that reads text alone, or has no place for them.

    Raises:
        ConfigError: it takes none.
    """
    tokenizer = tokenizer_of(reader)
    if not reads_images(reader):
        raise reads_text(str(tokenizer.name_or_path))
    if not tokenizer.chat_template:
        raise ConfigError(
            "there is no chat template to place images",
            where=str(tokenizer.name_or_path),
            fix="ask without one, or train the run with train.chat_template_path",
        )


def _as_printed(turns: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Turns whose text is in parts for the roles of which the template prints parts alone.

    LLaVA's loops over the parts of a turn; a text's are its letters, which it leaves out in
    silence. Pixtral's joins an answer to the end token, which only a text can be.
    """
    probes = [{"role": role, "content": f"probed {role}"} for role in ("user", "assistant")]
    forms = probes, [_in_parts(turn) for turn in probes]
    as_text, as_parts = (rendered([*form, form[0]], [], tokenizer) for form in forms)
    silent = {turn["role"] for turn in probes if turn["content"] not in as_text}
    if not any(f"probed {role}" in as_parts for role in silent):
        return turns
    silent |= {"system"} if "user" in silent else set()
    return [_in_parts(turn) if turn["role"] in silent else turn for turn in turns]


def _in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    return turn | {"content": as_content(turn["content"], in_parts=True)}


# ------------------------------------------------------------------------------------- from a file


def image_in(typed: str) -> Any:
    """The image in a file whose name was typed: with `~`, in quotes, or with escaped spaces.

    Raises:
        ConfigError: no such file, or none that is an image.
    """
    from finetune.data.images import opened

    if not (names := [typed.strip()])[0]:
        raise ConfigError("no image is named", where="/image", fix="/image FILE")
    with contextlib.suppress(ValueError):  # an apostrophe in a name is no quote
        names.append(" ".join(shlex.split(typed)))
    files = [user_path(name) for name in names]
    file = next((file for file in files if file.is_file()), files[-1])
    try:
        return opened({"bytes": None, "path": str(file.absolute())})
    except BadRowError as error:
        why = "a URL is no file: nothing is fetched" if "://" in names[-1] else str(error)
        raise ConfigError(
            f"the image {names[-1]!r} cannot be read",
            where=str(file.absolute()),
            why=why,
            fix="give the file of an image",
        ) from error
