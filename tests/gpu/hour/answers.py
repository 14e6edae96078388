"""A few optimizer steps of GRPO on this GPU, by part: answers, scores, learning.

    python -m tests.gpu.hour.answers llama_8b_grpo_lora_fp8 [section.key=value ...]

The recipe with random weights of its own shape, the packaged tokenizer and prompts: nothing is
downloaded. Random weights end no answer, so all have `max_completion_length` tokens, the most that
a step can take. Steps after the second are counted: layers are compiled in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import finetune
from finetune import load_recipe
from finetune.errors import FinetuneError
from finetune.storage.pretrained import load_shape, load_tokenizer
from tests.gpu.hour.kernels import table
from tests.run_folders import trained

STEPS = 4
WORDS = (
    "model.weights=random", "model.pad_token=null", "data.name=builtin:sums", "~data.subset",
    "data.eval_fraction=0", "train.eval_strategy=no", "train.save_strategy=no",
    "train.logging_steps=1", f"train.max_steps={STEPS}", "eval.samples=false",
    f"train.reward_funcs=[{Path(__file__)}:parity]", "train.reward_weights=null",
)  # fmt: skip


def parity(completions: list[str], **_: object) -> list[float]:
    """A reward that answers of random weights differ in: without one no weight would move."""
    return [float(sum(map(ord, str(text))) % 2) for text in completions]


def local(recipe: finetune.Recipe, folder: Path) -> str:
    """Folder with the shape of a recipe's model and the packaged tokenizer."""
    load_shape(recipe.config.model).save_pretrained(folder)
    tiny = recipe.config.model.model_copy(update={"name": "builtin:tiny_llama", "pad_token": None})
    load_tokenizer(tiny)[0].save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Train the steps, and print their times as rows and Markdown."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args()
    found: dict[str, object]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = load_recipe(args.recipe)
        words = [f"model.name={local(recipe, folder / 'model')}", *WORDS, *args.overrides]
        try:
            report = trained(load_recipe(args.recipe, words), out=folder / "runs")
            lines = (report.folder / "steps.jsonl").read_text("utf-8").splitlines()
            rows = [json.loads(line) for line in lines][2:]
            peak = report.receipt.memory["measured_gib"]
            seconds = statistics.median(row["seconds"] for row in rows)
            head = ["recipe", "s a step", "GiB, peak", "receipt"]
            row = [args.recipe, f"{seconds:.3g}", f"{peak:.2f}", report.receipt.headline]
            found = {"rows": rows, "markdown": table([head, row], []), "failed": ""}
        except FinetuneError as error:
            found = {"rows": [], "markdown": "", "failed": error.what}
    print(json.dumps(found) if args.json else found["markdown"] or found["failed"])


if __name__ == "__main__":
    main()
