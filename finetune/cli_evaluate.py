"""The command line's `evaluate`: score the model of a finished run on tasks of lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from finetune.errors import ConfigError
from finetune.run_lookup import find_run
from finetune.runs import Run


def evaluate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder, `last`, or a recipe's name.")
    ],
    tasks: Annotated[
        str | None,
        typer.Option(help="Names, comma-separated; left out: the run's eval.tasks."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of rows, TASK/validation.jsonl or .parquet.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before a question.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A step, or `last`; left out: the run's end.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Score a run's model on tasks of lm-eval (HellaSwag and others), and keep the result."""
    folder = find_run(run, out)
    from finetune.config import BUILTIN, EvalConfig
    from finetune.trained import loaded, open_trained

    trained = open_trained(folder, checkpoint)
    named = None if tasks is None else tuple(n for name in tasks.split(",") if (n := name.strip()))
    given = {"tasks": named, "data": data, "limit": limit, "shots": shots}
    wanted = trained.config.eval.model_dump() | {k: v for k, v in given.items() if v is not None}
    if not wanted["tasks"]:
        raise ConfigError(
            "no task is named",
            where="--tasks",
            why="the run's eval.tasks is empty" if tasks is None else "",
            fix="--tasks hellaswag, or --tasks builtin:harbour_choice, which needs no hub",
        )
    if data is None and all(name.startswith(BUILTIN) for name in wanted["tasks"]):
        wanted["data"] = None  # the run's own, which was for its tasks
    config = trained.config.model_copy(update={"eval": EvalConfig(**wanted)})
    from finetune.scoring import score
    from finetune.tasks import load_tasks

    found = load_tasks(config.eval)
    console = Console(stderr=True, quiet=True) if as_json else Console()
    with loaded(trained) as (model, tokenizer):
        scores = score(model, tokenizer, found, config, console)
    if as_json:
        print(json.dumps(scores, indent=1))
    try:
        kept = _keep(folder, trained.weights, config.eval.model_dump(mode="json"), scores)
    except OSError as error:
        raise ConfigError(
            f"the scores above could not be kept: {error.strerror}",
            where=str(error.filename or folder),
            fix="make the run folder writable, or copy the run and evaluate the copy",
        ) from None
    if not as_json:
        console.print(f"kept in {kept}", highlight=False, soft_wrap=True)


def _keep(folder: Path, weights: Path, asked: dict[str, Any], scores: dict[str, Any]) -> Path:
    """Add the scores of a finished run's last weights to its report; others stay apart.

    A run without a report did not finish, and a report that only holds scores would say it had.
    """
    run = Run(folder)
    if weights.name != "model" or not run.report:
        kept = folder / f"tasks-{weights.name}.json"
        text = {"weights": weights.name, "eval": asked, "tasks": scores}
    else:
        kept = folder / "report.json"
        text = run.report | {"tasks": run.report.get("tasks", {}) | scores}
    partial = kept.with_suffix(".part")
    partial.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    partial.replace(kept)
    if kept.name == "report.json":
        row = {"step": max((r.get("step", 0) for r in run.rows), default=0), "tasks": scores}
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return kept
