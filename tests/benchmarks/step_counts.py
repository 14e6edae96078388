"""Launches and bytes of a whole optimizer step of an 8B, under one or several versions of torch.

    python -m tests.benchmarks.step_counts [--tokens 8192] [--python OTHER/bin/python ...] [--json]

    step = 32 layers + head + update;  one micro-batch, forward and backward, no checkpointing

*Layer*: the code that Inductor writes for an H100 (`compiled_layer`); in parentheses the bytes that
the estimator predicts. *Head*: the operators of the output head and its loss (`head`). *Update*:
clipping and AdamW, of 8 bits by the arguments of its launches (`optimizer_update`), of adapters
torch's own, whose operators take all tensors at once; what touches single numbers is left out.
Bytes are those of all kernels but products and attention. Embedding and last norm are not counted.

Counts made under one torch are a prediction for another, whose Inductor writes other code; CUDA
builds of torch count as well, without a GPU. `--python` runs the same under each of them:

    python -m venv OTHER; OTHER/bin/pip install torch==2.11.0, and this project behind it (`.pth`)

Needs Triton, of that torch's series; without it layers have only what the estimator predicts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from finetune.config.schema import RunConfig
from finetune.estimator.speed.fusion import launches
from finetune.estimator.speed.timing import micro_batch
from finetune.estimator.trace.trace import Trace
from tests.benchmarks import compiled_layer, head, optimizer_update

LAYERS = 32
RUNS = ("BF16 full", "FP8 full", "BF16 LoRA", "FP8 LoRA")
"""Of `compiled_layer.LAYERS`."""
FEW = 4096
"""Bytes below which an operator of the update touches single numbers."""


class Count(NamedTuple):
    """Launches, and bytes that those move which are no product or attention."""

    launches: int
    nbytes: float

    def __str__(self) -> str:
        return f"{self.launches:,}, {self.nbytes / 1e9:.2f}"


def update_of(config: RunConfig, trace: Trace) -> Count:
    """Clipping and update; `trace`: of one layer."""
    if config.train["optim"] == "adamw_torch_8bit":
        shapes = optimizer_update.shapes_of(config)
        launched = optimizer_update.counted_step(shapes)
        every = [optimizer_update.moved(name, *facts) for name, facts in launched]
        return Count(len(every), sum(every))
    once = micro_batch(trace)[1]
    moved = [launch.read + launch.written for launch in launches(once)]
    large = [nbytes for nbytes in moved if nbytes > FEW]
    return Count(len(large), LAYERS * sum(large))  # all that trains is in layers


def counted(tokens: int) -> dict[str, dict[str, Any]]:
    """Run -> part of its step -> count; the layer's is left out without Triton."""
    found: dict[str, dict[str, Any]] = {}
    for run in RUNS:
        config = compiled_layer.config_of(run, tokens)
        trace = head.trace_of(config)
        own = head.counted(trace)
        found[run] = {"update": update_of(config, trace)}
        found[run]["head"] = Count(own["GEMMs"] + own["kernels"], own["bytes"])
    for run, layer in compiled_layer.counts([*RUNS], tokens):
        phases = [layer[phase] for phase in ("forward", "backward") if phase in layer]
        if phases:
            found[run]["layer"] = Count(
                sum(each["launches"] for each in phases), sum(each["bytes"] for each in phases)
            )
        found[run]["model"] = layer["model"]["forward"] + layer["model"]["backward"]
    return found


def row(run: str, version: str, parts: dict[str, Any]) -> str:
    """Line of the table."""
    model = f"({parts['model'] / 1e9:.2f})"
    if "layer" not in parts:
        cells = [model, *(str(Count(*parts[part])) for part in ("head", "update")), ""]
    else:
        layer, *rest = (Count(*parts[part]) for part in ("layer", "head", "update"))
        step = Count(*(LAYERS * x + sum(more) for x, *more in zip(layer, *rest, strict=True)))
        cells = [f"{layer} {model}", *map(str, rest), f"{step.launches:,}, {step.nbytes / 1e9:.1f}"]
    return f"| {run} | {version} | {' | '.join(cells)} |"


def main() -> None:
    """Print a Markdown table, or JSON: run -> part -> [launches, bytes]."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--python", nargs="*", default=[], help="interpreters of other versions")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    every = {torch.__version__: counted(args.tokens)}
    command = ["-W", "ignore", "-m", __spec__.name, "--json", f"--tokens={args.tokens}"]
    for python in args.python:
        run = subprocess.run([python, *command], stdout=subprocess.PIPE, text=True, check=True)
        every |= json.loads(run.stdout)
    if args.json:
        print(json.dumps(every))
        return
    if find_spec("triton") is None:
        print("Triton is not installed, so Inductor writes no code for a GPU", file=sys.stderr)
    titles = ["launches, GB", "torch", "layer (model)", "head", "update", "step of 32 layers"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name in RUNS:
        for version, found in every.items():
            print(row(name, version, found[name]))


if __name__ == "__main__":
    main()
