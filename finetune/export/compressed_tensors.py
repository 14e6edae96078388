"""FP8 and NVFP4 in the compressed-tensors layout, which vLLM and Transformers read.

    fp8    W8A8   weights per output channel, activations per token, dynamic
    nvfp4  W4A4   16 values in a row share a scale, weights and activations alike

compressed-tensors makes the codes and scales, and says in `quantization_config` what they mean.
Added here is what a scale is taken from. Servers fuse q, k and v (and gate and up) into one GEMM
under one global scale of NVFP4, so these share their largest amax. The global scale of a layer's
inputs, whose amax must be known beforehand, comes from training rows (`input_amax`), so that the
parity check's evaluation rows stay unseen; a larger input saturates.

Quantized are plain `nn.Linear` layers whose sizes are multiples of 16, except the output head,
whose rounding would hit the logits directly, and those of towers for images and their projectors,
as in the files that vLLM's makers publish; of layers that servers fuse, all or none. Experts
that Transformers stacks in one parameter are stored one by one, and are quantized in the files
(`quantize_saved`, FP8 alone). All else is in BF16, also of a model in float32: NVFP4 unpacks to
BF16 alone (0.20), and vLLM takes no float32 beside such layers.

vLLM makes routers linear layers, too, and knows layers by their names in the files: `ignore` has
the name of each weight matrix that is kept, of the model and of the files.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finetune.errors import ConfigError
from finetune.export.folder import write_json
from finetune.precision.model.layers import experts_in, without_adapters
from finetune.precision.model.towers import modules_beside
from finetune.precision.numbers.formats import amax

BLOCK = 16
"""Values under one NVFP4 scale; sizes of quantized layers are multiples of it."""
PRESETS = {
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
}
"""Preset and format of compressed-tensors by target."""
ONE_GEMM = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Last names of layers that servers fuse into one GEMM."""
EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
"""Name of an expert's weight in a file."""


def layers_to_quantize(
    model: Any, to: str = "fp8", stored: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """Names of the linear layers of a plain model to quantize, and of other layers with a matrix.

    Args:
        stored: names of the weights in the model's files.

    Raises:
        ConfigError: none can be, or the model has experts in one parameter.
    """
    experts = experts_in(model)
    # FP8 needs no calibration, and experts that the files have one by one can be quantized there.
    if experts and (to != "fp8" or not any(map(EXPERT.search, stored))):
        raise ConfigError(
            f"a model with experts in one parameter is not quantized to {to.upper()} yet",
            where=f"{next(iter(experts))} and {len(experts) - 1} more",
            why="vLLM and Transformers read the experts' weights one by one"
            if to == "fp8"
            else "an expert's inputs cannot be calibrated where no row reaches it",
            fix="--to merged, and quantize that with llm-compressor",
        )
    beside = modules_beside(model)
    head = model.get_output_embeddings()
    chosen, kept = [], []
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(layer, nn.Embedding):
            is_aligned = not any(size % BLOCK for size in weight.shape)
            can = is_aligned and layer is not head and id(layer) not in beside
            (chosen if can and type(layer) is nn.Linear else kept).append(name)
    # A server multiplies fused layers in one GEMM, which has one type.
    unfit = {name for odd in kept for name in fused_with(odd)}
    kept += [name for name in chosen if name in unfit]
    chosen = [name for name in chosen if name not in unfit]
    if not chosen:
        raise ConfigError(
            "this model has no layer that can be quantized",
            where=type(model).__name__,
            why="only nn.Linear layers whose sizes are multiples of 16 are, except the output head "
            "(GPT-2 has Conv1D layers, BDH plain parameters, Falcon a class of its own)",
            fix="--to merged",
        )
    return chosen, kept


def quantize(
    model: Any, to: str, layers: list[str], ignore: list[str], inputs: dict[str, float]
) -> None:
    """Replace the weights of a model in BF16 by codes and scales, as they are to be saved.

    The model can be saved afterwards, and no longer be called.

    Args:
        to: `fp8` or `nvfp4`, a key of `PRESETS`.
        layers: names of the linear layers to quantize; `ignore` are the others.
        inputs: largest magnitude of each layer's inputs, for `nvfp4`; empty for `fp8`.
    """
    from compressed_tensors.quantization import QuantizationConfig

    scheme, form = _scheme(to), PRESETS[to][1]
    largest = share_amax({name: amax(model.get_submodule(name).weight) for name in inputs})
    for name in layers:
        layer = model.get_submodule(name)
        tensors = encode(layer.weight.detach(), scheme, largest.get(name), inputs.get(name))
        del layer.weight
        for key, tensor in tensors.items():
            layer.register_buffer(key, tensor.contiguous())
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status="compressed",  # pyright: ignore[reportArgumentType]
        ignore=ignore,
    )
    model.config.quantization_config = config.model_dump(mode="json", exclude_none=True)


