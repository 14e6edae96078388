"""Verbs about a model: `run` trains it, `generate` and `serve` ask it, `evaluate` scores it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from finetune.cli import (
    INTERRUPTED,
    AsJson,
    Checkpoint,
    Overrides,
    RecipeName,
    RunName,
    RunsFolder,
    TrustCode,
)
from finetune.cli.serving import URLS
from finetune.config.generation import generation
from finetune.config.paths import find_recipe, refuse_folder
from finetune.config.recipe import Recipe
from finetune.data.auto_length import load_recipe
from finetune.errors import ConfigError, MissingExtraError
from finetune.hardware.device import rank
from finetune.logging import busy, json_alone, output, whole
from finetune.runs.checkpoints import CHECKPOINTS, LATEST, checkpoints_in
from finetune.runs.folder import RunFolder, write_whole
from finetune.runs.last_model import MODEL, save_last_model
from finetune.runs.lookup import find_run

Details = Annotated[
    bool, typer.Option("--details", help="Print the whole receipt and the samples at the end.")
]


def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: RunsFolder = Path("runs"),
    force: Annotated[bool, typer.Option(help="Train although memory seems too small.")] = False,
    details: Details = False,
    as_json: AsJson = False,
    save: Annotated[bool, typer.Option("--save/--no-save", hidden=True)] = True,
) -> None:
    """Train a recipe (the verb may be left out)."""
    if find_recipe(recipe) == Path(recipe) / "config.yaml":
        refuse_folder(Path(recipe))  # to resume it, or to train it again?
    checked = load_recipe(recipe, overrides or ())
    _train(checked, out, force=force, details=details, as_json=as_json, save=save)


def resume(
    run: RunName,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str, typer.Option(help="A step, `last` (the newest complete one) or `best`.")
    ] = "last",
    out: RunsFolder = Path("runs"),
    force: Annotated[bool, typer.Option(help="Train although memory seems too small.")] = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """Resume a run from its newest complete checkpoint."""
    folder = find_run(run, out, CHECKPOINTS)
    going = RunFolder(folder)
    if going.holder:
        raise ConfigError(
            f"the run {str(folder)!r} is still running",
            where=str(folder),
            why=f"{going.holder} trains it",
            fix=f"wait for its end, or stop it first (`kill {going.start['pid']}`): it saves then",
        )
    start = folder / CHECKPOINTS / (f"checkpoint-{checkpoint}" if checkpoint.isdigit() else "")
    start = folder / checkpoint if checkpoint in ("best", "last", "latest") else start
    if not checkpoint.isdigit() and checkpoint not in ("best", "last", "latest"):
        raise ConfigError(
            f"there is no checkpoint {checkpoint!r}",
            where="--checkpoint",
            fix="a step, last or best: `python -m finetune checkpoints "
            f"{shlex.quote(str(folder))}` lists them",
        )
    file = str(folder / "config.yaml")
    first = rank() == 0
    if not overrides and checkpoint in LATEST and (done := save_last_model(folder, writes=first)):
        if first:
            _say_saved(folder, done, as_json=as_json)
        return
    own = [f"train.resume_from_checkpoint={start}"]
    if not checkpoints_in(folder / CHECKPOINTS):
        # Stopped before it saved one, it may have begun at a checkpoint of an earlier run.
        earlier = load_recipe(file, check_train=False).config.train.resume_from_checkpoint
        own = [] if earlier else own
    recipe = load_recipe(file, [*own, *(overrides or ())])
    _train(recipe, out, force=force, details=details, as_json=as_json)


def _say_saved(folder: Path, checkpoint: Path, *, as_json: bool) -> None:
    """Say that a run had nothing left to do but to save its model."""
    if as_json:
        print(json.dumps({"folder": str(folder), "saved": checkpoint.name}, indent=1))
        return
    said = f"no step was left: the model of {checkpoint.name} is saved in {folder / MODEL}"
    following = f'next: python -m finetune generate {shlex.quote(str(folder))} "..."'
    output().print(whole(said), whole(following), crop=False)
    if not (folder / "receipt.json").is_file():
        line = "! killed before its receipt: nothing proves what ran, and it cannot be exported"
        output().print(line, style="yellow")


def _train(
    checked: Recipe, out: Path, *, force: bool, details: bool, as_json: bool, save: bool = True
) -> None:
    console = output(stderr=as_json, quiet=rank() > 0)
    with busy(console, f"loading libraries for {checked.name}"):  # seconds
        from finetune.api import train

    with json_alone(as_json):
        report = train(checked, out=out, force=force, console=console, save=save)
    if as_json and rank() == 0:
        print(report.to_json(), flush=True)
    elif rank() == 0:
        output().print(
            report if details else report.summary, crop=False
        )  # paths to copy stay whole
    if report.interrupted:
        sys.exit(report.receipt.run.get("exit_code", INTERRUPTED))


# --------------------------------------------------------------------------------------- generate

STDIN = "-"


def generate(
    run: RunName,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            help="Each answered on its own; `-`: the lines of the input; left out: a "
            "conversation, typed or piped.",
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="An image before each prompt; several: once for each."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="Text of the system turn.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest answer; left out: eval.max_new_tokens, and 256 in a conversation.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from this share of probability.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw from so many most probable tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Sampling seed.")] = None,
    compare_base: Annotated[
        bool, typer.Option("--compare-base", help="Show the untrained model's answers beside.")
    ] = False,
    checkpoint: Checkpoint = None,
    trust_remote_code: TrustCode = False,
    out: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Talk with a trained model, or answer prompts."""
    words = generation(max_new_tokens, temperature, top_p, top_k, seed)
    folder = find_run(run, out, CHECKPOINTS if checkpoint else MODEL)
    from finetune.storage.processors import require_images
    from finetune.training.asking.chat import converse, lines, sides_of
    from finetune.training.asking.questions import image_in
    from finetune.training.asking.reload import loaded, open_trained, untrained

    trained = open_trained(folder, checkpoint, trust_remote_code=trust_remote_code)
    config, keeps, notes = trained.config, not prompts, output(stderr=True)
    if image:  # before weights are loaded
        require_images(config.model)
    images = [image_in(name) for name in image or ()]
    if notes.is_terminal:
        notes.print(whole(f"loading {trained.weights}", "dim"), crop=False)
    if not keeps:
        words = {"max_new_tokens": config.eval.max_new_tokens, **words}
    asked = lines() if not prompts or prompts == [STDIN] else prompts
    if prompts == [STDIN] or len(prompts or ()) > 1:
        asked = _above_its_answer(asked, output(quiet=as_json))
    settings: Any = {"system": system, "seed": seed, "compute": config.precision.compute}
    with loaded(trained, images=bool(image) or (None if keeps else False)) as (model, reader):
        base = untrained(trained, model) if compare_base else None
        sides = sides_of(model, reader, words, base, **settings)
        said = converse(sides, asked, images=images, keeps=keeps, shows=not as_json)
        answers = list(said)
    if as_json:
        print(json.dumps({"run": str(folder), "answers": answers}, indent=1, ensure_ascii=False))


