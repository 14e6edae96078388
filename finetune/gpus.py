"""What a GPU can do at best: dense peak by precision and memory bandwidth, by the driver's name.

The table, `assets/gpus.yaml`, holds vendors' figures: for dense matrices (datasheets like to print
twice as much, "with sparsity") and with accumulation in float32, which training uses. A GPU is
found by its whole name, not by a part of it: `RTX 4090 D` and `RTX 4090 Laptop GPU` are other chips
than `RTX 4090`. A GPU that is not listed has no known peak, and none is guessed.
"""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, TypeAdapter

from finetune.device import Device
from finetune.plain_yaml import read_text

TABLE = Path(__file__).parent / "assets" / "gpus.yaml"
Peak = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]


class Gpu(BaseModel):
    """One line of the table.

    Attributes:
        names: patterns of the driver's name.
        capability: compute capability as torch reports it.
        memory_gib: usable memory, GiB.
        tflops: dense peak by precision of the operands, 10^12 operations a second.
        gb_s: memory bandwidth, 10^9 bytes a second.
        source: where the figures stand.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    capability: tuple[int, int]
    memory_gib: PositiveFloat
    tflops: dict[Peak, PositiveFloat]
    gb_s: PositiveFloat
    source: str


@functools.cache
def gpu_table() -> tuple[Gpu, ...]:
    """The whole table, in the order of the file."""
    import yaml

    rows = yaml.safe_load(read_text(TABLE))
    return TypeAdapter(tuple[Gpu, ...]).validate_python(rows)


def find_gpu(device: Device) -> Gpu | None:
    """The line of this device, None for a CPU or a GPU that is not listed."""
    if device.kind != "cuda":
        return None
    for gpu in gpu_table():
        if any(fnmatch.fnmatchcase(device.name, pattern) for pattern in gpu.names):
            return gpu
    return None
