"""Predicted beside measured memory of training steps on images, for tiny models of four families.

    python -m tests.benchmarks.predicted_images [FAMILY ...] [-- SETTING ...]

Each is a run of three steps on this CPU, of rows with two pictures in a file, whose batches the
model's own processor makes. SETTING: a recipe (`tiny_lora_fp8`) and changes to it. The goal is 1 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from finetune import load_recipe
from finetune.config.methods import method_of
from finetune.config.recipe import Recipe
from finetune.estimator.images import with_images
from tests.benchmarks.predicted_memory import Case, measure, predict, recipe_of
from tests.image_models import FAMILIES, tiny_image_model

LENGTH, SIZE, COUNT = 192, (128, 96), 2
"""Tokens of a row, pixels of its pictures, and how many it has."""
LONG = "a ship, and another ship, " * 20
"""With what stands before it, of a few tokens more than a row may have."""


def image_recipe(family: str, words: list[str], folder: Path) -> Recipe:
    """A recipe of a tiny model of a family over rows with pictures, with all files in a folder."""
    home = tiny_image_model(family, folder, weights=False)
    base, *changes = words
    settings = [f"model.name={home}", "model.weights=random"]
    if not method_of(load_recipe(base).config.train).writes:  # whose answers are of 64 tokens
        settings.append(f"train.max_length={LENGTH}")
    recipe = recipe_of(Case(family, base, (*settings, *changes)), home)
    for number in range(COUNT):
        Image.new("RGB", SIZE, (9 + number, 99, 199)).save(home / f"{number}.png")
    asked = [{"type": "image"}] * COUNT + [{"type": "text", "text": "What is it?"}]
    user, said = {"role": "user", "content": asked}, {"role": "assistant", "content": LONG}
    row: dict[str, Any] = {"images": [f"{number}.png" for number in range(COUNT)]}
    if method_of(recipe.config.train).rows[0] == "preference":
        row |= {"prompt": [user], "chosen": [said], "rejected": [said | {"content": LONG[9:]}]}
    else:
        row |= {"messages": [user, said], "answer": "7"}
    (home / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return recipe


def run(family: str, words: list[str]) -> dict[str, Any]:
    """Predicted and measured peak of a run."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = image_recipe(family, words, Path(folder))
        expected, _ = predict(recipe)
        without, _ = predict(replace(recipe, config=with_images(recipe.config, 0, None)))
        memory = measure(recipe, Path(folder))
    measured = memory["measured_gib"] * 2**30
    in_receipt = memory.get("predicted_gib", 0.0) * 2**30  # tests leave it out
    return {
        "case": " ".join([family, *words]), "predicted": expected.tensors, "measured": measured,
        "error": expected.tensors / measured - 1, "in receipt": in_receipt / measured - 1,
        "without": without.tensors / measured - 1,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    names, _, settings = " ".join(sys.argv[1:]).partition("--")
    for one in names.split() or FAMILIES:
        print(json.dumps(run(one, settings.split() or ["tiny_lora_fp8"])), flush=True)
