"""Calibration: measured rates of this device, which replace those of the efficiency table.

The table describes a GPU family; one machine differs in power limit, cooling, driver, libraries and
host speed. `calibrate` takes less than a minute; its result is stored as JSON below
`$XDG_CACHE_HOME/fp8-finetune/calibration` (default `~/.cache`) under the device's name and used for
predictions on a device of that name.

*Measuring.* Each figure is the median of repetitions over a fixed time. GEMMs have the sizes of a
training step (4096 tokens on a GPU); `shape_share` converts their time to the rate of an
arbitrarily large GEMM. A Llama-style decoder layer in plain PyTorch runs forward and backward while
its operators are recorded, and is predicted from the figures before it.

*Efficiencies.* For each precision and for bandwidth they reproduce the measured times. All are then
scaled by the predicted over the measured time of the decoder layer, limited to 0.5 to 2. A CPU is
not in the GPU table: its measured rates serve as peaks, with efficiencies of 1.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from finetune.config.paths import user_path
from finetune.errors import ConfigError, writing
from finetune.estimator.speed.operators import Precision, Product
from finetune.estimator.speed.roofline import (
    Direction,
    Efficiency,
    Host,
    HostKind,
    Roofline,
    efficiency_of,
    host,
    shape_share,
    shared,
)
from finetune.estimator.trace.trace import Recorder
from finetune.hardware.device import NO_ROWWISE, Device, parallel_units, synchronize
from finetune.hardware.gpus import Gpu, find_gpu

# Host microseconds of one small eager operator on the reference machines of `hosts` in the table.
_REFERENCE_LAUNCH_US = 4.5
# Seconds of repetitions per measurement.
_LONGEST_S = 0.6
# Bounds of the decoder layer's factor: beyond them the measurement was disturbed.
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 2.0
# Assumed efficiency of attention on a device that no family of the table covers.
_UNKNOWN_ATTENTION: dict[Direction, float] = {"forward": 0.5, "backward": 0.4}


class Calibration(BaseModel):
    """Measured figures of one device.

    Attributes:
        device: Name reported by the driver, or of the CPU.
        units: Streaming multiprocessors, or cores.
        tflops: Sustained TFLOP/s of a large GEMM by precision (`bf16`, `fp32`, `fp8`,
            `fp8_rowwise`).
        gb_s: GB/s of a copy and a pointwise operator.
        launch_us: Host microseconds of one small operator.
        layer: Measured / predicted time of a decoder layer, forward and backward.
        seconds: Duration of the calibration.
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
    # As typed: `Path.home()` raises for a user of a container that no file of users knows.
    home = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower() or "device"
    return home / "fp8-finetune" / "calibration" / f"{name}.json"


