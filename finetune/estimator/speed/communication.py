"""Bytes that GPUs send each other in a step, the seconds they take, and how many show.

N GPUs in a ring pass on (N-1)/N of a buffer to gather it, or to reduce and scatter it, and twice
that to reduce it for everybody. The time is this over the speed of the slowest link, and a latency.
Collectives of one process group run one after the other, beside computing, so what costs time is
only what computing has to wait for. Both are walked through here in the order that torch issues
them:

* FSDP2, forward: group i+1 is gathered while i computes; it may begin when i has been gathered and
  the group before i has been copied out. Only the first gather has nothing to hide behind.
* FSDP2, backward: group i-1 is gathered from the start of i on. When i has computed, its gradients
  are reduced behind i-1, which cannot begin to send before they are through.
* DDP: buckets of 25 MiB (the first of 1 MiB) are reduced as their gradients come; the last one has
  nothing to hide behind.

Source: `_fsdp_param_group.py` of torch 2.13 (`unshard`, `wait_for_unshard`, `post_backward`),
`DistributedDataParallel`.

A collective gets a part of a link's stated speed: most of NVLink's, little of PCIe's where GPUs
cannot reach each other's memory and data goes through the host's. And what is hidden still costs:
kernels of NCCL take multiprocessors from computing, copies in and out of buffers its bandwidth. So
of communication half always shows (`Communication.added`), and more where it outlasts computing.

Limits: one machine. Between machines the network's speed rules, which is not in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.estimator.memory.sharding import Fsdp2
from finetune.units import MIB

# Seconds of a collective of a small buffer: assumed, of the order that nccl-tests report.
LATENCY_S = 30e-6
# Share of a link's stated speed that collectives get: chosen on published speeds of sharded
# training, below what NCCL's own tests reach alone (0.7 to 0.8 over NVLink). PCIe: GeForce cards,
# no peer access.
SHARE = {"nvlink": 0.35, "infinity-fabric": 0.35, "pcie": 0.10}
# Share of communication that a step is longer by although it could be hidden: chosen on the same.
SHOWN = 0.5


@dataclass(frozen=True)
class Communication:
    """Communication of one GPU in a step.

    Attributes:
        nbytes: bytes sent, which are as many as those received.
        seconds: that sending takes.
        exposed: seconds of these that computing waits for.
    """

    nbytes: int
    seconds: float
    exposed: float

    @property
    def added(self) -> float:
        """Seconds that the step is longer by."""
        return max(self.exposed, SHOWN * self.seconds)


def collective_gb_s(link: str, gb_s: float) -> float:
    """Speed that collectives get of a link's stated one, 10^9 bytes a second each way."""
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
    """Walk through a micro-batch under FSDP2.

    Two equal groups, the second kept gathered; gathers and reductions 2 s, forward 3, backward 6:
    forward starts after the first gather (2), computes until 5, and again until 8; in backward the
    first group is gathered behind the second (8 to 14), whose reduction (until 16) hides behind
    the first (until 20); the last reduction (until 22) has nothing to hide behind. Of 22 s, 18 are
    computing: 4 s are exposed.

    Args:
        model: groups in the order of forward.
        forward_s: seconds that each group computes in forward.
        backward_s: the same in backward, with what is computed again.
        gb_s: of the slowest link, 10^9 bytes a second each way, as collectives reach it.
        latency_s: of one collective.
        reduces: it is the last of a step: only then gradients are sent.

    Raises:
        ValueError: not one number for each group, or no link to send over.
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
    ready = [0.0] * count  # when the weights are there
    for i in reversed(range(count)):
        group = model.groups[i]
        if i == count - 1 and group.reshard:
            ready[i] = link.send(model.gathered_bytes(i), after=now)
        now = max(now, ready[i])
        if i and model.groups[i - 1].reshard:
            ready[i - 1] = link.send(model.gathered_bytes(i - 1), after=now)
        # Its gradients are copied where those of the group before may still be on their way.
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
    """Walk through a step under DDP: gradients come evenly over backward, sent bucket by bucket.

    Raises:
        ValueError: no link to send over.
    """
    link = _Link(gpus, gb_s, latency_s)
    done = 0
    while done < gradient_bytes:
        size = min(bucket_bytes if done else min(MIB, bucket_bytes), gradient_bytes - done)
        done += size
        link.reduce(2 * size, after=backward_s * done / gradient_bytes)
    return Communication(link.nbytes, link.seconds, max(0.0, link.reduced - backward_s))


class _Link:
    """Collectives of one process group, one after the other."""

    def __init__(self, gpus: int, gb_s: float, latency_s: float) -> None:
        if gb_s <= 0:
            raise ValueError(f"a link of {gb_s} GB/s")
        self.share = (gpus - 1) / gpus
        self.gb_s, self.latency_s = gb_s, latency_s
        self.free = self.reduced = self.seconds = 0.0
        self.nbytes = 0

    def send(self, buffer: int, *, after: float) -> float:
        """The time at which a gather or a reduction of a buffer is over."""
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
