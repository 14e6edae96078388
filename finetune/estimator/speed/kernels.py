"""Kernels of a trace: their kind, FLOPs and bytes, and the operators that share one (fusion).

    gemm        matrix product: FLOPs, tiles, precision of its operands
    attention   fused attention kernel, forward or backward
    pointwise   one output element from one element of each input
    reduction   sums, maxima, norms, softmax; a *barrier* unless it reduces whole rows, since no
                consumer of its result can run in the same kernel
    copy        casts, clones, transposes, concatenations, fills
    gather      rows picked by index (embedding, its backward), not the whole table
    optimizer   weight update
    cast        what no compiler fuses: transposes, casts of adapters; of weights, which reads twice
    dequantize  packed 4-bit or 8-bit codes to 16-bit weights
    none        views, allocations, synchronizations: no kernel

Eager PyTorch launches one kernel per operator, which reads each input and writes each output once.
A multiply-add counts as two FLOPs. A compiled region (`torch.compile` over decoder layers) fuses
pointwise operators, casts, gathers and row reductions: a value made outside is read once per
kernel, and written only if something outside needs it.

Operators fuse if no kernel has to end between them. Each value has a *generation*: zero for inputs
of the region, that of its operator for results of fusable operators, and one more after a GEMM,
attention, or a reduction over the whole tensor or columns (`is_barrier`). Operators of one
generation that feed each other or read the same value form a kernel. So a residual stream is
written before a GEMM and read again after it, and a tensorwise scale costs a second pass:

    y = norm(x); s = amax(y); q = cast(y / s)    norm and amax: generation 0; the cast: 1

Pointwise work whose result is read later only is done there, in the kernel that reads it. What
backward computes again instead of reading it is decided before
(`finetune.estimator.trace.compiled`).

Limits: unlisted operators count as pointwise, convolutions among them, so models with large
convolutions are predicted too fast. No fusion across phases; Inductor's limits on the size of a
kernel are not modeled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op, Operand

Kind = Literal[
    "gemm", "attention", "pointwise", "reduction", "copy", "gather", "optimizer", "cast",
    "dequantize", "none",
]  # fmt: skip
Precision = Literal["fp32", "bf16", "fp8", "fp8_rowwise", "fp8_blocks"]
Pattern = Literal["straight", "columns", "transpose"]
"""Memory access pattern; column reductions and transposed writes waste bandwidth."""

FUSABLE = frozenset({"pointwise", "reduction", "copy", "gather"})
"""Kinds that Inductor can fuse into one kernel."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GEMMS = words(
    "mm addmm addmm_ addmm_fp32 bmm baddbmm linear matmul fp8_mm _scaled_mm scaled_mm _int_mm "
    "_grouped_mm _scaled_grouped_mm"
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
_CASTS = words("cast_rows transpose_codes cast_together cast_weight hash_weight")
_NONE = words(
    "view _unsafe_view reshape t transpose permute expand expand_as slice select split "
    "split_with_sizes unbind chunk narrow unsqueeze squeeze as_strided detach detach_ alias "
    "empty empty_like empty_strided new_empty new_empty_strided lift_fresh unfold "
    "_reshape_alias diagonal set_ resize_ is_same_size record_stream _local_scalar_dense "
    "_assert_async"
)
_IN_PLACE_READS = {"addcmul": 3, "addcdiv": 3, "lerp": 2}

_FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


class Product(NamedTuple):
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


def dtype_name(operand: Operand) -> str:
    """`bfloat16`, for a torch dtype or its name."""
    return str(operand.dtype).removeprefix("torch.")


def kind_of(op: Op) -> Kind:
    kind = _kind(op.name, op.phase)
    makes = kind == "copy" and op.outputs and not base_name(op).endswith("_")
    if makes and {x.storage for x in op.outputs} <= {x.storage for x in op.inputs}:
        return "none"  # no-op that returned its argument
    return kind


@functools.lru_cache(maxsize=4096)
def _kind(full_name: str, phase: str) -> Kind:
    name = _base_name(full_name)
    if name in _NONE:
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
    whole = max(op.inputs, key=lambda operand: operand.nbytes).shape
    rows = math.prod(whole[:-1])
    return all(math.prod(output.shape) < rows for output in op.outputs)


