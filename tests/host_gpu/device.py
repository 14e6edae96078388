"""`cuda:0` made of host memory: `install()` before torch is imported, in a process of its own.

`device.cpp` makes tensors of that device real, and runs each operator's CPU kernel over the same
memory. Here is what Python sees of a GPU: its properties, memory, events and generators; and the
operators that only CUDA has, each behind the checks of its CUDA kernel (torch's meta functions
repeat those) and computed plainly.

What the device would have to wait for is reported, with the stack that asked for it: `waits`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(__file__).parents[2] / ".cache" / "host_gpu"
GIB = 2**30
GPUS = {
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 79.6),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 23.6),
    "L40S": ("NVIDIA L40S", (8, 9), 44.4),
    "B200": ("NVIDIA B200", (10, 0), 178.0),
    "5090": ("NVIDIA GeForce RTX 5090", (12, 0), 31.4),
}
COUNT = int(os.environ.get("HOST_GPUS", "1"))
"""GPUs that this machine says it has; there is memory of one."""
waits: list[tuple[str, list[str]]] = []
"""What the host has waited for: (operator, stack, outermost first)."""


def build() -> Path | None:
    """Compile the device for the installed torch, once; None without a compiler."""
    compiler = shutil.which("g++")
    spec = util.find_spec("torch")
    if compiler is None or spec is None or spec.origin is None or sys.platform != "linux":
        return None
    torch = Path(spec.origin).parent
    text = SOURCE.read_bytes() + metadata.version("torch").encode()
    library = CACHE / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{threading.get_native_id()}")
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O1", "-w"]
    command += [f"-I{path}" for path in (*headers, sysconfig.get_paths()["include"])]
    command += [str(SOURCE), "-o", str(made), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, f"-Wl,-rpath,{torch / 'lib'}"], check=True)
    made.replace(library)
    return library


def install(name: str = "H100") -> None:
    """Give this process a GPU, one of `GPUS`. For good."""
    assert "torch" not in sys.modules, "its hooks must be there when torch is imported"
    library = build()
    assert library is not None, "no compiler"
    device = ctypes.CDLL(str(library))
    full, capability, gib = GPUS[name]
    gib = float(os.environ.get("HOST_GPU_GIB", gib))
    device.bytes_limit(ctypes.c_size_t(int(gib * GIB)))
    _python_of_cuda(device, full, capability, gib)
    _operators()
    _watch(device)
    _profiled()
    _without_triton()


# ------------------------------------------------------------------------------------ torch.cuda


class Event:
    """An event on the stream; only a synchronization after it makes it readable."""

    synchronized = 0

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing, self.at, self.number = enable_timing, 0.0, 0

    def record(self, stream: Any = None) -> None:
        self.at, self.number = time.perf_counter(), Event.synchronized

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing
        assert end.enable_timing
        if Event.synchronized == end.number:
            raise RuntimeError("device not ready: the event has not been reached")
        return (end.at - self.at) * 1e3

    def synchronize(self) -> None:
        Event.synchronized += 1

    def query(self) -> bool:
        return Event.synchronized > self.number

    def wait(self, stream: Any = None) -> None:
        """Let the stream wait, which is in order anyhow."""


class Stream:
    """The only stream."""

    device_index, stream_id, device_type, cuda_stream = 0, 0, 1, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        Event.synchronized += 1

    def wait_stream(self, other: Any) -> None:
        """There is no other."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event


