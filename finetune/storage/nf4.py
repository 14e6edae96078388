"""A frozen base in four bits: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes.

NF4 has 16 levels at the quantiles of a normal distribution; 64 weights in a row share an absmax,
itself stored in 8 bits, 256 of them under one float32 (double quantization):

    bits per weight = 4 + 8 / 64 + 32 / (64 · 256) = 4.127

Weights are dequantized to BF16 before each matmul and get no gradient. Transformers chooses the
layers: all linear ones but the output head, tied weights and the last module. Towers for images and
their projectors are left out as well, as in FP8 (`finetune.precision.stored.linear`).

Two library behaviours are undone here. TRL casts adapters of a 4-bit base to BF16, where updates
below 2^-8 of a weight are lost; `masters_kept` keeps them float32. On CPUs with AVX512-BF16
bitsandbytes repacks a weight at its first evaluation for a kernel without gradient, which would
break later training; `prepare` disables it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.errors import PlanError
from finetune.hardware.device import this_device
from finetune.precision.model.towers import beside_text
from finetune.precision.stored.linear import stored_as
from finetune.storage.pretrained import auto_class

if TYPE_CHECKING:
    from torch import nn
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel


BLOCK = 64
"""Number of weights that share an absmax."""
SUPERBLOCK = 256
"""Number of absmaxes that share a float32 scale."""


def nf4_bytes(numel: int) -> int:
    """Bytes of one weight of `numel` elements with its scales, lookup tables left out."""
    blocks = math.ceil(numel / BLOCK)
    return math.ceil(numel / 2) + blocks + 4 * math.ceil(blocks / SUPERBLOCK)


def quantization_config(outline: Any) -> BitsAndBytesConfig:
    """Configuration of QLoRA's storage in Transformers: NF4, double quantization, BF16 compute.

    Args:
        outline: the plain model, also on the meta device.
    """
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=_left_out(outline) if beside_text(outline) else None,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def stored_linears(model: nn.Module) -> dict[str, Any]:
    """Layers that a base in NF4 stores in four bits, plain or with adapters, also on meta.

    Returns:
        Name -> module, including the copies that `modules_to_save` trains.
    """
    from peft import PeftModel
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    adapted = isinstance(model, PeftModel)
    base: Any = model.get_base_model() if adapted else model
    prefix = "base_model.model." if adapted else ""
    # Maps names inside PEFT's wrapping to the loaded model's.
    inside = re.compile(r"\.(base_layer|lora_|modules_to_save|original_module).*")
    plain = [inside.sub("", key) for key in _left_out(base)]
    return {
        prefix + name: module
        for name, module in base.named_modules()
        # Of a model on meta the layers are plain still: Transformers replaces them as it loads.
        if isinstance(module, (nn.Linear, Conv1D)) and "lora_" not in name
        if should_convert_module(inside.sub("", name), plain)
    }


def _left_out(model: Any) -> list[str]:
    """Names of the modules of a plain model that are not stored in four bits."""
    from transformers.quantizers.base import get_keys_to_not_convert

    return [*get_keys_to_not_convert(model), *beside_text(model)]


def build_random(shape: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """Build a model of random weights, quantizing each linear layer as it is made.

    At most one layer exists in full precision. `**kwargs` are for `from_config`.
    """
    import torch
    from transformers.quantizers import AutoHfQuantizer

    device = torch.device(this_device().kind)
    with torch.device("meta"):
        model = auto_class(shape).from_config(shape, **kwargs)
    quantizer = AutoHfQuantizer.from_config(quantization_config(model), pre_quantized=False)
    quantizer.validate_environment()
    quantizer.preprocess_model(model, device_map={"": device})
    with torch.no_grad():
        for module in model.modules():
            if stored_as(module):
                _fill(module, model, device, kwargs["dtype"])
            else:
                module.to_empty(device=device, recurse=False)
                model._initialize_weights(module)
    model.tie_weights()
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer  # pyright: ignore[reportAttributeAccessIssue]
    return prepare(model)


def _fill(layer: Any, model: PreTrainedModel, device: Any, dtype: Any) -> None:
    """Draw a plain layer as its class initializes it, and store its weight in four bits."""
    import torch
    from bitsandbytes.nn import Params4bit
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    n, k, biased = layer.out_features, layer.in_features, layer.bias is not None
    with torch.device(device):
        plain = Conv1D(n, k) if layer.source_cls is Conv1D else nn.Linear(k, n, bias=biased)
    # Drawn in float32 and rounded once, as in a model that is not stored.
    plain = plain.to(dtype)
    model._initialize_weights(plain)
    w_nk = plain.weight.data if isinstance(plain, nn.Linear) else plain.weight.data.T.contiguous()
    layer.weight = Params4bit(w_nk, requires_grad=False, **layer.weight.__dict__).to(device)
    layer.weight._is_hf_initialized = True  # parents that initialize their layers leave it alone
    if biased:
        layer.bias = nn.Parameter(plain.bias.data, requires_grad=False)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Prepare a model loaded in four bits for alternating training and evaluation.

    Raises:
        PlanError: it has no layer stored in four bits.
    """
    layers: list[Any] = [module for module in model.modules() if stored_as(module)]
    if not layers:
        raise PlanError(
            "no layer of this model can be stored in four bits",
            where=f"model.storage=nf4: {type(model).__name__}",
            why="only linear layers are, and the output head never",
            fix="~model.storage",
        )
    for layer in layers:
        # bitsandbytes repacks such a weight at its first evaluation, for a kernel without a
        # gradient.
        layer.support_avx512bf16_for_cpu = False
    return model


@contextlib.contextmanager
def masters_kept(model: nn.Module) -> Iterator[None]:
    """Restore type and bits of the trainable parameters after the block.

    For the construction of an `SFTTrainer`: TRL 1.16 casts adapters of a 4-bit base to BF16.
    """
    four_bit = any(stored_as(module) for module in model.modules())
    masters = [(p, p.data) for p in model.parameters() if p.requires_grad and four_bit]
    yield
    for parameter, data in masters:
        if parameter.dtype != data.dtype:
            # The bits of before: a cast to BF16 and back has lost the last sixteen.
            parameter.data = data.to(parameter.device)
