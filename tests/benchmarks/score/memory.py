"""From a job to bytes, through the shipped estimator.

A job becomes a `RunConfig` on a `Machine`, is rehearsed with the libraries of its row
(`published_stack`) and measured by the functions behind `python -m finetune estimate`.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.memory.overheads import context_bytes, nccl_bytes
from finetune.estimator.predict import predict, predict_whole
from finetune.hardware.gpus import Gpu, machine_of, named_gpu
from tests.benchmarks.score.jobs import Job, gpu_of
from tests.benchmarks.score.published_stack import as_published
from tests.benchmarks.score.shapes import config_of


class CannotRunError(Exception):
    """A job that cannot be rehearsed; its text is the reason."""


@functools.cache
def _folder() -> Path:
    """Where each shape has a folder with its `config.json`, for the life of the process."""
    kept = tempfile.TemporaryDirectory()
    atexit.register(kept.cleanup)
    return Path(kept.name)


@functools.cache
def _model(shape: str) -> str:
    folder = _folder() / shape
    config = config_of(shape)
    config.use_cache = False
    config.save_pretrained(folder)
    return str(folder)


def run_config(job: Job) -> RunConfig:
    """The recipe of a job."""
    options = dict(job.adapter_options)
    lora: dict[str, Any] | None = None
    if job.adapter:
        known = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}
        lora = {ours: options[theirs] for theirs, ours in known.items() if theirs in options}
        lora["target_modules"] = options.get("target_modules", "all-linear")
    model: dict[str, Any] = {
        "name": _model(job.shape), "weights": "random", "attention": job.attention or "sdpa",
        "storage": None if job.weights == "bfloat16" else "nf4",
    }  # fmt: skip
    train: dict[str, Any] = {
        "per_device_train_batch_size": job.batch, "max_length": job.length, "optim": "adamw_torch",
        "activation_checkpointing": job.checkpoint != "none",
    }  # fmt: skip
    if job.checkpoint != "none":
        train["activation_checkpointing_kwargs"] = {"use_reentrant": job.checkpoint == "reentrant"}
    return RunConfig.model_validate({
        "model": model, "lora": lora, "train": train, "data": {"name": "builtin:harbour"},
        "precision": {"compute": "bf16" if job.autocast else "fp32"},
    })  # fmt: skip


class Memory(NamedTuple):
    """Bytes on one GPU: of tensors, of PyTorch's allocator, outside of it; and the peak's phase."""

    allocated: int
    reserved: int
    outside: int
    phase: str


@functools.lru_cache(maxsize=1024)
def memory_of(job: Job, *, whole: bool = False) -> Memory:
    """Measure a job; on an A100 where its GPU is not known.

    What several GPUs share is in `fsdp1`, so the machine has one GPU.

    Args:
        job: what to measure.
        whole: rehearse all layers: for reserved memory, which first layers only tell about.

    Raises:
        CannotRunError: it cannot be rehearsed, or the installed PEFT makes another adapter.
    """
    machine = machine_of(gpu_of(job.gpu) or named_gpu("A100-80GB"))
    assert machine.device.capability is not None
    outside = context_bytes(machine.device.capability) + nccl_bytes(job.gpus, "nvlink")
    config = run_config(job)
    # Under FSDP 1 memory grows through backward, so that its peak is elsewhere in fewer layers.
    measuring = predict_whole if whole or job.sharding == "fsdp1" else predict
    try:
        with as_published(job):
            found = measuring(config, machine)
    except FinetuneError as error:
        raise CannotRunError(f"{job.adapter or 'full'}: {error.what}") from error
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise CannotRunError(f"{job.adapter_class}: looks at data when it is made") from error
    if job.trainable and not job.half and found.trainable != job.trainable:
        raise CannotRunError(
            f"the installed PEFT makes {job.adapter} of another size than the row's"
        )
    memory = found.footprint
    return Memory(memory.allocated, memory.reserved, outside, memory.highest)


def overflow(job: Job, gpu: Gpu) -> int | None:
    """Bytes that a job would show on a GPU that cannot hold it; None where it can."""
    found = memory_of(job)
    shown = found.reserved + found.outside
    return shown if shown > gpu.memory_gib * 2**30 else None
