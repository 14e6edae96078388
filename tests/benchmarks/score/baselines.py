"""What another estimator would say of the same model, for the scoreboard.

`accelerate estimate-memory` builds the model of a hub name on the meta device, in float32, and
calculates from the size of its weights alone: nothing of batch, length, adapters or checkpointing.
Here its own functions are called on a model of any configuration, without the hub, so that what is
scored is theirs whatever they change. It makes the model without a head (`AutoModel`), as here.

For training with Adam the command prints the largest of four figures (Accelerate 1.15, S = bytes in
float32): float32 S, S, 2 S, 4 S; float16 S, 1.5 S, 2 S, 2 S, for model, gradients, states, step. It
has nothing for BF16, which its formula treats as float16.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from tests.benchmarks.score.shapes import config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AccelerateType = Literal["float32", "float16", "bfloat16"]


@lru_cache(maxsize=256)
def accelerate_gb(shape: str, dtype: AccelerateType) -> float:
    """Predict 10^9 bytes as `accelerate estimate-memory` does, in the type of the weights."""
    return accelerate_estimate(config_of(shape), dtype) / 1e9


def accelerate_estimate(config: PretrainedConfig, dtype: AccelerateType) -> int:
    """Bytes that `accelerate estimate-memory` gives for training with Adam.

    Args:
        config: of the model, from anywhere.
        dtype: `--dtypes` of the command; `bfloat16` as its formula has it.

    Source: accelerate/commands/estimate.py, `gather_data` and `estimate_command`.
    """
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModel

    with init_empty_weights():
        model = AutoModel.from_config(config, dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(total, dtype).values())
