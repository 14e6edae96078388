"""What each software stack does to memory, as its code says; the sources are beside the facts.

Nothing here is fitted to a measurement. A stack is recognised by the framework column of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AMPERE_WORKSPACE = 8_519_680
"""cuBLAS's workspace that PyTorch allocates, `:4096:2:16:8` KiB, on GPUs before Hopper
(`getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp)."""
HOPPER_WORKSPACE = 33_554_432
"""`:4096:8` KiB on Hopper."""


def workspace_of(gpu: str) -> int:
    """cuBLAS's workspace on a GPU, bytes."""
    return HOPPER_WORKSPACE if re.search(r"\b(H100|H200|B200|GB200)", gpu) else AMPERE_WORKSPACE


@dataclass(frozen=True)
class Version:
    """A version of transformers, by what changed between versions.

    Attributes:
        loss: path in `losses`.
        repeats_keys: Mistral, Mixtral and Qwen2 repeat keys for FlashAttention 2 (gone in 4.48, where
            attention became one interface for all models).
    """

    loss: str
    repeats_keys: bool


def transformers_version(text: str) -> Version:
    """What version `4.45.2` does.

    4.45: `logits = logits.float()` in each model's forward. 4.46 to 4.49: `ForCausalLMLoss` copies
    to float32 and shifts the copy, while the caller holds the 16-bit logits. From 4.50 the labels
    are shifted.
    """
    major, minor = (int(n) for n in text.split(".")[:2])
    if (major, minor) < (4, 46):
        return Version("transformers-4.45", True)
    if (major, minor) < (4, 50):
        return Version("transformers-4.48", (major, minor) < (4, 48))
    return Version("transformers-5", False)


@dataclass(frozen=True)
class Plugins:
    """Plugins of fms-acceleration, from the framework column.

    * `accelerated-peft-bnb`: NF4 with double quantisation, adapters without PEFT's upcast of the
      rest (`framework_plugin_bnb.py`); `baseline-peft-bnb` leaves that to TRL: norms in float32,
      adapters in bf16 on one GPU (`peft_module_casting_to_bf16`), skipped when sharded.
    * `accelerated-peft-autogptq`: GPTQ, its own triton layers.
    * `foak`: fused norm, rotation, adapters and cross entropy; `-liger`: Liger's head instead.
    * FSDP: layers are units (`TRANSFORMER_BASED_WRAP`), `BACKWARD_PRE`, full shard (accelerate.yaml);
      fused adapters are ignored by FSDP and reduced by hooks.
    """

    base: str
    baseline: bool
    fused: bool
    liger: bool
    fsdp: bool


def fms_plugins(framework: str) -> Plugins:
    """What plugins `... / fms plugin NAME [+ FSDP]` switches on."""
    name = framework.split("fms plugin")[1].strip()
    base = "bnb" if "bnb" in name else "gptq" if "gptq" in name else ""
    return Plugins(base, "baseline" in name, "foak" in name, "liger" in name, "FSDP" in name)
