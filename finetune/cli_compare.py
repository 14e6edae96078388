"""The command line's `compare`: two recipes over the same seeds, and whether they end the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from finetune.cli_estimate import AsJson
from finetune.errors import ConfigError

EQUIVALENT, NOT_EQUIVALENT, MISUSE = 0, 3, 2


def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE_A [RECIPE_B] [section.key=value]...",
            help="Names, paths to YAML files, or the folder of a comparison to judge again. "
            "Settings are for both sides; behind a. or b. for one: a.precision.format=e4m3.",
        ),
    ],
    seeds: Annotated[
        str | None, typer.Option(help="How many paired runs, or which: 42,43,44. [default: 3]")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="Relative gap of losses that counts as none. [0.01]")
    ] = None,
    confidence: Annotated[float | None, typer.Option(help="Of the intervals. [0.95]")] = None,
    allow: Annotated[
        bool, typer.Option(help="Compare although the two do not train the same.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    jobs: Annotated[int | None, typer.Option(help="Runs at once, on a CPU.")] = None,
    force: Annotated[bool, typer.Option(help="Train although memory seems too small.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and its BF16 twin over the same seeds: is FP8 as good, and is it faster?"""
    from finetune.comparison import comparing
    from finetune.reports.writer import write_report

    names = [word for word in recipes if not _is_override(word)]
    overrides = [word for word in recipes if _is_override(word)]
    if not 1 <= len(names) <= 2:
        raise ConfigError(
            f"compare takes one recipe or two, and {len(names)} were given",
            where=" ".join(names) or "only settings",
            fix="python -m finetune compare tiny_full_fp8",
        )
    if Path(names[0]).expanduser().is_dir():  # of a comparison: a recipe is a file
        options = {"--seeds": seeds, "--jobs": jobs, "--force": force}
        idle = [*names[1:], *overrides, *(name for name, given in options.items() if given)]
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} would change nothing",
                where=names[0],
                why="the runs of this comparison are done; they are judged again",
                fix="leave it out; or compare the recipes anew",
            )
        found = comparing.judge_again(
            Path(names[0]).expanduser(), margin=margin, confidence=confidence, allow=allow
        )
    else:
        found = comparing.compare(
            names[0],
            names[1] if len(names) > 1 else None,
            overrides,
            seeds=_seeds(seeds) if seeds is not None else comparing.SEEDS,
            margin=comparing.MARGIN if margin is None else margin,
            confidence=comparing.CONFIDENCE if confidence is None else confidence,
            allow=allow,
            out=out,
            jobs=jobs,
            force=force,
            console=Console(stderr=True, highlight=False),
        )
    assert found.folder is not None
    console = Console(highlight=False)
    if as_json:
        print(found.to_json(), flush=True)
    else:
        console.print(found)
    report = write_report(found.folder)  # last: the verdict is out should its page fail
    if not as_json:
        console.print(f"report: {report.html}", soft_wrap=True)
    code = {"equivalent": EQUIVALENT, "refused": MISUSE}.get(found.verdict, NOT_EQUIVALENT)
    if code:
        sys.exit(code)


def _is_override(word: str) -> bool:
    setting = "=" in word or word.startswith("~") or word[2:].startswith("~")
    return setting and not Path(word).exists()  # a folder may be called lr=1e-3


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"seeds cannot be {text!r}", where="--seeds", fix="--seeds 3, or --seeds 42,43,44"
        ) from None
    return numbers if "," in text else numbers[0]
