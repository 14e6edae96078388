"""One GPU's memory when several train together: what a rehearsal saw on one, laid over the shards.

*With `train.fsdp`* every GPU holds 1/N of weights, gradients and optimizer states and gathers the
weights of a group of layers while it computes (`finetune.estimator.memory.sharding`). A rehearsal
whose
weights have the type that they are gathered in tells the rest: activations, logits and temporaries
of a batch of its own, moment by moment. Accelerate holds what trains in float32, so what the
rehearsed optimizer made in the lower type counts in float32. Buffers (scales of FP8 codes, rotary
frequencies) are not sharded.

*Without it* (DDP) every GPU holds everything, and its gradients a second time in the buckets in
which they are sent.

Both hold NCCL's buffers, outside of the allocator. The allocator's fragments are an estimate here:
those of activations as one GPU has them, and what gathered weights have at most beside what they
have at the peak, since their memory is of another stream and not lent to activations.

Limits: FSDP2 alone, on one machine; see `finetune.estimator.caveats` for what is told of the
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from finetune.config.fsdp import fsdp_settings
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError, PrecisionError
from finetune.estimator.memory.allocator import replay_events
from finetune.estimator.memory.footprint import Footprint, account, footprint
from finetune.estimator.memory.overheads import Link, context_bytes, library_workspaces, nccl_bytes
from finetune.estimator.memory.sharding import Fsdp2, Moment, Peak, ddp_buckets
from finetune.estimator.place import Place
from finetune.estimator.trace.fsdp_groups import Visit
from finetune.estimator.trace.rehearsal import GATHERED_AS, Rehearsal
from finetune.estimator.trace.trace import KINDS, Tape

FLOAT32 = 4


def shares_model(config: RunConfig, place: Place) -> bool:
    """Whether GPUs hold a part of the model each. One process trains as without `train.fsdp`.

    Raises:
        ConfigError: on a CPU, where nothing shards.
        PrecisionError: held FP8 copies of weights, which are gathered anew.
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


def sharded_model(rehearsal: Rehearsal, config: RunConfig, gpus: int) -> Fsdp2:
    """The rehearsed model as GPUs share it."""
    kept = not fsdp_settings(config.train).reshard
    groups = tuple(replace(g, reshard=False) if kept else g for g in rehearsal.groups.groups)
    trains = sum(group.trainable for group in groups)
    compute = round(rehearsal.groups.trainable_bytes / trains) if trains else FLOAT32
    mixed = GATHERED_AS[config.precision.compute] is not None
    return Fsdp2(groups, gpus, compute, held=FLOAT32 if mixed else compute, reduce=compute)


@dataclass(frozen=True)
class Course:
    """What a rehearsed step holds besides weights, gradients and states, moment by moment.

    Attributes:
        moments: of the step.
        events: number of the event of each moment, -1 before the first.
        phases: of the footprint, of each moment: the loss is partly of backward.
        states: bytes of optimizer states, as they are held for the whole model.
        constant: bytes of buffers and batches.
    """

    moments: tuple[Moment, ...]
    events: tuple[int, ...]
    phases: tuple[str, ...]
    states: int
    constant: int


def course_of(rehearsal: Rehearsal, model: Fsdp2) -> Course:
    """Moments of a rehearsed step: of each visit the first, the last and the fullest."""
    tape, start = rehearsal.tape, rehearsal.tape.marks["step"]
    weights = sum(g.frozen + g.trainable * model.compute for g in model.groups)
    states = other = 0
    for event in tape.events[:start]:
        size, kind = _size(tape, event.storage, model), tape.blocks[event.storage].kind
        change = size if event.nbytes > 0 else -size
        if kind == "optimizer":
            states += change
        elif kind != "gradients" and event.storage not in tape.held:
            other += change
    moments: list[Moment] = []
    events: list[int] = []
    phases: list[str] = []
    for visit, phase, end in _spans(rehearsal):
        gradients = 0
        seen = [(other, 0, visit.start - 1)]
        for at in range(visit.start, end):
            storage, nbytes, _ = tape.events[at]
            kind = tape.blocks[storage].kind
            if kind == "gradients":  # they go when the optimizer has stepped
                gradients += max(0, nbytes) if visit.phase == "backward" else 0
            elif kind != "optimizer" and storage not in tape.held:
                size = _size(tape, storage, model)
                other += size if nbytes > 0 else -size
            seen.append((other, gradients, at))
        for held, made, at in (seen[0], max(seen, key=lambda m: m[0] + m[1]), seen[-1]):
            moments.append(Moment(visit.phase, visit.group, held, made))
            events.append(at)
            phases.append(phase)
    constant = tape.held_bytes - weights
    return Course(tuple(moments), tuple(events), tuple(phases), states, constant)


