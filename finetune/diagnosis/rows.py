"""Rows of random tokens, for a model of random weights: no hub, no file, no padding.

Each row is as long as the recipe allows, which is what packing makes of real rows too, so the
matmuls have the sizes that they have in the run. What is learned from them is nothing.
"""

from __future__ import annotations

from finetune.config import RunConfig
from finetune.data import Rows

MASKING = ("assistant_only_loss", "completion_only_loss")
"""Settings of `SFTConfig` about parts of a row, which these do not have."""


def synthetic_rows(config: RunConfig, vocabulary: int, count: int) -> Rows:
    """Rows to train on, alike for equal seeds.

    Args:
        config: of the run: `train.max_length` and `train.seed`.
        vocabulary: ids are below it.
        count: rows.
    """
    import torch
    from datasets import Dataset

    length = int(config.train.get("max_length") or 1024)
    generator = torch.Generator().manual_seed(int(config.train.get("seed", 42)))
    ids = torch.randint(vocabulary, (count, length), generator=generator)
    said = f"{count} rows of {length:,} random tokens"
    return Rows(Dataset.from_dict({"input_ids": ids.tolist()}), None, said, {})


def unmasked(config: RunConfig) -> RunConfig:
    """The run without settings about parts of a row."""
    train = {key: value for key, value in config.train.items() if key not in MASKING}
    return config.model_copy(update={"train": train})
