"""Source weights of an export: stored tensors shard by shard, with their names in the model.

A checkpoint is a folder with `config.json` and either one `model.safetensors` or several shards
under `model.safetensors.index.json`. Only one shard is read at a time.

File keys may differ from the parameter names in Transformers: prefixes are missing, keys were
renamed, experts stored one by one become one parameter. Transformers' own table
(`get_model_conversion_mapping`) translates them as `from_pretrained` does, over an *outline* of the
model on the meta device. The outline also gives each weight's kind: linear layer, embedding, output
head, tied pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from finetune.config.schema import ModelConfig
from finetune.errors import ConfigError, ModelNotFoundError
from finetune.training.model import locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHTS_AND_MORE = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*")


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

    if model.weights == "random":
        raise ConfigError(
            "the weights under this adapter are stored nowhere",
            where="model.weights: random",
            why="the run drew them by chance, and other versions or devices draw others",
            fix="adapters are exported of runs with model.weights=pretrained",
        )
    source = locate(model)
    if Path(source).is_dir():
        return Path(source).resolve()
    try:
        return Path(
            snapshot_download(
                source,
                revision=model.revision,
                allow_patterns=list(WEIGHTS_AND_MORE),
                ignore_patterns="consolidated*",  # a second copy, in another layout
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"the weights of {source!r} could not be had",
            where=f"model.name: {source}",
            why=str(error).strip().splitlines()[0],
            fix="check your connection; `hf auth login` for gated models",
        ) from error


def open_checkpoint(folder: Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Index a checkpoint's tensors without reading weights.

    Raises:
        ModelNotFoundError: safetensors files are missing.
        ConfigError: its weights are quantized.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import finetune.storage.bdh  # noqa: F401  registers our own model types

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    keys = _keys(folder)
    _refuse_quantized(folder, keys)
    name_of = _Names(outline)
    shards = {file: tuple(map(name_of, held)) for file, held in keys.items()}
    return Checkpoint(folder, outline, shards)


def _keys(folder: Path) -> dict[str, list[str]]:
    if (folder / INDEX).is_file():
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files: dict[str, list[str]] = {}
        for key, file in index["weight_map"].items():
            files.setdefault(file, []).append(key)
        return files
    if not (folder / SINGLE).is_file():
        raise ModelNotFoundError(
            f"there are no safetensors in {str(folder)!r}",
            where=str(folder),
            why="weights are read and written as safetensors, shard by shard",
            fix="convert them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    with safe_open(folder / SINGLE, framework="pt") as file:
        return {SINGLE: list(file.keys())}


def _refuse_quantized(folder: Path, keys: dict[str, list[str]]) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config", {}).get("quant_method", "")
    for shard, held in () if found else keys.items():
        with safe_open(folder / shard, framework="pt") as file:
            if missing := set(held) - set(file.keys()):
                raise ModelNotFoundError(
                    f"{shard} lacks {len(missing)} tensors that the index says are in it",
                    where=f"{folder / shard}: {min(missing)}",
                    fix="download the model again",
                )
            types = {file.get_slice(key).get_dtype() for key in held}
        found = found or next((t for t in sorted(types) if t.startswith(("F8", "F4"))), "")
    if found:
        raise ConfigError(
            f"the weights in {str(folder)!r} are quantised ({found}), and nothing is merged into "
            "such weights",
            where=f"model.name: {folder}",
            why="a step of FP8 is 6 % of a weight, and what an adapter adds is mostly smaller: "
            "rounding would drop it",
            fix="--to adapter, and load it over these weights; or train on the BF16 weights that "
            "they were made from",
        )


class _Names:
    """Translates file keys to `Weight`, by the rules of `from_pretrained`."""

    def __init__(self, outline: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(outline)
        self.renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self.converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.prefix = outline.base_model_prefix
        self.known = outline.state_dict()

    def __call__(self, key: str) -> Weight:
        from transformers.core_model_loading import rename_source_key

        name, part = rename_source_key(
            key, self.renamings, self.converters, self.prefix, self.known
        )
        if name not in self.known and key in self.known:  # the rule is for another model
            name, part = rename_source_key(key, [], [], self.prefix, self.known)
        return Weight(key, name, whole=part is None)
