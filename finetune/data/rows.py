"""Rows of every known format, mapped to one of TRL's own.

    columns                                      becomes
    messages | conversations (+ tools)           messages            (loss on the assistant's turns)
    prompt + completion                          prompt-completion   (loss on the completion)
    instruction (+ input | context) + output     prompt-completion   Alpaca, Dolly (`response`)
    question + answer, prompt + response, ...    prompt-completion
    chosen (+ prompt)                            the preferred answer of a preference pair
    input_ids (+ labels)                         as it is: tokenized before
    text                                         text                (loss on every token)

Turns reach the chat template whole, with tools, tool calls, reasoning and names. What the template
does not use is said, or refused where nothing would be left to learn.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.schema import DataConfig
from finetune.data.templates import null_content, refusal, training_template
from finetune.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

FORMATS = "messages; prompt and completion; instruction, input and output (Alpaca); text"
PAIRS = {
    "prompt-completion": ("prompt", "completion"),
    "prompt-response": ("prompt", "response"),
    "question-answer": ("question", "answer"),
    "question-response": ("question", "response"),
    "query-response": ("query", "response"),
    "query-answer": ("query", "answer"),
    "Alpaca": ("instruction", "output"),
    "Dolly": ("instruction", "response"),
    "input-output": ("input", "output"),
}
"""Columns of question and answer by format."""
CONTEXT = ("input", "context")
"""Columns that an instruction may have beside it."""
SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool",
}  # fmt: skip
FLAGS = ("weight", "train", "loss")
"""Keys of a turn that say if it is trained on, with 0 and 1 or a truth value."""
TRAINED_TURNS = "trained_turns"
"""Column with a truth value for each turn of the assistant, where not all of them are true."""
MANY, MOST = 20_000, 16
"""Rows from which on several processes convert and tokenize, and the most of these."""

Converter = Callable[[dict[str, Any]], dict[str, Any]]
Null = dict[str, Any]
"""What a turn without content has for it, as its template takes it."""


class _BadRowError(ValueError):
    """Row that cannot be converted; `_formatted` adds its position."""


def formatted(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, source: str, data: DataConfig
) -> tuple[str, Dataset, dict[int, str]]:
    """Recognized format, the rows in TRL's, and skipped rows with their reasons."""
    rows = _renamed(rows, data.columns, source)
    kind, convert = _recognize(rows, tokenizer, source)
    if kind == "tokenized":
        return kind, rows, {}
    refused: dict[int, str] = {}
    try:
        if data.on_bad_row == "skip":
            refused = _bad_rows(rows, _taken(convert, kind, tokenizer))
            rows = rows.select([i for i in range(len(rows)) if i not in refused])
            if not len(rows):
                raise DataError(
                    f"no row of {source} can be trained on",
                    where=source,
                    why=f"the first: {next(iter(refused.values()))}",
                    fix=f"rows of one of: {FORMATS}",
                )
        return kind, _mapped(rows, partial(_numbered, convert, source, 0)), refused
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 text", where=source, why=str(error), fix="save it as UTF-8"
        ) from error


def formatted_stream(
    rows: IterableDataset, like: Dataset, tokenizer: Any, source: str, data: DataConfig, first: int
) -> IterableDataset:
    """A stream in the format that its first rows, `like`, have been brought into.

    Args:
        first: position of the stream's first row in its source.
    """
    from datasets import Features, List, Value

    rows = _renamed(rows, data.columns, source)
    kind, convert = _recognize(rows, tokenizer, source)
    if kind == "tokenized":
        return rows
    features = Features(like.features)
    if kind == "messages":
        features[TRAINED_TURNS] = List(Value("bool"))
    if data.on_bad_row == "skip":
        taken = _taken(convert, kind, tokenizer)
        rows = rows.filter(lambda row: not _problem(taken, row))
    return rows.map(
        partial(_numbered, convert, source, first),
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
    )