def calibration_file(device: str) -> Path:
    """File to keep a calibration in, its folder made; asked for before a minute is measured.

    Raises:
        ConfigError: it cannot be written.
    """
    path, fix = calibration_path(device), "XDG_CACHE_HOME=FOLDER, one that you may write to"
    what = "a calibration cannot be kept"
    if path.parts[0] == "~":
        raise ConfigError(what, where=str(path), why="this user has no home folder", fix=fix)
    with writing(what, where=str(path), fix=fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not path.stat().st_size:  # it was not there
            path.unlink()
    return path


def save_calibration(calibration: Calibration) -> Path:
    """Keep a calibration for predictions on this device.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = calibration_file(calibration.device)
    path.write_text(calibration.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def load_calibration(device: str) -> Calibration | None:
    """Load the calibration of a device, or None if there is none.

    Raises:
        ConfigError: the file is not a calibration.
    """
    path = calibration_path(device)
    if not path.is_file():
        return None
    try:
        return Calibration.model_validate_json(path.read_text("utf-8", errors="replace"))
    except ValidationError as error:
        raise ConfigError(
            "a stored calibration cannot be read",
            where=str(path),
            why=f"{error.error_count()} of its fields are wrong or missing",
            fix="python -m finetune estimate --calibrate, or delete the file",
        ) from error


def calibrated_roofline(measured: Calibration, gpu: Gpu | None, launched_by: HostKind) -> Roofline:
    """Build the roofline that reproduces a calibration.

    The table's host times are scaled by the measured launch time. A CPU launches nothing: its
    overhead per operator is in `kernel_us`, and its GPU table entry is None.
    """
    line = _measured_line(measured) if gpu is None else gpu
    scale = 0.0 if gpu is None else measured.launch_us / _REFERENCE_LAUNCH_US
    usual = host(launched_by).model_dump()
    launcher = Host(**{phase: microseconds * scale for phase, microseconds in usual.items()})
    return Roofline(line, _shares(measured, gpu, line), launcher, calibrated=True)


def _measured_line(measured: Calibration) -> Gpu:
    """GPU table entry with the measured rates as peaks."""
    tflops = {name: v for name, v in measured.tflops.items() if name != "fp8_rowwise"}
    return Gpu(
        name=measured.device,
        capability=(0, 0),
        memory_gib=measured.memory_gib,
        tflops=tflops,  # pyright: ignore[reportArgumentType] (checked by pydantic)
        gb_s=measured.gb_s,
        sms=measured.units,
        l2_mib=1,
        link="pcie",
        link_gb_s=1,
        source="measured on this machine",
    )


def _shares(measured: Calibration, gpu: Gpu | None, line: Gpu) -> Efficiency:
    pace = 1 / min(_MOST_FACTOR, max(_LEAST_FACTOR, measured.layer))
    same, gemm = _UNKNOWN_ATTENTION, {"bf16": 1.0, "fp32": 1.0}
    base = Efficiency(
        gemm=gemm, attention=same, flash=same, masked=same, shared=shared(), origin=""
    )
    if gpu is not None:
        with contextlib.suppress(ConfigError):  # of no family in the table
            base = efficiency_of(gpu)
    gemm = dict(base.gemm)
    for precision, peak in line.tflops.items():
        if precision in measured.tflops:
            gemm[precision] = measured.tflops[precision] / peak * pace
    numbers = {"bandwidth": measured.gb_s / line.gb_s * pace}
    if {"fp8", "fp8_rowwise"} <= measured.tflops.keys():
        numbers["rowwise"] = measured.tflops["fp8_rowwise"] / measured.tflops["fp8"]
    if gpu is None:
        numbers |= {"l2": 1.0, "kernel_us": measured.launch_us}
    scale = gemm["bf16"] / base.gemm["bf16"]

    def scaled(shares: dict[Direction, float]) -> dict[Direction, float]:
        return {direction: share * scale for direction, share in shares.items()}

    return Efficiency(
        gemm=gemm,
        attention=scaled(base.attention),
        flash=scaled(base.flash),
        masked=scaled(base.masked),
        shared=base.shared.model_copy(update=numbers),
        origin=f"measured on {measured.device} with torch {measured.torch}",
    )


# ---------------------------------------------------------------------------------------- measuring


class _Bench(NamedTuple):
    """Device that is measured, and seconds of repetitions per figure."""

    on: torch.device
    longest: float

    def seconds(self, run: Callable[[], object]) -> float:
        """Median seconds of a call, after two warm-up calls."""
        times: list[float] = []
        for _ in range(2):
            run()
        self._finish()
        began = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - began < self.longest:
            start = time.perf_counter()
            run()
            self._finish()
            times.append(time.perf_counter() - start)
        return median(times)

    def _finish(self) -> None:
        synchronize(self.on.type)


def calibrate(device: Device, *, seconds: float = _LONGEST_S) -> Calibration:
    """Measure this device; each of at most eight figures takes `seconds`."""
    began = time.perf_counter()
    units = parallel_units(device)
    bench = _Bench(torch.device(device.kind), seconds)
    measured = Calibration(
        device=device.name,
        torch=torch.__version__,
        units=units,
        memory_gib=device.memory_gib,
        tflops={name: _sustained(name, bench, units) for name in precisions_of(device)},
        gb_s=_bandwidth(bench),
        launch_us=_launch_us(bench),
    )
    layer = _layer(measured, find_gpu(device), bench)
    spent = time.perf_counter() - began
    return measured.model_copy(update={"layer": layer, "seconds": spent})


def precisions_of(device: Device) -> Iterator[Precision]:
    """Precisions whose GEMMs torch runs in a device's matrix units."""
    yield from ("bf16", "fp32")
    if device.has_fp8 and device.capability is not None:
        yield "fp8"
        if device.capability[0] != NO_ROWWISE:
            yield "fp8_rowwise"


def _bandwidth(bench: _Bench) -> float:
    """Mean GB/s of a copy and of an addition."""
    count = 2**28 if bench.on.type == "cuda" else 2**24  # far larger than any cache
    a = torch.ones(count, dtype=torch.bfloat16, device=bench.on)
    b, out = torch.ones_like(a), torch.empty_like(a)
    copied = 2 * a.nbytes / bench.seconds(lambda: out.copy_(a))
    added = 3 * a.nbytes / bench.seconds(lambda: torch.add(a, b, out=out))
    return (copied + added) / 2 / 1e9


def _launch_us(bench: _Bench) -> float:
    x = torch.ones(16, device=bench.on)

    def many() -> None:
        for _ in range(200):
            x + 1  # pyright: ignore[reportUnusedExpression]

    return bench.seconds(many) / 200 * 1e6


def _sustained(name: Precision, bench: _Bench, units: int) -> float:
    """TFLOP/s of an arbitrarily large GEMM, from `[size, 2 size] @ [2 size, size]`."""
    size = 4096 if bench.on.type == "cuda" else 768
    product = Product(1, size, size, 2 * size, name)
    share = shape_share(product, units, shared().pipeline_k)
    return product.flops / bench.seconds(_multiplication(product, bench.on)) / share / 1e12


def _multiplication(product: Product, on: torch.device) -> Callable[[], Tensor]:
    _, m, n, k, name = product
    if name not in ("fp8", "fp8_rowwise"):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        a, b = torch.randn(m, k, dtype=dtype, device=on), torch.randn(k, n, dtype=dtype, device=on)
        return lambda: a @ b  # [M, K] @ [K, N]
    a8 = torch.randn(m, k, device=on).to(torch.float8_e4m3fn)
    b8 = torch.randn(n, k, device=on).to(torch.float8_e4m3fn).t()  # cuBLAS wants column-major
    rows, columns = ((m, 1), (1, n)) if name == "fp8_rowwise" else ((), ())
    sa, sb = torch.ones(rows, device=on), torch.ones(columns, device=on)
    # [M, K] @ [K, N]
    return lambda: torch._scaled_mm(a8, b8, sa, sb, out_dtype=torch.bfloat16)


class _DecoderLayer(nn.Module):
    """Llama-style decoder layer in plain PyTorch, `[B, L, H]` -> `[B, L, H]`."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, length, hidden = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, hidden))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _layer(measured: Calibration, gpu: Gpu | None, bench: _Bench) -> float:
    """Measured / predicted time of a decoder layer."""
    on_cuda = bench.on.type == "cuda"
    sizes, length = ((4096, 32, 14336), 4096) if on_cuda else ((512, 8, 1408), 256)
    layer = _DecoderLayer(*sizes).to(device=bench.on, dtype=torch.bfloat16)
    shape = (1, length, sizes[0])
    x = torch.randn(shape, dtype=torch.bfloat16, device=bench.on, requires_grad=True)

    def run() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    seconds = bench.seconds(run)
    with Recorder(layer, known=(x,)) as recorder:
        out = layer(x).sum()
        with recorder.during("backward"):
            out.backward()
    predicted = calibrated_roofline(measured, gpu, "eager").step_time(recorder.trace.ops)
    return seconds / predicted.seconds
