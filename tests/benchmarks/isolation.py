"""Which families keep the documents of a packed row apart, and what it costs to find out.

    python -m tests.benchmarks.isolation [FAMILY ...] [--dtype float32]

Each row is a tiny random model (`tests.families`) on the CPU, under the attention that packed rows
get there by themselves (`auto`) and under the model's own: what the probe of a run says
(`finetune.training.health.isolation`), and its milliseconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune import load_recipe
from finetune.errors import ConfigError
from finetune.hardware.device import this_device
from finetune.logging import quiet_libraries
from finetune.training.health.isolation import refuse_leaks
from finetune.training.model import load_model, meta_model, resolve_attention
from tests.families import FAMILIES, OTHERS, folder_of


@dataclass(frozen=True)
class Found:
    """What the probe says of a family under one attention; an empty refusal is none."""

    attention: str
    refusal: str
    milliseconds: float

    def __str__(self) -> str:
        said = f"refused: {self.refusal}" if self.refusal else "apart"
        return f"{self.attention}: {said} ({self.milliseconds:.0f} ms)"


def probe(model: Any) -> str:
    """Refusal of a model whose packed rows are TRL's, or an empty string."""
    accelerator = SimpleNamespace(unwrap_model=lambda same: same, device="cpu")
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    trainer = SimpleNamespace(
        padding_free=True, model=model, accelerator=accelerator, data_collator=collator
    )
    try:
        refuse_leaks(trainer)
    except ConfigError as refusal:
        return str(refusal)
    return ""


def look(family: str, folder: Path, *, own: bool, dtype: str = "bfloat16") -> Found:
    """Probe a tiny model of a family, under its `own` attention or that of `auto`."""
    settings = [
        f"model.name={folder_of(family, folder)}", "model.weights=random", f"model.dtype={dtype}",
        "train.packing=true",
    ]  # fmt: skip
    config = load_recipe("tiny_full_bf16", settings).config
    chosen = None if own else resolve_attention(config, meta_model(config), this_device())
    asked = {"attention": chosen.implementation if chosen else None}
    torch.manual_seed(0)
    model: Any = load_model(config.model.model_copy(update=asked))
    begun = time.perf_counter()
    refusal = probe(model)
    took = (time.perf_counter() - begun) * 1e3
    why = next((line for line in refusal.splitlines() if "why:" in line), "")
    return Found(model.config._attn_implementation, why.partition("why:")[2].strip(), took)


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=sorted(FAMILIES | OTHERS), metavar="FAMILY")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("family", "auto", "the model's own"):
        table.add_column(column, overflow="fold")
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families:
            both = (look(family, Path(folder), own=own, dtype=given.dtype) for own in (False, True))
            table.add_row(family, *map(str, both))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
