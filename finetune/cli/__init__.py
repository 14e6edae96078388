"""The verbs of `python -m finetune`, a file per group; here the arguments they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.config.paths import list_recipes
from finetune.errors import ConfigError

MISUSE, INTERRUPTED = 2, 130
"""Exit codes: the user's mistake, and Ctrl-C (128 + SIGINT)."""

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Push = Annotated[
    str | None,
    typer.Option(metavar="OWNER/NAME", help="Show what would go to this repository of the hub."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Upload what --push shows.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value]...", help="Set a value; ~section.key unsets."),
]


def run_of(name: str | None) -> str | None:
    """`last` is the newest run, whose recipe is meant."""
    from finetune.runs.lookup import LAST, find_run

    return str(find_run(LAST)) if name == LAST else name


RECIPE = "Name, or path to a YAML file; of a run its folder, or `last`."
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help=RECIPE, autocompletion=list_recipes, callback=run_of),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run folder, `last`, or a recipe's name.")
]
RunsFolder = Annotated[Path, typer.Option(help="Folder of runs.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the code of the run's model run here.")
]
Checkpoint = Annotated[str | None, typer.Option(help="A step, or `last`; left out: the run's end.")]


def refuse(given: dict[str, Any], said: str, **more: str) -> None:
    """Raise `ConfigError` if words or options were given, by what they are called on the line."""
    if idle := [name for name, value in given.items() if value or isinstance(value, float)]:
        raise ConfigError(f"{', '.join(idle)} {said}", **more)
