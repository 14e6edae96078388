"""The command line's `diagnose`: what ran in which precision, and why FP8 is or is not faster."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from finetune.cli_estimate import AsJson, Overrides
from finetune.errors import ConfigError
from finetune.recipe import load_recipe


class Weights(enum.StrEnum):
    """What `diagnose --weights` can be."""

    random = "random"


def diagnose(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name, or path to a YAML file.")],
    overrides: Overrides = None,
    weights: Annotated[
        Weights | None,
        typer.Option(help="random: no hub, no data; random weights, rows of random tokens."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to time, and to profile.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for diagnosis.json; left out: nothing is kept.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Run although memory seems too small.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what runs in which precision, where the time goes, and why FP8 is or is not faster."""
    checked = load_recipe(recipe, overrides or ())
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {str(out)!r} cannot be made: {error.strerror}",
                where=f"--out {out}",
                fix="choose another folder with --out",
            ) from None
    from finetune.diagnosis.diagnose import diagnose as look

    main_process = int(os.environ.get("RANK", "0")) == 0
    progress = Console(stderr=True, quiet=not main_process)
    chosen = "random" if weights is Weights.random else None
    found = look(checked, weights=chosen, steps=steps, force=force, console=progress)
    if not main_process:
        return
    if as_json:
        print(found.to_json())
    else:
        Console(highlight=False, soft_wrap=True).print(found)
    if out is not None:
        progress.print(f"diagnosis: {found.save(out)}", highlight=False)
