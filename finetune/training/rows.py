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

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from finetune.config.schema import DataConfig
from finetune.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset
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
SILENT = ("name", "thinking", "reasoning_content", "reasoning")
"""Keys of a turn that a template may leave out without making the turn another one."""
TRIED = 2000
"""Rows in which keys are looked for that a template may leave out."""

Converter = Callable[[dict[str, Any]], dict[str, Any]]


class _BadRowError(ValueError):
    """Row that cannot be converted; `_formatted` adds its position."""


def formatted(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, source: str, data: DataConfig
) -> tuple[str, Dataset, dict[int, str]]:
    """Recognized format, the rows in TRL's, and skipped rows with their reasons."""
    has_template = bool(tokenizer.chat_template)
    rows = _renamed(rows, data.columns, source)
    kind, convert = _recognize(rows, has_template, source)
    if kind == "tokenized":
        return kind, rows, {}
    if kind == "messages" and not has_template:
        raise DataError(
            "these rows are chat messages, and the model's tokenizer has no chat template",
            where=source,
            why="base models often have none, and nothing then says how turns become text",
            fix="take the -Instruct model, put a chat_template.jinja beside its tokenizer, or give "
            "rows with columns prompt and completion, or text",
        )

    def numbered(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return convert(row)
        except _BadRowError as error:
            raise DataError(
                f"row {index + 1} of {source} cannot be trained on",
                where=f"{source}: row {index + 1}",
                why=str(error),
                fix="fix or remove that row",
            ) from error

    refused: dict[int, str] = {}
    try:
        if data.on_bad_row == "skip":
            refused = _bad_rows(rows, convert)
            rows = rows.select([i for i in range(len(rows)) if i not in refused])
            if not len(rows):
                raise DataError(
                    f"no row of {source} can be trained on",
                    where=source,
                    why=f"the first: {next(iter(refused.values()))}",
                    fix=f"rows of one of: {FORMATS}",
                )
        return kind, _mapped(rows, numbered), refused
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 text", where=source, why=str(error), fix="save it as UTF-8"
        ) from error


def _renamed(rows: Dataset, names: dict[str, str], source: str) -> Dataset:
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
    found = {}
    for index, row in enumerate(rows):
        try:
            convert(dict(row))
        except _BadRowError as error:
            found[index] = f"row {index + 1}: {error}"
    return found


def _mapped(rows: Dataset, convert: Callable[..., dict[str, Any]]) -> Dataset:
    """Rows converted; turns keep exactly the keys that each has, whatever others have."""
    from datasets import Features, Json, List

    first = convert(dict(rows[0]), 0)
    of_turns = [key for key, value in first.items() if isinstance(value, list | dict)]
    features = None
    if of_turns:
        features = Features({key: List(Json()) if key in of_turns else Json() for key in first})
    return rows.map(
        convert,
        with_indices=True,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
        features=features,
    )


def unused_keys(rows: Dataset, tokenizer: Any, source: str) -> list[str]:
    """Keys of turns that the chat template leaves out, each tried on the first row that has it.

    Raises:
        DataError: it leaves out tools or tool calls: a turn that calls one would be empty.
    """
    seen: set[str] = set()
    notes = []
    few: Any = rows.select(range(min(len(rows), TRIED)))
    for index, row in enumerate(few):
        keys = {key for turn in row["messages"] for key in turn if turn[key]} - {"role", "content"}
        keys |= {"tools"} if row.get("tools") else set()
        for key in sorted(keys - seen):
            seen.add(key)
            if _rendered(row, tokenizer, "") != _rendered(row, tokenizer, key):
                continue
            if key in SILENT:
                notes.append(f"the chat template does not use {key!r} of a turn")
                continue
            raise DataError(
                f"the model's chat template does not use {key!r}",
                where=f"{source}: row {index + 1}",
                why="it would be left out in silence, and a turn that consists of it would train "
                "an empty answer",
                fix="take a model whose template knows tools, put a chat_template.jinja beside the "
                "tokenizer, or remove the key from the rows",
            )
    return notes


