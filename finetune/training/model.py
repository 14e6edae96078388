"""A `ModelConfig`'s model: on the meta device, its attention, and the loaded model.

`model.attention` is resolved to the implementation that a model is loaded with:

    auto ─┬─ packed or padding-free rows, and nothing speaks against it ─> varlen
          └─ other rows: padded, or whole ──────────────────────────────> the model's own (SDPA)
    varlen ──── something speaks against it ────────────────────────────> ConfigError
    any other name of Transformers ─────────────────────────────────────> as configured

Resolved once, from the model on the meta device and the device it trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.methods import TEACHER
from finetune.config.schema import ModelConfig, RunConfig
from finetune.config.sft import padding_free
from finetune.errors import ConfigError, FinetuneError, first_line
from finetune.hardware.device import Device
from finetune.hardware.versions import version
from finetune.precision.model.layers import plain_name, without_adapters
from finetune.storage import nf4
from finetune.storage.pretrained import auto_class, fit_trl, load_shape, load_whole, loading, locate
from finetune.training import scope

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from finetune.precision.model.plan import LayerPlan

AUTO, VARLEN = "auto", "varlen"
"""Our values of `model.attention`; the others are names of Transformers."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the dropout of attention weights in Transformers' configurations."""
HEAD_DIMS = ("head_dim", "qk_head_dim", "global_head_dim")
NO_BACKWARD_ABOVE_192 = ((8, 6), (8, 9))
"""Compute capabilities whose shared memory FlashAttention-2's backward of wide heads exceeds."""


def is_published_fp8(shape: PretrainedConfig) -> bool:
    """True if the configuration describes FP8 weights, ours or published ones.

    Raises:
        StorageNotComputeError: FP8 in an unknown layout.
    """
    if getattr(shape.get_text_config(decoder=True), "quantization_config", None) is None:
        return False
    from finetune.storage.loading import holds_fp8

    return holds_fp8(shape)


def first_layers(shape: PretrainedConfig, layers: int) -> None:
    """Reduce an architecture to its first decoder layers, in place, `layer_types` alike."""
    text = shape.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    if layers >= depth:
        return
    for name, value in vars(text).items():
        # Lists with an entry for each layer, of which Transformers refuses one of another length.
        if isinstance(value, (list, tuple)) and len(value) == depth:
            text.__dict__[name] = value[:layers]
    text.num_hidden_layers = layers


def meta_model(
    config: RunConfig,
    before_adapters: Callable[[PreTrainedModel], None] | None = None,
    *,
    layers: int | None = None,
) -> PreTrainedModel:
    """Build the model with its adapters on the meta device: shapes without memory, in a second.

    Args:
        before_adapters: called with the plain model first.
        layers: number of leading decoder layers; default all.
    """
    import torch

    shape = load_shape(config.model)
    if layers is not None:
        first_layers(shape, layers)
    if "fp8" in (config.precision.frozen, config.model.storage):
        # A published FP8 checkpoint is read into FP8 layers, or rejected on loading.
        shape.__dict__.pop("quantization_config", None)
    kwargs: dict[str, Any] = {"dtype": getattr(torch, config.model.dtype)}
    with torch.device("meta"), loading(config.model.name):
        model = auto_class(shape).from_config(shape, **kwargs)
    # Also on the meta device: a rehearsal trains it by TRL's own loss.
    fit_trl(model)
    if before_adapters is not None:
        before_adapters(model)
    scope.freeze(model, config)
    with torch.device("meta"):
        return scope.attach(model, config)


# --------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Attention:
    """Attention of a run.

    Attributes:
        implementation: name for Transformers; None: the model's own, SDPA where it has that.
        reason: why this one.
    """

    implementation: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation or 'the default of the model'} ({self.reason})"


OWN = Attention(None, "as configured")


def resolve_attention(config: RunConfig, model: nn.Module, device: Device) -> Attention:
    """Resolve `model.attention` for a model, also on the meta device, with or without adapters.

    Raises:
        ConfigError: `varlen` was requested, and the model or the device cannot have it.
    """
    asked = config.model.attention or AUTO
    if asked not in (AUTO, VARLEN):
        return Attention(asked, "as configured")
    obstacle = _obstacle(config, model, device)
    if asked == VARLEN:
        if obstacle:
            raise ConfigError(
                "varlen attention is not available here",
                where=f"model.attention: {VARLEN}",
                why=obstacle,
                fix="~model.attention takes what the model and this device can",
            )
        return Attention(VARLEN, "as configured")
    if not padding_free(config.train):
        return Attention(None, "rows are not packed by document")
    return Attention(None if obstacle else VARLEN, obstacle or "packed rows, no mask")


