"""Trace of compiled layers, made of one recorded uncompiled: what backward keeps or computes again.

`torch.compile` of a decoder layer joins forward and backward into one graph, and AOTAutograd splits
it again: pointwise work costs little where it is fused, so backward computes again what it can from
few saved tensors. A cast to FP8 may save one-byte codes, or nothing, since it starts from a tensor
that is there anyhow.

The split is a minimum cut, as in `torch._functorch.partitioners` (torch 2.13). Each value of
forward is an edge whose capacity is its bytes; what backward reads lies behind it. Values that must
not be computed twice lie at the source: results of GEMMs and attention, reductions to a quarter or
less, and what a GEMM of backward reads as it is. Bytes are weighted by 1.1 for each operator
between a value and backward, and by two if all its readers could be fused with its maker.

    h = x Wᵀ; s = silu(h); y = s Vᵀ     backward of a frozen V reads h alone, the result of a GEMM:
                                        h is saved, s is not

Equal operators of forward and backward are one operator, as in torch: FP8 casts of one tensor.

A checkpoint is part of the layer's graph (Transformers 5.23 checkpoints inside its forward), so
backward computes again what it needs and no more: not the layer's last GEMM. Before torch 2.13 it
stands around the graph (`precision.model.compiling.checkpointed_around`), all of which runs again,
split as that of a layer without a checkpoint. (FSDP's own checkpointing wraps the layer,
too; that is not modeled.)

In the resulting trace, backward repeats what it needs and storages live as long as the split says.
What only one fused kernel makes and reads is never in memory, and what that kernel reads stays
until its last operator: g · f in float32 on the way to codes of g is not there, g is.
`tests/benchmarks/compiled_layer.py` compares with torch's own split. That one is not called here:
it begins with Dynamo's graph of a layer and Inductor's passes over it, which on a CPU takes private
names of both and patches of three more, none of them promised, for the same bytes.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.estimator.speed.fusion import launches
from finetune.estimator.speed.operators import FUSABLE, base_name, kind_of
from finetune.estimator.trace.trace import Event, Op, Operand, Trace, layer_of
from finetune.hardware.versions import torch_of_gpus
from finetune.precision.model.compiling import RECOMPUTES

if TYPE_CHECKING:
    from finetune.estimator.trace.rehearsal import Rehearsal

FARTHER, FARTHEST = 1.1, 100
"""Weight of a value per operator between it and backward, and the most of them that count."""
SMALLER = 4
"""A result this many times smaller than its operands is saved."""


def as_compiled(rehearsal: Rehearsal) -> Rehearsal:
    """The rehearsal with its decoder layers compiled."""
    trace, moved = compiled_trace(rehearsal.trace)
    visits = [visit._replace(start=moved(visit.start)) for visit in rehearsal.visits]
    return replace(rehearsal, trace=trace, visits=visits)


def compiled_trace(trace: Trace) -> tuple[Trace, Callable[[int], int]]:
    """Trace with compiled layers, and the new number of an event of the old one."""
    step = trace.events[trace.marks["step"]].at
    trace = _whole_recomputation(trace, step)
    graph = _Graph(trace, step)
    saved = {name: _saved(graph, name) for name in graph.layers}
    return _Rewriter(trace, graph, saved).rewrite()


def _whole_recomputation(trace: Trace, step: int) -> Trace:
    """Trace in which a checkpointed layer computes again all of its forward, needed or not.

    Uncompiled, it stops at the last tensor that backward needs; and operators of the layer itself
    look like those of backward, since a checkpoint does not call the module.
    """
    forward: dict[str, list[Op]] = defaultdict(list)
    for op in trace.ops[step:]:
        layer = layer_of(op.module)
        if op.phase == "forward" and layer:
            forward[layer].append(op)
    ops, places, fresh = list[Op](), list[int](), len(trace.storages)
    left: list[Op] = []  # what a recomputation in progress has still to run
    same: dict[int, int] = {}  # storage of forward -> of the recomputation
    # None at the end completes a recomputation that nothing follows.
    for op in [*trace.ops, None]:
        # The first operator of a layer computed again: all of its forward is due from here.
        if op is not None and op.phase == "recompute" and not left:
            left, same = list(forward[layer_of(op.module)]), {}
        if op is not None and left and _alike(op, left[0]):
            first = left.pop(0)
            # Later operators are to read what is computed again, not what forward made and freed.
            same.update(zip(*([x.storage for x in o.outputs] for o in (first, op)), strict=True))
            op = op._replace(phase="recompute", module=first.module)
        elif op is not None and op.phase == "recompute":
            left = []  # not what forward did: left as recorded
        elif op is None or op.phase == "backward":
            for missing in left:
                for x in missing.outputs:
                    if x.storage not in same:
                        same[x.storage], fresh = fresh, fresh + 1
                inputs, outputs = (
                    tuple(x._replace(storage=same.get(x.storage, x.storage)) for x in operands)
                    for operands in (missing.inputs, missing.outputs)
                )
                ops.append(missing._replace(inputs=inputs, outputs=outputs, phase="recompute"))
            left = []
        places.append(len(ops))
        ops += [] if op is None else [op]
    return replace(trace, ops=ops, events=[e._replace(at=places[e.at]) for e in trace.events])


def _alike(a: Op, b: Op) -> bool:
    return a.name == b.name and [x.shape for x in a.outputs] == [x.shape for x in b.outputs]


# ------------------------------------------------------------------------------------------- values


@dataclass(slots=True)
class _Value:
    """Content of a storage between two writes.

    Attributes:
        maker: index of its operator, and which of that operator's results it is.
        layer: decoder layer.
        forward: made in forward, or in the recomputation of a checkpoint.
        inputs: values that it is made of, and ~storage of those from outside of any layer.
        readers: operators that read it, merged ones left out.
    """

    operand: Operand
    maker: int
    result: int
    layer: str
    forward: bool
    inputs: tuple[int, ...]
    readers: list[int] = field(default_factory=list)


class _Graph:
    """Values of the decoder layers in a step; equal operators merged into the first.

    Attributes:
        reads: operator -> what it reads, as `_Value.inputs`.
        merged: operators of backward that equal earlier ones.
        free: operators of backward that need no gradient.
        layers: decoder layer -> its values.
        checkpointed: decoder layers with a checkpoint inside of their graph, whose values are those
            of a recomputation.
    """

    def __init__(self, trace: Trace, first: int) -> None:
        self.ops, self.initial = trace.ops, trace.initial
        self.values: list[_Value] = []
        self.reads: dict[int, tuple[int, ...]] = {}
        self.merged, self.free = set[int](), set[int]()
        self.layers: dict[str, list[int]] = defaultdict(list)
        self._now: dict[int, int] = {}
        self._gradients: set[int] = set()  # storages written in backward from gradients
        recomputed = {layer_of(op.module) for op in self.ops[first:] if op.phase == "recompute"}
        inside = torch_of_gpus() >= RECOMPUTES
        self.checkpointed = recomputed - {""} if inside else set[str]()
        made: dict[object, int] = {}  # operator and operands -> first value of its results
        for index in range(first, len(self.ops)):
            op = self.ops[index]
            # `~n` is negative for every n >= 0, so one number tells a value from a storage outside.
            taken = tuple(self._now.get(x.storage, ~x.storage) for x in op.inputs)
            layer = self._layer(op, taken, recomputed)
            written = op.outputs or op.inputs[:1]
            if not layer:
                self._read(index, taken)
                for operand in written:
                    self._now.pop(operand.storage, None)
                    if op.phase == "backward":
                        self._gradients.add(operand.storage)
                continue
            shapes = tuple((x.shape, x.dtype) for x in (*op.inputs, *op.outputs))
            key = (layer, op.name, taken, shapes)
            if op.phase == "backward" and key in made:
                self.merged.add(index)
                for number, operand in enumerate(written):
                    self._now[operand.storage] = made[key] + number
                continue
            if kind_of(op) in FUSABLE:
                made.setdefault(key, len(self.values))
            if op.phase == "backward":
                self.free.add(index)
            self._read(index, taken)
            for number, operand in enumerate(written):
                self._now[operand.storage] = len(self.values)
                self.layers[layer].append(len(self.values))
                forward = op.phase != "backward"
                self.values.append(_Value(operand, index, number, layer, forward, taken))

    def _read(self, index: int, taken: tuple[int, ...]) -> None:
        self.reads[index] = taken
        for value in taken:
            if value >= 0:
                self.values[value].readers.append(index)

    def _layer(self, op: Op, taken: tuple[int, ...], recomputed: set[str]) -> str:
        """Layer whose forward an operator belongs to, or could; empty if it needs a gradient."""
        if op.phase != "backward":
            layer = layer_of(op.module)
            return layer if op.phase == ("recompute" if layer in recomputed else "forward") else ""
        if kind_of(op) not in FUSABLE or any(v < 0 and ~v in self._gradients for v in taken):
            return ""
        # By its operands: in backward an operator's module says only which one autograd was in.
        layers = {self.values[v].layer for v in taken if v >= 0} or {layer_of(op.module)}
        return layers.pop() if len(layers) == 1 else ""

    def is_fusable(self, index: int) -> bool:
        return kind_of(self.ops[index]) in FUSABLE

    def in_backward(self, index: int) -> bool:
        """True if an operator needs gradients."""
        return self.ops[index].phase == "backward" and index not in self.free

    def leaves(self, number: int) -> bool:
        """True if another layer, or what follows the layers, reads a value in forward."""
        value = self.values[number]
        return any(
            self.ops[r].phase != "backward" and layer_of(self.ops[r].module) != value.layer
            for r in value.readers
        )

    def results(self, layer: str) -> dict[int, list[int]]:
        """Operator of a layer's forward -> its values."""
        found: dict[int, list[int]] = {}
        for number in self.layers[layer]:
            if self.values[number].forward:
                found.setdefault(self.values[number].maker, []).append(number)
        return found

    def runs_for(self, layer: str, wanted: set[int]) -> set[int]:
        """Operators of a layer's forward that its output and some of its values are made by.

        A recomputation has no output.
        """
        results, runs = self.results(layer), set[int]()
        again = layer in self.checkpointed
        for index in sorted(results, reverse=True):
            readers = {r for number in results[index] for r in self.values[number].readers}
            leaves = any(self.ops[r].phase != "backward" for r in readers - results.keys())
            output = not again and (not runs or leaves)
            if output or readers & runs or not wanted.isdisjoint(results[index]):
                runs.add(index)
        return runs

    def kept(self, layer: str) -> set[int]:
        """Values that backward needs, itself or to compute others again, and that no kernel fuses:
        results of GEMMs, attention and reductions to a quarter or less.
        """
        found, needed = set[int](), set[int]()
        for number in reversed(self.layers[layer]):
            value = self.values[number]
            if any(r in needed or self.in_backward(r) for r in value.readers):
                needed.add(value.maker)
                if value.forward and (not self.is_fusable(value.maker) or self.shrinks(value)):
                    found.add(number)
        return found

    def shrinks(self, value: _Value) -> bool:
        """True for a result that is much smaller than its operands."""
        taken = sum(x.nbytes for x in self.ops[value.maker].inputs)
        return SMALLER * value.operand.nbytes < taken


