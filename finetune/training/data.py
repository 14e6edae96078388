"""From `DataConfig` to the rows that `SFTTrainer` expects.

A format is recognized by its columns and shown; rows are mapped to one of TRL's own formats, and
tokenizing, masking and packing are TRL's.

    columns                             becomes
    messages | conversations            messages            (loss on the assistant's turns)
    prompt + completion                 prompt-completion   (loss on the completion)
    instruction (+ input) + output      prompt-completion   Alpaca
    question + answer, prompt + response  prompt-completion
    text                                text                (loss on every token)
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.schema import BUILTIN, DataConfig, ModelConfig
from finetune.errors import DataError, DataNotFoundError, did_you_mean
from finetune.training.model import ASSETS, load_shape

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
FORMATS = "messages; prompt and completion; instruction, input and output (Alpaca); text"
ADD_ROWS = 'add rows, such as {"prompt": "Where?", "completion": "Here."}'
PAIRS = {
    "prompt-completion": ("prompt", "completion"),
    "prompt-response": ("prompt", "response"),
    "question-answer": ("question", "answer"),
    "Alpaca": ("instruction", "output"),
}
"""Columns of question and answer by format."""
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user"}


@dataclass(frozen=True)
class Rows:
    """Training and evaluation rows in one of TRL's formats.

    Attributes:
        train: training rows.
        eval: evaluation rows, or None.
        description: the recognized format, in a few words.
        settings: `SFTConfig` arguments that the format implies, unless the recipe sets them.
    """

    train: Dataset
    eval: Dataset | None
    description: str
    settings: dict[str, Any]


def load_data(data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Rows:
    """Load rows, recognize their format, and split off evaluation rows.

    Args:
        tokenizer: its chat template, if any, formats the turns.
        seed: draws the evaluation rows, unless `data.seed` does.

    Raises:
        DataNotFoundError: no such file or hub data set.
        DataError: no rows, an unknown format, or a malformed row; with file and line.
    """
    source = source_of(data)
    rows, held_out = _load(data, data.path, data.split, "data.path"), None
    _refuse_hub_settings(data)
    if data.eval_path or data.eval_split:
        held_out = _load(data, data.eval_path, data.eval_split or data.split, "data.eval_path")
    if data.max_rows is not None:
        rows = rows.select(range(min(data.max_rows, len(rows))))
    kind, rows = _formatted(rows, tokenizer, source)
    if held_out is not None:
        _, held_out = _formatted(held_out, tokenizer, data.eval_path or source)
    elif data.eval_fraction > 0 and len(rows) > 1:
        count = max(1, round(len(rows) * data.eval_fraction))
        split = rows.train_test_split(
            test_size=count, seed=seed if data.seed is None else data.seed
        )
        rows, held_out = split["train"], split["test"]
    description = f"{kind}, {len(rows):,} training rows"
    if held_out is not None:
        description += f", {len(held_out):,} eval rows"
    settings: dict[str, Any] = {}
    if kind == "messages":
        settings["assistant_only_loss"] = _can_mask_assistant(tokenizer)
        on = "the assistant's turns" if settings["assistant_only_loss"] else "every token"
        description += f", loss on {on}"
    return Rows(rows, held_out, description, settings)


def source_of(data: DataConfig) -> str:
    """Path or name of the training rows."""
    return data.path or data.name or ""


def _refuse_hub_settings(data: DataConfig) -> None:
    """Reject splits and subsets of a file: only the hub has them."""
    if data.path is None and not str(data.name).startswith(BUILTIN):
        return
    for key in ("eval_split", "subset", "split"):
        if getattr(data, key) != DataConfig.model_fields[key].default:
            raise DataError(
                f"data.{key} is about a hub data set, and these rows are a file",
                where=f"data.{key}",
                fix=f"~data.{key}; eval rows come from data.eval_path or data.eval_fraction",
            )


def _can_mask_assistant(tokenizer: PreTrainedTokenizerBase) -> bool:
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return True
    try:
        return get_training_chat_template(tokenizer) is not None
    except ValueError:  # TRL cannot mark the turns of this template
        return False


# ------------------------------------------------------------------------------------------- load


def _load(data: DataConfig, path: str | None, split: str, where: str) -> Dataset:
    if path is not None:
        return _load_file(Path(path).expanduser(), where)
    assert data.name is not None
    if not data.name.startswith(BUILTIN):
        return _load_hub(data, data.name, split)
    packaged = {BUILTIN + file.stem: file for file in (ASSETS / "data").glob("*.jsonl")}
    if data.name not in packaged:
        raise DataNotFoundError(
            f"there is no packaged data set {data.name!r}{did_you_mean(data.name, packaged)}",
            where="data.name",
            fix=f"packaged data sets: {', '.join(packaged)}",
        )
    return _load_file(packaged[data.name], "data.name")


def _load_file(path: Path, where: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    where, loader = f"{where}: {path}", LOADERS.get(path.suffix.lower())
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataNotFoundError(
            f"there is no data file {str(path)!r}{did_you_mean(path.name, siblings)}",
            where=where.replace(str(path), str(path.resolve())),
            fix="give a JSONL, JSON, CSV or Parquet file, absolute or relative to this folder",
        )
    if loader is None:
        raise DataError(
            f"{path.name}: files of type {path.suffix or '(none)'!r} cannot be read",
            where=where,
            fix=f"use {', '.join(LOADERS)}",
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path.name} is empty", where=where, fix=ADD_ROWS)
    no_rows = DataError(f"{path.name} has no rows", where=where, fix=ADD_ROWS)
    try:
        options = _csv_as_text(path) if loader == "csv" else {}
        rows: Any = load_dataset(
            loader, data_files=glob.escape(str(path)), split="train", **options
        )
    except (DatasetGenerationError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename not in (None, str(path)):
            raise DataError(
                f"{path.name} could not be cached",
                where=str(error.filename),
                why=str(error.strerror),
                fix="set HF_HOME to a folder that can be written",
            ) from error
        if "corresponds to no data" in str(error):
            raise no_rows from None
        raise _unreadable(path, loader, error) from error
    if not len(rows):
        raise no_rows
    return rows


def _csv_as_text(path: Path) -> dict[str, Any]:
    """Options that read every cell as text: `007` keeps its zeros, and `NA` is not missing."""
    import csv

    from datasets import Features, Value

    with path.open(newline="", encoding="utf-8-sig") as file:
        header = next(csv.reader(file), [])
    features = Features({column: Value("string") for column in header})
    return {"features": features, "keep_default_na": False} if header else {}


def _unreadable(path: Path, loader: str, error: Exception) -> DataError:
    where, why = str(path), str(error.__cause__ or error).strip().splitlines()[0]
    lines = path.read_text("utf-8", "replace").split("\n") if path.suffix == ".jsonl" else []
    for number, line in enumerate(lines, 1):
        try:
            problem = "each line must be one JSON object"
            if not line.strip() or isinstance(json.loads(line), dict):
                continue
        except json.JSONDecodeError as found:
            problem = f"not JSON: {found.msg}"
        where, why = f"{path}:{number}", problem
        break
    return DataError(
        f"{path.name} cannot be read as {loader}",
        where=where,
        why=why,
        fix="fix that line; every row needs the same columns with the same types",
    )


def _load_hub(data: DataConfig, name: str, split: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows: Any = load_dataset(name, data.subset, split=split)
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        raise DataNotFoundError(
            f"the data set {name!r} could not be loaded",
            where=f"data.name (split {split!r})",
            why=str(error).strip().splitlines()[0],
            fix="check the name, split and your connection, or use a file: data.path=mine.jsonl "
            "data.name=null",
        ) from error
    if not len(rows):
        raise DataError(
            f"{name} has no rows in split {split!r}",
            where="data.name",
            fix="data.split=NAME of a split that has rows; the data set's page lists them",
        )
    return rows


# --------------------------------------------------------------------------------------- convert

Converter = Callable[[dict[str, Any]], dict[str, Any]]


class _BadRowError(ValueError):
    """Row that cannot be converted; `_formatted` adds its position."""


def _formatted(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[str, Dataset]:
    """Recognized format, and the rows in TRL's."""
    has_template = bool(tokenizer.chat_template)
    kind, convert = _recognize(rows, has_template, source)
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

    columns = rows.column_names
    try:
        return kind, rows.map(
            numbered, with_indices=True, remove_columns=columns, load_from_cache_file=False
        )
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8 text", where=source, why=str(error), fix="save it as UTF-8"
        ) from error


