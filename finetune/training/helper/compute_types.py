"""float16 and float32 compute: dynamic loss scaling, and GEMMs without hidden rounding.

*float16* represents magnitudes from 6e-8 to 65,504, bfloat16 and float32 1e-38 to 3e38. Most
gradients of a language model lie below 1e-4 and many below 6e-8, zero in float16. So the loss, and
with it every gradient, is multiplied by a scale S, and gradients are divided by S in float32 before
they are clipped and applied (Micikevicius et al. 2017, arXiv 1710.03740). S is found by trial:

    a gradient is Inf or NaN:          the step is skipped, S := S · 1/2     (`backoff_factor`)
    `growth_interval` steps without:   S := S · 2                            (`growth_factor`)

A skipped step changes no weight, no moment and no learning rate. Accelerate runs torch's scaler
(`torch.amp.GradScaler`). Accelerate 1.15 has neither scaler nor autocast on a CPU; `complete` adds
them, so that a run can be rehearsed without a GPU (slowly: a step of the tiny recipes takes about 3
times that of float32).

Limits: trainable weights must be float32. A float16 gradient divided by S would be zero again, and
PyTorch on CUDA does not unscale bfloat16 (pytorch issue 127176). Frozen weights may be of any type.
S never falls below 1: a run that overflows there needs no smaller scale, and is stopped.

FP8 compute takes no loss scale: its gradients are BF16 or float32 between layers, and a cast to FP8
divides by the tensor's own amax, so that a factor of 2^k changes no code (a test shows it).

*float32* is the debugging mode. float32 operands do not imply float32 GEMMs: by process-wide
settings that any library can change, PyTorch may round them first, to TF32 (10 bits of significand
instead of 23) on NVIDIA GPUs, for convolutions by default; to TF32 or bfloat16 in oneDNN on CPUs.
Under `compute=fp32` these settings are `ieee`, and are checked again after the first step. Source:
PyTorch notes on numerical accuracy, `torch.backends.*.fp32_precision`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from finetune.errors import PrecisionError, ProofError, some
from finetune.precision.model.tree import Tree, named_trainable
from finetune.precision.settings import Compute

AUTOCAST: dict[Compute, torch.dtype | None] = {
    "fp8": torch.bfloat16,  # around FP8 GEMMs
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": None,
}
"""Type of autocast by compute precision, in which FSDP2 gathers weights, too; None: as stored."""
SMALLEST_SCALE = 1.0

# ----------------------------------------------------------------------------------------- float16


LOSS_SCALING = {
    "init_scale": 65536.0,
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
}
"""torch's own, with which S finds its size from anywhere; a script's `GradScalerKwargs` changes
them."""


def complete(accelerator: Any) -> dict[str, Any]:
    """Add autocast to float16 and a scaler to an `Accelerator` on a CPU, which lacks them.

    Returns:
        The settings of its scaler.
    """
    handler = accelerator.scaler_handler
    settings = LOSS_SCALING | (handler.to_kwargs() if handler else {})
    # Accelerate (1.15) has neither for float16 on a CPU.
    if accelerator.device.type == "cpu":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
    return settings


def warn_of_half_weights(model: nn.Module | Tree) -> None:
    """Warn of float16 weights that train without a loss scale: in FP8 or BF16 compute."""
    # Float16 ends at 6e-8, below which many gradients lie; a loss scale is only made for
    # `compute=fp16`.
    half = [n for n, p in named_trainable(model).items() if p.dtype is torch.float16]
    if half:
        warnings.warn(
            f"! {len(half)} weights that train are float16 ({some(half, 3)}), and so are their "
            "gradients: without loss scaling those below 6e-8 are zero, many of a language model. "
            "Load the model with dtype=torch.bfloat16 or float32",
            stacklevel=2,
        )


def refuse_vanished_scale(scale: float, skipped: int) -> None:
    """Raise `ProofError` when the scale has backed off below the smallest useful one."""
    if scale < SMALLEST_SCALE:
        raise ProofError(
            f"float16 cannot hold this run: gradients overflow at a loss scale of {scale:g}",
            where=f"{skipped} steps were skipped",
            why="without any scaling they would overflow too, so every further step would be "
            "skipped and nothing trained",
            fix="precision.compute=bf16 or fp32, a lower learning rate, or look for Inf and NaN in "
            "the data and the weights",
        )


# ----------------------------------------------------------------------------------------- float32

EXACT = "ieee"


_ROUNDING = (
    "cuda.matmul", "cudnn.conv", "cudnn.rnn",
    "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn",
)  # fmt: skip
"""Parts of `torch.backends` that may round float32 operands."""


def _settings() -> dict[str, Any]:
    return {name: attrgetter(name)(torch.backends) for name in _ROUNDING}


def in_force() -> dict[str, str]:
    """Rounding of float32 operands by setting; `ieee` is none."""
    return {name: backend.fp32_precision for name, backend in _settings().items()}


def make_exact() -> Callable[[], None]:
    """Make float32 GEMMs exact from now on; returns a function that restores all settings."""
    before = in_force()
    _set(dict.fromkeys(before, EXACT))
    return lambda: _set(before)


def _set(values: dict[str, str]) -> None:
    # torch 2.13 also keeps an older form of these settings, and raises where code (torch.compile)
    # reads it while the two differ. So both are set.
    on_cpu, on_gpu = values["mkldnn.matmul"], values["cuda.matmul"]
    older = "medium" if on_cpu == "bf16" else ("high" if on_gpu == "tf32" else "highest")
    torch.set_float32_matmul_precision(older)
    torch.backends.cudnn.allow_tf32 = values["cudnn.conv"] == "tf32"
    for name, backend in _settings().items():
        backend.fp32_precision = values[name]


def check_exact() -> None:
    """Raise `PrecisionError` if the settings have changed since."""
    rounded = {name: value for name, value in in_force().items() if value != EXACT}
    if rounded:
        raise PrecisionError(
            "FP32 was requested, and float32 operands are rounded before they are multiplied",
            where=", ".join(f"torch.backends.{k}.fp32_precision={v}" for k, v in rounded.items()),
            why="something changed these settings after the model was prepared",
            fix="leave out tf32=True, torch.set_float32_matmul_precision and torch.backends flags",
        )
