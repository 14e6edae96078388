"""What torchao's low-bit AdamW costs the host and the GPU for each tensor, and what it costs here.

    python -m tests.benchmarks.optimizer_update [--steps 30] [--kernels]

The host: 288 BF16 tensors are stepped by torchao and with `low_bit.around_steps` in turn, through
everything above the code that Inductor would write, which is left out: neither arithmetic nor the
launch of kernels (of which ours has fewer) counts. Prints the median CPU time of each, and the
median of their ratios.

The GPU (`--kernels`, which needs Triton and no GPU): kernels of the code that Inductor writes for
an H100, and bytes that they read and write for each number of a weight [4096, 4096], rounded to
nearest.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.optim import AdamW8bit

from finetune.training import low_bit
from finetune.training.replacing import replaced

TENSORS = 288


def backend_of(take: Callable[[Any, Any], None]) -> Any:
    """A backend of `torch.compile` that gives graphs and inputs away, and computes nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
        take(graph, inputs)
        return lambda *_: ()

    return aot_autograd(
        fw_compiler=compiled, inference_compiler=compiled, decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )  # fmt: skip


def optimizer_of(tensors: int, *shape: int) -> AdamW8bit:
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    return AdamW8bit(weights, lr=1e-3, bf16_stochastic_round=tensors > 1)


def host_time(steps: int) -> None:
    compiler = functools.partial(torch.compile, backend=backend_of(lambda *_: None))
    torchao, ours = optimizer_of(TENSORS, 64, 64), optimizer_of(TENSORS, 64, 64)
    with replaced(torch, "compile", compiler):
        low_bit.around_steps(ours, compiled=True)
        taken = in_turn({"torchao": torchao, "ours": ours}, steps)
    for name, each in taken.items():
        print(f"{name:8} {statistics.median(each):.3f} ms of host time a tensor")
    ratios = (b / a for a, b in zip(*taken.values(), strict=True))
    print(f"ours / torchao {statistics.median(ratios):.2f}")


def in_turn(optimizers: dict[str, AdamW8bit], steps: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time a tensor in each step, without the first three."""
    taken: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(steps + 3):
        for name, optimizer in optimizers.items():
            started = time.process_time()
            optimizer.step()
            taken[name].append((time.process_time() - started) / TENSORS * 1e3)
    return {name: each[3:] for name, each in taken.items()}


def kernels() -> None:
    from tests.benchmarks import inductor_code

    graphs: list[tuple[Any, Any]] = []
    compiler = functools.partial(torch.compile, backend=backend_of(lambda *x: graphs.append(x)))
    for how in (compiler, low_bit.compiled_once(compiler)):
        with replaced(torch, "compile", how):
            optimizer_of(1, 4096, 4096).step()
    for name, (graph, inputs) in zip(("torchao", "ours"), graphs, strict=True):
        found = inductor_code.count(inductor_code.code_of(graph, inputs, "forward"))
        print(f"{name:8} {found['kernels']} kernels, {found['bytes'] / 2**24:.1f} bytes a number")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torchao's states have no hash for torch's caches
    if args.kernels:
        kernels()
    else:
        host_time(args.steps)


if __name__ == "__main__":
    main()
