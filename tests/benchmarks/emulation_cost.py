"""What emulated FP8 costs over BF16 on this machine: `python -m tests.benchmarks.emulation_cost`.

One training step of the packaged model in each precision in turn, many times over, so that whatever
else the machine does meets them all alike. A ratio is that of the step times of the same round;
shown are the median over rounds and the quartiles. `--exact` multiplies in float32
(`precision.emulation=exact`).
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM

from finetune.config.paths import TINY_LLAMA
from finetune.hardware.requirements import engine_verdict
from finetune.precision import convert, planner
from finetune.precision.facts import EngineName, Scaling
from finetune.precision.settings import PrecisionConfig

BASELINE = "bf16"


def precisions(emulation: str) -> dict[str, PrecisionConfig]:
    """Everything that emulates: our backend with every scaling, torchao's with what it has."""
    found = {}
    for backend in get_args(EngineName):
        for scaling in get_args(Scaling):
            p = PrecisionConfig.model_validate(
                {
                    "compute": "fp8",
                    "backend": backend,
                    "scaling": scaling,
                    "emulation": emulation,
                }
            )
            if backend != "te" and engine_verdict(backend, p):
                found[f"{backend} {scaling}"] = p
    return found


class Run:
    """A model of its own in one precision, one step at a time."""

    def __init__(self, precision: PrecisionConfig | None, rows: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).train()
        if precision is not None:
            convert.apply(self.model, planner.plan(self.model, precision))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(3, 1500, (rows, length))

    def step(self, micro_steps: int) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        for _ in range(micro_steps):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss: Any = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=8, help="as in the recipe tiny_full")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-steps", type=int, default=1, help="for each optimizer step")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--only", default="", help="part of the names to run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    every = precisions("exact" if arguments.exact else "allow")
    asked = {name: p for name, p in every.items() if arguments.only in name}
    shape = arguments.rows, arguments.length
    runs = {name: Run(p, *shape) for name, p in {BASELINE: None, **asked}.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(arguments.steps + 3):
        for name, run in runs.items():
            seconds = run.step(arguments.micro_steps)
            if round_ >= 3:
                times[name].append(seconds)
    print(f"BF16 step: {statistics.median(times[BASELINE]) * 1e3:.0f} ms, {shape[0]} x {shape[1]}")
    print("| emulation | step time over BF16 | quartiles |\n|---|---|---|")
    for name in asked:
        ratios = [a / b for a, b in zip(times[name], times[BASELINE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
