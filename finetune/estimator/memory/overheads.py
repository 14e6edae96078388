"""GPU memory that no tensor shows: the context, library workspaces, attention's buffers, NCCL's.

* *Inside the caching allocator*, so in allocated and reserved: cuBLAS gets a workspace per handle,
  and each thread has a handle. Forward runs in one thread and backward (with recomputation) in
  autograd's, so there are two. They are never freed.
* *Outside*, so only in `nvidia-smi`: the CUDA context with the code of the kernels used so far, and
  NCCL's buffers for each communicator.
* *Inside attention kernels.* Flash attention saves no scores, so its backward walks over blocks of
  keys and adds to dq from many thread blocks at once. The sum is in a float32 buffer of the
  queries' shape, with lengths and head sizes rounded up to the kernel's tiles: twice the bytes of
  BF16 queries, alive during one kernel. With grouped queries (fewer heads of keys than of queries)
  dk and dv are made for every query head and then summed. Every kernel also saves one float32 per
  row of scores, the log-sum-exp.

Triton kernels (Liger, compiled graphs) allocate with `torch.empty`, which a trace records; their
code counts to the context. `eager` attention consists of ordinary operators, which a trace shows.

The kernel behind `scaled_dot_product_attention` depends on version, GPU and mask (`sdpa_kernel`):

* `flash`: FlashAttention 2, of torch's SDPA and of the `flash-attn` package;
* `flash3`: FlashAttention 3 (`flash_attn_3`, Hopper);
* `efficient`: CUTLASS memory-efficient attention, which takes masks and float32;
* `cudnn`: cuDNN, whose buffers come in one piece from the caching allocator. Over documents it is
  `finetune.hardware.device.varlen_kernel` that picks it, and the buffers are those of as many rows
  of the longest document: of equal ones no more than of their tokens, else up to 8 times as much
  (`finetune.training.helper.varlen.ROOM`), which is not predicted.

Sources: `aten/src/ATen/cuda/CublasHandlePool.cpp` of torch 2.4, 2.9 and 2.13 and the pull requests
168175 (one workspace for both libraries) and 175344 (32 MiB on Blackwell); outside the allocator,
measurements named at each table, to about 150 MiB. For attention, read at torch 2.4 to 2.13,
flash-attn 2.8 and cudnn-frontend 1.12: `aten/src/ATen/native/transformers/cuda/` with
`attention_backward.cu`, `flash_attn/flash_api.cpp`, `mem_eff_attention/kernel_backward.h` and
`sdp_utils.cpp` (`check_prefer_cudnn_attention`); flash-attention's `csrc/flash_attn/flash_api.cpp`
and `hopper/flash_api.cpp`; cudnn-frontend's `scaled_dot_product_flash_attention.h`
(`CompositeSDPABackwardNode`).

Limits: no dropout, no deterministic mode (a dq buffer per split), head sizes a multiple of 8. Tile
sizes of `efficient` are those of sm_80 and later; the float32 output of its forward for heads above
128 is left out. cudnn-frontend requests the float32 sums; that the plan also makes dk and dv for
every query head is a conservative assumption.
"""

from __future__ import annotations

from typing import Literal

from finetune.hardware.versions import torch_of_gpus
from finetune.units import MIB

Link = Literal["nvlink", "pcie"]
Kernel = Literal["flash", "flash3", "efficient", "cudnn"]
FLOAT32 = 4
"""Bytes of an element."""


# ------------------------------------------------------------------------ workspaces, context, NCCL


def cublas_workspace(capability: tuple[int, int], torch_version: tuple[int, ...]) -> int:
    """Bytes of the workspace of one cuBLAS handle.

    `:4096:2:16:8`, 8.125 MiB; 32 MiB on Hopper, and on Blackwell from torch 2.12 on.
    `CUBLAS_WORKSPACE_CONFIG`, which overrides it on the training machine, is ignored.
    """
    # Major compute capabilities: 9 is Hopper, 10 and 12 are Blackwell.
    large = (9,) if torch_version < (2, 12) else (9, 10, 12)
    return 32 * MIB if capability[0] in large else 2 * 4096 * 1024 + 8 * 16 * 1024


def library_workspaces(
    capability: tuple[int, int], torch_version: tuple[int, ...] | None = None
) -> list[int]:
    """Bytes of each allocation that cuBLAS and cuBLASLt keep in a training process.

    One for the thread of forward, one for the thread of backward. Before torch 2.11, cuBLASLt (FP8
    GEMMs, and linear layers with a bias) has 1 MiB of its own for each.
    """
    version = torch_version or torch_of_gpus()
    blas = cublas_workspace(capability, version)
    return [blas, blas] if version >= (2, 11) else [blas, MIB, blas, MIB]


def pinned_bytes(nbytes: int, torch_version: tuple[int, ...] | None = None) -> int:
    """Bytes that torch takes to pin a tensor: a power of two, but of more than 1 MiB no more.

    That is what `hardware.device.expand_segments` tells it; before 2.13 every tensor is rounded up.
    """
    exact = nbytes > MIB and (torch_version or torch_of_gpus()) >= (2, 13)
    return nbytes if exact or not nbytes else 1 << (nbytes - 1).bit_length()


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
    # A GPU older than the table has the least of it.
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
    return 0 if gpus < 2 else 2 * NCCL_CHANNELS[link] * NCCL_CONNECTION


