"""What the update of an 8B in host memory costs: seconds, bytes, and what more cores would take.

    python -m tests.benchmarks.host_update --numbers 8.03e9     an 8B's tensors, in their order
    python -m tests.benchmarks.host_update --others             beside other libraries' optimizers

Memory is that of one tensor of each shape, 4 to 6 GB, which the model's tensors share: those of a
layer lie apart, so that none is in a cache when its turn comes again. `--others` steps a tensor of
4M numbers (`--size`) by each optimizer in turn, by one thread and by all. A machine may have other
work: the best of `--rounds` counts, and core-seconds are CPU time.

*Predicted* for other machines: `core-seconds / cores`, or `bytes / bandwidth` if that is longer.
Gradients are BF16, read once more for the norm.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchao import optim

from finetune.training.helper.optimizer import adamw, adamw_host, clipping
from tests.benchmarks.optimizer_update import shapes_of

KINDS = {"8 bits": optim.AdamW8bit, "FP8": optim.AdamWFp8, "4 bits": optim.AdamW4bit}
BYTES = {"8 bits": 2 + 1 / 32, "FP8": 2 + 1 / 32, "4 bits": 1 + 1 / 16}
"""Of both moments and their scales, a number; read and written."""
MACHINES = ((2, 40), (8, 70), (16, 70), (16, 300))
"""Cores, and GB/s that they reach: two of a server, two channels of DDR5-5600 (of 90), and a server
(stated, not measured).
"""


def noted_by_shape(
    kind: type[Any], dtype: torch.dtype, shapes: list[tuple[int, ...]]
) -> tuple[adamw.Update, dict[tuple[int, ...], adamw.Noted]]:
    """An update, and what a step notes for one tensor of each shape."""
    weights = [nn.Parameter(torch.empty(s, dtype=dtype).normal_(std=0.02)) for s in {*shapes}]
    for p in weights:
        p.grad = torch.empty_like(p)
    optimizer: Any = kind(weights, lr=1e-5, bf16_stochastic_round=True)
    update, noted = adamw.Update(optimizer), []
    update.attach()
    update.defer = noted.extend
    optimizer.step()
    for p in weights:  # of BF16 whatever the weights are, which torch would refuse
        p.grad = None
    found = {}
    for one in noted:
        gradient = torch.empty_like(one.parameter, dtype=torch.bfloat16).normal_(std=1e-3)
        found[tuple(one.parameter.shape)] = one._replace(
            asked=one.asked._replace(gradient=gradient)
        )
    return update, found


def whole(numbers: float, name: str, dtype: torch.dtype, rounds: int) -> None:
    """Norm and update of a model's tensors until there are so many numbers."""
    from finetune import load_recipe

    shapes = shapes_of(load_recipe("llama_8b_full_fp8").config)
    model = sum(map(math.prod, shapes))
    taken = [s for s, n in zip(shapes, itertools.accumulate(map(math.prod, shapes)), strict=True)
             if n <= numbers * 1.001]  # fmt: skip
    count = sum(map(math.prod, taken))
    update, noted = noted_by_shape(KINDS[name], dtype, taken)
    gradients = [noted[s].asked.gradient for s in taken]
    done: list[Tensor] = []

    def norm() -> None:
        clipping.sum_of_squares(gradients, update.tables)

    def step() -> None:
        update.finish([noted[s] for s in taken], done.append)

    traffic = {"norm": 2, "update": 2 * dtype.itemsize + 2 + 2 * BYTES[name]}
    print(
        f"{name}, {dtype}: {count / 1e9:.2f} of {model / 1e9:.2f} billion numbers, {len(taken)} "
        f"tensors, {torch.get_num_threads()} threads, best of {rounds}"
    )
    total = 0.0
    for what, act in {"norm": norm, "update": step}.items():
        pairs = [timed(act) for _ in range(rounds)]
        seconds, cores = (min(each) for each in zip(*pairs, strict=True))
        total += cores / count * model
        print(
            f"  {what:7} {seconds:6.2f} s, {traffic[what] * count / 1e9 / seconds:5.1f} GB/s of "
            f"{traffic[what]:.1f} bytes a number; {cores:.1f} core-seconds"
        )
    assert len(done) == rounds * len(taken)
    gigabytes = sum(traffic.values()) * model / 1e9
    print(f"both, predicted for {model / 1e9:.2f} billion numbers, {gigabytes:.0f} GB:")
    for many, bandwidth in MACHINES:
        by_core, by_memory = total / many, gigabytes / bandwidth
        print(
            f"  {many:2} idle cores, {bandwidth:3} GB/s: {max(by_core, by_memory):5.2f} s (cores "
            f"{by_core:.2f}, memory {by_memory:.2f})"
        )


def timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and those of all cores that worked on it."""
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - cpu


# ------------------------------------------------------------------------------- other libraries


def contenders(size: int) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """(name, bytes a number, step) of what can update a tensor in host memory."""

    def parameter(dtype: torch.dtype) -> nn.Parameter:
        p = nn.Parameter(torch.randn(size).to(dtype))
        p.grad = torch.randn_like(p)
        return p

    for dtype, each in ((torch.float32, 28), (torch.bfloat16, 14)):
        fused = torch.optim.AdamW([parameter(dtype)], fused=True)
        yield f"torch fused, {dtype}, states the same", each, fused.step
    for dtype, states, each in (
        (torch.float32, True, 28), (torch.bfloat16, True, 22), (torch.bfloat16, False, 14)
    ):  # fmt: skip
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]
        except ImportError:
            break
        cpu = DeepSpeedCPUAdam([parameter(dtype)], fp32_optimizer_states=states)
        yield f"DeepSpeed, {dtype}, states {'float32' if states else 'the same'}", each, cpu.step
    from bitsandbytes.optim import AdamW8bit

    for dtype, each in ((torch.float32, 16), (torch.bfloat16, 10)):
        yield f"bitsandbytes 8 bits, {dtype}", each, AdamW8bit([parameter(dtype)]).step  # pyright: ignore
    for name, kind in KINDS.items():
        for dtype in (torch.float32, torch.bfloat16):
            each = 3 * dtype.itemsize + 2 * BYTES[name]
            yield f"ours, {name}, {dtype}", each, stepped(kind, parameter(dtype), 0)
    for dtype in (torch.float32, torch.bfloat16):
        each = 3 * dtype.itemsize + 2 * BYTES["8 bits"]
        yield f"torchao 8 bits, {dtype}", each, stepped(optim.AdamW8bit, parameter(dtype), math.inf)


def stepped(kind: type[Any], p: nn.Parameter, least: float) -> Callable[[], None]:
    optimizer: Any = kind([p], bf16_stochastic_round=True)
    adamw.Update(optimizer).attach()

    def step() -> None:
        adamw_host.LEAST = least  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()

    return step


def others(size: int, rounds: int) -> None:
    runs, threads = list(contenders(size)), torch.get_num_threads()
    best: dict[Any, float] = {}
    for turn, (count, (name, _, step)) in itertools.product(
        range(rounds + 1), itertools.product((1, threads), runs)
    ):
        if name.startswith("torchao") and turn > 2:
            continue  # seconds each
        torch.set_num_threads(count)
        began, cpu = time.perf_counter(), time.thread_time()
        step()
        if turn:  # the first makes states
            key = (name, count)
            best[key] = min(best.get(key, math.inf), time.perf_counter() - began)
            if count == 1:
                best[name] = min(best.get(name, math.inf), time.thread_time() - cpu)
    print(f"a billion numbers, of {size / 1e6:.1f} million at a time, best of {rounds}")
    print(f"{'':50} bytes  core-seconds  s, 1 thread  s, {threads} threads  GB/s")
    for name, each, _ in runs:
        own, one, every = (best[key] / size * 1e9 for key in (name, (name, 1), (name, threads)))
        print(f"{name:50} {each:5.1f} {own:13.2f} {one:12.2f} {every:12.2f} {each / every:5.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--numbers", type=float, default=2e9)
    parser.add_argument("--states", choices=[*KINDS], default="8 bits")
    parser.add_argument("--weights", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--size", type=float, default=2**22)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.others:
        others(int(options.size), options.rounds)
    else:
        whole(options.numbers, options.states, getattr(torch, options.weights), options.rounds)


if __name__ == "__main__":
    main()