def _rendered(row: dict[str, Any], tokenizer: Any, without: str) -> str:
    """A conversation as text, without a key; what went wrong, if it cannot be rendered."""
    turns = [{k: v for k, v in turn.items() if k != without} for turn in row["messages"]]
    tools = None if without == "tools" else row.get("tools")
    try:
        return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _recognize(rows: Dataset, has_template: bool, source: str) -> tuple[str, Converter]:
    columns = set(rows.column_names)
    for column in ("messages", "conversations"):
        if column in columns:
            return "messages", partial(_messages, column, _is_exact(rows, column))
    if "input_ids" in columns:
        return "tokenized", dict
    for kind, (ask, answer) in PAIRS.items():
        if {ask, answer} <= columns:
            return kind, partial(_pair, ask, answer, has_template)
    if "chosen" in columns:
        return "preferred answers", partial(_preferred, has_template)
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


def _is_exact(rows: Dataset, column: str) -> bool:
    """True if turns hold the keys that their row gave them, as `datasets` reads mixed JSON.

    Where a column has one type, keys that only other rows have are there too, with None.
    """
    from datasets import Json

    feature: Any = rows.features[column]
    return isinstance(getattr(feature, "feature", feature), Json)


def _messages(column: str, exact: bool, row: dict[str, Any]) -> dict[str, Any]:
    """Turns, whole, and the tools that they may call."""
    given = row[column] or ()
    given = given if isinstance(given, list | tuple) else (given,)
    turns = [_turn(turn, exact=exact) for turn in given]
    if not any(turn["role"] == "assistant" for turn in turns):
        raise _BadRowError("no assistant turn, so there is nothing to learn")
    found: dict[str, Any] = {"messages": turns}
    tools = row.get("tools")
    if isinstance(tools, str):  # as some sets store them
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise _BadRowError(f"'tools' is not JSON: {error.msg}") from None
    if "tools" in row:
        found["tools"] = _without_none(tools)
    if isinstance(row.get("chat_template_kwargs"), dict):
        found["chat_template_kwargs"] = _without_none(row["chat_template_kwargs"])
    return found


def _turn(turn: Any, *, exact: bool = False) -> dict[str, Any]:
    """A turn in the form of chat templates, with everything that it holds."""
    if not isinstance(turn, dict):
        raise _BadRowError(f"a turn needs role and content, this one is {turn!r}")
    role = turn.get("role") or SHAREGPT_ROLES.get(turn.get("from", ""), turn.get("from"))
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value")}
    rest = rest if exact else _without_none(rest)
    if not role or (
        not isinstance(content, str | list) and not (content is None and any(rest.values()))
    ):
        raise _BadRowError(f"a turn needs role and content, this one is {turn}")
    for key in ("weight", "train", "loss"):
        if rest.pop(key, 1) not in (1, True):
            raise _BadRowError(
                f"{key}={turn[key]!r} on a turn: a turn's own weight is not supported, and to "
                "ignore it would train on it"
            )
    return {"role": role, "content": content, **rest}


def _without_none(value: Any) -> Any:
    """Without keys that only other rows have: a column of one type fills them with None."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _preferred(has_template: bool, row: dict[str, Any]) -> dict[str, Any]:
    """The preferred answer of a pair: `chosen` alone, or behind `prompt`."""
    if "prompt" in row:
        return _pair("prompt", "chosen", has_template, row)
    if isinstance(row["chosen"], list):
        if len(row["chosen"]) < 2:
            raise _BadRowError("'chosen' needs a question and an answer")
        turns = [_turn(turn) for turn in row["chosen"]]
        return {"prompt": turns[:-1], "completion": turns[-1:]}
    return {"text": _text(row, "chosen")}


def _pair(ask: str, answer: str, has_template: bool, row: dict[str, Any]) -> dict[str, Any]:
    if isinstance(row[ask], list):  # TRL's conversational prompt-completion
        if not row[ask] or not row[answer]:
            raise _BadRowError(f"{ask if not row[ask] else answer!r} is empty")
        return {"prompt": list(map(_turn, row[ask])), "completion": list(map(_turn, row[answer]))}
    prompt, completion = _text(row, ask), _text(row, answer)
    beside = next((row[key] for key in CONTEXT if row.get(key)), "") if ask == "instruction" else ""
    if beside:
        prompt = f"{prompt}\n\n{beside}"
    if not has_template:
        return {"prompt": f"{prompt}\n\n", "completion": completion}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
    }
