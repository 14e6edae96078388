"""Losses of two processes, of two micro-batches of one process, and of one batch of that size.

    python -m tests.benchmarks.two_processes [CASE ...]

Prints the largest relative difference of the loss over six steps, and that of step 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.training.test_processes import losses, train

SETTINGS = (
    "train.max_steps=6", "train.logging_steps=1", "train.eval_strategy=no", "eval.samples=false",
    "data.max_rows=200", "train.max_length=64", "precision.health_every=0",
    "train.lr_scheduler_type=constant", "train.warmup_steps=0",
)  # fmt: skip
CASES = {
    "FP32": ("tiny_full_bf16", "precision.compute=fp32"),
    "BF16": ("tiny_full_bf16",),
    "FP8 row-wise": ("tiny_full_fp8", "precision.scaling=rowwise"),
    "FP8 tensor-wise": ("tiny_full_fp8", "precision.scaling=tensorwise"),
    "FP8 frozen, row-wise (LoRA)": ("tiny_lora_fp8",),
    "FP8 delayed": ("tiny_full_fp8",),
}
RUNS = {"one": {}, "micro": {"accumulation": 2}, "two": {"processes": 2}}


def difference(one: dict[int, float], other: dict[int, float]) -> str:
    """Largest relative difference, and that of step 1."""
    found = [abs(other[step] / one[step] - 1) for step in sorted(one)]
    return f"{max(found):.1e} (step 1: {found[0]:.1e})"


def main(names: list[str]) -> None:
    """Print a line for each case."""
    for name in names or CASES:
        found = {}
        for run, how in RUNS.items():
            with tempfile.TemporaryDirectory() as place:
                found[run] = losses(train(Path(place), *CASES[name], *SETTINGS, **how))
        print(
            f"{name}: two processes to two micro-batches {difference(found['micro'], found['two'])}"
            f", to one batch {difference(found['one'], found['two'])}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
