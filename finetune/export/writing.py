"""Files of an export: weights shard by shard, configuration, tokenizer.

A shard is read, merged, encoded and written before the next one is opened, under the name that it
had. What is in memory is the shard as it will be written and the float32 temporaries of one weight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from finetune.export.merge import Merger
from finetune.export.weights import INDEX, WEIGHTS_AND_MORE, Checkpoint, Weight
from finetune.precision.formats import amax

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)
Encode = Callable[[Tensor], dict[str, Tensor]]
"""A weight [N, K] -> the tensors that stand for it, by what follows the layer's name."""


def write_weights(
    checkpoint: Checkpoint,
    out: Path,
    merger: Merger | None = None,
    encoders: dict[str, Encode] | None = None,
) -> None:
    """Write all shards, and the index if there was one.

    Args:
        checkpoint: the stored weights.
        out: the folder.
        merger: of the run's adapter; None for weights that were trained themselves.
        encoders: layer name -> how its weight is quantised.
    """
    placed: dict[str, str] = {}
    size = 0
    for shard in checkpoint.shards:
        held: dict[str, Tensor] = {}
        for weight, stored in checkpoint.read(shard):
            held |= _stored_as(weight, stored, merger, encoders or {})
        placed |= dict.fromkeys(held, shard)
        size += sum(tensor.nbytes for tensor in held.values())
        save_file(held, out / shard, metadata={"format": "pt"})
    if (checkpoint.folder / INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
        _write_json(out / INDEX, index)


def _stored_as(
    weight: Weight, stored: Tensor, merger: Merger | None, encoders: dict[str, Encode]
) -> dict[str, Tensor]:
    tensors = {weight.key: stored}
    if merger is not None:
        tensors = {weight.key: merger.merge(weight, stored)} | merger.torn(weight, stored)
    layer = weight.name.removesuffix(".weight")
    if layer in encoders and layer != weight.name:
        prefix = weight.key.removesuffix("weight")
        encoded = encoders[layer](tensors.pop(weight.key))
        tensors |= {prefix + name: tensor.contiguous() for name, tensor in encoded.items()}
    return tensors


def weight_amax(
    checkpoint: Checkpoint, merger: Merger | None, layers: list[str]
) -> dict[str, Tensor]:
    """Largest magnitude of each layer's weight, adapter merged: a pass over all shards.

    Returns:
        Layer name -> float32 scalar.
    """
    found = {}
    for shard in checkpoint.shards:
        for weight, stored in checkpoint.read(shard):
            layer = weight.name.removesuffix(".weight")
            if layer in layers and layer != weight.name:
                found[layer] = amax(merger.merge(weight, stored) if merger else stored)
    return found


def write_config(
    checkpoint: Checkpoint, out: Path, *, untied: bool, quantization: dict[str, Any] | None
) -> None:
    """`config.json` as it was, with what the export changed."""
    text = (checkpoint.folder / "config.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    if untied:
        for section in (config, config.get("text_config", {})):
            section["tie_word_embeddings"] = False
    if quantization is not None:
        config["quantization_config"] = quantization
    _write_json(out / "config.json", config)


def copy_companions(source: Path, out: Path, tokenizer: Path) -> None:
    """Everything beside the weights: generation config, code, licence, and the run's tokenizer.

    Args:
        source: folder of the original model.
        out: the export.
        tokenizer: folder of the tokenizer that the run saved.
    """
    for pattern in WEIGHTS_AND_MORE:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    copy_tokenizer(tokenizer, out)


def copy_tokenizer(source: Path, out: Path) -> None:
    """The tokenizer that the run saved, over the original one."""
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)


def write_adapter(adapter: Path, out: Path, base: str, revision: str | None) -> None:
    """The adapter as it is, with the name of the model that it belongs to.

    Args:
        adapter: the run's `model/`.
        out: the export.
        base: hub id, or absolute folder.
        revision: of the hub id.
    """
    shutil.copyfile(adapter / "adapter_model.safetensors", out / "adapter_model.safetensors")
    config: dict[str, Any] = json.loads(
        (adapter / "adapter_config.json").read_text(encoding="utf-8")
    )
    _write_json(
        out / "adapter_config.json",
        config | {"base_model_name_or_path": base, "revision": revision},
    )
    copy_tokenizer(adapter, out)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
