"""`model.attention`: the setting resolved to the implementation that a model is loaded with.

    auto ─┬─ packed or padding-free rows, and nothing speaks against it ─> varlen
          └─ other rows: padded, or whole ──────────────────────────────> the model's own (SDPA)
    varlen ──── something speaks against it ────────────────────────────> ConfigError
    any other name of Transformers ─────────────────────────────────────> as configured

Resolved once, from the sketch of a model and the device it trains on. `finetune.training.varlen`
is the implementation; `FixedDocuments` gives compiled layers one shape for all batches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config.schema import ModelConfig, RunConfig
from finetune.config.sft import padding_free
from finetune.errors import ConfigError
from finetune.hardware.device import Device

if TYPE_CHECKING:
    from torch import nn

AUTO, VARLEN = "auto", "varlen"
"""Our values of `model.attention`; the others are names of Transformers."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the dropout of attention weights in Transformers' configurations."""
HEAD_DIMS = ("head_dim", "qk_head_dim", "global_head_dim")
NO_BACKWARD_ABOVE_192 = ((8, 6), (8, 9))
"""Compute capabilities whose shared memory FlashAttention-2's backward of wide heads exceeds."""


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
                "varlen attention cannot be had here",
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
    from peft import PeftModel

    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    text = base.config.get_text_config(decoder=True)
    name = type(base).__name__
    # Models for FlashAttention pass windows on, and work without a mask.
    if not base._supports_flash_attn or not base._can_set_attn_implementation():
        return f"{name} computes attention in a way of its own"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} caps attention scores (attn_logit_softcapping)"
    if any(n.endswith(".sinks") for n, _ in base.named_parameters()):
        return f"{name} has attention sinks"
    if getattr(text, "attention_chunk_size", None):
        return f"{name} attends within chunks (attention_chunk_size)"
    if not getattr(text, "is_causal", True):
        return f"{name} attends in both directions (is_causal)"
    dropped = next((key for key in DROPOUTS if getattr(text, key, 0)), None)
    if dropped is not None:
        return f"{name} drops attention weights ({dropped})"
    return _obstacle_on(device, text, config.precision.compute)


def _obstacle_on(device: Device, text: Any, compute: str) -> str:
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
    own = max((int(getattr(text, key, None) or 0) for key in HEAD_DIMS), default=0)
    width = own or text.hidden_size // text.num_attention_heads
    limit = 192 if capability in NO_BACKWARD_ABOVE_192 else 256
    if width % 8 or width > limit:
        return f"heads of {width}: FlashAttention takes multiples of 8 up to {limit} there"
    return ""


def implementation_arguments(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` and `from_config`; none for the model's own."""
    if model.attention in (None, AUTO):
        return {}
    if model.attention == VARLEN:
        from finetune.training.varlen import register

        register()
    return {"attn_implementation": model.attention}


# ------------------------------------------------------------------------------------------ kernel


def prefer_flash_3(device: Device) -> None:
    """Make FlashAttention-3 torch's implementation on Hopper, where its package is installed."""
    from torch.nn import attention

    missing = importlib.util.find_spec("flash_attn_interface") is None
    if missing or device.capability is None or device.capability[0] != 9 or _flash_in_use():
        return
    activate: Any = getattr(attention, "activate_flash_attention_impl", None)
    if activate is not None:
        activate("FA3")


def _flash_in_use() -> str | None:
    from torch.nn import attention

    current: Any = getattr(attention, "current_flash_attention_impl", lambda: None)
    return current()


def executed_attention(model: Any, device: Device) -> str:
    """Implementation of a loaded model, and with `varlen` its kernel, for receipts."""
    name = str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")
    if name != VARLEN:
        return name
    kernels = {None: "FlashAttention-2", "FA3": "FlashAttention-3", "FA4": "FlashAttention-4"}
    kernel = kernels.get(_flash_in_use(), _flash_in_use())
    return f"{VARLEN}, {kernel if device.kind == 'cuda' else 'a loop over documents'}"


# ----------------------------------------------------------------------------------------- batches


class FixedDocuments:
    """TRL's collator with boundaries of one shape, so that compiled layers keep one graph.

    With at most 4 documents, of at most 9 tokens, [0 3 7 9] and [0 5 9] become [0 3 7 9 9] and
    [0 5 9 9 9], and the longest has 9 tokens in both. Documents without tokens cost nothing.

    Args:
        collate: `torch_call` of the collator.
        documents, longest: bounds of a batch; None where the rows are not known beforehand: the
            next power of two of each batch.
    """

    def __init__(
        self,
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        documents: int | None,
        longest: int | None,
    ) -> None:
        self.collate, self.documents, self.longest = collate, documents, longest

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        from torch.nn import functional as F

        batch = self.collate(rows)
        if "cu_seq_lens_q" in batch:
            ends, longest = batch["cu_seq_lens_q"], int(batch["max_length_q"])
            size = max(self.documents or 0, len(ends) - 1)
            size = size if self.documents else _power_of_two(size)
            padded = F.pad(ends, (0, size + 1 - len(ends)), value=int(ends[-1]))
            longest = max(longest, self.longest) if self.longest else _power_of_two(longest)
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = padded
            batch["max_length_q"] = batch["max_length_k"] = longest
        return batch


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def fix_documents(trainer: Any) -> None:
    """Give the batches of a padding-free trainer boundaries of one shape."""
    args, collator = trainer.args, trainer.data_collator
    if not trainer.padding_free or not hasattr(collator, "torch_call"):
        return
    sets = [data for data in (trainer.train_dataset, trainer.eval_dataset) if data is not None]
    lengths = [row for data in sets for row in _lengths(data)]
    rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size)
    # Each token of padding is a document of its own.
    spare = (args.pad_to_multiple_of or 1) - 1
    documents = max(map(len, lengths), default=0) * rows
    longest = max((length for row in lengths for length in row), default=0)
    fixed = FixedDocuments(
        collator.torch_call, documents + spare if documents else None, longest or None
    )
    collator.torch_call = fixed  # an attribute of this collator, whose type TRL asks for


def _lengths(data: Any) -> Iterable[list[int]]:
    """Lengths of the documents of each row; none of a stream, or of rows that are documents."""
    columns = getattr(data, "column_names", None) or ()
    return data["seq_lengths"][:] if "seq_lengths" in columns and hasattr(data, "__len__") else ()
