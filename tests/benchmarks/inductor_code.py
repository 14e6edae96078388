"""Inductor's code for a GPU that is not there, and counts of its kernels.

Inductor asks a device for its properties only, so these are patched; kernels are written, not
loaded. Patches are not undone: use a process of its own. Needs Triton, of torch 2.13's series.
"""

from __future__ import annotations

import ast
import math
import re
import types
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CAPABILITY = (9, 0)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, L2_cache_size=50 << 20, gcnArchName="", is_integrated=False,
    is_multi_gpu_board=0, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, uuid="0", clock_rate=1980000,
    memory_clock_rate=2619000, memory_bus_width=5120, pci_bus_id=0,
)  # fmt: skip
BYTES = {
    "*bf16": 2, "*fp32": 4, "*fp8e4nv": 1, "*fp8e5": 1, "*u8": 1, "*i64": 8, "*i32": 4,
    "*i16": 2, "*i1": 1, "*i8": 1,
}  # fmt: skip
"""Bytes of an element by the type in a kernel's signature."""
SMALL = 1e7
"""Elements from which a buffer of FP8 codes counts as a stored cast."""

_sources: list[str] = []


def pretend() -> None:
    """Make torch, Inductor and Triton see an H100, and keep sources instead of loading them."""
    if _sources:
        return
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    constant = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "get_device_capability": CAPABILITY, "get_device_properties": PROPERTIES,
        "get_device_name": PROPERTIES.name, "_lazy_init": None, "is_bf16_supported": True,
        "synchronize": None, "is_current_stream_capturing": False, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "set_device": None,
    }  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)
    for owner, values in (
        (torch.cuda, {**constant, "get_rng_state": state, "set_rng_state": None}),
        (torch.cuda.random, {"get_rng_state": state, "set_rng_state": None}),
        (torch.cuda.graphs, {"is_current_stream_capturing": False}),
        (torch.accelerator, {"current_device_index": 0}),
        (torch._C, {"_cuda_getDeviceCount": 1, "_cuda_getDevice": 0, "_cuda_exchangeDevice": 0,
                    "_cuda_maybeExchangeDevice": 0, "_cuda_getCurrentRawStream": 0}),
        (device_interface.CudaInterface, {
            "is_available": True, "device_count": 1, "current_device": 0, "exchange_device": 0,
            "maybe_exchange_device": 0, "get_compute_capability": 90, "is_triton_capable": True,
            "get_device_properties": PROPERTIES, "raise_if_triton_unavailable": None,
            "synchronize": None}),
        (device_interface.CudaInterface.Worker,
         {"get_device_properties": PROPERTIES, "current_device": 0}),
        (fake_tensor, {"init_gpu_context": None}),  # which a CUDA build does, and needs a driver
        (torch.utils._triton, {"has_triton": True}),
        (scheduler, {"has_triton": True}),
        (reinplace, {"canonicalize_view_scatter_ops": None}),
    ):  # fmt: skip
        for name, value in values.items():
            function: Any = lambda *_, value=value, **__: value  # noqa: E731
            setattr(owner, name, staticmethod(function) if isinstance(owner, type) else function)
    torch._C._ensureCUDADeviceGuardSet()
    torch.version.cuda = torch.version.cuda or "13.0"
    driver: Any = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(driver)
    config.compile_threads, config.fx_graph_cache = 1, False

    def keep(graph: Any) -> Any:
        code = graph.codegen()[0]
        _sources.append(getattr(code, "value", code))
        module: Any = types.ModuleType("without_a_gpu")
        module.__path__, module.__file__, module.call = [], "", lambda _: ()
        return module

    GraphLowering.compile_to_module = keep


