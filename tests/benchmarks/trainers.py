"""Stock trainers of TRL and Transformers under the helper: what was proven, beside BF16.

    python -m tests.benchmarks.trainers [--trainers DPO KTO] [--methods full] [--backends torchao]
    python -m tests.benchmarks.trainers --traced

Each row trains a tiny model for four steps with an unmodified trainer class, after one added line.
All rows run in one process, one after the other. `loss` and `BF16` are the mean losses of the four
steps, of the same script with and without that line; generations differ between the two.

`--traced`: as on a GPU, under torchao, decoder layers compiled, here as far as AOTAutograd; with
the graphs of each run, and what breaks them.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from finetune import (
    get_receipt,
    setup_fp8_mixed_precision_training,
    teardown_fp8_mixed_precision_training,
)
from finetune.errors import FinetuneError
from finetune.runs.receipt import Receipt
from tests.benchmarks.stock_trainers import METHODS, TRAINERS, Workshop
from tests.traced import traced

BACKENDS = ("emulated", "torchao")


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its losses, and its receipt or the error that ended it."""

    losses: list[float]
    receipt: Receipt | None = None
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.error or self.receipt is None:
            return self.error
        share = f"{self.receipt.fp8_flop_share:.1%}"
        return f"{self.receipt.status}, {share}" if self.receipt.status != "proven" else share


@contextlib.contextmanager
def precision_of(backend: Any, method: str, **settings: Any) -> Iterator[None]:
    """Context manager for one set-up; none for backend `bf16`."""
    if backend != "bf16":
        stored = {"frozen": "fp8", "scaling": "rowwise"} if method == "frozen" else {}
        setup_fp8_mixed_precision_training(
            backend, emulation="allow", cpu=True, **{**stored, **settings}
        )
    try:
        yield
    finally:
        teardown_fp8_mixed_precision_training()


def train(shop: Workshop, name: str, method: str, backend: str, **settings: Any) -> Outcome:
    """Train a row; an error is a part of what is reported."""
    torch.manual_seed(0)
    with precision_of(backend, method, **settings):
        trainer = None
        try:
            trainer = TRAINERS[name](shop, method)
            trainer.train()
            error = ""
        except (FinetuneError, AttributeError, RuntimeError, TypeError, ValueError) as problem:
            error = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
            if not isinstance(problem, FinetuneError):
                traceback.print_exc()
        log = trainer.state.log_history if trainer is not None else []
        losses = [row["loss"] for row in log if "loss" in row]
        return Outcome(losses, None if backend == "bf16" else get_receipt(), error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--traced", action="store_true", help="compiled as far as AOTAutograd")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    console = Console(width=120, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("trainer", "method", "backend", "FP8 share", "loss at step 1", "loss", "BF16"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        for name in options.trainers:
            for method in options.methods:
                if method != "full" and name in ("DPO, synchronized",):
                    continue  # TRL has no synchronized reference under adapters
                if options.traced:
                    with traced() as graphs:
                        ours = train(shop, name, method, "torchao", compile="on")
                        cells = [name, method, ours.verdict, graphs(), mean(ours.losses)]
                    console.print(*cells, sep=" | ")
                    continue
                plain = train(shop, name, method, "bf16")
                for backend in options.backends:
                    ours = train(shop, name, method, backend)
                    first = f"{ours.losses[0]:.5f}" if ours.losses else "-"
                    cells = [name, method, backend, ours.verdict, first]
                    cells += [mean(run.losses) for run in (ours, plain)]
                    console.print(*cells, sep=" | ")  # as soon as it is known
                    table.add_row(*cells)
    if not options.traced:
        console.print(table)


def mean(losses: list[float]) -> str:
    return f"{sum(losses) / len(losses):.4f}" if losses else "-"


if __name__ == "__main__":
    main()
