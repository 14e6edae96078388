"""What a published measurement of speed ran, in the words of the time model.

A row of a CSV of measurements becomes a `Case`: shape, setting, GPU, and how the framework
launches. What cannot be said from a row is a reason, not a guess.

A row's `tokens_per_s` is of one GPU or of the whole job, as its source counts (`_WHOLE_JOB`). Rows
of data with changing lengths count tokens without padding: their batch is taken to be as long as
the source's data is on average, and only the time of the step itself is compared (tokens per
second), not that of a run with its pauses.

What frameworks are in terms of this model is in `_stack`: eager, compiled or native launches, fused
parts, path of the loss. These are facts of the frameworks, the same for all rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from finetune.errors import ConfigError
from finetune.estimator.speed.roofline import AttentionKernel, HostKind
from finetune.hardware.gpus import Gpu, named_gpu
from tests.benchmarks.score.setting import ATTENTION_LINEARS, MLP_LINEARS, Setting, Shape
from tests.benchmarks.score.workload import FUSED_PARTS, in_layers, in_parts

Row = Mapping[str, str]

SHAPES: dict[str, Shape] = {
    r"llama-?3\.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 64, tied=True),
    r"llama-?3\.2-3b": Shape(28, 3072, 24, 8, 8192, 128256, 128, tied=True),
    r"llama-?3(\.1)?-8b|meta-llama-3-8b": Shape(32, 4096, 32, 8, 14336, 128256),
    r"llama-?3(\.1)?-70b": Shape(80, 8192, 64, 8, 28672, 128256),
    r"llama-?2-7b|llama 2 7": Shape(32, 4096, 32, 32, 11008, 32000),
    r"llama-?2-13b": Shape(40, 5120, 40, 40, 13824, 32000),
    r"llama-?2-70b": Shape(80, 8192, 64, 8, 28672, 32000),
    r"llama-?2-1b|tinyllama": Shape(22, 2048, 32, 4, 5632, 32000),
    r"mistral-7b": Shape(32, 4096, 32, 8, 14336, 32000),
    r"mixtral-8x7b": Shape(32, 4096, 32, 8, 14336, 32000, experts=8, chosen=2),
    r"yi-34b": Shape(60, 7168, 56, 8, 20480, 64000),
    r"powerlm-3b": Shape(40, 2304, 36, 36, 9216, 49152, tied=True),
    r"santacoder": Shape(24, 2048, 16, 1, 8192, 49280, gated=False, norm="layer", tied=True),
    r"phi-1\.5": Shape(24, 2048, 32, 32, 8192, 51200, gated=False, norm="layer"),
    r"stablelm alpha 3": Shape(16, 4096, 32, 32, 16384, 50688, gated=False, norm="layer"),
    r"qwen2\.5-0\.5b": Shape(24, 896, 14, 2, 4864, 151936, 64, tied=True),
    r"qwen2\.5-1\.5b": Shape(28, 1536, 12, 2, 8960, 151936, 128, tied=True),
    r"qwen2\.5-3b": Shape(36, 2048, 16, 2, 11008, 151936, 128, tied=True),
    r"qwen2\.5-7b": Shape(28, 3584, 28, 4, 18944, 152064, 128),
    r"qwen2\.5-14b": Shape(48, 5120, 40, 8, 13824, 152064, 128),
    r"qwen2\.5-32b": Shape(64, 5120, 40, 8, 27648, 152064, 128),
}
"""Shapes of public models, from their configurations."""

_WHOLE_JOB = ("llm.q", "fsdp_qlora")
_MEAN_LENGTHS = {"metamathqa": 222, "alpaca": 130}
"""Tokens of a row of a small batch, padding included, where lengths vary: MetaMathQA by Llama's
tokenizer is 210 on average (4,198,051 in 20,000, PEFT's own count) before padding in batches sorted
by length; Alpaca with its prompt about 130."""
_CANNOT = {
    r"cpu offload|offload_to_cpu": "CPU offload is not modelled",
    r"\bcp ?[2-9]": "context parallelism is not modelled",
    r"\b[tp]p ?[2-9]": "tensor and pipeline parallelism are not modelled",
    r"paged": "a paged optimizer is not modelled",
    r"suspect": "the source's figure is doubtful",
    r"nvfp4": "NVFP4 is not modelled",
}


_ENGINE = r"\bte\b|transformer.?engine"


@dataclass(frozen=True)
class Stack:
    """How a framework runs a step.

    Attributes:
        launched: how the host launches.
        fused: parts that are one kernel each; `("*",)` for compiled layers.
        attention: the kernel of attention: cuDNN's in llm.q and on B200, as torchtitan asks for.
    """

    launched: HostKind
    fused: tuple[str, ...] = ()
    attention: AttentionKernel = "flash"

    @property
    def compiled(self) -> Callable[[Any], bool] | None:
        if self.fused == ("*",):
            return in_layers
        return in_parts(*self.fused) if self.fused else None


@dataclass(frozen=True)
class Case:
    """A row in the words of the time model."""

    row: Row
    shape: Shape
    setting: Setting
    stack: Stack
    gpu: Gpu
    gpus: int
    counted: float  # tokens that the source counts per micro-batch of one GPU
    timed: bool = True  # whether the tokens of a batch are known: else good for ratios only

    @property
    def published(self) -> float:
        """Tokens per second and GPU."""
        speed = _number(self.row["tokens_per_s"])
        if not speed:
            return self.counted / _number(self.row["step_time_s"])
        whole = any(name in self.row["framework"] for name in _WHOLE_JOB)
        if "torchtune README" in self.row["source"]:
            whole = True
        return speed / self.gpus if whole else speed


def read_case(row: Row) -> Case | str:
    """What a row ran, or why that cannot be said."""
    text = " ".join((row["notes"], row["framework"], row["attention"], row["optimizer"])).lower()
    for mark, reason in _CANNOT.items():
        if re.search(mark, text):
            return reason
    if not _number(row["tokens_per_s"]) and not _number(row["step_time_s"]):
        return "no speed is given"
    shape = next(
        (shape for pattern, shape in SHAPES.items() if re.search(pattern, row["model"].lower())),
        None,
    )
    if shape is None:
        return f"the shape of {row['model']} is not in the table"
    try:
        gpu = _gpu(row)
    except ConfigError:
        return f"GPU {row['gpu']!r} is not in the table"
    batch = int(_number(row["batch_per_gpu"]))
    if not batch:
        return "the batch is not given"
    method = _method(row)
    if method is None:
        return f"time of the method {row['method']} is not modelled"
    gpus = int(_number(row["n_gpus"])) or 1
    if gpus > 8:
        return "several machines are not modelled"
    length, counted = _lengths(row, batch)
    if not length:
        return "the length is not given"
    setting, stack = _stack(row, Setting(batch, length, **method), gpus)
    if gpu.capability[0] == 10:
        stack = replace(stack, attention="cudnn")
    timed = row["seq_len"] != "alpaca dynamic"
    return Case(row, shape, setting, stack, gpu, gpus, counted or setting.tokens, timed)


def _gpu(row: Row) -> Gpu:
    """The GPU of a row; a power limit slows its clock by about the root of what it takes away.

    PyTorch's own H100 have 500 W and HBM2e (2.4 TB/s), as torchtitan's tables say, and its B200
    750 W, as torchao's do.
    """
    name = row["gpu"]
    if row["source"].startswith("pytorch/") and name.startswith("H100"):
        name = "H100-96GB HBM2e 500W"
    if row["source"].startswith("pytorch/") and name.startswith("B200"):
        name = "B200 (power limited)"
    bare = re.sub(r"\(.*\)|\d+W|-24GB|HBM2e|-9[56]GB|-184GiB|16GB", "", name).strip()
    spaced = re.sub(r"RTX(\d)", r"RTX \1", bare).replace("70Ti", "70 Ti")
    gpu = named_gpu(spaced)
    limit = {"280W": 280 / 350, "500W": 500 / 700, "power limited": 750 / 1000}
    share = next((value for mark, value in limit.items() if mark in name), 1.0)
    tflops = {peak: value * math.sqrt(share) for peak, value in gpu.tflops.items()}
    speed = 2400.0 if "HBM2e" in name else gpu.gb_s
    return gpu.model_copy(update={"tflops": tflops, "gb_s": speed})


def _method(row: Row) -> dict[str, Any] | None:
    method, precision = row["method"], row["precision"].lower()
    if method.startswith("full"):
        return {"method": "full"}
    if method not in ("lora", "qlora"):
        return None
    name = row["notes"].split(";")[0]
    if re.search(r"dora|lorafa|mica|bdlora|--lora-.*variant", name):
        return None
    targets = row["lora_targets"]
    found = [
        linear for linear in ATTENTION_LINEARS if linear[0] in re.findall(r"\b([qkvo])\b", targets)
    ]
    found += [linear for linear in (*ATTENTION_LINEARS, *MLP_LINEARS) if linear in targets]
    if re.search(r"mlp|gate", targets):
        found += MLP_LINEARS
    if "no o_pro" in targets and "o_proj" in found:
        found.remove("o_proj")
    packed = method == "qlora" or "nf4" in precision or "gptq" in precision
    return {
        "method": "lora",
        "rank": int(_number(row["lora_rank"])) or 8,
        "targets": tuple(dict.fromkeys(found)) or ("q_proj", "v_proj"),
        "base_bits": 4 if packed else 16,
        "adapter_dtype": "float32" if "no autocast" in precision else "bfloat16",
    }


def _lengths(row: Row, batch: int) -> tuple[int, float]:
    """(length of a row of the batch, tokens that the source counts per batch or 0 for all)."""
    text = (row["notes"] + row["seq_len"]).lower()
    if "metamathqa" in text:
        return _MEAN_LENGTHS["metamathqa"], 210.0 * batch
    if "alpaca" in text and "packed" not in text:
        # the longest of a batch: lengths are about exponential, so it grows with the logarithm
        length = round(_MEAN_LENGTHS["alpaca"] * (1 + 0.5 * math.log(batch)))
        counted = 0.0 if row["step_time_s"] else float(_MEAN_LENGTHS["alpaca"] * batch)
        return length, counted
    return int(_number(row["seq_len"])), 0.0


def _number(text: str) -> float:
    """The number that a text begins with, 0 where there is none."""
    found = re.match(r"\d+(\.\d+)?", text.replace(",", ""))
    return float(found[0]) if found else 0.0


def _fp8(row: Row) -> dict[str, Any]:
    precision, framework = row["precision"].lower(), row["framework"].lower()
    if "mxfp8" in precision:
        return {"fp8": "blocks"}
    if "rowwise" in precision:
        return {"fp8": "rowwise"}
    if "fp8" in precision or "float8" in precision:
        delayed = re.search(_ENGINE, framework + row["notes"].lower())
        return {"fp8": "delayed" if delayed else "tensorwise"}
    return {}


def _stack(row: Row, setting: Setting, gpus: int) -> tuple[Setting, Stack]:
    framework, precision = row["framework"].lower(), row["precision"].lower()
    checkpointing = row["grad_ckpt"].lower()
    kept = "off"
    if re.match(r"on|full|fsdp|config default", checkpointing):
        kept = "full"
    elif re.match(r"selective|per-op|auto", checkpointing):
        kept = "selective"
    sharded = gpus > 1 and "ddp" not in row["notes"].lower()
    setting = replace(setting, checkpointing=kept, shards=gpus if sharded else 1, **_fp8(row))
    if "llm.q" in framework:
        micro = max(1, 524_288 // (setting.tokens * gpus))
        setting = replace(
            setting,
            accumulation=micro,
            shards=1,
            loss="fused",
            optimizer="fused",
            compiled=True,
            turn_codes=True,
            cast_weights_once=bool(setting.fp8),
        )
        return setting, Stack("native", ("*",), "cudnn")
    loss = "fused" if re.search("fast|liger|chunk|cut", row["fused_ce"]) else "plain"
    setting = replace(setting, loss=loss)
    if "torchtitan" in framework:
        setting = replace(
            setting,
            weight_dtype="float32",
            state_dtype="float32",
            optimizer="fused",
            cast_weights_once=setting.fp8 == "tensorwise" and setting.shards > 1,
        )
    if "8bit" in row["optimizer"].lower() or "8-bit" in row["optimizer"].lower():
        setting = replace(setting, optimizer="8bit")
    elif "fused" in row["optimizer"].lower():
        setting = replace(setting, optimizer="fused")
    if re.search(r"fp32 (params|weights|master)|mixed", precision):
        setting = replace(setting, weight_dtype="float32", state_dtype="float32")
    text = " ".join((framework, precision, row["notes"].lower()))
    if "compile" in text or ("torchtitan" in framework and "eager" not in text):
        return replace(setting, compiled=True), Stack("compiled", ("*",))
    if re.search("nemo|megatron", framework):
        return replace(setting, compiled=True), Stack("compiled", ("*",))
    if re.search("unsloth|liger", framework + row["fused_ce"]) and "foak" not in framework:
        return setting, Stack("eager", FUSED_PARTS)
    if re.search(_ENGINE, framework + row["notes"].lower()):
        return setting, Stack("eager", ("norm", "rotary", "act_fn"))
    if "foak" in framework:
        parts = (
            FUSED_PARTS
            if setting.method == "lora" or "liger" in framework
            else (
                "norm",
                "rotary",
                "loss",
            )
        )
        return setting, Stack("eager", parts)
    if "litgpt" in framework:
        setting = replace(setting, accumulation=max(1, 128 // setting.batch))
        return setting, Stack("slow")
    return setting, Stack("eager")
