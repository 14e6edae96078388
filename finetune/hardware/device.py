"""This machine's devices and libraries: FP8 units, memory, versions, each answer with its reason.

The only module that asks torch about GPUs. FP8 tensor cores exist from compute capability 8.9
(Ada: RTX 4090, L40S), 9.0 (Hopper: H100, H200) and 10.0 (Blackwell: B200) on; the block formats
MXFP8 and NVFP4 need 10.0. Source: NVIDIA CUDA C++ Programming Guide, compute capabilities.

The library behind `torch._scaled_mm` (`gemm_engine`) depends on the GPU and on the scales:

| scales | compute capability | library | torch calls it |
|---|---|---|---|
| one per tensor | 8.9 and later | cuBLASLt | always |
| one per row and column | 9.x | cuBLASLt, outer-vector scaling | built for CUDA 12.9 or later |
| one per row and column | others | CUTLASS | unless the above does |
| one per row and column | 12.x | none | CUBLAS_STATUS_NOT_SUPPORTED |

cuBLASLt multiplies row-wise scales about as fast as one per tensor (H100, 4096 x 4096 x 4096:
0.98), CUTLASS markedly slower. Sources: `_scaled_mm` for CUDA in torch 2.10; release notes of
cuBLAS 12.9 (outer-vector scaling, compute capability 9.x only); the failure on compute capability
12.0 was reported with torch 2.10 and CUDA 13.0.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune.errors import ConfigError, first_line, install_hint
from finetune.hardware.versions import installed_torch, version
from finetune.precision.facts import BLOCK_CAPABILITY, FP8_CAPABILITY, SCALINGS, Scaling
from finetune.units import GIB


@dataclass(frozen=True)
class Verdict:
    """An answer and its reason. True in a condition when `ok`."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Device:
    """The device a run would train on.

    Attributes:
        kind: torch device type.
        name: marketing name as the driver gives it.
        capability: CUDA compute capability, None where there is none.
        memory_gib: memory of one device (host memory on CPU), in GiB.
        count: devices of this kind on the machine.
        is_rocm: an AMD GPU, which torch also calls `cuda`.
    """

    kind: Literal["cuda", "mps", "xpu", "cpu"]
    name: str
    capability: tuple[int, int] | None
    memory_gib: float
    count: int = 1
    is_rocm: bool = False

    @property
    def has_fp8(self) -> Verdict:
        """True if this device multiplies FP8 in hardware."""
        if self.capability is None or self.is_rocm:
            kinds = {"mps": "Apple GPUs have", "cpu": "CPUs have"}
            what = kinds.get(self.kind, f"{self.name} has")
            return Verdict(False, f"{what} no FP8 matrix units")
        shown = shown_capability(self.capability)
        if self.capability < FP8_CAPABILITY:
            return Verdict(False, f"{self.name} has compute capability {shown}; FP8 needs 8.9")
        return Verdict(True, f"{self.name}, compute capability {shown}")

    @property
    def has_block_fp8(self) -> Verdict:
        """True if this device multiplies MXFP8 and NVFP4 in hardware."""
        if not self.has_fp8 or self.capability is None:
            return self.has_fp8
        ok = self.capability >= BLOCK_CAPABILITY
        shown = shown_capability(self.capability)
        return Verdict(ok, f"compute capability {shown}" + ("" if ok else "; 10.0 is needed"))


def shown_capability(capability: tuple[int, int]) -> str:
    """`8.9`."""
    return ".".join(map(str, capability))


# Set by torchrun and accelerate launch, before any of these processes has met the others.


def launched(name: str, default: int) -> int:
    """Number in a variable of a launcher, which schedulers set, too.

    Raises:
        ConfigError: it is no number.
    """
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r}, and no number",
            where=f"{name}, of the environment",
            why="torchrun and accelerate launch tell processes apart by it",
            fix=f"env -u {name} python -m finetune ... for one process, or start it with torchrun",
        )
    return int(text)


