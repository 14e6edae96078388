"""Triton's launcher: what starts its kernels, those of compiled layers and those of our own.

Triton (3.6, 3.7) compiles it in C at its first kernel, and keeps it in its cache. That takes a C
compiler and Python's headers, which slim containers lack; the first kernel is then a traceback,
after the model is loaded.
"""

from __future__ import annotations

import functools
import subprocess

from finetune.config.schema import PrecisionConfig
from finetune.errors import MissingExtraError, first_line
from finetune.hardware.device import Device, Verdict, this_device
from finetune.hardware.requirements import compiles


@functools.cache
def has_launcher() -> Verdict:
    """True if Triton has its launcher for this machine's GPU, or can build it."""
    try:
        from triton.runtime import driver

        driver.active.utils  # noqa: B018  made at the first access
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # libcuda: asserted
        return Verdict(False, first_line(error))
    except subprocess.CalledProcessError as error:
        compiler = error.cmd[0] if isinstance(error.cmd, list) else "the C compiler"
        return Verdict(False, f"{compiler} cannot compile Triton's launcher: its message is above")
    return Verdict(True, "Triton has its launcher")


def check_launcher(precision: PrecisionConfig, device: Device) -> None:
    """Refuse compiled layers, and kernels of our own, that could not be launched on this GPU.

    Args:
        precision: resolved.

    Raises:
        MissingExtraError: says what Triton lacks.
    """
    if device.kind != "cuda" or device != this_device():
        return
    frozen = precision.frozen == "fp8" and precision.backend != "emulated"
    own = frozen and precision.kernels in ("auto", "triton")
    if (own or compiles(precision, device)) and not (can := has_launcher()):
        without = "precision.kernels=eager" if own else "precision.compile=off"
        raise MissingExtraError(
            f"Triton cannot run kernels on {device.name}",
            where="torch.compile, and casts of frozen weights",
            why=can.reason,
            fix="install a C compiler and Python's headers (apt-get install gcc python3-dev) or "
            f"set CC; or {without}, which is slower",
        )
