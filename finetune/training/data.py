"""From `DataConfig` to the rows that `SFTTrainer` expects.

A format is recognized by its columns and shown (`finetune.training.rows`); tokenizing, masking and
packing are TRL's, and counted (`finetune.training.ledger`).
"""

from __future__ import annotations

import csv
import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import user_path
from finetune.config.schema import BUILTIN, DataConfig, ModelConfig
from finetune.errors import DataError, DataNotFoundError, did_you_mean
from finetune.training.json_checks import check_document, check_lines
from finetune.training.model import ASSETS, load_shape
from finetune.training.rows import formatted, unused_keys

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ADD_ROWS = 'add rows, such as {"prompt": "Where?", "completion": "Here."}'


@dataclass(frozen=True)
class Rows:
    """Training and evaluation rows in one of TRL's formats.

    Attributes:
        train: training rows.
        eval: evaluation rows, or None.
        description: the recognized format, in a few words.
        settings: `SFTConfig` arguments that the format implies, unless the recipe sets them.
        refused: training rows that were skipped, since they cannot be trained on.
        notes: what is worth a warning.
    """

    train: Dataset
    eval: Dataset | None
    description: str
    settings: dict[str, Any]
    refused: int = 0
    notes: tuple[str, ...] = ()


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
    kind, rows, refused = formatted(rows, tokenizer, source, data)
    notes = list(unused_keys(rows, tokenizer, source)) if kind == "messages" else []
    if refused:
        notes.append(
            f"{len(refused):,} rows are skipped; the first: {next(iter(refused.values()))}"
        )
    if held_out is not None:
        _, held_out, _ = formatted(held_out, tokenizer, data.eval_path or source, data)
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
        if not settings["assistant_only_loss"]:
            notes.append(
                "the chat template has no {% generation %} markers, so the user's turns are "
                "trained on too; give prompt and completion, or a template with markers"
            )
    return Rows(rows, held_out, description, settings, len(refused), tuple(notes))


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
        return _load_file(user_path(path), where)
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
    if not os.path.isfile(path):  # False of a name that no file can have
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataNotFoundError(
            f"there is no data file {str(path)!r}{did_you_mean(path.name, siblings)}",
            where=where.replace(str(path), str(path.absolute())),
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
        if loader == "json":
            _check_json(path)
        options = _csv_as_text(path) if loader == "csv" else {}
        rows: Any = load_dataset(
            loader, data_files=glob.escape(str(path)), split="train", **options
        )
    except DataError:
        raise
    except (DatasetGenerationError, *_UNREADABLE) as error:
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


_UNREADABLE = (ValueError, OSError, TypeError, LookupError, AttributeError, csv.Error)
"""Errors by which `datasets` and what it calls refuse a file."""


def _check_json(path: Path) -> None:
    if path.suffix.lower() == ".json":
        check_document(path.read_bytes(), path)
        return
    with path.open("rb") as lines:
        check_lines(lines, path)


def _csv_as_text(path: Path) -> dict[str, Any]:
    """Options that read every cell as text: `007` keeps its zeros, and `NA` is not missing.

    Raises:
        DataError: a line has more or fewer cells than the header; pandas would shift its columns.
    """
    from datasets import Features, Value

    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        header = next(lines, [])
        for cells in lines:
            if cells and len(cells) != len(header):
                raise DataError(
                    f"{path.name} has a row of {len(cells)} cells under {len(header)} columns",
                    where=f"{path}:{lines.line_num}",
                    why="its columns would be shifted",
                    fix="quote cells that hold a comma or a line break, or remove the row",
                )
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
        except RecursionError:
            problem = "nested too deep"
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
