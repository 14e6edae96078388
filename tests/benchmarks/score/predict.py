"""From a job to bytes: tensors alive, memory reserved, and whether a GPU holds it.

*Allocated* needs only a few layers (`peaks`). *Reserved* needs all of them, in order: the whole
tape goes through the model of PyTorch's allocator. What FSDP gathers is allocated on a stream of
its own, so from a pool of its own, and the two are added. A run dies when what is reserved, plus
the CUDA context outside of it, is more than the GPU has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from finetune.estimator.memory.allocator import replay_events
from finetune.estimator.memory.overheads import context_bytes, nccl_bytes
from finetune.estimator.trace.trace import Tape
from finetune.hardware.gpus import Gpu
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.peaks import allocated_peak
from tests.benchmarks.score.simulate import record_step


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one job, in bytes.

    Attributes:
        nbytes: of the kind of memory that was measured.
        where: stretch of the step in which the peak is, or the kind of reasoning.
    """

    nbytes: int
    where: str


def _replayed(tape: Tape, numbers: set[int], *, gathered: bool) -> int:
    events = [(n, b) for n, b in tape.held.items() if b and (n in numbers) == gathered]
    events += [
        (e.storage, e.nbytes)
        for e in tape.events
        if e.nbytes and (e.storage in numbers) == gathered
    ]
    return replay_events(events).peak_reserved


@lru_cache(maxsize=1024)
def reserved_peak(job: Job) -> int:
    """Bytes that PyTorch's allocator takes from the driver in a steady step of `job`."""
    tape, gathered = record_step(job)
    return _replayed(tape, gathered, gathered=False) + _replayed(tape, gathered, gathered=True)


def predict(job: Job, kind: str) -> Prediction:
    """The memory of `kind` (`allocated` or `reserved`) that `job` takes."""
    if kind == "allocated":
        peak = allocated_peak(job)
        return Prediction(peak.nbytes, peak.where)
    return Prediction(reserved_peak(job), "allocator")


def runs_out_of_memory(job: Job, gpu: Gpu) -> Prediction | None:
    """What the job would reserve when a GPU cannot hold it, None when it can."""
    outside = context_bytes(gpu.capability)
    if job.gpus > 1:
        outside += nccl_bytes(job.gpus, "nvlink")
    room = int(gpu.memory_gib * 2**30) - outside
    tensors = allocated_peak(job).nbytes
    if tensors > room:
        return Prediction(tensors, "tensors alone")
    if tensors < 0.6 * room:
        return None
    reserved = reserved_peak(job)
    return Prediction(reserved, "reserved") if reserved > room else None
