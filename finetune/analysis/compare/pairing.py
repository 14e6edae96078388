"""The two sides of a comparison: the twin of a recipe, and settings made the same on both.

Twins differ in the end of their names: `x_fp8` and `x_bf16`. The reference is the side that
computes in BF16, else the second.

Set on both sides, and listed in the result's notes:

* `train.logging_steps=1`: the final loss is a mean over the losses of single steps.
* `train.seed` for each pair, and one `data.seed` for all: every seed is evaluated on the same rows,
  so that the spread between seeds contains no spread between evaluation sets.
* `precision.compile` where it is `auto`, which on a GPU compiles some FP8 engines and never BF16:
  FP8 would be credited with the gain of compiling. An explicit setting is kept, and compared.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config.recipe import (
    Recipe,
    find_recipe,
    is_path,
    list_recipes,
    load_recipe,
    with_overrides,
)
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError, RecipeNotFoundError, nearest
from finetune.hardware.device import Device, resolve

ENDS = {"_fp8": "_bf16", "_bf16": "_fp8"}
FIRST_SEED = 42  # default of `TrainingArguments.seed`


@dataclass(frozen=True)
class Pair:
    """Two recipes to compare.

    Attributes:
        a, b: the recipe in question and the reference, final except for `train.seed`.
        labels: distinct short names.
        notes: settings that were made the same on both sides.
    """

    a: Recipe
    b: Recipe
    labels: tuple[str, str]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]


def twin_of(name: str) -> str:
    """Find the recipe that differs from `name` in precision alone, by its name.

    Raises:
        RecipeNotFoundError: no such recipe, or it has no twin.
    """
    source = find_recipe(name)
    for end, other in ENDS.items():
        if source.stem.endswith(end):
            stem = source.stem.removesuffix(end) + other
            twin = str(source.with_name(stem + source.suffix)) if is_path(name) else stem
            if Path(twin).is_file() or twin in list_recipes():
                return twin
            hint = nearest(stem, [] if is_path(name) else list_recipes())
            raise RecipeNotFoundError(
                f"{name} has no twin {twin!r}" + (f"; {hint}" if hint else ""),
                where="compare with one recipe",
                why="a recipe is compared with the one that differs from it in precision alone",
                fix=f"name the other one: python -m finetune compare {shlex.quote(name)} OTHER",
            )
    raise RecipeNotFoundError(
        f"the twin of {name!r} cannot be told from its name",
        where="compare with one recipe",
        why="twins are called x_fp8 and x_bf16",
        fix=f"name the other one: python -m finetune compare {shlex.quote(name)} OTHER",
    )


def make_pair(
    first: str,
    second: str | None,
    overrides: Sequence[str],
    seeds: Sequence[int] | int,
    device: Device,
) -> Pair:
    """Load both recipes and make their shared settings the same; arguments as in `compare`.

    Raises:
        FinetuneError: an unreadable recipe or override, no twin, or no seeds.
    """
    second = second if second is not None else twin_of(first)
    shared = [item for item in overrides if item[:2] not in ("a.", "b.")]
    sides = []
    for letter, name in (("a.", first), ("b.", second)):
        own = [item.removeprefix(letter) for item in overrides if item.startswith(letter)]
        try:
            sides.append(load_recipe(name, [*shared, *own]))
        except ConfigError as error:
            if not shared:
                raise
            raise type(error)(
                f"{name}: {error.what}",
                where=error.where,
                why=error.why,
                fix="; ".join(
                    (*([error.fix] if error.fix else []),
                     "an override behind a. or b., such as a.precision.format=e4m3, is for the "
                     "first or the second recipe alone")
                ),
            ) from None  # fmt: skip
    a, b = sides
    if a.config.precision.compute == "bf16" != b.config.precision.compute:
        a, b = b, a
    (config_a, config_b), note = settle_compile((a.config, b.config), device)
    notes = [note] if note else []
    chosen = _seeds(seeds, int(a.config.train.get("seed", FIRST_SEED)))
    alike = ["train.logging_strategy=steps", "train.logging_steps=1"]
    if all(_draws_held_out_rows(config) for config in (config_a, config_b)):
        alike.append(f"data.seed={chosen[0]}")
        notes.append(f"held-out rows are the same for all seeds (data.seed={chosen[0]})")
    a, b = (
        Recipe(recipe.name, recipe.source, with_overrides(config, alike))
        for recipe, config in ((a, config_a), (b, config_b))
    )
    return Pair(a, b, _labels(a, b), chosen, tuple(notes))


def _draws_held_out_rows(config: RunConfig) -> bool:
    data = config.data
    drawn = not data.eval_path and not data.eval_split and data.eval_fraction > 0
    return drawn and data.seed is None


def _seeds(seeds: Sequence[int] | int, first: int) -> tuple[int, ...]:
    chosen = tuple(range(first, first + seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or not 0 <= min(chosen) <= max(chosen) < 2**32:
        raise ConfigError(
            "a comparison needs one seed or more, each of them once, from 0 to 2**32 - 1",
            where=f"--seeds {seeds if isinstance(seeds, int) else ','.join(map(str, seeds))}",
            fix="--seeds 3, or --seeds 42,43,44",
        )
    return chosen


def _labels(a: Recipe, b: Recipe) -> tuple[str, str]:
    first, second = (
        (p.low if p.compute == "fp8" else p.compute).upper()
        for p in (a.config.precision, b.config.precision)
    )
    if first != second:
        return first, second
    return (a.name, b.name) if a.name != b.name else (f"{a.name} (a)", f"{b.name} (b)")


def settle_compile(configs: Sequence[RunConfig], device: Device) -> tuple[list[RunConfig], str]:
    """Set the same `precision.compile` where it is `auto`; returns a note if anything was set."""
    requested = [config.precision.compile for config in configs]
    explicit = [value for value in requested if value != "auto"]
    if len(configs) < 2 or "auto" not in requested:
        return list(configs), ""
    if not explicit and not any(_auto_compiles(config, device) for config in configs):
        return list(configs), ""  # none compiles, so `auto` means the same for all
    setting = f"precision.compile={explicit[0] if explicit else 'on'}"
    sides = "both sides" if len(configs) == 2 else "all sides"
    return [
        with_overrides(config, [setting]) if value == "auto" else config
        for config, value in zip(configs, requested, strict=True)
    ], f"{setting} on {sides}, so that compiling is not FP8's gain"


def _auto_compiles(config: RunConfig, device: Device) -> bool:
    """True if `auto` compiles this run: torchao, or frozen weights stored in FP8, on a GPU."""
    if device.kind != "cuda" or config.precision.compute != "fp8":
        return False
    precision = resolve(config.precision, device).precision
    frozen = precision.compute == "fp8" and precision.frozen == "fp8" and config.lora is not None
    return frozen or precision.backend == "torchao"
