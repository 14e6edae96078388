"""Operators of a trace by kind, with the FLOPs and bytes of each.

    gemm        matrix product: FLOPs, tiles, precision of its operands
    attention   fused attention kernel, forward or backward
    pointwise   one output element from one element of each input
    reduction   sums, maxima, norms, softmax; a *barrier* unless it reduces whole rows, since no
                consumer of its result can run in the same kernel
    copy        casts, clones, transposes, concatenations, fills
    gather      rows picked by index (embedding, its backward), not the whole table
    optimizer   weight update
    cast        what no compiler fuses: operators of ours, and those of Transformer Engine
    dequantize  packed 4-bit or 8-bit codes to 16-bit weights
    none        views, allocations, synchronizations: no kernel

Eager PyTorch launches one kernel per operator, which reads each input and writes each output once;
`finetune.estimator.speed.fusion` says which of them a compiler joins. A multiply-add counts as two
FLOPs.

A convolution is a product of each output pixel's inputs, as a tower's of patches is. Limits:
unlisted operators count as pointwise, gradients of convolutions among them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.precision.facts import SCALINGS

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op, Operand

Kind = Literal[
    "gemm", "attention", "pointwise", "reduction", "copy", "gather", "optimizer", "cast",
    "dequantize", "none",
]  # fmt: skip
Precision = Literal["fp32", "bf16", "fp8", "fp8_rowwise", "fp8_blocks", "fp4"]
Pattern = Literal["straight", "columns", "transpose"]
"""Memory access pattern; column reductions and transposed writes waste bandwidth."""

FUSABLE = frozenset({"pointwise", "reduction", "copy", "gather"})
"""Kinds that Inductor can fuse into one kernel."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GEMMS = words(
    "mm addmm addmm_ addmm_fp32 bmm baddbmm linear matmul _scaled_mm scaled_mm _int_mm "
    "_grouped_mm _scaled_grouped_mm fp8_mm mxfp8_mm nvfp4_mm blockwise_mm convolution"
)
_REDUCTIONS = words(
    "sum mean amax amin max min norm linalg_vector_norm var var_mean _softmax _log_softmax "
    "_softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm "
    "nll_loss_forward nll_loss_backward argmax argmin any all cumsum topk sort logsumexp prod "
    "aminmax bincount"
)
_ROW_REDUCTIONS = words(
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "_fused_rms_norm rms_norm topk sort cumsum"
)
_FILLS = words(
    "fill_ fill zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones "
    "new_full arange scalar_tensor"
)
_COPIES = _FILLS | words(
    "copy_ copy clone _to_copy contiguous cat stack constant_pad_nd pad repeat repeat_interleave "
    "roll flip tril triu"
)
_GATHERS = words(
    "embedding embedding_dense_backward index_select gather index index_put index_put_ "
    "_unsafe_index _index_put_impl_ scatter scatter_ scatter_add scatter_add_ index_add "
    "index_add_ index_copy_"
)
_CASTS = words(
    "cast_rows transpose_codes cast_whole swiglu_cast swiglu_backward_cast fp8_cast fp8_amax"
)
LAUNCH_NOTHING = words(
    "view _unsafe_view reshape t transpose permute expand expand_as slice select split "
    "split_with_sizes unbind chunk narrow unsqueeze squeeze as_strided detach detach_ alias "
    "empty empty_like empty_strided new_empty new_empty_strided lift_fresh unfold "
    "_reshape_alias diagonal set_ resize_ is_same_size record_stream _local_scalar_dense "
    "_assert_async"
)
_IN_PLACE_READS = {"addcmul": 3, "addcdiv": 3, "lerp": 2}

ENGINE: dict[str, tuple[float, Precision]] = {
    "fp8": (1, "fp8"),
    **{
        name: (rule.size, "fp4" if rule.low == "fp4" else "fp8_blocks")
        for name, rule in SCALINGS.items()
        if rule.block
    },
}
"""Transformer Engine's operands by format: bytes per element with its share of the scales."""

_FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


class MatrixProduct(NamedTuple):
    """GEMM `[batch, M, K] @ [batch, K, N]` and the precision of its operands."""

    batch: int
    m: int
    n: int
    k: int
    precision: Precision

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


def base_name(op: Op) -> str:
    """`aten.mm.default` -> `mm`, `finetune_estimator.attention.default` -> `attention`."""
    return _base_name(op.name)


def _base_name(name: str) -> str:
    return name.split(".")[1] if "." in name else name