# --------------------------------------------------------------------------------------- the split


def _saved(graph: _Graph, layer: str) -> set[int]:
    """Values of a layer that its forward saves for backward: the minimum cut."""
    import networkx

    again = layer in graph.checkpointed
    wanted = graph.kept(layer) if again else set[int]()
    numbers, required = graph.layers[layer], graph.runs_for(layer, wanted)
    distances = _distances(graph, layer, required)
    net: Any = networkx.DiGraph()
    for number in numbers:
        value = graph.values[number]
        size = value.operand.nbytes
        outside = {r for r in value.readers if r not in required}
        fused = graph.is_fusable(value.maker)
        as_it_is = not all(graph.is_fusable(reader) for reader in outside)
        if value.forward:
            needed = value.maker in required
            if not fused or (needed and (as_it_is or graph.shrinks(value))):
                net.add_edge("source", ("in", number), capacity=inf)
            weight = size * FARTHER ** max(min(distances[number], FARTHEST), 1)
            # As in torch's partitioner: saving it would write and read what fusion keeps out of
            # memory.
            weight *= 2 if fused and all(map(graph.is_fusable, value.readers)) else 1
        else:
            weight = inf
        net.add_edge(("in", number), ("out", number), capacity=weight)
        for other, operand in zip(value.inputs, graph.ops[value.maker].inputs, strict=True):
            net.add_edge(("out", other), ("in", number), capacity=inf)
            if other not in distances:  # from outside of the layer
                free = other < 0 and ~other in graph.initial
                net.add_edge("source", ("in", other), capacity=inf)
                # A weight or a batch is there anyway, so that keeping it costs nothing.
                net.add_edge(("in", other), ("out", other), capacity=0 if free else operand.nbytes)
        if any(graph.in_backward(reader) for reader in outside):
            net.add_edge(("out", number), "sink", capacity=inf)
    if "sink" not in net or "source" not in net:
        return set()
    _, (near, _) = networkx.minimum_cut(net, "source", "sink")
    return {n for n in numbers if ("in", n) in near and ("out", n) not in near}


