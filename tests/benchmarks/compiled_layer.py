"""What `torch.compile` makes of one decoder layer: bytes saved for backward, kernels, bytes moved.

    python -m tests.benchmarks.compiled_layer [--tokens 8192] [--json]
    python -m tests.benchmarks.compiled_layer --gpu     time and bandwidth of our casts, on a GPU

One layer of Llama 3.1 8B, built, adapted and converted as in a run, on fake tensors; without
gradient checkpointing unless the name says so. Saved: storages that AOTAutograd's partition keeps,
without parameters and the layer's input. The rest is counted in the code that Inductor writes for
an H100, which needs Triton and no GPU (`tests.benchmarks.inductor_code`). `model` is what the
estimator predicts of the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from finetune import load_recipe
from finetune.config.schema import RunConfig
from finetune.estimator.speed.fusion import launches
from finetune.estimator.speed.timing import micro_batch
from finetune.estimator.trace.compiled import as_compiled
from finetune.estimator.trace.fake_cuda import choose_attention, on_gpu, to_fake, without_memory
from finetune.estimator.trace.rehearsal import rehearse
from finetune.estimator.trace.stand_ins import store_base
from finetune.estimator.trace.trace import layer_of
from finetune.hardware.gpus import machine_of
from finetune.hardware.requirements import resolve_there
from finetune.precision import convert, planner
from finetune.precision.model import compiling
from finetune.training.model import meta_model

GPU = "H100"
ALL = ("lora.r=8", "lora.target_modules=all-linear")
RANK_32 = ("lora.r=32", "lora.target_modules=all-linear")
CHECKPOINTED = "train.gradient_checkpointing=true"
LAYERS = {
    "BF16 LoRA": ("llama_8b_lora_bf16", (*ALL, "precision.compile=on")),
    "FP8 LoRA": ("llama_8b_lora_fp8", ALL),
    "BF16 full": ("llama_8b_full_bf16", ("precision.compile=on",)),
    "FP8 full": ("llama_8b_full_fp8", ()),
    "FP8 full, float32 scales": ("llama_8b_full_fp8", ("precision.power_of_two_scales=false",)),
    "FP8 full, rowwise": (
        "llama_8b_full_fp8",
        ("precision.scaling=rowwise", "~precision.power_of_two_scales"),
    ),
    "BF16 full, checkpointed": ("llama_8b_full_bf16", ("precision.compile=on", CHECKPOINTED)),
    "FP8 full, checkpointed": ("llama_8b_full_fp8", (CHECKPOINTED,)),
    "BF16 LoRA, rank 32": ("llama_8b_lora_bf16", (*RANK_32, "precision.compile=on")),
    "FP8 LoRA, rank 32": ("llama_8b_lora_fp8", RANK_32),
    "BF16 LoRA, checkpointed": (
        "llama_8b_lora_bf16",
        (*ALL, "precision.compile=on", CHECKPOINTED),
    ),
    "FP8 LoRA, checkpointed": ("llama_8b_lora_fp8", (*ALL, CHECKPOINTED)),
}
"""Layer -> recipe and overrides; adapters of rank 8 (or as named) on all linear layers."""


class Graphs(NamedTuple):
    """Graphs of forward and backward as the partition makes them, and their fake inputs."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    inputs: dict[str, list[Any]]


def config_of(layer: str, tokens: int) -> RunConfig:
    """Recipe of a layer in one row of `tokens` tokens."""
    recipe, overrides = LAYERS[layer]
    shape = (
        "train.gradient_checkpointing=false",
        "train.gradient_accumulation_steps=1",
        "train.per_device_train_batch_size=1",
        f"train.max_length={tokens}",
    )
    return load_recipe(recipe, (*shape, *overrides)).config


