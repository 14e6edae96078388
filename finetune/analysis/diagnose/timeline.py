"""From a profile to slices of a step: what ran, how long, for which layer, in which direction.

The events of `torch.profiler` form a tree by time on each host thread. A context goes down it:

* a range of ours (`ranges`) names a layer, and says whether it is computed a second time;
* a node of autograd carries the sequence number and thread of the operator that made it, so its
  backward belongs to the layer in whose range that operator ran; a range inside it speaks first;
* inside the optimizer's own range everything is the optimizer's.

On a *CPU* a slice is the time of an event without what is below it. These times add up to the
window exactly. On a *GPU* a slice is a kernel, found by the correlation that the driver keeps with
the operator that launched it. Kernels that overlap are counted once, computation before
communication; what remains of the step is time in which the GPU waits. Profiling slows down the
host and not the kernels, so there the step's length is that of steps without a profile.

Limits: kernels of a library that launches graphs (CUDA graphs) have no operator each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import DeviceType

from finetune.analysis.diagnose.kernel_parts import (
    is_gemm,
    multiplies_fp8,
    part_of_kernel,
    part_of_operator,
)
from finetune.analysis.diagnose.observer import PREFIX, WINDOW
from finetune.estimator.speed.step_parts import PROFILED_PARTS, StepPart

BACKWARD_NODE = "autograd::engine::evaluate_function"
_LATER = {StepPart.COMMUNICATION: 1, StepPart.OTHER: 2}
"""Of kernels at the same time the one with the lowest number counts; 0, if it is not here."""


@dataclass(frozen=True)
class Slice:
    """A kernel, or the own time of an operator.

    Attributes:
        name: of the kernel, on a CPU of the operator.
        part: of the step.
        seconds: that nothing else is charged for.
        owner: the layer, "" where none is known.
        phase: forward, recompute, backward, optimizer, or "".
        sizes: of a product (m, n, k), sorted; empty where they are not known.
    """

    name: str
    part: StepPart
    seconds: float
    owner: str = ""
    phase: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Where the time of some steps went.

    Attributes:
        slices: of all of them.
        steps: how many.
        step_seconds: of one, from its begin to its end.
        on_gpu: slices are kernels.
    """

    slices: tuple[Slice, ...]
    steps: int
    step_seconds: float
    on_gpu: bool

    def parts(self) -> dict[StepPart, float]:
        """Part -> seconds of one step; they add up to `step_seconds`."""
        found: dict[StepPart, float] = dict.fromkeys(PROFILED_PARTS, 0.0)
        for piece in self.slices:
            found[piece.part] += piece.seconds / self.steps
        if self.on_gpu:
            found[StepPart.HOST] += max(0.0, self.step_seconds - sum(found.values()))
        return found

    def seconds(self, *, phase: str) -> float:
        """Of one step that a phase takes, without waiting."""
        found = (p.seconds for p in self.slices if p.phase == phase and p.part != StepPart.HOST)
        return sum(found) / self.steps


@dataclass(frozen=True)
class _Context:
    owner: str = ""
    phase: str = ""
    part: StepPart | None = None
    sizes: tuple[int, ...] = ()


def read_trace(
    events: Iterable[Any],
    *,
    steps: int,
    step_seconds: float | None = None,
    low: Mapping[str, bool],
    batched: bool = False,
) -> Trace:
    """Slices of a profile.

    Args:
        events: of `torch.profiler.profile.events()`: with parents, and shapes of inputs.
        steps: optimizer steps inside the window.
        step_seconds: of one without a profile; used where the profile is of a GPU.
        low: layer that has FP8 GEMMs -> whether all of them are.
        batched: batched products are those of layers.
    """
    ordered = sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end))
    host = [e for e in ordered if e.device_type == DeviceType.CPU and not e.is_async]
    root = next(e for e in host if e.name == WINDOW)
    contexts = _contexts(host)
    kernels = [e for e in ordered if e.device_type != DeviceType.CPU and _is_kernel(e)]
    if kernels:
        slices = _kernels(kernels, host, contexts, low, batched)
        busy = sum(piece.seconds for piece in slices) / steps
        length = max(step_seconds or 0.0, busy)
        return Trace(tuple(slices), steps, length, on_gpu=True)
    inside = [e for e in host if _is_inside(e, root)]
    slices = _operators(inside, contexts, low, batched)
    return Trace(tuple(slices), steps, root.time_range.elapsed_us() * 1e-6 / steps, on_gpu=False)


def _is_kernel(event: Any) -> bool:
    """Ranges have a shadow on the GPU's time line, which is no work."""
    return not event.is_user_annotation and not event.name.startswith(
        (PREFIX, "Optimizer.", "ProfilerStep")
    )


