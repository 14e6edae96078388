"""`matrix(recipe)`: a recipe in each precision of the matrix, measured, trained or predicted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.analysis.benchmark.benchmark import Measuring, Say
from finetune.analysis.benchmark.grid import at_point, points_of
from finetune.analysis.benchmark.matrix import MATRIX, REFERENCE, Matrix
from finetune.analysis.benchmark.result import Row
from finetune.analysis.compare.compare import alike_over_seeds, chosen_seeds
from finetune.analysis.experiment.fairness import settle
from finetune.analysis.experiment.jobs import Variant
from finetune.config.recipe import Recipe, load_recipe, with_overrides
from finetune.errors import FinetuneError
from finetune.estimator.predict import predict
from finetune.hardware.gpus import Place, place_of
from finetune.hardware.requirements import resolve_there
from finetune.runs.folder import command_line, new_folder


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
    place = place_of(gpu)
    variants, refused = variants_of(recipe, place)
    made = [v.recipe.config for v in variants if v.label not in refused]
    settled, notes = settle(made, place.device, None if place.here else place)
    chosen = () if seeds is None else chosen_seeds(seeds, recipe.config)
    if chosen:
        alike = alike_over_seeds(settled, chosen)
        settled = [with_overrides(config, alike) for config in settled]
    by_label = zip((v.label for v in variants if v.label not in refused), settled, strict=True)
    final = {label: replace(recipe, config=config) for label, config in by_label}
    variants = [Variant(v.label, final.get(v.label, v.recipe)) for v in variants]
    found = Matrix(kind="matrix", references=[REFERENCE], alike="; ".join(notes), gpu=gpu or "")
    points = points_of(grid, recipe.config)
    if gpu is None:
        measuring = Measuring(
            *(variants, points, place.device, steps, rounds), force=force, say=say,
            refused=refused, seeds=chosen,
        )  # fmt: skip
        measuring.measure(found, new_folder(Path(out) / f"{recipe.name}-matrix", out))
        return found
    found.command, found.started = command_line(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    for point in points:
        for v in variants:
            row = Row(label=v.label, **point._asdict(), tokens=0)
            found.rows.append(row)
            try:
                config = at_point(v.recipe.config, point, steps)
                row.error = refused.get(v.label, "")
                if not row.error:
                    expected = predict(config, replace(place, count=point.gpus))
                    row.predict(expected)
                    row.tokens = expected.pace.tokens * point.gpus if expected.pace else 0
                    row.note = "does not fit" if expected.fit == "does not fit" else ""
            except FinetuneError as error:
                row.error = _why(error)
    found.save(new_folder(Path(out) / f"{recipe.name}-matrix", out))
    return found


def variants_of(recipe: Recipe, place: Place) -> tuple[list[Variant], dict[str, str]]:
    """All of the matrix, and why some are refused, which stand there as the recipe is.

    FP8 is emulated on a device of this machine without it, and never where a GPU is predicted.
    """
    variants, refused = [], {}
    emulated = place.here and not place.device.has_fp8
    for label, entry in MATRIX.items():
        more = [f"precision.emulation={'allow' if emulated else 'forbid'}"]
        if label.startswith("FP8") and recipe.config.precision.scaling in ("mxfp8", "nvfp4"):
            more.append("precision.scaling=tensorwise")
        config = recipe.config
        try:
            config = with_overrides(config, [*entry.overrides, *more])
            resolve_there(config.precision, place)
        except FinetuneError as error:
            refused[label] = _why(error)
        variants.append(Variant(label, replace(recipe, config=config)))
    return variants, refused


def _why(error: FinetuneError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what
