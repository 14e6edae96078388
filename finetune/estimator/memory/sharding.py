"""Memory of one GPU when several share a model by FSDP2, as Accelerate makes it.

FSDP2 cuts every parameter along its first dimension. A GPU holds 1/N of weights, gradients and
optimizer states at all times, and the whole of a *group* of parameters (an embedding, a decoder
layer, the head) while that group computes. What else is alive follows from the order in which
`torch.distributed.fsdp._fully_shard` asks for memory. (The host runs ahead of the GPU, so this
order, not the timing of kernels, is what the allocator sees.) With G_i bytes of a group's weights,
T_i of its gradients, and R_i of these in the dtype they are reduced in:

* forward enters i: it is gathered into one buffer, G_i, beside the buffer of the group before,
  which is freed then; and copied out into tensors, G_i more. The buffer stays until the next group
  has been gathered, so a group computes with **2 G_i**.
* backward enters i: the same, but the buffer is freed at once and the next group to come is
  gathered ahead into a buffer of its own: **G_i + G_(i-1)**, the gradients made so far, and
  **R_(i+1)**, what the group before is still sending.
* backward leaves i: its weights go, R_(i+1) goes, and the gradients are copied to be sent:
  **G_(i-1) + T_i + R_i**, of which R_i stays, and the reduced shard.

An example: 3 groups of 5 parameters on 5 GPUs, computing in 2 bytes, stored in 4. A GPU stores 12
bytes of weights, G = T = R = 10. Beside the 12 there are

    forward enters 0      20        buffer and tensors of 0
    forward enters 1      22        tensors and buffer of 1, the buffer of 0 until then, a cast of 2
    backward enters 2     20        2 is gathered, and 1 ahead of it
    backward leaves 2     30        1; gradients of 2, and their copy to be sent
    in backward of 1      34        1 and 0; 10 being sent; 4 of the shard of 2's gradients

A group that is kept (`reshard_after_forward=False`) stays from its forward to its backward.
Accelerate 1.15 makes a group of the input embedding, one of each decoder layer, and one of the
final norm and the head, which it keeps; tied embeddings are of the head's group, and so kept all
along, and their gradient is reduced last. With `mixed_precision` it stores trainable parameters,
their gradients and states in float32, and gathers and reduces in the lower dtype; frozen ones stay
as they are.

The rest (activations, logits, temporaries) is what one GPU has for a batch of its own: that of a
trace of the model with weights in the dtype that is computed in, as `Moment`s.

Sources: `_fsdp_param_group.py`, `_fsdp_collectives.py` and `_fsdp_state.py` of torch 2.13,
`fsdp2_prepare_model` of accelerate 1.15.

Limits: no hybrid sharding, no CPU offload. A first dimension that N does not divide is padded, and
the padding not counted. The buffers are made on streams of their own, whose memory the caching
allocator does not mix, so reserved is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Phase = Literal["forward", "loss", "backward", "optimizer"]


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together.

    Attributes:
        name: module, for messages.
        frozen: bytes of its frozen parameters as they are gathered.
        trainable: elements of its trainable parameters.
        reshard: freed after forward and gathered again for backward.
        stored: bytes of its frozen parameters as they are stored; None where that is `frozen`.
            Codes and what has the dtype of computing are gathered as they are stored.
    """

    name: str
    frozen: int = 0
    trainable: int = 0
    reshard: bool = True
    stored: int | None = None

    @property
    def frozen_stored(self) -> int:
        """Bytes of its frozen parameters as they are stored."""
        return self.frozen if self.stored is None else self.stored


class Moment(NamedTuple):
    """A moment of one GPU's step: bytes alive except for weights and what follows from them.

    Attributes:
        phase: phase of the step. `loss` is what lies between the end of the model's forward and the
            first backward of a group.
        group: index of the group that computes; not looked at in `loss` and `optimizer`.
        other: bytes alive that are no weight, gradient or optimizer state. In `optimizer` the
            temporaries of the update of the whole model, which are divided among the GPUs.
        gradients: bytes of the gradients of this group's parameters made so far.
    """

    phase: Phase
    group: int
    other: int
    gradients: int = 0