def _taken(convert: Converter, kind: str, tokenizer: Any) -> Converter:
    """A converter that refuses turns which the chat template refuses, too."""
    template = training_template(tokenizer) if kind == "messages" else None

    def checked(row: dict[str, Any]) -> dict[str, Any]:
        found = convert(row)
        turns = any(isinstance(found.get(key), list) for key in ("messages", "completion"))
        if turns and (why := refusal(found, tokenizer, template)):
            raise _BadRowError(f"the chat template refuses it: {why}")
        return found

    return checked if tokenizer.chat_template else convert


def _numbered(
    convert: Converter, source: str, first: int, row: dict[str, Any], index: int
) -> dict[str, Any]:
    """A converted row; its position is in the error of one that cannot be."""
    try:
        return convert(row)
    except _BadRowError as error:
        number = first + index + 1
        raise DataError(
            f"row {number} of {source} cannot be trained on",
            where=f"{source}: row {number}",
            why=str(error),
            fix="fix or remove that row, or skip and count such rows: data.on_bad_row=skip",
        ) from error


def _problem(convert: Converter, row: dict[str, Any]) -> str:
    try:
        convert(dict(row))
    except _BadRowError as error:
        return str(error)
    return ""


def _renamed(rows: Any, names: dict[str, str], source: str) -> Any:
    """The rows under the names that a format has.

    Raises:
        DataError: `data.columns` names a column that is not there.
    """
    for name in names.values():
        if name not in rows.column_names:
            raise DataError(
                f"{source} has no column {name!r}{did_you_mean(name, rows.column_names)}",
                where="data.columns",
                why=f"columns found: {', '.join(sorted(rows.column_names))}",
                fix="data.columns={prompt: NAME, completion: NAME}, with names of the file",
            )
    in_the_way = [name for name in names if name in rows.column_names and names[name] != name]
    return rows.remove_columns(in_the_way).rename_columns(
        {old: new for new, old in names.items() if old != new}
    )


def _bad_rows(rows: Dataset, convert: Converter) -> dict[int, str]:
    """Index of every row that cannot be converted -> the reason."""
    from datasets import Features, Value

    def reason(row: dict[str, Any]) -> dict[str, str]:
        return {"reason": _problem(convert, row)}

    found = rows.map(
        reason, remove_columns=rows.column_names, num_proc=workers(len(rows)),
        features=Features({"reason": Value("string")}), new_fingerprint=_made_by(rows, "reasons"),
    )  # fmt: skip
    reasons: Any = found["reason"]
    return {i: f"row {i + 1}: {text}" for i, text in enumerate(reasons) if text}


def workers(count: int) -> int | None:
    """Processes that so many rows are worth; None: this one alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST) if count >= MANY and (cores or 1) > 1 else None


def _made_by(rows: Dataset, *what: Any) -> str:
    """Name of converted rows in the cache of `datasets`: of the rows, and of this file's code."""
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return hashlib.sha256(repr((rows._fingerprint, code, *what)).encode()).hexdigest()[:16]


