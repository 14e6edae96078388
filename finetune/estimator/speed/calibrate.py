"""Measures the machine at hand for less than a minute: products, copies, one decoder layer.

Each measurement repeats until it has run for a set time and takes the fastest repetition's order:
the median, since a shared machine makes some slow. Products are timed at sizes of a training step
(4096 tokens on a GPU); the seconds are turned into what an endless product would sustain by the
model's own account of shapes (`roofline.product_seconds`), so that both speak of the same thing.

The layer is a decoder's of the Llama family in plain PyTorch, forward and backward. Its operators
are recorded while it runs and predicted with what was measured before; the quotient scales all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finetune.estimator.speed.calibration import (
    Calibration,
    calibrated_efficiency,
    calibrated_gpu,
    calibrated_host,
)
from finetune.estimator.speed.efficiency import host, shared
from finetune.estimator.speed.kernels import Precision, Product
from finetune.estimator.speed.roofline import shape_share, step_time
from finetune.estimator.trace.trace import Recorder
from finetune.hardware.device import Device, parallel_units
from finetune.hardware.gpus import Gpu, find_gpu

_LONGEST_S = 0.6
"""Seconds of repetitions per measurement."""


def calibrate(device: Device, *, seconds: float = _LONGEST_S) -> Calibration:
    """Measure this device.

    Args:
        device: as `this_device()` says: a CUDA GPU or a CPU.
        seconds: of repetitions per measurement; there are eight at most.
    """
    began = time.perf_counter()
    gpu = find_gpu(device)
    on = torch.device("cuda" if device.kind == "cuda" else "cpu")
    size = 4096 if on.type == "cuda" else 768
    units = parallel_units(device)
    measured = Calibration(
        device=device.name,
        torch=torch.__version__,
        units=units,
        memory_gib=device.memory_gib,
        tflops={n: _sustained(n, size, on, units, seconds) for n in _precisions(device, on)},
        gb_s=_bandwidth(on, seconds),
        launch_us=_launch_us(on, seconds),
    )
    layer = _layer(measured, gpu, on, seconds)
    spent = time.perf_counter() - began
    return measured.model_copy(update={"layer": layer, "seconds": spent})


def _precisions(device: Device, on: torch.device) -> tuple[Precision, ...]:
    if on.type == "cuda" and device.capability and device.capability >= (8, 9):
        return ("bf16", "fp32", "fp8", "fp8_rowwise")
    return ("bf16", "fp32")


def _seconds(run: Callable[[], object], on: torch.device, longest: float) -> float:
    """Median seconds of a call, after two to warm up."""
    times: list[float] = []
    for _ in range(2):
        run()
    _finish(on)
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < longest:
        start = time.perf_counter()
        run()
        _finish(on)
        times.append(time.perf_counter() - start)
    return median(times)


def _finish(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def _bandwidth(on: torch.device, longest: float) -> float:
    """10^9 bytes a second of a copy and of an addition, the mean of both."""
    count = 2**28 if on.type == "cuda" else 2**24  # far larger than any cache
    a = torch.ones(count, dtype=torch.bfloat16, device=on)
    b = torch.ones_like(a)
    out = torch.empty_like(a)
    copied = 2 * a.nbytes / _seconds(lambda: out.copy_(a), on, longest)
    added = 3 * a.nbytes / _seconds(lambda: torch.add(a, b, out=out), on, longest)
    return (copied + added) / 2 / 1e9


def _launch_us(on: torch.device, longest: float) -> float:
    """Host microseconds of one small operator."""
    x = torch.ones(16, device=on)

    def many() -> None:
        for _ in range(200):
            x + 1  # pyright: ignore[reportUnusedExpression]

    return _seconds(many, on, longest) / 200 * 1e6


def _sustained(name: Precision, size: int, on: torch.device, units: int, longest: float) -> float:
    """10^12 operations a second of an endless product, from one of `size` x `size` x `2 size`."""
    product = Product(1, size, size, 2 * size, name)
    seconds = _seconds(_multiplication(product, on), on, longest)
    share = shape_share(product, units, shared().pipeline_k)
    return product.flops / seconds / share / 1e12


def _multiplication(product: Product, on: torch.device) -> Callable[[], Tensor]:
    _, m, n, k, name = product
    if name not in ("fp8", "fp8_rowwise"):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        a, b = torch.randn(m, k, dtype=dtype, device=on), torch.randn(k, n, dtype=dtype, device=on)
        return lambda: a @ b
    a8 = torch.randn(m, k, device=on).to(torch.float8_e4m3fn)
    b8 = torch.randn(n, k, device=on).to(torch.float8_e4m3fn).t()
    rows, columns = ((m, 1), (1, n)) if name == "fp8_rowwise" else ((), ())
    sa, sb = torch.ones(rows, device=on), torch.ones(columns, device=on)
    return lambda: torch._scaled_mm(a8, b8, sa, sb, out_dtype=torch.bfloat16)


# -------------------------------------------------------------------------------------------- layer


class DecoderLayer(nn.Module):
    """A decoder layer of the Llama family, plain PyTorch. x: `[B, L, H]`."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, H]` -> `[B, L, H]`."""
        b, length, hidden = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, hidden))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _layer(measured: Calibration, gpu: Gpu | None, on: torch.device, longest: float) -> float:
    """Measured over predicted seconds of a decoder layer."""
    sizes = (4096, 32, 14336) if on.type == "cuda" else (512, 8, 1408)
    length = 4096 if on.type == "cuda" else 256
    layer = DecoderLayer(*sizes).to(device=on, dtype=torch.bfloat16)
    x = torch.randn(1, length, sizes[0], dtype=torch.bfloat16, device=on, requires_grad=True)

    def run() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    seconds = _seconds(run, on, longest)
    with Recorder(layer, known=(x,)) as recorder:
        out = layer(x).sum()
        with recorder.during("backward"):
            out.backward()
    predicted = step_time(
        recorder.tape.ops,
        calibrated_gpu(measured, gpu),
        launched_by=calibrated_host(measured, host("eager"), gpu),
        efficiency=calibrated_efficiency(measured, gpu),
    )
    return seconds / predicted.seconds
