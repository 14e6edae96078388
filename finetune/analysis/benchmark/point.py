"""The process that measures one point: `python -m finetune.analysis.benchmark.point`, a job on its
stdin.

It prints a JSON object a line, in this order, of which the last is missing where it crashed:

    {"kind": "forecast", ...}   memory and time as the estimator predicts them, before anything runs
    {"kind": "result", ...}     or "skipped" (far too large), or "failed" (the reason)

Each point has a process of its own because memory that an earlier one has fragmented, a compiler's
caches and a clock that has got warm are what makes benchmarks disagree; and because an end by the
system's hand, which no exception tells, must not be the end of all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from finetune.analysis.benchmark.by_hand import Movement, NoSession, Shipped
from finetune.analysis.benchmark.clock import StepClock
from finetune.analysis.benchmark.grid import WARM_UP, Job
from finetune.config.schema import BUILTIN, ModelConfig
from finetune.config.sft import sft_config
from finetune.errors import ConfigError, FinetuneError, MemoryShortError
from finetune.estimator.gate import here
from finetune.estimator.measure import check_sizes, measure_well
from finetune.hardware.device import GIB, Device, available_gib, this_device, version
from finetune.hardware.gpus import find_gpu
from finetune.hardware.requirements import has_liger
from finetune.logging import quiet_libraries
from finetune.runs.receipt import Receipt
from finetune.training import compute_types, session
from finetune.training.data import random_rows
from finetune.training.health.monitor import HealthMonitor
from finetune.training.health.speed import mfu, work_of
from finetune.training.memory_meter import MemoryMeter
from finetune.training.model import load_tokenizer
from finetune.training.preflight import preflight
from finetune.training.session import LIBRARIES, Session
from finetune.training.trainer import make_trainer

FAR = 1.25
"""A GPU is tried although it may be too small, up to this many times its memory: the prediction
may be wrong. The memory of a host is not: what does not fit there takes the machine down."""
Emit = Callable[[dict[str, Any]], None]


def measure_point(job: Job, emit: Emit) -> None:
    """Predict, train and measure a point; what came of it goes to `emit`, line by line."""
    device = this_device()
    try:
        job = _with_liger(job, device)
        check_sizes(job.config)
        if job.foretell:
            foretold = foretell(job, device)
            emit({"kind": "forecast", **foretold})
            if not job.force and (why := _too_large(foretold, device)):
                emit({"kind": "skipped", "error": f"skipped: {why}; --force tries it"})
                return
        emit({"kind": "result", **train_point(job, device)})
    except FinetuneError as error:
        short = isinstance(error, MemoryShortError)
        why = f"{error.what}: {error.why}" if error.why else error.what
        emit({"kind": "failed", "error": why, "out_of_memory": short})
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        emit({"kind": "failed", "error": _first_line(error), "out_of_memory": True})


def _is_out_of_memory(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        "out of memory" in said or "alloc_failed" in said or "allocate memory" in said
    )


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"out of memory: {line}" if line else "out of memory"


# --------------------------------------------------------------------------------- before it trains


def _with_liger(job: Job, device: Device) -> Job:
    """The job with Liger's kernels, where it wants them and they can run.

    Raises:
        ConfigError: it needs them, and they cannot.
    """
    if not job.liger:
        return job
    verdict = has_liger(device)
    if verdict:
        config = job.config.model_copy(
            update={"train": {**job.config.train, "use_liger_kernel": True}}
        )
        return dataclasses.replace(job, config=config)
    if job.liger == "needed":
        raise ConfigError(f"not run: {verdict.reason}")
    note = f"without Liger: {verdict.reason}"
    return dataclasses.replace(job, note=f"{job.note}; {note}" if job.note else note)


def foretell(job: Job, device: Device) -> dict[str, Any]:
    """What the estimator expects of this point here: GiB, seconds; or why it expects nothing."""
    if job.how == "shipped":
        return {"why": "accelerate's own conversion is not modelled"}
    try:
        found = measure_well(job.config, here(device))
    except FinetuneError as error:
        return {"why": f"not predicted: {error.what}"}
    held, pace = found.footprint, found.pace
    values: dict[str, Any] = {
        "allocated_gib": held.allocated / GIB,
        "needed_gib": (held.allocated + held.outside) / GIB,
        "step_seconds": None if pace is None else pace.seconds,
    }
    if device.kind == "cuda":
        values["reserved_gib"] = held.reserved / GIB
    if pace is None:
        values["why"] = f"the speed of {device.name} is not known (`estimate --calibrate`)"
    return values


def _too_large(foretold: dict[str, Any], device: Device) -> str:
    """Why a point is not tried; empty where it is."""
    needed = foretold.get("needed_gib", 0.0)
    if device.kind == "cuda":
        there, limit = f"{device.memory_gib:.1f} GiB", FAR * device.memory_gib
    else:
        limit = available_gib(device)
        there = f"{limit:.1f} GiB free"
    if needed <= limit:
        return ""
    return f"predicted to hold {needed:.1f} GiB, and {device.name} has {there}"


# ------------------------------------------------------------------------------------------- train


def _rows(job: Job) -> Any:
    """As many as the steps take, each seen once."""
    count, rest = divmod((WARM_UP + job.steps) * job.tokens, job.point.length)
    assert not rest, job.point
    return random_rows(job.config.model, count, job.point.length, job.round)


@contextmanager
def _session(job: Job) -> Iterator[Session | None]:
    if job.how != "finetune":
        yield None
        return
    running = session.install(job.config.precision)
    try:
        yield running
    finally:
        session.uninstall()


def train_point(job: Job, device: Device) -> dict[str, Any]:
    """Train warm-up and timed steps as the recipe trains, and read the instruments.

    Raises:
        FinetuneError: what the run itself would raise.
    """
    from accelerate import PartialState
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    config = job.config
    ahead = preflight(config, device, force=True)
    PartialState(cpu=device.kind == "cpu")
    tokenizer, _ = load_tokenizer(ModelConfig(name=f"{BUILTIN}tiny_llama"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args = sft_config(config, folder, {}, on_cpu=device.kind == "cpu")
        running = stack.enter_context(_session(job))
        clock, movement = StepClock(device.kind), Movement()
        meter = MemoryMeter(running or cast(Session, NoSession(device)))
        stack.callback(meter.close)
        set_seed(args.seed)
        trainer = make_trainer(
            config,
            args,
            train=_rows(job),
            held_out=None,
            tokenizer=tokenizer,
            held=ahead.plan.held if running else (),
            callbacks=[meter, clock] if running else [meter, clock, movement],
            kind=Shipped if job.how == "shipped" else None,
        )
        if running is not None:
            monitor = HealthMonitor(trainer, say=Console(stderr=True).print)
            trainer.add_callback(monitor)
            stack.callback(monitor.close)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.train()
        receipt = running.receipt() if running else None
        label = running.resolution.label if running else _LABELS[job.how]
    _check_batch(job, meter)
    memory = meter.reading()
    return {
        "seconds": clock.seconds(WARM_UP),
        "precision": label,
        **(_facts(receipt) if receipt else {"proven": movement.status}),
        **(_work(receipt, job, device) if receipt else {}),
        "allocated_gib": memory["measured_gib"],
        "reserved_gib": memory.get("reserved_gib"),
        "memory": memory["measured"],
        "note": job.note,
        "environment": environment_of(device),
    }


_LABELS = {"stock": "BF16, stock", "shipped": "FP8, as shipped"}


def _facts(receipt: Receipt) -> dict[str, Any]:
    told = receipt.precision
    return {
        "proven": receipt.status,
        "backend": told["backend"],
        "scaling": told["scaling"],
        "compile": told["compile"],
        "fp8_share": receipt.fp8_flop_share,
    }


def _work(receipt: Receipt, job: Job, device: Device) -> dict[str, Any]:
    """FLOPs of a step as the witness saw them, and the seconds they take at the GPU's peak."""
    work = work_of(receipt.layers, job.point.tokens)
    steps = job.tokens / job.point.tokens
    found: dict[str, Any] = {"tflop": sum(work.flops.values()) * steps / 1e12}
    gpu = find_gpu(device) if device.kind == "cuda" else None
    if gpu is None or "emulated" in receipt.precision["backend"]:
        return found
    tf32 = compute_types.in_force()["cuda.matmul"] == "tf32"
    return found | {"peak_seconds": mfu(work, job.tokens, 1.0, gpu, tf32=tf32)}


def _check_batch(job: Job, meter: MemoryMeter) -> None:
    """A micro-batch of other tokens than were asked for would be another point."""
    if meter.batch is None:
        return
    rows, length, padded = meter.batch
    if padded or rows * length != job.point.tokens:
        raise ConfigError(
            f"a micro-batch had {rows} x {length} tokens{', padded' if padded else ''}",
            why=f"{job.point.tokens} were asked for, and tokens/s would be wrong",
        )


def environment_of(device: Device) -> dict[str, Any]:
    """What the figures depend on besides the recipe."""
    return {
        "versions": {name: v for name in LIBRARIES if (v := version(name))},
        "device": {
            "kind": device.kind,
            "name": device.name,
            "memory_gib": round(device.memory_gib, 1),
        },
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Read a job, print lines; everything else that is printed goes to stderr."""
    quiet_libraries()
    job = Job.from_json(sys.stdin.readline())
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def emit(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        measure_point(job, emit)


if __name__ == "__main__":
    main()
