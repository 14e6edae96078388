"""Rows of every known format, mapped to one of TRL's own.

    columns                                      becomes
    messages | conversations (+ tools)           messages            (loss on the assistant's turns)
    prompt + completion                          prompt-completion   (loss on the completion)
    instruction (+ input | context) + output     prompt-completion   Alpaca, Dolly (`response`)
    question + answer, prompt + response, ...    prompt-completion
    chosen (+ prompt | instruction)              the preferred answer of a preference pair, said
                                                 (other methods: `finetune.data.preferences`)
    input_ids (+ labels)                         as it is: tokenized before
    text                                         text                (loss on every token)

A column `system` or `system_prompt` is the first turn, `history` the turns before the question.
A row whose `label` or `kto_tag` is false is refused: its answer is one not to give.

Turns reach the chat template whole, with tools, tool calls, reasoning and names. What the template
does not use is said, or refused where nothing would be left to learn.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.methods import FORMS, METHODS, Method
from finetune.config.schema import DataConfig
from finetune.data import checks, converters
from finetune.data.chat import TRIED, BadRowError, Takes, probe, refusal
from finetune.data.converters import (
    ASKED,
    CONTEXT,
    LABELS,
    PAIRS,
    PREFERRED,
    SYSTEM,
    TURNS,
    Converter,
)
from finetune.data.image_forms import (
    COLUMN,
    COLUMNS,
    IN_METADATA,
    Rules,
    files_state,
    marked,
    shows_images,
    with_images,
)
from finetune.data.images import references
from finetune.data.masks import TRAINED_TURNS, answers
from finetune.data.preferences import recognize
from finetune.errors import DataError, did_you_mean
from finetune.hardware.device import cores

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


CAPTIONS = "captions of images"
"""Format of rows with an image and a text, which is the answer."""


@dataclass(frozen=True)
class Form:
    """What rows are brought into a format by: columns by `data`, turns by the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    data: DataConfig
    vocabulary: int = checks.UNKNOWN
    method: Method = METHODS["sft"]
    """What the rows are for."""
    notes: list[str] = field(default_factory=list)
    """What is worth a warning."""
    images: bool = False
    """Contents are in parts, and rows have a column of images (`finetune.data.image_forms`)."""
    text_by: str = ""
    """Rows without an image, by which a model that takes images trains on text: others raise."""


def formatted(
    rows: Dataset, form: Form, source: str, rules: Rules
) -> tuple[str, Dataset, dict[int, str]]:
    """Recognized format, the rows in TRL's, and skipped rows with their reasons."""
    rows = _renamed(rows, form.data.columns, source)
    kind, convert = _recognize(rows, form, source)
    _note_folded(_as_text(rows, kind, form, rules), convert, form, source)
    if form.images:
        read = _text_columns(kind, rows.column_names)
        rules = replace(rules, state=files_state(rows, read, rules))
    convert = _with_images(kind, convert, rows, form, rules, source)
    skips, tokenized = form.data.on_bad_row == "skip", kind == "tokenized"
    refused: dict[int, str] = {}
    if skips or tokenized:
        template = form.tokenizer.chat_template  # another one refuses other rows
        name = made_by(rows, "reasons", *_arguments(convert), template)
        refused = _bad_rows(rows, _taken(convert, form.tokenizer), name)
        if refused and not skips:
            raise _refused(source, *next(iter(refused.items())))
        rows = _without(rows, refused, source)
    done = (
        rows
        if tokenized
        else mapped(rows, partial(_numbered, convert, source, 0), images=form.images)
    )
    return kind, done, _named(refused)


class SkippedLate:
    """Rows that are skipped while a stream is read, each counted once.

    Workers read whole streams in processes of their own, and streams start again at their end.

    Args:
        behind: rows at the begin of the stream that were counted before.
    """

    def __init__(self, behind: int) -> None:
        # Shared memory: workers of a data loader are processes of their own.
        self._seen = multiprocessing.Array("q", [behind - 1, 0])

    def __int__(self) -> int:
        return self._seen[1]

    def __deepcopy__(self, _: Any) -> SkippedLate:
        return self  # `datasets` copies streams: all of them count here

    def takes(self, convert: Converter, row: dict[str, Any], index: int) -> bool:
        """False of a row that cannot be trained on."""
        if not _problem(convert, row):
            return True
        with self._seen:
            # Once, though an epoch or several workers read a row several times: only what lies
            # further on is new.
            if index > self._seen[0]:
                self._seen[:] = [index, self._seen[1] + 1]
        return False


