"""Stored weights of an export, read and written shard by shard, completely or not at all.

A checkpoint is a folder with `config.json` and either one `model.safetensors` or several shards
under `model.safetensors.index.json`. A shard is read, merged, encoded and written under its name
before the next one is opened. Memory: one output shard and the float32 temporaries of one weight.

File keys are translated to parameter names (`checkpoint_formats.key_translation`) over an *outline*
of the model on the meta device. The outline also gives each weight's kind: linear layer, embedding,
output head, tied pair.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.config.schema import ModelConfig
from finetune.errors import ConfigError, ModelNotFoundError, ParityError, first_line, writing
from finetune.precision.formats import amax
from finetune.storage.checkpoint_formats import is_code, key_translation, tensors_in
from finetune.storage.pretrained import auto_class, locate, refuse_random_base
from finetune.training.faults import is_of_the_disk
from finetune.training.resume import TOKENIZER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHTS_AND_MORE = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*")
RECORD = "export.json"
"""File that marks a folder as our export, finished or not."""


# ------------------------------------------------------------------------------------------- read


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint.

    Attributes:
        key: its name in the file.
        name: name of its parameter, or of the one it is a part of.
        whole: False if the parameter consists of several tensors.
    """

    key: str
    name: str
    whole: bool


Merge = Callable[[Weight, Tensor], dict[str, Tensor]]
"""Tensors to write for a stored one, by their file key; the weight's own comes first."""
Encode = Callable[[Tensor], dict[str, Tensor]]
"""Encodes a weight [N, K] as tensors, by their suffix after the layer's name."""


def as_stored(weight: Weight, stored: Tensor) -> dict[str, Tensor]:
    """`Merge` without an adapter."""
    return {weight.key: stored}


@dataclass(frozen=True)
class Checkpoint:
    """Stored weights, opened by `open_checkpoint`.

    Attributes:
        folder: folder of config, weights and tokenizer.
        outline: the stock model on the meta device.
        shards: weights by file name.
    """

    folder: Path
    outline: PreTrainedModel
    shards: dict[str, tuple[Weight, ...]]

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Weights by parameter name; of a parameter in parts, the last part."""
        return {weight.name: weight for shard in self.shards.values() for weight in shard}

    @cached_property
    def linears(self) -> dict[str, nn.Linear]:
        """Plain `nn.Linear` layers except the output head, by name."""
        head = self.outline.get_output_embeddings()
        return {
            name: module
            for name, module in self.outline.named_modules()
            if type(module) is nn.Linear and module is not head
        }

    @cached_property
    def tied(self) -> dict[str, str]:
        """Both directions of each tied pair of parameters."""
        pairs = self.outline.all_tied_weights_keys.items()
        return {a: b for pair in pairs for a, b in (pair, reversed(pair))}

    def read(self, shard: str) -> Iterator[tuple[Weight, Tensor]]:
        """Yield the tensors of a shard, one at a time, in their stored type, on the CPU."""
        with safe_open(self.folder / shard, framework="pt") as file:
            for weight in self.shards[shard]:
                yield weight, file.get_tensor(weight.key)


def weights_folder(model: ModelConfig) -> Path:
    """Folder of a model's stored weights; hub weights are downloaded or taken from the cache.

    Raises:
        ModelNotFoundError: no such folder or hub model.
        ConfigError: the run began with random weights, which are stored nowhere.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    refuse_random_base(model)
    source = locate(model)
    if Path(source).is_dir():
        return Path(source).resolve()
    try:
        found = snapshot_download(
            source,
            revision=model.revision,
            allow_patterns=list(WEIGHTS_AND_MORE),
            ignore_patterns="consolidated*",  # a second copy, in another layout
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"the weights of {source!r} could not be had",
            where=f"model.name: {source}",
            why=first_line(error),
            fix="check your connection; `hf auth login` for gated models",
        ) from error
    return Path(found)