def processes() -> int:
    """Number of processes of this run."""
    return launched("WORLD_SIZE", 1)


def rank() -> int:
    """Number of this process among them, from 0."""
    return launched("RANK", 0)


_WORLD = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables that give a process the number of those started with it, by torchrun and by MPI."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, all of them, and Accelerate reads, each by itself."""


def refuse_lone_process(program: str, *, several: bool = True) -> None:
    """Reject one process that was meant, or would take itself, for one of several.

    Where it sees no second GPU, Accelerate 1.15 starts one process whatever `--num_processes` is
    (`commands.launch.simple_launcher`), and leaves the address at which several would have met.

    Args:
        program: what `python` or `torchrun` is to start instead.
        several: True if `torchrun` may start the program.

    Raises:
        ConfigError: there are signs of it in the environment.
    """
    told = [name for name in _RENDEZVOUS if name in os.environ]
    joins = "LOCAL_RANK" in told or processes() > 1 or rank() > 0
    by_mpi = any(name in os.environ for name in _WORLD[1:])
    if joins and not by_mpi and len(told) < len(_RENDEZVOUS):
        missing = ", ".join(name for name in _RENDEZVOUS if name not in told)
        one = f"{' '.join(f'env -u {name}' for name in told)} python {program}"
        two = f"torchrun --standalone --nproc_per_node=2 {program}"
        raise ConfigError(
            "this process would take itself for one of several, and cannot find the others",
            where=f"the environment has {', '.join(told)}, and no {missing}",
            why="schedulers and earlier jobs leave such variables; a launcher sets all of them",
            fix=f"{one} for one process; {two} for two" if several else one,
        )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if by_accelerate and "MASTER_ADDR" in os.environ and not any(n in os.environ for n in _WORLD):
        raise ConfigError(
            "accelerate launch was to start several processes, and started one",
            where="accelerate launch --num_processes, or num_processes of its configuration",
            why="it starts several on GPUs alone: with --cpu, and where it sees one GPU, it starts "
            "one without a word",
            fix=f"torchrun --standalone --nproc_per_node=2 {program}, also on CPUs; or "
            "--num_processes 1, and no MASTER_ADDR in the environment",
        )


def _together() -> int:
    """Number of processes of this run on this machine."""
    return launched("LOCAL_WORLD_SIZE", 1)


@functools.cache
def this_device() -> Device:
    """The device that training on this machine would use.

    Of processes that train together (torchrun, accelerate launch) each has a GPU of its own. All go
    by the least of these, for their precision and checkpointing have to agree.
    """
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        gpus = map(torch.cuda.get_device_properties, range(min(_together(), count)))
        # The weakest decides for all: processes train in one precision, and with batches of one
        # size.
        least = min(gpus, key=lambda gpu: (gpu.major, gpu.minor, gpu.total_memory))
        return Device(
            "cuda",
            least.name,
            (least.major, least.minor),
            least.total_memory / GIB,
            count,
            is_rocm=torch.version.hip is not None,
        )
    import platform

    import psutil

    host_gib = psutil.virtual_memory().total / GIB
    if torch.backends.mps.is_available():
        return Device("mps", "Apple GPU", None, host_gib)
    if torch.xpu.is_available():
        return Device("xpu", torch.xpu.get_device_name(0), None, host_gib, torch.xpu.device_count())
    return Device("cpu", platform.processor() or platform.machine() or "CPU", None, host_gib)


def synchronize(kind: str) -> None:
    """Wait until a device has done what it was given; a CPU already has.

    Args:
        kind: as `Device.kind`.
    """
    import torch

    if kind != "cpu":
        torch.accelerator.synchronize()


DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver describes each GPU of a Linux machine."""


def installed_model(driver: Path = DRIVER) -> str | None:
    """The model of the first GPU, known without torch; None where there is none."""
    for file in sorted(driver.glob("*/information")):
        if model := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE):
            return model[1].strip()
    return None


def generators() -> list[int]:
    """GPUs whose random states a block has to keep, for `torch.random.fork_rng`.

    Left to find them itself, it warns in each process of a machine with several.
    """
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_gib(device: Device) -> float:
    """GiB that this process could allocate now: free on its GPU, or its share of the host's."""
    if device.kind == "cuda":
        import torch

        # On another process' GPU this would make a context, and take half a GiB of it.
        own = launched("LOCAL_RANK", 0) % torch.cuda.device_count()
        return torch.cuda.mem_get_info(own)[0] / GIB
    return host_gib()


def host_gib() -> float:
    """GiB of host memory that this process could allocate now: its share of what is free."""
    import psutil

    return psutil.virtual_memory().available / GIB / _together()


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables from which torch's CUDA allocator takes settings; the second is the older name."""
EXPANDABLE = f"{ALLOCATOR[1]}=expandable_segments:True"


@functools.cache
def expand_segments() -> Verdict:
    """Let the CUDA allocator's segments grow, unless the user has settings of their own.

    Segments that do not grow leave pieces between them that nothing fits into: a full step of an 8B
    model ended on an H100 with 53.0 GiB allocated and 22.1 reserved and unusable.

    Returns:
        True if they grow, and what the allocator was told; False and why they were left alone.
    """
    import torch

    own = next((f"{name}={os.environ[name]}" for name in ALLOCATOR if os.environ.get(name)), "")
    if own:
        return Verdict("expandable_segments:true" in own.lower(), f"{own}, from the environment")
    # A private name: where a torch does not have it, segments stay as torch makes them.
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if not torch.cuda.is_available() or torch.version.hip or sys.platform != "linux" or not tell:
        return Verdict(False, "as torch has it")
    if torch.cuda.memory_reserved():
        return Verdict(False, f"tensors were on the GPU before; export {EXPANDABLE}")
    # Masters in host memory (`precision.fp8_params`) are pinned, each rounded up to a power of two
    # otherwise: 170 MiB to 256. Older releases do not know the word, and refuse it.
    exact = ",pinned_max_round_threshold_mb:1" if installed_torch() >= (2, 13, 0) else ""
    tell(f"expandable_segments:True{exact}")
    return Verdict(True, "expandable_segments:True")


def has_transformer_engine() -> Verdict:
    """True if Transformer Engine with its PyTorch part is importable."""
    if importlib.util.find_spec("transformer_engine") is None:
        return Verdict(False, f"transformer-engine is not installed: {install_hint('te')}")
    # The PyPI package `transformer_engine` alone holds no binaries: its torch part is another one.
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        no = f"transformer-engine is installed but does not import: {first_line(error)}"
        return Verdict(False, no)
    if not hasattr(te.Float8CurrentScalingQuantizer, "inner_tensor_specs"):
        old = "transformer-engine is older than 2.20: its casts do not say what buffers they make"
        return Verdict(False, old)
    return Verdict(True, f"transformer-engine {version('transformer-engine') or 'importable'}")


def has_bitsandbytes() -> Verdict:
    """True if bitsandbytes has loaded its kernels for the GPUs of this machine.

    It imports without them, too (0.50), and raises at the first kernel, when a model is loaded.
    """
    try:
        from bitsandbytes.cextension import lib
    except (ImportError, OSError, RuntimeError) as error:
        return Verdict(False, f"bitsandbytes does not import: {first_line(error)}")
    if getattr(lib, "compiled_with_cuda", True):
        return Verdict(True, f"bitsandbytes {version('bitsandbytes') or 'importable'}")
    said = getattr(lib, "error_msg", "") or "it was built for CPUs alone"
    return Verdict(False, f"bitsandbytes has no kernels for this GPU: {said.splitlines()[0]}")


@functools.cache
def has_triton() -> Verdict:
    """True if Triton imports; also on a machine without CUDA, which only predicts runs."""
    import torch

    if torch.version.cuda is None:
        return Verdict(True, "CUDA builds of torch bring Triton")
    try:
        import triton
    except (ImportError, OSError, RuntimeError) as error:
        return Verdict(False, f"triton does not import: {error}")
    return Verdict(True, f"triton {triton.__version__}")


