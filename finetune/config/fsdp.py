"""`train.fsdp` and `train.fsdp_config`, as Transformers reads them.

Defaults are those of transformers 5.14 (`TrainingArguments._process_fsdp_args`): version 2, weights
given up after forward, decoder layers gathered one by one. Keys may begin with `fsdp_`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError


@dataclass(frozen=True)
class FsdpSettings:
    """Sharding of a run.

    Attributes:
        version: of FSDP.
        reshard: weights are given up after forward.
        wrapping: what becomes a group.
        layers: class names of decoder layers; None: those that the model names.
        checkpointing: FSDP's own activation checkpointing.
        offload: shards lie in the host's memory.
    """

    version: int = 2
    reshard: bool = True
    wrapping: str = "TRANSFORMER_BASED_WRAP"
    layers: tuple[str, ...] | None = None
    checkpointing: bool = False
    offload: bool = False


def fsdp_settings(train: Mapping[str, Any]) -> FsdpSettings:
    """Settings of a `train` section.

    Raises:
        ConfigError: `fsdp_config` names a file that is not there or no JSON.
    """
    given = train.get("fsdp_config") or {}
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"train.fsdp_config cannot be read: {error}", where="train.fsdp_config"
            ) from None
    found = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    layers = found.get("transformer_layer_cls_to_wrap")
    names = layers.split(",") if isinstance(layers, str) else layers
    reshard = str(found.get("reshard_after_forward", True)).lower()
    return FsdpSettings(
        version=int(found.get("version", 2)),
        reshard=reshard not in ("false", "no_shard", "shard_grad_op"),
        wrapping=str(found.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")),
        layers=None if names is None else tuple(names),
        checkpointing=str(found.get("activation_checkpointing", False)).lower() == "true",
        offload=str(found.get("cpu_offload", False)).lower() == "true",
    )