def formatted_stream(
    rows: IterableDataset,
    like: Dataset,
    form: Form,
    source: str,
    first: int,
    late: SkippedLate,
    rules: Rules,
) -> IterableDataset:
    """A stream in the format that its first rows, `like`, have been brought into.

    Args:
        first: position of the stream's first row in its source.
        late: counts rows that are skipped.
    """
    from datasets import Features, List, Value

    rows = _renamed(rows, form.data.columns, source)
    kind, convert = _recognize(rows, form, source)
    convert = _with_images(kind, convert, rows, form, rules, source)
    features = Features(like.features)
    if kind == "messages":
        features[TRAINED_TURNS] = List(Value("bool"))
    if form.data.on_bad_row == "skip":
        taken = _taken(convert, form.tokenizer)
        rows = rows.filter(partial(late.takes, taken), with_indices=True)
    return rows.map(
        partial(_numbered, convert, source, first),
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
    )


def _taken(convert: Converter, tokenizer: Any) -> Converter:
    """A converter that refuses turns which the chat template refuses or prints in part, too."""

    def checked(row: dict[str, Any]) -> dict[str, Any]:
        found = convert(row)
        turns = any(isinstance(found.get(key), list) for key in ("messages", "completion"))
        if turns and (why := refusal(found, tokenizer)):
            raise BadRowError(f"the chat template refuses it: {why}")
        if turns:
            answers(found, tokenizer)
        return found

    return checked if tokenizer.chat_template else convert


def _numbered(
    convert: Converter, source: str, first: int, row: dict[str, Any], index: int
) -> dict[str, Any]:
    """A converted row; its position is in the error of one that cannot be."""
    try:
        return convert(row)
    except BadRowError as error:
        raise _refused(source, first + index, str(error), error.fix) from error


def _refused(source: str, index: int, why: str, fix: str = "fix or remove that row") -> DataError:
    return DataError(
        f"row {index + 1} of {source} cannot be trained on",
        where=f"{source}: row {index + 1}",
        why=why,
        fix=f"{fix}, or skip and count such rows: data.on_bad_row=skip",
    )


def _problem(convert: Converter, row: dict[str, Any]) -> str:
    try:
        convert(dict(row))
    except BadRowError as error:
        return str(error)
    return ""


def _renamed(rows: Any, names: dict[str, str], source: str) -> Any:
    """The rows under the names that a format has."""
    for name in names.values():
        if name not in rows.column_names:
            raise DataError(
                f"{source} has no column {name!r}{did_you_mean(name, rows.column_names)}",
                where="data.columns",
                why=f"columns found: {', '.join(sorted(rows.column_names))}",
                fix="'data.columns={prompt: NAME, completion: NAME}', with names of the file",
            )
    given = [*names.values()]
    if twice := [name for name in given if given.count(name) > 1]:
        raise DataError(
            f"the column {twice[0]!r} of {source} cannot be two",
            where="data.columns",
            why=f"it stands for {', '.join(key for key in names if names[key] == twice[0])}",
            fix="write it into the file twice, under two names, or name another column",
        )
    in_the_way = [name for name in names if name in rows.column_names and name not in given]
    changed = {old: new for new, old in names.items() if old != new}
    # In two steps: columns of a stream cannot change places (datasets 5.0).
    aside = {old: f"{old}, as given" for old in changed}
    rows = rows.remove_columns(in_the_way).rename_columns(aside)
    return rows.rename_columns({aside[old]: new for old, new in changed.items()})


def _bad_rows(rows: Dataset, convert: Converter, name: str) -> dict[int, str]:
    """Index of every row that cannot be converted -> the reason."""
    from datasets import Features, Value

    def reason(row: dict[str, Any]) -> dict[str, str]:
        return {"reason": _problem(convert, row)}

    found = rows.map(
        reason, remove_columns=rows.column_names, num_proc=workers(len(rows)),
        features=Features({"reason": Value("string")}), new_fingerprint=name,
        desc="checking",
    )  # fmt: skip
    reasons: Any = found["reason"]
    return {i: text for i, text in enumerate(reasons) if text}


def _named(refused: dict[int, str]) -> dict[int, str]:
    return {index: f"row {index + 1}: {why}" for index, why in refused.items()}


def _without(rows: Dataset, refused: dict[int, str], source: str) -> Dataset:
    """The rows that can be trained on; a `DataError` if none can."""
    if not refused:
        return rows
    kept = rows.select([i for i in range(len(rows)) if i not in refused])
    if not len(kept):
        raise DataError(
            f"no row of {source} can be trained on",
            where=source,
            why=f"the first: {next(iter(_named(refused).values()))}",
            fix=f"rows of one of: {FORMS['answers']}",
        )
    return kept


