"""Fusion: operators that share a kernel, and the bytes that it moves.

Eager PyTorch launches one kernel per operator. A compiled region (`torch.compile` over decoder
layers) fuses pointwise operators, casts, gathers and row reductions: a value made outside is read
once per kernel, and written only if something outside needs it.

Operators fuse if no kernel has to end between them. Each value has a *generation*: zero for inputs
of the region, that of its operator for results of fusable operators, and one more after a GEMM,
attention, or a reduction over the whole tensor or columns (`kernels.is_barrier`). Operators of one
generation that feed each other or read the same value form a kernel. So a residual stream is
written before a GEMM and read again after it, and a tensorwise scale costs a second pass:

    y = norm(x); s = amax(y); q = cast(y / s)    norm and amax: generation 0; the cast: 1

Limits: no fusion across phases; Inductor's kernel size limits and its recomputation instead of
stores are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.estimator.speed.kernels import FUSABLE, Kind, base_name, is_barrier, kind_of, traffic

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op

Pattern = Literal["straight", "columns", "transpose"]
"""Memory access pattern; column reductions and transposed writes waste bandwidth."""


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


def launches(ops: Sequence[Op], compiled: Callable[[Op], bool] | None = None) -> Iterator[Launch]:
    """Yield a trace's kernels by first operator; `compiled` selects the operators that may fuse."""
    kinds: list[Kind] = [kind_of(op) for op in ops]
    if compiled is None:
        before: Op | None = None
        for index, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
            if kind == "none":
                continue
            read, written = traffic(op)
            if base_name(op) == "fp8_cast" and before and _same_cast(before, op):
                read = 0.0  # Transformer Engine writes rowwise and columnwise codes in one pass
            yield Launch((index,), kind, read, written, pattern_of(op))
            before = op
        return
    groups = _groups(ops, kinds, [compiled(op) for op in ops])
    uses = _uses(ops, kinds)
    members: dict[int, list[int]] = {}
    for index in range(len(ops)):
        if groups[index] is not None:
            members.setdefault(groups[index] or 0, []).append(index)
    for index, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
        if kind == "none":
            continue
        group = groups[index]
        if group is None:
            yield Launch((index,), kind, *traffic(op), pattern_of(op))
        elif members[group][0] == index:
            yield _joined(ops, kinds, members[group], uses)


def pattern_of(op: Op) -> Pattern:
    kind = kind_of(op)
    if kind == "reduction":
        columns = is_barrier(op) and any(_numel(out.shape) > 1 for out in op.outputs)
        return "columns" if columns else "straight"
    if kind != "copy" or not op.inputs or not op.outputs:
        return "straight"
    before, after = op.inputs[-1].shape, op.outputs[0].shape
    turned = len(before) == 2 and before != after and before == after[::-1]
    return "transpose" if turned else "straight"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _groups(ops: Sequence[Op], kinds: Sequence[Kind], inside: Sequence[bool]) -> list[int | None]:
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
    ops: Sequence[Op], kinds: Sequence[Kind], inside: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Generation and region of each operator; a region ends with its phase or with `inside`."""
    values: dict[int, _Value] = {}
    generations, regions = [0] * len(ops), [0] * len(ops)
    wanted: dict[int, int] = {}  # operator -> generation of its earliest reader
    region, last = 0, ("", False)
    for index, (op, kind) in enumerate(zip(ops, kinds, strict=True)):
        if kind == "none":
            continue
        if (op.phase, inside[index]) != last:
            region, last = region + 1, (op.phase, inside[index])
        known = [
            value
            for operand in op.inputs
            if (value := values.get(operand.storage)) and value.region == region
        ]
        generation = max((value.generation for value in known), default=0)
        for value in known:
            wanted[value.maker] = min(wanted.get(value.maker, generation), generation)
        ends = not inside[index] or _ends_kernel(op, kind)
        for operand in op.outputs:
            values[operand.storage] = _Value(generation + ends, region, index)
        generations[index], regions[index] = generation, region
    for index, generation in wanted.items():
        if kinds[index] == "copy" and _widens(ops[index]):
            generations[index] = max(generations[index], generation)
    return generations, regions


def _widens(op: Op) -> bool:
    read = sum(operand.nbytes for operand in op.inputs)
    return read < sum(operand.nbytes for operand in op.outputs)


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
    kind: Kind = (
        "reduction" if any(kinds[index] == "reduction" for index in members) else "pointwise"
    )
    patterns: set[Pattern] = {pattern_of(ops[index]) for index in members}
    pattern: Pattern = "straight"
    if patterns - {"straight"}:
        pattern = "columns" if "columns" in patterns else "transpose"
    return Launch(tuple(members), kind, sum(reads.values()), written, pattern)
