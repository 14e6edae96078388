"""Merged weights: W + s·B·A in float32, rounded once. ([N, K] + s · [N, r] @ [r, K])

PEFT knows the meaning of an adapter (rank and alpha patterns, rsLoRA, DoRA, GPT-2's transposed
weights, biases, `modules_to_save`), so PEFT merges, into an outline of the model whose base weights
take no memory. A stored weight is put into its layer in float32, merged by PEFT's own `merge()`,
and taken out in its stored type. Memory: the adapter in float32 and the temporaries of one weight.

Nothing is dropped silently: each adapter tensor without a place in the outline, and each place
without a stored weight, raises.

If the adapter changes one half of a tied pair, both are written, and the configuration unties them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ConfigError, some
from finetune.export.shards import Checkpoint, Weight

ADAPTER = "default"
AS_IT_IS = "--to adapter keeps the adapter as it is"
NOT_WEIGHTS = ("layer_replication", "trainable_token_indices", "target_parameters")


def on_experts(adapter: Path) -> bool:
    """True if an adapter is on parameters of a model, such as the stacked weights of experts."""
    from peft import PeftConfig

    return bool(getattr(PeftConfig.from_pretrained(str(adapter)), "target_parameters", None))


class Merger:
    """Adapter over the outline of a checkpoint.

    Attributes:
        untied: parameters of tied pairs that the adapter separates, each with its other half.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Path) -> None:
        """Load the adapter in a folder over the original weights.

        Raises:
            ConfigError: a part of it has no place in the model or its weights, or cannot be merged.
        """
        from peft import PeftConfig, PeftModel, set_peft_model_state_dict
        from peft.utils import load_peft_weights

        self.where = str(adapter)
        config = PeftConfig.from_pretrained(str(adapter))
        for name in NOT_WEIGHTS:
            if getattr(config, name, None):
                raise self._unmergeable(f"its {name} is no change of a stored weight")
        outline = copy.deepcopy(checkpoint.outline)
        empty = _without_memory(outline)
        model = PeftModel(outline, config, low_cpu_mem_usage=True)
        tensors = load_peft_weights(str(adapter), device="cpu")
        self.copies = _copies(tensors)
        try:
            loaded = set_peft_model_state_dict(model, tensors, low_cpu_mem_usage=True)
        except KeyError as error:  # of `modules_to_save`
            raise self._incomplete([str(error.args[0])]) from error
        except RuntimeError as error:  # load_state_dict's, about shapes
            raise ConfigError(
                "the adapter does not fit the original weights",
                where=self.where,
                why=str(error).strip().splitlines()[1].strip(),
                fix="export over the model that the run was trained on: model.name, model.revision",
            ) from error
        if loaded.unexpected_keys:
            raise self._homeless(loaded.unexpected_keys)
        self.layers = self._adapted(model.get_base_model())
        self.replaced = _replaced(model.get_base_model(), empty)
        if lacking := [n for n, p in model.named_parameters() if p.is_meta]:
            raise self._incomplete(lacking)
        touched = set(self.replaced) | {f"{name}.weight" for name in self.layers}
        touched |= {f"{n}.bias" for n, layer in self.layers.items() if layer.lora_bias.get(ADAPTER)}
        tied = checkpoint.tied
        self.untied = {n: tied[n] for n in tied if n in touched or tied[n] in touched}
        stored = {name for name, weight in checkpoint.weights.items() if weight.whole}
        self.apart = {a: b for a, b in self.untied.items() if a in stored and b not in stored}
        if homeless := touched - stored - set(self.apart.values()):
            raise self._homeless(sorted(homeless))

    def __call__(self, weight: Weight, stored: Tensor) -> dict[str, Tensor]:
        """Merge the adapter into a stored tensor; keeps its type and shape.

        Returns:
            The merged tensor by its key; the missing half of a separated tied pair beside it, by
            its parameter's name.

        Raises:
            ConfigError: the merged weight is not finite, or the base differs from the run's.
        """
        merged, other = {weight.key: self._merge(weight.name, stored)}, self.apart.get(weight.name)
        return merged if other is None else merged | {other: self._merge(other, stored)}

    def _merge(self, name: str, stored: Tensor) -> Tensor:
        began = self.copies.get(name, stored)
        if began.shape != stored.shape or not torch.equal(began.to(stored.dtype), stored):
            raise ConfigError(
                f"the run began with another {name} than the original weights hold",
                where=self.where,
                why="the adapter file has a copy of it, which differs",
                fix=AS_IT_IS,
            )
        owner, _, leaf = name.rpartition(".")
        if name in self.replaced:
            merged = self.replaced[name]
        elif owner in self.layers and leaf == "weight":
            merged = _merge_into(self.layers[owner], stored)
        elif owner in self.layers and leaf == "bias" and self.layers[owner].lora_bias[ADAPTER]:
            layer = self.layers[owner]
            merged = stored.float() + layer.lora_B[ADAPTER].bias * layer.scaling[ADAPTER]
        else:
            return stored
        assert merged.shape == stored.shape, name
        if not merged.isfinite().all():
            raise ConfigError(
                f"{name} is not finite with the adapter merged", where=self.where, fix=AS_IT_IS
            )
        return merged.detach().to(stored.dtype).contiguous()

    def _adapted(self, base: nn.Module) -> dict[str, Any]:
        from peft.tuners.lora.layer import Embedding, Linear
        from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        layers = {}
        for name, module in base.named_modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                if not isinstance(module, ModulesToSaveWrapper):
                    raise self._unmergeable(f"{name} is a {type(module).__name__}")
            elif isinstance(module, BaseTunerLayer):
                if not isinstance(module, Linear | Embedding):
                    raise self._unmergeable(f"{name} is a {type(module).__name__}")
                for variant in module.lora_variant.values():
                    if not isinstance(variant, DoraLinearVariant | DoraEmbeddingVariant):
                        raise self._unmergeable(f"{name} is a {type(variant).__name__}")
                for parameter_name, parameter in module.named_parameters():
                    if "base_layer" not in parameter_name.split("."):
                        parameter.data = parameter.data.float()
                layers[name] = module
        return layers

    def _unmergeable(self, why: str) -> ConfigError:
        return ConfigError("this adapter cannot be merged", where=self.where, why=why, fix=AS_IT_IS)

    def _incomplete(self, names: list[str]) -> ConfigError:
        return ConfigError(
            f"the adapter lacks {len(names)} tensors that its configuration promises",
            where=f"{self.where}: {names[0]}",
            fix="export from the run folder as the run left it",
        )

    def _homeless(self, names: list[str]) -> ConfigError:
        return ConfigError(
            f"{len(names)} tensors of the adapter have no stored weight to go to",
            where=f"{self.where}: {some(names, 3)}",
            why="left out, the export would not be what was trained (the model may be another one, "
            "or stores several such weights as parts of one)",
            fix=AS_IT_IS,
        )


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove and return the weights that PEFT saves beside adapters of embeddings."""
    keys = [key for key in tensors if key.endswith(".base_layer.weight")]
    name = {key: key.removeprefix("base_model.model.").replace(".base_layer.", ".") for key in keys}
    return {name[key]: tensors.pop(key) for key in keys}


def _without_memory(outline: nn.Module) -> dict[int, nn.Parameter]:
    """Put one number behind all elements of each parameter, on the CPU; new parameters by id.

    PEFT moves an adapter to the device and type of its weight: a meta weight would lose it, a BF16
    weight round it. So all are float32 here.
    """
    empty = {}
    for module in outline.modules():
        for name, parameter in module.named_parameters(recurse=False):
            one = torch.zeros(()).expand(parameter.shape)
            new = nn.Parameter(one, requires_grad=False)
            module.register_parameter(name, new)
            empty[id(new)] = new
    return empty


def _replaced(base: nn.Module, empty: dict[int, nn.Parameter]) -> dict[str, Tensor]:
    """Parameters that the adapter file has in full: `modules_to_save`, trained biases."""
    found = {}
    for name, parameter in base.named_parameters():
        parts = name.split(".")
        adapter = any(part.startswith("lora_") for part in parts)
        if id(parameter) not in empty and not adapter and not parameter.is_meta:
            wrapped = {"base_layer", "original_module", "modules_to_save", ADAPTER}
            found[".".join(part for part in parts if part not in wrapped)] = parameter
    return found


def _merge_into(layer: Any, stored: Tensor) -> Tensor:
    """Compute W + s·B·A (or DoRA's) by PEFT, in float32; the layer is unchanged afterwards."""
    base = layer.get_base_layer()
    empty, bias = base.weight, getattr(base, "bias", None)
    base.weight = nn.Parameter(stored.to(torch.float32, copy=True), requires_grad=False)
    if bias is not None:  # merged separately, with its own stored tensor
        base.bias = nn.Parameter(torch.zeros(bias.shape), requires_grad=False)
    try:
        with torch.no_grad():
            layer.merge()
        return base.weight.data
    finally:
        base.weight = empty
        if bias is not None:
            base.bias = bias
        layer.merged_adapters.clear()
