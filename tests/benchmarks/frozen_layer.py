"""A frozen FP8 layer against torchao's `Float8Linear` with a frozen weight, in one run.

    python -m tests.benchmarks.frozen_layer [--rounds 20] [--tokens 512] [--shapes 1024x1024,...]

Forward and backward (input gradient) of one linear layer on this machine's CPU. Each contender does
one round in turn, many times over, so that whatever else the machine does meets them all alike; a
ratio is that of two times of the same round, shown as median and quartiles. The goal is at most
0.75 of torchao's time.

What each does in a round, for a weight that does not train:

    torchao    cast x and W, product; cast g and W, product; cast g and x, product: 3 GEMMs, 6 casts
               from a BF16 weight, the third product to be dropped
    ours       cast x, product, fold and cast g, product: 2 GEMMs, 2 casts, W in one byte a number
    bf16 kept  our torchao backend with `frozen: bf16`: 2 GEMMs, 4 casts, two of them of W
    BF16       a plain frozen `nn.Linear`, for information

*Engines.* Emulated: torchao's `emulate=True` (float32 GEMMs of dequantized BF16) and our emulation,
with BF16 GEMMs of the codes, as `emulation: allow` has it, and with float32 ones, as `exact`. Then
`torch._scaled_mm` in both. On some CPUs that is a loop thousands of times as slow as a matmul, so
its sizes are small unless `--real-shapes` and `--real-tokens` say otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from finetune.config.schema import PrecisionConfig
from finetune.precision.backends.base import Tally
from finetune.precision.backends.frozen import FrozenBackend
from finetune.precision.backends.torchao import TorchaoBackend
from finetune.precision.stored import store
from finetune.precision.swap import swap

TORCHAO = "torchao"


def plain(n: int, k: int) -> nn.Linear:
    """A frozen BF16 layer with the same weight each time."""
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False, dtype=torch.bfloat16).requires_grad_(False)


def ours(n: int, k: int, scaling: Any, emulation: Any, emulate: bool) -> nn.Module:
    """The layer held as codes, as `convert.apply` makes it."""
    layer = plain(n, k)
    store(layer, "row" if scaling == "rowwise" else "tensor")
    precision = PrecisionConfig(
        compute="fp8", backend="emulated", scaling=scaling, emulation=emulation, frozen="fp8"
    )
    return _converted(layer, FrozenBackend(precision, emulate=emulate))


def bf16_kept(n: int, k: int, scaling: Any, emulate: bool) -> nn.Module:
    """Our torchao layer: no weight gradient, but a weight in BF16 that is cast at each use."""
    precision = PrecisionConfig(compute="fp8", backend="torchao", scaling=scaling, frozen="bf16")
    return _converted(plain(n, k), TorchaoBackend(precision, emulate=emulate))


def _converted(layer: nn.Module, engine: Any) -> nn.Module:
    swap(
        layer, engine.mixin, fp8_backend=engine, fp8_tally=Tally(), **engine.attributes(layer, None)
    )
    return layer.train()


def upstream(n: int, k: int, scaling: Any, emulate: bool) -> nn.Module:
    """torchao's own layer from its own recipe; `from_float` keeps the weight frozen."""
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    layer = Float8Linear.from_float(plain(n, k), config=config)
    assert not layer.weight.requires_grad
    return layer.train()


def round_of(layer: nn.Module, x: Tensor, g: Tensor) -> float:
    """Seconds of forward and backward; `x` is a new tensor, whose cast nobody has made before."""
    x = x.clone().requires_grad_()
    started = time.perf_counter()
    layer(x).backward(g)
    return time.perf_counter() - started


def measure(layers: dict[str, nn.Module], m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round of each layer."""
    torch.manual_seed(1)
    x, g = torch.randn(m, k).bfloat16(), (torch.randn(m, n) / n).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in layers}
    for index in range(rounds + 3):
        for name, layer in layers.items():
            seconds = round_of(layer, x, g)
            if index >= 3:
                times[name].append(seconds)
    return times


def row(name: str, times: list[float], base: list[float]) -> str:
    """A row of the table: milliseconds, and the ratio to torchao's time of the same round."""
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    spent = f"{statistics.median(times) * 1e3:.1f}"
    return f"| {name} | {spent} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def table(
    title: str,
    make: Callable[[int, int], dict[str, nn.Module]],
    m: int,
    n: int,
    k: int,
    rounds: int,
) -> str:
    """Markdown of one shape."""
    times = measure(make(n, k), m, n, k, rounds)
    lines = [
        f"{title}, {m} tokens, weight {n} x {k}",
        "",
        "| layer | ms | over torchao | quartiles |",
        "|---|---|---|---|",
    ]
    lines += [row(name, times[name], times[TORCHAO]) for name in times]
    return "\n".join(lines)


def contenders(scaling: str, *, emulate: bool) -> Callable[[int, int], dict[str, nn.Module]]:
    """Makes the layers of one table."""

    def make(n: int, k: int) -> dict[str, nn.Module]:
        layers = {TORCHAO: upstream(n, k, scaling, emulate)}
        layers["ours"] = ours(n, k, scaling, "allow", emulate)
        if emulate:
            layers["ours, exact"] = ours(n, k, scaling, "exact", emulate)
        layers["ours, bf16 kept"] = bf16_kept(n, k, scaling, emulate)
        layers["BF16"] = plain(n, k)
        return layers

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shapes", default="1024x1024,3072x1024,1024x3072", help="N x K")
    parser.add_argument("--real-shapes", default="256x256", help="on torch._scaled_mm")
    parser.add_argument("--real-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engines = {
        True: ("emulated", args.tokens, args.shapes),
        False: ("torch._scaled_mm", args.real_tokens, args.real_shapes),
    }
    for emulate, (title, tokens, shapes) in engines.items():
        for scaling in ("rowwise", "tensorwise"):
            make = contenders(scaling, emulate=emulate)
            for shape in shapes.split(","):
                n, k = (int(size) for size in shape.split("x"))
                print(table(f"{scaling}, {title}", make, tokens, n, k, args.rounds), flush=True)
                print()


if __name__ == "__main__":
    main()
