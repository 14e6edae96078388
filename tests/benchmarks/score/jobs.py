"""From a row of measurements to a job: what was run, in words that a rehearsal understands.

Each source of measurements has one mapping; a row that none knows, or that leaves open what decides
its memory, is unscored with its reason. What a software stack does is taken from its code, named
beside it; nothing here is fitted to a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune.errors import ConfigError
from finetune.hardware.gpus import Gpu, named_gpu
from tests.benchmarks.score.rows import Row
from tests.benchmarks.score.shapes import shape_of


@dataclass(frozen=True)
class Job:
    """One configuration.

    Attributes:
        shape: name in `scored_shapes.yaml`.
        batch, length: rows of a step on one GPU, and tokens of the longest.
        gpu: as the row names it.
        torch: version.
        adapter: name of the method, "" for full training.
        adapter_class, adapter_options: PEFT's configuration.
        adapter_type: of adapter weights.
        half: factor of the adapter that trains, where the other is frozen.
        weights: `bfloat16`, `nf4`, `nf4-dq`, `gptq4`, `gptq4-column`, `int8`. float16 counts as
            bfloat16, which takes the same memory.
        autocast: products are cast by autocast.
        float32_norms, float32_rest: norms, or all that is not packed, are held in float32.
        checkpoint: which checkpointing.
        attention: implementation as `model.attention` names it; None: SDPA.
        padded: rows differ in length, so attention has a mask.
        loss: path, see `losses`.
        fast_loss, fused_kernels: Unsloth's kernels of fms-acceleration, see `foak`.
        outputs_held: the training loop keeps the outputs of the step before.
        keeps_cache: keys and values are returned, and live until the loss is there.
        gpus, sharding: how many share, and how.
        float32_shards: sharded weights are float32 masters.
        trainable: weights that the source says train, 0 when it does not: another number means that
            the installed PEFT makes another adapter.
    """

    shape: str
    batch: int
    length: int
    gpu: str = ""
    torch: tuple[int, ...] = (2, 4, 0)
    adapter: str = ""
    adapter_class: str = "Lora"
    adapter_options: tuple[tuple[str, Any], ...] = ()
    adapter_type: Literal["float32", "bfloat16"] = "float32"
    half: str = ""
    weights: str = "bfloat16"
    autocast: bool = False
    float32_norms: bool = False
    float32_rest: bool = False
    checkpoint: Literal["none", "reentrant"] = "reentrant"
    attention: str | None = "flash_attention_2"
    padded: bool = False
    loss: str = "transformers-5"
    fast_loss: bool = False
    fused_kernels: bool = False
    outputs_held: bool = False
    keeps_cache: bool = False
    gpus: int = 1
    sharding: Literal["none", "fsdp1"] = "none"
    float32_shards: bool = False
    trainable: int = 0


@dataclass(frozen=True)
class Mapped:
    """A row with its job, or the reason why it has none.

    Attributes:
        family: source of measurements.
        dynamic: lengths vary from step to step.
    """

    row: Row
    job: Job | None
    reason: str = ""
    family: str = ""
    dynamic: bool = False


class UnmappedError(Exception):
    """A row that cannot be mapped; its text is the reason."""


def map_row(row: Row) -> Mapped:
    """The job of a row, or the reason why it has none."""
    if row.suspect:
        return Mapped(row, None, "its notes say SUSPECT")
    found = next(((f, rest) for f, *rest in _FAMILIES if re.search(f, row.framework)), None)
    if found is None:
        return Mapped(row, None, f"no mapping for the framework {row.framework!r}")
    family, dynamic, make = found[1]
    try:
        return Mapped(row, make(row, **_common(row)), "", family, dynamic)
    except UnmappedError as reason:
        return Mapped(row, None, str(reason), family, dynamic)


def _common(row: Row) -> dict[str, Any]:
    """What every mapping takes from a row in the same way."""
    try:
        shape = shape_of(row.model).name
    except ConfigError:
        raise UnmappedError(f"shape of {row.model!r} is not known") from None
    if row.batch is None or row.length is None:
        raise UnmappedError(
            f"batch {row.batch_text!r} or length {row.length_text!r} is not a number"
        )
    return {
        "shape": shape,
        "batch": row.batch,
        "length": row.length,
        "gpu": row.gpu,
        "torch": torch_version(row.framework),
    }


def _lora(rank: int, dropout: float, *targets: str, alpha: int = 16) -> dict[str, Any]:
    options = {
        "r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": targets,
    }  # fmt: skip
    return {"adapter": "lora", "adapter_options": tuple(options.items())}


# ------------------------------------------------------------------------------------------ stacks

_GPU_NAMES = (
    (r"^A100.*80", "A100-80GB"), (r"^A100.*40", "A100-40GB"), (r"^H100", "H100"),
    (r"^H200", "H200"), (r"^GB200", "GB200"), (r"^B200", "B200"), (r"^RTX ?3090", "RTX 3090"),
    (r"^RTX ?4090", "RTX 4090"), (r"^A10G", "A10G"),
)  # fmt: skip


def gpu_of(text: str) -> Gpu | None:
    """The GPU that a row names, None for one that is not in the table."""
    for pattern, name in _GPU_NAMES:
        if re.search(pattern, text, re.IGNORECASE):
            return named_gpu(name)
    try:
        return named_gpu(text)
    except ConfigError:
        return None


def torch_version(framework: str) -> tuple[int, ...]:
    """The version in `... / torch 2.1.1`; 2.4 where none is said."""
    found = re.search(r"torch (\d+)\.(\d+)\.?(\d*)", framework)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (2, 4, 0)


@dataclass(frozen=True)
class Version:
    """A version of Transformers, by what changed between versions.

    Attributes:
        loss: path in `losses`.
        repeats_keys: Mistral, Mixtral and Qwen2 repeat keys for FlashAttention 2 (gone in 4.48,
            where attention became one interface for all models).
    """

    loss: str
    repeats_keys: bool


def transformers_version(text: str) -> Version:
    """The behavior of version `4.45.2`.

    4.45: `logits = logits.float()` in each model's forward. 4.46 to 4.49: `ForCausalLMLoss` copies
    to float32 and shifts the copy, while the caller holds the 16-bit logits. From 4.50 the labels
    are shifted.
    """
    version = tuple(int(n) for n in text.split(".")[:2])
    if version < (4, 46):
        return Version("transformers-4.45", True)
    if version < (4, 50):
        return Version("transformers-4.48", version < (4, 48))
    return Version("transformers-5", False)


REPEATED = "published_flash_repeated"
"""Flash attention over keys repeated for each head, see `published_stack`."""


# ---------------------------------------------------------------------------------------- mappings


def fms_job(row: Row, **common: Any) -> Job:
    """Benchmarks of fms-acceleration (`scripts/benchmarks`), by the plugins in the framework.

    Packed rows, reentrant checkpointing, LoRA of rank 16 at the four products of attention.

    * `accelerated-peft-bnb`: NF4 with double quantization, adapters without PEFT's upcast of the
      rest (`framework_plugin_bnb.py`); `baseline-peft-bnb` leaves that to TRL: norms in float32,
      adapters in bf16 on one GPU (`peft_module_casting_to_bf16`), skipped when sharded.
    * `accelerated-peft-autogptq`: GPTQ, its own triton layers.
    * `foak`: fused norm, rotation, adapters and cross entropy; `-liger`: Liger's head instead.
    * FSDP: layers are units (`TRANSFORMER_BASED_WRAP`), full shard (accelerate.yaml).
    """
    plugins = row.framework.split("fms plugin")[1].strip()
    found = re.search(r"transformers (\d+\.\d+)", row.framework)
    if not found:
        raise UnmappedError("the version of transformers is not said")
    version = transformers_version(found[1])
    shape = shape_of(row.model)
    bigcode = shape.of == "gpt_bigcode"
    sharded = "FSDP" in plugins and row.n_gpus > 1
    autocast = "autocast" in row.precision and "no autocast" not in row.precision
    # TheBloke's main branches of the large models quantize whole columns, without groups.
    columns = "-column" if shape.of == "mixtral" or shape.name == "llama-2-70b" else ""
    weights = "nf4-dq" if "bnb" in plugins else f"gptq4{columns}" if "gptq" in plugins else ""
    repeats = version.repeats_keys and shape.of in ("mistral", "mixtral", "qwen2")
    baseline = "baseline" in plugins and not sharded
    loss = "fused-head" if "liger" in plugins else version.loss
    if bigcode:  # fms-hf-tuning: rows of at most tokenizer.model_max_length
        loss, common["length"] = "gpt-bigcode", min(common["length"], shape.p)
    targets = ("c_attn",) if bigcode else ("q_proj", "k_proj", "v_proj", "o_proj")
    adapters = {} if row.method == "full" else _lora(row.lora_rank or 16, 0.1, *targets)
    return Job(
        **common,
        **adapters,
        weights=weights or "bfloat16",
        adapter_type="bfloat16" if baseline else "float32",
        autocast=autocast,
        float32_norms=baseline,
        attention=REPEATED if repeats else "flash_attention_2",
        loss=loss,
        fast_loss="foak" in plugins,
        fused_kernels="foak" in plugins and not bigcode,
        keeps_cache=bigcode,
        gpus=row.n_gpus or 1,
        sharding="fsdp1" if sharded else "none",
        float32_shards=sharded and autocast and row.method == "full",
    )


LONGEST_METAMATH_BATCH = 709
"""Tokens of the longest padded batch of PEFT's MetaMathQA runs, one number for all methods.