def _obstacle(config: RunConfig, model: nn.Module, device: Device) -> str:
    """The first reason against varlen attention, or an empty string."""
    base = without_adapters(model)
    text = base.config.get_text_config(decoder=True)
    name = type(base).__name__
    # Models for FlashAttention pass windows on, and work without a mask.
    if not base._supports_flash_attn or not base._can_set_attn_implementation():
        return f"{name} computes attention in a way of its own"
    if any(n.endswith(".sinks") for n, _ in base.named_parameters()):
        return f"{name} has attention sinks"
    dropout = next((key for key in DROPOUTS if getattr(text, key, 0)), "")
    for key, does in (
        ("attn_logit_softcapping", "caps attention scores"),
        ("attention_chunk_size", "attends within chunks"),
        (dropout, "drops attention weights"),
    ):
        if getattr(text, key, None):
            return f"{name} {does} ({key})"
    if not getattr(text, "is_causal", True):
        return f"{name} attends in both directions (is_causal)"
    return _obstacle_on(device, text, config.precision.compute)


def _obstacle_on(device: Device, text: Any, compute: str) -> str:
    from finetune.training.helper.varlen import runs_on_cuda

    if device.kind == "cpu":
        return ""
    if device.kind != "cuda" or device.is_rocm:
        return f"its kernel is not known to run on {device.name}"
    capability = device.capability or (0, 0)
    if capability < (8, 0):
        return f"FlashAttention needs compute capability 8.0, {device.name} has " + ".".join(
            map(str, capability)
        )
    if compute == "fp32":
        return "FlashAttention multiplies 16-bit numbers, and precision.compute is fp32"
    # Some models have wider heads in some layers, latent attention wider ones for queries: the
    # widest decides whether the kernel can run.
    own = max((int(getattr(text, key, None) or 0) for key in HEAD_DIMS), default=0)
    width = own or text.hidden_size // text.num_attention_heads
    limit = 192 if capability in NO_BACKWARD_ABOVE_192 else 256
    if width % 8 or width > limit:
        return f"heads of {width}: FlashAttention takes multiples of 8 up to {limit} there"
    if not runs_on_cuda():
        return f"torch {version('torch')} has varlen attention without sliding windows"
    return ""


