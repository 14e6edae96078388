"""Rows as a script gives them to `finetune.trainer`: where they are, or a file for those in memory.

    "data.jsonl", "org/rows", ["a.jsonl", "b.jsonl"]   as they are
    [{"messages": [...]}, ...]                         runs/rows/1f3a....jsonl
    a datasets.Dataset with pictures in memory         runs/rows/9c02....parquet

A file has the hash of its rows as its name, so that the same rows are written once, and a run that
is resumed finds them.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.paths import user_path
from finetune.data.dataset import SAMPLE
from finetune.data.image_forms import COLUMNS, shows_images
from finetune.data.sources import LOADERS
from finetune.errors import ConfigError


def source_of(data: Any, out: Path) -> dict[str, Any]:
    """The `data` section of rows as they are given; those in memory are written to a file.

    Raises:
        ConfigError: something else than rows, or where they are.
    """
    from datasets import Dataset

    if isinstance(data, str | Path):
        text = str(data)
        marked = set(Path(text).suffixes) & LOADERS.keys() or set(text) & set("*?[")
        local = isinstance(data, Path) or marked or text.startswith((".", "/", "~"))
        return {"path" if local or os.path.exists(user_path(text)) else "name": text}
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return {"path": dict(data)}
    if isinstance(data, list | tuple) and data:
        if not isinstance(data[0], Mapping):
            return {"path": [str(path) for path in data]}
        data = Dataset.from_list(list(data))
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"rows cannot be taken from a {type(data).__name__}",
            where="finetune.trainer(data=...)",
            fix="a path, a hub id, a list of dicts, or a datasets.Dataset",
        )
    written, opened = io.BytesIO(), "binary" in str(data.features.arrow_schema)
    (data.to_parquet if opened else data.to_json)(written)
    name = hashlib.sha256(written.getvalue()).hexdigest()[:12]
    file = out / "rows" / f"{name}.{'parquet' if opened else 'jsonl'}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(written.getvalue())
    # Paths of images begin where the script runs, and not beside that file.
    shown = shows_images(itertools.islice(data, SAMPLE), COLUMNS)
    return {"path": str(file)} | ({"image_folder": str(Path.cwd())} if shown else {})
