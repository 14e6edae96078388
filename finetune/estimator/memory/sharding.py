"""Memory of one GPU when several share a model by FSDP2, as Accelerate sets it up.

FSDP2 shards every parameter along its first dimension. A GPU stores 1/N of weights, gradients and
optimizer states at all times, and the whole of a *group* of parameters (an embedding, a decoder
layer, the head) while that group computes. What else is alive follows from the order of the
allocations in `torch.distributed.fsdp._fully_shard` (the host runs ahead of the GPU, so kernel
timing does not matter to the allocator). With G_i bytes of a group's weights, T_i of its gradients
and R_i of these in the dtype of the reduction:

* forward enters i: it is gathered into one buffer, G_i, beside the buffer of the previous group,
  which is then freed; and copied out into tensors, G_i more. The buffer stays until the next
  gather, so a group computes with **2 G_i**.
* backward enters i: the same, but the buffer is freed at once and the next group is prefetched into
  a buffer of its own: **G_i + G_(i-1)**, the gradients so far, and **R_(i+1)**, still being
  reduced.
* backward leaves i: its weights and R_(i+1) are freed, and the gradients are copied to be reduced:
  **G_(i-1) + T_i + R_i**, of which R_i stays, and the reduced shard.

An example: 3 groups of 5 parameters on 5 GPUs, computing in 2 bytes, stored in 4. A GPU stores 12
bytes of weights, G = T = R = 10. Besides the 12 there are

    forward enters 0      20        buffer and tensors of 0
    forward enters 1      22        tensors and buffer of 1, the buffer of 0 until then, a cast of 2
    backward enters 2     20        2 gathered, 1 prefetched
    backward leaves 2     30        1; gradients of 2, and their copy to be reduced
    in backward of 1      34        1 and 0; 10 being reduced; 4 of the shard of 2's gradients

A group with `reshard_after_forward=False` stays from its forward to its backward. Accelerate 1.15
makes one group of the input embedding, one per decoder layer, and one of the final norm and the
head, which it does not reshard; tied embeddings belong to the head's group, so they are never freed
and their gradient is reduced last. With `mixed_precision`, trainable parameters, their gradients
and states are stored in float32, and gathered and reduced in the lower dtype; frozen ones stay as
they are.

The rest (activations, logits, temporaries) comes from a single-GPU trace of the model with weights
in the compute dtype, as `Moment`s.

Sources: `_fsdp_param_group.py`, `_fsdp_collectives.py` and `_fsdp_state.py` of torch 2.13,
`fsdp2_prepare_model` of accelerate 1.15.

Limits: no hybrid sharding, no CPU offload; padding of a first dimension that N does not divide is
not counted. Buffers are allocated on streams of their own, whose memory the caching allocator does
not share, so reserved is higher.
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
        name: module name, for messages.
        frozen: bytes of its frozen parameters as gathered.
        trainable: number of trainable elements.
        reshard: freed after forward and gathered again for backward.
        stored: bytes of its frozen parameters as stored; None if equal to `frozen`, as for codes
            and parameters in the compute dtype.
    """

    name: str
    frozen: int = 0
    trainable: int = 0
    reshard: bool = True
    stored: int | None = None

    @property
    def frozen_stored(self) -> int:
        """Bytes of the frozen parameters as stored."""
        return self.frozen if self.stored is None else self.stored


class Moment(NamedTuple):
    """Bytes alive on one GPU at a moment of the step, besides weights and FSDP's own memory.

    Attributes:
        phase: phase of the step. `loss` lies between the end of the model's forward and the first
            backward of a group.
        group: index of the computing group; ignored in `loss` and `optimizer`.
        other: bytes that are no weight, gradient or optimizer state. In `optimizer`, temporaries of
            the update of the whole model, which are divided among the GPUs.
        gradients: bytes of the gradients of this group's parameters so far.
    """

    phase: Phase
    group: int
    other: int
    gradients: int = 0


@dataclass(frozen=True)
class Peak:
    """Peak memory of one GPU.

    Attributes:
        moment: index of the moment of the peak.
        shards: bytes of sharded weights, gradients and optimizer states.
        gathered: bytes of gathered weights, communication buffers and whole gradients.
        whole: bytes of whole gradients, part of `gathered`.
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
        gpus: number of GPUs that share the model, at least 2.
        compute: bytes per element as gathered and computed with (`param_dtype`).
        stored: bytes per element of a trainable parameter's shard.
        reduce: bytes per element of a gradient as reduced.
    """

    groups: tuple[Group, ...]
    gpus: int
    compute: int = 2
    stored: int = 4
    reduce: int = 2

    def gathered_bytes(self, index: int) -> int:
        """Bytes of a whole group in the compute dtype."""
        group = self.groups[index]
        return group.frozen + group.trainable * self.compute

    def weight_bytes(self) -> int:
        """Bytes of all weight shards on one GPU."""
        stored = sum(group.frozen_stored + group.trainable * self.stored for group in self.groups)
        return stored // self.gpus

    def gradient_bytes(self) -> int:
        """Bytes of all gradient shards on one GPU."""
        return sum(group.trainable for group in self.groups) * self.stored // self.gpus

    def find_peaks(
        self, moments: Iterable[Moment], optimizer_bytes: int = 0, *, accumulates: bool = False
    ) -> list[Peak]:
        """Peak memory of one GPU at each moment of a step.

        Args:
            moments: in order. The first, the last and the fullest of each visit to a group suffice.
            optimizer_bytes: states of the whole model, in the dtype in which shards are stored.
            accumulates: gradients of several batches are summed before the reduction (`no_sync`),
                so every GPU stores whole gradients.

        Raises:
            ValueError: no moments, or a moment of an unknown group.
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
    """FSDP's own memory along the moments."""

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
        """Bytes of a group's shard cast to the compute dtype before the gather."""
        if self.model.stored == self.model.compute:
            return 0
        return self.model.groups[index].trainable * self.model.compute // self.model.gpus

    def _record(self, where: int, more: int = 0) -> None:
        """Record the peak of this moment: the bytes alive now plus `more` temporary ones."""
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
        head: final norm and output embedding; with tied embeddings the norm alone.
        tied: both embeddings are one parameter. Group 0 then has embedding, norm and head, and is
            visited twice in forward and in backward.
    """
    if not tied:
        return (embedding, *layers, replace(head, reshard=False))
    frozen, trainable = embedding.frozen + head.frozen, embedding.trainable + head.trainable
    stored = embedding.frozen_stored + head.frozen_stored
    return (Group(embedding.name, frozen, trainable, reshard=False, stored=stored), *layers)
