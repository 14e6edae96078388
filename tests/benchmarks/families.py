"""FP8 share and predicted memory of many families, in full fine-tuning and LoRA.

    python -m tests.benchmarks.families [FAMILY ...] [--method full|lora] [--traced]
    python -m tests.benchmarks.families [FAMILY ...] [--images] --export --write

Each row is a run of three steps on the CPU, of a tiny random model (`tests.families`): the proven
share of matmul FLOPs in FP8, how far the measured memory is from the predicted one, and what stays
in high precision, by reason. Shares of tiny models are lower than those of real ones, since
attention scores and the head weigh more.

`--images`: rows with pictures, of the families that `tests.image_models` has.

`--traced`: as on a GPU, full fine-tuning in torchao and decoder layers compiled, here as far as
AOTAutograd; the graphs of each run, and what breaks them.

`--export`: then exported, merged and in FP8, reloaded by Transformers alone, and its logits
compared with the run's (`finetune.export.parity`). `--write` puts what was found into the table of
`finetune ls --models`: a new family is a line in `tests.families` and one command.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune import load_recipe, train
from finetune.cli.listing import FAMILIES as TABLE
from finetune.errors import FinetuneError
from finetune.export.export import export_run
from finetune.logging import quiet_libraries
from finetune.runs.receipt import Receipt
from finetune.storage.pretrained import auto_class
from tests.families import FAMILIES, config_of, folder_of
from tests.image_models import FOUR, tiny_image_model
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
    folder: Path = Path()
    error: str = ""
    graphs: str = ""
    images: bool = False
    exports: dict[str, float | str] = field(default_factory=dict)
    """`merged` and `fp8` -> logit error, or why there is none."""

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
    return _run(folder_of(family, folder / "models"), method, folder, *overrides)


def _run(home: Path, method: Method, folder: Path, *overrides: str, images: bool = False) -> Row:
    try:
        recipe = load_recipe(f"tiny_{method}_fp8", [f"model.name={home}", *SMALL, *overrides])
        report = train(recipe, out=folder / "runs", console=Console(quiet=True))
    except FinetuneError as error:
        return Row(home.name, method, None, error=str(error), images=images)
    return Row(home.name, method, report.receipt, folder=report.folder, images=images)


COLORS = ("red", "green", "navy", "white")


def pictures(folder: Path, rows: int = 12) -> Path:
    """A file of rows that each ask for the color of a picture; every fourth has none."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(rows):
        color = COLORS[number % 4]
        Image.new("RGB", (40, 28 + number), color).save(folder / f"{number}.png")
        shown = [f"{number}.png"] if number % 4 else []
        asked = "<image>" * len(shown) + "What color is the sea?"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": color}]
        lines.append(json.dumps({"messages": turns, "images": shown}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


def run_with_images(family: str, method: Method, folder: Path, *overrides: str) -> Row:
    """Train a tiny model, with its projector, on pictures."""
    home = tiny_image_model(family, folder / "with_images")
    rows = pictures(folder / "pictures")
    more = f"data.path={rows}", "train.max_length=256", "model.train_vision=projector"
    more = *more, *TRAINED[: 1 + (method == "lora")]
    return _run(home, method, folder, *more, *overrides, images=True)


TRAINED = ("model.weights=pretrained", "train.learning_rate=1e-2")
"""Weights of a folder, which an export is of; and adapters that move the logits in three steps."""


def run_exported(family: str, method: Method, folder: Path, *overrides: str) -> Row:
    """The same from weights in a folder, and exported."""
    home, config = folder_of(family, folder / "models"), config_of(family)
    torch.manual_seed(0)
    auto_class(config).from_config(config).save_pretrained(home)
    more = TRAINED[: 1 + (method == "lora")]
    return exported(run(family, method, folder, *more, *overrides), folder)


def run_with_images_exported(family: str, method: Method, folder: Path, *overrides: str) -> Row:
    """The same with pictures, in the rows that are compared, too."""
    return exported(run_with_images(family, method, folder, *overrides), folder)


def exported(row: Row, folder: Path) -> Row:
    """The row of a run, with what came of its exports."""
    for to in ("merged", "fp8") if row.receipt else ():
        out, quiet = folder / f"{row.family}_{row.method}_{to}", Console(quiet=True)
        try:
            found = export_run(row.folder, to, out, console=quiet)
            row.exports[to] = float(f"{found.parity.logit_error:.2g}")
        except FinetuneError as error:
            row.exports[to] = error.what
    return row


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
        exports = [f"{to} {x}" for to, x in row.exports.items()]
        said = [*exports, *([row.graphs] if row.graphs else []), *row.high, *notes]
        found.add_row(row.family, row.method, share, off, Text("; ".join(said)))
    return found


def write(rows: list[Row]) -> None:
    """Put one family into the table of `finetune ls --models`."""
    known = json.loads(TABLE.read_text())
    shares = {r.method: round(r.receipt.fp8_flop_share, 3) for r in rows if r.receipt}
    exports = {f"{r.method} {to}": x for r in rows for to, x in r.exports.items()}
    found, family = shares | ({"exports": exports} if exports else {}), rows[0].family
    if rows[0].images:
        known[family] = known.get(family, {}) | {"images": found}
    else:
        kept = {key: value for key, value in known.get(family, {}).items() if key == "images"}
        known[family] = found | kept
    ordered = {family: known[family] for family in FAMILIES if family in known}
    TABLE.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[], metavar="FAMILY")
    parser.add_argument("--method", choices=("full", "lora"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--traced", action="store_true", help="compiled as far as AOTAutograd")
    parser.add_argument("--export", action="store_true", help="export, reload, compare logits")
    parser.add_argument("--write", action="store_true", help=f"into {TABLE.name}")
    parser.add_argument("--images", action="store_true", help="rows with pictures")
    given = parser.parse_args()
    with_images = run_with_images_exported if given.export else run_with_images
    one = (
        with_images
        if given.images
        else run_traced
        if given.traced
        else run_exported
        if given.export
        else run
    )
    methods: tuple[Method, ...] = (given.method,) if given.method else ("full", "lora")
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families or (FOUR if given.images else FAMILIES):
            rows = [one(family, method, Path(folder), *given.overrides) for method in methods]
            Console(width=160).print(table(rows))
            if given.write:
                write(rows)


if __name__ == "__main__":
    main()
