"""Attention while a run trains: the kernel of `varlen`, and batches of one shape for it.

`finetune.training.model` resolves the setting, `finetune.training.varlen` implements `varlen`.
`FixedDocuments` gives compiled layers one shape for all batches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from finetune.hardware.device import Device
from finetune.training.model import VARLEN


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