def _distances(graph: _Graph, layer: str, required: set[int]) -> dict[int, int]:
    """Number of operators between each value of a layer and backward."""
    found: dict[int, int] = {}
    of_maker: dict[int, int] = {}
    for number in reversed(graph.layers[layer]):
        value = graph.values[number]
        found[number] = 0
        if value.maker in required:
            readers = (of_maker.get(r, 0) for r in value.readers)
            found[number] = min((d + 1 for d in readers), default=FARTHEST)
        of_maker[value.maker] = min(found[number], of_maker.get(value.maker, FARTHEST))
    return found


# ---------------------------------------------------------------------------------------- rewriting


class _Rewriter:
    """Operators and events of a step whose layers save what is given, and nothing else."""

    def __init__(self, trace: Trace, graph: _Graph, saved: dict[str, set[int]]) -> None:
        self._trace, self._graph = trace, graph
        self._saved = set[int]().union(*saved.values())
        self._dropped = set(graph.merged)
        for layer, values in saved.items():
            runs = graph.runs_for(layer, values)
            again = layer in graph.checkpointed
            left_out = {i for i in graph.results(layer) if again or graph.is_fusable(i)}
            self._dropped |= left_out - runs
        self._ops: list[Op] = []
        self._written: dict[int, list[int]] = {}  # operator -> results in backward, read by a GEMM
        self._copies = ChainMap(self._written)  # the same, and what one operator alone has copied
        numbers = {x.storage for op in trace.ops for x in (*op.inputs, *op.outputs)}
        # Copies get numbers that no storage has.
        self._fresh = max(numbers | trace.storages.keys()) + 1

    def rewrite(self) -> tuple[Trace, Callable[[int], int]]:
        places: list[int] = []
        for index, op in enumerate(self._trace.ops):
            if index in self._dropped or index in self._graph.free:
                places.append(len(self._ops))
                continue
            if op.phase == "backward" and index in self._graph.reads:
                taken = zip(self._graph.reads[index], op.inputs, strict=True)
                # A compiler computes cheap values again in each kernel that reads them.
                fused = self._graph.is_fusable(index)
                self._copies = ChainMap(here := {}, self._written)
                op = op._replace(inputs=tuple(self._available(*each) for each in taken))
                if not fused:
                    last = {self._graph.values[v].maker for v in self._graph.reads[index] if v >= 0}
                    self._written |= {
                        m: storages
                        for m, storages in here.items()
                        if m in last or not _widens(self._graph.ops[m])
                    }
            places.append(len(self._ops))
            self._ops.append(op)
        places.append(len(self._ops))
        return self._with_events(places)

    def _available(self, value: int, operand: Operand) -> Operand:
        """The operand where backward finds it: saved, from outside, or computed again."""
        if value < 0:
            return operand
        found = self._graph.values[value]
        if value in self._saved or self._graph.leaves(value):
            return operand._replace(storage=found.operand.storage)
        if found.maker not in self._copies:
            op = self._graph.ops[found.maker]
            taken = zip(found.inputs, op.inputs, strict=True)
            inputs = tuple(self._available(*each) for each in taken)
            written = op.outputs or op.inputs[:1]
            storages = [x.storage for x in written]
            if found.forward:
                storages = list(range(self._fresh, self._fresh + len(written)))
                self._fresh += len(written)
            self._copies[found.maker] = storages
            outputs = (x._replace(storage=s) for x, s in zip(written, storages, strict=True))
            self._ops.append(op._replace(inputs=inputs, outputs=tuple(outputs), phase="backward"))
        return operand._replace(storage=self._copies[found.maker][found.result])

    def _with_events(self, places: list[int]) -> tuple[Trace, Callable[[int], int]]:
        before, after = (_readers(ops) for ops in (self._trace.ops, self._ops))
        used = {x.storage: i for i, op in enumerate(self._ops) for x in (*op.inputs, *op.outputs)}
        inner = {v.operand.storage for v in self._graph.values if v.forward}
        fused, ends = _in_kernels(self._ops)
        leave = _ends_of_layers(self._ops)
        entries: list[_Entry] = []
        for number, event in enumerate(self._trace.events):
            storage, place, moves = event.storage, places[event.at], 0
            if storage in fused or (storage in inner and storage not in used):
                continue  # nothing makes or reads it any more, or a kernel in passing
            if event.nbytes < 0 and storage in used:
                last = used[storage] + 1
                if storage in inner and storage in before and storage not in after:
                    place, moves = min(place, last), -1
                elif last > place and storage in after:
                    place, moves = last, -1
                if (end := ends.get(storage, 0)) > place:
                    place, moves = end, -1
                # Gradients that leave in backward: a compiled layer gives all of its own at once.
                sent = self._trace.storages[storage].kind == "gradients"
                if sent and (end := leave(place)) > place:
                    place, moves = end, -1
            entries.append(_Entry(place, moves, number, event, moved=bool(moves)))
        events, marks, moved = _in_order(entries, self._trace)
        storages = dict(self._trace.storages)
        for number in after & inner & storages.keys():
            if storages[number].phase == "forward" and storages[number].kind == "temporary":
                storages[number] = replace(storages[number], kind="saved", saved=True)
        facts: dict[str, Any] = {"ops": self._ops, "events": events, "storages": storages}
        return replace(self._trace, marks=marks, **facts), moved