It is not published: rows are cut at 768 tokens, texts over 1300 characters are left out and 20,000
of them pass. It was inferred from developed-on rows, as the length at which the traces of most
methods reserve what was measured; so these rows test what a method adds, and not the length."""

_TARGETS = {
    "qv": ("q_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


@cache
def _experiments() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("peft_experiments.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def peft_job(row: Row, **common: Any) -> Job:
    """PEFT's comparison of methods, `method_comparison/MetaMathQA/run.py`.

    No autocast, `outputs` kept from step to step, batches sorted from long to short and the cache
    emptied before each bucket, so that the longest batch meets an empty cache.
    """
    name = row.notes.split(";")[0].strip()
    if name not in _experiments():
        raise UnmappedError(f"the adapter's configuration of {name!r} is not known")
    options = dict(_experiments()[name])
    kind, targets = options.pop("class", ""), options.pop("t", "")
    if targets:
        options["target_modules"] = _TARGETS[targets]
    if options.pop("bdlora", 0):
        raise UnmappedError("BD-LoRA's blocks are not modelled")
    said = re.search(r"trainable=(\d+)", row.notes)
    return Job(
        **common | {"length": LONGEST_METAMATH_BATCH},
        adapter=kind and row.method,
        adapter_class=kind,
        half=options.pop("half", ""),
        adapter_options=tuple((k, _frozen(v)) for k, v in options.items()),
        checkpoint="none",
        attention=None,
        padded=True,
        outputs_held=True,
        trainable=int(said[1]) if said else 0,
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value


def trainer_job(row: Row, **common: Any) -> Job:
    """The Trainer of Transformers 5 after `prepare_model_for_kbit_training`, eager attention."""
    if row.attention != "eager" or "nf4 double quant" not in row.precision:
        raise UnmappedError("only QLoRA with eager attention is mapped for the bare Trainer")
    return Job(
        **common,
        **_lora(row.lora_rank or 16, 0.05, "q_proj", "v_proj"),
        weights="nf4-dq",
        autocast=True,
        float32_rest=True,
        attention="eager",
    )


def swift_job(row: Row, **common: Any) -> Job:
    """ms-swift over the Trainer of Transformers 4.36.

    BF16 autocast, reentrant checkpointing, rank 8 at the layers of q, k and v. Qwen's first
    generation comes with code of its own, whose loss makes no float32 copy. Rows of 91 to 19,548
    tokens are cut: the longest is as long as the limit.
    """
    if row.n_gpus > 1:
        raise UnmappedError("layers spread over GPUs by hand (device_map) are not modelled")
    shape = shape_of(row.model)
    packed = {"int4 (bnb)": "nf4-dq", "int8 (gptq)": "int8", "int4 (gptq)": "gptq4"}
    weights = next((form for name, form in packed.items() if name in row.precision), "bfloat16")
    full = row.method == "full"
    lora = _lora(row.lora_rank or 8, 0.05, "q_proj", "k_proj", "v_proj", alpha=32)
    return Job(
        **common,
        **({} if full else lora),
        weights=weights,
        autocast=True,
        attention=REPEATED if shape.of == "mistral" else "flash_attention_2",
        loss="gpt-bigcode" if shape.of == "qwen2" else "transformers-4.45",
    )


def fsdp_qlora_job(row: Row, **common: Any) -> Job:
    """AnswerDotAI/fsdp_qlora `train.py`.

    Everything in bf16 without autocast, reentrant checkpointing inside of FSDP 1, NF4 without
    double quantization, adapters wrapped apart.
    """
    if "CPU offload" in row.notes:
        raise UnmappedError("offload of weights to the CPU is not modelled")
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    return Job(
        **common,
        **_lora(row.lora_rank or 64, 0.1, *targets),
        weights="nf4" if row.method == "qlora" else "bfloat16",
        adapter_type="bfloat16",
        attention=None,
        loss="transformers-4.45",
        gpus=row.n_gpus,
        sharding="none" if "DDP" in row.notes else "fsdp1",
    )


_FAMILIES: tuple[tuple[str, str, bool, Callable[..., Job]], ...] = (
    ("fms plugin", "fms-acceleration", False, fms_job),
    ("^PEFT ", "PEFT comparison", True, peft_job),
    ("^ms-swift", "ms-swift", True, swift_job),
    ("^HF Trainer", "Trainer", False, trainer_job),
    ("^fsdp_qlora", "fsdp_qlora", False, fsdp_qlora_job),
)
"""Pattern of the framework, name, whether lengths vary, mapping."""
