"""The auto class of Transformers that builds an architecture, and the part of it that text trains.

Most checkpoints are of a causal model. Gemma 3, Mistral 3, Qwen-VL and others are published whole,
with towers for images or sound and the decoder as one part of them. Text alone never reaches those
towers, so nothing in them gets a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
"""Auto classes of models that generate text, in order of preference."""


def auto_class(config: PretrainedConfig) -> Any:
    """The first of `CLASSES` that knows this architecture, or that the checkpoint's own code names.

    Raises:
        ConfigError: no such class; a model that is not generative, or an encoder and decoder.
    """
    import transformers

    import finetune.storage.bdh  # noqa: F401  makes our own model types known

    remote = getattr(config, "auto_map", None) or {}
    for name in CLASSES:
        cls = getattr(transformers, name, None)
        if cls is not None and (name in remote or type(config) in cls._model_mapping):
            return cls
    raise ConfigError(
        f"Transformers has no text-generating model of type {config.model_type!r}",
        where="model.name",
        why=f"none of {', '.join(CLASSES)} takes a {type(config).__name__}",
        fix="a decoder model, such as Llama, Qwen, Gemma or Mistral; an encoder with a decoder or "
        "a classifier trains in a script of your own, with setup_fp8_mixed_precision_training()",
    )


def decoder_name(model: PreTrainedModel) -> str:
    """Dotted name of the decoder in a model of several parts; empty in one that is all text."""
    if model.config.get_text_config(decoder=True) is model.config:
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def beside_text(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Outermost modules that text does not reach: outside of decoder and output embeddings.

    Names are of the plain model. The towers of Gemma 3: `model.vision_tower`,
    `model.multi_modal_projector`.
    """
    decoder = decoder_name(model)
    if not decoder:
        return {}
    kept, found = {model.get_submodule(decoder), model.get_output_embeddings()}, {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            inside = set(child.modules())
            if child in kept:
                continue
            if inside & kept:
                walk(child, f"{prefix}{name}.")
            elif next(child.parameters(), None) is not None:
                found[prefix + name] = child

    walk(model, "")
    return found


def fit_trl(model: PreTrainedModel) -> None:
    """Let the fused loss of TRL (1.16) find its way in an architecture; only Llama 4 needs it.

    It calls the backbone as `base_model`, and `Llama4ForCausalLM` names an attribute for that which
    only its multimodal parent has (Transformers 5.23). It adds the routers' auxiliary loss for a
    number of experts that Llama 4's configuration does not have by that name; the model's own loss
    has no such term.
    """
    if not hasattr(model, model.base_model_prefix) and hasattr(model, "model"):
        model.base_model_prefix = "model"
    text = model.config.get_text_config()
    if hasattr(text, "output_router_logits") and not hasattr(text, "num_experts"):
        text.router_aux_loss_coef = 0.0