@dataclass(frozen=True)
class Peak:
    """The most bytes that one GPU holds.

    Attributes:
        total: all of them.
        moment: index of the moment it falls on.
        shards: bytes of it that are sharded weights, gradients and optimizer states.
        gathered: bytes of gathered weights, buffers of communication and whole gradients.
        other: bytes of the rest.
        whole: of `gathered`, bytes of whole gradients.
    """

    total: int
    moment: int
    shards: int
    gathered: int
    other: int
    whole: int = 0


@dataclass(frozen=True)
class Fsdp2:
    """A model sharded by `fully_shard`.

    Attributes:
        groups: of parameters.
        gpus: that share it, at least 2.
        compute: bytes of an element as it is gathered and computed with (`param_dtype`).
        stored: bytes of an element of a trainable parameter's shard.
        reduce: bytes of an element of a gradient as it is reduced.
    """

    groups: tuple[Group, ...]
    gpus: int
    compute: int = 2
    stored: int = 4
    reduce: int = 2

    def gathered_bytes(self, index: int) -> int:
        """Bytes of a whole group, as it is computed with."""
        group = self.groups[index]
        return group.frozen + group.trainable * self.compute

    def weight_bytes(self) -> int:
        """Bytes of the shards of all weights on one GPU."""
        stored = sum(group.frozen_stored + group.trainable * self.stored for group in self.groups)
        return stored // self.gpus

    def gradient_bytes(self) -> int:
        """Bytes of the shards of all gradients on one GPU."""
        return sum(group.trainable for group in self.groups) * self.stored // self.gpus

    def find_peaks(
        self, moments: Iterable[Moment], optimizer_bytes: int = 0, *, accumulates: bool = False
    ) -> list[Peak]:
        """The most that one GPU holds at each moment of a step.

        Args:
            moments: of the step, in order. Enough are the first and the last one of each visit to
                a group, and the one with the most `other` and `gradients` of it.
            optimizer_bytes: states of the whole model, as they are stored for its shards.
            accumulates: gradients of several batches are added up before they are reduced
                (`no_sync`): whole ones, on every GPU.

        Raises:
            ValueError: no moments, or one of a group that there is not.
        """
        step = tuple(moments)
        for where, moment in enumerate(step):
            if not 0 <= moment.group < len(self.groups):
                raise ValueError(f"moment {where} is of group {moment.group} of {len(self.groups)}")
        if not step:
            raise ValueError("a step has at least one moment")
        run = _Step(self, step, optimizer_bytes, accumulates)
        for where in range(len(step)):
            run.enter(where)
        run.leave(len(step) - 1)
        return [run.peaks[where] for where in range(len(step))]


