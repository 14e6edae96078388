"""`finetune.train`: training, with what the estimator expects of its memory.

`training` knows no estimator: the forecast is handed in here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import speaking

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.config.recipe import Recipe
    from finetune.runs.receipt import RunReport


@speaking(str)
def train(
    recipe: Recipe,
    *,
    out: Path | str = "runs",
    force: bool = False,
    console: Console | None = None,
    until: int | None = None,
    save: bool = True,
) -> RunReport:
    """Train a recipe and write its run folder.

    Args:
        recipe: from `finetune.load_recipe`.
        out: folder of runs.
        force: train even where memory is expected to be too small.
        console: where to show progress; a quiet one for notebooks and tests.
        until: step after which the run saves a checkpoint and stops, as after Ctrl-C.
        save: save the trained model; a run that is only measured needs none.

    Raises:
        FinetuneError: anything that the user can put right, see `finetune.errors`.
    """
    from finetune.config.recipe import Recipe
    from finetune.errors import ConfigError

    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"train takes a Recipe, not {type(recipe).__name__}",
            fix=f"finetune.train(finetune.load_recipe({recipe!r}))",
        )
    from finetune.estimator.gate import MemoryForecast
    from finetune.training.run.run import begun

    forecast = MemoryForecast()
    with begun(recipe, forecast=forecast, out=out, force=force, console=console) as run:
        run.until = until
        return run.train(save=save)
