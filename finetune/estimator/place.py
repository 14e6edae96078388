"""Where a run would train: a GPU that need not be here, so much memory, or this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.config.schema import PrecisionConfig
from finetune.errors import ConfigError, MissingExtraError, PrecisionError
from finetune.hardware.device import (
    GIB,
    Device,
    Resolution,
    backend_verdict,
    engine_verdict,
    least_capability,
    resolve,
    this_device,
)
from finetune.hardware.gpus import Gpu, as_device, find_gpu, named_gpu

UNNAMED = (9, 0)
"""Compute capability that a GPU of which only the memory is known is taken to have."""


@dataclass(frozen=True)
class Place:
    """Where a run would train.

    Attributes:
        device: one of the devices, as `finetune.hardware.device` describes it.
        gpu: its line in the table of GPUs; None where speed is not known.
        count: devices.
        here: it is this machine.
    """

    device: Device
    gpu: Gpu | None
    count: int = 1
    here: bool = False

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return int(self.device.memory_gib * GIB)

    def __str__(self) -> str:
        name = self.gpu.name if self.gpu else self.device.name
        return f"{f'{self.count} x ' if self.count > 1 else ''}{name}"


def place_of(
    gpu: str | Gpu | None = None, *, memory_gib: float | None = None, gpus: int = 1
) -> Place:
    """The place that a user means.

    Args:
        gpu: a name (`H100`, `4090`) or a line of the table; left out: this machine.
        memory_gib: memory of a GPU of which nothing else is known, or of `gpu` where it has less or
            more than the table says.
        gpus: of them.

    Raises:
        ConfigError: an unknown GPU, a number below one.
    """
    if gpus < 1:
        raise ConfigError(f"a run on {gpus} GPUs", where=f"--gpus {gpus}", fix="1 or more")
    if memory_gib is not None and not 0 < memory_gib < float("inf"):
        raise ConfigError(
            f"a GPU with {memory_gib:g} GiB of memory",
            where=f"--memory {memory_gib:g}",
            fix="GiB of one GPU, such as 24",
        )
    if gpu is None and memory_gib is None:
        device = this_device()
        return Place(device, find_gpu(device), gpus, here=True)
    if gpu is None:
        assert memory_gib is not None
        name = f"a GPU of {memory_gib:g} GiB"
        return Place(Device("cuda", name, UNNAMED, memory_gib, gpus), None, gpus)
    line = named_gpu(gpu) if isinstance(gpu, str) else gpu
    if memory_gib is not None:
        line = line.model_copy(update={"memory_gib": memory_gib})
    return Place(as_device(line, gpus), line, gpus)


def resolve_there(precision: PrecisionConfig, place: Place) -> Resolution:
    """The precision that would run there, whatever is installed here.

    Transformer Engine needs to be there only: where a recipe names it, or nothing else has what the
    recipe asks for, it is taken to be.

    Raises:
        PrecisionError: FP8 cannot be had there.
    """
    device = place.device
    try:
        if precision.backend != "te" or place.here:
            return resolve(precision, device)
    except (PrecisionError, MissingExtraError):
        if precision.backend not in ("auto", "te") or not _engine_serves(precision, device):
            raise
    if precision.compute == "fp8" and _engine_serves(precision, device):
        chosen = precision.model_copy(update={"backend": "te"})
        return Resolution(chosen, precision, "Transformer Engine, taken to be installed there")
    return resolve(precision, device)


def _engine_serves(precision: PrecisionConfig, device: Device) -> bool:
    """Whether Transformer Engine, were it installed, would run this there."""
    has: Any = engine_verdict("te", precision) and device.has_fp8
    enough = (device.capability or (0, 0)) >= least_capability(precision)
    refused = "not installed" not in (verdict := backend_verdict("te", precision, device)).reason
    return bool(has and enough and (verdict or not refused))