# ---------------------------------------------------------------------------------------- attention

# Tile of rows to which flash rounds lengths up (`flash_api.cpp`: `seqlen_q_rounded`), and
# `efficient` those of its log-sum-exp (`kernel_forward.h`: `kAlignLSE`).
FLASH_ROWS, EFFICIENT_ROWS = 128, 32


def sdpa_kernel(
    capability: tuple[int, int],
    torch_version: tuple[int, ...],
    *,
    head_dim: int,
    masked: bool,
    itemsize: int = 2,
) -> Kernel:
    """Kernel that torch's `scaled_dot_product_attention` runs for training on a CUDA device.

    cuDNN comes first on sm_90 in 2.5.0 (reverted in 2.5.1), and on sm_90 and sm_100 in 2.9 and from
    2.11 on, whose wheels bring the required cuDNN (above 9.15); 2.10 has the code with an older
    cuDNN. With an older cuDNN, or TORCH_CUDNN_SDPA_DEPRIORITIZED=1, flash runs. Flash takes no
    mask, and has no backward for heads above 192 on sm_86 and sm_89.

    Args:
        capability: compute capability of the device.
        torch_version: (major, minor[, patch]).
        masked: an explicit mask is passed (`is_causal` alone is none).
        itemsize: bytes per element of the queries; 4 rules flash and cuDNN out.
    """
    # Flash and cuDNN compute in 16 bits only.
    half = itemsize == 2
    # The largest heads that torch gives to each kernel's backward: `sdp_utils.cpp`,
    # `flash_api.cpp`.
    cudnn_limit = 256 if capability == (9, 0) else 128
    if half and head_dim <= cudnn_limit and _prefers_cudnn(capability, torch_version):
        return "cudnn"
    flash_limit = 192 if capability in ((8, 6), (8, 9)) else 256
    if half and capability >= (8, 0) and not masked and head_dim <= flash_limit:
        return "flash"
    return "efficient"


def _prefers_cudnn(capability: tuple[int, int], torch_version: tuple[int, ...]) -> bool:
    version = (*torch_version, 0)[:3]
    if capability not in ((9, 0), (10, 0), (10, 3)):
        return False
    if version == (2, 5, 0):
        return capability[0] == 9
    if capability == (10, 3) and version < (2, 11, 0):
        return False
    return (2, 9, 0) <= version < (2, 10, 0) or version >= (2, 11, 0)


def attention_forward_extra(kernel: Kernel, batch: int, heads: int, queries: int) -> int:
    """Bytes of the log-sum-exp, [batch, heads, queries] float32, saved besides the output."""
    rows = _round(queries, EFFICIENT_ROWS) if kernel == "efficient" else queries
    return batch * heads * rows * FLOAT32


def attention_backward_extra(
    kernel: Kernel,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    itemsize: int = 2,
) -> list[int]:
    """Bytes of each temporary of backward, besides the gradients that it returns.

    Shapes: q [batch, heads, queries, head_dim]; k, v [batch, kv_heads, keys, head_dim]. `itemsize`
    is in bytes per element of q.
    """
    grouped = heads != kv_heads
    expanded = batch * keys * heads * head_dim * itemsize  # one of dk, dv for every query head
    if kernel == "cudnn":  # row sums and dq in float32
        total = batch * heads * queries * (1 + head_dim) * FLOAT32
        return [total + (2 * expanded if grouped else 0)]
    if kernel == "efficient":
        sums = batch * heads * queries * FLOAT32
        return [sums, _efficient_workspace(batch, heads, queries, keys, head_dim)]
    width = _round(head_dim, 32 if head_dim <= 128 else 64)  # flash's float32 head size
    rows = batch * _round(queries, FLASH_ROWS)
    # softmax's row sums [batch, heads, rows]; dq [batch, rows, heads, width]
    parts = [heads * rows * FLOAT32, rows * heads * width * FLOAT32]
    if kernel == "flash":
        return [*parts, expanded, expanded] if grouped else parts
    sums = batch * kv_heads * _round(keys, FLASH_ROWS) * width * FLOAT32
    parts.insert(0, parts[0])  # flash3 has the log-sum-exp in base 2 as well
    return [*parts, sums, sums] if grouped else parts


def _efficient_workspace(batch: int, heads: int, queries: int, keys: int, head_dim: int) -> int:
    """`Params::workspace_size()` of the CUTLASS kernel: float32 tiles of dq, each with a lock.

    Heads above 128 do not fit registers, so tiles of dk and dv are in memory as well.
    """
    rows = columns = 64 if head_dim <= 64 or head_dim > 128 else 128
    tiles = -(-queries // rows) * -(-head_dim // columns)
    nbytes = tiles * (16 + rows * columns * FLOAT32)  # 16: the lock, padded
    if head_dim > 128:
        splits = min(-(-keys // columns), max(1, 200 // (batch * heads)))
        nbytes += 2 * splits * columns * _round(head_dim, rows) * FLOAT32
    return batch * heads * _round(nbytes, 16)


def _round(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
