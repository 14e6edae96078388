"""A frozen base in four bits: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes.

NF4 has 16 levels at the quantiles of a normal distribution. 64 weights in a row share an absmax,
which is itself quantised: 4.127 bits a weight in all (`finetune.storage.sizes`). This is storage:
before each matmul a weight is dequantised to BF16, and multiplied in BF16. The weight gets no
gradient, so adapters are what trains. Which layers are held so is decided by Transformers: all
linear ones but the output head, tied weights and the last module.

Two things that libraries do are undone here. TRL casts adapters of a 4-bit base to BF16, where
updates below 2^-8 of a weight are lost; `masters_kept` keeps them float32 as over a plain base. And
on CPUs with AVX512-BF16 bitsandbytes repacks a weight at its first evaluation for a kernel that has
no gradient: training after it would go on with a base that passes none back. `prepare` forbids it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.errors import PlanError
from finetune.hardware.device import this_device
from finetune.precision.stored import stored_as

if TYPE_CHECKING:
    from torch import nn
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel


def quantization_config() -> BitsAndBytesConfig:
    """What Transformers calls QLoRA's storage: NF4, double quantisation, BF16 compute."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def stored_linears(model: nn.Module) -> dict[str, Any]:
    """Layers that a base in NF4 holds so, of a plain model or one with adapters, also on meta.

    Returns:
        Name -> module, also of the copies that `modules_to_save` trains in their place.
    """
    from peft import PeftModel
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    prefix = ""
    base: Any = model
    if isinstance(model, PeftModel):
        base, prefix = model.get_base_model(), "base_model.model."
    # Names inside PEFT's wrapping, to those of the model that is loaded.
    inside = re.compile(r"\.(base_layer|lora_|modules_to_save|original_module).*")
    plain = [inside.sub("", key) for key in get_keys_to_not_convert(base)]
    return {
        prefix + name: module
        for name, module in base.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and "lora_" not in name
        if should_convert_module(inside.sub("", name), plain)
    }


def build_random(shape: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """A model of random weights whose linear layers are quantised one by one as they are made.

    There is never more than one layer in full: the memory of making it is that of having it.

    Args:
        shape: the architecture.
        **kwargs: for `from_config`: `dtype` of what stays plain, `attn_implementation`.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import AutoHfQuantizer

    device = torch.device(this_device().kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, **kwargs)
    quantizer = AutoHfQuantizer.from_config(quantization_config(), pre_quantized=False)
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
    """Draw a plain layer as its class is initialised, and hold its weight in four bits."""
    import torch
    from bitsandbytes.nn import Params4bit
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    n, k, biased = layer.out_features, layer.in_features, layer.bias is not None
    with torch.device(device):
        plain = Conv1D(n, k) if layer.source_cls is Conv1D else nn.Linear(k, n, bias=biased)
    plain = plain.to(dtype)
    model._initialize_weights(plain)
    w_nk = plain.weight.data if isinstance(plain, nn.Linear) else plain.weight.data.T.contiguous()
    layer.weight = Params4bit(w_nk, requires_grad=False, **layer.weight.__dict__).to(device)
    layer.weight._is_hf_initialized = True  # parents that initialise their layers leave it alone
    if biased:
        layer.bias = nn.Parameter(plain.bias.data, requires_grad=False)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that was loaded in four bits fit to be trained and evaluated in turn.

    Raises:
        PlanError: it has no layer that is held in four bits.
    """
    layers: list[Any] = [module for module in model.modules() if stored_as(module)]
    if not layers:
        raise PlanError(
            "no layer of this model can be held in four bits",
            where=f"model.storage=nf4: {type(model).__name__}",
            why="only linear layers are, and the output head never",
            fix="~model.storage",
        )
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    return model


@contextlib.contextmanager
def masters_kept(model: nn.Module) -> Iterator[None]:
    """Give parameters that train back the type and bits that they had before the block.

    Around the making of an `SFTTrainer` over a model with adapters: TRL 1.16 casts those of a
    4-bit base to BF16, in which training stores them from then on.
    """
    four_bit = any(stored_as(module) for module in model.modules())
    held = [(p, p.data) for p in model.parameters() if p.requires_grad and four_bit]
    yield
    for parameter, data in held:
        if parameter.dtype != data.dtype:
            parameter.data = data.to(parameter.device)
