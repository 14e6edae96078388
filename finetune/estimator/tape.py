"""A tape of what a program allocated, freed and launched, in order.

`finetune.estimator.recorder` writes it; memory and time are read off it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

Phase = Literal["forward", "recompute", "backward", "optimizer", "load", "other"]
Kind = Literal["weights", "fp8", "gradients", "optimizer", "saved", "logits", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Operand(NamedTuple):
    """A tensor as an operator met it; `nbytes` is of its elements, not of its storage."""

    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Op(NamedTuple):
    """An operator that did something: not a view.

    Attributes:
        name: `aten.mm.default`.
        inputs, outputs: its tensors.
        phase: of the step.
        module: full name of the innermost module that ran it; in backward, of the module whose
            saved tensor it read last.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    phase: Phase
    module: str


class Event(NamedTuple):
    """A storage was allocated (`nbytes` > 0) or freed (< 0) before operator number `at` ended."""

    storage: int
    nbytes: int
    at: int


@dataclass(slots=True)
class Block:
    """One storage.

    Attributes:
        nbytes: its size.
        phase, module: where it was born.
        kind: what it turned out to be, see the module.
        saved: it lived when a backward began.
    """

    nbytes: int
    phase: Phase
    module: str
    dtype: torch.dtype
    op: str = ""
    kind: Kind = "temporary"
    saved: bool = False


@dataclass
class Tape:
    """What was written down.

    Attributes:
        ops: operators in order.
        events: allocations and frees in order; those of `held` are not among them.
        blocks: storage number -> what it is.
        held: storages that were there before, number -> bytes.
        marks: name -> index into `events` when it was marked.
    """

    ops: list[Op] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Bytes that were there before the first event."""
        return sum(self.held.values())

    def peak(self, start: int = 0, end: int | None = None) -> tuple[int, int]:
        """The most bytes alive in `events[start:end]`, and the event after which."""
        alive = self.held_bytes + sum(e.nbytes for e in self.events[:start])
        most, at = alive, start - 1
        for i, event in enumerate(self.events[start:end], start):
            alive += event.nbytes
            if alive > most:
                most, at = alive, i
        return most, at

    def since(self, mark: str) -> list[Op]:
        """Operators after a mark."""
        place = self.marks[mark]
        return self.ops[self.events[place].at if place < len(self.events) else len(self.ops) :]

    def alive(self, at: int) -> set[int]:
        """Storages alive after event number `at`."""
        living = set(self.held)
        for event in self.events[: at + 1]:
            (living.add if event.nbytes > 0 else living.discard)(event.storage)
        return living
