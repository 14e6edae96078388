"""Runs recipes on a GPU made of host memory, each with what it waited for, as JSON.

    python -m tests.host_gpu.worker OUT "tiny_lora_fp8 train.packing=true" ...

Layers are compiled as far as AOTAutograd, kernels of Triton are their references.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from finetune import load_recipe
from finetune.training.run import run as whole_run
from tests.host_gpu import device
from tests.run_folders import trained

ROOT = str(Path(__file__).parents[2])
WORDS = [
    "train.max_steps=6", "train.logging_steps=6", "train.gradient_accumulation_steps=2",
    "train.eval_strategy=no", "data.eval_fraction=0", "eval.samples=false",
]  # fmt: skip
SETTLED = 5
"""Steps from which a run is as it stays: proven, and compiled."""


class Waits(TrainerCallback):
    """Keeps what the host waits for inside of each optimizer step."""

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[str, list[str]]]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        device.waits.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps[state.global_step] = list(device.waits)


def maker(stack: list[str]) -> str:
    """The innermost line of code that is not torch's: `finetune/training/x.py function`."""
    own = [line for line in stack if "/torch/" not in line.split(":")[0]]
    place, _, function = own[-1].rpartition(" ")
    return f"{place.partition(':')[0].removeprefix(ROOT).lstrip('/')} {function}"


def run(words: list[str], out: str) -> dict[str, Any]:
    """What came of a run."""
    seen, name = Waits(), words[0]
    plain = whole_run.make_trainer

    def make(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs | {"callbacks": [seen, *kwargs["callbacks"]]})

    whole_run.make_trainer = make
    try:
        with device.watching():
            report = trained(
                load_recipe(name, [*WORDS, *words[1:]]), out=out, console=Console(quiet=True)
            )
    finally:
        whole_run.make_trainer = plain
    ours = Counter(
        found
        for step, waits in seen.steps.items()
        for _, stack in waits
        if step >= SETTLED and (found := maker(stack)).startswith("finetune/")
    )
    receipt = report.receipt
    return {
        "case": " ".join(words), "status": receipt.status, "precision": receipt.precision,
        "environment": receipt.environment["device"], "memory": receipt.memory,
        "allocator": receipt.environment["allocator"],
        "notes": receipt.notes, "loss": report.final_loss,
        "steps": sum(step >= SETTLED for step in seen.steps), "waits": ours,
        "all_waits": len(seen.steps.get(SETTLED, ())),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        print(json.dumps(run(case.split(), sys.argv[1])), flush=True)
