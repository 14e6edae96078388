"""LoRA on the shapes of Llama 3.1 8B, rung by rung: where FP8 LoRA loses, and where it wins.

    python -m tests.benchmarks.lora_ladder [--layers 32] [--tokens 4096] [--rank 16]
                                           [--ranks 8,64] [--steps 10] [--rungs fused,FP8]
    python -m tests.benchmarks.lora_ladder --tiny        # any machine, a minute: does it run?

Random weights, adapters on every linear layer of the decoder, BF16 autocast, gradient
checkpointing, AdamW, one micro-batch of `--tokens` a step in rows of 2048. Each rung is a model of
its own, built, warmed up, timed and dropped; a step is timed to the device's end. Shown are median
and quartiles of its time, tokens a second, and the most memory allocated in a timed step
(`torch.cuda.max_memory_allocated`; on a CPU, live tensors), against stock PEFT and against fused
BF16, all of one run. `--layers` makes a model that fits; ratios then hold for that depth.

    shipped          accelerate's torchao conversion: adapters of a rank divisible by 16 too, three
                     GEMMs a layer
    flags kept       `frozen: bf16`: adapters and head skipped, no weight gradient of the base
    stock            PEFT over BF16, Transformers' own kernels
    fused            BF16, adapters in one function with their base, Liger's kernels
    FP8 weight       base held in FP8, FP8 forward, BF16 input gradient (`high_gemms: [dgrad]`)
    FP8 dgrad        FP8 input gradient from the same codes, scales folded into g
    ... compiled     each decoder layer under `torch.compile`, which fuses the casts

Siblings share the cast of their input in every FP8 rung. A rung that Liger or the compiler did not
take part in says so by its name. One that does not fit or that fails has the reason in its row, and
those that `--seconds` leaves no time for are said to be missing: nothing is filled in.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import statistics
import sys
import time
import traceback
from typing import Any, NamedTuple

import torch

from finetune.config import ModelConfig, PrecisionConfig
from finetune.device import this_device
from finetune.errors import PrecisionError
from finetune.live_tensors import LiveTensors
from finetune.model import load_shape
from finetune.precision.convert import apply
from finetune.precision.planner import plan

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FP8 = {"compute": "fp8", "backend": "torchao", "emulation": "allow"}
ROW = FP8 | {"frozen": "fp8", "scaling": "rowwise"}
GIB = 2**30
LENGTH = 2048


class Rung(NamedTuple):
    """A way to train.

    Attributes:
        name: of its row.
        precision: a `PrecisionConfig`; None leaves the model to PEFT, `shipped` to accelerate.
        liger: Liger's kernels take part.
        compiled: decoder layers are compiled.
    """

    name: str
    precision: dict[str, Any] | str | None
    liger: bool = True
    compiled: bool = False


STOCK = Rung("stock", None, liger=False)
FUSED = Rung("fused", {"compute": "bf16"})
FUSED_COMPILED = Rung("fused, compiled", {"compute": "bf16"}, compiled=True)
BEST = Rung("FP8 dgrad, compiled", ROW, compiled=True)
LADDER = (
    Rung("shipped", "shipped", liger=False),
    Rung(
        "flags kept",
        FP8 | {"frozen": "bf16", "scaling": "tensorwise", "fused_adapters": False},
        liger=False,
    ),
    STOCK,
    FUSED,
    FUSED_COMPILED,
    Rung("FP8 weight", ROW | {"high_gemms": ("dgrad",)}),
    Rung("FP8 weight, compiled", ROW | {"high_gemms": ("dgrad",)}, compiled=True),
    Rung("FP8 dgrad", ROW),
    BEST,
    Rung(
        "FP8 dgrad per tensor, compiled",
        FP8 | {"frozen": "fp8", "scaling": "tensorwise"},
        compiled=True,
    ),
    Rung("FP8 dgrad, x kept in BF16, compiled", ROW | {"saved_input": "high"}, compiled=True),
)
FIRST = (STOCK, FUSED)  # what the others are measured against


class Job(NamedTuple):
    """What is trained.

    Attributes:
        layers, tokens, steps: decoder layers, tokens of a micro-batch, timed steps.
        tiny: a small width, for any machine.
    """

    layers: int
    tokens: int
    steps: int
    tiny: bool = False


class Result(NamedTuple):
    """Of one rung at one rank.

    Attributes:
        seconds: of each timed step, none where it failed.
        peak: bytes.
        liger: Liger's kernels took part.
        why: it failed.
    """

    seconds: list[float]
    peak: int = 0
    liger: bool = False
    why: str = ""


# ------------------------------------------------------------------------------------------ model


def shape_of(job: Job) -> Any:
    """Llama 3.1 8B with fewer layers, or a small model of the same kind."""
    name = "builtin:tiny_llama" if job.tiny else "meta-llama/Llama-3.1-8B-Instruct"
    config = load_shape(ModelConfig(name=name, weights="random"))
    config.num_hidden_layers = job.layers
    config.use_cache = False
    return config


def make_model(job: Job, rank: int, *, liger: bool, device: str) -> Any:
    """The model under its adapters, on the device, with checkpointing on."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(shape_of(job), dtype=torch.bfloat16)
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=base)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora).train()
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def convert(model: Any, rung: Rung, *, hardware: bool, tiny: bool) -> None:
    """Make the model what the rung says."""
    if rung.precision is None:
        return
    if isinstance(rung.precision, str):
        from accelerate.utils.ao import convert_model_to_fp8_ao
        from torchao.float8 import Float8LinearConfig

        config = dataclasses.replace(Float8LinearConfig(), emulate=not hardware)
        convert_model_to_fp8_ao(model, config=config)
        return
    precision = PrecisionConfig.model_validate(rung.precision)
    conversion = apply(model, plan(model, precision), hardware=hardware)
    if rung.compiled and not tiny:
        conversion.compile_layers()
    elif rung.compiled:  # without the compiler's back end, which takes longer than all the rest
        for layer in model.base_model.model.model.layers:
            layer.compile(backend="aot_eager")


