"""FP8 share and predicted memory of many families, in full fine-tuning and LoRA.

    python -m tests.benchmarks.families [FAMILY ...] [--method full|lora] [--traced]

Each row is a run of three steps on the CPU, of a tiny random model (`tests.families`): the proven
share of matmul FLOPs in FP8, how far the measured memory is from the predicted one, and what stays
in high precision, by reason. Shares of tiny models are lower than those of real ones, since
attention scores and the head weigh more.

`--traced`: as on a GPU, full fine-tuning in torchao and decoder layers compiled, here as far as
AOTAutograd; the graphs of each run, and what breaks them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune import load_recipe, train
from finetune.errors import FinetuneError
from finetune.logging import quiet_libraries
from finetune.runs.receipt import Receipt
from tests.families import FAMILIES, folder_of
from tests.traced import traced

Method = Literal["full", "lora"]
SMALL = [
    "train.max_steps=3", "train.warmup_steps=0", "train.lr_scheduler_type=constant",
    "train.per_device_train_batch_size=2", "train.max_length=64", "train.eval_strategy=no",
    "data.eval_fraction=0", "data.max_rows=12", "data.prompts=[]", "eval.samples=false",
    "model.weights=random",
]  # fmt: skip


COMPILED = "precision.compile=on"
ON_GPUS = ("precision.backend=torchao", "precision.scaling=tensorwise")
"""Engine of full fine-tuning there, where Transformer Engine is not installed."""


@dataclass(frozen=True)
class Row:
    """One run, or the error that it ended in."""

    family: str
    method: Method
    receipt: Receipt | None
    error: str = ""
    graphs: str = ""

    @property
    def memory_error(self) -> float | None:
        """(measured - predicted) / predicted; None if either is missing."""
        memory = self.receipt.memory if self.receipt else {}
        measured, predicted = memory.get("measured_gib"), memory.get("predicted_gib")
        return measured / predicted - 1 if measured and predicted else None

    @property
    def high(self) -> list[str]:
        """Reasons of what ran in high precision, with their share of FLOPs, the largest first."""
        layers = self.receipt.layers if self.receipt else []
        total = sum(layer.flops for layer in layers) or 1
        shares: Counter[str] = Counter()
        for layer in layers:
            if layer.flops and layer.fprop not in ("fp8", "none"):
                shares[layer.reason] += layer.flops
        return [f"{flops / total:.0%} {reason}" for reason, flops in shares.most_common()]


def run(family: str, method: Method, folder: Path, *overrides: str) -> Row:
    """Train a tiny model of a family."""
    name = f"model.name={folder_of(family, folder / 'models')}"
    try:
        recipe = load_recipe(f"tiny_{method}_fp8", [name, *SMALL, *overrides])
        report = train(recipe, out=folder / "runs", console=Console(quiet=True))
    except FinetuneError as error:
        return Row(family, method, None, str(error))
    return Row(family, method, report.receipt)


def run_traced(family: str, method: Method, folder: Path, *overrides: str) -> Row:
    """The same with decoder layers compiled as far as AOTAutograd."""
    engine = ON_GPUS if method == "full" else ()
    with traced() as graphs:
        row = run(family, method, folder, COMPILED, *engine, *overrides)
        return replace(row, graphs=graphs())


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("family", "method", "FP8", "memory", "in high precision, left out"):
        found.add_column(column, overflow="fold")
    for row in rows:
        share = f"{row.receipt.fp8_flop_share:.1%}" if row.receipt else "-"
        off = "-" if row.memory_error is None else f"{row.memory_error:+.1%}"
        notes = row.receipt.notes if row.receipt else [row.error]
        said = [*([row.graphs] if row.graphs else []), *row.high, *notes]
        found.add_row(row.family, row.method, share, off, Text("; ".join(said)))
    return found


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--method", choices=("full", "lora"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--traced", action="store_true", help="compiled as far as AOTAutograd")
    given = parser.parse_args()
    one = run_traced if given.traced else run
    methods: tuple[Method, ...] = (given.method,) if given.method else ("full", "lora")
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families:
            rows = [one(family, method, Path(folder), *given.overrides) for method in methods]
            Console(width=160).print(table(rows))


if __name__ == "__main__":
    main()
