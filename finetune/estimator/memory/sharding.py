"""Memory of one GPU when several train together: FSDP2 as Accelerate sets it up, or DDP.

*With `train.fsdp`* a GPU stores 1/N of weights, gradients and optimizer states at all times, and
the whole of a *group* of parameters (`finetune.estimator.trace.fsdp_groups`) while that group
computes. With G_i bytes of a group's weights, T_i of its gradients and R_i of these in the dtype of
the reduction, what is alive besides is, by the order of allocations in
`torch.distributed.fsdp._fully_shard` (the host runs ahead of the GPU, so kernel timing does not
matter to the allocator):

* forward of i: its weights in the buffer of the gather and in tensors copied out of it, **2 G_i**;
  of a head that a loss gathers itself, one tensor, and the buffer of the last layer,
  **G_i + G_(i-1)**.
* backward of i: the group before it is gathered ahead, **G_i + G_(i-1)**, the gradients so far, and
  **R_(i+1)**, still being reduced.
* backward leaves i: its weights and R_(i+1) are freed, and the gradients are copied to be reduced:
  **G_(i-1) + T_i + R_i**, of which R_i stays, and the reduced shard.

An example: 3 groups of 5 parameters on 5 GPUs, computing in 2 bytes, stored in 4. A GPU stores 12
bytes of weights, G = T = R = 10. Besides the 12 there are

    forward of 0 or 1     20        buffer and tensors
    backward enters 2     20        2 gathered, and 1 ahead
    backward leaves 2     30        1; gradients of 2, and their copy to be reduced
    in backward of 1      34        1 and 0; 10 being reduced; 4 of the shard of 2's gradients

A group with `reshard_after_forward=False` stays from its forward to its backward. With
`mixed_precision`, trainable parameters, their gradients and states are stored in float32, gathered
in the lower dtype, and reduced in float32 (`training.helper.patches`); frozen ones stay as they
are. Whole gradients, summed over several batches, are float32, and those of the last one come on
top.

The rest (activations, logits, temporaries) comes moment by moment from a rehearsal of one GPU with
weights in the gathered dtype. States that its optimizer made in that dtype count in float32.
Buffers (FP8 scales, rotary frequencies) are not sharded.

*Without it* (DDP) every GPU has everything, and its gradients a second time in communication
buckets (`reducer.cpp`; `gradient_as_bucket_view` is off in Accelerate).

Both add NCCL's buffers outside the allocator. Fragments are those of one GPU, and the excess of
gathered weights' own peak over their size at the total peak, since these are on another stream,
whose memory activations cannot use.

Sources: `_fsdp_param_group.py`, `_fsdp_collectives.py` and `_fsdp_state.py` of torch 2.13,
`fsdp2_prepare_model` of accelerate 1.15.

Limits: FSDP2 on one machine, no hybrid sharding, no CPU offload. Not counted: what is there for a
moment between two groups (the buffer before, casts of shards), and padding of a first dimension
that N does not divide. `finetune.estimator.limits` reports the other cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from finetune.config.schema import RunConfig
from finetune.config.sft import fsdp_settings
from finetune.errors import ConfigError
from finetune.estimator.memory.footprint import (
    LASTING,
    Footprint,
    footprint,
    on_gpu,
    tensor_footprint,
)
from finetune.estimator.memory.overheads import FLOAT32, nccl_bytes
from finetune.estimator.trace.fsdp_groups import Group, GroupVisit, Phase
from finetune.estimator.trace.rehearsal import Rehearsal
from finetune.estimator.trace.trace import KINDS
from finetune.hardware.gpus import Machine
from finetune.training.helper.compute_types import AUTOCAST


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
    """Peak memory of one GPU at a moment.

    Attributes:
        shards: bytes of sharded weights, gradients and optimizer states.
        gathered: bytes of gathered weights and communication buffers.
        whole: bytes of whole gradients.
    """

    shards: int
    gathered: int
    whole: int
    other: int

    @property
    def total(self) -> int:
        return self.shards + self.gathered + self.whole + self.other


@dataclass(frozen=True)
class Fsdp2:
    """A model sharded by `fully_shard`.

    Attributes:
        gpus: number of GPUs that share the model, at least 2.
        compute: bytes per element as gathered and computed with (`param_dtype`).
        stored: bytes per element of a trainable parameter's shard.
        reduce: bytes per element of a gradient as reduced and summed over batches.
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

    def find_peaks(
        self, moments: Iterable[Moment], optimizer_bytes: int = 0, *, accumulates: bool = False
    ) -> list[Peak]:
        """Peak memory of one GPU at each moment of a step.

        Args:
            moments: in order. The first, the last and the fullest of each visit to a group suffice.
            optimizer_bytes: states of the whole model, in the dtype in which shards are stored.
            accumulates: gradients of several batches are summed before the reduction (`no_sync`),
                so every GPU stores whole gradients.
        """
        steps = tuple(moments)
        # (phase, group) -> its last moment, at which the group is left.
        last = {moment[:2]: where for where, moment in enumerate(steps)}
        shards = self.weight_bytes() + optimizer_bytes // self.gpus
        # Whole gradients; those of the batches before are summed in the dtype of the reduction.
        whole = [group.trainable * self.reduce * accumulates for group in self.groups]
        summed = [size * (self.reduce != self.compute) for size in whole]
        there, left, order = set[int](), set[int](), list[int]()
        buffer = sent = 0
        peaks: list[Peak] = []
        for where, (phase, index, other, gradients) in enumerate(steps):
            group = self.groups[index]
            if phase == "forward" and index not in there:
                there.add(index)
                if group.called:  # else the buffer of the one before is still there
                    buffer = self.gathered_bytes(index)  # beside the tensors copied out of it
            elif phase == "backward":
                at = order.index(index)  # the one before it in forward is gathered ahead
                there |= {index, *order[max(at - 1, 0) : at]} - left
                whole[index] = max(whole[index], summed[index] + gradients)
            # FSDP has freed all gathers and buffers by then; the update runs on shards.
            elif phase == "optimizer":
                there, sent, other = set[int](), 0, other // self.gpus
            buffer *= phase == "forward"
            gathered = sum(map(self.gathered_bytes, there)) + buffer + sent
            peaks.append(Peak(shards, gathered, sum(whole), other))
            if last[phase, index] != where:
                continue
            if phase == "forward":
                order.append(index)
                there -= {index} if group.reshard else set()
            elif phase == "backward":
                there.discard(index)
                left.add(index)
                sent = group.trainable * self.reduce  # a copy of the gradients
                whole[index] = summed[index] or whole[index]
                gathered = sum(map(self.gathered_bytes, there)) + sent
                # The moment between two: weights of the group are freed, its gradients exist twice.
                leaving = Peak(shards, gathered, sum(whole), other)
                peaks[-1] = max(peaks[-1], leaving, key=lambda peak: peak.total)
                whole[index] = 0
                # The reduced shard of the gradient, which stays until the update.
                shards += group.trainable * self.stored // self.gpus
        return peaks


