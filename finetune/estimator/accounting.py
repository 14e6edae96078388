"""What memory holds at its fullest, and who put it there: read off a tape.

A step has three phases with a peak each: at the end of forward stand the saved activations, in
backward comes a layer's recomputation or the logits' gradient on top, and in the optimizer's step
the activations are gone and all gradients are there. Before them, loading leaves the weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from finetune.estimator.tape import KINDS, Kind, Tape

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
