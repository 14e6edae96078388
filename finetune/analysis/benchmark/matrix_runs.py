"""`matrix(recipe)`: a recipe in each precision of the matrix, measured, trained or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.analysis.benchmark.benchmark import Measuring, Say, reason
from finetune.analysis.benchmark.grid import points_of
from finetune.analysis.benchmark.matrix import MATRIX, REFERENCE, Matrix
from finetune.analysis.compare.compare import alike_over_seeds, chosen_seeds
from finetune.analysis.experiment.fairness import settle
from finetune.analysis.experiment.jobs import LabeledRecipe
from finetune.config.recipe import Recipe, with_overrides
from finetune.config.schema import RunConfig
from finetune.data.auto_length import load_recipe
from finetune.errors import FinetuneError
from finetune.hardware.gpus import Machine, machine_of
from finetune.hardware.requirements import resolve_there
from finetune.precision.facts import FASTEST
from finetune.runs.folder import new_folder


def matrix(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    gpu: str | None = None,
    seeds: Sequence[int | str] | int | None = None,
    grid: str | None = None,
    steps: int = 10,
    rounds: int = 1,
    out: Path | str = "runs/benchmark",
    force: bool = False,
    say: Say | None = None,
) -> Matrix:
    """Measure a recipe in the precisions of `MATRIX`, train it in them, or predict them.

        matrix("tiny_full_fp8")

    Args:
        gpu: predict for this one; nothing runs.
        seeds: train the recipe on its own rows with these, as `compare` does.
        grid, steps, rounds, out, force, say: as in `benchmark`.

    Raises:
        FinetuneError: an invalid argument; what one precision lacks is in its row.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    machine = machine_of(gpu)
    configs, refused = configs_of(recipe, machine)
    settled, notes = settle([*configs.values()], machine.device, None if machine.here else machine)
    chosen = () if seeds is None else chosen_seeds(seeds, recipe.config)
    if chosen:
        alike = alike_over_seeds(settled, chosen)
        settled = [with_overrides(config, alike) for config in settled]
    configs = dict(zip(configs, settled, strict=True))
    variants = [
        LabeledRecipe(label, replace(recipe, config=configs.get(label, recipe.config)))
        for label in MATRIX
    ]
    found = Matrix(
        kind="matrix", recipe=recipe.name, references=[REFERENCE], alike="; ".join(notes),
        gpu=gpu or "",
    )  # fmt: skip
    measuring = Measuring(
        variants, points_of(grid, recipe.config), machine, steps, rounds, force=force, say=say,
        refused=refused, seeds=chosen,
    )  # fmt: skip
    measuring.measure(found, new_folder(Path(out) / f"{recipe.name}-matrix", out))
    return found


def configs_of(recipe: Recipe, machine: Machine) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """The recipe in each precision of the matrix that the GPU has, and why others cannot.

    FP8 is emulated on a device of this machine without it, and never where a GPU is predicted.
    """
    configs, refused = dict[str, RunConfig](), dict[str, str]()
    emulated = machine.here and not machine.device.has_fp8
    for label, entry in MATRIX.items():
        more = [f"precision.emulation={'allow' if emulated else 'forbid'}"]
        # A recipe of MXFP8 or NVFP4 scaling would put its own scales into the rows called FP8.
        if label.startswith("FP8") and recipe.config.precision.facts.own_scales:
            more.append(f"precision.scaling={FASTEST}")
        try:
            config = with_overrides(recipe.config, [*entry.overrides, *more])
            resolve_there(config.precision, machine)
            configs[label] = config
        except FinetuneError as error:
            refused[label] = reason(error)
    return configs, refused