# ------------------------------------------------------------------------------ of a rehearsed step


def device_footprint(rehearsal: Rehearsal, config: RunConfig, machine: Machine) -> Footprint:
    """Memory of each device of a machine."""
    if shares_model(config, machine):
        return sharded_footprint(rehearsal, config, machine)
    alone = footprint(rehearsal.trace, machine.device)
    return alone if machine.count == 1 else _with_buckets(alone, rehearsal, machine)


def shares_model(config: RunConfig, machine: Machine) -> bool:
    """True if each GPU stores a part of the model. One process trains as without `train.fsdp`.

    Raises:
        ConfigError: on a CPU, where sharding is unsupported.
    """
    if not config.train.fsdp or machine.count < 2:
        return False
    if machine.device.kind == "cpu":
        raise ConfigError(
            f"train.fsdp was requested on {machine}",
            where="train.fsdp",
            why="accelerate shards on GPUs only",
            fix="--gpu NAME, or ~train.fsdp ~train.fsdp_config",
        )
    return True


def _with_buckets(alone: Footprint, rehearsal: Rehearsal, machine: Machine) -> Footprint:
    """Memory of each of several GPUs with a full copy of the model (DDP)."""
    buckets = rehearsal.groups.trainable_bytes
    phases = {
        phase: kinds | {"buckets": 0 if phase == "load" else buckets}
        for phase, kinds in alone.phases.items()
    }
    return replace(alone, phases=phases, outside=alone.outside + _nccl_bytes(machine))