def _mapped(rows: Dataset, convert: Any) -> Dataset:
    """Rows converted; turns keep exactly the keys that each has, whatever others have."""
    import pyarrow.compute as pc

    first = convert(dict(rows[0]), 0)
    done = rows.map(
        convert,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=workers(len(rows)),
        features=_features(first),
        new_fingerprint=_made_by(rows, *_arguments(convert)),
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


def _features(first: dict[str, Any]) -> Any:
    """Columns of converted rows, by the first of them; None where `datasets` finds them itself."""
    from datasets import Features, Json, List, Value

    if not any(isinstance(value, list | dict) for value in first.values()):
        return None
    lists = ("messages", "prompt", "completion", "tools")
    found: dict[str, Any] = {key: List(Json()) if key in lists else Json() for key in first}
    if TRAINED_TURNS in first:
        found[TRAINED_TURNS] = List(Value("bool"))
    return Features(found)


def _check_ids(rows: Any, source: str) -> None:
    """Refuse columns of tokenized rows that are no lists of whole numbers.

    Raises:
        DataError: names the column and its type.
    """
    for name in sorted({"input_ids", "labels"} & set(rows.features or ())):
        feature = rows.features[name]
        kind = getattr(getattr(feature, "feature", None), "dtype", "")
        if not str(kind).startswith(("int", "uint")):
            raise DataError(
                f"{name!r} of {source} is no list of token ids",
                where=source,
                why=f"its type is {str(feature)[:200]}",
                fix="whole numbers, one list a row, or text in columns prompt and completion",
            )


def _recognize(rows: Any, tokenizer: Any, source: str) -> tuple[str, Converter]:
    columns = set(rows.column_names)
    null = null_content(tokenizer) if tokenizer.chat_template else None
    for column in ("messages", "conversations"):
        if column in columns and null is None:
            raise DataError(
                "these rows are chat messages, and the model's tokenizer has no chat template",
                where=source,
                why="base models often have none, and nothing then says how turns become text",
                fix="take the -Instruct model, put a chat_template.jinja beside its tokenizer, or "
                "give rows with columns prompt and completion, or text",
            )
        if column in columns:
            return "messages", partial(_messages, column, _is_exact(rows, column), null)
    if "input_ids" in columns:
        _check_ids(rows, source)
        return "tokenized", dict
    for kind, (ask, answer) in PAIRS.items():
        if {ask, answer} <= columns:
            return kind, partial(_pair, ask, answer, null)
    if "chosen" in columns:
        return "preferred answers", partial(_preferred, null)
    if "text" in columns:
        return "text", lambda row: {"text": _text(row, "text")}
    raise DataError(
        f"the columns of {source} are not a format that can be trained on",
        where=source,
        why=f"columns found: {', '.join(sorted(columns))}",
        fix=f"rename them to one of: {FORMATS}",
    )


def _text(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        empty = value is None or isinstance(value, str)
        raise _BadRowError(f"{column!r} is {'empty' if empty else type(value).__name__}")
    return value


def _is_exact(rows: Any, column: str) -> bool:
    """True if turns hold the keys that their row gave them, as `datasets` reads mixed JSON.

    Where a column has one type, keys that only other rows have are there too, with None.
    """
    from datasets import Json

    feature: Any = rows.features[column]
    return isinstance(getattr(feature, "feature", feature), Json)


def _messages(column: str, exact: bool, null: Null | None, row: dict[str, Any]) -> dict[str, Any]:
    """Turns, whole, and the tools that they may call."""
    given = row[column] or ()
    given = given if isinstance(given, list | tuple) else (given,)
    turns = [_turn(turn, exact=exact) for turn in given]
    trained = [_is_trained(turn) for turn in turns if turn["role"] == "assistant"]
    if not trained:
        raise _BadRowError("no assistant turn, so there is nothing to learn")
    if not any(trained):
        raise _BadRowError("no assistant turn is to be trained on")
    plain = [_plain(turn, null or {}) for turn in turns]
    return {"messages": plain, TRAINED_TURNS: trained, **_beside(row)}


def _plain(turn: dict[str, Any], null: Null) -> dict[str, Any]:
    """A turn without flags, and with null content as the template takes it."""
    found = {key: value for key, value in turn.items() if key not in FLAGS}
    if found["content"] is None:
        del found["content"]
        return {"role": found.pop("role"), **null, **found}
    return found


def _is_trained(turn: dict[str, Any]) -> bool:
    """True unless a flag of the turn is 0 or false.

    Raises:
        _BadRowError: a weight between, which no mask can express.
    """
    given = {key: turn[key] for key in FLAGS if turn.get(key) is not None}
    for key, value in given.items():
        if value not in (0, 1):
            raise _BadRowError(f"{key}={value!r} on a turn: only 0 and 1 can be honored")
    return all(given.values())


def _beside(row: dict[str, Any]) -> dict[str, Any]:
    """Columns beside the turns that a template takes: tools, and arguments of its own."""
    found: dict[str, Any] = {}
    if "tools" in row:
        tools = row["tools"]
        if isinstance(tools, str):  # as some sets store them
            try:
                tools = json.loads(tools) if tools.strip() else []
            except json.JSONDecodeError as error:
                raise _BadRowError(f"'tools' is not JSON: {error.msg}") from None
        found["tools"] = _without_none(tools) or []
        if not isinstance(found["tools"], list) or not all(map(_is_tool, found["tools"])):
            raise _BadRowError("'tools' is no list of tools")
    if "chat_template_kwargs" in row:
        found["chat_template_kwargs"] = _without_none(row["chat_template_kwargs"] or {})
    return found


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict | str)


def _turn(turn: Any, *, exact: bool = False) -> dict[str, Any]:
    """A turn in the form of chat templates, with everything that it holds."""
    if not isinstance(turn, dict):
        raise _BadRowError(f"a turn needs role and content, this one is {turn!r}")
    role = turn.get("role") or turn.get("from")
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
    rest = rest if exact else _without_none(rest)
    if not role or (
        not isinstance(content, str | list)
        and not (content is None and any(rest[key] for key in rest if key not in FLAGS))
    ):
        raise _BadRowError(f"a turn needs role and content, this one is {turn}")
    return {"role": role, "content": content, **rest}


def _without_none(value: Any) -> Any:
    """Without keys that only other rows have: a column of one type fills them with None."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _preferred(null: Null | None, row: dict[str, Any]) -> dict[str, Any]:
    """The preferred answer of a pair: `chosen` alone, or behind `prompt`."""
    if "prompt" in row and isinstance(row["prompt"], str) and isinstance(row["chosen"], list):
        row = {"chosen": row["chosen"]}  # the turns hold the prompt, as TRL's own examples
    if "prompt" in row:
        return _pair("prompt", "chosen", null, row)
    if isinstance(row["chosen"], list):
        if len(row["chosen"]) < 2:
            raise _BadRowError("'chosen' needs a question and an answer")
        turns = row["chosen"]
        return _turns_pair(turns[:-1], turns[-1:], null, row)
    return {"text": _text(row, "chosen")}


def _pair(ask: str, answer: str, null: Null | None, row: dict[str, Any]) -> dict[str, Any]:
    if isinstance(row[ask], list):  # TRL's conversational prompt-completion
        if not row[ask] or not row[answer]:
            raise _BadRowError(f"{ask if not row[ask] else answer!r} is empty")
        return _turns_pair(row[ask], row[answer], null, row)
    prompt, completion = _text(row, ask), _text(row, answer)
    beside = next((row[key] for key in CONTEXT if row.get(key)), "") if ask == "instruction" else ""
    if beside:
        prompt = f"{prompt}\n\n{beside}"
    if null is None:
        return {"prompt": f"{prompt}\n\n", "completion": completion}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
    }


def _turns_pair(ask: Any, answer: Any, null: Null | None, row: dict[str, Any]) -> dict[str, Any]:
    """Turns up to an answer, and the turns of the answer, which are all trained on."""
    if null is None:
        raise _BadRowError("its turns need a chat template, and the tokenizer has none")
    prompt, completion = list(map(_turn, ask)), list(map(_turn, answer))
    others = [turn["role"] for turn in completion if turn["role"] != "assistant"]
    if others:
        raise _BadRowError(
            f"the completion has a turn of {others[0]!r}, which would be trained on; give messages"
        )
    if not all(map(_is_trained, completion)):
        raise _BadRowError("the completion is not to be trained on")
    return {
        "prompt": [_plain(turn, null) for turn in prompt],
        "completion": [_plain(turn, null) for turn in completion],
        **_beside(row),
    }
