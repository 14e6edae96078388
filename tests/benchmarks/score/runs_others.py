"""Jobs of the bare Trainer, ms-swift, fsdp_qlora and litgpt."""

from __future__ import annotations

import re
from typing import Any

from tests.benchmarks.score.job import Job
from tests.benchmarks.score.mapping import UnmappedError, shape_name, sizes
from tests.benchmarks.score.rows import Row
from tests.benchmarks.score.shapes import shape_of
from tests.benchmarks.score.stacks import torch_version, workspace_of


def trainer_job(row: Row) -> Job:
    """The Trainer of transformers 5 with `prepare_model_for_kbit_training`, eager attention."""
    if row.attention != "eager" or "nf4 double quant" not in row.precision:
        raise UnmappedError("only QLoRA with eager attention is mapped for the bare Trainer")
    batch, length = sizes(row)
    return Job(
        shape=shape_name(row),
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


def swift_job(row: Row) -> Job:
    """ms-swift over the Trainer of transformers 4.36: bf16 autocast, reentrant checkpointing, rank
    8 at the layers of q, k and v. Qwen's first generation comes with code of its own, whose loss
    makes no float32 copy. Rows of 91 to 19,548 tokens are cut: the longest is as long as the
    limit."""
    if row.n_gpus > 1:
        raise UnmappedError("layers spread over GPUs by hand (device_map) are not modelled")
    batch, length = sizes(row)
    shape = shape_of(shape_name(row))
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


def fsdp_qlora_job(row: Row) -> Job:
    """AnswerDotAI/fsdp_qlora `train.py`: everything in bf16 without autocast, reentrant
    checkpointing inside of FSDP 1, NF4 without double quantisation, adapters wrapped apart."""
    if "CPU offload" in row.notes:
        raise UnmappedError("offload of weights to the CPU is not modelled")
    batch, length = sizes(row)
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    packed = row.method == "qlora"
    return Job(
        shape=shape_name(row),
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


_LITGPT_PARTS = {
    "q+v (litgpt default)": ("q", "v"),
    "query+value": ("q", "v"),
    "query+key+value+projection+mlp+head": ("q", "k", "v", "projection", "mlp", "head"),
}


def litgpt_job(row: Row) -> Job:
    """`litgpt finetune_*` in `bf16-true`: everything, adapters and states too, in bf16."""
    if row.n_gpus > 1:
        raise UnmappedError("litgpt on several GPUs is not modelled")
    method = {"qlora": "lora", "full": ""}.get(row.method, row.method)
    options: tuple[tuple[str, Any], ...] = ()
    if method == "lora":
        parts = _LITGPT_PARTS.get(row.lora_targets)
        if parts is None:
            raise UnmappedError(f"litgpt's adapters at {row.lora_targets!r} are not known")
        options = (("r", row.lora_rank or 8), ("parts", parts))
    batch, length = sizes(row)
    found = re.search(r"bnb\.(nf4(?:-dq)?)", row.precision)
    return Job(
        shape=shape_name(row),
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