class _Entry(NamedTuple):
    """An event in a new order: by operator, then by rank, then as it was.

    Attributes:
        number: index of the old event.
        moved: True if it is not where it was.
    """

    at: int
    rank: int
    number: int
    event: Event
    moved: bool = False


def _in_order(
    entries: Iterable[_Entry], trace: Trace
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


def _in_kernels(ops: list[Op]) -> tuple[set[int], dict[int, int]]:
    """Storages that no kernel writes; of what a kernel with some of them reads, its end."""
    kernels = list(launches(ops, lambda op: layer_of(op.module)))
    stored = set[int]().union(*(kernel.inputs for kernel in kernels))
    read = {x.storage for op in ops for x in op.inputs}
    made = {x.storage for kernel in kernels for i in kernel.ops for x in ops[i].outputs}
    fused, ends = (made & read) - stored, dict[int, int]()
    for kernel in kernels:
        if any(x.storage in fused for i in kernel.ops for x in ops[i].outputs):
            end = max(kernel.ops) + 1
            for x in (x for i in kernel.ops for x in ops[i].inputs):
                ends[x.storage] = max(ends.get(x.storage, 0), end)
    return fused, ends


def _ends_of_layers(ops: list[Op]) -> Callable[[int], int]:
    """Of a place in a layer's backward its end; of another place itself."""
    backward = [layer_of(op.module) if op.phase in ("backward", "recompute") else "" for op in ops]
    last = {layer: index for index, layer in enumerate(backward) if layer}
    return lambda at: last.get(backward[at - 1], at - 1) + 1 if at else at


def _widens(op: Op) -> bool:
    """True for a cast to more bytes, which costs less in each kernel than to write its result."""
    return base_name(op) == "_to_copy" and op.outputs[0].nbytes > op.inputs[0].nbytes


def _readers(ops: list[Op]) -> set[int]:
    """Storages that backward reads."""
    return {x.storage for op in ops if op.phase == "backward" for x in op.inputs}