def _recognize(rows: Dataset, has_template: bool, source: str) -> tuple[str, Converter]:
    columns = set(rows.column_names)
    for column in ("messages", "conversations"):
        if column in columns:
            return "messages", partial(_messages, column)
    for kind, (ask, answer) in PAIRS.items():
        if {ask, answer} <= columns:
            return kind, partial(_pair, ask, answer, has_template)
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


def _messages(column: str, row: dict[str, Any]) -> dict[str, Any]:
    turns, given = [], row[column] or ()
    for turn in given if isinstance(given, list | tuple) else (given,):
        if not isinstance(turn, dict):
            raise _BadRowError(f"a turn needs role and content, this one is {turn!r}")
        role = turn.get("role") or SHAREGPT_ROLES.get(turn.get("from", ""), turn.get("from"))
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        if not role or not isinstance(content, str):
            raise _BadRowError(f"a turn needs role and content, this one is {turn}")
        turns.append({"role": role, "content": content})
    if not any(turn["role"] == "assistant" for turn in turns):
        raise _BadRowError("no assistant turn, so there is nothing to learn")
    return {"messages": turns}


def _pair(ask: str, answer: str, has_template: bool, row: dict[str, Any]) -> dict[str, Any]:
    if isinstance(row[ask], list):  # TRL's conversational prompt-completion
        if not row[ask] or not row[answer]:
            raise _BadRowError(f"{ask if not row[ask] else answer!r} is empty")
        return {"prompt": row[ask], "completion": row[answer]}
    prompt, completion = _text(row, ask), _text(row, answer)
    if ask == "instruction" and row.get("input"):
        prompt = f"{prompt}\n\n{row['input']}"
    if not has_template:
        return {"prompt": f"{prompt}\n\n", "completion": completion}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
    }


# ------------------------------------------------------------------------------------ random rows

MASKING = ("assistant_only_loss", "completion_only_loss")
"""Settings of `SFTConfig` about parts of a row, which random rows do not have."""


def random_rows(model: ModelConfig, count: int, length: int, seed: int) -> Dataset:
    """Random token ids, [count, length], for models with random weights: no hub, file or padding.

    `diagnose --weights random` and `benchmark` train on them. Each row has the full length, as
    packed real rows do, so the GEMMs have the sizes of a real run. Equal seeds give equal rows.
    """
    import torch
    from datasets import Dataset

    vocabulary = load_shape(model).get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (count, length), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})
