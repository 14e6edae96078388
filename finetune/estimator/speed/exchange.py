"""The time of a step when several GPUs train together: computing, and what it waits for.

*With `train.fsdp`* every micro-batch gathers the weights of each group in forward and again in
backward; the last of a step also reduces the gradients. The update is of a GPU's own shards, in the
type in which they are held. *Without it* the gradients of the last micro-batch are summed.

What hides behind what needs seconds by group. Decoder layers are taken as equal; what is outside of
them is of the embedding and the head, as the operators say.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from finetune.config.schema import RunConfig
from finetune.estimator.memory.sharded import sharded_model, shares_model
from finetune.estimator.memory.sharding import Fsdp2
from finetune.estimator.place import Place
from finetune.estimator.speed.communication import (
    collective_gb_s,
    ddp_communication,
    fsdp2_communication,
)
from finetune.estimator.speed.roofline import step_time
from finetune.estimator.speed.timing import Pace, pace
from finetune.estimator.trace.rehearsal import Rehearsal
from finetune.estimator.trace.trace import Op, Operand, Tape
from finetune.hardware.gpus import Gpu

_IN_A_LAYER = re.compile(r"\.\d+(\.|$)")


def micro_batches(config: RunConfig) -> int:
    """Forward and backward passes of an optimizer step."""
    return int(config.train.get("gradient_accumulation_steps", 1))


def pace_of_one(
    rehearsal: Rehearsal, config: RunConfig, place: Place, *, compiled: bool
) -> Pace | None:
    """How fast one of a place's devices goes through a step, with what it waits for."""
    batches = micro_batches(config)
    if place.count == 1 or place.gpu is None:
        return pace(rehearsal, place, micro_batches=batches, compiled=compiled)
    gb_s = collective_gb_s(place.gpu.link, place.gpu.link_gb_s)
    if not shares_model(config, place):
        gradients = rehearsal.groups.trainable_bytes

        def summed(_: float, backward_s: float) -> float:
            return ddp_communication(gradients, backward_s, gpus=place.count, gb_s=gb_s).added

        return pace(rehearsal, place, micro_batches=batches, compiled=compiled, exposed=summed)
    model = sharded_model(rehearsal, config, place.count)
    outside = _outside(rehearsal, place.gpu)

    def waited(forward_s: float, backward_s: float) -> float:
        parts = [
            _by_group(model, seconds, min(own, seconds))
            for seconds, own in zip((forward_s, backward_s), outside, strict=True)
        ]
        last, other = (
            fsdp2_communication(model, *parts, gb_s=gb_s, reduces=reduces).added
            for reduces in (True, False)
        )
        return last + (batches - 1) * other

    shared = replace(rehearsal, tape=_update_of_shards(rehearsal.tape, model))
    return pace(shared, place, micro_batches=batches, compiled=compiled, exposed=waited)


def _outside(rehearsal: Rehearsal, gpu: Gpu) -> tuple[float, float]:
    """Seconds of forward and of backward that are outside of decoder layers."""
    update = len(rehearsal.tape.since("optimizer"))
    ops = rehearsal.tape.since("step")
    beside = [op for op in ops[: len(ops) - update] if not _IN_A_LAYER.search(op.module)]
    parts = ([op for op in beside if (op.phase == "forward") == here] for here in (True, False))
    forward_s, backward_s = (step_time(part, gpu).seconds for part in parts)
    return forward_s, backward_s


def _by_group(model: Fsdp2, seconds: float, outside: float) -> list[float]:
    """Seconds of each group: the head is last, or first where embeddings are tied."""
    count = len(model.groups)
    tied = not model.groups[0].reshard and (count == 1 or model.groups[-1].name != "head")
    layers = count - (1 if tied else 2)
    each = [(seconds - outside) / layers] * layers if layers else []
    rest = outside if layers else seconds
    return [rest, *each] if tied else [0.0, *each, rest]


def _update_of_shards(tape: Tape, model: Fsdp2) -> Tape:
    """The tape with an update of one GPU's shards: a part of each first dimension."""
    first = len(tape.ops) - len(tape.since("optimizer"))
    wider = model.held != model.compute

    def part(operand: Operand) -> Operand:
        if not operand.shape:
            return operand
        rows = math.ceil(operand.shape[0] / model.gpus)
        low = operand.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if wider and low else operand.dtype
        shape = (rows, *operand.shape[1:])
        return Operand(operand.storage, shape, dtype, math.prod(shape) * dtype.itemsize)

    def sharded(op: Op) -> Op:
        return op._replace(inputs=tuple(map(part, op.inputs)), outputs=tuple(map(part, op.outputs)))

    return replace(tape, ops=[*tape.ops[:first], *map(sharded, tape.ops[first:])])