def _recognize(rows: Any, form: Form, source: str) -> tuple[str, Converter]:
    columns = set(rows.column_names)
    takes = None
    if form.tokenizer.chat_template:
        takes = probe(form.tokenizer, in_parts=form.images)
    if "answers" not in form.method.rows:
        return recognize(columns, form.method, takes, source)
    for column in TURNS:
        if column in columns and takes is None:
            raise DataError(
                "these rows are chat messages, and the model's tokenizer has no chat template",
                where=source,
                why="base models often have none, and nothing then says how turns become text",
                fix="take the -Instruct model, or give it a template: "
                "train.chat_template_path=FILE.jinja, or =MODEL whose template to take; or give "
                "rows with columns prompt and completion, or text",
            )
        if column in columns:
            return "messages", partial(converters.messages, column, _is_exact(rows, column), takes)
    if "input_ids" in columns:
        checks.check_columns(rows, source)
        return "tokenized", partial(converters.tokenized, form.vocabulary)
    for kind, (ask, answer) in PAIRS.items():
        if {ask, answer} <= columns:
            return kind, partial(converters.pair_of, ask, answer, takes)
    if "chosen" in columns:
        return PREFERRED, partial(converters.preferred, takes)
    if "text" in columns:
        return CAPTIONS if form.images else "text", converters.as_text
    raise DataError(
        f"no prompt and answer columns found in {source}",
        where=source,
        why=f"columns found: {', '.join(sorted(columns))}",
        fix=f"{_likely_columns(rows)}; or rename them to one of: {FORMS['answers']}",
    )


def _with_images(
    kind: str, convert: Converter, rows: Any, form: Form, rules: Rules, source: str
) -> Converter:
    """A converter of text that serves rows with images, or refuses them where it would not see."""
    if not form.images:
        guarded = partial(_refusing_images, rules.columns, form.text_by, convert)
        return guarded if form.text_by else convert
    return partial(with_images, convert, _text_columns(kind, rows.column_names), rules)


def _refusing_images(
    columns: tuple[str, ...], text_by: str, convert: Converter, row: dict[str, Any]
) -> dict[str, Any]:
    if shows_images([row], columns):
        raise BadRowError(
            f"it has an image, and {text_by} have none: the run was taken for one of text",
            "put a row with an image among them (data.streaming=false looks at all rows)",
        )
    return convert(row)


def _text_columns(kind: str, given: Any) -> tuple[str, ...]:
    """Columns that turns are made of, by the recognized format."""
    if kind == "prompts":
        return (*SYSTEM, *(TURNS if {*TURNS} & {*given} else (*ASKED, *CONTEXT, "history")))
    return tuple(_known(kind, given))


def _likely_columns(rows: Any) -> str:
    """The setting that names prompt and answer: the two longest texts, in their order."""
    first = list(itertools.islice(rows, 100))
    size = {
        name: sum(len(row[name]) for row in first if isinstance(row[name], str))
        for name in rows.column_names
    }
    # Question and answer are nearly always the longest texts of a row.
    longest = sorted(filter(size.get, size), key=lambda name: -size[name])[:2]
    ask, answer = sorted(longest, key=rows.column_names.index) if longest[1:] else ("NAME", "NAME")
    return f"'data.columns={{prompt: {ask}, completion: {answer}}}'"


def _as_text(rows: Any, kind: str, form: Form, rules: Rules) -> Iterator[dict[str, Any]]:
    """The first rows as the converters of text take them."""
    read = _text_columns(kind, rows.column_names) if form.images else ()
    for row in itertools.islice(rows, TRIED):
        with contextlib.suppress(BadRowError):
            yield marked(read, rules, row)[0] if form.images else dict(row)


def _note_folded(rows: Iterable[Any], convert: Converter, form: Form, source: str) -> None:
    """Say it where the text of a system's turn is moved before the first question."""
    if not isinstance(convert, partial):
        return
    takes = convert.args[-1]
    if not isinstance(takes, Takes) or takes.system:
        return
    whole = partial(convert.func, *convert.args[:-1], replace(takes, system=True))
    for row in rows:
        with contextlib.suppress(BadRowError):
            if whole(dict(row)) != convert(dict(row)):
                form.notes.append(
                    f"the chat template has no system role: the system's text in {source} stands "
                    "before the first question"
                )
                return


