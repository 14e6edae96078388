"""What stands beside the decoder of a model of several parts: towers for images, projectors.

    Gemma 3     model.language_model | model.vision_tower, model.multi_modal_projector
    Qwen3-VL    model.language_model | model.visual, its projector (`merger`) inside

Found by structure: what holds weights and is neither decoder nor output embeddings. Frozen parts of
it stay in high precision: their rounding would be in every token of an image, and without gradients
they have one GEMM of the three to gain. What trains there is planned like any other layer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

FROZEN_TOWER = "beside the decoder (tower or projector), frozen: kept in high precision"


def decoder_name(model: Any) -> str:
    """Dotted name of the decoder in a model of several parts; empty in one that is all text."""
    config = getattr(model, "config", None)
    parts = getattr(config, "get_text_config", None)
    # The encoder of a translator is text, too.
    if not callable(parts) or getattr(config, "is_encoder_decoder", False):
        return ""
    if parts(decoder=True) is config:
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def beside_text(model: Any) -> dict[str, nn.Module | nn.Parameter]:
    """Outermost modules and parameters that text does not reach: outside of decoder and head.

    Names are of the plain model. LLaVA-NeXT has `model.vision_tower`,
    `model.multi_modal_projector`, and the parameter `model.image_newline`.
    """
    decoder = decoder_name(model)
    if not decoder:
        return {}
    # Outermost ones, so that a tower is one line of the notes and not hundreds.
    kept = {model.get_submodule(decoder), model.get_output_embeddings()}
    found: dict[str, nn.Module | nn.Parameter] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, own in module.named_parameters(recurse=False):
            found[prefix + name] = own
        for name, child in module.named_children():
            if child in kept:
                continue
            if set(child.modules()) & kept:
                walk(child, f"{prefix}{name}.")
            elif next(child.parameters(), None) is not None:
                found[prefix + name] = child

    walk(model, "")
    return found


def parameters_of(part: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    """The parameters of one of `beside_text`, without those that PEFT trains a copy of."""
    if isinstance(part, nn.Parameter):
        return [part]
    return [p for name, p in part.named_parameters() if "original_module" not in name.split(".")]


def modules_beside(model: Any) -> set[int]:
    """Ids of all modules in `beside_text`, and of what PEFT has put around them."""
    parts = beside_text(model).values()
    return {id(m) for part in parts if isinstance(part, nn.Module) for m in part.modules()}
