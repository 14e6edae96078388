"""Communication of a step: bytes sent between GPUs, their time, and its overlap with computation.

In a ring of N GPUs each sends (N-1)/N of a buffer for an all-gather or a reduce-scatter and twice
that for an all-reduce; time = bytes / speed of the slowest link + latency. Collectives of a process
group run one after the other, overlapping computation, and are simulated in torch's order:

* FSDP2, forward: group i+1 is gathered while i computes, once i has been gathered and group i-1
  copied out. Only the first all-gather is fully exposed.
* FSDP2, backward: group i-1 is gathered from the start of i on. The gradients of i are reduced
  during i-1, whose own reduction starts only after that.
* DDP: buckets of 25 MiB (the first of 1 MiB) are reduced as gradients arrive; the last is exposed.

Source: `_fsdp_param_group.py` of torch 2.13 (`unshard`, `wait_for_unshard`, `post_backward`),
`DistributedDataParallel`.

Collectives reach a fraction of the link's nominal speed, a small one over PCIe without peer access
(data passes through host memory). Overlapped communication is not free either: NCCL kernels occupy
multiprocessors, copies use bandwidth. So at least half of it is added to the step
(`Communication.added`).

Limits: a single machine; networks between machines are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.estimator.memory.sharding import Fsdp2
from finetune.units import MIB

# Seconds of a collective on a small buffer: assumed, of the order that nccl-tests report.
LATENCY_S = 30e-6
# Fraction of a link's nominal speed: fitted to published speeds of sharded training, below the 0.7
# to 0.8 of nccl-tests over NVLink. PCIe: GeForce cards, no peer access.
SHARE = {"nvlink": 0.35, "infinity-fabric": 0.35, "pcie": 0.10}
# Fraction of communication that always adds to the step: fitted to the same speeds.
SHOWN = 0.5


@dataclass(frozen=True)
class Communication:
    """Communication of one GPU in a step: bytes sent, and seconds of all collectives.

    `exposed` is the part of `seconds` during which computation waits.
    """

    nbytes: int
    seconds: float
    exposed: float

    @property
    def added(self) -> float:
        return max(self.exposed, SHOWN * self.seconds)


def collective_gb_s(link: str, gb_s: float) -> float:
    """GB/s per direction that collectives reach on a link of nominal speed `gb_s`."""
    return SHARE[link] * gb_s


def fsdp2_communication(
    model: Fsdp2,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    gb_s: float,
    latency_s: float = LATENCY_S,
    reduces: bool = True,
) -> Communication:
    """Simulate a micro-batch under FSDP2.

    Two equal groups, the second kept gathered; gathers and reductions 2 s, forward 3, backward 6:
    forward starts after the first gather (2) and computes until 5 and 8; in backward the first
    group is gathered during the second (8 to 14), whose reduction (until 16) overlaps the first
    (until 20); the last reduction (until 22) is exposed. Of 22 s, 18 are computation: 4 s exposed.

    Args:
        model: Groups in forward order.
        forward_s: Computation of each group in forward.
        backward_s: Computation of each group in backward, recomputation included.
        gb_s: Speed of the slowest link per direction (`collective_gb_s`).
        reduces: True for the last micro-batch of a step, which reduces gradients.

    Raises:
        ValueError: not one time per group, or `gb_s` is not positive.
    """
    count = len(model.groups)
    if len(forward_s) != count or len(backward_s) != count:
        raise ValueError(f"{count} groups, {len(forward_s)} and {len(backward_s)} times of them")
    link = _Link(model.gpus, gb_s, latency_s)
    started = [0.0] * count
    now = 0.0
    for i in range(count):
        gathered = link.send(model.gathered_bytes(i), after=started[i - 2] if i > 1 else 0.0)
        started[i] = max(now, gathered)
        now = started[i] + forward_s[i]
    ready = [0.0] * count  # when the weights are gathered
    for i in reversed(range(count)):
        group = model.groups[i]
        if i == count - 1 and group.reshard:
            ready[i] = link.send(model.gathered_bytes(i), after=now)
        now = max(now, ready[i])
        if i and model.groups[i - 1].reshard:
            ready[i - 1] = link.send(model.gathered_bytes(i - 1), after=now)
        # The gradients go into a buffer that the previous reduction may still be reading.
        now = max(now + backward_s[i], link.reduced)
        if reduces:
            link.reduce(group.trainable * model.reduce, after=now)
    now = max(now, link.reduced)
    return Communication(link.nbytes, link.seconds, now - sum(forward_s) - sum(backward_s))


def ddp_communication(
    gradient_bytes: int,
    backward_s: float,
    *,
    gpus: int,
    gb_s: float,
    latency_s: float = LATENCY_S,
    bucket_bytes: int = 25 * MIB,
) -> Communication:
    """Simulate DDP, with gradients arriving evenly over backward; ValueError unless `gb_s` > 0."""
    link = _Link(gpus, gb_s, latency_s)
    done = 0
    while done < gradient_bytes:
        size = min(bucket_bytes if done else min(MIB, bucket_bytes), gradient_bytes - done)
        done += size
        link.reduce(2 * size, after=backward_s * done / gradient_bytes)
    return Communication(link.nbytes, link.seconds, max(0.0, link.reduced - backward_s))


class _Link:
    def __init__(self, gpus: int, gb_s: float, latency_s: float) -> None:
        if gb_s <= 0:
            raise ValueError(f"a link of {gb_s} GB/s")
        self.share = (gpus - 1) / gpus
        self.gb_s, self.latency_s = gb_s, latency_s
        self.free = self.reduced = self.seconds = 0.0
        self.nbytes = 0

    def send(self, buffer: int, *, after: float) -> float:
        """End time of an all-gather or reduce-scatter of a buffer."""
        if not buffer or not self.share:
            return after
        sent = round(buffer * self.share)
        took = self.latency_s + sent / (self.gb_s * 1e9)
        self.nbytes += sent
        self.seconds += took
        self.free = max(self.free, after) + took
        return self.free

    def reduce(self, buffer: int, *, after: float) -> None:
        self.reduced = max(self.reduced, self.send(buffer, after=after))