def _is_inside(event: Any, root: Any) -> bool:
    while event is not None and event is not root:
        event = event.cpu_parent
    return event is root


# ------------------------------------------------------------------------------------------ context


def _contexts(host: Sequence[Any]) -> dict[int, _Context]:
    """id(event) -> where it ran. `host` is in order of time, parents first."""
    found: dict[int, _Context] = {}
    forward: dict[tuple[int, int], _Context] = {}
    for event in host:
        above = found.get(id(event.cpu_parent), _Context())
        here = _descend(event, above, forward)
        found[id(event)] = here
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD_NODE):
            # Of operators with one number the last is the one that made the node of that number.
            forward[event.thread, event.sequence_nr] = here
    return found


def _descend(event: Any, above: _Context, forward: Mapping[tuple[int, int], _Context]) -> _Context:
    name = event.name
    if name.startswith(PREFIX) and name != WINDOW:
        _, phase, owner = name.split("|", 2)
        return _Context(owner, phase)
    if name.startswith("Optimizer."):
        return replace(above, phase=StepPart.OPTIMIZER, part=StepPart.OPTIMIZER)
    if name.startswith(BACKWARD_NODE):
        made = forward.get((event.fwd_thread, event.sequence_nr), _Context())
        return _Context(made.owner, "backward")
    if multiplies_fp8(name):
        return replace(above, part=StepPart.FP8_GEMM, sizes=_sizes(event))
    if is_gemm(name) and not above.sizes:
        return replace(above, sizes=_sizes(event))
    if above.part is None and part_of_operator(name) == StepPart.ATTENTION and not is_gemm(name):
        return replace(above, part=StepPart.ATTENTION)
    return above


def _sizes(event: Any) -> tuple[int, ...]:
    """(m, n, k) of a product, sorted: the two matrices among the inputs that fit together."""
    shapes = [tuple(s) for s in event.input_shapes or () if len(s) in (2, 3) and all(s)]
    for a, b in itertools.pairwise(shapes):
        if a[-1] == b[-2]:
            rows = a[0] * a[1] if len(a) == 3 and len(b) == 2 else a[-2]
            return tuple(sorted((rows, b[-1], a[-1])))
    return ()


# ------------------------------------------------------------------------------------------- slices


def _operators(
    inside: Sequence[Any],
    contexts: Mapping[int, _Context],
    low: Mapping[str, bool],
    batched: bool,
) -> list[Slice]:
    slices = []
    for event in inside:
        here, own = contexts[id(event)], event.self_cpu_time_total * 1e-6
        is_low = here.owner in low
        part = part_of_operator(event.name, low=is_low, batched=batched)
        if part != StepPart.HOST:
            part = StepPart.FP8_GEMM if part == StepPart.GEMM and low.get(here.owner) else part
            part = here.part or part
        elif "CompiledFxGraph" in event.name:  # its kernels are no operators on a CPU
            part = StepPart.CASTS if is_low else StepPart.ELEMENTWISE
        slices.append(Slice(event.name, part, own, here.owner, here.phase, here.sizes))
    return slices


def _kernels(
    kernels: Sequence[Any],
    host: Sequence[Any],
    contexts: Mapping[int, _Context],
    low: Mapping[str, bool],
    batched: bool,
) -> list[Slice]:
    by_id = {event.id: event for event in host if not event.linked_correlation_id}
    found = []
    for event in kernels:
        launcher = by_id.get(event.linked_correlation_id)
        here = contexts[id(launcher)] if launcher is not None else _Context()
        is_low = here.owner in low
        launched_by = launcher.name if launcher is not None else ""
        part = part_of_kernel(event.name, launched_by, low=is_low, batched=batched)
        if here.part is not None and part != StepPart.COMMUNICATION:
            part = here.part
        found.append(Slice(event.name, part, 0.0, here.owner, here.phase, here.sizes))
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    seconds = _alone(spans, [_LATER.get(piece.part, 0) for piece in found])
    return [replace(p, seconds=s * 1e-6) for p, s in zip(found, seconds, strict=True)]


def _alone(spans: Sequence[tuple[float, float]], rank: Sequence[int]) -> list[float]:
    """What each span is charged for, where of overlapping ones the lowest rank, then the first."""
    edges = sorted({edge for span in spans for edge in span})
    starts: dict[float, list[int]] = {}
    for index, (start, _) in enumerate(spans):
        starts.setdefault(start, []).append(index)
    charged, active = [0.0] * len(spans), list[int]()
    for left, right in itertools.pairwise(edges):
        active = [i for i in active if spans[i][1] > left] + starts.get(left, [])
        active = [i for i in active if spans[i][1] > left]
        if active:
            charged[min(active, key=lambda i: (rank[i], spans[i][0], i))] += right - left
    return charged
