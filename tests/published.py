"""Checkpoints in the layouts in which others publish FP8 weights, made from a plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.precision.numbers.formats import E4M3
from finetune.precision.numbers.weights import quantize_weight, tile_of

FINE_GRAINED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` that llm-compressor writes for FP8 with dynamic activations."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": strategy,
                    "symmetric": True,
                    "dynamic": False,
                    "observer": "minmax",
                    **weights,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    }


def publish(
    model: Any,
    folder: Path,
    config: dict[str, Any],
    granularity: Any,
    *,
    scale: str = "weight_scale",
    shape: Callable[[Tensor], Tensor] = lambda s: s,
    scale_dtype: torch.dtype = torch.float32,
    shards: int = 2,
    extra: dict[str, Tensor] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Write the decoder layers' linear layers in FP8, and everything else as it is.

    Args:
        model: a plain model.
        folder: where to.
        config: its `quantization_config`.
        granularity: of the codes, as `finetune.precision.numbers.weights` has it.
        scale: what the scales are called.
        shape: of the scales in the file, from [ceil(N/r), ceil(K/c)].
        scale_dtype: of the scales in the file.
        shards: number of files.
        extra: further tensors of each layer.

    Returns:
        Name of each such layer -> its codes (uint8) and inverse scales as they were written.
    """
    written: dict[str, tuple[Tensor, Tensor]] = {}
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        w = module.weight.detach()
        bits, inverse = quantize_weight(w, tile_of(granularity, tuple(w.shape)))
        inverse = inverse.to(scale_dtype)
        written[name] = bits, inverse.float()
        tensors[f"{name}.weight"] = bits.view(E4M3.dtype)
        tensors[f"{name}.{scale}"] = shape(inverse).contiguous()
        tensors |= {f"{name}.{k}": v.clone() for k, v in (extra or {}).items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    # Codes and scales in different files, as happens where a shard ends between them.
    names, index = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    model.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {"quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    return written
