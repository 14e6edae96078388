"""Where answers end: the tokens at which a model stops, kept with the weights that learned them.

A model stops at the `eos_token_id` of its `generation_config.json`. A base model's is the end of a
text, and the chat template's end of a turn another token (Qwen 2.5: `<|endoftext|>`, `<|im_end|>`):
trained on answers, it writes that end, and continues. A run adds the ends of its rows, and saves
the file beside its weights, also beside an adapter's, where exports find it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = "generation_config.json"


def ends_of(config: Any) -> list[int]:
    """Ids of the tokens at which a model of this `GenerationConfig` stops."""
    found = config.eos_token_id
    return [found] if isinstance(found, int) else [*(found or ())]


def stop_at(model: Any, ends: Iterable[int]) -> list[int]:
    """Let answers end at further tokens, too; return those at which they did not end before."""
    if getattr(model, "generation_config", None) is None:  # it writes nothing
        return []
    own = ends_of(model.generation_config)
    new = [token for token in ends if token not in own]
    if new:
        # A list: Transformers stops at any of them.
        model.generation_config.eos_token_id = [*own, *new]
    return new


def save_ends(model: Any, folder: Path | str) -> None:
    """Write the whole file beside an adapter, as Transformers does beside whole weights."""
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.to_json_file(Path(folder) / FILE)


def take_ends(model: Any, folder: Path | str) -> None:
    """Let a model with an adapter stop where the adapter's run did; older runs have no file."""
    from transformers import GenerationConfig

    if (Path(folder) / FILE).is_file():
        stop_at(model, ends_of(GenerationConfig.from_pretrained(str(folder))))
