"""What our path costs over the same torchao conversion done by hand.

    python -m tests.benchmarks.step_overhead [--steps 40] [--hidden 256] [--layers 4]

Two copies of one model train in one process, a step of each in turn, so that a noisy machine slows
both alike: `ours` through `setup_fp8_mixed_precision_training` and `accelerator.prepare`, `by hand`
through `torchao.float8.convert_to_float8_training` with the same configuration and the same layers,
under the same autocast. Prints the median of the pairwise ratios; the goal is at most 1.02.

Weights are BF16, so that both compute the same operations: under autocast torchao's own layer would
take float32 inputs on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from finetune import setup_fp8_mixed_precision_training
from finetune.hardware.device import this_device
from finetune.precision.engines.torchao import ao_config
from finetune.precision.settings import PrecisionConfig


def make_model(hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, vocab_size=1024,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(this_device().kind, torch.bfloat16).train()


def stepper(accelerator: Accelerator, model: torch.nn.Module) -> Callable[[torch.Tensor], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return timed(accelerator, *accelerator.prepare(model, optimizer))


def timed(
    accelerator: Any, model: Any, optimizer: Any, clock: Callable[[], float] = time.perf_counter
) -> Callable[[torch.Tensor], float]:
    """Function that trains one step on token ids [B, L] and returns its seconds."""

    def step(ids: torch.Tensor) -> float:
        started = clock()
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        if ids.is_cuda:
            torch.cuda.synchronize()
        return clock() - started

    return step


def ratio_of_steps(steps: int, hidden: int, layers: int) -> list[float]:
    cpu = this_device().kind == "cpu"
    by_hand_model = make_model(hidden, layers)
    precision = PrecisionConfig(compute="fp8", backend="torchao")
    convert_to_float8_training(
        by_hand_model,
        config=ao_config(precision, emulate=cpu),
        module_filter_fn=lambda _, name: name != "lm_head",
    )
    by_hand = stepper(Accelerator(mixed_precision="bf16", cpu=cpu), by_hand_model)
    accelerator = setup_fp8_mixed_precision_training(
        "torchao", emulation="allow", compile="off", cpu=cpu
    )
    ours = stepper(accelerator, make_model(hidden, layers))
    ratios = []
    for index in range(steps + 5):
        ids = torch.randint(1, 1024, (8, 128), device=this_device().kind)
        pair = (ours, by_hand) if index % 2 else (by_hand, ours)
        times = {function: function(ids) for function in pair}
        if index >= 5:  # the first steps are the proof, and warm up
            ratios.append(times[ours] / times[by_hand])
    return ratios


def startup_ms(command: list[str], runs: int = 10) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    ratios = ratio_of_steps(args.steps, args.hidden, args.layers)
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"step time, ours / torchao by hand: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
    nothing, bare = startup_ms(["-m", "finetune"]), startup_ms(["-c", "pass"])
    listing = startup_ms(["-m", "finetune", "ls"])
    print(
        f"finetune: {nothing:.0f} ms, finetune ls: {listing:.0f} ms, python -c pass: {bare:.0f} ms"
    )


if __name__ == "__main__":
    main()