def graphs_of(config: RunConfig, tokens: int) -> Graphs:
    """Compile the first layer of a run as far as AOTAutograd's partition."""
    found: dict[str, Any] = {}

    def keep(module: Any, inputs: Any, *_: Any, is_backward: bool = False, **__: Any) -> Any:
        from functorch.compile import make_boxed_func

        found["backward" if is_backward else "forward"] = module, list(inputs)
        return make_boxed_func(module.forward)

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=keep)

    machine = machine_of(GPU)
    resolution = resolve_there(config.precision, machine)
    model: Any = meta_model(config, layers=1)
    plan = planner.plan(model, resolution.precision)
    torch._dynamo.reset()
    with without_memory(), on_gpu(machine.device.capability or (9, 0)), ExitStack() as stack:
        for function in _SLOW_PATTERNS:  # of attention and padding, which the layer has not
            stack.enter_context(mock.patch(function))
        # A CUDA build of torch would start its driver, which a machine without a GPU has not.
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context"))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        to_fake(model)
        # Named: the choice of `varlen` looks at versions, which Dynamo would trace.
        choose_attention(model, "flash_attention_2", machine.device.capability or (9, 0))
        store_base(model, config.model.storage)
        convert.apply(model, plan, hardware=True)
        compiling.prepare()
        if config.train["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layer: Any = next(
            m for m in model.train().modules() if type(m).__name__ == "LlamaDecoderLayer"
        )
        sizes = model.config
        x = torch.empty(1, tokens, sizes.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        width = sizes.hidden_size // sizes.num_attention_heads
        angles = torch.empty(1, tokens, width, dtype=torch.bfloat16)

        # As `Conversion.compile_layers` compiles it, but for the backend.
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, position_embeddings=(angles, angles), attention_mask=None)
        y.sum().backward()
    inputs = {name: inputs for name, (_, inputs) in found.items()}
    return Graphs(found["forward"][0], found["backward"][0], inputs)


_SLOW_PATTERNS = (
    "torch._inductor.fx_passes.fuse_attention._sfdp_init",
    "torch._inductor.fx_passes.pad_mm._pad_mm_init",
    "torch._inductor.fx_passes.misc_patterns._misc_patterns_init",
)


def saved_bytes(graphs: Graphs) -> int:
    """Bytes of storages that forward hands to backward, besides its own inputs."""
    (output,) = graphs.forward.graph.find_nodes(op="output")
    sizes: dict[int, int] = {}
    for node in output.args[0][1:]:
        value = getattr(node, "meta", {}).get("val")
        if isinstance(value, Tensor) and node.op != "placeholder":
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def modeled(config: RunConfig) -> dict[str, Any]:
    """What the estimator predicts of the same layer: a third layer beside two."""
    machine = machine_of(GPU)
    resolution = resolve_there(config.precision, machine)
    totals: list[dict[str, float]] = []
    for layers in (2, 3):
        rehearsal = rehearse(config, machine.device, resolution, layers=layers)
        trace = as_compiled(rehearsal).trace
        saved = sum(
            trace.storages[number].nbytes
            for number in trace.alive(trace.marks["backward"] - 1) - trace.initial.keys()
            if trace.storages[number].phase == "forward"
        )
        moved = {"forward": 0.0, "backward": 0.0}  # which recomputes in its own graph
        ops, _ = micro_batch(trace)
        for launch in launches(ops, lambda op: layer_of(op.module)):
            op = ops[launch.ops[0]]
            phase = "forward" if op.phase == "forward" else "backward"
            if layer_of(op.module) and launch.kind not in _GEMMS:
                moved[phase] += launch.read + launch.written
        width = 2 * rehearsal.tokens * 4096  # the layer's input
        totals.append({"saved": saved - (layers - 1) * width, **moved})
    return {key: totals[1][key] - totals[0][key] for key in totals[0]}


_GEMMS = ("gemm", "attention")


