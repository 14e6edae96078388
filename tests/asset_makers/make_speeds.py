"""Make `speeds.json`: predicted tokens/s of each packaged recipe on each GPU, for `finetune ls`.

Run as ``python -m tests.asset_makers.make_speeds`` after any change of the estimator or of a
recipe's settings; a slow test compares it with a fresh prediction. Recipes that do not fit on one
GPU of a kind have no entry there. Tiny ones run on CPUs, QLoRA has no FP8 twin: none at all.
"""

import json

from finetune.config.lookup import list_recipes
from finetune.config.paths import ASSETS
from finetune.config.recipe import load_recipe
from finetune.estimator.search import cheapest_gpu
from finetune.hardware.gpus import gpu_table

GPUS = ("A100-80GB", "RTX 4090", "L40S", "RTX 5090", "H100", "H200", "B200")
FILE = ASSETS / "speeds.json"


def speeds(recipe: str) -> dict[str, int]:
    """GPU -> predicted tokens/s of a recipe, where it fits; BF16 compiled, as FP8 is."""
    gpus = tuple(gpu for gpu in gpu_table() if gpu.name in GPUS)
    compiled = ["precision.compile=on"] if recipe.endswith("_bf16") else []
    found = cheapest_gpu(load_recipe(recipe, compiled).config, gpus=gpus).choices
    return {
        choice.place.gpu.name: round(choice.tokens_per_s)
        for choice in found
        if choice.place.gpu and choice.tokens_per_s and choice.fit != "does not fit"
    }


if __name__ == "__main__":
    table: dict[str, dict[str, int]] = {}
    for recipe in list_recipes():
        if not any(word in recipe for word in ("tiny", "qlora")):
            for gpu, speed in speeds(recipe).items():
                table.setdefault(gpu, {})[recipe] = speed
            print(recipe, table.get("H100", {}).get(recipe))
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