@functools.cache
def has_launcher() -> Verdict:
    """True if Triton has its launcher for this machine's GPU, which starts its kernels.

    Triton (3.6, 3.7) compiles it in C at its first kernel, and keeps it in its cache. That takes a
    C compiler and Python's headers, which slim containers lack; the first kernel, of compiled
    layers or of our own, is then a traceback, after the model is loaded.
    """
    try:
        from triton.runtime import driver

        driver.active.utils  # noqa: B018  made at the first access
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # libcuda: asserted
        return Verdict(False, first_line(error))
    except subprocess.CalledProcessError as error:
        compiler = error.cmd[0] if isinstance(error.cmd, list) else "the C compiler"
        return Verdict(False, f"{compiler} cannot compile Triton's launcher: its message is above")
    return Verdict(True, "Triton has its launcher")


def starts_triton() -> bool:
    """True if kernels of Triton start here, or would on the GPU that a run is predicted for."""
    import torch

    return bool(has_triton() and (not torch.cuda.is_available() or has_launcher()))


GemmEngine = Literal["cuBLASLt tensorwise", "cuBLASLt outer-vector", "CUTLASS rowwise"]
OUTER_VECTOR_CUDA = (12, 9)
NO_ROWWISE = 12
"""Major compute capability on which nothing in torch multiplies row-wise scales."""


def gemm_engine(scaling: Scaling, capability: tuple[int, int], cuda: tuple[int, int]) -> GemmEngine:
    """The library that multiplies FP8 codes under `scaling` on a GPU.

    Args:
        scaling: `precision.scaling`.
        capability: compute capability of the GPU.
        cuda: version of CUDA that torch was built for.
    """
    if not SCALINGS[scaling].by_row:
        return "cuBLASLt tensorwise"
    vectors = capability[0] == 9 and cuda >= OUTER_VECTOR_CUDA
    return "cuBLASLt outer-vector" if vectors else "CUTLASS rowwise"


def cuda_of(torch_version: tuple[int, ...], built_for: str | None) -> tuple[int, int]:
    """CUDA of a torch: what it was built for, else of the usual wheel of its version.

    `pip install torch` gives CUDA 12.8 up to 2.10, 13.0 from 2.11 and 13.2 from 2.15 on.
    """
    if built_for is not None:
        major, minor = built_for.split(".")[:2]
        return int(major), int(minor)
    if torch_version >= (2, 15):
        return (13, 2)
    return (13, 0) if torch_version >= (2, 11) else (12, 8)


VarlenKernel = Literal["cuDNN", "FlashAttention-2"]
NO_EMPTY_DOCUMENTS = 92500
"""cuDNN, as torch numbers it, below which documents without tokens give NaN.

Source: NVIDIA/cudnn-frontend, issue 943; `FixedDocuments` fills batches up with such documents.
"""


def varlen_kernel(
    capability: tuple[int, int],
    torch_version: tuple[int, ...],
    cudnn: int | None,
    *,
    head_dim: int,
    windowed: bool = False,
) -> VarlenKernel:
    """The kernel of torch's `varlen_attn` that causal attention within documents is to take.

    Source: `_cudnn_rejection_reasons` in torch/nn/attention/varlen.py of torch 2.15; before, causal
    attention had FlashAttention-2 alone.

    Args:
        cudnn: `torch.backends.cudnn.version()`; None: what the wheel of `torch_version` brings
            (2.15.0: 9.26).
        windowed: a query sees some of the tokens before it only.
    """
    fits = capability[0] in (9, 10) and head_dim <= 128 and head_dim % 8 == 0 and not windowed
    known = torch_version >= (2, 15) and (cudnn is None or cudnn >= NO_EMPTY_DOCUMENTS)
    return "cuDNN" if fits and known else "FlashAttention-2"
