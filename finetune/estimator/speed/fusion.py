"""Fusion: which operators of a trace share a kernel, and the bytes that the kernel moves.

A compiled region (`torch.compile` over decoder layers) fuses pointwise operators, casts, gathers
and reductions: a value made outside is read once per kernel, and written only if something outside
needs it. A region is a layer's forward, or its backward with what that computes again.

*Generations.* Operators fuse if no kernel has to end between them: zero for what reads inputs of
the region alone, and one more after a GEMM, attention, or a reduction over the whole tensor or
columns (`is_barrier`). Operators of one generation that feed each other or read the same value form
a kernel. So a residual stream is written before a GEMM and read again after it, and a tensorwise
scale costs a second pass:

    y = norm(x); s = amax(y); q = cast(y / s)    norm and amax: generation 0; the cast: 1

*Inlining.* A pointwise result is computed in each kernel that reads it, and not written: above,
both kernels read x, and y is in no memory. What a GEMM or another region reads is stored, and so is
a value with several readers that is made of more than `INLINED_READS` stored ones: the sum of the
input gradients of q, k and v on its way through the norm is, and silu(gate) * up is not.

*Columns.* A sum over tokens (gradients of norms and biases) goes through memory another way than
the rows around it: its kernel is apart, and reads for itself what they read.

*Casts for weight gradients* are put off until a later kernel reads their operand anyway.

Limits: the size of a kernel is not limited. Inductor reads a little less: it joins column sums of
several norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.estimator.speed.operators import (
    FUSABLE,
    Kind,
    Pattern,
    base_name,
    is_barrier,
    kind_of,
    pattern_of,
    traffic,
)

if TYPE_CHECKING:
    from finetune.estimator.trace.trace import Op, Operand

INLINED_READS = 4
"""Most stored values of which one with several readers is computed again in each: Inductor's
`realize_reads_threshold` (torch 2.13)."""


SMALL = 2**20
"""Bytes of what is read again at no cost."""


class Launch(NamedTuple):
    """One kernel.

    Attributes:
        ops: indices of its operators in the trace.
        read, written: bytes.
        pattern: order in which it goes through memory.
        inputs: storages that it reads, made before it.
    """

    ops: tuple[int, ...]
    kind: Kind
    read: float
    written: float
    pattern: Pattern
    inputs: frozenset[int]


class KernelSlot(NamedTuple):
    """A kernel that operators of one region may share.

    Places are compared field by field, so the least of those in one region comes first in time.
    """

    region: int
    generation: int
    columns: bool = False


_Kernel = tuple[list[int], KernelSlot]
"""Operators of a kernel, and its place."""


def launches(
    ops: Sequence[Op], compiled: Callable[[Op], str | bool] | None = None
) -> Iterator[Launch]:
    """Yield a trace's kernels by first operator.

    `compiled` names the compiled layer that an operator is in; an empty name or False: in none, and
    the operator is a kernel of its own. Without `compiled`, all are.
    """
    starts: dict[int, list[Launch]] = {}
    fused: Sequence[object] = [()] * len(ops)
    if compiled is not None:
        fusion = _Fusion(ops, [compiled(op) for op in ops])
        fused = fusion.places
        for kernel in fusion.kernels():
            starts.setdefault(kernel.ops[0], []).append(kernel)
    before: Op | None = None
    for index, op in enumerate(ops):
        if (kind := kind_of(op)) == "none":
            continue
        if not fused[index]:
            read, written = traffic(op)
            # Two operators in the trace, one kernel on the GPU: its input is read once.
            if base_name(op) == "fp8_cast" and before and _same_cast(before, op):
                read = 0.0  # Transformer Engine writes rowwise and columnwise codes in one pass
            inputs = frozenset(x.storage for x in op.inputs)
            yield Launch((index,), kind, read, written, pattern_of(op), inputs)
        yield from starts.get(index, ())
        before = op


def _same_cast(before: Op, op: Op) -> bool:
    return before.name == op.name and before.inputs[:1] == op.inputs[:1]


class _Fusion:
    """Operators of compiled regions, and the kernels that compute each.

    Attributes:
        places: kernels of each fused operator; none of any other.
    """

    def __init__(self, ops: Sequence[Op], inside: Sequence[str | bool]) -> None:
        self._ops = ops
        self._kinds = [kind_of(op) for op in ops]
        self._makers: list[list[int]] = []  # by operator: what made each operand, -1 if unknown
        self._readers: list[list[int]] = [[] for _ in ops]
        # Of a compiled layer, and of a kind that fuses.
        self._fused = [
            bool(where) and kind in FUSABLE for where, kind in zip(inside, self._kinds, strict=True)
        ]
        self._regions = self._link(inside)
        self._generations = self._generation_of_each()
        self.places = self._place()

    def _link(self, inside: Sequence[str | bool]) -> list[int]:
        """Fill `_makers` and `_readers`, and return the region of each operator."""
        regions, last, now = [0] * len(self._ops), ("", False), dict[int, int]()
        region = 0
        for index, op in enumerate(self._ops):
            self._makers.append([now.get(x.storage, -1) for x in op.inputs])
            if self._kinds[index] == "none":
                continue
            # A layer's forward and its backward with recomputation are two graphs of Inductor, so
            # nothing fuses across.
            if (here := (inside[index], op.phase == "forward")) != last:
                region, last = region + 1, here
            regions[index] = region
            # A set, since `x * x` reads one value twice.
            for maker in set(self._makers[index]) - {-1}:
                self._readers[maker].append(index)
            for x in _results(op):
                now[x.storage] = index
        return regions

    def _generation_of_each(self) -> list[int]:
        """Generation of each operator."""
        generations = list[int]()
        for index in range(len(self._ops)):
            made = (m for m in self._makers[index] if self._in_one_region(m, index))
            after = (generations[m] + self._ends_kernel(m) for m in made)
            generations.append(max(after, default=0))
        return generations

    def _in_one_region(self, maker: int, index: int) -> bool:
        """True if the maker of an operand is known, and in the region of the operator."""
        return maker >= 0 and self._regions[maker] == self._regions[index]

    def _ends_kernel(self, index: int) -> bool:
        """True if a kernel has to end before another operator can read this one's result."""
        return not self._fused[index] or is_barrier(self._ops[index])

    def _place(self) -> list[set[KernelSlot]]:
        """Kernels of each operator: those that read it, or the first of them if it is stored."""
        stored = self._stored()
        places: list[set[KernelSlot]] = [set() for _ in self._ops]
        # Backwards: where a value is computed depends on the kernels of its readers, which come
        # later.
        for index in range(len(self._ops) - 1, -1, -1):
            if not self._fused[index]:
                continue
            here = KernelSlot(self._regions[index], self._generations[index])
            wanted = {
                place
                for r in self._readers[index]
                for place in places[r] or {KernelSlot(self._regions[r], self._generations[r])}
                if place.region == here.region
            }
            if self._kinds[index] == "reduction" or not wanted:
                places[index] = {here._replace(columns=pattern_of(self._ops[index]) == "columns")}
            else:
                # A stored value is written by the first kernel that needs it, but not before its
                # operands are there; any other one is computed in each of them.
                places[index] = {max(here, min(wanted))} if stored[index] else wanted
        return places

    def _stored(self) -> list[bool]:
        """True for values that are written rather than computed in each kernel that reads them."""
        stored, loads = list[bool](), list[set[int]]()
        for index, readers in enumerate(self._readers):
            loads.append(set[int]())
            for operand, maker in self._operands(index):
                inlines = self._in_one_region(maker, index) and not stored[maker]
                loads[index] |= loads[maker] if inlines else {operand.storage}
            many = len(readers) > 1 and len(loads[index]) > INLINED_READS
            leaves = not all(self._fused[r] and self._in_one_region(index, r) for r in readers)
            inlined = self._fused[index] and self._kinds[index] != "reduction"
            stored.append(not inlined or many or leaves)
        return stored

    def kernels(self) -> list[Launch]:
        """Operators joined by what they hand on or read together."""
        from networkx.utils import UnionFind

        joined: Any = UnionFind()
        readers: dict[tuple[int, int, KernelSlot], tuple[int, KernelSlot]] = {}
        for index, places in enumerate(self.places):
            for place in places:
                node = joined[index, place]
                for operand, maker in self._operands(index):
                    if self._hands_on(maker, place):
                        joined.union(node, (maker, place))
                    # A norm's weight is read by many kernels that have nothing else in common.
                    elif operand.storage >= 0 and len(operand.shape) > 1:  # not a shared vector
                        other = readers.setdefault((operand.storage, maker, place), node)
                        joined.union(node, other)
        groups = [sorted(group) for group in joined.to_sets()]
        kernels = [([index for index, _ in group], group[0][1]) for group in groups]
        return [self._joined(members, place) for members, place in self._postponed(kernels)]

    def _postponed(self, kernels: list[_Kernel]) -> list[_Kernel]:
        """Kernels, of which some have taken over what an earlier one made for GEMMs that can wait.

        As the transposed codes of an input, for the gradient of a weight: a later kernel reads the
        input anyway.
        """
        reads = [self._reads(*kernel).keys() for kernel in kernels]
        left = list[_Kernel]()
        for (members, place), own in zip(kernels, reads, strict=True):
            later = next(
                (
                    (others, its)
                    for (others, its), theirs in zip(kernels, reads, strict=True)
                    if (its.region, its.columns) == (place.region, place.columns)
                    and its.generation > place.generation
                    # It must read all that this one reads, or waiting would add bytes instead of
                    # saving some.
                    and theirs >= own
                ),
                None,
            )
            if later is None or not own or not self._can_wait(members, place):
                left.append((members, place))
                continue
            for index in members:
                self.places[index] = (self.places[index] - {place}) | {later[1]}
            later[0][:] = sorted({*later[0], *members})
        return left

    def _can_wait(self, members: list[int], place: KernelSlot) -> bool:
        """True if all that a kernel makes goes into GEMMs whose results leave the region."""
        for index in members:
            for reader in self._readers[index]:
                computing = self.places[reader]  # it again, in their own kernels
                if computing and all(self._hands_on(index, its) for its in computing):
                    continue
                here = (r for r in self._readers[reader] if self._in_one_region(reader, r))
                if self._kinds[reader] != "gemm" or any(here):
                    return False
            if self._ends_kernel(index):
                return False
        return True

    def _reads(self, members: list[int], place: KernelSlot) -> dict[tuple[int, int], float]:
        """Bytes of each value that a kernel reads and does not make, but for small ones."""
        return {
            (operand.storage, maker): operand.nbytes
            for index in members
            for operand, maker in self._operands(index)
            if not self._hands_on(maker, place) and operand.nbytes > SMALL
        }

    def _operands(self, index: int) -> Iterator[tuple[Operand, int]]:
        return zip(self._ops[index].inputs, self._makers[index], strict=True)

    def _hands_on(self, maker: int, place: KernelSlot) -> bool:
        """True if a kernel computes an operator's result itself, and need not read it."""
        return maker >= 0 and place in self.places[maker] and not self._ends_kernel(maker)

    def _joined(self, members: list[int], place: KernelSlot) -> Launch:
        """Kernel with the bytes that it exchanges with the outside."""
        reads: dict[tuple[int, int], float] = {}
        written = 0.0
        for index in members:
            op = self._ops[index]
            first = base_name(op) == "copy_"  # whose first operand is not read
            whole = sum(operand.nbytes for operand in op.inputs[first:]) or 1
            share = traffic(op)[0] / whole if self._kinds[index] == "gather" else 1.0
            for operand, maker in list(self._operands(index))[first:]:
                if not self._hands_on(maker, place):
                    # By what made it as well: an in-place operator leaves another value in the same
                    # storage.
                    key = operand.storage, maker
                    reads[key] = max(reads.get(key, 0.0), share * operand.nbytes)
            # Several kernels may compute a value; the first alone writes it.
            if place == min(self.places[index]) and self._is_written(index):
                written += sum(operand.nbytes for operand in _results(op))
        reduces = any(self._kinds[index] == "reduction" for index in members)
        patterns = {pattern_of(self._ops[index]) for index in members}
        rest: Pattern = "transpose" if "transpose" in patterns else "straight"
        return Launch(
            ops=tuple(members),
            kind="reduction" if reduces else "pointwise",
            read=sum(reads.values()),
            written=written,
            pattern="columns" if place.columns else rest,
            inputs=frozenset(storage for storage, _ in reads),
        )

    def _is_written(self, index: int) -> bool:
        """True if a kernel reads a result that does not compute it."""
        readers = self._readers[index]
        return not readers or any(
            not self.places[r] or not all(self._hands_on(index, place) for place in self.places[r])
            for r in readers
        )


def _results(op: Op) -> tuple[Operand, ...]:
    """Operands that an operator writes, in place without outputs."""
    return op.outputs or op.inputs[:1]
