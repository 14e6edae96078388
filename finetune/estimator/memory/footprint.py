"""What memory holds at its fullest, and who put it there: read off a tape.

A step has three phases with a peak each: at the end of forward stand the saved activations, in
backward comes a layer's recomputation or the logits' gradient on top, and in the optimizer's step
the activations are gone and all gradients are there. Before them, loading leaves the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from finetune.estimator.memory.allocator import replay_events
from finetune.estimator.memory.overheads import context_bytes, library_workspaces
from finetune.estimator.trace.trace import KINDS, Kind, Tape
from finetune.hardware.device import Device

PHASES = ("load", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a phase.

    Attributes:
        nbytes: alive then.
        kinds: of what, in bytes; every kind is named.
        owner: module that holds the most of what is neither weight, gradient nor state.
        owned: bytes of that.
        at: number of the event.
    """

    nbytes: int
    kinds: dict[Kind, int]
    owner: str
    owned: int
    at: int


@dataclass(frozen=True)
class Account:
    """The peaks of a step, by phase."""

    phases: dict[str, Peak]

    @property
    def highest(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: self.phases[phase].nbytes)

    @property
    def peak(self) -> Peak:
        """The fullest moment of all."""
        return self.phases[self.highest]


def account(tape: Tape) -> Account:
    """The peaks of a step that was rehearsed, from the mark `step` on."""
    start, back, end = (tape.marks[name] for name in ("step", "backward", "optimizer"))
    spans = {"forward": (start, back), "backward": (back, end), "optimizer": (end, None)}
    phases = {"load": _peak(tape, -1, tape.held_bytes)}
    for phase, (first, last) in spans.items():
        nbytes, at = tape.peak(first, last)
        phases[phase] = _peak(tape, at, nbytes)
    return Account(phases)


def _peak(tape: Tape, at: int, nbytes: int) -> Peak:
    kinds: Counter[Kind] = Counter(dict.fromkeys(KINDS, 0))
    owners: Counter[str] = Counter()
    for number in tape.alive(at):
        block = tape.blocks[number]
        kinds[block.kind] += block.nbytes
        if block.kind not in ("weights", "gradients", "optimizer"):
            owners[block.module] += block.nbytes
    owner, owned = owners.most_common(1)[0] if owners else ("", 0)
    return Peak(nbytes, dict(kinds), owner, owned, at)


# ------------------------------------------------------------------------------------------
# The memory of one device in a step: what its tensors hold, and what comes around them.
#
# Four figures, each larger than the one before:
#
#     allocated    tensors, with what libraries keep in the caching allocator for their workspaces
#     reserved     what the allocator has taken from the driver to serve them: segments, fragments
#     shown        reserved, the CUDA context and what NCCL holds: what `nvidia-smi` shows
#     needed       shown, and a margin: the larger of 3 % and 0.8 GB
#
# A GPU that is short of memory gives fragments back before it fails, so *allocated* decides
# whether a
# run can work at all, and *needed* whether to rely on it.


MARGIN_SHARE, MARGIN_BYTES = 0.03, 800_000_000
Fit = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device.

    Attributes:
        phases: phase of the step -> kind -> bytes at the phase's fullest moment.
        owner: module that holds the most of what is in passing, at the fullest moment of all.
        owned: bytes of that.
        workspaces: that libraries keep inside of the allocator.
        fragments: of what is reserved but not allocated.
        outside: of the allocator: the context, NCCL.
        about: fragments are a guess: not replayed whole.
        expandable: reserved with `expandable_segments:True`; None where it was not replayed.
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
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def kinds(self) -> dict[str, int]:
        """Kind -> bytes at the fullest moment."""
        return self.phases[self.highest]

    @property
    def tensors(self) -> int:
        """Peak of live tensors."""
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
        """What `nvidia-smi` would show."""
        return self.reserved + self.outside

    @property
    def margin(self) -> int:
        """Kept free, for what no estimate knows."""
        return max(int(MARGIN_SHARE * self.shown), MARGIN_BYTES)

    def in_expandable_segments(self) -> Footprint:
        """The same with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""
        if self.expandable is None:
            return self
        return replace(self, fragments=max(0, self.expandable - self.allocated))

    def fit(self, memory: int) -> Fit:
        """Whether it fits into so many bytes."""
        if self.allocated + self.outside > memory:
            return "does not fit"
        return "fits" if self.shown + self.margin <= memory else "tight"


def footprint(tape: Tape, device: Device) -> Footprint:
    """What a step that was rehearsed holds on one device, alone."""
    found = account(tape)
    phases = {
        phase: {str(kind): size for kind, size in peak.kinds.items()}
        for phase, peak in found.phases.items()
    }
    bare = Footprint(phases, found.peak.owner, found.peak.owned)
    if device.kind != "cuda" or device.capability is None:
        return bare
    workspaces = library_workspaces(device.capability)
    events = [
        *((f"weight {number}", size) for number, size in tape.held.items()),
        *((f"workspace {i}", size) for i, size in enumerate(workspaces)),
        *((_name(tape, event.storage), event.nbytes) for event in tape.events),
    ]
    replay = replay_events(events)
    return replace(
        bare,
        workspaces=sum(workspaces),
        fragments=max(0, replay.peak_reserved - bare.tensors - sum(workspaces)),
        outside=context_bytes(device.capability),
        expandable=replay_events(events, expandable=True).peak_reserved,
    )


def _name(tape: Tape, storage: int) -> str | int:
    return f"weight {storage}" if storage in tape.held else storage


def extrapolated(few: Footprint, more: Footprint, layers: tuple[int, int], to: int) -> Footprint:
    """The footprint of `to` layers from those of two smaller models: every kind is linear in them.

    Fragments are not. They grow more slowly than what is allocated, about as its square root; in
    expandable segments they do not grow. Both are guesses.
    """
    first, second = layers
    times = (to - first) / (second - first)
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
