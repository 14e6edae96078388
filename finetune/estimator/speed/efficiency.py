"""Efficiencies: fractions of a GPU's peak that real kernels sustain, from a table with sources.

Kernels stay below peak because the clock falls under load, tiles do not fill the chip, and operands
have to arrive. The table (`assets/efficiency.yaml`) has one number per GPU family and precision for
an arbitrarily large GEMM; roofline.py adds the effect of shapes. The numbers are few on purpose,
each has an origin, and none is fitted to a single published measurement. A calibration
(calibration.py) replaces them by measured ones.
"""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat

from finetune.config.paths import ASSETS
from finetune.config.yaml import read_text
from finetune.errors import ConfigError
from finetune.estimator.memory.overheads import installed_torch, sdpa_kernel
from finetune.hardware.gpus import Gpu

TABLE = ASSETS / "efficiency.yaml"

Direction = Literal["forward", "backward"]
AttentionKernel = Literal["flash", "cudnn"]
HostKind = Literal["eager", "slow", "compiled", "native"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(_Row):
    """Microseconds of host time per kernel, by phase."""

    forward: float
    backward: float
    optimizer: float

    def microseconds(self, phase: str) -> float:
        if phase == "backward":
            return self.backward
        return self.optimizer if phase == "optimizer" else self.forward


class Shared(_Row):
    """Efficiencies independent of the GPU, explained in the table."""

    bandwidth: PositiveFloat
    l2: PositiveFloat
    columns: PositiveFloat
    transpose: PositiveFloat
    rowwise: PositiveFloat
    blocks: PositiveFloat
    masked_attention: PositiveFloat
    pipeline_k: PositiveFloat
    dequantise: PositiveFloat
    kernel_us: PositiveFloat
    scatter_time: PositiveFloat
    scatter_ratio: PositiveFloat


class Efficiency(_Row):
    """Efficiencies of one GPU.

    Attributes:
        gemm: Fraction of the dense peak, by operand precision.
        attention: Fraction of the BF16 peak, by direction.
        masked: Same with an explicit mask, which neither flash nor cuDNN attention supports.
        origin: Source of the numbers, for the report.
    """

    gemm: dict[str, PositiveFloat]
    attention: dict[Direction, PositiveFloat]
    masked: dict[Direction, PositiveFloat]
    shared: Shared
    origin: str


class _Family(_Row):
    name: str
    capability: tuple[tuple[int, int], ...]
    gemm: dict[str, PositiveFloat]
    attention: dict[AttentionKernel, dict[Direction, PositiveFloat]]
    origin: str


class _Device(_Row):
    names: tuple[str, ...]
    gemm: dict[str, PositiveFloat]
    origin: str


class _Table(_Row):
    families: tuple[_Family, ...]
    devices: tuple[_Device, ...]
    shared: Shared
    hosts: dict[HostKind, Host]


@functools.cache
def _table() -> _Table:
    import yaml

    return _Table.model_validate(yaml.safe_load(read_text(TABLE)))


def host(kind: HostKind) -> Host:
    """Host time per kernel: eager PyTorch, compiled layers, or a program without Python."""
    return _table().hosts[kind]


def shared() -> Shared:
    return _table().shared


def efficiency_of(gpu: Gpu, attention: AttentionKernel | None = None) -> Efficiency:
    """Efficiencies of a GPU's family, or its own entry (power-limited models).

    Raises:
        ConfigError: no family of the table has the GPU's compute capability.
    """
    table = _table()
    family = next((row for row in table.families if gpu.capability in row.capability), None)
    if family is None:
        known = ", ".join(row.name for row in table.families)
        raise ConfigError(
            f"no efficiency is known for {gpu.name} (compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]})",
            where=str(TABLE),
            why=f"step times are predicted for: {known}",
            fix="estimate with --gpu and a GPU of one of these, or calibrate on that machine",
        )
    own = next((row for row in table.devices if gpu.name in row.names), None)
    if attention is None:
        picked = sdpa_kernel(gpu.capability, installed_torch(), head_dim=128, masked=False)
        attention = "cudnn" if picked == "cudnn" else "flash"
    flash = family.attention["flash"]
    masked: dict[Direction, float] = {
        direction: share * table.shared.masked_attention for direction, share in flash.items()
    }
    return Efficiency(
        gemm=own.gemm if own else family.gemm,
        attention=family.attention.get(attention, flash),
        masked=masked,
        shared=table.shared,
        origin=own.origin if own else family.origin,
    )
