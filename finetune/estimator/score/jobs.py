"""From a row of measurements to a job, or to the reason why there is none.

Each family of measurements has one mapping; a row that none knows, or that leaves open what decides
its memory, is unscored with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import ConfigError
from finetune.estimator.score.job import Job
from finetune.estimator.score.rows import Row
from finetune.estimator.score.shapes import shape_of
from finetune.estimator.score.stacks import (
    fms_plugins,
    torch_version,
    transformers_version,
    workspace_of,
)

TRANSFORMERS = "Transformers / TRL / PEFT"
OTHERS = "other frameworks"


@dataclass(frozen=True)
class Mapped:
    """A row with its job, or the reason why it has none.

    Attributes:
        family: of measurements.
        path: `TRANSFORMERS` or `OTHERS`.
        dynamic: lengths vary from step to step.
    """

    row: Row
    job: Job | None
    reason: str = ""
    family: str = ""
    path: str = OTHERS
    dynamic: bool = False


class Unmapped(Exception):
    """A row that cannot be mapped; its text is the reason."""


def _shape(row: Row) -> str:
    try:
        return shape_of(row.model).name
    except ConfigError:
        raise Unmapped(f"shape of {row.model!r} is not known") from None


def _sizes(row: Row) -> tuple[int, int]:
    if row.batch is None or row.length is None:
        raise Unmapped(f"batch {row.batch_text!r} or length {row.length_text!r} is not a number")
    return row.batch, row.length


def _fms(row: Row) -> Job:
    plugins = fms_plugins(row.framework)
    found = re.search(r"transformers (\d+\.\d+)", row.framework)
    if not found:
        raise Unmapped("the version of transformers is not said")
    version = transformers_version(found[1])
    shape = _shape(row)
    of = shape_of(shape).of
    batch, length = _sizes(row)
    sharded = plugins.fsdp and row.n_gpus > 1
    autocast = "autocast" in row.precision and "no autocast" not in row.precision
    half = "float16" if row.precision.startswith("float16") else "bfloat16"
    # TheBloke's main branches of the large models quantise whole columns, without groups
    columns = "gptq4-column" if of == "mixtral" or shape == "llama-2-70b" else "gptq4"
    weights = {"bnb": "nf4-dq", "gptq": columns, "": half}[plugins.base]
    repeats = version.repeats_keys and of in ("mistral", "mixtral", "qwen2")
    single_baseline = plugins.baseline and not sharded
    fused = plugins.fused and of != "gpt_bigcode"
    loss = version.loss
    if of == "gpt_bigcode":
        loss = "gpt-bigcode"
        length = min(length, shape_of(shape).p)  # fms-hf-tuning: at most tokenizer.model_max_length
    options: tuple[tuple[str, object], ...] = ()
    if row.method != "full":
        targets = ("c_attn",) if of == "gpt_bigcode" else ("q_proj", "k_proj", "v_proj", "o_proj")
        options = (
            ("r", row.lora_rank or 16), ("lora_alpha", 16), ("lora_dropout", 0.1),
            ("target_modules", targets),
        )  # fmt: skip
    return Job(
        shape=shape,
        batch=batch,
        length=length,
        adapter="lora" if row.method != "full" else "",
        adapter_options=options,
        weights=weights,
        compute=half,
        adapter_type="bfloat16" if single_baseline else "float32",
        autocast=autocast,
        float32_norms=single_baseline,
        checkpoint="reentrant",
        attention="flash-repeated" if repeats else "flash",
        loss="fused-head" if plugins.liger else loss,
        fast_loss=plugins.fused,
        fused_kernels=fused,
        lora_wrapper=plugins.base if not fused else "",
        outputs_in_float32=autocast,
        keeps_cache=of == "gpt_bigcode",
        gpus=row.n_gpus or 1,
        sharding="fsdp1" if sharded else "none",
        sharded_type="float32" if sharded and autocast and row.method == "full" else "",
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
    )


LONGEST_METAMATH_BATCH = 709
"""Tokens of the longest padded batch of PEFT's MetaMathQA runs. Not published: rows are cut at 768,
texts over 1300 characters are left out and 20,000 of them pass. It is the length at which plain LoRA
of rank 32 reserves what was measured (one row), and is used for every method."""

_TARGETS = {
    "qv": ("q_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


@cache
def _experiments() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parents[2] / "assets" / "peft_experiments.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _peft(row: Row) -> Job:
    """`method_comparison/MetaMathQA/run.py`: no autocast, `outputs` kept from step to step, batches
    sorted from long to short and the cache emptied before each bucket, so that the longest batch
    meets an empty cache."""
    name = row.notes.split(";")[0].strip()
    found = _experiments().get(name)
    if found is None:
        raise Unmapped(f"the adapter's configuration of {name!r} is not known")
    options = dict(found)
    config = options.pop("class", "")
    targets = options.pop("t", "")
    blocks = options.pop("bdlora", 0)
    if targets:
        options["target_modules"] = _TARGETS[targets]
    if config:
        options["config_class"] = f"{config}Config"
    if blocks:
        raise Unmapped("BD-LoRA's blocks are not modelled")
    batch, _ = _sizes(row)
    said = re.search(r"trainable=(\d+)", row.notes)
    return Job(
        shape=_shape(row),
        batch=batch,
        length=LONGEST_METAMATH_BATCH,
        adapter=config and row.method,
        adapter_options=tuple((k, _frozen(v)) for k, v in options.items()),
        attention="masked",
        loss="transformers-5",
        outputs_held=True,
        input_grads=False,
        optimizer="adamw-foreach",
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
        trainable=int(said[1]) if said else 0,
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value


_LITGPT_PARTS = {
    "q+v (litgpt default)": ("q", "v"),
    "query+value": ("q", "v"),
    "query+key+value+projection+mlp+head": ("q", "k", "v", "projection", "mlp", "head"),
}


def _litgpt(row: Row) -> Job:
    """`litgpt finetune_*` in `bf16-true`: everything, adapters and states too, in bf16."""
    if row.n_gpus > 1:
        raise Unmapped("litgpt on several GPUs is not modelled")
    method = {"qlora": "lora", "full": ""}.get(row.method, row.method)
    options: tuple[tuple[str, Any], ...] = ()
    if method == "lora":
        parts = _LITGPT_PARTS.get(row.lora_targets)
        if parts is None:
            raise Unmapped(f"litgpt's adapters at {row.lora_targets!r} are not known")
        options = (("r", row.lora_rank or 8), ("parts", parts))
    batch, length = _sizes(row)
    found = re.search(r"bnb\.(nf4(?:-dq)?)", row.precision)
    return Job(
        shape=_shape(row),
        batch=batch,
        length=length,
        engine="litgpt",
        adapter=method,
        adapter_options=options,
        weights=found[1] if found else "bfloat16",
        packs_head=False,
        keeps_packed_input=True,
        accumulates=True,
        loss="chunked",
        input_grads=False,
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
    )


def _swift(row: Row) -> Job:
    """ms-swift over the Trainer of transformers 4.36: bf16 autocast, reentrant checkpointing, rank 8
    at the layers of q, k and v. Qwen's first generation comes with code of its own, whose loss makes
    no float32 copy. Rows of 91 to 19,548 tokens are cut: the longest is as long as the limit."""
    if row.n_gpus > 1:
        raise Unmapped("layers spread over GPUs by hand (device_map) are not modelled")
    batch, length = _sizes(row)
    shape = shape_of(_shape(row))
    weights = "bfloat16"
    if "int4 (bnb)" in row.precision:
        weights = "nf4-dq"
    elif "int8 (gptq)" in row.precision:
        weights = "int8"
    elif "int4 (gptq)" in row.precision:
        weights = "gptq4"
    lora = row.method != "full"
    return Job(
        shape=shape.name,
        batch=batch,
        length=length,
        adapter="lora" if lora else "",
        adapter_options=(
            ("r", row.lora_rank or 8), ("lora_alpha", 32), ("lora_dropout", 0.05),
            ("target_modules", ("q_proj", "k_proj", "v_proj")),
        ) if lora else (),
        weights=weights,
        autocast=True,
        checkpoint="reentrant",
        attention="flash-repeated" if shape.of == "mistral" else "flash",
        loss="gpt-bigcode" if shape.of == "qwen2" else "transformers-4.45",
        outputs_in_float32=True,
        lora_wrapper={"nf4-dq": "bnb", "int8": "gptq", "gptq4": "gptq"}.get(weights, ""),
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
    )  # fmt: skip


def _fsdp_qlora(row: Row) -> Job:
    """AnswerDotAI/fsdp_qlora `train.py`: everything in bf16 without autocast, reentrant
    checkpointing inside of FSDP 1, NF4 without double quantisation, adapters wrapped apart."""
    if "CPU offload" in row.notes:
        raise Unmapped("offload of weights to the CPU is not modelled")
    batch, length = _sizes(row)
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    packed = row.method == "qlora"
    return Job(
        shape=_shape(row),
        batch=batch,
        length=length,
        adapter="lora",
        adapter_options=(
            ("r", row.lora_rank or 64), ("lora_alpha", 16), ("lora_dropout", 0.1),
            ("target_modules", targets),
        ),
        weights="nf4" if packed else "bfloat16",
        adapter_type="bfloat16",
        checkpoint="reentrant",
        attention="causal",
        loss="transformers-4.45",
        lora_wrapper="bnb" if packed else "",
        gpus=row.n_gpus,
        sharding="none" if "DDP" in row.notes else "fsdp1",
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
    )  # fmt: skip


def _trainer(row: Row) -> Job:
    """The Trainer of transformers 5 with `prepare_model_for_kbit_training`, eager attention."""
    if row.attention != "eager" or "nf4 double quant" not in row.precision:
        raise Unmapped("only QLoRA with eager attention is mapped for the bare Trainer")
    batch, length = _sizes(row)
    return Job(
        shape=_shape(row),
        batch=batch,
        length=length,
        adapter="lora",
        adapter_options=(("r", row.lora_rank or 16), ("lora_dropout", 0.05),
            ("target_modules", ("q_proj", "v_proj"))),
        weights="nf4-dq",
        autocast=True,
        float32_rest=True,
        checkpoint="reentrant",
        attention="eager",
        loss="transformers-5",
        lora_wrapper="bnb",
        outputs_in_float32=True,
        workspace=workspace_of(row.gpu, torch_version(row.framework)),
    )  # fmt: skip


def _family(row: Row) -> tuple[str, str, bool, Callable[[Row], Job]]:
    framework = row.framework
    if "fms plugin" in framework:
        return "fms-acceleration", TRANSFORMERS, False, _fms
    if framework.startswith("PEFT "):
        return "PEFT comparison", TRANSFORMERS, True, _peft
    if framework.startswith("ms-swift"):
        return "ms-swift", TRANSFORMERS, True, _swift
    if framework.startswith("HF Trainer"):
        return "Trainer", TRANSFORMERS, False, _trainer
    if framework.startswith("fsdp_qlora"):
        return "fsdp_qlora", TRANSFORMERS, False, _fsdp_qlora
    if framework.startswith("litgpt"):
        return "litgpt", OTHERS, False, _litgpt
    raise Unmapped(f"no mapping for the framework {framework!r}")


def map_row(row: Row) -> Mapped:
    """The job of a row, or the reason why it has none."""
    family, path, dynamic = "", OTHERS, False
    try:
        family, path, dynamic, make = _family(row)
        if row.suspect:
            raise Unmapped("its notes say SUSPECT")
        return Mapped(row, make(row), "", family, path, dynamic)
    except Unmapped as reason:
        return Mapped(row, None, str(reason), family, path, dynamic)
