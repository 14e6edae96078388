"""Steps, learning rate and eval loss of recipes on few chat rows, on the packaged model.

    python -m tests.benchmarks.few_rows --rows 300 3000 30000 --train 300 3000 30000

Rows have about 100 tokens and a pattern to learn (words, sorted). Each recipe keeps its batch,
schedule and epochs; model, precision and optimizer are those of the packaged model on a CPU. Steps
and rates are planned for all sizes, and trained for those of `--train`. "before" is the schedule of
20 steps of warm-up and a fixed accumulation, by the same count of rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

RECIPES = ("llama_1b_lora_bf16", "qwen_7b_lora_bf16", "llama_8b_lora_bf16", "llama_8b_full_bf16")
HERE = (
    "model.name=builtin:tiny_llama", "model.dtype=float32", "precision.compute=fp32",
    "train.optim=adamw_torch", "train.gradient_checkpointing=false", "train.save_strategy=no",
    "eval.samples=false", "train.report_to=none",
)  # fmt: skip
WORDS = ("harbour", "boat", "crane", "cargo", "tide", "keel", "rope", "pier", "anchor", "sail")


def write(file: Path, count: int) -> None:
    """`count` rows of a question and its answer."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(count):
            asked = draw.choices(WORDS, k=18)
            turns = [("user", "Sort: " + " ".join(asked)), ("assistant", " ".join(sorted(asked)))]
            row = {"messages": [{"role": who, "content": text} for who, text in turns]}
            lines.write(json.dumps(row) + "\n")


def planned(recipe: str, file: Path) -> tuple[Any, Any, int]:
    """(schedule now, schedule before, eval rows) of a recipe on a file."""
    from finetune import load_recipe
    from finetune.data.counting import counted_rows
    from finetune.training.run.schedule import schedule_of

    config = load_recipe(recipe, [*HERE, f"data.path={file}"]).config
    found = counted_rows(config)
    bins = found.ledger.bins or found.ledger.rows
    before = copy.copy(found.args)
    before.warmup_steps = 20
    held_out = len(found.rows.eval or ())
    return schedule_of(found.args, bins, config.data.min_steps), schedule_of(before, bins), held_out


def trained(recipe: str, file: Path, out: Path) -> tuple[float, float]:
    """Eval loss before the first step and at the end."""
    import finetune

    made = finetune.load_recipe(recipe, [*HERE, f"data.path={file}"])
    report = finetune.train(made, out=out, console=Console(quiet=True))
    rows = (json.loads(x) for x in (report.folder / "metrics.jsonl").read_text().splitlines())
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return losses[0], losses[-1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[300, 3000, 30000])
    parser.add_argument("--train", type=int, nargs="*", default=[300])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    given = parser.parse_args()
    print("| recipe | rows | eval rows | steps before, rate | steps now, rate | eval loss |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in given.rows:
            file = Path(folder) / f"rows{count}.jsonl"
            write(file, count)
            for recipe in given.recipes:
                now, before, held_out = planned(recipe, file)
                losses = "not trained"
                if count in given.train:
                    losses = "{:.4f} -> {:.4f}".format(*trained(recipe, file, Path(folder)))
                cells = [recipe, f"{count:,}", held_out, f"{before.steps:,}, {before.peak:.0%}"]
                cells += [f"{now.steps:,}, {now.peak:.0%}", losses]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
