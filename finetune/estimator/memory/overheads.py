"""GPU memory that no tensor shows: the context, library workspaces, NCCL's buffers.

* *Inside the caching allocator*, so in allocated and reserved: cuBLAS gets a workspace per handle,
  and each thread has a handle. Forward runs in one thread and backward (with recomputation) in
  autograd's, so there are two. They are never freed.
* *Outside*, so only in `nvidia-smi`: the CUDA context with the code of the kernels used so far, and
  NCCL's buffers for each communicator.

Triton kernels (Liger, compiled graphs) allocate with `torch.empty`, which a trace records; their
code counts to the context. For attention kernels see `finetune.estimator.memory.attention_buffers`.

Sources: `aten/src/ATen/cuda/CublasHandlePool.cpp` of torch 2.4, 2.9 and 2.13 and the pull requests
168175 (one workspace for both libraries) and 175344 (32 MiB on Blackwell); outside the allocator,
measurements named at each table, to about 150 MiB.
"""

from __future__ import annotations

from importlib import metadata
from typing import Literal

MIB = 1 << 20
Link = Literal["nvlink", "pcie"]


def installed_torch() -> tuple[int, int, int]:
    """Version of the installed torch, without importing it."""
    major, minor, patch = metadata.version("torch").split("+")[0].split(".")[:3]
    return int(major), int(minor), int("".join(filter(str.isdigit, patch)) or 0)


def cublas_workspace(
    capability: tuple[int, int], torch_version: tuple[int, ...] | None = None
) -> int:
    """Bytes of the workspace of one cuBLAS handle.

    `:4096:2:16:8`, 8.125 MiB; 32 MiB on Hopper, and on Blackwell from torch 2.12 on.
    `CUBLAS_WORKSPACE_CONFIG`, which overrides it on the training machine, is ignored.
    """
    version = torch_version or installed_torch()
    large = (9,) if version < (2, 12) else (9, 10, 12)
    return 32 * MIB if capability[0] in large else 2 * 4096 * 1024 + 8 * 16 * 1024


def library_workspaces(
    capability: tuple[int, int], torch_version: tuple[int, ...] | None = None
) -> list[int]:
    """Bytes of each allocation that cuBLAS and cuBLASLt keep in a training process.

    One for the thread of forward and one for that of backward. Before torch 2.11, cuBLASLt (FP8
    GEMMs, and linear layers with a bias) has 1 MiB of its own for each.
    """
    version = torch_version or installed_torch()
    blas = cublas_workspace(capability, version)
    return [blas, blas] if version >= (2, 11) else [blas, MIB, blas, MIB]


# Context and kernel code of a process after a training step, MiB. Measured: 426 before the first
# kernel on an RTX 6000 Ada (torch 2.10, CUDA 13.0: unslothai/unsloth-zoo#1053), 274 with a first
# kernel on an older GPU (torch 1.13, CUDA 11.7, lazy loading: pytorch/pytorch#86509). The others
# are scaled by the number of multiprocessors, plus 80 of kernels (cuBLAS, attention, pointwise).
CONTEXT_MIB = {
    (7, 5): 250,
    (8, 0): 480,
    (8, 6): 380,
    (8, 9): 500,
    (9, 0): 560,
    (10, 0): 640,
    (10, 3): 640,
    (12, 0): 620,
}


def context_bytes(capability: tuple[int, int]) -> int:
    """Bytes of the CUDA context and the code loaded into it, by compute capability.

    This is the excess of `nvidia-smi` over reserved, on one GPU. An unlisted capability has the
    value of the nearest below. Kernels load lazily, the default since CUDA 11.7; before, all of
    torch's took more than 1000 MiB.
    """
    known = [listed for listed in CONTEXT_MIB if listed <= capability]
    return CONTEXT_MIB[max(known, default=min(CONTEXT_MIB))] * MIB


# One connection of one channel: 10 MiB to receive (4 MiB for the simple protocol, the rest for LL
# and LL128) and 2 MiB to send, as NCCL_DEBUG_SUBSYS=ALLOC lists them on H100 (NVIDIA/nccl#1685).
NCCL_CONNECTION = 12 * MIB
NCCL_CHANNELS: dict[Link, int] = {"nvlink": 24, "pcie": 2}


def nccl_bytes(gpus: int, link: Link = "nvlink") -> int:
    """Bytes of NCCL's buffers on each GPU, outside the caching allocator.

    One communicator has a ring (all-gather, reduce-scatter) and a tree (all-reduce of a gradient
    norm or loss) through 24 channels over NVLink switches, 2 over PCIe: with the context 1.1 GB on
    H100, as NVIDIA/nccl#1685 reports. Point-to-point sends (pipelines, experts) take far more.
    """
    if gpus < 2:
        return 0
    return 2 * NCCL_CHANNELS[link] * NCCL_CONNECTION
