"""float32 compute: the debugging mode, in which nothing is rounded behind one's back.

Operands of type float32 do not mean float32 products. PyTorch may round them first, by settings of
the process that any library can change and that no type shows: to TF32 (10 bits of significand
instead of 23) on NVIDIA GPUs, for convolutions by default; to TF32 or bfloat16 in oneDNN on CPUs.
While `compute=fp32` is in force these settings are `ieee`, and after the first step they are looked
at once more. Source: PyTorch notes on numerical accuracy, `torch.backends.*.fp32_precision`.

PyTorch keeps an older form of the same settings beside them (`torch.set_float32_matmul_precision`,
`torch.backends.cudnn.allow_tf32`), and raises where code reads the older form while the two differ,
as `torch.compile` does. So both are set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finetune.errors import PrecisionError

EXACT = "ieee"


def _settings() -> dict[str, Any]:
    b = torch.backends
    return {
        "cuda.matmul": b.cuda.matmul,
        "cudnn.conv": b.cudnn.conv,
        "cudnn.rnn": b.cudnn.rnn,
        "mkldnn.matmul": b.mkldnn.matmul,
        "mkldnn.conv": b.mkldnn.conv,
        "mkldnn.rnn": b.mkldnn.rnn,
    }


def in_force() -> dict[str, str]:
    """Where float32 is multiplied -> what its operands are rounded to first; `ieee` is nothing."""
    return {name: backend.fp32_precision for name, backend in _settings().items()}


def make_exact() -> Callable[[], None]:
    """Multiply float32 as float32 from now on.

    Returns:
        A function that puts everything back.
    """
    before = in_force()
    _set(dict.fromkeys(before, EXACT))
    return lambda: _set(before)


def _set(values: dict[str, str]) -> None:
    on_cpu, on_gpu = values["mkldnn.matmul"], values["cuda.matmul"]
    older = "medium" if on_cpu == "bf16" else ("high" if on_gpu == "tf32" else "highest")
    torch.set_float32_matmul_precision(older)
    torch.backends.cudnn.allow_tf32 = values["cudnn.conv"] == "tf32"
    for name, backend in _settings().items():
        backend.fp32_precision = values[name]


def check_exact() -> None:
    """Raise `PrecisionError` when something has changed the settings since."""
    rounded = {name: value for name, value in in_force().items() if value != EXACT}
    if rounded:
        raise PrecisionError(
            "FP32 was asked, and float32 operands are rounded before they are multiplied",
            where=", ".join(f"torch.backends.{k}.fp32_precision={v}" for k, v in rounded.items()),
            why="something changed these settings after the model was prepared",
            fix="leave out tf32=True, torch.set_float32_matmul_precision and torch.backends flags",
        )