OF_ONE_LAUNCH = ("finetune_estimator.update.default", "finetune_estimator.squares.default")
"""Operators of one tensor each, which one kernel does for all (`helper.optimizer.adamw`)."""


def dtype_name(operand: Operand) -> str:
    """`bfloat16`, for a torch dtype or its name."""
    return str(operand.dtype).removeprefix("torch.")


def kind_of(op: Op) -> Kind:
    kind = _kind(op.name, op.phase)
    # `contiguous` and `to` return their argument where there is nothing to do, and the trace sees a
    # call.
    makes = kind == "copy" and op.outputs and not base_name(op).endswith("_")
    if makes and {x.storage for x in op.outputs} <= {x.storage for x in op.inputs}:
        return "none"  # no-op that returned its argument
    return kind


@functools.lru_cache(maxsize=4096)
def _kind(full_name: str, phase: str) -> Kind:
    name = _base_name(full_name)
    if name in LAUNCH_NOTHING:
        return "none"
    if name in _GEMMS or name.endswith("scaled_mm"):
        return "gemm"
    if "attention" in name:
        return "attention"
    if name in _CASTS:
        return "cast"
    if "dequant" in name:
        return "dequantize"
    updates = name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad", "_foreach_"))
    if updates or phase == "optimizer":
        return "optimizer"
    if name in _COPIES:
        return "copy"
    if name in _GATHERS:
        return "gather"
    if name in _REDUCTIONS:
        return "reduction"
    return "pointwise"


def is_barrier(op: Op) -> bool:
    """True for a reduction over more than the last dimension, as an amax of a tensor or columns."""
    if kind_of(op) != "reduction" or base_name(op) in _ROW_REDUCTIONS or not op.inputs:
        return False
    *rows, width = max(op.inputs, key=lambda operand: operand.nbytes).shape or (1,)
    return math.prod(rows) > 1 and all(
        math.prod(out.shape) < math.prod(rows) or _is_one_row(out.shape, rows, width)
        for out in op.outputs
    )


def _is_one_row(shape: tuple[int, ...], rows: list[int], width: int) -> bool:
    """True for the shape of a sum over rows, as long as one of them: [width] or [1, width]."""
    return [*shape[-1:]] == [width] and math.prod(shape) == width and [*shape] != rows


