"""The closed form and `accelerate estimate-memory`, asked about a job.

Both answer for what they can be asked: the closed form for LoRA and full training of the families
it knows, with logits where the job's loss makes them (2 + 4 + 4 bytes, as it says of other
trainers); `accelerate` for any model, in the type of its weights, and nothing else of the job.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from finetune.config.schema import RunConfig
from finetune.errors import ConfigError
from finetune.estimator.closed_form.decoder import decoder_of
from finetune.estimator.closed_form.preview import preview_of
from tests.benchmarks.score.baselines import accelerate_estimate
from tests.benchmarks.score.job import Job
from tests.benchmarks.score.shapes import config_of

_OPTIMIZERS = {"adamw-foreach": "adamw_torch", "adamw-fused": "adamw_torch_fused"}
_LOGITS = 2.0 + 4.0 + 4.0


@lru_cache(maxsize=1024)
def closed_form_gb(job: Job) -> float | None:
    """Predict 10^9 bytes by the closed form, without its CUDA context; None: no answer."""
    options = dict(job.adapter_options)
    if job.adapter not in ("", "lora") or job.optimizer not in _OPTIMIZERS or "half" in options:
        return None
    decoder = decoder_of(config_of(job.shape).to_dict())
    if decoder is None:
        return None
    model: dict[str, Any] = {"name": job.shape}
    if job.weights in ("nf4", "nf4-dq", "gptq4"):
        model["storage"] = "nf4"
    sections: dict[str, Any] = {
        "model": model,
        "data": {"name": "builtin:harbour"},
        "train": {
            "per_device_train_batch_size": job.batch,
            "max_length": job.length,
            "gradient_checkpointing": job.checkpoint != "none",
            "optim": _OPTIMIZERS[job.optimizer],
            **({"fsdp": "full_shard"} if job.sharding.startswith("fsdp") else {}),
        },
    }
    if job.adapter:
        sections["lora"] = {"r": options.get("r", 8), "target_modules": options.get(
            "target_modules", ("q_proj", "v_proj"))}  # fmt: skip
    logits = 0.0 if job.loss == "fused-head" else _LOGITS
    try:
        config = RunConfig.model_validate(sections)
        found = preview_of(decoder, config, gpus=job.gpus, logits=logits)
    except (ConfigError, ValueError):  # a combination that recipes cannot say
        return None
    return None if found is None else (found.peak_gib - found.context) * 2**30 / 1e9


@lru_cache(maxsize=256)
def _accelerate(shape: str, wide: bool) -> float:
    return accelerate_estimate(config_of(shape), "float32" if wide else "bfloat16") / 1e9


def accelerate_gb(job: Job) -> float:
    """Predict 10^9 bytes by the closed form, without its CUDA context; None: no answer."""
    return _accelerate(job.shape, job.weights == "float32" or job.sharded_type == "float32")
