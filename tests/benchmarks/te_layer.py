"""A decoder layer of 8B under Transformer Engine, uncompiled and compiled, beside torchao.

    python -m tests.benchmarks.te_layer [--tokens 8192] [--checkpointed]

Launches and bytes of one layer, forward and backward. Uncompiled, those of the operators that run,
as the estimator rehearses them. Compiled, those of the code that Inductor writes for an H100
(`tests.benchmarks.compiled_layer`), with the engine's casts and products as the operators that they
are; without Triton only the predictions are printed. Needs the engine's Python
(`python -m tests.te.fetch`) and no GPU. Milliseconds of a step are *predicted* (`estimate`).

A cast of the engine by the tensor's own scale is four kernels, of which two do no more than set its
amax to zero and make a scale of it (trace of an H100, TE 2.20.2): it reads a number twice. That is
so where scales are float32. Where they are powers of two, two kernels of ours cast
(`finetune.precision.engines.whole`), and read it once where the scale was guessed.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest

from finetune import load_recipe
from finetune.config.schema import RunConfig
from finetune.estimator.predict import predict
from finetune.estimator.speed.fusion import launches
from finetune.estimator.speed.timing import micro_batch
from finetune.estimator.trace.rehearsal import rehearse
from finetune.hardware.gpus import machine_of
from finetune.hardware.requirements import resolve_there
from tests import te
from tests.benchmarks.compiled_layer import GPU, Graphs, graphs_of, saved_bytes

KERNELS_OF_A_CAST, OF_OURS = 4, 2
UNCOMPILED = ("precision.backend=te", "precision.compile=off")
FLOAT32 = "precision.power_of_two_scales=false"
RUNS = {
    "te, float32 scales, uncompiled": (*UNCOMPILED, FLOAT32),
    "te, uncompiled": UNCOMPILED,
    "te, float32 scales, compiled": ("precision.backend=te", FLOAT32),
    "te, compiled": ("precision.backend=te",),
    "torchao, compiled": ("precision.backend=torchao",),
    "BF16, compiled": ("precision.compute=bf16", "precision.compile=on"),
}
Counts = dict[str, float]


def config_of(run: str, tokens: int, checkpointed: bool) -> RunConfig:
    """Recipe of a run in one row of `tokens` tokens."""
    shape = (
        f"train.gradient_checkpointing={str(checkpointed).lower()}",
        "train.gradient_accumulation_steps=1", "train.per_device_train_batch_size=1",
        f"train.max_length={tokens}",
    )  # fmt: skip
    return load_recipe("llama_8b_full_fp8", (*shape, *RUNS[run])).config


def uncompiled(config: RunConfig) -> Counts:
    """Launches and bytes of a layer whose operators are kernels: a third layer beside two."""
    machine, totals = machine_of(GPU), []
    for layers in (2, 3):
        resolution = resolve_there(config.precision, machine)
        ops, _ = micro_batch(rehearse(config, machine.device, resolution, layers=layers).trace)
        found: Counter[str] = Counter()
        for launch in launches(ops):
            casts = "fp8_" in ops[launch.ops[0]].name and launch.kind == "cast"
            found["launches"] += not casts
            found["products"] += launch.kind == "gemm"
            moves = launch.kind not in ("gemm", "attention")
            found["GB"] += (launch.read + launch.written) / 1e9 * moves
        for before, op in pairwise(ops):
            # Codes in two directions are two operators of the estimator, and one cast.
            again = before.name == op.name and before.inputs[:1] == op.inputs[:1]
            found["casts"] += "fp8_cast" in op.name and not again
        kernels = OF_OURS if config.precision.pow2_scales else KERNELS_OF_A_CAST
        found["launches"] += kernels * found["casts"]
        totals.append(found)
    return {key: totals[1][key] - totals[0][key] for key in totals[1]}


def compiled(graphs: Graphs) -> Counts:
    """Launches and bytes of a compiled layer: of Inductor's code, and the engine's beside it."""
    from tests.benchmarks import inductor_code

    found: Counts = Counter({"saved MB": saved_bytes(graphs) / 1e6})
    for phase in ("forward", "backward"):
        graph, inputs = getattr(graphs, phase), graphs.inputs[phase]
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", "")
            if name.startswith("te_cast."):
                x = node.args[0].meta["val"]
                made = sum(buffer.numel() for buffer in node.meta["val"])
                found["casts"] += 1
                found["launches"] += KERNELS_OF_A_CAST
                found["GB"] += (2 * x.numel() * x.element_size() + made) / 1e9
            found["casts"] += name.startswith("cast_whole.")
            found["products"] += name.startswith("te_mm")
            found["launches"] += name.startswith(("te_mm", "varlen_attention"))
        if find_spec("triton") is not None:
            count = inductor_code.count(inductor_code.code_of(graph, inputs, phase))
            found["fused kernels"] += count["kernels"]
            found["launches"] += count["kernels"] + count["gemms"] + count["fp8_gemms"]
            found["products"] += count["gemms"] + count["fp8_gemms"]
            found["GB"] += count["bytes"] / 1e9
    return found


def predicted(config: RunConfig) -> Counts:
    """Milliseconds of a step."""
    found: Any = predict(config, machine_of(GPU))
    return {"step ms": found.timing.seconds * 1e3}


COLUMNS = ("launches", "casts", "products", "fused kernels", "GB", "saved MB", "step ms")


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--checkpointed", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    configs = {run: config_of(run, args.tokens, args.checkpointed) for run in RUNS}
    rows: dict[str, Counts] = {run: predicted(config) for run, config in configs.items()}
    for run in (run for run in RUNS if "uncompiled" in run):
        rows[run] |= uncompiled(configs[run])
    with pytest.MonkeyPatch.context() as patch:
        te.install(patch, real=True)
        every = {
            run: graphs_of(configs[run], args.tokens) for run in RUNS if "uncompiled" not in run
        }
    for run, graphs in every.items():  # after all that is not to see a GPU that is not there
        rows[run] |= compiled(graphs)
    print(f"| one layer, {args.tokens:,} tokens | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for run, row in rows.items():
        cells = [
            f"{row[key]:,.2f}" if key == "GB" else f"{row[key]:,.0f}" if key in row else ""
            for key in COLUMNS
        ]
        print(f"| {run} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
