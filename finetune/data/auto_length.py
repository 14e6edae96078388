"""`train.max_length: auto`: a row length that the rows themselves decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from finetune.config.recipe import Recipe, read_recipe
from finetune.config.schema import RunConfig
from finetune.data.lengths import Lengths, limits
from finetune.errors import speaking
from finetune.hardware.device import rank
from finetune.logging import counting_rows, output


def uncut(config: RunConfig, **options: Any) -> Lengths:
    """Lengths of all rows without a limit; `options` are those of `counted_rows`."""
    from finetune.data.counting import counted_rows

    # Packing needs a length, which is what is looked for.
    train = {key: value for key, value in config.train.items() if key != "packing"}
    free = config.model_copy(update={"train": {**train, "max_length": None}})
    return counted_rows(free, **options).lengths


@speaking(str)
def load_recipe(name: str, overrides: Sequence[str] = (), *, check_train: bool = True) -> Recipe:
    """Read, override and check a recipe; `train.max_length: auto` becomes a number.

    For that alone its rows are read and tokenized, and a line says the length.

    Args:
        name: a shipped recipe's name or a path to a YAML file.
        overrides: `section.key=value` and `~section.key` items.
        check_train: also check and convert the `train` section, which imports trl (seconds).

    Raises:
        RecipeNotFoundError: no such recipe.
        ConfigError: an unknown key or a value of the wrong type, with file, line and nearest name.
        DataError, DataNotFoundError: rows whose length was to be known cannot be trained on.
    """
    found = read_recipe(name, overrides, check_train=check_train)
    return decided(found) if check_train else found


def decided(recipe: Recipe, tokenizer: Any = None) -> Recipe:
    """The recipe with a row length in place of `train.max_length: auto`, said in a line.

    Args:
        tokenizer: a script's; None: the model's.
    """
    config = recipe.config
    if config.train.max_length != "auto":
        return recipe
    console = output(stderr=True, quiet=rank() > 0)
    with counting_rows(console, f"reading the rows of {recipe.name} for train.max_length=auto"):
        lengths = uncut(config, tokenizer=tokenizer)
    multiple, most = limits(config)
    chosen = lengths.auto(multiple, most)
    config = config.model_copy(update={"train": {**config.train, "max_length": chosen}})
    cost = next(row for row in lengths.costs(config) if "(now)" in row["train.max_length"])
    longest = f"the longest row has {lengths.whole.max():,} tokens"
    longest += f", the model takes {chosen:,}" * (chosen == most)
    behind = f"rows cut: {cost['rows cut']}, trained tokens lost: {cost['trained tokens lost']}"
    console.print(f"train.max_length=auto is {chosen}: {longest}; {behind}")
    return replace(recipe, config=config)
