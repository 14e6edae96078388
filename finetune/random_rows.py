"""Rows of random tokens, for a model of random weights: no hub, no file, no padding.

`diagnose --weights random` and `benchmark` train on them. Each row is as long as is asked, which is
what packing makes of real rows too, so the matmuls have the sizes that they have in a run. What is
learned from them is nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.config import ModelConfig
from finetune.model import load_shape

if TYPE_CHECKING:
    from datasets import Dataset

MASKING = ("assistant_only_loss", "completion_only_loss")
"""Settings of `SFTConfig` about parts of a row, which these do not have."""


def random_rows(model: ModelConfig, count: int, length: int, seed: int) -> Dataset:
    """Token ids to train on, `count` rows of `length`, alike for equal seeds.

    Args:
        model: ids are below the size of its vocabulary.
        count: rows.
        length: tokens of each.
        seed: of the draw.
    """
    import torch
    from datasets import Dataset

    vocabulary = load_shape(model).get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (count, length), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist()})