def product_of(op: Op) -> MatrixProduct | None:
    """GEMM of an operator; None for other kinds or unknown operands."""
    matrices = [operand for operand in op.inputs if len(operand.shape) >= 2]
    name = base_name(op)
    # K from the bytes: operands lie as codes and scales in one buffer, m * k * size bytes.
    if (form := name.removesuffix("_mm")) in ENGINE:  # of flat buffers without a shape
        (m, n), (size, precision) = op.outputs[0].shape, ENGINE[form]
        return MatrixProduct(1, m, n, max(1, round(op.inputs[0].nbytes / (m * size))), precision)
    if kind_of(op) != "gemm" or len(matrices) < 2:
        return None
    output = (op.outputs or op.inputs)[0].shape
    if name == "convolution":  # [B, C, ...] with kernels [N, C, ...]: a product for each pixel
        (n, *kernel), pixels = matrices[1].shape, math.prod(output) // output[1]
        return MatrixProduct(1, pixels, n, math.prod(kernel), _precision(op, matrices[0]))
    # `addmm(bias, a, b)`: the matrix that is added comes first.
    if name.startswith(("addmm", "baddbmm")) and len(matrices) >= 3:
        matrices = matrices[1:]
    a, b = matrices[0], matrices[1]
    k, n = a.shape[-1], output[-1]
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        if len(a.shape) < len(output):  # [M, rows] @ [rows, N] of each expert -> [experts, M, N]
            experts, m, _ = output
            return MatrixProduct(experts, m, n, max(1, k // experts), _precision(op, a))
        # grouped [rows, K] @ [experts, K, N]: each row meets the weight of one expert
        # How many rows an expert gets is not known in a rehearsal; evenly spread is what routers
        # are trained for.
        experts = b.shape[0] if len(b.shape) == 3 else 1
        return MatrixProduct(
            experts, max(1, math.prod(output[:-1]) // experts), n, k, _precision(op, a)
        )
    batch = math.prod(output[:-2]) if name in ("bmm", "baddbmm") else 1
    m = math.prod(output[:-1]) // max(1, batch)
    return MatrixProduct(max(1, batch), m, n, k, _precision(op, a))


def attention_flops(op: Op) -> tuple[float, bool]:
    """(FLOPs, masked) of a fused attention operator.

    4-D operands: forward q, k, v, optional mask; backward gradient, q, k, v, output, optional mask;
    q is `[B, H, L, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, Dv]`. Forward is two GEMMs, `2 B H L S
    (D + Dv)`; backward five, since scores are recomputed: `2 B H L S (3 D + 2 Dv)`. Causal
    attention (L = S) counts half, unless masked explicitly, where no tile is skipped. In place of a
    mask, an operand `[W]` says that a query sees W tokens.
    """
    backward = is_backward_attention(op)
    first, usual = (1, 5) if backward else (0, 3)
    quads = [operand.shape for operand in op.inputs if len(operand.shape) == 4]
    if len(quads) < usual:
        return 0.0, False
    (b, h, length, d), keys, dv = quads[first], quads[first + 1][-2], quads[first + 2][-1]
    flops = 2.0 * b * h * length * keys * (3 * d + 2 * dv if backward else d + dv)
    # A mask is skipped nowhere, and a cache longer than the queries is read whole.
    if len(quads) > usual or keys != length:
        return flops, len(quads) > usual
    window = min(
        [length, *(x.shape[0] for x in op.inputs[usual + backward :] if len(x.shape) == 1)]
    )
    # The area under a diagonal, as a share of the square: a query at i sees min(i, W) tokens, which
    # sums to L W - W²/2. For W = L it is the half of causal attention.
    return flops * (window / length - (window / length) ** 2 / 2), False


def is_backward_attention(op: Op) -> bool:
    return "backward" in op.name


def traffic(op: Op) -> tuple[float, float]:
    """(bytes read, bytes written) of one eager kernel."""
    kind, name = kind_of(op), base_name(op)
    read = float(sum(x.nbytes for x in op.inputs))
    written = float(sum(operand.nbytes for operand in op.outputs))
    if kind == "none":
        return 0.0, 0.0
    if kind == "optimizer":
        return read, written or _updated_in_place(op, name)
    if name == "transpose_codes":  # its second operand is an order, not read
        return float(op.inputs[0].nbytes), written
    if kind == "gather":
        if name == "embedding_dense_backward":
            # torch has no sparse gradient here: all rows are written, whichever were read.
            return read, 2 * written  # the whole table's gradient is zeroed, then accumulated
        # Rows that are picked and their indices, not the table that they are picked from.
        return min(read, 2 * written), written
    if not op.outputs and op.inputs:
        return read, float(op.inputs[0].nbytes)  # in place
    if kind == "copy":
        if name in _FILLS:
            return 0.0, written
        if name == "copy_" and len(op.inputs) > 1:
            return float(op.inputs[1].nbytes), float(op.inputs[0].nbytes)
    return read, written


def pattern_of(op: Op) -> Pattern:
    kind = kind_of(op)
    if kind == "reduction":
        columns = is_barrier(op) and any(math.prod(out.shape) > 1 for out in op.outputs)
        return "columns" if columns else "straight"
    if kind != "copy" or not op.inputs or not op.outputs:
        return "straight"
    before, after = op.inputs[-1].shape, op.outputs[0].shape
    turned = len(before) == 2 and before != after and before == after[::-1]
    return "transpose" if turned else "straight"


def _updated_in_place(op: Op, name: str) -> float:
    """Bytes that an optimizer operator without outputs writes to its arguments.

    Fused AdamW reads parameters, gradients and two moments and writes all but the gradients, which
    in bitsandbytes and torchao are the first operand; a foreach operator writes its first list.
    """
    read = float(sum(operand.nbytes for operand in op.inputs))
    if not name.endswith("_"):
        return read - op.inputs[0].nbytes if op.inputs else 0.0
    if name.startswith("_fused_"):
        # Parameters and two moments are written, three of the four lists that are read.
        return 0.75 * read
    bare = name.removeprefix("_foreach_").rstrip("_")
    return read / _IN_PLACE_READS.get(bare, 2 if "List" in op.name else 1)


def _precision(op: Op, a: Operand) -> Precision:
    name, kind, scales = base_name(op), dtype_name(a), op.inputs[2:]
    if name.endswith("scaled_mm") or kind in _FP8 or "scaled_grouped" in name:
        # E8M0, powers of two in a byte, are the scales of MX blocks.
        if any("e8m0" in dtype_name(scale) for scale in scales):
            return "fp8_blocks"
        if any(math.prod(scale.shape) > 1 and "float32" in dtype_name(scale) for scale in scales):
            return "fp8_rowwise"
        return "fp8"
    return "fp32" if kind in ("float32", "float64") else "bf16"
