"""Make `recipes.json`: the facts of each shipped recipe that `finetune ls` shows.

Run as ``python -m tests.asset_makers.make_recipes`` after a change of a recipe or of the estimator;
it takes some minutes. `tests/cli` compares the facts of the file with fresh ones, and a slow test
the memory of one recipe.
"""

import json

from finetune.cli.recipes import ROWS, checksum, row_of
from finetune.config.lookup import list_recipes
from finetune.config.recipe import load_recipe
from finetune.config.sft import decides_checkpointing, with_checkpointing
from finetune.estimator.measure import measure_fast
from finetune.estimator.place import place_of
from finetune.units import GIB


def preview_gib(recipe: str) -> float:
    """Predicted peak on one H100, context included, as if it had room for any run.

    BF16 is compiled, as FP8 is: so `make_speeds` has it, too.
    """
    compiled = ["precision.compile=on"] if recipe.endswith("_bf16") else []
    config = load_recipe(recipe, compiled).config
    if decides_checkpointing(config):
        config = with_checkpointing(config, True)
    held = measure_fast(config, place_of("H100")).footprint
    return round((held.allocated + held.outside) / GIB, 2)


if __name__ == "__main__":
    table = {}
    for name in list_recipes():
        row = row_of(name) | {"preview_gib": preview_gib(name)}
        table[name] = {"crc32": checksum(name), "row": row}
        print(name, row["preview_gib"])
    ROWS.write_text(json.dumps(table, indent=1) + "\n")