def counts(layers: list[str], tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Counts of layers; patches for Inductor's code come after all that is not to see them."""
    compiler = find_spec("triton") is not None
    every = {name: graphs_of(config_of(name, tokens), tokens) for name in layers}
    models = {name: modeled(config_of(name, tokens)) for name in layers}
    for name, graphs in every.items():
        found = {"saved": saved_bytes(graphs), "model": models[name]}
        if compiler:
            from tests.benchmarks import inductor_code

            for phase in ("forward", "backward"):
                code = inductor_code.code_of(getattr(graphs, phase), graphs.inputs[phase], phase)
                found[phase] = inductor_code.count(code)
        yield name, found


def casts(tokens: int) -> Iterator[tuple[str, float, float]]:
    """Name, milliseconds and TB/s of each cast of a full layer, guessed right and wrong."""
    from finetune.precision.numbers.formats import E4M3, E5M2
    from finetune.precision.numbers.kernels import cast_whole, swiglu_backward_cast, swiglu_cast

    x, w = torch.randn(tokens, 4096), torch.randn(14336, 4096)
    dy, gate, up = torch.randn(3, tokens, 14336, dtype=torch.bfloat16, device="cuda")
    x, w = x.to(dy), w.to(dy)
    guesses, scale = torch.zeros(2, 3, device="cuda"), torch.ones((), device="cuda")
    runs: dict[str, tuple[Callable[[], Any], float]] = {
        "a weight": (lambda: cast_whole(w, guesses[0], 1, E4M3, pow2=True), 3.0 * w.numel()),
        "a gradient": (
            lambda: cast_whole(x, guesses[0], 2, E5M2, pow2=True, turned=True),
            4.0 * x.numel(),
        ),
        "SwiGLU": (lambda: swiglu_cast(gate, up, guesses[0], 0, E4M3, pow2=True), 5.0 * up.numel()),
        "SwiGLU's backward": (
            lambda: swiglu_backward_cast(
                dy, gate, up, scale, (guesses[0], guesses[1]), 2, E4M3, E5M2, pow2=True
            ),
            11.0 * up.numel(),
        ),
    }
    for name, (run, moved) in runs.items():
        for right in (True, False):
            taken = []
            for _ in range(13):
                if not right:
                    guesses.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                taken.append(begin.elapsed_time(end))
            ms = statistics.median(taken[3:])
            yield f"{name}, {'guessed' if right else 'cast twice'}", ms, moved / ms / 1e9


def row(name: str, found: dict[str, Any]) -> str:
    """Line of the table."""
    cells = [f"{found['saved'] / 1e6:,.0f} ({found['model']['saved'] / 1e6:,.0f})"]
    if "forward" in found:
        for key in ("kernels", "fp8_gemms", "gemms", "code_stores", "transposes"):
            cells.append(" / ".join(str(found[phase][key]) for phase in ("forward", "backward")))
        moved = [
            f"{found[phase]['bytes'] / 1e9:.2f} ({found['model'][phase] / 1e9:.2f})"
            for phase in ("forward", "backward")
        ]
        cells.append(" / ".join(moved))
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print a Markdown table, or JSON: layer -> counts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layer", action="append", choices=LAYERS, help="left out: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="time our casts, on this GPU")
    args = parser.parse_args()
    if args.gpu:
        for name, ms, rate in casts(args.tokens):
            print(f"{name:32} {ms:.3f} ms, {rate:.2f} TB/s of what a right guess moves")
        return
    warnings.simplefilter("ignore")
    every = dict(counts(args.layer or list(LAYERS), args.tokens))
    if args.json:
        print(json.dumps(every))
        return
    titles = ["layer", "saved MB (model)"]
    if find_spec("triton") is None:
        print("Triton is not installed, so Inductor writes no code for a GPU", file=sys.stderr)
    else:
        titles += ["Triton kernels", "FP8 GEMMs", "other GEMMs", "stores of codes", "transposes"]
        titles += ["GB by other kernels (model)"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name, found in every.items():
        print(row(name, found))


if __name__ == "__main__":
    main()
