"""Ranges of the numbers in the `train` section, which `trl.SFTConfig` takes as they come.

A NaN, an infinite or a negative number is no error there: it trains nothing, everything, or ends in
a traceback minutes later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from finetune.config.section import LARGEST
from finetune.errors import ConfigError

AT_LEAST_ONE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("max_length", "dataset_num_proc", "torch_empty_cache_steps", "eval_accumulation_steps"),
    *("ddp_bucket_cap_mb", "dataloader_prefetch_factor", "pad_to_multiple_of", "ddp_timeout"),
)
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(AT_LEAST_ONE, (1, LARGEST)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),  # of numpy
    **dict.fromkeys(("max_steps", "local_rank"), (-1, LARGEST)),
    "label_smoothing_factor": (0, 1),
    "dataloader_num_workers": (0, 4096),
}
"""Setting -> smallest and largest value; others are zero or more."""
BELOW_ONE = ("adam_beta1", "adam_beta2")
ABOVE_ZERO = ("num_train_epochs",)
ENDLESS = ("max_grad_norm",)
"""Settings that may be infinite: gradients are then measured, and not clipped."""


MOST_TOKENS = 2**24
"""Tokens of a micro-batch: a hundred times what the largest GPUs hold of the smallest models."""


def check_batch(train: Mapping[str, Any]) -> None:
    """Reject a micro-batch that no machine could hold, before it is planned or simulated.

    Raises:
        ConfigError: it has more than `MOST_TOKENS`.
    """
    rows = train.get("per_device_train_batch_size", 8)
    length = 1024 if train.get("max_length", 1024) is None else train.get("max_length", 1024)
    if int(rows) * int(length) > MOST_TOKENS:
        raise ConfigError(
            f"a micro-batch of {rows:,} rows of {length:,} tokens fits no machine",
            where="train.per_device_train_batch_size and train.max_length",
            why=f"{MOST_TOKENS:,} tokens are the most that is planned for",
            fix="train.per_device_train_batch_size=8 train.max_length=1024; "
            "train.gradient_accumulation_steps makes a larger batch of small ones",
        )


def check_range(key: str, value: Any, where: str) -> None:
    """Reject a number of the `train` section that has no meaning.

    Raises:
        ConfigError: it is NaN, infinite, or out of the setting's range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = RANGES.get(key, (0, LARGEST))
    inside = low <= value <= (math.inf if key in ENDLESS else high)  # False of NaN
    if key in BELOW_ONE:
        inside, high = inside and value < 1, 1
    if key in ABOVE_ZERO:
        inside = inside and value > 0
    if not inside:
        least = "above 0" if key in ABOVE_ZERO else f"{low:g} or more"
        most = "" if high == LARGEST else f", {'below' if key in BELOW_ONE else 'at most'} {high:g}"
        raise ConfigError(
            f"train.{key} cannot be {value}",
            where=where,
            fix=f"a number of {least}{most}; ~train.{key} takes TRL's default",
        )
