"""Files of an export (weights, configuration, tokenizer), written completely or not at all.

A shard is read, merged, encoded and written under its name before the next one is opened. Memory:
one output shard and the float32 temporaries of one weight.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import ConfigError, ParityError
from finetune.export.merge import Merger
from finetune.export.source import INDEX, WEIGHTS_AND_MORE, Checkpoint, Weight
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
"""Encodes a weight [N, K] as tensors, by their suffix after the layer's name."""
RECORD = "export.json"
"""File that marks a folder as our export, finished or not."""


@contextlib.contextmanager
def writing_to(out: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `out` on success.

    Until then it is `OUT.partial`. Ctrl-C or an error removes it; a failed parity check leaves it,
    with the figures, for inspection.

    Args:
        out: folder of the finished export.
        force: replace an earlier export there.
        keep_clear: input folders, in which nothing may be written.

    Raises:
        ConfigError: `out` is taken, or inside an input folder.
    """
    partial = out.parent / f"{out.name}.partial"
    _refuse_taken(out, partial, force=force, keep_clear=keep_clear)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        (partial / RECORD).write_text('{"finished": false}\n', encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{str(out)!r} cannot be written: {error.strerror}", where=str(out.resolve())
        ) from None
    try:
        yield partial
    except ParityError:
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)  # empty, or an earlier export and --force
    partial.rename(out)


def _refuse_taken(out: Path, partial: Path, *, force: bool, keep_clear: tuple[Path, ...]) -> None:
    where = str(out.resolve())
    for folder in (f.resolve() for f in keep_clear):
        inside = out.resolve().is_relative_to(folder)
        if inside or folder.is_relative_to(out.resolve()):
            relation = "is inside" if inside else "holds"
            raise ConfigError(
                f"{str(out)!r} {relation} {str(folder)!r}, which is read",
                where=where,
                why="a run folder stays as the run left it",
                fix="choose a folder beside it",
            )
    if out.is_file():
        raise ConfigError(f"{str(out)!r} is a file", where=where, fix="choose another folder")
    ours = (out / RECORD).is_file()
    if out.is_dir() and any(out.iterdir()) and not (force and ours):
        raise ConfigError(
            f"{str(out)!r} is not empty",
            where=where,
            why="an export is there already" if ours else "what is in it is not an export",
            fix="choose another folder, or --force to replace it" if ours else "choose another",
        )
    if partial.exists() and not (partial / RECORD).is_file():
        raise ConfigError(
            f"{str(partial)!r} is in the way",
            where=str(partial.resolve()),
            why="the export is written there until it is complete",
            fix="remove it, or choose another folder",
        )


def write_weights(
    checkpoint: Checkpoint,
    out: Path,
    merger: Merger | None = None,
    encoders: dict[str, Encode] | None = None,
) -> None:
    """Write all shards, and the index if there was one.

    Args:
        merger: merges the run's adapter; None for fully trained weights.
        encoders: weight encoder by layer name.
    """
    shard_of: dict[str, str] = {}
    size = 0
    for shard in checkpoint.shards:
        tensors: dict[str, Tensor] = {}
        for weight, stored in checkpoint.read(shard):
            tensors |= _exported(weight, stored, merger, encoders or {})
        shard_of |= dict.fromkeys(tensors, shard)
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, out / shard, metadata={"format": "pt"})
    if (checkpoint.folder / INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(shard_of.items()))}
        _write_json(out / INDEX, index)


def _exported(
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
    """Largest magnitude of each layer's merged weight (float32 scalar), in one pass over all
    shards.
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
    """Write `config.json` with the export's changes."""
    config = _read_json(checkpoint.folder / "config.json")
    if untied:
        for section in (config, config.get("text_config", {})):
            section["tie_word_embeddings"] = False
    if quantization is not None:
        config["quantization_config"] = quantization
    _write_json(out / "config.json", config)


def copy_companions(source: Path, out: Path, tokenizer: Path) -> None:
    """Copy the files beside the original weights, and the run's tokenizer."""
    for pattern in WEIGHTS_AND_MORE:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    copy_tokenizer(tokenizer, out)


def copy_tokenizer(source: Path, out: Path) -> None:
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)


def write_adapter(adapter: Path, out: Path, base: str, revision: str | None) -> None:
    """Copy the adapter with the name of its base model.

    Args:
        adapter: the run's `model/`.
        out: the export.
        base: hub id, or absolute folder.
        revision: revision of the hub id.
    """
    shutil.copyfile(adapter / "adapter_model.safetensors", out / "adapter_model.safetensors")
    config = _read_json(adapter / "adapter_config.json")
    named = {"base_model_name_or_path": base, "revision": revision}
    _write_json(out / "adapter_config.json", config | named)
    copy_tokenizer(adapter, out)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