class _Step:
    """FSDP's own memory while it walks through the moments."""

    def __init__(
        self, model: Fsdp2, moments: Sequence[Moment], optimizer_bytes: int, accumulates: bool
    ) -> None:
        self.model = model
        self.moments = moments
        self.peaks: dict[int, Peak] = {}
        self.steady = model.weight_bytes() + optimizer_bytes // model.gpus
        self.whole: set[int] = set()  # groups whose weights are there
        self.ahead: dict[int, int] = {}  # gathered ahead, by group
        self.buffer = 0  # of the last gather of forward
        self.sending = 0
        self.reduced = 0
        # Whole gradients, of batches before and of this one.
        sizes = (group.trainable * model.compute * accumulates for group in model.groups)
        self.pending = dict(enumerate(sizes))
        self.order: list[int] = []  # in which groups ended forward
        self.last = {(moment.phase, moment.group): i for i, moment in enumerate(moments)}
        self.begun: set[int] = set()  # groups whose backward has begun

    def enter(self, where: int) -> None:
        """Proceed to a moment."""
        moment = self.moments[where]
        before = self.moments[where - 1] if where else None
        if before is None or before[:2] != moment[:2]:
            if before is not None:
                self.leave(where - 1)
            if before is not None and before.phase != moment.phase:
                self.buffer = 0  # dropped at the end of the outermost forward
                if moment.phase == "optimizer":
                    self.sending = 0
                    self.ahead.clear()
                    self.whole.clear()
            if moment.phase == "forward":
                self._gather(where)
            elif moment.phase == "backward" and moment.group not in self.begun:
                self._gather(where)
                self.begun.add(moment.group)
                self._gather_ahead(where)
        if moment.phase == "backward":
            self.pending[moment.group] = max(self.pending[moment.group], moment.gradients)
        self._record(where)

    def leave(self, where: int) -> None:
        """Free and reduce after the last moment of a visit."""
        moment = self.moments[where]
        index = moment.group
        group = self.model.groups[index]
        if moment.phase in ("loss", "optimizer") or self.last[moment.phase, index] != where:
            return
        if moment.phase == "forward":
            self.order.append(index)
            if group.reshard:
                self.whole.discard(index)
            return
        self.whole.discard(index)
        self.sending = group.trainable * self.model.reduce
        self._record(where)  # the gradients, and their copy
        self.pending[index] = 0
        self.reduced += group.trainable * self.model.stored // self.model.gpus
        unreduced = self.sending // self.model.gpus if self.model.stored != self.model.reduce else 0
        self._record(where, unreduced)

    def _gather(self, where: int) -> None:
        phase, index = self.moments[where][:2]
        if index in self.whole:
            return
        size = self.model.gathered_bytes(index)
        buffer = self.ahead.pop(index, None)
        if buffer is None:
            self._record(where, size + self._cast(index))
        if phase == "forward":
            self.buffer = 0
        self.whole.add(index)
        self._record(where, size)
        if phase == "forward":
            self.buffer = size

    def _gather_ahead(self, where: int) -> None:
        before = self.order.index(self.moments[where].group) - 1
        if before < 0 or self.order[before] in self.whole:
            return
        index = self.order[before]
        self.ahead[index] = self.model.gathered_bytes(index)
        self._record(where, self._cast(index))

    def _cast(self, index: int) -> int:
        """Bytes of the shard of a group in the dtype of computing, made to be gathered."""
        if self.model.stored == self.model.compute:
            return 0
        return self.model.groups[index].trainable * self.model.compute // self.model.gpus

    def _record(self, where: int, more: int = 0) -> None:
        """Keep the peak of this moment: the bytes alive now, and `more` temporary ones."""
        moment = self.moments[where]
        gathered = sum(map(self.model.gathered_bytes, self.whole)) + sum(self.ahead.values())
        whole = sum(self.pending.values())
        gathered += self.buffer + self.sending + whole + more
        other = moment.other
        if moment.phase == "optimizer":
            other //= self.model.gpus
        shards = self.steady + self.reduced
        total = shards + gathered + other
        if where not in self.peaks or total > self.peaks[where].total:
            self.peaks[where] = Peak(total, where, shards, gathered, other, whole)


def accelerate_groups(
    embedding: Group, layers: Sequence[Group], head: Group, *, tied: bool
) -> tuple[Group, ...]:
    """Groups as Accelerate 1.15 makes them.

    Args:
        embedding: input embedding.
        layers: decoder layers.
        head: final norm and output embedding; of tied embeddings the norm alone.
        tied: both embeddings are one parameter. Then group 0 is of embedding, norm and head, and
            is visited twice in forward and in backward.
    """
    if not tied:
        return (embedding, *layers, replace(head, reshard=False))
    frozen, trainable = embedding.frozen + head.frozen, embedding.trainable + head.trainable
    stored = embedding.frozen_stored + head.frozen_stored
    return (Group(embedding.name, frozen, trainable, reshard=False, stored=stored), *layers)
