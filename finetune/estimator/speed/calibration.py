"""What this machine was measured to do, kept for predictions on it.

The table of efficiencies speaks of a family of GPUs. One machine differs: its power limit, cooling,
driver and libraries, and the speed of the host that launches. `measuring.py` multiplies matrices,
copies, and runs one decoder layer for less than a minute; what came out is a `Calibration`, kept as
JSON below `$XDG_CACHE_HOME/fp8-finetune/calibration` (`~/.cache` unless set) under the device's
name, and taken up when a step is predicted for a device of that name.

From a calibration follow the shares of the peaks that roofline.py multiplies with:

* a precision's share is such that the model of products gives the measured seconds of the products;
* the share of bandwidth is what copies and a pointwise operator got;
* last, all are scaled by one factor, predicted over measured seconds of the decoder layer, which
  holds what none of the others shows. It is kept between a half and two.

A CPU has no line in the table of GPUs: what was measured stands in for its peaks, and its shares
are one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from finetune.errors import ConfigError
from finetune.estimator.speed.efficiency import Direction, Efficiency, Host, efficiency_of, shared
from finetune.hardware.gpus import Gpu

_REFERENCE_LAUNCH_US = 4.5
"""Host time of one small eager operator on the hosts that `hosts` in the table speaks of."""


class Calibration(BaseModel):
    """What was measured.

    Attributes:
        device: the driver's name, or the CPU's.
        torch: version of PyTorch.
        units: streaming multiprocessors, or cores.
        memory_gib: of the device.
        tflops: sustained by a large product, 10^12 operations a second, by precision
            (`bf16`, `fp32`, `fp8`, `fp8_rowwise`).
        gb_s: bytes that a copy and a pointwise operator move, 10^9 a second.
        launch_us: host microseconds of one small operator.
        layer: measured over predicted seconds of a decoder layer, forward and backward, with the
            numbers above.
        seconds: that the measurement took.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    torch: str
    units: int
    memory_gib: PositiveFloat
    tflops: dict[str, PositiveFloat]
    gb_s: PositiveFloat
    launch_us: PositiveFloat
    layer: PositiveFloat = 1.0
    seconds: PositiveFloat = 1.0


def calibration_path(device: str) -> Path:
    """Where the calibration of a device of this name is kept."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower() or "device"
    return home / "fp8-finetune" / "calibration" / f"{name}.json"


def save_calibration(calibration: Calibration) -> Path:
    """Keep it for this device; the file that it is in."""
    path = calibration_path(calibration.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(calibration.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def load_calibration(device: str) -> Calibration | None:
    """The calibration of a device of this name, None where there is none.

    Raises:
        ConfigError: the file is not a calibration.
    """
    path = calibration_path(device)
    if not path.is_file():
        return None
    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ConfigError(
            "a stored calibration cannot be read",
            where=str(path),
            why=f"{error.error_count()} of its fields are wrong or missing",
            fix="calibrate again, or delete the file",
        ) from error


def calibrated_gpu(calibration: Calibration, gpu: Gpu | None) -> Gpu:
    """The line of the table, or one made of what was measured where there is none."""
    if gpu is not None:
        return gpu
    tflops = {name: v for name, v in calibration.tflops.items() if name != "fp8_rowwise"}
    return Gpu(
        name=calibration.device,
        capability=(0, 0),
        memory_gib=calibration.memory_gib,
        tflops=tflops,  # pyright: ignore[reportArgumentType] (checked by pydantic)
        gb_s=calibration.gb_s,
        sms=calibration.units,
        l2_mib=1,
        link="pcie",
        link_gb_s=1,
        source="measured on this machine",
    )


def calibrated_efficiency(calibration: Calibration, gpu: Gpu | None) -> Efficiency:
    """The shares that reproduce what was measured."""
    line = calibrated_gpu(calibration, gpu)
    base = efficiency_of(gpu) if gpu is not None else _plain()
    pace = 1 / min(2.0, max(0.5, calibration.layer))
    gemm = dict(base.gemm)
    for precision, peak in line.tflops.items():
        if precision in calibration.tflops:
            gemm[precision] = calibration.tflops[precision] / peak * pace
    numbers = base.shared.model_copy(
        update={
            "bandwidth": calibration.gb_s / line.gb_s * pace,
            "rowwise": _over(calibration, "fp8_rowwise", "fp8", base.shared.rowwise),
            **({} if gpu is not None else {"l2": 1.0, "kernel_us": calibration.launch_us}),
        }
    )
    scale = gemm["bf16"] / base.gemm["bf16"] if gpu is not None else pace

    def scaled(shares: dict[Direction, float]) -> dict[Direction, float]:
        return {direction: share * scale for direction, share in shares.items()}

    return Efficiency(
        gemm=gemm,
        attention=scaled(base.attention),
        masked=scaled(base.masked),
        shared=numbers,
        origin=f"measured on {calibration.device} with torch {calibration.torch}",
    )


def calibrated_host(calibration: Calibration, usual: Host, gpu: Gpu | None) -> Host:
    """Host time per kernel: that of the table, as much slower or faster as this host is.

    A CPU launches nothing: what an operator costs beside its work is in `kernel_us`.
    """
    scale = calibration.launch_us / _REFERENCE_LAUNCH_US if gpu is not None else 0.0
    return Host(
        forward=usual.forward * scale,
        backward=usual.backward * scale,
        optimizer=usual.optimizer * scale,
    )


def _over(calibration: Calibration, name: str, of: str, otherwise: float) -> float:
    if name in calibration.tflops and of in calibration.tflops:
        return calibration.tflops[name] / calibration.tflops[of]
    return otherwise


def _plain() -> Efficiency:
    """For a device without a line: peaks are what was measured."""
    return Efficiency(
        gemm={"bf16": 1.0, "fp32": 1.0},
        attention={"forward": 0.5, "backward": 0.4},
        masked={"forward": 0.5, "backward": 0.4},
        shared=shared(),
        origin="",
    )
