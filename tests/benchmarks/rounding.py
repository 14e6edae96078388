"""What a learning rate of 1e-5 does to BF16 weights, by how their updates are rounded.

    python -m tests.benchmarks.rounding [--seeds 42,43,44] [--steps 40]

`changed` is the share of numbers that differ from before the first step. `along` is the share of
the float32 run's way through the matrices that a run has gone: 1 where nothing is lost on average.
`beside` is what it has gone in other directions, over that way: rounding by chance is noise, too.
The last two rows cast the weights that the float32 run ended with, and train next to nothing.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune import load_recipe, train
from finetune.config.paths import TINY_LLAMA
from finetune.runs.receipt import RunReport, changed_numbers

HALF = "model.dtype=bfloat16"
FLOAT = "model.dtype=float32"
WAYS = {
    "float32": (FLOAT, "train.optim=adamw_torch_fused"),
    "float32, moments in 8 bits": (FLOAT, "train.optim=adamw_torch_8bit"),
    "BF16, to nearest": (HALF, "train.optim=adamw_torch_fused"),
    "BF16, by chance, moments in 8 bits": (HALF, "train.optim=adamw_torch_8bit"),
    "BF16, by chance, moments in FP8": (HALF, "train.optim=adamw_torchao_fp8"),
    "BF16, by chance, moments in 4 bits": (HALF, "train.optim=adamw_torch_4bit"),
}
"""Way -> settings; the others are compared with the first."""


def run(out: Path, seed: int, steps: int, *settings: str) -> RunReport:
    common = ("train.learning_rate=1e-5", f"train.max_steps={steps}", f"train.eval_steps={steps}")
    common += (f"train.seed={seed}", "eval.samples=false", "train.logging_steps=1")
    recipe = load_recipe("tiny_full_bf16", [*common, *settings])
    return train(recipe, out=out, console=Console(quiet=True))


def matrices(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    return {name: w.double() for name, w in load_file(file).items() if "_proj" in name}


def way(report: RunReport, start: dict[str, Tensor]) -> Tensor:
    """What the run has added to all matrices, one behind another."""
    end = matrices(report.folder / "model")
    return torch.cat([(end[name] - start[name]).flatten() for name in start])


def cast(report: RunReport, out: Path, seed: int, *, chance: bool) -> RunReport:
    """One step of next to no length from the run's weights, cast to BF16."""
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    torch.manual_seed(seed)
    folder = out / f"cast-{chance}-{seed}"
    folder.mkdir(parents=True)
    for file in (report.folder / "model").iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
            continue
        to = _fp32_to_bf16_sr if chance else Tensor.bfloat16
        weights = {name: to(w.contiguous()) for name, w in load_file(file).items()}
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    small = (f"model.name={folder}", "train.warmup_steps=0", "train.learning_rate=1e-9")
    return run(out, seed, 1, *small, FLOAT, "train.optim=adamw_torch_fused")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    start = matrices(TINY_LLAMA)
    print("seed | weights | changed | along | beside | eval loss")
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, args.seeds.split(",")):
            reports: list[Any] = []
            for name, settings in WAYS.items():
                report = run(Path(folder), seed, args.steps, *settings)
                reports.append(report)
                gone, straight = way(report, start), way(reports[0], start)
                changed, numbers = changed_numbers(report.receipt.movement)
                along = float(gone @ straight / (straight @ straight))
                beside = math.sqrt(max(0.0, float(gone @ gone / (straight @ straight)) - along**2))
                facts = f"{changed / numbers:.1%} | {along:.3f} | {beside:.3f}"
                print(f"{seed} | {name} | {facts} | {report.eval_loss:.4f}", flush=True)
            for chance in (False, True):
                loss = cast(reports[0], Path(folder), seed, chance=chance).eval_loss
                name = f"float32's end, cast {'by chance' if chance else 'to nearest'}"
                print(f"{seed} | {name} | | | | {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
