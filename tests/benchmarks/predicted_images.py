"""Predicted beside measured memory of training steps on images, for tiny models of four families.

    python -m tests.benchmarks.predicted_images [FAMILY ...] [-- SETTING ...]

Each is a run of three steps on this CPU whose batches get images: rows of text of the data set, in
which image tokens stand, and the arrays of the model's own processor. The goal is 1 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image

from finetune.estimator.images import Images, images_of, with_images
from finetune.estimator.trace.images import add_images
from finetune.storage.processors import image_processor
from finetune.training.health import monitor
from finetune.training.run import run as whole_run
from tests.benchmarks.predicted_memory import Case, measure, predict, recipe_of
from tests.image_models import FAMILIES, tiny_image_model

LENGTH = 192


class Collator:
    """Puts images into the rows of another collator's batches."""

    def __init__(self, plain: Any, model: Any, processor: Any, images: Images) -> None:
        self.plain, self.model, self.processor, self.images = plain, model, processor, images
        self.blank = Image.new("RGB", images[1:], (1, 1, 1))

    def __call__(self, rows: Any) -> Any:
        batch = self.plain(rows)
        rows = [[self.blank] * self.images.count] * len(batch["input_ids"])
        add_images(batch, self.model, self.processor(rows, return_tensors="pt"))
        return batch


def run(family: str, words: list[str]) -> dict[str, Any]:
    """Predicted and measured peak of a run."""
    with tempfile.TemporaryDirectory() as folder:
        home = tiny_image_model(family, Path(folder), weights=False)
        base, *changes = words
        recipe = recipe_of(
            Case(family, base, (f"model.name={home}", "model.weights=random",
                 "data.images_per_row=2", "data.image_size=128x96", f"train.max_length={LENGTH}",
                 *changes)),
            home,
        )  # fmt: skip
        expected, _ = predict(recipe)
        config = with_images(recipe.config, 0, None)
        without, _ = predict(replace(recipe, config=config))
        processor, images = image_processor(recipe.config.model), images_of(recipe.config)
        plain = whole_run.make_trainer

        def make(*args: Any, **kwargs: Any) -> Any:
            trainer = plain(*args, **kwargs)
            assert images is not None
            trainer.data_collator = Collator(
                trainer.data_collator, trainer.model, processor, images
            )
            return trainer

        quiet = mock.patch.object(monitor, "check_first_batches", return_value=None)
        with mock.patch.object(whole_run, "make_trainer", make), quiet:
            memory = measure(recipe, home)
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