def sharded_footprint(rehearsal: Rehearsal, config: RunConfig, machine: Machine) -> Footprint:
    """Memory of one of several GPUs that share a model, from a `sharded` rehearsal."""
    step = _ShardedStep(rehearsal, sharded_model(rehearsal, config, machine.count))
    peaks = step.model.find_peaks(
        step.moments, step.optimizer_bytes, accumulates=rehearsal.accumulates
    )
    phases = {"load": _kinds(Counter(weights=step.model.weight_bytes()) + step.constant)}
    for phase in ("forward", "backward", "optimizer"):
        own = [each for each in enumerate(peaks) if step.phases[each[0]] == phase]
        phases[phase] = step.kinds_at(*max(own, key=lambda pair: pair[1].total))
    alone = tensor_footprint(rehearsal.trace)
    bare = Footprint(phases, alone.owner, alone.owned)
    if machine.device.kind != "cuda" or machine.device.capability is None:
        return bare
    memory = on_gpu(bare, machine.device.capability)
    return replace(
        memory,
        fragments=memory.fragments + _unused_by_others(peaks),
        outside=memory.outside + _nccl_bytes(machine),
    )


def sharded_model(rehearsal: Rehearsal, config: RunConfig, gpus: int) -> Fsdp2:
    # `reshard_after_forward=false`: weights stay gathered from forward to backward.
    kept = not fsdp_settings(config.train).reshard
    groups = tuple(replace(g, reshard=False) if kept else g for g in rehearsal.groups.groups)
    trains = sum(group.trainable for group in groups)
    # Bytes a number as rehearsed, which is the dtype that FSDP gathers in.
    compute = round(rehearsal.groups.trainable_bytes / trains) if trains else FLOAT32
    # Under `mixed_precision` Accelerate (1.15) upcasts what trains, and its shards and states with
    # it.
    stored = FLOAT32 if AUTOCAST[config.precision.compute] is not None else compute
    return Fsdp2(groups, gpus, compute, stored=stored, reduce=stored)