def unused_columns(
    given: list[str], made: list[str], kind: str, names: dict[str, str]
) -> list[str]:
    """Columns of a source that are neither trained on nor known to be beside what is.

    Args:
        given, made: columns before and after the rows were brought into the format.
        kind: recognized format.
        names: `data.columns`.
    """
    beside = {"tools", "chat_template_kwargs"} & {*made}
    images = {*COLUMNS, *IN_METADATA} if COLUMN in made else set()
    read = {names.get(name, name) for name in (*_known(kind, given), *beside, *images)}
    return [name for name in given if name not in read]


def _known(kind: str, given: list[str]) -> list[str]:
    """Columns that rows of a format are made of."""
    return (
        {
            "tokenized": given,  # a data collator may take any of them
            "messages": ["messages" if "messages" in given else "conversations", *SYSTEM],
            PREFERRED: [*ASKED, "chosen", *CONTEXT, *SYSTEM],
            "preference": [*ASKED, "chosen", "rejected", *CONTEXT, *SYSTEM],
            "unpaired": [*itertools.chain(*PAIRS.values()), *TURNS, *LABELS, *CONTEXT, *SYSTEM],
            "prompts": given,  # a reward may look at any of them
            "text": ["text"],
            CAPTIONS: ["text"],
        }.get(kind)
        or [*PAIRS[kind], *CONTEXT[: 2 * (PAIRS[kind][0] == "instruction")], *SYSTEM, "history"]
    )


def _is_exact(rows: Any, column: str) -> bool:
    """True if turns hold the keys that their row gave them, as `datasets` reads mixed JSON.

    Where a column has one type, keys that only other rows have are there too, with None.
    """
    from datasets import Json

    feature: Any = rows.features[column]
    return isinstance(getattr(feature, "feature", feature), Json)


# ------------------------------------------------------------------- maps, cached by `datasets`

MANY, MOST = 20_000, 16
"""Rows from which on several processes convert and tokenize, and the most of these."""


def workers(count: int) -> int | None:
    """Processes that so many rows are worth; None: this one alone."""
    return min(cores(), MOST) if count >= MANY and cores() > 1 else None


def made_by(rows: Dataset, *what: Any) -> str:
    """Name of converted rows in the cache of `datasets`: of the rows, and of the code for them."""
    names = ("rows.py", "converters.py", "preferences.py", "chat.py", "checks.py", "masks.py")
    names += ("images.py", "image_forms.py")
    files = [Path(__file__).with_name(name) for name in names]
    # `datasets` would hash the functions by their pickles, which do not see what they call.
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return hashlib.sha256(repr((rows._fingerprint, code, *what)).encode()).hexdigest()[:16]


def mapped(rows: Dataset, convert: Any, *, images: bool = False) -> Dataset:
    """Rows converted; turns keep exactly the keys that each has, whatever others have."""
    import pyarrow.compute as pc

    first = convert(dict(rows[0]), 0)
    done = rows.map(
        convert,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=workers(len(rows)),
        features=_features(first, rows.features, images),
        # A batch is in memory, with the bytes of its pictures.
        writer_batch_size=100 if images else 1000,
        new_fingerprint=made_by(rows, *_arguments(convert)),
        desc="converting",
    )
    if TRAINED_TURNS in done.column_names:
        flags = done.data.table.column(TRAINED_TURNS)
        if all(pc.all(chunk.flatten()).as_py() is not False for chunk in flags.chunks):
            return done.remove_columns(TRAINED_TURNS)
    return done


def _arguments(convert: Any) -> Iterator[Any]:
    """Functions and arguments that a converter is made of, for a name in the cache."""
    if isinstance(convert, partial):
        for part in (convert.func, *convert.args):
            yield from _arguments(part)
    else:
        yield getattr(convert, "__name__", convert)


def _features(first: dict[str, Any], given: Any, images: bool) -> Any:
    """Columns of converted rows, by the first of them; others stay of the type that they have."""
    from datasets import Features, Json, List, Value

    lists = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
    made = {*lists, "text", "label", "chat_template_kwargs", TRAINED_TURNS}
    found: dict[str, Any] = {
        key: given[key]
        if key in given and key not in made
        else Value("string")  # as JSON, the text "7" would be read as a number
        if isinstance(value, str)
        else (List(Json()) if key in lists else Json())
        for key, value in first.items()
    }
    if TRAINED_TURNS in first:
        found[TRAINED_TURNS] = List(Value("bool"))
    if "label" in first:
        found["label"] = Value("bool")
    if images:
        found[COLUMN] = references()
    return Features(found)
