"""The model a job trains: shape, adapters, and how the base is held.

Built on the meta device by the installed transformers and PEFT, whose layers have been the same for
years; how 4-bit products are done and fused kernels are put in by hand.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from tests.benchmarks.score import fused, packed
from tests.benchmarks.score.attention import NAMES, CausalMask, register_kernels
from tests.benchmarks.score.experts import separate_experts
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.shapes import config_of

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PACKED = ("nf4", "nf4-dq", "gptq4", "gptq4-column", "int8")
_FUSED_ATTENTION = ("MistralAttention", "LlamaAttention", "MixtralAttention", "GraniteAttention")
_MADE_ON_CPU = ("BOFTConfig", "UniLoraConfig")
"""Adapters that read what they have just drawn; small enough to be real."""


class CannotRunError(Exception):
    """A job that cannot be run without memory; its text is the reason."""


def build_model(job: Job, layers: int | None = None) -> Any:
    """The model of `job` on the meta device, with `layers` layers instead of its own."""
    from transformers import AutoModelForCausalLM

    register_kernels()
    config = config_of(job.shape, layers)
    config.use_cache = False
    config.scored_compute = TYPES[job.compute]
    config.scored_mask = CausalMask()
    config._attn_implementation = NAMES.get(job.attention, job.attention)
    held = TYPES.get(job.weights, TYPES[job.compute])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=held)
    if config.model_type == "mixtral":
        separate_experts(model)
    model.train()
    return model


def adapt(base: Any, job: Job) -> Any:
    """Attach the adapter and hold the base as the job says. Returns the model to call."""
    model = _attach(base, job) if job.adapter else base
    if job.weights in PACKED:
        hold_packed(base, base.get_output_embeddings(), job)
    if job.float32_rest:  # `prepare_model_for_kbit_training`: all that is not packed
        for p in base.parameters():
            if p.dtype in (torch.bfloat16, torch.float16):
                p.data = p.data.float()
    if job.float32_norms:
        for name, module in base.named_modules():
            if "norm" in name:
                module.float()
    if job.fused_kernels:
        _fuse(base, job)
    return model


def _attach(base: Any, job: Job) -> Any:
    import peft

    options = dict(job.adapter_options)
    half = options.pop("half", "")
    kind = getattr(peft, options.pop("config_class", "LoraConfig"))
    config = kind(task_type="CAUSAL_LM", **{k: _thawed(v) for k, v in options.items()})
    try:
        with torch.device("cpu" if kind.__name__ in _MADE_ON_CPU else "meta"):
            model = peft.get_peft_model(
                base, config, autocast_adapter_dtype=job.adapter_type == "float32"
            )
    except NotImplementedError as error:  # an operator whose result depends on data
        raise CannotRunError(f"{kind.__name__} looks at data when it is made") from error
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise CannotRunError(f"{kind.__name__} looks at data when it is made") from error
    for name, p in model.named_parameters():
        if half and p.requires_grad:  # the other factor of the adapter is frozen
            p.requires_grad_(f"lora_{half}" in name)
    made = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if job.trainable and made != job.trainable:
        raise CannotRunError(
            f"the installed PEFT makes {kind.__name__} of another size than the row's"
        )
    return model


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(v, tuple) and len(v) == 2 for v in value)
        return dict(value) if pairs else list(value)
    return value


def hold_packed(model: Any, head: nn.Module, job: Job) -> None:
    for module in list(model.modules()):
        inside = getattr(module, "base_layer", None)
        layer = inside if isinstance(inside, nn.Linear) else module
        plain = isinstance(layer, nn.Linear) and not layer.weight.requires_grad
        if (
            plain
            and not isinstance(layer, packed.PackedLinear)
            and (layer is not head or job.packs_head)
        ):
            packed.pack(layer, job.weights, TYPES[job.compute], keeps_input=job.keeps_packed_input)
    wrappers = {"bnb": packed.forward_bnb_lora, "gptq": packed.forward_gptq_lora}
    if job.lora_wrapper in wrappers:
        from peft.tuners.lora import LoraLayer

        adapted: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer)]
        for layer in adapted:
            layer.scored_autocast = job.autocast
            layer.forward = types.MethodType(wrappers[job.lora_wrapper], layer)


def _fuse(model: Any, job: Job) -> None:
    drop = float(dict(job.adapter_options).get("lora_dropout", 0.0))
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            fused.fuse_norm(module)
        elif name in _FUSED_ATTENTION and job.adapter:
            fused.fuse_attention(module, drop)
