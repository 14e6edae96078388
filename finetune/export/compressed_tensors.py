"""FP8 and NVFP4 in the compressed-tensors layout, which vLLM and Transformers read.

    fp8    W8A8   weights per output channel, activations per token, dynamic
           L.weight               E4M3     [N, K]
           L.weight_scale                  [N, 1]      multiplies

    nvfp4  W4A4   16 values in a row share a scale, weights and activations alike
           L.weight_packed        uint8    [N, K/2]
           L.weight_scale         E4M3     [N, K/16]   multiplies
           L.weight_global_scale  float32  [1]         divides
           L.input_global_scale   float32  [1]         divides

`fp8`: weight ≈ code · weight_scale. The scale is the channel's amax over 448, stored in the
weight's type (as in llm-compressor); codes are made with the stored scale.

`nvfp4`: weight ≈ code · weight_scale / weight_global_scale. A global scale *divides*: 448 · 6 /
amax puts the largest block scale at 448. A byte has two codes, the first in its low half. Servers
fuse q, k and v (and gate and up) into one GEMM under one global scale, so these share their largest
amax. `input_global_scale` is the same for the layer's inputs, whose amax must be known beforehand.
It comes from training rows (`input_amax`), so that the parity check's evaluation rows stay unseen;
a larger input saturates.

Quantized are plain `nn.Linear` layers whose sizes are multiples of 16, except the output head,
whose rounding would hit the logits directly, and those that text does not reach (a vision tower),
which neither calibration nor parity check runs. Embeddings, norms and biases are in BF16, also of a
model in float32 or float16: NVFP4 unpacks to BF16 alone (0.20), and vLLM takes no float32 beside
such layers.

Sources: compressed-tensors 0.20 (`quantization/quant_scheme.py`: FP8_DYNAMIC, NVFP4;
`compressors/nvfp4`, `quantization/utils/helpers.py: generate_gparam`) and llm-compressor.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import ConfigError
from finetune.export.shards import Checkpoint, Merge, Weight
from finetune.precision.formats import E2M1, E4M3, SMALLEST_INVERSE, amax, cast
from finetune.precision.layers import without_adapters
from finetune.precision.scaling import nvfp4_scales
from finetune.storage.pretrained import beside_text

BLOCK = 16
"""Values under one NVFP4 scale; sizes of quantized layers are multiples of it."""
PRESETS = {
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
}
"""Preset and format of compressed-tensors by target."""
ONE_GEMM = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
GLOBAL = E4M3.max * E2M1.max
"""Largest magnitude of a code times a block scale: 448 · 6."""


def layers_to_quantize(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Names of the linear layers to quantize, and of the others.

    Raises:
        ConfigError: none can be, or some weights are stored in parts (experts).
    """
    parts = [w.key for shard in checkpoint.shards.values() for w in shard if not w.whole]
    if parts:
        raise ConfigError(
            "this model is stored in another shape than it computes in, which is not quantized yet",
            where=f"{checkpoint.folder}: {parts[0]} and {len(parts) - 1} more",
            why="several stored tensors make one parameter, as with experts",
            fix="--to merged, and quantize that with llm-compressor",
        )
    unreached = {
        id(m) for tower in beside_text(checkpoint.outline).values() for m in tower.modules()
    }
    chosen = [
        name
        for name, layer in checkpoint.linears.items()
        if id(layer) not in unreached and not any(size % BLOCK for size in layer.weight.shape)
    ]
    if not chosen:
        raise ConfigError(
            "this model has no layer that can be quantized",
            where=str(checkpoint.folder),
            why="only nn.Linear layers whose sizes are multiples of 16 are, except the output head "
            "(GPT-2 has Conv1D layers, BDH plain parameters, Falcon a class of its own)",
            fix="--to merged",
        )
    kept = [n for n in checkpoint.linears if n not in chosen]
    head = checkpoint.outline.get_output_embeddings()
    kept += [n for n, m in checkpoint.outline.named_modules() if m is head]
    return chosen, kept


def quantization_config(target: str, ignore: list[str]) -> dict[str, Any]:
    """Build the `quantization_config` of `config.json`; `ignore` lists layers that stay high."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    preset, form = PRESETS[target]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = form
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status="compressed",  # pyright: ignore[reportArgumentType]
        ignore=ignore,
    )
    return config.model_dump(mode="json", exclude_none=True)


def in_bf16(merge: Merge, outline: nn.Module) -> Merge:
    """`merge` with its tensors in BF16, but for those that the model computes in float32."""
    patterns = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = {part for name in patterns for part in getattr(outline, name, None) or ()}

    def cast_down(weight: Weight, stored: Tensor) -> dict[str, Tensor]:
        merged = merge(weight, stored)
        if kept.intersection(weight.name.split(".")):
            return merged
        return {
            key: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for key, tensor in merged.items()
        }

    return cast_down


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Load without two progress bars, which compressed-tensors (0.20) shows under TQDM_DISABLE."""
    from tqdm import tqdm

    class Hidden(tqdm):
        """A bar that is not shown."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})

    modules: list[Any] = []
    for name in ("offload.dispatch", "quantization.lifecycle.apply"):
        with contextlib.suppress(ImportError):  # another version has them elsewhere
            modules.append(importlib.import_module(f"compressed_tensors.{name}"))
    modules = [module for module in modules if hasattr(module, "tqdm")]
    for module in modules:
        module.tqdm = Hidden
    try:
        yield
    finally:
        for module in modules:
            module.tqdm = tqdm


def encode_fp8(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight [N, K] to FP8.

    Returns:
        `weight` E4M3 [N, K] and `weight_scale` [N, 1] in the weight's type (float32 for float16,
            which cannot represent small scales).
    """
    kept = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    scale = (amax(weight, 1) / E4M3.max).clamp(min=SMALLEST_INVERSE).to(kept)
    codes = cast(weight.float() / scale.float(), torch.ones(()), E4M3)
    return {"weight": codes, "weight_scale": scale}


def encode_nvfp4(weight: Tensor, largest: Tensor, inputs: float) -> dict[str, Tensor]:
    """Quantize a weight [N, K] to NVFP4.

    Args:
        largest: float32 scalar, amax of all weights that share the global scale.
        inputs: largest magnitude of the layer's inputs.

    Returns:
        `weight_packed` uint8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_global_scale` and
            `input_global_scale` float32 [1].
    """
    rows, columns = weight.shape
    blocks = weight.float().view(rows, columns // BLOCK, BLOCK)
    # The last "block" only adds the amax shared with other weights.
    block_amax = torch.cat([amax(blocks, -1).flatten(), largest.view(1)])
    inverse, block, scale = nvfp4_scales(block_amax)
    codes = cast(blocks, scale[:-1].view(rows, -1, 1), E2M1).view(rows, columns)
    return {
        "weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": block[:-1].view(rows, -1).to(E4M3.dtype),
        "weight_global_scale": inverse.reciprocal().view(1),
        "input_global_scale": torch.tensor([GLOBAL / inputs], dtype=torch.float32),
    }


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
