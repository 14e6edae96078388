"""What is done to a graph of compiled layers after its split, done to a trace of theirs.

*Adapters of sibling layers.* `finetune.precision.siblings` joins products in the graph that
Inductor is given. Here the same is done to operators: one of them stands for the joint product,
with operands as large as all together, and the others become views. Matrices side by side keep the
storage of one of them, so memory does not change (a few MB of a layer would), and putting A side by
side costs nothing (a kernel of 1 MB). Limit: a trace does not know scalings, so siblings count as
scaled alike.

*What an MLP saves, as FP8 codes.* For `precision.saved_mlp=fp8`, `finetune.precision.saved_mlp`
puts a cast at the end of a layer's forward and its inverse at the beginning of backward. Here that
is done to operators, storages and events: what is saved ends with its last reader in forward, codes
and scales live in its place, and backward reads what it decodes of them, in memory only where no
compiler fuses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from finetune.estimator.speed.operators import FUSABLE, base_name, kind_of
from finetune.estimator.speed.step_parts import SIBLINGS
from finetune.estimator.trace.trace import Event, Op, Operand, Storage, Trace, layer_of
from finetune.precision.formats import E4M3

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


# ------------------------------------------------------------------------------- saved as FP8 codes

_OF_BATCHES = (torch.int64, torch.int32, torch.bool)
_CAST, _AMAX = "aten._to_copy.default", "aten.amax.default"


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


class _Saved(NamedTuple):
    """A result that backward reads: its operand as made, and readers in forward and backward."""

    made: Operand
    module: str
    last: int
    readers: list[int]


def keep_in_fp8(trace: Trace, widths: frozenset[int]) -> tuple[Trace, Callable[[int], int]]:
    """Let layers keep in FP8 what they save of these widths.

    Args:
        widths: elements of a row of the results, as `PrecisionPlan.saved_widths`.

    Returns:
        The trace with casts and codes, and the new number of an event of the old one.
    """
    found = _saved(trace, widths)
    after: dict[int, list[Op]] = defaultdict(list)
    before: dict[int, list[Op]] = defaultdict(list)
    numbers = (x.storage for op in trace.ops for x in (*op.inputs, *op.outputs))
    fresh = max(trace.storages.keys() | numbers, default=0) + 1
    storages, instead = dict(trace.storages), dict[int, Operand]()
    for storage, (x, module, last, readers) in found.items():
        shape = (*x.shape[:-1], 1)
        scale = Operand(fresh, shape, torch.float32, 4 * prod(shape))
        codes = Operand(fresh + 1, x.shape, E4M3.dtype, prod(x.shape))
        decoded = x._replace(storage=fresh + 2)
        fresh += 3
        after[last] += [
            Op(_AMAX, (x,), (scale,), "forward", module),
            Op(_CAST, (x, scale), (codes,), "forward", module),
        ]
        before[readers[0]].append(Op(_CAST, (codes, scale), (decoded,), "backward", module))
        instead[storage] = decoded
        facts = Storage(0, "forward", module, x.dtype, _CAST, "saved", saved=True)
        storages[scale.storage] = replace(facts, nbytes=scale.nbytes, dtype=scale.dtype)
        storages[codes.storage] = replace(facts, nbytes=codes.nbytes, dtype=codes.dtype)
        storages[decoded.storage] = replace(
            facts, nbytes=x.nbytes, phase="backward", kind="temporary", saved=False
        )
    ops, places, ends = list[Op](), list[int](), dict[int, int]()
    for index, op in enumerate(trace.ops):
        ops += before[index]
        if op.phase == "backward":
            inputs = (
                instead[x.storage]._replace(shape=x.shape) if x.storage in instead else x
                for x in op.inputs
            )
            op = op._replace(inputs=tuple(inputs))
        places.append(len(ops))
        ops += [op, *after[index]]
        ends[index] = len(ops)
    places.append(len(ops))
    entries = [
        Entry(places[event.at], 1, number, event) for number, event in enumerate(trace.events)
    ]
    for number, event in enumerate(trace.events):
        if event.storage not in found or event.nbytes > 0:
            continue
        saved, decoded = found[event.storage], instead[event.storage]
        begin, end = ends[saved.last] - 1, places[event.at]
        entries[number] = Entry(begin + 1, 0, number, event, moved=True)
        for kept in range(decoded.storage - 2, decoded.storage):
            size = storages[kept].nbytes
            entries += [
                Entry(begin, 0, number, Event(kept, size, 0), moved=True),
                Entry(end, 0, number, Event(kept, -size, 0), moved=True),
            ]
        if any(kind_of(trace.ops[r]) not in FUSABLE for r in saved.readers):
            first, final = places[saved.readers[0]], places[saved.readers[-1]] + 1
            entries += [
                Entry(first, 0, number, Event(decoded.storage, decoded.nbytes, 0), moved=True),
                Entry(final, 0, number, Event(decoded.storage, -decoded.nbytes, 0), moved=True),
            ]
    events, marks, moved = in_order(entries, trace)
    return replace(trace, ops=ops, events=events, storages=storages, marks=marks), moved


def _saved(trace: Trace, widths: frozenset[int]) -> dict[int, _Saved]:
    """BF16 results of these widths that a layer's forward makes and its backward reads."""
    first = trace.events[trace.marks["step"]].at if trace.marks["step"] < len(trace.events) else 0
    made: dict[int, _Saved] = {}
    floating = (n for n in trace.initial if trace.storages[n].dtype not in _OF_BATCHES)
    weights = set(floating)  # and what is made of them alone: no activation
    for index, op in enumerate(trace.ops[first:], first):
        for x in op.inputs:
            if x.storage not in made:
                continue
            saved = made[x.storage]
            if op.phase == "backward":
                saved.readers.append(index)
            elif layer_of(op.module) == layer_of(saved.module):
                made[x.storage] = saved._replace(last=index)
            else:  # a result of the layer itself
                del made[x.storage]
        if all(x.storage in weights for x in op.inputs):
            weights.update(x.storage for x in op.outputs)
            continue
        for x in op.outputs if op.phase == "forward" and layer_of(op.module) else ():
            if len(x.shape) > 1 and x.shape[-1] in widths and x.dtype is torch.bfloat16:
                made.setdefault(x.storage, _Saved(x, op.module, index, []))
    return {storage: saved for storage, saved in made.items() if saved.readers}