def code_of(graph: torch.fx.GraphModule, inputs: list[Any], phase: str) -> str:
    """Inductor's source of a graph of fake CPU tensors, as for a GPU."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    pretend()
    mode = FakeTensorMode()
    for node in graph.graph.nodes:
        node.args, node.kwargs = _moved(node.args), _moved(node.kwargs)
        node.meta = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
    with mode:
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            if isinstance(x, Tensor)
            else x
            for x in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*fakes)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        compile_fx_inner(graph, fakes, is_backward=phase == "backward", cudagraphs=BoxedBool(False))
    return _sources[-1]


def _moved(value: Any) -> Any:
    """Arguments of a node with every device replaced by the GPU."""
    if isinstance(value, torch.device):
        return torch.device("cuda", 0)
    if isinstance(value, dict):
        return {key: _moved(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_moved, value))
    return value


# ------------------------------------------------------------------------------------------- counts

_KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL)
_SIGNATURE = re.compile(r"'signature': (\{.*?\})")
_SIZES = (
    re.compile(r"(?:assert_size_stride|assert_tensor_metadata)\((\w+), \(([^)]*)\)"),
    re.compile(r"(\w+) = empty_strided_\w+\(\(([^)]*)\)"),
    re.compile(r"^\s*(buf\d+) = reinterpret_tensor\(\w+, \(([^)]*)\)", re.MULTILINE),
)
_GROUPS = re.compile(r"assert_size_stride_grouped\((\(.*?\)), (\(.*?\)\)), \(\(")
"""Of torch 2.15: names of several tensors, and their shapes."""
_RENAMED = re.compile(r"^\s*(buf\d+) = (\w+); *del", re.MULTILINE)
_RUN = re.compile(r"(triton_\w+)\.run\(([^\n]*?), stream=")
_TRANSPOSE = re.compile(
    r"torch\.ops\.finetune\.transpose_codes\.default\((\w+|reinterpret_[^)]*\))"
)
_CAST = re.compile(
    r"(buf\d+) = torch\.ops\.finetune\.(cast_whole|swiglu_cast|swiglu_backward_cast)\.default\("
    r"(reinterpret_tensor\(\w+, \([^)]*\), \([^)]*\), 0\)|\w+)(.*)\)"
)


def count(code: str) -> dict[str, int]:
    """Kernels of a source, by kind, and the bytes of those that are no GEMM or attention.

    `code_stores`: buffers of FP8 codes that Inductor's kernels write. A kernel's bytes are those of
    its arguments, twice where it writes in place. Casts of ours are two kernels each, of which the
    second finds, as in nearly every step, that the scale was guessed, and does nothing.
    """
    signatures = {
        name: ast.literal_eval(found[1])
        for name, body in _KERNEL.findall(code)
        if (found := _SIGNATURE.search(body))
    }
    body = code[code.index("def call(") :]
    sizes: dict[str, int] = {}
    for pattern in _SIZES:
        for name, shape in pattern.findall(body):
            sizes.setdefault(name, math.prod(int(n) for n in shape.split(",") if n.strip()))
    for names, shapes in _GROUPS.findall(body):
        each = zip(re.findall(r"\w+", names), ast.literal_eval(shapes), strict=True)
        sizes |= {name: math.prod(shape) for name, shape in each}
    renamed = dict(_RENAMED.findall(body))

    def size(argument: str) -> int:
        name = re.sub(r"reinterpret_tensor\((\w+).*", r"\1", argument.strip())
        while name in renamed and name not in sizes:
            name = renamed[name]
        return sizes[name]

    moved = stores = 0
    runs = _RUN.findall(body)
    for kernel, arguments in runs:
        for (name, kind), argument in zip(
            signatures[kernel].items(), arguments.split(", "), strict=False
        ):
            if kind not in BYTES:
                continue
            elements = size(argument)
            moved += elements * BYTES[kind] * (2 if name.startswith("in_out") else 1)
            stores += kind == "*fp8e4nv" and name.startswith("out") and elements > SMALL
    transposed = _TRANSPOSE.findall(body)
    moved += sum(2 * size(argument) for argument in transposed)
    casts = _CAST.findall(body)
    kernels = len(runs) + 2 * len(casts)
    scaled = body.count("extern_kernels._scaled_mm(")
    products = len(re.findall(r"extern_kernels\.(?:mm|mm_dtype|addmm|bmm)\(", body))
    attention = len(re.findall(r" = torch\.ops\.[\w.]*attention\w*\.default\(", body))
    for _, name, first, rest in casts:
        moved += _cast_bytes(name, size(first), rest)
    return {
        "launches": kernels + scaled + products + attention + len(transposed),
        "kernels": kernels,
        "fp8_gemms": scaled,
        "gemms": products,
        "code_stores": stores,
        "transposes": len(transposed),
        "bytes": moved,
    }


def _cast_bytes(name: str, elements: int, arguments: str) -> int:
    """Bytes of a cast of ours of 16-bit operands whose scale was guessed."""
    match name:
        case "cast_whole":  # ..., plain, turned
            flags = arguments.split(", ")[-2:]
            return elements * (2 + flags.count("True"))
        case "swiglu_cast":
            return elements * (2 * 2 + 1)
        case _:
            return elements * (3 * 2 + 5)
