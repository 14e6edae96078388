"""Names that leave this machine: models, data, methods and devices, without paths of its disk.

Cards, reports and receipts are shared, so a packaged model is named as recipes name it
(`builtin:tiny_llama`), and a folder of the user by its last parts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.config.paths import ASSETS
from finetune.config.schema import BUILTIN

_UNNAMED = re.compile(r"model|checkpoint-\d+")
"""Folders that say nothing without those above: `tiny_full_fp8/<run>/model`."""
_ABSOLUTE = re.compile(
    r"(?<![\w.:/\\~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",;:]+[/\\])*([^\s/\\'\",;:]+)"
)


def recipe_name(name: str) -> str:
    """`builtin:tiny_llama` for a folder of the package; any other name unchanged."""
    path = Path(name)
    return f"{BUILTIN}{path.name}" if path.parent == ASSETS else name


def is_hub_id(name: str) -> bool:
    """True for `organization/model`, unless a folder of that name is here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def short_name(name: str) -> str:
    """`tiny_llama`, `Qwen/Qwen3-8B`, `rows.jsonl`: a model or data set in a title."""
    name = recipe_name(name)
    if name.startswith(BUILTIN) or is_hub_id(name):
        return name.removeprefix(BUILTIN)
    parts = Path(name).parts
    return "/".join(parts[-3:] if _UNNAMED.fullmatch(parts[-1]) else parts[-1:]) if parts else name


def long_name(name: str) -> str:
    """The same, with where packaged ones come from."""
    packaged = recipe_name(name).startswith(BUILTIN)
    return short_name(name) + (" (packaged with fp8-finetune)" if packaged else "")


def without_paths(text: str) -> str:
    """A text in which absolute paths keep their last part: `/home/me/rows.jsonl`, `…/rows.jsonl`.

    Relative paths, addresses (`https://...`) and fractions (`tokens/s`) stay.
    """
    return _ABSOLUTE.sub(r"…/\1", text)


def method_name(rank: int | None, storage: str | None = None) -> str:
    """`full fine-tuning`, `LoRA rank 8`, or `QLoRA rank 8` over weights stored in NF4."""
    if rank is None:
        return "full fine-tuning"
    return f"{'QLoRA' if storage == 'nf4' else 'LoRA'} rank {rank}"


def device_name(device: dict[str, Any]) -> str:
    """`NVIDIA H100 80GB HBM3`, `CPU (x86_64)`: the device of a receipt."""
    name = str(device.get("name") or "")
    return f"CPU ({name})" if name and device.get("kind") == "cpu" else name
