"""A run's weights as one plain model: the original ones, with the adapter merged by PEFT.

PEFT knows the meaning of an adapter (rank and alpha patterns, rsLoRA, DoRA, transposed weights,
biases, experts, `modules_to_save`), and Transformers how a model is stored. Memory: one model.

If the adapter changes one half of a tied pair, the halves are separate weights afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config.schema import RunConfig
from finetune.errors import ConfigError, first_line
from finetune.export.parity import load_stock
from finetune.storage.pretrained import keep_generation
from finetune.training.asking.reload import with_adapter


def merged(weights: Path, config: RunConfig, adapter: Path | None, dtype: Any) -> Any:
    """Load original weights, and merge an adapter into them.

    Args:
        weights: folder of plain weights, or of FP8 codes as they are published.
        config: the run's.
        adapter: folder of a PEFT adapter; None for a full run, whose `weights` are its own.
        dtype: type to load in, or `auto`, the files'.

    Raises:
        ConfigError: PEFT cannot merge it, or a merged weight is not finite.
    """
    model = load_stock(weights, config, dtype=dtype, to_merge=True)
    if adapter is None:
        keep_generation(model)
        return model
    pairs = dict(model.all_tied_weights_keys)
    try:
        adapted = with_adapter(model, adapter)
        # An adapter of one of two tied layers would be merged into both.
        _untie(model)
        model = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # PEFT's: of any of its many kinds of layers
        raise ConfigError(
            "this adapter cannot be merged",
            where=str(adapter),
            why=first_line(error),
            fix="--to adapter keeps the adapter as it is",
        ) from error
    tensors = model.state_dict()
    # Still equal: stored once, as the original is.
    if pairs and all(torch.equal(tensors[one], tensors[other]) for one, other in pairs.items()):
        _tie(model, pairs)
    keep_generation(model)
    return model


def _untie(model: Any) -> None:
    """Give each layer weights of its own, also those that a model shares between two."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), False))
            seen.add(id(parameter))
    _tie(model, {})


def _tie(model: Any, pairs: dict[str, str]) -> None:
    """Tie these pairs, and say so in the configuration."""
    for part in (model.config, model.config.get_text_config()):
        part.tie_word_embeddings = bool(pairs)
    model.all_tied_weights_keys = pairs
    model.tie_weights()
