"""Time of weights that train in host memory: the bus, the CPU, and what the GPU computes meanwhile.

    backward    gradients go down, and for a sum come up first, behind what backward computes; the
                last one, of the embeddings, has nothing left to hide behind
    update      norm, then weight by weight, on the CPU; each goes up while the next is updated
    forward     waits for the weights that are not there yet

    step = micro-batches x (forward + max(backward, bus) + last gradient)
           + norm + max(update, bus) + casts

`OVERLAPS` says whether the update runs behind the next forward: then a step waits for what forward
does not hide. PCIe carries `BUS` of what it states, in both directions at once, but a sum's two
transfers follow each other. An update of few-bit states takes `UPDATE_NS` of a core for each number
(`docs/notes/16-updates-in-host-memory.md`); everything else there goes by bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from finetune.estimator.speed.operators import base_name
from finetune.estimator.trace.trace import Op, Trace
from finetune.hardware.gpus import Gpu, HostCpu

OVERLAPS = False
"""True once the update of a step runs behind the forward of the next."""
BUS = 0.8
"""Fraction of the stated speed of PCIe that pinned transfers reach: assumed, as 25 of 31.5 GB/s."""
UPDATE_NS = 7.5
"""Nanoseconds of a virtual core for a number of `adamw_host`, norm left out, casts in.

As 16 of them, an H100's host, took 4.0 to 4.4 s for norm, update and codes of 8.03e9 numbers (note
17), the one measurement beside a GPU; two real cores alone take 2.9 (note 16).
"""
Way = Literal["gpu", "up", "down", "cpu"]


class Hosted(NamedTuple):
    """Seconds and bytes of one optimizer step outside of the GPU's own work.

    Attributes:
        down, up: bytes of a micro-batch's gradients, and of the sums before them.
        last: bytes of the last gradient.
        raised: bytes of updated weights.
        norm, update: seconds of the CPU.
        forward, backward: seconds that the GPU computes in a micro-batch.
        batches: micro-batches.
        bus: bytes a second of PCIe, one way.
    """

    down: float
    up: float
    last: float
    raised: float
    norm: float
    update: float
    forward: float
    backward: float
    batches: float
    bus: float

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes down and up in a step."""
        return self.batches * self.down, (self.batches - 1) * self.up + self.raised

    @property
    def waits(self) -> float:
        """Seconds that the GPU waits for the bus in a step, beside those of norm and update."""
        first, others = (self._of_one(up) for up in (0.0, self.up))
        behind = self.update + (self.forward if OVERLAPS else 0.0)
        return first + (self.batches - 1) * others + max(0.0, self.raised / self.bus - behind)

    @property
    def on_cpu(self) -> float:
        """Seconds that the GPU waits for the CPU in a step."""
        return self.norm + max(0.0, self.update - (self.forward if OVERLAPS else 0.0))

    @property
    def gained(self) -> float:
        """Seconds of a step that an update behind the next forward saves, or would."""
        return min(self.forward, self.update)

    def hides_from(self, tokens: int) -> float:
        """Tokens of a micro-batch whose backward hides all transfers but the last.

        Args:
            tokens: of a step.
        """
        sums = self.up if self.batches > 1 else 0.0
        return tokens / self.batches * (self.down + sums) / self.bus / self.backward

    def facts(self, tokens: int) -> dict[str, float]:
        return {
            "bytes_down": self.moved[0],
            "bytes_up": self.moved[1],
            "waited_for_bus": self.waits,
            "norm_seconds": self.norm,
            "update_seconds": self.update,
            "waited_for_cpu": self.on_cpu,
            "saved_if_update_overlaps": self.gained,
            "micro_batch_tokens_that_hide": self.hides_from(tokens),
        }

    def _of_one(self, up: float) -> float:
        last = self.last * (2 if up else 1)
        return max((self.down + up) / self.bus - self.backward, last / self.bus)

    def extrapolated(self, more: Hosted, times: float) -> Hosted:
        """Extrapolate to a model with `times` the layers that `more` has beyond this one's."""
        return Hosted._make(a + times * (b - a) for a, b in zip(self, more, strict=True))


def ways(ops: Sequence[Op], trace: Trace) -> list[Way]:
    """Where each operator runs, or which way it moves what it copies."""
    return [_way(op, trace) for op in ops]


def _way(op: Op, trace: Trace) -> Way:
    memories = [trace.storages[x.storage].memory for x in op.inputs if x.storage in trace.storages]
    if all(memory == "device" for memory in memories):
        return "gpu"
    name = base_name(op)
    if name == "to_device" or (name == "copy_" and memories[0] == "device"):
        return "up"
    return "down" if name == "copy_" and "device" in memories else "cpu"


def hosted(
    micro: Sequence[Op],
    update: Sequence[Op],
    trace: Trace,
    gpu: Gpu,
    host: HostCpu,
    batches: int,
    computed: tuple[float, float],
) -> Hosted:
    """What one step does in host memory, where masters are.

    Args:
        micro, update: operators of a micro-batch, and those once in a step.
        computed: seconds of forward and backward of a micro-batch.
    """

    def moved(ops: Sequence[Op], way: Way) -> list[float]:
        return [op.inputs[-1].nbytes for op, its in zip(ops, ways(ops, trace), strict=True)
                if its == way]  # fmt: skip

    down = moved(micro, "down")
    done = [op for op, way in zip(update, ways(update, trace), strict=True) if way == "cpu"]
    norms = [op for op in done if base_name(op) in _NORMS]
    seconds = [sum(_on_cpu(op, host) for op in ops) for ops in (norms, done)]
    bus = BUS * (gpu.pcie_gb_s or gpu.link_gb_s) * 1e9
    return Hosted(
        sum(down), sum(moved(micro, "up")), down[-1], sum(moved(update, "up")),
        seconds[0], seconds[1] - seconds[0], *computed, batches, bus,
    )  # fmt: skip


_NORMS = ("squares", "linalg_vector_norm")


def _on_cpu(op: Op, host: HostCpu) -> float:
    """Seconds of one operator in host memory."""
    seconds = sum(x.nbytes for x in (*op.inputs, *op.outputs)) / (host.gb_s * 1e9)
    if base_name(op) != "update":
        return seconds
    # Its results are its operands after the gradient, which are read and written.
    written = sum(x.nbytes for x in op.inputs[1:]) / (host.gb_s * 1e9)
    return max(seconds + written, math.prod(op.inputs[0].shape) * UPDATE_NS * 1e-9 / host.cores)
