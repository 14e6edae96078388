"""Jobs of the benchmarks of fms-acceleration (`scripts/benchmarks`), by its plugins."""

from __future__ import annotations

import re

from tests.benchmarks.score.job import Job
from tests.benchmarks.score.mapping import UnmappedError, shape_name, sizes
from tests.benchmarks.score.rows import Row
from tests.benchmarks.score.shapes import shape_of
from tests.benchmarks.score.stacks import (
    fms_plugins,
    torch_version,
    transformers_version,
    workspace_of,
)


def fms_job(row: Row) -> Job:
    """Packed rows, reentrant checkpointing, rank 16 at the four products of attention."""
    plugins = fms_plugins(row.framework)
    found = re.search(r"transformers (\d+\.\d+)", row.framework)
    if not found:
        raise UnmappedError("the version of transformers is not said")
    version = transformers_version(found[1])
    shape = shape_name(row)
    of = shape_of(shape).of
    batch, length = sizes(row)
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
