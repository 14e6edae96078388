"""The library behind `torch._scaled_mm`: which one multiplies FP8 on a GPU, under which scaling.

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

from typing import Literal

GemmEngine = Literal["cuBLASLt tensorwise", "cuBLASLt outer-vector", "CUTLASS rowwise"]
OUTER_VECTOR_CUDA = (12, 9)
NO_ROWWISE = 12
"""Major compute capability on which nothing in torch multiplies row-wise scales."""


def gemm_engine(scaling: str, capability: tuple[int, int], cuda: tuple[int, int]) -> GemmEngine:
    """The library that multiplies FP8 codes under `scaling` on a GPU.

    Args:
        scaling: `precision.scaling`.
        capability: compute capability of the GPU.
        cuda: version of CUDA that torch was built for.
    """
    if not scaling.startswith("rowwise"):
        return "cuBLASLt tensorwise"
    vectors = capability[0] == 9 and cuda >= OUTER_VECTOR_CUDA
    return "cuBLASLt outer-vector" if vectors else "CUTLASS rowwise"


def cuda_of(torch_version: tuple[int, ...], built_for: str | None) -> tuple[int, int]:
    """CUDA of a torch: what it was built for, else that of the usual wheel of its version.

    `pip install torch` gives CUDA 12.8 up to 2.10 and 13.0 from 2.11 on.
    """
    if built_for is not None:
        major, minor = built_for.split(".")[:2]
        return int(major), int(minor)
    return (13, 0) if torch_version >= (2, 11) else (12, 8)
