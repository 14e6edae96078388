"""Memory of one GPU when several train together: the rehearsal of one GPU plus sharding.

*With `train.fsdp`* every GPU stores 1/N of weights, gradients and optimizer states and gathers the
weights of a group of layers while it computes (`finetune.estimator.memory.sharding`). A rehearsal
with weights in the gathered dtype gives activations, logits and temporaries moment by moment.
Accelerate stores trainable parameters in float32, so states that the rehearsed optimizer made in
the lower dtype count in float32. Buffers (FP8 scales, rotary frequencies) are not sharded.

*Without it* (DDP) every GPU has everything, and its gradients a second time in communication
buckets (`reducer.cpp`; `gradient_as_bucket_view` is off in Accelerate).

Both add NCCL's buffers outside the allocator. Fragments are an estimate: those of activations as on
one GPU, plus the excess of gathered weights' own peak over their size at the total peak, since they
are on another stream, whose memory activations cannot use.

Limits: FSDP2 on one machine only; `finetune.estimator.caveats` reports the other cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from finetune.config.schema import RunConfig
from finetune.config.sft import fsdp_settings
from finetune.errors import ConfigError, PrecisionError
from finetune.estimator.memory.allocator import replay_events
from finetune.estimator.memory.footprint import LASTING, Footprint, footprint, tensor_footprint
from finetune.estimator.memory.overheads import context_bytes, library_workspaces, nccl_bytes
from finetune.estimator.memory.sharding import Fsdp2, Moment, Peak
from finetune.estimator.place import Place
from finetune.estimator.trace.fsdp_groups import GroupVisit
from finetune.estimator.trace.rehearsal import GATHERED_AS, Rehearsal
from finetune.estimator.trace.trace import KINDS

FLOAT32 = 4


def device_footprint(rehearsal: Rehearsal, config: RunConfig, place: Place) -> Footprint:
    """Memory of each device of a place."""
    if place.count == 1:
        return footprint(rehearsal.trace, place.device)
    if shares_model(config, place):
        return sharded_footprint(rehearsal, config, place)
    return copied_footprint(rehearsal, place)


def shares_model(config: RunConfig, place: Place) -> bool:
    """True if each GPU stores a part of the model. One process trains as without `train.fsdp`.

    Raises:
        ConfigError: on a CPU, where sharding is unsupported.
        PrecisionError: stored FP8 copies of weights, which are gathered anew.
    """
    if not config.train.get("fsdp") or place.count < 2:
        return False
    if place.device.kind == "cpu":
        raise ConfigError(
            f"train.fsdp was asked on {place}",
            where="train.fsdp",
            why="accelerate shards on GPUs only",
            fix="--gpu NAME, or ~train.fsdp ~train.fsdp_config",
        )
    if config.precision.fp8_params:
        raise PrecisionError(
            "fp8_params with FSDP is not supported",
            where="precision.fp8_params=true",
            why="FSDP gathers each weight anew for every use, so there is nothing to hold",
            fix="~precision.fp8_params; or use DDP",
        )
    return True


def copied_footprint(rehearsal: Rehearsal, place: Place) -> Footprint:
    """Memory of each of several GPUs with a full copy of the model (DDP)."""
    alone = footprint(rehearsal.trace, place.device)
    buckets = rehearsal.groups.trainable_bytes
    phases = {
        phase: kinds | {"buckets": 0 if phase == "load" else buckets}
        for phase, kinds in alone.phases.items()
    }
    expandable = None if alone.expandable is None else alone.expandable + buckets
    outside = alone.outside + _nccl_bytes(place)
    return replace(alone, phases=phases, outside=outside, expandable=expandable)


def sharded_footprint(rehearsal: Rehearsal, config: RunConfig, place: Place) -> Footprint:
    """Memory of one of several GPUs that share a model, from a `sharded` rehearsal."""
    step = _ShardedStep(rehearsal, sharded_model(rehearsal, config, place.count))
    peaks = step.model.find_peaks(
        step.moments, step.optimizer_bytes, accumulates=rehearsal.accumulates
    )
    phases = {"load": _kinds(weights=step.model.weight_bytes() + step.constant)}
    for phase in ("forward", "backward", "optimizer"):
        own = [peak for peak, name in zip(peaks, step.phases, strict=True) if name == phase]
        phases[phase] = step.kinds_at(max(own, key=lambda peak: peak.total))
    alone = tensor_footprint(rehearsal.trace)
    bare = Footprint(phases, alone.owner, alone.owned)
    if place.device.kind != "cuda" or place.device.capability is None:
        return bare
    return replace(
        bare,
        workspaces=sum(library_workspaces(place.device.capability)),
        fragments=step.fragments(peaks),
        outside=context_bytes(place.device.capability) + _nccl_bytes(place),
    )


def sharded_model(rehearsal: Rehearsal, config: RunConfig, gpus: int) -> Fsdp2:
    kept = not fsdp_settings(config.train).reshard
    groups = tuple(replace(g, reshard=False) if kept else g for g in rehearsal.groups.groups)
    trains = sum(group.trainable for group in groups)
    compute = round(rehearsal.groups.trainable_bytes / trains) if trains else FLOAT32
    mixed = GATHERED_AS[config.precision.compute] is not None
    return Fsdp2(groups, gpus, compute, stored=FLOAT32 if mixed else compute, reduce=compute)


class _ShardedStep:
    """Bytes of a rehearsed step besides weights, gradients and states, moment by moment.

    Attributes:
        moments: first, last and fullest moment of each visit to a group.
        events: event number of each moment, -1 before the first.
        phases: the footprint's phase of each moment: the loss is partly in backward.
        optimizer_bytes: optimizer states of the whole model as stored.
        constant: bytes of buffers and batches.
    """

    def __init__(self, rehearsal: Rehearsal, model: Fsdp2) -> None:
        self.trace, self.model, self.visits = rehearsal.trace, model, rehearsal.visits
        self.moments: list[Moment] = []
        self.events: list[int] = []
        self.phases: list[str] = []
        self.optimizer_bytes = self._other = 0
        weights = sum(g.frozen + g.trainable * model.compute for g in model.groups)
        self.constant = self.trace.initial_bytes - weights
        for event in self.trace.events[: self.trace.marks["step"]]:
            size, kind = self._size(event.storage), self.trace.storages[event.storage].kind
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

    def kinds_at(self, peak: Peak) -> dict[str, int]:
        model, trace = self.model, self.trace
        states, weights = self.optimizer_bytes // model.gpus, model.weight_bytes()
        rest: Counter[str] = Counter()
        for storage in trace.alive(self.events[peak.moment]) - trace.initial.keys():
            if (kind := trace.storages[storage].kind) not in LASTING:
                rest[kind] += self._size(storage)
        if self.moments[peak.moment].phase == "optimizer":
            rest = Counter({kind: nbytes // model.gpus for kind, nbytes in rest.items()})
        rest["temporary"] += peak.other - sum(rest.values())
        return _kinds(
            **rest,
            weights=weights + self.constant,
            optimizer=states,
            gradients=peak.shards - weights - states + peak.whole,
            gathered=peak.gathered - peak.whole,
        )

    def fragments(self, peaks: Sequence[Peak]) -> int:
        """Approximate bytes reserved beyond those allocated."""
        trace = self.trace
        step = trace.events[trace.marks["step"] :]
        rest = [event for event in step if trace.storages[event.storage].kind not in LASTING]
        born = {event.storage for event in rest if event.nbytes > 0}
        replay = replay_events(event for event in rest if event.storage in born)
        highest = max(peaks, key=lambda peak: peak.total)
        fullest = max(moment.other for moment in self.moments if moment.phase != "optimizer")
        streams = max(p.gathered - p.whole for p in peaks) - (highest.gathered - highest.whole)
        return max(0, replay.peak_reserved - fullest) + max(0, streams)


def _kinds(**sizes: int) -> dict[str, int]:
    return dict.fromkeys((*KINDS, "gathered"), 0) | sizes


def _nccl_bytes(place: Place) -> int:
    if place.device.kind != "cuda":
        return 0
    over_pcie = place.gpu is not None and place.gpu.link == "pcie"
    return nccl_bytes(place.count, "pcie" if over_pcie else "nvlink")