# ------------------------------------------------------------------------------------------ a rung


def has_liger(device: str) -> bool:
    """Its kernels run on GPUs alone."""
    return device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def climb(rung: Rung, job: Job, rank: int) -> Result:
    """Build, warm up, time and drop one rung."""
    machine = this_device()
    device = machine.kind
    liger = rung.liger and has_liger(device)
    torch._dynamo.reset()
    model = make_model(job, rank, liger=liger, device=device)
    convert(model, rung, hardware=bool(machine.has_fp8), tiny=job.tiny)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    length = min(job.tokens, LENGTH)
    shape = (job.tokens // length, length)
    ids = torch.randint(1, model.config.vocab_size, shape, device=device)

    def step() -> float:
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(1 if job.tiny else 4):
        step()
    if device == "cuda":
        torch.cuda.empty_cache()  # what building and compiling took
        torch.cuda.reset_peak_memory_stats()
    seconds = [step() for _ in range(job.steps)]
    if device == "cuda":
        return Result(seconds, torch.cuda.max_memory_allocated(), liger)
    torch._dynamo.reset()
    for module in model.modules():
        module._compiled_call_impl = None  # a dispatch mode sees eager operators only
    state = [v for s in optimizer.state.values() for v in s.values()]
    with LiveTensors([*model.parameters(), *model.buffers(), *state]) as live:
        step()
    return Result(seconds, live.peak, liger)


def attempt(rung: Rung, job: Job, rank: int) -> Result:
    """A result also where the rung does not fit, or does not compile."""
    try:
        return climb(rung, job, rank)
    except torch.OutOfMemoryError:
        why = "out of memory"
    except RuntimeError as error:  # what torch and its compiler raise
        traceback.print_exc()
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
    return Result([], why=why)


def free() -> None:
    """Give back what a rung has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------- table

RUNGS = {rung.name: rung for rung in LADDER}
Results = dict[tuple[str, int], Result]
"""Name of a rung and rank -> what came of it."""
HEAD = (
    "| rung | rank | ms a step | quartiles | tokens/s | over stock | over fused | peak GiB "
    "| over stock | over fused |\n|---|---|---|---|---|---|---|---|---|---|"
)


def row_of(name: str, rank: int, results: Results, tokens: int) -> str:
    """A row; speed and memory against stock and fused of the same rank."""
    result = results[name, rank]
    if RUNGS[name].liger and not result.liger and not result.why:
        name += " (no Liger)"
    if result.why:
        why = result.why.replace("|", "/")
        return f"| {name} | {rank} | {why} |" + " |" * 7
    middle = statistics.median(result.seconds)
    low, _, high = statistics.quantiles(result.seconds, n=4)
    speed, memory = [], []
    for base in FIRST:
        other = results.get((base.name, rank))
        if other is None or other.why:
            speed.append("")
            memory.append("")
        else:
            speed.append(f"{statistics.median(other.seconds) / middle:.2f}x")
            memory.append(f"{result.peak / other.peak:.2f}x")
    cells = [
        name, str(rank), f"{middle * 1e3:.0f}", f"{low * 1e3:.0f} to {high * 1e3:.0f}",
        f"{tokens / middle:,.0f}", *speed, f"{result.peak / GIB:.2f}", *memory,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(results: Results, tokens: int) -> str:
    """Markdown in the order of the ladder, then by rank."""
    ranks = list(dict.fromkeys(rank for _, rank in results))
    order = [(name, rank) for rank in ranks for name in RUNGS if (name, rank) in results]
    return "\n".join([HEAD, *(row_of(name, rank, results, tokens) for name, rank in order)])


def jobs_of(rungs: list[str], rank: int, ranks: list[int]) -> list[tuple[Rung, int]]:
    """What to run, in order: both baselines first, then the ladder, then the other ranks."""
    asked = [r for r in LADDER if not rungs or any(part in r.name for part in rungs)]
    first = [*FIRST, *(r for r in asked if r not in FIRST)]
    others = [rung for rung in (STOCK, FUSED, FUSED_COMPILED, BEST) if rung in first]
    return [(r, rank) for r in first] + [(r, n) for n in ranks for r in others]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ranks", default="8,64", help="of the best rung and its baselines")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rungs", default="", help="parts of names, comma-separated")
    parser.add_argument("--seconds", type=float, default=520, help="begin no rung after this")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    machine = this_device()
    if not args.tiny and not machine.has_fp8:
        raise PrecisionError(
            "the ladder needs an FP8 GPU", why=machine.has_fp8.reason, fix="--tiny runs anywhere"
        )
    job = Job(args.layers, args.tokens, args.steps)
    if args.tiny:
        torch.set_num_threads(1)
        job = Job(min(args.layers, 2), 64, 3, tiny=True)
    print(f"{machine.name}, {job.layers} layers, {job.tokens} tokens a step\n{HEAD}", flush=True)
    results: Results = {}
    began, left_out = time.perf_counter(), []
    ranks = [int(r) for r in args.ranks.split(",") if r]
    for rung, rank in jobs_of([p for p in args.rungs.split(",") if p], args.rank, ranks):
        if time.perf_counter() - began > args.seconds:
            left_out.append(f"{rung.name} at rank {rank}")
            continue
        results[rung.name, rank] = attempt(rung, job, rank)
        free()
        print(row_of(rung.name, rank, results, job.tokens), flush=True)
    print(f"\nBy rung:\n\n{table(results, job.tokens)}")
    if left_out:
        print(f"\nNot run, out of time: {', '.join(left_out)}")
    if any(result.why for result in results.values()):
        sys.exit("not all rungs ran")


if __name__ == "__main__":
    main()
