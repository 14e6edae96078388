"""Memory footprint of one device in a step: tensors, allocator and driver.

Each of three phases has a peak: saved activations at the end of forward; in backward a layer's
recomputation or the logits' gradient on top; in the optimizer's step all gradients, without
activations. Before them, loading leaves the weights, and a model that writes its rows has two
more: all prompts at once, and the last token of the answers, with keys and values of all others.
Each phase has four figures, in rising order:

    allocated    tensors, and library workspaces in the caching allocator
    reserved     memory that the allocator has taken from the driver: allocated, and fragments
    shown        reserved, the CUDA context and NCCL's buffers: the figure of `nvidia-smi`
    needed       shown, and a margin: the larger of 3 % and 0.8 GB

A GPU that runs short returns fragments before it fails, so *allocated* decides whether a run can
work at all, and *needed* whether it works reliably. Fragments are a share of what is allocated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from finetune.estimator.memory.overheads import context_bytes, library_workspaces, pinned_bytes
from finetune.estimator.trace.trace import KINDS, Trace
from finetune.hardware.device import Device

LASTING = ("weights", "gradients", "optimizer")
"""Kinds that stay from step to step."""
PHASES = ("prompts", "answers", "forward", "backward", "optimizer")
"""Phases of a step; a model that writes answers begins with two of its own
(`finetune.estimator.trace.writing`)."""
FRAGMENTS = 0.03
"""Bytes reserved beside those allocated, as a share of these.

Steps of the 21 recipes above 1 GiB on an H100, replayed by the rules of torch's allocator, reserved
1 to 5 % more in 19 and 8 and 10 % in two.
"""
# 3 % is for what grows with the run, 0.8 GB for what does not: a context differs between drivers.
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
        pinned, pageable: bytes in host memory of masters, their gradients and optimizer states.
    """

    phases: dict[str, dict[str, int]]
    owner: str = ""
    owned: int = 0
    workspaces: int = 0
    fragments: int = 0
    outside: int = 0
    pinned: int = 0
    pageable: int = 0

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

    @property
    def needed(self) -> int:
        """Bytes with which a run works reliably."""
        return self.shown + self.margin

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return self.pinned + self.pageable

    def fit(self, memory: int) -> Fit:
        """Verdict for a device with `memory` bytes."""
        # Without fragments, which the allocator gives back before it fails.
        if self.allocated + self.outside > memory:
            return "does not fit"
        return "fits" if self.needed <= memory else "tight"


def tensor_footprint(trace: Trace) -> Footprint:
    """Peaks of a rehearsed step by phase, from the mark `step` on: tensors alone."""
    whole, trace = trace, trace.only(lambda storage: storage.memory == "device")
    # A step without a generation begins with forward, and has no mark for it.
    marks = {"forward": trace.marks["step"], **trace.marks}
    begins = {phase: marks[phase] for phase in PHASES if phase in marks}
    ends = [*[*begins.values()][1:], len(trace.events)]
    # Event -1: before the first one only what was there is alive, the weights.
    fullest = {"load": -1}
    for (phase, start), end in zip(begins.items(), ends, strict=True):
        fullest[phase] = trace.peak(start, end)[1]
    phases: dict[str, dict[str, int]] = {}
    owners: dict[str, Counter[str]] = {}
    for phase, at in fullest.items():
        phases[phase], owners[phase] = dict.fromkeys(KINDS, 0), Counter()
        for block in map(trace.storages.__getitem__, trace.alive(at)):
            phases[phase][block.kind] += block.nbytes
            if block.kind not in LASTING:
                owners[phase][block.module.replace("/", ".")] += block.nbytes
    # Masters, and a gradient of each, stay from step to step.
    pinned = sum(pinned_bytes(s.nbytes) for s in whole.storages.values() if s.memory == "pinned")
    elsewhere = whole.only(lambda storage: storage.memory == "pageable")
    bare = Footprint(phases, pinned=pinned, pageable=elsewhere.peak(trace.marks["step"])[0])
    owner, owned = next(iter(owners[bare.highest].most_common(1)), ("", 0))
    return replace(bare, owner=owner, owned=owned)


def _aside(trace: Trace, highest: int) -> int:
    """Bytes of other streams' memory that computation could not use at event `highest`."""
    found = 0
    for stream in {s.stream for s in trace.storages.values()} - {""}:
        own = trace.only(lambda s: s.memory == "device" and s.stream == stream)  # noqa: B023
        found += own.peak()[0] - own.peak(highest, highest + 1)[0]
    return found


def footprint(trace: Trace, device: Device) -> Footprint:
    """Memory of a rehearsed step on a single device."""
    bare = tensor_footprint(trace)
    if device.kind != "cuda" or device.capability is None:
        return bare
    memory = on_gpu(bare, device.capability)
    highest = trace.only(lambda storage: storage.memory == "device").peak(trace.marks["step"])[1]
    return replace(memory, fragments=memory.fragments + _aside(trace, highest))


def on_gpu(tensors: Footprint, capability: tuple[int, int]) -> Footprint:
    """A footprint of tensors with what libraries, allocator and driver take besides."""
    memory = replace(tensors, workspaces=sum(library_workspaces(capability)))
    fragments = round(FRAGMENTS * memory.allocated)
    return replace(memory, fragments=fragments, outside=context_bytes(capability))


def with_first(steps: Footprint, first: Footprint) -> Footprint:
    """The higher peaks of a run whose first micro-step differs from the others.

    Args:
        steps: each of the others.
        first: the first one, counted with optimizer states and update, which come after it.
    """
    # States come into being in the first update, after the first forward and backward.
    early = {p: first.phases[p] | {"optimizer": 0} for p in ("forward", "backward")}
    alone = replace(first, phases=early)
    pairs = ((steps.phases[phase], early.get(phase, {})) for phase in steps.phases)
    higher = [max(pair, key=lambda kinds: sum(kinds.values())) for pair in pairs]
    peaks = replace(steps, phases=dict(zip(steps.phases, higher, strict=True)))
    if alone.tensors > steps.tensors:
        peaks = replace(peaks, owner=first.owner, owned=first.owned)
    # Reserved is a high-water mark: a first step's is kept though later ones allocate less.
    fragments = max(steps.reserved, alone.reserved) - peaks.allocated
    return replace(peaks, fragments=max(0, fragments))


def extrapolated(few: Footprint, more: Footprint, times: float) -> Footprint:
    """Extrapolate linearly, kind by kind, by `times` the difference of two smaller models.

    With 3 GiB of weights at 2 layers and 3.5 at 3, a model of 32 layers has 3 + 30 x 0.5 = 18 GiB.
    """
    phases = {
        phase: {
            kind: round(few.phases[phase][kind] + times * (size - few.phases[phase][kind]))
            for kind, size in kinds.items()
        }
        for phase, kinds in more.phases.items()
    }
    on_host = {name: getattr(few, name) for name in ("pinned", "pageable")}
    on_host = {n: round(x + times * (getattr(more, n) - x)) for n, x in on_host.items()}
    grown = replace(more, phases=phases, **on_host)
    if not more.fragments:
        return grown
    # Of all layers another phase may be the highest: of fragments only what is not its share grows.
    beside = [each.fragments - FRAGMENTS * each.allocated for each in (few, more)]
    fragments = FRAGMENTS * grown.allocated + beside[0] + times * (beside[1] - beside[0])
    return replace(grown, fragments=max(0, round(fragments)))
