"""Step parts (`StepPart`) of kernels and operators, by their names and contexts.

Kernel names change with their libraries, so the launching operator decides if it is specific enough
(`aten::_scaled_mm` multiplies FP8 whatever its kernel's name), and the kernel's name only if a
library was called past PyTorch (Transformer Engine, NCCL, flash-attn) or the compiler wrote it.
Names of `torch.compile` kernels list the fused operations: one that only casts is a cast; one that
norms and casts is a norm with a free cast.

cuBLASLt's `nvjet_` kernels name their operands by letters, A and B first: `q` is 8 bits of FP8, `o`
four bits, `t` BF16, `h` FP16, `s` float32 (`nvjet_qqtst` multiplies FP8 to BF16).
"""

from __future__ import annotations

import re

from finetune.estimator.speed.kernels import words
from finetune.estimator.speed.step_parts import StepPart

_FP8_OPS = words("scaled_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm")
_GEMM_OPS = words(
    "mm addmm addmm_ _addmm_activation linear matmul _int_mm _grouped_mm gemm_4bit gemv_4bit"
)
_BATCHED_OPS = words("bmm baddbmm baddbmm_")
_HOST_OPS = words(
    "view _unsafe_view reshape t transpose permute expand expand_as slice select split "
    "split_with_sizes unbind chunk narrow unsqueeze squeeze as_strided detach alias empty "
    "empty_like empty_strided new_empty new_empty_strided _reshape_alias resize_ item is_nonzero "
    "_local_scalar_dense resolve_conj resolve_neg result_type set_ record_stream to"
)

_COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.I)
_ATTENTION = re.compile(
    r"flash_(fwd|bwd)|flash::|fmha|scaled_dot_product|attention|sdpa|_attn_|attn_(fwd|bwd)", re.I
)
_OPTIMIZER = re.compile(
    r"multi_tensor_apply|adam|lamb\b|foreach|kOptimizer|optimizer.*8bit|linalg_vector_norm", re.I
)
_CASTING = re.compile(
    r"quantize|cast_transpose|transpose_cast|fp8_cast|amax|compute_scale|update_scale|dequant|nvfp4"
    r"|mxfp8|swizzle.*scal",
    re.I,
)
_FP8_NAME = re.compile(r"e4m3|e5m2|e2m1|f8f8|float_e\dm\d|_f8_|fp8.*gemm|gemm.*fp8", re.I)
_GEMM_NAME = re.compile(
    r"gemm|nvjet|cublas|splitk|gemv|triton_(mm|tem)|s\d{4,}|wmma|cutlass.*tensorop|Cijk_", re.I
)
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z])([a-z])")
_TRITON = re.compile(r"^triton_(?:poi|red|per|for|tem)")
_FUSED_CAST = re.compile(r"amax|_scaled_mm|float8|_to_copy.*clamp|clamp.*_to_copy|aminmax")
_MORE_THAN_A_CAST = re.compile(
    r"rsqrt|silu|sigmoid|gelu|mean|softmax|embedding|cos_|sin_|var_mean|layer_norm|rms_norm"
)


def operator(name: str) -> str:
    """Short operator name, `aten::mm` -> `mm`; empty for ranges and autograd nodes."""
    space, _, bare = name.rpartition("::")
    return "" if not space or space.startswith(("autograd", "torch::autograd")) else bare


def is_gemm(name: str) -> bool:
    """True if an operator, by its full name, is a GEMM, batched or not."""
    return operator(name) in _FP8_OPS | _GEMM_OPS | _BATCHED_OPS


def multiplies_fp8(name: str) -> bool:
    """True if an operator, by its full name, multiplies FP8 operands by definition."""
    return operator(name) in _FP8_OPS


def part_of_operator(name: str, *, low: bool = False, batched: bool = False) -> StepPart:
    """Part of an operator's self time.

    Args:
        name: full name, such as `aten::mm`; also of a range or an autograd node.
        low: it runs in a layer with FP8 GEMMs: other operators there prepare operands, as do
            batched GEMMs (the Hadamard transform of NVFP4).
        batched: batched GEMMs are those of layers, not of attention.
    """
    bare = operator(name)
    if not bare or bare in _HOST_OPS:
        return StepPart.HOST
    if bare in _FP8_OPS:
        return StepPart.FP8_GEMM
    if bare in _GEMM_OPS:
        return StepPart.GEMM
    if bare in _BATCHED_OPS:
        return StepPart.GEMM if batched else StepPart.CASTS if low else StepPart.ATTENTION
    if _COMMUNICATION.search(name) or name.startswith("c10d"):
        return StepPart.COMMUNICATION
    if _ATTENTION.search(bare):
        return StepPart.ATTENTION
    if _OPTIMIZER.search(bare):
        return StepPart.OPTIMIZER
    if low or "dequant" in bare:
        return StepPart.CASTS
    return StepPart.ELEMENTWISE


def part_of_kernel(
    kernel: str, launched_by: str, *, low: bool = False, batched: bool = False
) -> StepPart:
    """Part of a GPU kernel.

    Args:
        kernel: its name in the driver.
        launched_by: full name of the launching operator, or of the range around it.
        low: it runs in a layer with FP8 GEMMs.
        batched: batched GEMMs are those of layers, not of attention.
    """
    if kernel.startswith(("Memcpy HtoD", "Memcpy DtoH", "Memset")):
        return StepPart.OTHER
    if _COMMUNICATION.search(kernel):
        return StepPart.COMMUNICATION
    if _TRITON.match(kernel):
        return _part_of_triton(kernel)
    bare = operator(launched_by)
    if bare in _FP8_OPS | _GEMM_OPS | _BATCHED_OPS:
        part = part_of_operator(launched_by, low=low, batched=batched)
        # A GEMM of high-precision operands may be preceded by a copy that makes them contiguous.
        return (
            StepPart.CASTS
            if low and not _GEMM_NAME.search(kernel) and part == StepPart.GEMM
            else part
        )
    if _ATTENTION.search(kernel) or _ATTENTION.search(bare):
        return StepPart.ATTENTION
    if _CASTING.search(kernel) and not _is_fp8_gemm(kernel):
        return StepPart.CASTS
    if _GEMM_NAME.search(kernel) and "elementwise" not in kernel:
        return StepPart.FP8_GEMM if names_fp8_gemm(kernel) else StepPart.GEMM
    if _OPTIMIZER.search(kernel) or _OPTIMIZER.search(bare):
        return StepPart.OPTIMIZER
    if kernel.startswith("Memcpy"):
        return StepPart.CASTS if low else StepPart.ELEMENTWISE
    return StepPart.CASTS if low or "dequant" in bare else StepPart.ELEMENTWISE


def names_fp8_gemm(kernel: str) -> bool:
    """True if the name of a StepPart.GEMM kernel shows FP8 (or FP4) operands."""
    letters = _NVJET.search(kernel)
    if letters is not None:
        return letters[1] in "qo" and letters[2] in "qo"
    return _FP8_NAME.search(kernel) is not None


def _is_fp8_gemm(kernel: str) -> bool:
    return bool(_GEMM_NAME.search(kernel)) and names_fp8_gemm(kernel)


def _part_of_triton(kernel: str) -> StepPart:
    if "_tem_" in kernel or kernel.startswith("triton_tem"):
        return StepPart.FP8_GEMM if "scaled_mm" in kernel else StepPart.GEMM
    if _FUSED_CAST.search(kernel) and not _MORE_THAN_A_CAST.search(kernel):
        return StepPart.CASTS
    return StepPart.ELEMENTWISE
