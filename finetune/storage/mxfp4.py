"""Checkpoints whose experts are in MXFP4 (gpt-oss), read as the 16-bit weights that they stand for.

    experts.gate_up_proj_blocks  [E, N, K/32, 16]  two E2M1 codes a byte
    experts.gate_up_proj_scales  [E, N, K/32]      E8M0, a power of two for 32 codes

A code times a power of two is a number of BF16, so nothing is rounded. Four bits are storage for
inference: Transformers (5.23) does not train such a model, and says so where it is too late. Here
each stack is dequantized while it is read: into BF16, or, where a frozen base is stored in FP8,
into codes, one stack after another, so that the whole never exists in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from finetune.storage.pretrained import in_mxfp4

STACKS, PARTS = ("gate_up_proj", "down_proj"), ("blocks", "scales")


def in_checkpoint(source: str, revision: str | None) -> bool:
    """True if the `config.json` of a folder or hub model says so."""
    return in_mxfp4(PreTrainedConfig.get_config_dict(source, revision=revision)[0])


def conversions() -> list[WeightConverter]:
    """For a loader of other storage: blocks and scales are one weight [E, K, N] to it."""
    return [
        WeightConverter([f"{stack}_{part}" for part in PARTS], stack, [_Dequantize()])
        for stack in STACKS
    ]


class _Dequantize(ConversionOps):
    """Transformers' own takes the type of the tensor it fills, which here is a type of codes."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], *, full_layer_name: str, **_: Any
    ) -> dict[str, Any]:
        blocks, scales = (
            next(v[0] if isinstance(v, list) else v for k, v in input_dict.items() if part in k)
            for part in PARTS
        )
        return {full_layer_name: convert_moe_packed_tensors(blocks, scales)}