def implementation_arguments(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` and `from_config`; none for the model's own."""
    if model.attention in (None, AUTO):
        return {}
    if model.attention == VARLEN:
        from finetune.training.helper.varlen import register

        register()
    return {"attn_implementation": model.attention}


# ----------------------------------------------------------------------------------------- loading


def load_model(model: ModelConfig, stored: Sequence[LayerPlan] = ()) -> PreTrainedModel:
    """Load the model, pretrained or random, on the device where that is cheapest.

    Args:
        stored: plan rows of weights stored in FP8 from the start: the model never exists without.

    Raises:
        ConfigError: the model or machine lacks the attention implementation.
        ModelNotFoundError: no such folder or hub model, or the hub cannot be reached.
        StorageNotComputeError: FP8 weights were requested of an otherwise quantized checkpoint.
    """
    import torch

    kwargs: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    kwargs |= implementation_arguments(model)
    if model.weights == "pretrained":
        return _load_pretrained(model, stored, kwargs)
    try:
        return _build_random(model, stored, kwargs)
    except FinetuneError:
        raise
    except (ValueError, ImportError) as error:
        if model.attention in (None, AUTO):
            raise
        raise ConfigError(
            f"{model.name} cannot be built like this",
            where=f"model.attention: {model.attention}",
            why=first_line(error),
            fix="~model.attention takes the model's own",
        ) from error


def take_model(given: Any, model: ModelConfig, stored: Sequence[LayerPlan] = ()) -> Any:
    """Bring a model that a script has loaded to what `load_model` would have returned.

    Args:
        given: with its adapters; `stored` are plan rows of it, named as its modules are.
    """
    from finetune.storage.loading import store_named

    for name in implementation_arguments(model).values():
        without_adapters(given).set_attn_implementation(name)
    for row in stored:  # before the trainer moves all of it to the GPU
        store_named(given, row.name, row.stored or "row")
    return given


def _build_random(
    model: ModelConfig, stored: Sequence[LayerPlan], kwargs: dict[str, Any]
) -> PreTrainedModel:
    import torch

    from finetune.hardware.device import this_device
    from finetune.precision.stored.linear import storable
    from finetune.storage.loading import build_stored

    shape, device = load_shape(model), this_device().kind
    if model.storage == "nf4":
        return nf4.build_random(shape, **kwargs)
    names = [plain_name(row.name) for row in stored]
    if not stored and (model.storage == "fp8" or is_published_fp8(shape)):
        shape.__dict__.pop("quantization_config", None)  # `build_stored` writes its own
        with torch.device("meta"):
            names = storable(auto_class(shape).from_config(shape))
    if names:
        granularity = (stored[0].stored if stored else "") or "row"
        return build_stored(shape, names, granularity, device=device, **kwargs)
    # Random weights are drawn where they will be: a large model in the host's memory would be
    # copied.
    with torch.device(device):
        return auto_class(shape).from_config(shape, **kwargs)


def teacher_of(config: RunConfig) -> ModelConfig:
    """The `model` section of the teacher, which gets the type of the model that trains.

    Raises:
        ConfigError: none is named.
    """
    if not (name := config.train.teacher_model_name_or_path):
        raise ConfigError(
            "there is no teacher to learn from",
            where=f"train.{TEACHER}",
            fix=f"train.{TEACHER}=NAME: a larger model with the same tokenizer, on the hub or in "
            "a folder",
        )
    given = {"name": name, "weights": "pretrained", "storage": None, "revision": None}
    return config.model.model_copy(update=given)


def _load_pretrained(
    model: ModelConfig, stored: Sequence[LayerPlan], kwargs: dict[str, Any]
) -> PreTrainedModel:
    import torch
    from transformers.utils.quantization_config import Mxfp4Config

    from finetune.precision.stored.linear import stored_weights
    from finetune.storage import mxfp4
    from finetune.storage.checkpoint_formats import refuse_codes
    from finetune.storage.loading import load_in_fp8, load_stored

    source, shape = locate(model), load_shape(model)
    published, four_bits = is_published_fp8(shape), mxfp4.in_checkpoint(source, model.revision)
    kwargs |= {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    if four_bits and model.storage == "nf4":
        raise ConfigError(
            "this checkpoint is published in MXFP4, and was to be stored in NF4",
            where=f"model.storage: {model.storage}",
            why="nearly all of it are experts, which bitsandbytes does not store",
            fix="~model.storage with precision.compute=fp8 precision.frozen=fp8 "
            "precision.scaling=rowwise: a byte a weight",
        )
    if published and model.storage == "nf4":
        raise ConfigError(
            "this checkpoint is published in FP8, and was to be stored in four bits",
            where=f"model.storage: {model.storage}",
            why="its codes would be rounded a second time, to fewer levels",
            fix="~model.storage holds the published codes, or take the checkpoint in 16 bits",
        )
    with loading(source):
        if stored and (granularity := stored[0].stored):
            names = [plain_name(row.name) for row in stored]
            return load_stored(source, names, granularity, head=model.head, **kwargs)
        if published or model.storage == "fp8":
            return load_in_fp8(source, "row" if model.storage == "fp8" else None, **kwargs)
        if model.storage == "nf4":
            with torch.device("meta"):
                outline = auto_class(shape).from_config(shape)
            kwargs["quantization_config"] = nf4.quantization_config(outline)
        if four_bits:
            # Its experts become FP8, or train under adapters: Transformers (5.23) infers alone with
            # four bits.
            kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
        if model.head is not None:
            kwargs["num_labels"] = shape.num_labels
        if not hasattr(shape, "quantization_config"):
            # Codes in a checkpoint whose configuration does not speak of them would be read as
            # numbers.
            refuse_codes(sorted(Path(source).glob("*.safetensors")))
        loaded = load_whole(auto_class(shape).from_pretrained, source, **kwargs)
    # A checkpoint may itself be in NF4.
    in_nf4 = model.storage == "nf4" or "nf4" in stored_weights(loaded)
    return nf4.prepare(loaded) if in_nf4 else loaded
