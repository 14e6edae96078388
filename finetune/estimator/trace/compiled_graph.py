"""What is done to a graph of compiled layers after its split, done to a trace of theirs.

*Adapters of sibling layers.* `finetune.precision.siblings` joins products in the graph that
Inductor is given. Here the same is done to operators: one of them stands for the joint product,
with operands as large as all together, and the others become views. Matrices side by side keep the
storage of one of them, so memory does not change (a few MB of a layer would), and putting A side by
side costs nothing (a kernel of 1 MB). Limit: a trace does not know scalings, so siblings count as
scaled alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

from finetune.estimator.speed.operators import FUSABLE, base_name, kind_of
from finetune.estimator.speed.step_parts import SIBLINGS
from finetune.estimator.trace.trace import Event, Op, Operand, Trace, layer_of

_VIEW = "aten.slice.Tensor"
"""Operator in place of one that is done in a joint product."""


def join_siblings(trace: Trace) -> Trace:
    """The trace with the adapters' products of siblings joined, layer by layer."""
    regions: dict[tuple[str, str], dict[int, Op]] = defaultdict(dict)
    first = trace.events[trace.marks["step"]].at
    for index, op in enumerate(trace.ops[first:], first):
        if layer := layer_of(op.module):
            regions[layer, op.phase][index] = op
    ops = list(trace.ops)
    for (layer, _), inside in regions.items():
        region = _Region(trace, inside)
        for one, members in region.groups():
            joint = _joint(ops[one], [ops[i] for i in members])
            for index in members:
                view = ops[index]._replace(name=_VIEW, inputs=joint.outputs)
                ops[index] = (joint if index == one else view)._replace(module=layer + SIBLINGS)
    return replace(trace, ops=ops)


class _Region:
    """Operators of a layer in one phase, by number."""

    def __init__(self, trace: Trace, ops: dict[int, Op]) -> None:
        self._trace, self._ops = trace, ops
        self._makers: dict[int, int] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        for index, op in ops.items():
            for operand in op.inputs:
                self._readers[operand.storage].append(index)
            for operand in op.outputs:
                self._makers.setdefault(operand.storage, index)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """The operators of each joint product, and the one in whose place it runs."""
        for members in _grouped(filter(self._is_times, self._ops), self._input):
            yield members[0], members
        for members in _grouped(filter(self._is_added, self._ops), self._sum_of):
            yield members[-1], members
        for members in _grouped(filter(self._is_gradient, self._ops), self._input):
            yield members[-1], members

    def _is_times(self, index: int) -> bool:
        """True for `lora.times`: its unread summand is a row of a matrix, and a bias is not."""
        op = self._ops[index]
        if base_name(op) != "addmm" or len(op.inputs[0].shape) != 1:
            return False
        storage = self._trace.storages.get(op.inputs[0].storage)
        return storage is not None and storage.nbytes > op.inputs[0].nbytes

    def _is_added(self, index: int) -> bool:
        """True for d + u A."""
        op = self._ops[index]
        if not base_name(op).startswith("addmm") or len(op.inputs[0].shape) != 2:
            return False
        return self._is_times(self._makers.get(op.inputs[1].storage, index))

    def _is_gradient(self, index: int) -> bool:
        """True for uᵀ x, of u as it is, scaled or cast."""
        op = self._ops[index]
        if base_name(op) != "mm":
            return False
        maker = self._makers.get(op.inputs[0].storage)
        while maker is not None and kind_of(self._ops[maker]) in FUSABLE:
            read = self._ops[maker].inputs[:1]  # a fill, as of DoRA's identity, reads nothing
            maker = self._makers.get(read[0].storage) if read else None
        return maker is not None and self._is_times(maker)

    def _input(self, index: int) -> Hashable:
        op = self._ops[index]
        return op.name, op.inputs[1], op.outputs[0].dtype

    def _sum_of(self, index: int) -> Hashable:
        """The last of the sums, one after the other, of what nothing else reads."""
        result = self._ops[index].outputs[0]
        size, last = prod(result.shape), index
        while True:
            readers = [i for i in self._readers[result.storage] if i > last]
            if len(readers) != 1 or base_name(self._ops[readers[0]]) not in ("add", "_to_copy"):
                return last, size
            last, result = readers[0], self._ops[readers[0]].outputs[0]


def _grouped(indices: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        groups[key(index)].append(index)
    return [members for members in groups.values() if len(members) > 1]


def _joint(one: Op, members: list[Op]) -> Op:
    """Operator `one` with the operands that differ, and the results, side by side."""
    (out,), inputs = one.outputs, list(one.inputs)
    if base_name(one) == "mm":  # [R, M] @ [M, K]
        inputs[0] = _side_by_side([m.inputs[0] for m in members], 0)
        out = _side_by_side([m.outputs[0] for m in members], 0)
    elif len(inputs[0].shape) == 1:  # [M, K] @ [K, R]
        inputs[2] = _side_by_side([m.inputs[2] for m in members], 1)
        out = _side_by_side([m.outputs[0] for m in members], 1)
    else:  # [M, R] @ [R, K]
        inputs[1] = _side_by_side([m.inputs[1] for m in members], 1)
        inputs[2] = _side_by_side([m.inputs[2] for m in members], 0)
    return one._replace(inputs=tuple(inputs), outputs=(out,))


def _side_by_side(parts: list[Operand], dim: int) -> Operand:
    shape = list(parts[-1].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    total = sum(part.nbytes for part in parts)
    return parts[-1]._replace(shape=tuple(shape), nbytes=total)


class Entry(NamedTuple):
    """An event in a new order: by operator, then by rank, then as it was.

    Attributes:
        number: index of the old event that it is, or stands behind.
        moved: an event that is not where it was, or a new one.
    """

    at: int
    rank: int
    number: int
    event: Event
    moved: bool = False


def in_order(
    entries: Iterable[Entry], trace: Trace
) -> tuple[list[Event], dict[str, int], Callable[[int], int]]:
    """Events in their new order, the marks among them, and the new number of an old event."""
    ordered = sorted(entries, key=lambda entry: entry[:3])
    new = {entry.number: i for i, entry in enumerate(ordered) if not entry.moved}
    following = [len(ordered)]
    for number in reversed(range(len(trace.events))):
        following.append(new.get(number, following[-1]))
    following.reverse()
    marks = {name: following[number] for name, number in trace.marks.items()}
    return [entry.event._replace(at=entry.at) for entry in ordered], marks, following.__getitem__
