"""Timeline of a step, from a profile: slices with duration, layer, part and phase.

The events of `torch.profiler` form a tree by time on each host thread. A context goes down it:

* a range of ours (`observer.Ranges`) names a layer, and marks recomputation;
* an autograd node has the sequence number and thread of the operator that made it, so its backward
  belongs to that operator's layer; a range inside it takes precedence;
* inside the optimizer's range everything is the optimizer's.

On a *CPU* a slice is the self time of an event; these add up to the window exactly. On a *GPU* a
slice is a kernel, matched to its launching operator by the driver's correlation id. Overlapping
kernels count once, computation before communication; the rest of the step is time in which the GPU
waits. Profiling slows down the host but not the kernels, so the step's length is then that of steps
without a profile.

Limit: kernels in CUDA graphs have no operator each.
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
_RANK = {StepPart.COMMUNICATION: 1, StepPart.OTHER: 2}
"""Priority among simultaneous kernels: the lowest rank is charged; 0 by default."""


@dataclass(frozen=True)
class Slice:
    """Kernel, or the self time of an operator.

    Attributes:
        name: name of the kernel, on a CPU of the operator.
        part: part of the step.
        seconds: time charged to this slice alone.
        owner: the layer, "" if unknown.
        phase: forward, recompute, backward, optimizer, or "".
        sizes: (m, n, k) of a GEMM, sorted; empty if unknown.
    """

    name: str
    part: StepPart
    seconds: float
    owner: str = ""
    phase: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Slices of some steps.

    Attributes:
        slices: slices of all steps.
        steps: number of steps.
        step_seconds: duration of one step.
        on_gpu: slices are kernels.
    """

    slices: tuple[Slice, ...]
    steps: int
    step_seconds: float
    on_gpu: bool

    def parts(self) -> dict[StepPart, float]:
        """Seconds of one step by part; they add up to `step_seconds`."""
        found = dict.fromkeys(PROFILED_PARTS, 0.0)
        for piece in self.slices:
            found[piece.part] += piece.seconds / self.steps
        if self.on_gpu:
            found[StepPart.HOST] += max(0.0, self.step_seconds - sum(found.values()))
        return found

    def seconds(self, *, phase: str) -> float:
        """Seconds of one step in a phase, without waiting."""
        found = (p.seconds for p in self.slices if p.phase == phase and p.part != StepPart.HOST)
        return sum(found) / self.steps


@dataclass(frozen=True)
class _Context:
    """Context of an event, inherited by its children; `part` overrides what names imply."""

    owner: str = ""
    phase: str = ""
    part: StepPart | None = None
    sizes: tuple[int, ...] = ()


def read_profile(
    events: Iterable[Any],
    *,
    steps: int,
    step_seconds: float | None = None,
    low: Mapping[str, bool],
    batched: bool = False,
) -> Timeline:
    """Convert a profile to slices.

    Args:
        events: from `torch.profiler.profile.events()`, with parents and input shapes.
        steps: optimizer steps inside the window.
        step_seconds: duration of a step without a profile; used for GPU profiles.
        low: layers with FP8 GEMMs -> True if all of them are FP8.
        batched: batched GEMMs are those of layers.
    """
    ordered = sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end))
    host = [e for e in ordered if e.device_type == DeviceType.CPU and not e.is_async]
    kernels = [e for e in ordered if e.device_type != DeviceType.CPU and _is_kernel(e)]
    contexts = _contexts(host)
    if kernels:
        slices = _kernel_slices(kernels, host, contexts, low, batched)
        busy = sum(piece.seconds for piece in slices) / steps
        return Timeline(tuple(slices), steps, max(step_seconds or 0.0, busy), on_gpu=True)
    window = next(e for e in host if e.name == WINDOW)
    slices = [
        _operator_slice(event, contexts[id(event)], low, batched)
        for event in host
        if _is_inside(event, window)
    ]
    length = window.time_range.elapsed_us() * 1e-6 / steps
    return Timeline(tuple(slices), steps, length, on_gpu=False)


def _is_kernel(event: Any) -> bool:
    """True for kernels; ranges also appear on the GPU's time line, but are no work."""
    ranges = (PREFIX, "Optimizer.", "ProfilerStep")
    return not event.is_user_annotation and not event.name.startswith(ranges)