def open_checkpoint(folder: Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Index a checkpoint's tensors without reading weights.

    Raises:
        ModelNotFoundError: safetensors files are missing.
        ConfigError: its weights are quantized.
    """
    from transformers import AutoConfig

    import finetune.storage.bdh  # noqa: F401  registers our own model types

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        outline = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    keys = _keys(folder)
    _refuse_quantized(folder, keys)
    translate = key_translation(outline)
    shards = {
        file: tuple(Weight(key, *translate(key)) for key in own) for file, own in keys.items()
    }
    return Checkpoint(folder, outline, shards)


def _keys(folder: Path) -> dict[str, list[str]]:
    """Keys by file."""
    if (folder / INDEX).is_file():
        files: dict[str, list[str]] = {}
        for key, file in _read_json(folder / INDEX)["weight_map"].items():
            files.setdefault(file, []).append(key)
        return files
    if not (folder / SINGLE).is_file():
        raise ModelNotFoundError(
            f"there are no safetensors in {str(folder)!r}",
            where=str(folder),
            why="weights are read and written as safetensors, shard by shard",
            fix="convert them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    return {SINGLE: list(tensors_in(folder / SINGLE))}


def _refuse_quantized(folder: Path, keys: dict[str, list[str]]) -> None:
    config = _read_json(folder / "config.json")
    found = config.get("quantization_config", {}).get("quant_method", "")
    for shard, own in () if found else keys.items():
        tensors = tensors_in(folder / shard)
        if missing := set(own) - tensors.keys():
            raise ModelNotFoundError(
                f"{shard} lacks {len(missing)} tensors that the index says are in it",
                where=f"{folder / shard}: {min(missing)}",
                fix="download the model again",
            )
        codes = sorted(kind for key, (kind, _) in tensors.items() if is_code(key, kind))
        found = found or next(iter(codes), "")
    if found:
        raise ConfigError(
            f"the weights in {str(folder)!r} are quantized ({found}), and nothing is merged into "
            "such weights",
            where=f"model.name: {folder}",
            why="a step of FP8 is 6 % of a weight, and what an adapter adds is mostly smaller: "
            "rounding would drop it",
            fix="--to adapter, and load it over these weights; or train on the BF16 weights that "
            "they were made from",
        )


# ------------------------------------------------------------------------------------------ write


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
        ConfigError: `out` is taken or inside an input folder, or the disk is full.
    """
    partial = out.parent / f"{out.name}.partial"
    _refuse_taken(out, partial, force=force, keep_clear=keep_clear)
    if partial.exists():
        shutil.rmtree(partial)
    may_not = "choose a folder that you may write to"
    with writing(f"{str(out)!r} cannot be written", where=str(out.resolve()), fix=may_not):
        partial.mkdir(parents=True)
        (partial / RECORD).write_text('{"finished": false}\n', encoding="utf-8")
    try:
        yield partial
    except ParityError:
        raise
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not is_of_the_disk(error):
            raise
        raise ConfigError(
            "the export cannot be written",
            where=str(out),
            why=first_line(error),
            fix="make room there, or choose a folder on another disk",
        ) from error
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
    merge: Merge = as_stored,
    encoders: dict[str, Encode] | None = None,
) -> None:
    """Write all shards, and the index if there was one; `encoders` are by layer name."""
    shard_of: dict[str, str] = {}
    size = 0
    for shard in checkpoint.shards:
        tensors: dict[str, Tensor] = {}
        for weight, stored in checkpoint.read(shard):
            tensors |= merge(weight, stored)
            encode = (encoders or {}).get(_layer(weight))
            if encode is not None:
                prefix = weight.key.removesuffix("weight")
                encoded = encode(tensors.pop(weight.key))
                tensors |= {prefix + name: tensor.contiguous() for name, tensor in encoded.items()}
        shard_of |= dict.fromkeys(tensors, shard)
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, out / shard, metadata={"format": "pt"})
    if (checkpoint.folder / INDEX).is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(shard_of.items()))}
        write_json(out / INDEX, index)


def weight_amax(checkpoint: Checkpoint, merge: Merge, layers: list[str]) -> dict[str, Tensor]:
    """Largest magnitude of each layer's merged weight (float32 scalar), in one pass."""
    return {
        _layer(weight): amax(merge(weight, stored)[weight.key])
        for shard in checkpoint.shards
        for weight, stored in checkpoint.read(shard)
        if _layer(weight) in layers
    }


def _layer(weight: Weight) -> str:
    """Name of the layer whose weight this is; empty for a bias."""
    return weight.name.removesuffix(".weight") if weight.name.endswith(".weight") else ""


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
        for section in (config, config.get("text_config", {})):
            section.pop("torch_dtype", None)  # the older name
            section["dtype"] = "bfloat16"
    write_json(out / "config.json", config)


def copy_companions(source: Path, out: Path, tokenizer: Path) -> None:
    """Copy the files beside the original weights, and the run's tokenizer."""
    for pattern in WEIGHTS_AND_MORE:
        for file in source.glob(pattern):
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    _copy_tokenizer(tokenizer, out)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for pattern in (*TOKENIZER, "generation_config.json"):  # where answers end
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)


def write_adapter(adapter: Path, out: Path, base: str, revision: str | None) -> None:
    """Copy the run's adapter with the name of its base model: a hub id, or an absolute folder."""
    shutil.copyfile(adapter / "adapter_model.safetensors", out / "adapter_model.safetensors")
    config = _read_json(adapter / "adapter_config.json")
    named = {"base_model_name_or_path": base, "revision": revision}
    write_json(out / "adapter_config.json", config | named)
    _copy_tokenizer(adapter, out)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, values: dict[str, Any], indent: int = 2) -> None:
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
