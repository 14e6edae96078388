"""FlashAttention as a package, without memory and without the package.

`model.attention: flash_attention_2` makes Transformers call the package, which takes rows packed
without padding as they are: documents attend to themselves only, and no mask is ever made. It runs
on GPUs only, so a rehearsal puts an attention function of the same shape in its place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from finetune.estimator.attention import fused
from finetune.estimator.attention_buffers import Kernel

NAME = "finetune_flash"
KERNELS: dict[str, Kernel] = {"flash_attention_2": "flash", "flash_attention_3": "flash3"}


def use_flash(model: nn.Module, kernel: Kernel) -> None:
    """Have a model's layers attend by `kernel`, in place."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        documents = 1 if cu_seq_lens_q is None else len(cu_seq_lens_q) - 1
        length = query.shape[2]
        if documents > 1 and length % documents == 0:
            query, key, value = (_split(x, documents) for x in (query, key, value))
        out = fused(query, key, value, None, True, kernel).transpose(1, 2)
        return out.reshape(-1, length, *out.shape[2:]), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
    set_attention(model, NAME)


def choose_attention(model: nn.Module, name: str | None) -> None:
    """Have a model sketched with its default attend as `model.attention` says."""
    if name in KERNELS:
        use_flash(model, KERNELS[name])
    elif name is not None:
        set_attention(model, name)


def set_attention(model: nn.Module, name: str) -> None:
    """Name the attention function of all layers."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = name


def _split(x: Tensor, documents: int) -> Tensor:
    """[1, H, n L, D] -> [n, H, L, D] of as many documents: a view of what the kernel takes."""
    _, heads, length, d = x.shape
    rows = x.transpose(1, 2).reshape(documents, length // documents, heads, d)
    return rows.transpose(1, 2)