def _is_inside(event: Any, window: Any) -> bool:
    while event is not None and event is not window:
        event = event.cpu_parent
    return event is window


# ------------------------------------------------------------------------------------------ context


def _contexts(host: Sequence[Any]) -> dict[int, _Context]:
    """Contexts by id(event). `host` is in order of time, parents first."""
    found: dict[int, _Context] = {}
    forward: dict[tuple[int, int], _Context] = {}
    for event in host:
        above = found.get(id(event.cpu_parent), _Context())
        here = found[id(event)] = _descend(event, above, forward)
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD_NODE):
            # Of operators with equal numbers the last one made the node of that number.
            forward[event.thread, event.sequence_nr] = here
    return found


def _descend(event: Any, above: _Context, forward: Mapping[tuple[int, int], _Context]) -> _Context:
    name = event.name
    if name.startswith(PREFIX) and name != WINDOW:
        _, phase, owner = name.split("|", 2)
        return _Context(owner, phase)
    if name.startswith("Optimizer."):
        return replace(above, phase="optimizer", part=StepPart.OPTIMIZER)
    if name.startswith(BACKWARD_NODE):
        made = forward.get((event.fwd_thread, event.sequence_nr), _Context())
        return _Context(made.owner, "backward")
    if multiplies_fp8(name):
        return replace(above, part=StepPart.FP8_GEMM, sizes=_sizes(event))
    if is_gemm(name):
        return above if above.sizes else replace(above, sizes=_sizes(event))
    if above.part is None and part_of_operator(name) == StepPart.ATTENTION:
        return replace(above, part=StepPart.ATTENTION)
    return above


def _sizes(event: Any) -> tuple[int, ...]:
    """Sizes (m, n, k) of a GEMM, sorted, from the two inputs that fit together."""
    shapes = [tuple(s) for s in event.input_shapes or () if len(s) in (2, 3) and all(s)]
    for a, b in itertools.pairwise(shapes):
        if a[-1] == b[-2]:  # [M, K] @ [K, N]
            rows = a[0] * a[1] if len(a) == 3 and len(b) == 2 else a[-2]
            return tuple(sorted((rows, b[-1], a[-1])))
    return ()


# ------------------------------------------------------------------------------------------- slices


def _operator_slice(event: Any, here: _Context, low: Mapping[str, bool], batched: bool) -> Slice:
    is_low = here.owner in low
    part = part_of_operator(event.name, low=is_low, batched=batched)
    if part != StepPart.HOST:
        in_fp8 = part == StepPart.GEMM and low.get(here.owner)
        part = here.part or (StepPart.FP8_GEMM if in_fp8 else part)
    elif "CompiledFxGraph" in event.name:  # on a CPU its kernels are not operators
        part = StepPart.CASTS if is_low else StepPart.ELEMENTWISE
    seconds = event.self_cpu_time_total * 1e-6
    return Slice(event.name, part, seconds, here.owner, here.phase, here.sizes)


def _kernel_slices(
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
        launched_by = launcher.name if launcher is not None else ""
        part = part_of_kernel(event.name, launched_by, low=here.owner in low, batched=batched)
        if here.part is not None and part != StepPart.COMMUNICATION:
            part = here.part
        found.append(Slice(event.name, part, 0.0, here.owner, here.phase, here.sizes))
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    seconds = _alone(spans, [_RANK.get(piece.part, 0) for piece in found])
    return [replace(p, seconds=s * 1e-6) for p, s in zip(found, seconds, strict=True)]


def _alone(spans: Sequence[tuple[float, float]], rank: Sequence[int]) -> list[float]:
    """Charge every moment to one span: among overlapping ones to the lowest rank, then the first.

    Spans (0, 4) and (2, 6) of one rank are charged 4 and 2; of ranks 1 and 0, 2 and 4.
    """
    starts: dict[float, list[int]] = {}
    for index, (start, _) in enumerate(spans):
        starts.setdefault(start, []).append(index)
    charged, active = [0.0] * len(spans), list[int]()
    for left, right in itertools.pairwise(sorted({edge for span in spans for edge in span})):
        active = [i for i in (*active, *starts.get(left, [])) if spans[i][1] > left]
        if active:
            charged[min(active, key=lambda i: (rank[i], spans[i][0], i))] += right - left
    return charged