def product_of(op: Op) -> Product | None:
    """GEMM of an operator; None for other kinds or unknown operands."""
    matrices = [operand for operand in op.inputs if len(operand.shape) >= 2]
    name = base_name(op)
    if name == "fp8_mm":  # operands are flat code buffers without a shape
        m, n = op.outputs[0].shape
        return Product(1, m, n, max(1, op.inputs[0].nbytes // m), "fp8")
    if kind_of(op) != "gemm" or len(matrices) < 2:
        return None
    output = (op.outputs or op.inputs)[0].shape
    if name.startswith(("addmm", "baddbmm")) and len(matrices) >= 3:
        matrices = matrices[1:]
    a, b = matrices[0], matrices[1]
    k, n = a.shape[-1], output[-1]
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        # grouped [rows, K] @ [experts, K, N]: each row meets the weight of one expert
        experts = b.shape[0] if len(b.shape) == 3 else 1
        return Product(experts, max(1, math.prod(output[:-1]) // experts), n, k, _precision(op, a))
    batch = math.prod(output[:-2]) if name in ("bmm", "baddbmm") else 1
    m = math.prod(output[:-1]) // max(1, batch)
    return Product(max(1, batch), m, n, k, _precision(op, a))


def attention_flops(op: Op) -> tuple[float, bool]:
    """(FLOPs, masked) of a fused attention operator.

    4-D operands: forward q, k, v, optional mask; backward gradient, q, k, v, output, optional mask;
    q is `[B, H, L, D]`, k and v `[B, Hkv, S, D]`. Forward is two GEMMs, `4 B H L S D`; backward
    five, since scores are recomputed. Causal attention (L = S) counts half, unless masked
    explicitly, where no tile is skipped.
    """
    quads = [operand.shape for operand in op.inputs if len(operand.shape) == 4]
    backward = is_backward_attention(op)
    first, usual = (1, 5) if backward else (0, 3)
    if len(quads) < usual:
        return 0.0, False
    b, h, length, d = quads[first]
    keys = quads[first + 1][-2]
    masked = len(quads) > usual
    flops = (10.0 if backward else 4.0) * b * h * length * keys * d
    return (flops if masked or keys != length else flops / 2), masked


def is_backward_attention(op: Op) -> bool:
    return "backward" in op.name


def traffic(op: Op) -> tuple[float, float]:
    """(bytes read, bytes written) of one eager kernel."""
    kind, name = kind_of(op), base_name(op)
    read = float(sum(x.nbytes for x in op.inputs)) * (2 if name == "cast_weight" else 1)
    written = float(sum(operand.nbytes for operand in op.outputs))
    if kind == "none":
        return 0.0, 0.0
    if kind == "optimizer":
        return read, written or _updated_in_place(op, name)
    if name == "transpose_codes":  # its second operand is an order, not read
        return float(op.inputs[0].nbytes), written
    if kind == "gather":
        if name == "embedding_dense_backward":
            return read, 2 * written  # the whole table's gradient is zeroed, then accumulated
        return min(read, 2 * written), written
    if not op.outputs and op.inputs:
        return read, float(op.inputs[0].nbytes)  # in place
    if kind == "copy":
        if name in _FILLS:
            return 0.0, written
        if name == "copy_" and len(op.inputs) > 1:
            return float(op.inputs[1].nbytes), float(op.inputs[0].nbytes)
    return read, written


def _updated_in_place(op: Op, name: str) -> float:
    """Bytes that an optimizer operator without outputs writes to its arguments.

    Fused AdamW reads parameters, gradients and two moments and writes all but the gradients; a
    foreach operator writes its first list.
    """
    read = float(sum(operand.nbytes for operand in op.inputs))
    if not name.endswith("_"):
        return 0.0
    if name.startswith("_fused_"):
        return 0.75 * read
    bare = name.removeprefix("_foreach_").rstrip("_")
    return read / _IN_PLACE_READS.get(bare, 2 if "List" in op.name else 1)


def _precision(op: Op, a: Operand) -> Precision:
    name, kind, scales = base_name(op), dtype_name(a), op.inputs[2:]
    if name.endswith("scaled_mm") or kind in _FP8 or "scaled_grouped" in name:
        if any("e8m0" in dtype_name(scale) for scale in scales):
            return "fp8_blocks"
        if any(math.prod(scale.shape) > 1 and "float32" in dtype_name(scale) for scale in scales):
            return "fp8_rowwise"
        return "fp8"
    return "fp32" if kind in ("float32", "float64") else "bf16"


# ------------------------------------------------------------------------------------------ fusion


class Launch(NamedTuple):
    """One kernel: indices of its operators in the trace, and bytes read and written."""

    ops: tuple[int, ...]
    kind: Kind
    read: float
    written: float
    pattern: Pattern


class _Value(NamedTuple):
    generation: int
    region: int
    maker: int


def launches(
    ops: Sequence[Op], compiled: Callable[[Op], str | bool] | None = None
) -> Iterator[Launch]:
    """Yield a trace's kernels by first operator.

    `compiled` tells apart the regions (layers) in which operators may fuse; empty: not in any.
    """
    kinds: list[Kind] = [kind_of(op) for op in ops]
    groups: list[int | None] = [None] * len(ops)
    uses: dict[tuple[int, int], list[int]] = {}
    if compiled is not None:
        groups, uses = _groups(ops, kinds, [compiled(op) for op in ops]), _uses(ops, kinds)
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(index)
    before: Op | None = None
    for index, (op, kind, group) in enumerate(zip(ops, kinds, groups, strict=True)):
        if kind == "none":
            continue
        if group is None:
            read, written = traffic(op)
            if base_name(op) == "fp8_cast" and before and _same_cast(before, op):
                read = 0.0  # Transformer Engine writes rowwise and columnwise codes in one pass
            yield Launch((index,), kind, read, written, pattern_of(op))
        elif members[group][0] == index:
            yield _joined(ops, kinds, members[group], uses)
        before = op


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


def _groups(
    ops: Sequence[Op], kinds: Sequence[Kind], inside: Sequence[str | bool]
) -> list[int | None]:
    """Fusion group of each operator (union-find), None for one that is not fused."""
    generations, regions = _generations(ops, kinds, inside)
    parent: dict[int, int] = {}

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    makers: dict[int, int] = {}  # by storage: the operator that wrote its present content
    readers: dict[tuple[int, int, int, int], int] = {}
    for index, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
        if kind == "none":
            continue
        if inside[index] and kind in FUSABLE:
            parent[index] = index
            here = (regions[index], generations[index])
            for operand in op.inputs:
                maker = makers.get(operand.storage, -1)
                joins = maker in parent and not _ends_kernel(ops[maker], kinds[maker])
                if joins and (regions[maker], generations[maker]) == here:
                    parent[find(index)] = find(maker)
                    continue
                if operand.storage >= 0 and len(operand.shape) > 1:  # a shared vector fuses nothing
                    other = readers.setdefault((operand.storage, maker, *here), index)
                    parent[find(index)] = find(other)
        for operand in op.outputs:
            makers[operand.storage] = index
    return [find(index) if index in parent else None for index in range(len(ops))]


def _generations(
    ops: Sequence[Op], kinds: Sequence[Kind], inside: Sequence[str | bool]
) -> tuple[list[int], list[int]]:
    """Generation and region of each operator; a region ends with its phase or with `inside`."""
    values: dict[int, _Value] = {}
    generations, regions = [0] * len(ops), [0] * len(ops)
    readers: dict[int, list[int]] = {}
    region, last = 0, ("", "")
    for index, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
        if kind == "none":
            continue
        if (op.phase, inside[index]) != last:
            region, last = region + 1, (op.phase, inside[index])
        made = [value for operand in op.inputs if (value := values.get(operand.storage))]
        known = [value for value in made if value.region == region]
        generation = max((value.generation for value in known), default=0)
        for value in made:
            readers.setdefault(value.maker, []).append(index)
        ends = not inside[index] or _ends_kernel(op, kind)
        for operand in op.outputs:
            values[operand.storage] = _Value(generation + ends, region, index)
        generations[index], regions[index] = generation, region
    for index in range(len(ops) - 1, -1, -1):  # what is read only later is computed there
        if inside[index] and kinds[index] in ("pointwise", "copy", "gather"):
            places = [(regions[r], generations[r]) for r in readers.get(index, ())]
            if places and all(region == regions[index] for region, _ in places):
                generations[index] = max(generations[index], min(places)[1])
    return generations, regions


def _same_cast(before: Op, op: Op) -> bool:
    return before.name == op.name and before.inputs[:1] == op.inputs[:1]


def _ends_kernel(op: Op, kind: Kind) -> bool:
    return kind not in FUSABLE or is_barrier(op)


def _uses(ops: Sequence[Op], kinds: Sequence[Kind]) -> dict[tuple[int, int], list[int]]:
    uses: dict[tuple[int, int], list[int]] = {}
    maker: dict[int, int] = {}
    for index, op in enumerate(ops):
        if kinds[index] == "none":
            continue
        for operand in op.inputs:
            if operand.storage in maker:
                uses.setdefault((operand.storage, maker[operand.storage]), []).append(index)
        for operand in op.outputs:
            maker[operand.storage] = index
    return uses


def _joined(
    ops: Sequence[Op],
    kinds: Sequence[Kind],
    members: list[int],
    uses: dict[tuple[int, int], list[int]],
) -> Launch:
    """Kernel of a fusion group, with the bytes it exchanges with the outside."""
    inside = set(members)
    made: set[int] = set()
    reads: dict[int, float] = {}
    written = 0.0
    for index in members:
        op = ops[index]
        operands = op.inputs[1:] if base_name(op) == "copy_" else op.inputs
        whole = sum(operand.nbytes for operand in operands) or 1
        share = traffic(op)[0] / whole if kinds[index] == "gather" else 1.0
        for operand in operands:
            if operand.storage not in made:
                seen = reads.get(operand.storage, 0.0)
                reads[operand.storage] = max(seen, share * operand.nbytes)
        for operand in op.outputs:
            made.add(operand.storage)
            readers = uses.get((operand.storage, index), [])
            if not readers or any(reader not in inside for reader in readers):
                written += operand.nbytes
    kind: Kind = "reduction" if "reduction" in {kinds[i] for i in members} else "pointwise"
    patterns = {pattern_of(ops[index]) for index in members}
    pattern: Pattern = "transpose" if "transpose" in patterns else "straight"
    if "columns" in patterns:
        pattern = "columns"
    return Launch(tuple(members), kind, sum(reads.values()), written, pattern)
