"""What shipped recipes measured on a GPU: it stands in place of a prediction wherever there is one.

`assets/measured.json` has GPU -> recipe -> tokens/s, peak GiB, speed over compiled BF16 with the
same checkpointing, and the commit; `docs/figures.py` writes it. Imports no torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from finetune.config.paths import ASSETS

if TYPE_CHECKING:
    from finetune.config.recipe import Recipe
    from finetune.estimator.predict import Prediction

MEASURED = ASSETS / "measured.json"
OTHERWISE = (
    "learning_rate", "seed", "max_steps", "num_train_epochs", "logging_steps",
    "gradient_accumulation_steps",
)  # fmt: skip
"""Keys of `train` that may differ from the recipe that was measured: a micro-batch is the same."""


def measured(gpu: str) -> dict[str, dict[str, Any]]:
    """Recipe -> what was measured of it on a GPU."""
    return json.loads(MEASURED.read_text()).get(gpu, {})


def measured_pair(recipe: Recipe, predicted: Prediction) -> dict[str, Any] | None:
    """What was measured of a recipe, or of its FP8 twin, with these settings; None if nothing was.

    Both of a pair were compiled, whatever `precision.compile` says, and neither had checkpoints.
    """
    from finetune.config.recipe import read_recipe

    machine, saving = predicted.machine, predicted.config.train.gradient_checkpointing
    # Shipped figures are of one GPU without checkpointing, and say nothing of other runs.
    if machine.gpu is None or machine.count > 1 or saving:
        return None
    pair = recipe.name.removesuffix("_bf16").removesuffix("_fp8")
    found = measured(machine.gpu.name).get(f"{pair}_fp8")
    # By content, not by name: a copied recipe keeps its name with other settings.
    if found is None or _step_of(recipe) != _step_of(read_recipe(recipe.name)):
        return None
    return found


def _step_of(recipe: Recipe) -> dict[str, Any]:
    """Settings that a micro-batch depends on."""
    given = recipe.config.model_dump(exclude={"data": True, "eval": True})
    given["train"] = {k: v for k, v in recipe.config.train.items() if k not in OTHERWISE}
    # Both were measured compiled, whatever the recipe says.
    return given | {"precision": given["precision"] | {"compile": None}}
