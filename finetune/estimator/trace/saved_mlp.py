"""`precision.saved_mlp=fp8` in a trace of compiled layers: what an MLP saves, kept as FP8 codes.

`finetune.precision.saved_mlp` puts a cast at the end of a layer's forward and its inverse at the
beginning of backward, after the layer's graph is split. Here the same is done to operators,
storages and events: what is saved ends with its last reader in forward, codes and scales live in
its place, and backward reads what it decodes of them, in memory only where no compiler fuses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from finetune.estimator.speed.operators import FUSABLE, kind_of
from finetune.estimator.trace.trace import Event, Op, Operand, Storage, Trace, layer_of
from finetune.precision.formats import E4M3

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
