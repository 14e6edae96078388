"""The process that measures one point; it reads a job from its stdin.

    python -m finetune.analysis.benchmark.point < job.json

It prints one JSON object per line; the second is missing after a crash:

    {"kind": "forecast", ...}   memory and time as the estimator predicts them, before training
    {"kind": "result", ...}     or "skipped" (far too large), or "failed" (the reason)

A process per point keeps fragmented memory, compiler caches and a warm clock of one point from
affecting the next, and survives one that the system kills for memory, which raises nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from finetune.analysis.benchmark.grid import WARM_UP, Job
from finetune.config.schema import BUILTIN, ModelConfig
from finetune.config.sft import sft_config
from finetune.data.dataset import random_rows
from finetune.errors import ConfigError, FinetuneError, MemoryShortError
from finetune.estimator.gate import MemoryForecast
from finetune.estimator.predict import check_sizes, predict
from finetune.hardware.device import Device, available_gib, this_device
from finetune.hardware.gpus import place_here
from finetune.logging import output, quiet_libraries
from finetune.precision.planner import LayerPlan
from finetune.storage.pretrained import load_tokenizer
from finetune.training.callbacks import StepTimer
from finetune.training.evidence import environment
from finetune.training.health.monitor import HealthMonitor
from finetune.training.memory_meter import MemoryMeter
from finetune.training.model import OWN, Attention
from finetune.training.preflight import preflight
from finetune.training.session import session_of
from finetune.training.trainer import make_trainer
from finetune.units import GIB, size_of_gib

FAR = 1.25
"""Largest predicted share of a GPU's memory that is tried, since predictions err. On a CPU it is 1:
running out of host memory takes the machine down.
"""
Emit = Callable[[dict[str, Any]], None]
Train = Callable[[Job, Device], dict[str, Any]]


def measure_point(job: Job, emit: Emit, train: Train | None = None) -> None:
    """Predict, train (default `train_point`) and measure a point; `emit` gets each line."""
    device = this_device()
    try:
        check_sizes(job.config)
        if job.forecast:
            expected = forecast(job, device)
            emit({"kind": "forecast", **expected})
            if not job.force and (why := _too_large(expected, device)):
                emit({"kind": "skipped", "error": f"skipped: {why}; --force tries it"})
                return
        emit({"kind": "result", **(train or train_point)(job, device)})
    except FinetuneError as error:
        short = isinstance(error, MemoryShortError)
        why = f"{error.what}: {error.why}" if error.why else error.what
        emit({"kind": "failed", "error": why, "out_of_memory": short})
    except (MemoryError, RuntimeError) as error:
        text, signs = str(error).strip(), ("out of memory", "alloc_failed", "allocate memory")
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not full and not any(sign in text.lower() for sign in signs):
            raise
        line = f"out of memory: {text.splitlines()[0]}" if text else "out of memory"
        emit({"kind": "failed", "error": line, "out_of_memory": True})


# --------------------------------------------------------------------------------- before it trains


def forecast(job: Job, device: Device) -> dict[str, Any]:
    """Predict memory (GiB) and time (seconds) of a point, or give the reason why not."""
    try:
        found = predict(job.config, place_here(device))
    except FinetuneError as error:
        return {"why": f"not predicted: {error.what}"}
    memory, pace = found.footprint, found.pace
    values: dict[str, Any] = {
        "allocated_gib": memory.allocated / GIB,
        "needed_gib": (memory.allocated + memory.outside) / GIB,
        "step_seconds": None if pace is None else pace.seconds,
    }
    if device.kind == "cuda":
        values["reserved_gib"] = memory.reserved / GIB
    if pace is None:
        values["why"] = f"the speed of {device.name} is not known"
    return values


def _too_large(expected: dict[str, Any], device: Device) -> str:
    needed = expected.get("needed_gib", 0.0)
    if device.kind == "cuda":
        there, limit = size_of_gib(device.memory_gib), FAR * device.memory_gib
    else:
        limit = available_gib(device)
        there = f"{size_of_gib(limit)} free"
    if needed <= limit:
        return ""
    return f"predicted to hold {size_of_gib(needed)}, and {device.name} has {there}"


# ------------------------------------------------------------------------------------------- train


def train_point(job: Job, device: Device) -> dict[str, Any]:
    """Train as in a run, and read time, memory, receipt and FLOPs.

    Raises:
        FinetuneError: as the run itself.
    """
    ahead = preflight(job.config, device, forecast=MemoryForecast(), force=True)
    with session_of(ahead.resolution, output(quiet=True)) as running:
        measured = train_steps(
            job,
            device,
            MemoryMeter(running),
            stored=ahead.plan.stored,
            attention=ahead.attention,
            monitored=True,
        )
        receipt = running.receipt()
        label = f"{running.resolution.label}{receipt.emulated}"
    executed = {key: receipt.precision[key] for key in ("backend", "scaling", "compile")}
    facts = {"precision": label, "proven": receipt.status, "fp8_share": receipt.fp8_flop_share}
    return measured | executed | facts


def train_steps(
    job: Job,
    device: Device,
    meter: MemoryMeter,
    *,
    stored: Sequence[LayerPlan] = (),
    attention: Attention = OWN,
    monitored: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    kind: type[SFTTrainer] | None = None,
) -> dict[str, Any]:
    """Train warm-up and timed steps under the installed session.

    Args:
        meter: measures the memory of a step.
        stored: layers whose weights are stored in FP8 from the beginning.
        attention: resolved `model.attention`; default: the model's own.
        monitored: monitor health, as a run does.
        kind: class of trainer; default `trl.SFTTrainer`.

    Returns:
        Seconds of each timed step, peaks in GiB, environment, note.

    Raises:
        FinetuneError: as the run itself.
    """
    from accelerate import PartialState
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    config, on_cpu = job.config, device.kind == "cpu"
    PartialState(cpu=on_cpu)
    tokenizer, _ = load_tokenizer(ModelConfig(name=f"{BUILTIN}tiny_llama"))
    count, rest = divmod((WARM_UP + job.steps) * job.tokens, job.point.length)
    assert not rest, job.point
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args = sft_config(config, folder, {}, on_cpu=on_cpu)
        timer = StepTimer(device.kind)
        stack.callback(timer.close)
        stack.callback(meter.close)
        set_seed(args.seed)
        trainer = make_trainer(
            config,
            args,
            # as many rows as the steps take, each seen once
            train=random_rows(config.model, count, job.point.length, job.round),
            held_out=None,
            tokenizer=tokenizer,
            stored=stored,
            attention=attention,
            callbacks=[meter, timer, *callbacks],
            kind=kind,
        )
        if monitored:
            monitor = HealthMonitor(trainer, say=output(stderr=True).print)
            trainer.add_callback(monitor)
            stack.callback(monitor.close)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.train()
    _check_batch(job, meter)
    memory = meter.reading()
    return {
        "seconds": timer.intervals[WARM_UP - 1 :],
        "allocated_gib": memory["measured_gib"],
        "reserved_gib": memory.get("reserved_gib"),
        "memory": memory["measured"],
        "note": job.note,
        "environment": environment(device) | {"threads": torch.get_num_threads()},
    }


def _check_batch(job: Job, meter: MemoryMeter) -> None:
    """Raise if a micro-batch had other tokens than requested: that is another point."""
    if meter.batch is None:
        return
    rows, length, padded = meter.batch
    if padded or rows * length != job.point.tokens:
        raise ConfigError(
            f"a micro-batch had {rows} x {length} tokens{', padded' if padded else ''}",
            why=f"{job.point.tokens} were requested, and tokens/s would be wrong",
            fix="~train.pad_to_multiple_of ~train.packing, or a length that the tokenizer gives",
        )


def serve(measure: Callable[[str, Emit], None]) -> None:
    """Measure the job on stdin and print its lines; all other output goes to stderr."""
    quiet_libraries()
    line = sys.stdin.readline()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def emit(values: dict[str, Any]) -> None:
            out.write(json.dumps(values) + "\n")
            out.flush()

        measure(line, emit)


if __name__ == "__main__":
    serve(lambda line, emit: measure_point(Job.from_json(line), emit))
