"""What the sentinel costs per step.

    python -m tests.benchmarks.sentinel_overhead [--steps 60] [--hidden 128] [--layers 4]

Two copies of a model train in one process, a step of each in turn: one under the sentinel, one that
was released after its proof, with calls that nobody counts. Printed are the ratio of their steps
with its 95 % interval, and the time of the comparison itself, which does not grow with the size of
the matrices. On a CPU both are seconds of this process, whatever else the machine does.
The goal is at most 1 % of a step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from finetune import setup_fp8_mixed_precision_training
from finetune.analysis.statistics import Ratio, speed_ratio
from finetune.hardware.device import this_device
from finetune.precision.convert import conversion_of
from finetune.precision.engines.base import Fp8Mixin
from tests.benchmarks.step_overhead import timed


def make_model(hidden: int, layers: int, *, lora: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, vocab_size=1024,
        use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(this_device().kind, torch.bfloat16)
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model.train()


def stepper(accelerator: Any, model: Any) -> tuple[Callable[[torch.Tensor], float], Any, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-4))

    clock = time.process_time if this_device().kind == "cpu" else time.perf_counter
    return timed(accelerator, model, optimizer, clock), model, optimizer.optimizer


def release(model: Any) -> None:
    """Leave a model without a sentinel, and without counted calls."""
    conversion: Any = conversion_of(model)
    conversion.proof.release()
    nobody = SimpleNamespace(count=lambda *_: None, watch=lambda *_: None)
    for module in model.modules():
        if isinstance(module, Fp8Mixin):
            module.__dict__["fp8_calls"] = nobody


def measure(steps: int, hidden: int, layers: int, *, lora: bool) -> tuple[Ratio, float, float]:
    """Ratio of steps, seconds of a step, seconds of one comparison."""
    cpu = this_device().kind == "cpu"
    accelerator = setup_fp8_mixed_precision_training(
        "torchao", emulation="allow", compile="off", cpu=cpu
    )
    ours, model, optimizer = stepper(accelerator, make_model(hidden, layers, lora=lora))
    bare, other, _ = stepper(accelerator, make_model(hidden, layers, lora=lora))
    ratios, times = [], []
    for index in range(steps + 5):
        ids = torch.randint(1, 1024, (4, 64), device=this_device().kind)
        pair = (ours, bare) if index % 2 else (bare, ours)
        took = {function: function(ids) for function in pair}
        if index == 3:  # the first steps are the proof
            release(other)
        if index >= 5:
            ratios.append(math.log(took[ours] / took[bare]))
            times.append(took[bare])
    conversion: Any = conversion_of(model)
    layers_watched = [m.fp8_calls for m in model.modules() if isinstance(m, Fp8Mixin)]

    def compare() -> None:
        for calls in layers_watched:
            calls.ran = True
        conversion.proof.sentinel.before_step(optimizer)

    compared = timeit.timeit(compare, number=100, timer=time.process_time) / 100
    return speed_ratio([ratios]), statistics.median(times), compared


def precise(ratio: Ratio) -> str:
    low, high = ratio.interval or (math.nan, math.nan)
    return f"{ratio.value:.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    for lora in (False, True):
        ratio, step, compared = measure(options.steps, options.hidden, options.layers, lora=lora)
        print(
            f"{'LoRA' if lora else 'full'}: {precise(ratio)} times a step of {step * 1e3:.1f} ms; "
            f"comparison {compared * 1e6:.0f} us, {compared / step:.2%} of it"
        )


if __name__ == "__main__":
    main()