class _ShardedStep:
    """Bytes of a rehearsed step besides weights, gradients and states, moment by moment.

    Attributes:
        moments: first, last and fullest moment of each visit to a group.
        events: event number of each moment, -1 before the first.
        phases: the footprint's phase of each moment: the loss is partly in backward.
        optimizer_bytes: optimizer states of the whole model as stored.
        constant: bytes by kind of what is whole on each GPU: buffers, a batch.
    """

    def __init__(self, rehearsal: Rehearsal, model: Fsdp2) -> None:
        self.trace, self.model, self.visits = rehearsal.trace, model, rehearsal.visits
        self.moments: list[Moment] = []
        self.events: list[int] = []
        self.phases: list[str] = []
        self.optimizer_bytes = self._other = 0
        self.constant = Counter[str]()
        for storage, nbytes in self.trace.initial.items():
            self.constant[self.trace.storages[storage].kind] += nbytes
        # What is left are buffers, which no group shards.
        self.constant["weights"] -= sum(map(model.gathered_bytes, range(len(model.groups))))
        for event in self.trace.events[: self.trace.marks["step"]]:
            size, kind = self._size(event.storage), self.trace.storages[event.storage].kind
            # Before the mark lies an earlier step, in which the optimizer made its states.
            change = size if event.nbytes > 0 else -size
            if kind == "optimizer":
                self.optimizer_bytes += change
            elif kind != "gradients" and event.storage not in self.trace.initial:
                self._other += change
        for visit, phase, end in self._spans():
            self._walk(visit, phase, end)

    def _spans(self) -> Iterator[tuple[GroupVisit, str, int]]:
        """Visits with the footprint's phase and their last event, split where a phase begins."""
        marks, start = self.trace.marks, self.trace.marks["step"]
        begins = {phase: marks[phase] for phase in ("backward", "optimizer")}
        ends = [visit.start for visit in self.visits[1:]] + [len(self.trace.events)]
        for visit, end in zip(self.visits, ends, strict=True):
            for until in sorted({*(at for at in begins.values() if start < at < end), end}):
                phase = next((p for p in reversed(begins) if start >= begins[p]), "forward")
                yield visit._replace(start=start), phase, until
                start = until

    def _walk(self, visit: GroupVisit, phase: str, end: int) -> None:
        made = 0  # gradients; they go when the optimizer has stepped
        seen = [(self._other, made, visit.start - 1)]
        for at in range(visit.start, end):
            storage, nbytes, _ = self.trace.events[at]
            kind = self.trace.storages[storage].kind
            if kind == "gradients":
                made += max(0, nbytes) if visit.phase == "backward" else 0
            elif kind != "optimizer" and storage not in self.trace.initial:
                self._other += self._size(storage) if nbytes > 0 else -self._size(storage)
            seen.append((self._other, made, at))
        for other, gradients, at in (seen[0], max(seen, key=lambda m: m[0] + m[1]), seen[-1]):
            self.moments.append(Moment(visit.phase, visit.group, other, gradients))
            self.events.append(at)
            self.phases.append(phase)

    def _size(self, storage: int) -> int:
        """Bytes of a storage; the optimizer's are converted to float32 weights."""
        block, model = self.trace.storages[storage], self.model
        low = block.dtype in (torch.bfloat16, torch.float16)
        if block.phase == "optimizer" and low and model.stored != model.compute:
            return block.nbytes * model.stored // model.compute
        return block.nbytes

    def kinds_at(self, where: int, peak: Peak) -> dict[str, int]:
        """Bytes by kind at a moment."""
        model, trace = self.model, self.trace
        states, weights = self.optimizer_bytes // model.gpus, model.weight_bytes()
        rest: Counter[str] = Counter()
        for storage in trace.alive(self.events[where]) - trace.initial.keys():
            if (kind := trace.storages[storage].kind) not in LASTING:
                rest[kind] += self._size(storage)
        if self.moments[where].phase == "optimizer":
            rest = Counter({kind: nbytes // model.gpus for kind, nbytes in rest.items()})
        rest["temporary"] += peak.other - sum(rest.values())
        gradients = peak.shards - weights - states + peak.whole
        rest.update(weights=weights, optimizer=states, gradients=gradients, gathered=peak.gathered)
        rest.update(self.constant)
        return _kinds(rest)


def _unused_by_others(peaks: Sequence[Peak]) -> int:
    """Bytes of the gathers' stream beyond what is gathered at the peak."""
    highest = max(peaks, key=lambda peak: peak.total)
    return max(p.gathered for p in peaks) - highest.gathered


def _kinds(sizes: Counter[str]) -> dict[str, int]:
    return dict.fromkeys((*KINDS, "gathered"), 0) | sizes


def _nccl_bytes(machine: Machine) -> int:
    if machine.device.kind != "cuda":
        return 0
    over_pcie = machine.gpu is not None and machine.gpu.link == "pcie"
    return nccl_bytes(machine.count, "pcie" if over_pcie else "nvlink")