def encode(
    weight: Tensor, scheme: Any, largest: Tensor | None = None, inputs: float | None = None
) -> dict[str, Tensor]:
    """Codes and scales of a weight [N, K] under a scheme of compressed-tensors, by their name.

    Args:
        largest: float32 scalar, amax of all weights that share a global scale; with `inputs`.
        inputs: largest magnitude of the layer's inputs; None where they are scaled as they come,
            and there is no global scale.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    wide, tensors = weight.float(), {}
    if inputs is not None and largest is not None:
        tensors["weight_global_scale"] = generate_gparam(-largest, largest)
        reach = torch.tensor(inputs)
        tensors["input_global_scale"] = generate_gparam(-reach, reach)
    groups = wide.unflatten(-1, (-1, scheme.weights.group_size or weight.shape[-1]))
    shared = tensors.get("weight_global_scale")
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, shared)
    if shared is None:
        scale = scale.to(weight.dtype)  # in which it is stored, and multiplied
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.compress(tensors | {"weight": wide, "weight_scale": scale}, scheme)


def share_amax(largest: dict[str, Tensor]) -> dict[str, Tensor]:
    """Unify the amax (a float32 scalar by layer name) of layers that servers fuse into one GEMM.

    Example: q_proj 1.0, k_proj 3.0, v_proj 2.0 all become 3.0.
    """
    shared = dict(largest)
    for name in largest:
        shared[name] = torch.stack([largest[n] for n in fused_with(name) if n in largest]).max()
    return shared


def fused_with(name: str) -> list[str]:
    """Names of the layers that servers fuse with this one into one GEMM, its own among them."""
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{other}" for other in next((g for g in ONE_GEMM if leaf in g), (leaf,))]


def quantize_saved(folder: Path) -> int:
    """Quantize the experts in the files of a model that `quantize` has saved in FP8; their number.

    Transformers reads such files only with `dequantize` (5.23), which is put into the
    configuration: without it, it would take the codes for weights.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = config["quantization_config"]
    scheme = _scheme("fp8")
    where, kept, count = {}, [], 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        names = [*tensors]
        for name in names:
            layer = name.removesuffix(".weight")
            if EXPERT.search(name):
                made = encode(tensors.pop(name), scheme)
                tensors |= {f"{layer}.{key}": value for key, value in made.items()}
                count += 1
            elif (
                layer != name and tensors[name].dim() == 2 and f"{layer}.weight_scale" not in names
            ):
                kept.append(layer)
        save_file(tensors, file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file.name)
    found["ignore"] = sorted({*found["ignore"], *kept})
    if count:
        found["dequantize"] = True
    write_json(folder / "config.json", config)
    if (index := folder / "model.safetensors.index.json").is_file():
        values = json.loads(index.read_text(encoding="utf-8"))
        write_json(index, values | {"weight_map": where})
    return count


def _scheme(to: str) -> Any:
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    preset, form = PRESETS[to]
    scheme: Any = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = form
    return scheme


def input_amax(
    model: nn.Module, layers: list[str], batches: Iterable[dict[str, Any]]
) -> dict[str, float]:
    """Largest magnitude of the inputs of each layer.

    Args:
        model: the stock model, with or without adapter.
        layers: names of linear layers, as in the stock model.
        batches: arguments of the model's forward.

    Raises:
        ConfigError: a layer got no input, or one that is not finite.
    """
    base = without_adapters(model)
    largest: dict[str, Tensor] = {}

    def watch(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen = amax(args[0])
        largest[name] = torch.maximum(seen, largest.get(name, seen))

    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for name in layers:
            hook = base.get_submodule(name).register_forward_pre_hook(partial(watch, name))
            hooks.callback(hook.remove)
        for batch in batches:
            # With a cache Transformers would not keep packed documents apart.
            model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False)
    found = {name: float(value) for name, value in largest.items()}
    for name in layers:
        if not 0 < found.get(name, 0.0) < float("inf"):
            raise ConfigError(
                f"the inputs of {name} could not be calibrated",
                where="--to nvfp4",
                why=f"their largest magnitude on the training rows is {found.get(name, 'unknown')}",
                fix="--to fp8 needs no calibration",
            )
    return found
