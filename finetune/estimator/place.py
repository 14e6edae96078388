"""Place of a run: this machine, a GPU by name, or a GPU known by its memory only."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
"""Compute capability assumed for a GPU known by its memory only."""


@dataclass(frozen=True)
class Place:
    """Place where a run would train.

    Attributes:
        device: one of the devices, as `finetune.hardware.device` describes it.
        gpu: entry of the GPU table; None if its speed is unknown.
    """

    device: Device
    gpu: Gpu | None
    count: int = 1
    here: bool = False

    @property
    def memory_bytes(self) -> int:
        return int(self.device.memory_gib * GIB)

    def __str__(self) -> str:
        name = self.gpu.name if self.gpu else self.device.name
        return f"{f'{self.count} x ' if self.count > 1 else ''}{name}"

    def with_gpus(self, count: int) -> Place:
        """The same place with another number of GPUs."""
        return replace(self, device=replace(self.device, count=count), count=count)


def place_here(device: Device, processes: int = 1) -> Place:
    """This machine, whose devices are like `device`."""
    return Place(device, find_gpu(device), processes, here=True)


def place_of(
    gpu: str | Gpu | None = None, *, memory_gib: float | None = None, gpus: int = 1
) -> Place:
    """Find the place that a user specifies.

    Args:
        gpu: a name (`H100`, `4090`) or an entry of the table; default: this machine.
        memory_gib: memory of a GPU otherwise unknown, or overriding the table's for `gpu`.

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
        return place_here(this_device(), gpus)
    if gpu is None:
        assert memory_gib is not None
        name = f"a GPU of {memory_gib:g} GiB"
        return Place(Device("cuda", name, UNNAMED, memory_gib, gpus), None, gpus)
    line = named_gpu(gpu) if isinstance(gpu, str) else gpu
    if memory_gib is not None:
        line = line.model_copy(update={"memory_gib": memory_gib})
    return Place(as_device(line, gpus), line, gpus)


def resolve_there(precision: PrecisionConfig, place: Place) -> Resolution:
    """Precision executed at a place, whatever is installed here.

    Transformer Engine is assumed installed there if a recipe names it or no other backend supports
    the requested precision.

    Raises:
        PrecisionError: FP8 is unavailable there.
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
    """True if Transformer Engine, once installed, would run this precision there."""
    if not (engine_verdict("te", precision) and device.has_fp8):
        return False
    verdict = backend_verdict("te", precision, device)
    enough = (device.capability or (0, 0)) >= least_capability(precision)
    return enough and bool(verdict or "not installed" in verdict.reason)
