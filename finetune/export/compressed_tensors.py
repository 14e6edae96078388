"""FP8 and NVFP4 in the compressed-tensors layout, which vLLM and Transformers read.

    fp8    W8A8   weights per output channel, activations per token, dynamic
    nvfp4  W4A4   16 values in a row share a scale, weights and activations alike

compressed-tensors makes the codes and scales, and says in `quantization_config` what they mean.
Added here is what a scale is taken from. Servers fuse q, k and v (and gate and up) into one GEMM
under one global scale of NVFP4, so these share their largest amax. The global scale of a layer's
inputs, whose amax must be known beforehand, comes from training rows (`input_amax`), so that the
parity check's evaluation rows stay unseen; a larger input saturates.

Quantized are plain `nn.Linear` layers whose sizes are multiples of 16, except the output head,
whose rounding would hit the logits directly, and those that text does not reach (a vision tower),
which neither calibration nor parity check runs. All else is in BF16, also of a model in float32:
NVFP4 unpacks to BF16 alone (0.20), and vLLM takes no float32 beside such layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ConfigError
from finetune.precision.formats import amax
from finetune.precision.layers import experts_in, without_adapters
from finetune.storage.pretrained import beside_text

BLOCK = 16
"""Values under one NVFP4 scale; sizes of quantized layers are multiples of it."""
PRESETS = {
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
}
"""Preset and format of compressed-tensors by target."""
ONE_GEMM = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Last names of layers that servers fuse into one GEMM."""


def layers_to_quantize(model: Any) -> tuple[list[str], list[str]]:
    """Names of the linear layers of a plain model to quantize, and of the others.

    Raises:
        ConfigError: none can be, or the model has experts in one parameter.
    """
    if experts := [*experts_in(model)]:
        raise ConfigError(
            "a model with experts in one parameter is not quantized yet",
            where=f"{experts[0]} and {len(experts) - 1} more",
            why="vLLM and Transformers read the experts' weights one by one",
            fix="--to merged, and quantize that with llm-compressor",
        )
    unreached = {id(m) for tower in beside_text(model).values() for m in tower.modules()}
    head = model.get_output_embeddings()
    chosen, kept = [], []
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear or layer is head:
            is_aligned = not any(size % BLOCK for size in layer.weight.shape)
            can = is_aligned and layer is not head and id(layer) not in unreached
            (chosen if can else kept).append(name)
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
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    preset, form = PRESETS[to]
    scheme: Any = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = form
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
        parent, _, leaf = name.rpartition(".")
        for together in ONE_GEMM:
            if leaf in together:
                names = [f"{parent}.{other}" for other in together]
                shared[name] = torch.stack([largest[n] for n in names if n in largest]).max()
    return shared


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
