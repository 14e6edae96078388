"""Memory footprint of one device in a step: tensors, allocator and driver.

Each of three phases has a peak: saved activations at the end of forward; in backward a layer's
recomputation or the logits' gradient on top; in the optimizer's step all gradients, without
activations. Before them, loading leaves the weights. Each phase has four figures, in rising order:

    allocated    tensors, and library workspaces in the caching allocator
    reserved     memory that the allocator has taken from the driver: segments, fragments
    shown        reserved, the CUDA context and NCCL's buffers: the figure of `nvidia-smi`
    needed       shown, and a margin: the larger of 3 % and 0.8 GB

A GPU that runs short returns fragments before it fails, so *allocated* decides whether a run can
work at all, and *needed* whether it works reliably.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from finetune.estimator.memory.allocator import replay_events
from finetune.estimator.memory.overheads import context_bytes, library_workspaces
from finetune.estimator.trace.trace import KINDS, Trace
from finetune.hardware.device import Device

LASTING = ("weights", "gradients", "optimizer")
"""Kinds that stay from step to step."""
MARGIN_SHARE, MARGIN_BYTES = 0.03, 800_000_000
Fit = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device.

    Attributes:
        phases: phase of the step -> kind -> bytes at the phase's peak, of which they are the parts.
        owner: module with the most bytes besides weights, gradients and optimizer states, at the
            highest peak.
        workspaces: bytes that libraries store inside the allocator.
        fragments: bytes reserved but not allocated.
        outside: bytes outside the allocator: the CUDA context, NCCL.
        expandable: reserved with `expandable_segments:True`; None if not replayed.
        about: True if fragments are a guess, without a full replay.
    """

    phases: dict[str, dict[str, int]]
    owner: str = ""
    owned: int = 0
    workspaces: int = 0
    fragments: int = 0
    outside: int = 0
    expandable: int | None = None
    about: bool = False

    @property
    def highest(self) -> str:
        """Phase with the highest peak."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def kinds(self) -> dict[str, int]:
        """Kind -> bytes at the highest peak."""
        return self.phases[self.highest]

    @property
    def tensors(self) -> int:
        return sum(self.kinds.values())

    @property
    def allocated(self) -> int:
        """Peak of `torch.cuda.memory_allocated`."""
        return self.tensors + self.workspaces

    @property
    def reserved(self) -> int:
        """Peak of `torch.cuda.memory_reserved`."""
        return self.allocated + self.fragments

    @property
    def shown(self) -> int:
        """Bytes that `nvidia-smi` would show."""
        return self.reserved + self.outside

    @property
    def margin(self) -> int:
        """Bytes kept free for errors of the estimate."""
        return max(int(MARGIN_SHARE * self.shown), MARGIN_BYTES)

    def in_expandable_segments(self) -> Footprint:
        """Footprint with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""
        if self.expandable is None:
            return self
        return replace(self, fragments=max(0, self.expandable - self.allocated))

    def fit(self, memory: int) -> Fit:
        """Verdict for a device with `memory` bytes."""
        if self.allocated + self.outside > memory:
            return "does not fit"
        return "fits" if self.shown + self.margin <= memory else "tight"


def tensor_footprint(trace: Trace) -> Footprint:
    """Peaks of a rehearsed step by phase, from the mark `step` on: tensors alone."""
    start, back, end = (trace.marks[name] for name in ("step", "backward", "optimizer"))
    fullest = {
        "load": -1,
        "forward": trace.peak(start, back)[1],
        "backward": trace.peak(back, end)[1],
        "optimizer": trace.peak(end)[1],
    }
    phases: dict[str, dict[str, int]] = {}
    owners: dict[str, Counter[str]] = {}
    for phase, at in fullest.items():
        phases[phase], owners[phase] = dict.fromkeys(KINDS, 0), Counter()
        for block in map(trace.storages.__getitem__, trace.alive(at)):
            phases[phase][block.kind] += block.nbytes
            if block.kind not in LASTING:
                owners[phase][block.module.replace("/", ".")] += block.nbytes
    bare = Footprint(phases)
    owner, owned = next(iter(owners[bare.highest].most_common(1)), ("", 0))
    return replace(bare, owner=owner, owned=owned)


def footprint(trace: Trace, device: Device) -> Footprint:
    """Memory of a rehearsed step on a single device."""
    bare = tensor_footprint(trace)
    if device.kind != "cuda" or device.capability is None:
        return bare
    workspaces = library_workspaces(device.capability)
    events = [
        *((number, size) for number, size in trace.initial.items()),
        *((f"workspace {i}", size) for i, size in enumerate(workspaces)),
        *trace.events,
    ]
    replay = replay_events(events)
    return replace(
        bare,
        workspaces=sum(workspaces),
        fragments=max(0, replay.peak_reserved - bare.tensors - sum(workspaces)),
        outside=context_bytes(device.capability),
        expandable=replay_events(events, expandable=True).peak_reserved,
    )


def with_first(steps: Footprint, first: Footprint) -> Footprint:
    """The higher peaks of a run whose first micro-step differs from the others.

    Args:
        steps: each of the others.
        first: the first one, counted with optimizer states and update, which come after it.
    """
    early = {p: first.phases[p] | {"optimizer": 0} for p in ("forward", "backward")}
    alone = replace(first, phases=early)
    pairs = ((steps.phases[phase], early.get(phase, {})) for phase in steps.phases)
    higher = [max(pair, key=lambda kinds: sum(kinds.values())) for pair in pairs]
    peaks = replace(steps, phases=dict(zip(steps.phases, higher, strict=True)))
    if alone.tensors > steps.tensors:
        peaks = replace(peaks, owner=first.owner, owned=first.owned)
    fragments = max(steps.reserved, alone.reserved) - peaks.allocated
    peaks = replace(peaks, fragments=max(0, fragments))
    if steps.expandable is None or first.expandable is None:
        return peaks
    unused = first.expandable - first.allocated
    return replace(peaks, expandable=max(steps.expandable, alone.allocated + unused))


def extrapolated(few: Footprint, more: Footprint, times: float) -> Footprint:
    """Extrapolate linearly, kind by kind, by `times` the difference of two smaller models.

    With 3 GiB of weights at 2 layers and 3.5 at 3, a model of 32 layers has 3 + 30 x 0.5 = 18 GiB.
    Two guesses: fragments grow as the square root of allocated memory, and in expandable segments
    they do not grow.
    """
    phases = {
        phase: {
            kind: round(few.phases[phase][kind] + times * (size - few.phases[phase][kind]))
            for kind, size in kinds.items()
        }
        for phase, kinds in more.phases.items()
    }
    grown = replace(more, phases=phases, about=True)
    share = grown.allocated / more.allocated
    fragments = max(few.fragments, more.fragments)
    grown = replace(grown, fragments=round(fragments * math.sqrt(share)))
    if few.expandable is None or more.expandable is None:
        return grown
    between = max(few.expandable - few.allocated, more.expandable - more.allocated)
    return replace(grown, expandable=grown.allocated + between)
