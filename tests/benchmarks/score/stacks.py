"""What each software stack does to memory, as its code says; the sources are beside the facts.

Nothing here is fitted to a measurement. A stack is recognised by the framework column of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune.errors import ConfigError
from finetune.estimator.memory.overheads import library_workspaces
from finetune.hardware.gpus import Gpu, named_gpu

_GPU_WORDS = (
    (r"^A100.*80", "A100-80GB"), (r"^A100.*40", "A100-40GB"), (r"^H100", "H100"),
    (r"^H200", "H200"), (r"^GB200", "GB200"), (r"^B200", "B200"), (r"^RTX ?3090", "RTX 3090"),
    (r"^RTX ?4090", "RTX 4090"), (r"^A10G", "A10G"),
)  # fmt: skip


def gpu_of(text: str) -> Gpu | None:
    """The GPU that a row names, None for one that is not in the table."""
    for pattern, name in _GPU_WORDS:
        if re.search(pattern, text, re.IGNORECASE):
            return named_gpu(name)
    try:
        return named_gpu(text)
    except ConfigError:
        return None


def workspace_of(gpu: str, torch_version: tuple[int, ...]) -> int:
    """Bytes that cuBLAS keeps in a process that trains; of Ampere where the GPU is not known."""
    found = gpu_of(gpu)
    return sum(library_workspaces(found.capability if found else (8, 0), torch_version))


def torch_version(framework: str) -> tuple[int, ...]:
    """The version in `... / torch 2.1.1`; 2.4 where none is said."""
    found = re.search(r"torch (\d+)\.(\d+)\.?(\d*)", framework)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (2, 4, 0)


@dataclass(frozen=True)
class Version:
    """A version of transformers, by what changed between versions.

    Attributes:
        loss: path in `losses`.
        repeats_keys: Mistral, Mixtral and Qwen2 repeat keys for FlashAttention 2 (gone in 4.48,
        where
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
    * FSDP: layers are units (`TRANSFORMER_BASED_WRAP`), `BACKWARD_PRE`, full shard
      (accelerate.yaml);
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