def _spans(rehearsal: Rehearsal) -> Iterator[tuple[Visit, str, int]]:
    """Visits with the footprint's phase and the event they end at, divided where a phase begins."""
    tape = rehearsal.tape
    ends = [visit.start for visit in rehearsal.visits[1:]] + [len(tape.events)]
    begins = {phase: tape.marks[phase] for phase in ("backward", "optimizer")}
    start = tape.marks["step"]
    for visit, end in zip(rehearsal.visits, ends, strict=True):
        for until in sorted({*(at for at in begins.values() if start < at < end), end}):
            phase = next((p for p in reversed(begins) if start >= begins[p]), "forward")
            yield replace(visit, start=start), phase, until
            start = until


def _size(tape: Tape, storage: int, model: Fsdp2) -> int:
    """Bytes of a storage; of the optimizer's as it has them for float32 weights."""
    block = tape.blocks[storage]
    low = block.dtype in (torch.bfloat16, torch.float16)
    if block.phase == "optimizer" and low and model.held != model.compute:
        return block.nbytes * model.held // model.compute
    return block.nbytes


def sharded_footprint(rehearsal: Rehearsal, config: RunConfig, place: Place) -> Footprint:
    """What one GPU holds of a model that several share, from a `sharded` rehearsal."""
    tape, model = rehearsal.tape, sharded_model(rehearsal, config, place.count)
    course = course_of(rehearsal, model)
    peaks = model.find_peaks(course.moments, course.states, accumulates=rehearsal.accumulates)
    phases = {"load": _kinds(weights=model.weight_bytes() + course.constant)}
    for phase in ("forward", "backward", "optimizer"):
        own = [p for p, name in zip(peaks, course.phases, strict=True) if name == phase]
        phases[phase] = _phase(tape, model, course, max(own, key=lambda peak: peak.total))
    alone = account(tape).peak
    bare = Footprint(phases, alone.owner, alone.owned)
    if place.device.kind != "cuda" or place.device.capability is None:
        return bare
    workspaces = sum(library_workspaces(place.device.capability))
    return replace(
        bare,
        workspaces=workspaces,
        fragments=_fragments(tape, course, peaks),
        outside=context_bytes(place.device.capability) + _nccl(place),
    )


def _phase(tape: Tape, model: Fsdp2, course: Course, peak: Peak) -> dict[str, int]:
    """Kinds at the peak of a phase; they add up to it."""
    states, weights = course.states // model.gpus, model.weight_bytes()
    rest: Counter[str] = Counter()
    for storage in tape.alive(course.events[peak.moment]) - tape.held.keys():
        kind = tape.blocks[storage].kind
        if kind not in ("weights", "gradients", "optimizer"):
            rest[kind] += _size(tape, storage, model)
    if course.moments[peak.moment].phase == "optimizer":
        rest = Counter({kind: nbytes // model.gpus for kind, nbytes in rest.items()})
    rest["temporary"] += peak.other - sum(rest.values())
    return _kinds(
        **rest,
        weights=weights + course.constant,
        optimizer=states,
        gradients=peak.shards - weights - states + peak.whole,
        gathered=peak.gathered - peak.whole,
    )


def _kinds(**sizes: int) -> dict[str, int]:
    return dict.fromkeys((*KINDS, "gathered"), 0) | sizes


def _fragments(tape: Tape, course: Course, peaks: Sequence[Peak]) -> int:
    """Bytes reserved beyond those allocated, about."""
    kinds = {number: block.kind for number, block in tape.blocks.items()}
    rest = [
        event
        for event in tape.events[tape.marks["step"] :]
        if kinds[event.storage] not in ("weights", "gradients", "optimizer")
    ]
    born = {event.storage for event in rest if event.nbytes > 0}
    replay = replay_events((e.storage, e.nbytes) for e in rest if e.storage in born)
    highest = max(peaks, key=lambda peak: peak.total)
    fullest = max(moment.other for moment in course.moments if moment.phase != "optimizer")
    streams = max(p.gathered - p.whole for p in peaks) - (highest.gathered - highest.whole)
    return max(0, replay.peak_reserved - fullest) + max(0, streams)


def copied_footprint(rehearsal: Rehearsal, place: Place) -> Footprint:
    """What each of several GPUs holds that have a copy of the model each."""
    alone = footprint(rehearsal.tape, place.device)
    sent = ddp_buckets(rehearsal.groups.trainable_bytes, gpus=place.count)
    phases = {
        phase: kinds | {"buckets": 0 if phase == "load" else sent}
        for phase, kinds in alone.phases.items()
    }
    expandable = None if alone.expandable is None else alone.expandable + sent
    return replace(
        alone, phases=phases, outside=alone.outside + _nccl(place), expandable=expandable
    )


def _nccl(place: Place) -> int:
    if place.device.kind != "cuda":
        return 0
    link: Link = "pcie" if place.gpu is not None and place.gpu.link == "pcie" else "nvlink"
    return nccl_bytes(place.count, link)


def held_by_one(rehearsal: Rehearsal, config: RunConfig, place: Place) -> Footprint:
    """What one of the devices of a place holds."""
    if place.count == 1:
        return footprint(rehearsal.tape, place.device)
    if shares_model(config, place):
        return sharded_footprint(rehearsal, config, place)
    return copied_footprint(rehearsal, place)