chat = generate


def _above_its_answer(prompts: Iterable[str], console: Console) -> Iterator[str]:
    for prompt in prompts:
        console.print(Text("> ") + Text(prompt), style="dim")
        yield prompt


# ------------------------------------------------------------------------------------------- serve


def serve(
    run: RunName,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of `transformers serve`."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    image_urls: Annotated[
        bool, typer.Option(URLS, help="Fetch images that requests name by URL.")
    ] = False,
    trust_remote_code: TrustCode = False,
    out: RunsFolder = Path("runs"),
) -> None:
    """Serve a run or an export by `transformers serve`, over OpenAI's protocol."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise MissingExtraError(
            "`transformers serve` is not installed whole",
            why="it needs fastapi, uvicorn and openai",
            fix="pip install 'transformers[serving]'",
        )
    folder = Path(run)
    if not (folder / "config.json").is_file():
        from finetune.export.export import export_run, open_run

        found = open_run(find_run(run, out, MODEL))
        merged = found.folder.with_name(f"{found.folder.name}-merged")  # a run stays as it is
        folder = merged if found.has_adapter else found.model
        if not folder.is_dir():
            code = {"trust_remote_code": trust_remote_code}
            export_run(found.folder, "merged", folder, console=output(stderr=True), **code)
    words = ["serve", str(folder), "--port", str(port), *(options or ()), *[URLS] * image_urls]
    if trust_remote_code:
        words.append("--trust-remote-code")
    ask = """-d '{"messages": [{"role": "user", "content": "Hello."}]}'"""
    url = f"localhost:{port}/v1/chat/completions -H 'Content-Type: application/json'"
    output().print(whole(f"next: curl {url} {ask}"), crop=False)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "finetune.cli.serving", *words])


# --------------------------------------------------------------------------------------- evaluate


def evaluate(
    run: RunName,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names, comma-separated; left out: the run's eval.tasks."),
    ] = None,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows", help="Also the held-out rows: their loss, and answers that are the row's own."
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Folder of rows, TASK/validation.jsonl or .parquet.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before a question.")] = None,
    checkpoint: Checkpoint = None,
    trust_remote_code: TrustCode = False,
    out: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Score a run on lm-eval tasks or held-out rows, and keep it."""
    folder = find_run(run, out, CHECKPOINTS if checkpoint else MODEL)
    from finetune.config.schema import EvalConfig
    from finetune.config.sections import BUILTIN
    from finetune.training.asking.reload import loaded, open_trained

    trained = open_trained(folder, checkpoint, trust_remote_code=trust_remote_code, train=rows)
    named = None if tasks is None else tuple(n for name in tasks.split(",") if (n := name.strip()))
    given = {"tasks": named, "data": data, "limit": limit, "shots": shots}
    wanted = trained.config.eval.model_dump() | {k: v for k, v in given.items() if v is not None}
    alone = rows and tasks is None
    if alone and (data is not None or shots is not None):
        raise ConfigError(
            "--data and --shots are about tasks, and --rows alone has none",
            where="evaluate --rows",
            fix="leave them out, or name --tasks as well",
        )
    if not alone and not wanted["tasks"]:
        raise ConfigError(
            "no task is named",
            where="--tasks",
            why="the run's eval.tasks is empty" if tasks is None else "",
            fix="--tasks hellaswag, or --tasks builtin:harbour_choice, which needs no hub; --rows "
            "takes the run's held-out rows",
        )
    if data is None and all(name.startswith(BUILTIN) for name in wanted["tasks"]):
        wanted["data"] = None  # the run's own, which was for its tasks
    update = {} if alone else {"eval": EvalConfig(**wanted)}
    config = trained.config.model_copy(update=update)
    from finetune.storage.processors import tokenizer_of
    from finetune.training.asking.evaluate import load_tasks, score
    from finetune.training.asking.held_out import score_rows

    found = [] if alone else load_tasks(config.eval)
    console = output(stderr=as_json, quiet=as_json)
    scores: dict[str, Any] = {}
    with loaded(trained, images=None if rows else False) as (model, reader):
        if rows:
            scores |= score_rows(model, reader, trained.config, console, limit)
        if found:
            scores |= score(model, tokenizer_of(reader), found, config, console)
    if as_json:
        print(json.dumps(scores, indent=1))
    try:
        requested = config.eval.model_dump(mode="json") | {"rows": rows, "limit": limit}
        kept = _keep(folder, trained.weights, requested, scores)
    except OSError as error:
        raise ConfigError(
            f"the scores above could not be kept: {error.strerror}",
            where=str(error.filename or folder),
            fix="make the run folder writable, or copy the run and evaluate the copy",
        ) from None
    if not as_json:
        console.print(whole(f"saved in {kept}"), crop=False)


def _keep(folder: Path, weights: Path, requested: dict[str, Any], scores: dict[str, Any]) -> Path:
    """Add the scores of a finished run's last weights to its report; others stay apart.

    A run without a report did not finish, and a report that only holds scores would say it had.
    """
    run = RunFolder(folder)
    if weights.name != "model" or not run.report:
        kept = folder / f"tasks-{weights.name}.json"
        text = {"weights": weights.name, "eval": requested, "tasks": scores}
        write_whole(kept, json.dumps(text, indent=1) + "\n")
        return kept
    kept = folder / "report.json"
    text = run.report | {"tasks": run.report.get("tasks", {}) | scores}
    write_whole(kept, json.dumps(text, indent=1) + "\n")
    row = {"step": run.last_step, "tasks": scores}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return kept