def _python_of_cuda(device: Any, name: str, capability: tuple[int, int], gib: float) -> None:
    import torch

    for reading in ("bytes_now", "bytes_peak", "bytes_reset"):
        getattr(device, reading).restype = ctypes.c_size_t
    total = int(gib * GIB)
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=total,
        multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, L2_cache_size=50 << 20, is_integrated=0,
        shared_memory_per_block_optin=232448, gcnArchName="", uuid="0",
    )  # fmt: skip

    def stats(_: int) -> dict[str, Any]:
        held = {"current": device.bytes_now(), "peak": device.bytes_peak()}
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        return {kind: {"all": held} for kind in kinds} | {"num_alloc_retries": 0, "num_ooms": 0}

    def synchronize(*_: Any) -> None:
        Event.synchronized += 1

    c: Any = torch._C
    for function, value in {
        "_cuda_getDeviceCount": lambda: COUNT, "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda _: None, "_cuda_exchangeDevice": lambda _: 0,
        "_cuda_maybeExchangeDevice": lambda _: 0, "_cuda_synchronize": synchronize,
        "_cuda_emptyCache": lambda: None, "_cuda_isInBadFork": lambda: False,
        "_cuda_init": lambda: None, "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": lambda _: device.bytes_reset(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentRawStream": lambda _: 0, "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getArchFlags": lambda: f"sm_{capability[0]}{capability[1]}",
        "_cuda_ipc_collect": lambda: None,
    }.items():  # fmt: skip
        setattr(c, function, value)
    cuda: Any = torch.cuda
    torch.version.cuda = "13.0"
    cuda._lazy_init = lambda: None
    cuda._is_compiled = lambda: True
    cuda.is_available, cuda.is_initialized = (lambda: True), (lambda: True)
    cuda.memory.is_initialized = cuda.is_initialized
    cuda.device_count = lambda: COUNT
    cuda._get_device_properties = lambda _: properties
    cuda.get_device_properties = lambda _=None: properties
    cuda.mem_get_info = lambda _=None: (total - device.bytes_now(), total)
    cuda.memory.mem_get_info = cuda.mem_get_info
    cuda.set_per_process_memory_fraction = lambda fraction, _=None: device.bytes_limit(
        ctypes.c_size_t(int(fraction * total))
    )
    cuda.host_memory_stats = dict
    cuda.default_generators = (torch.Generator("cuda"),) * COUNT
    cuda.Event = cuda.streams.Event = torch.Event = Event
    cuda.Stream, cuda.current_stream = Stream, lambda _=None: Stream()
    cuda.stream = contextlib.nullcontext
    cuda.is_current_stream_capturing = lambda: False
    # Functions of their own, since Dynamo knows each of these by its object.
    cuda._exchange_device, cuda._maybe_exchange_device = (lambda _: 0), (lambda _: 0)
    cuda.synchronize = lambda _=None: synchronize()
    torch.accelerator.synchronize = lambda _=None, /: synchronize()
    torch.Tensor.pin_memory = lambda self, *_: self
    clone = torch.UntypedStorage.clone

    def whole(storage: Any) -> Any:
        found = torch.empty(0, dtype=torch.uint8, device="cuda")
        return found.set_(storage, 0, (storage.nbytes(),), (1,))

    def cloned(storage: Any) -> Any:
        if storage.device.type == "cpu":
            return clone(storage)
        return whole(storage).clone().untyped_storage()

    def on_host(storage: Any) -> Any:
        return storage if storage.device.type == "cpu" else whole(storage).cpu().untyped_storage()

    moved = torch.UntypedStorage.to

    def to_device(storage: Any, *, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type == "cpu":
            return moved(storage, device=device, non_blocking=non_blocking)
        found = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
        here = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        return found.copy_(here).untyped_storage()

    torch.UntypedStorage.to = to_device
    torch.UntypedStorage.clone, torch.UntypedStorage.cpu = cloned, on_host
    from torch._dynamo import device_interface

    interface: Any = device_interface.CudaInterface
    for function, value in {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: COUNT,
        "synchronize": synchronize, "exchange_device": lambda _: 0,
        "maybe_exchange_device": lambda _: 0, "get_device_properties": lambda _=None: properties,
        "get_compute_capability": lambda _=None: capability[0] * 10 + capability[1],
        "get_raw_stream": lambda _: 0, "current_stream": lambda _=None: Stream(),
    }.items():  # fmt: skip
        setattr(interface, function, staticmethod(value))


# ------------------------------------------------------------------------------------- operators


def _operators() -> None:
    """Operators that only CUDA has, or that check more there."""
    import torch
    from torch import Tensor
    from torch import _meta_registrations as meta

    from tests.host_gpu import attention

    library = torch.library.Library("aten", "IMPL")
    _keep.append(library)

    def implement(name: str) -> Callable[[Any], Any]:
        return lambda function: library.impl(name, function, "CUDA")

    def checked(shape: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """An empty result, where the CUDA kernel accepts these operands."""
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        assert all(x.is_cuda for x in operands), [x.device for x in operands]
        return shape(*args, **kwargs)

    @implement("_scaled_mm")
    def scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None,
        scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        settings = bias, scale_result, out_dtype, use_fast_accum
        out = checked(meta.meta_scaled_mm, a, b, scale_a, scale_b, *settings)
        both = {a.dtype, b.dtype}
        assert both != {torch.float8_e5m2}, "no product of two E5M2 matrices"
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0, "16-byte alignment of operands"
        rowwise = scale_a.numel() > 1 or scale_b.numel() > 1
        if rowwise:  # `is_rowwise_scaling` of ScaledBlas.cpp
            assert scale_a.shape == (a.shape[0], 1), scale_a.shape
            assert scale_b.shape == (1, b.shape[1]), scale_b.shape
            assert scale_a.is_contiguous()
            assert scale_b.t().is_contiguous()
            assert scale_b.data_ptr() % 16 == 0, "CUTLASS reads scales of columns by four"
            assert out.dtype == torch.bfloat16, "2.10: BF16 results only"
            if torch.cuda.get_device_capability()[0] == 12:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        y = (a.float() @ b.float()) * scale_a * scale_b
        return out.copy_(y if bias is None else y + bias)

    @implement("_scaled_grouped_mm")
    def scaled_grouped_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Any = None, bias: Any = None,
        scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        settings = offs, bias, scale_result, out_dtype, use_fast_accum
        out = checked(meta.meta_scaled_grouped_mm, a, b, scale_a, scale_b, *settings)
        assert torch.cuda.get_device_capability() in ((9, 0), (10, 0))
        wide = a.float() * scale_a[:, None], b.float() * scale_b[:, None]
        return out.copy_(_grouped(*wide, offs))

    @implement("_grouped_mm")
    def grouped_mm(
        a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        out = checked(meta.meta_grouped_mm, a, b, offs, bias, out_dtype)
        return out.copy_(_grouped(a.float(), b.float(), offs))

    for name, product in (("mm", torch.mm), ("bmm", torch.bmm)):

        def wide(a: Tensor, b: Tensor, dtype: Any, product: Any = product) -> Tensor:
            assert {a.dtype, b.dtype} <= {torch.bfloat16, torch.float16}
            assert dtype in (a.dtype, torch.float32)
            return product(a.float(), b.float()).to(dtype)

        implement(f"{name}.dtype")(wide)
        implement(f"{name}.dtype_out")(
            lambda a, b, dtype, *, out, wide=wide: out.copy_(wide(a, b, dtype))
        )

    def added(c: Tensor, a: Tensor, b: Tensor, dtype: Any, beta: Any = 1, alpha: Any = 1) -> Tensor:
        assert {a.dtype, b.dtype} <= {torch.bfloat16, torch.float16}
        return torch.addmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(dtype)

    def added_to(
        c: Tensor, a: Tensor, b: Tensor, dtype: Any, beta: Any = 1, alpha: Any = 1, *, out: Tensor
    ) -> Tensor:
        return out.copy_(added(c, a, b, dtype, beta, alpha))

    @implement("histc")
    def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
        return torch.histc(x.cpu().float(), bins, min, max).to(x)  # CPUs count no integers

    implement("addmm.dtype")(added)
    implement("addmm.dtype_out")(added_to)
    implement("_flash_attention_forward")(attention.forward)
    implement("_flash_attention_backward")(attention.backward)


def _without_triton() -> None:
    """Kernels of ours are their references, and compiled layers are as far as AOTAutograd."""
    import types

    from torch import nn

    from finetune.hardware.device import Verdict
    from finetune.precision.numbers import kernels

    stub: Any = types.ModuleType("finetune.precision.numbers.triton_kernels")
    stub.transpose_codes = kernels._transpose
    names = ("cast_rows", "cast_whole", "swiglu_cast", "swiglu_backward_cast")
    for name in (*names, "observe_logits", "grade_logits"):
        setattr(stub, name, getattr(kernels, f"_{name}"))
    sys.modules[stub.__name__] = stub
    update: Any = types.ModuleType("finetune.training.helper.optimizer.adamw_kernels")
    update.adamw, update.squares = _updated, _squares
    sys.modules[update.__name__] = update
    testing: Any = types.ModuleType("triton.testing")
    testing.do_bench = _milliseconds
    sys.modules[testing.__name__] = testing
    from finetune.hardware import device, requirements

    double = Verdict(True, "a double of Triton")
    for module in (device, requirements):
        module.has_triton = module.has_launcher = lambda: double
    compile = nn.Module.compile

    def only_traced(self: nn.Module, *args: Any, options: Any = None) -> None:
        compile(self, *args, backend="aot_eager")

    nn.Module.compile = only_traced


def _updated(table: Any, *facts: Any) -> None:
    """The update of `adamw_kernels` by that of host memory, which the device's memory is."""
    from finetune.training.helper.optimizer import adamw_host

    for columns, count in zip(table._columns, table.sizes, strict=True):
        adamw_host.adamw(columns, count, *facts)


def _squares(table: Any, dtype: Any, even: bool) -> Any:
    import ctypes

    import torch

    from finetune.training.helper.optimizer import adamw_host

    found = adamw_host.library()
    assert found is not None, "a C++ compiler made this device, too"
    sums = [
        found.squares(ctypes.c_int64(row[1]), adamw_host.TYPES[dtype], ctypes.c_int64(count), 1)
        for row, count in zip(table._columns, table.sizes, strict=True)
    ]
    return torch.tensor(sums, dtype=torch.float32).to(table.rows.device)


def _milliseconds(call: Callable[[], Any], **_: Any) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _profiled() -> None:
    """A profile's kernels: each operator of torch's that launches one is its own kernel."""
    from torch import profiler
    from torch.autograd import DeviceType

    cuda, plain = profiler.ProfilerActivity.CUDA, profiler.profile

    class Profile(plain):
        def __init__(self, *, activities: Any = None, **settings: Any) -> None:
            self.kernels = cuda in (activities or ())
            on_host = [x for x in activities or () if x != cuda] or [profiler.ProfilerActivity.CPU]
            super().__init__(activities=on_host, **settings)

        def events(self) -> Any:
            host: Any = super().events()
            return [*host, *(kernel(event) for event in host if self.kernels and launches(event))]

    def launches(event: Any) -> bool:
        from finetune.analysis.diagnose.timeline import HOST_OPS

        space, _, name = event.name.partition("::")
        leaf = not any(map(launches, event.cpu_children))
        return space == "aten" and leaf and name not in HOST_OPS

    def kernel(event: Any) -> Any:
        return SimpleNamespace(
            name=f"kernel of {event.name}", device_type=DeviceType.CUDA, is_async=False, id=-1,
            is_user_annotation=False, time_range=event.time_range, linked_correlation_id=event.id,
        )  # fmt: skip

    profiler.profile = Profile


_keep: list[Any] = []


def _grouped(a: Any, b: Any, ends: Any) -> Any:
    """Rows of a [S, K] by group times b [E, K, N]; or a [M, S] times b [S, N] for each group."""
    import torch

    bounds = [0, *ends.cpu().tolist()]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if b.dim() == 3:
        out = a.new_zeros(a.shape[0], b.shape[2])
        for e, rows in enumerate(parts):
            out[rows] = a[rows] @ b[e]
        return out
    return torch.stack([a[:, columns] @ b[columns] for columns in parts])


# ----------------------------------------------------------------------------------------- waits


def _watch(device: Any) -> None:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

    def waited(name: bytes) -> None:
        if _paused.depth:
            return
        lines = [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()[:-1]
        ]
        waits.append((name.decode(), lines))

    callback = kind(waited)
    _keep.append(callback)
    device.report_to(callback)


class _Paused(threading.local):
    depth = 1


_paused = _Paused()


class watching:  # noqa: N801
    """Context in which `waits` are noted, in any thread."""

    def __enter__(self) -> list[tuple[str, list[str]]]:
        waits.clear()
        _Paused.depth = 0
        _paused.depth = 0
        return waits

    def __exit__(self, *_: Any) -> None:
        _Paused.depth = 1
        _paused.depth = 1
