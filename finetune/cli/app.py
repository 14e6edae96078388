"""The command line: `python -m finetune RECIPE [section.key=value ...]` and a few verbs.

Listing imports neither torch nor transformers. A mistake of the user's prints what, where, why and
what to do, and exits with 2.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from finetune import __version__
from finetune.cli.analysis import benchmark, compare, diagnose
from finetune.cli.analysis import report as write_report
from finetune.cli.estimate import AsJson, Overrides, estimate
from finetune.cli.runs import evaluate, generate
from finetune.config.recipe import Recipe, find_recipe, is_path, list_recipes, load_recipe
from finetune.config.schema import RunConfig
from finetune.config.yaml import read_text
from finetune.errors import ConfigError, FinetuneError, RecipeNotFoundError, nearest
from finetune.logging import quiet_libraries

MISUSE, INTERRUPTED = 2, 130
# Click's own errors of usage; newer typers carry a click of their own inside.
_USAGE_ERRORS: Any = tuple(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _RecipeOrVerb(TyperGroup):
    """A first word that is no verb is a recipe: `finetune X` is `finetune run X`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        first = next((i for i, arg in enumerate(args) if not arg.startswith("-")), None)
        if first is not None and args[first] not in self.commands:
            word = args[first]
            if first == 0 and not is_path(word) and word not in list_recipes():
                hint = nearest(word, [*self.commands, *list_recipes()])
                raise RecipeNotFoundError(
                    f"there is no recipe or verb {word!r}" + (f"; {hint}" if hint else ""),
                    fix="`python -m finetune ls` lists the recipes, --help the verbs; a path to a "
                    "YAML file works too",
                )
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RecipeOrVerb,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Name, or path to a YAML file.")]


def main() -> None:
    """Entry point of `python -m finetune` and of the console script."""
    quiet_libraries()
    code = None
    try:
        code = app(standalone_mode=False)
    except FinetuneError as error:
        _show_error(error)
        sys.exit(MISUSE)
    except _USAGE_ERRORS as error:
        error.show()
        sys.exit(MISUSE)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # newer typers catch Ctrl-C and return it
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)


def _show_error(error: FinetuneError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(error.what, style="bold"))
    for label, text in (("where", error.where), ("why", error.why), ("fix", error.fix)):
        if text:
            console.print(Text(f"  {label + ':':7s}", style="cyan") + Text(text))


@app.callback(invoke_without_command=True)
def _start(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """FP8 fine-tuning: FP8 asked is FP8 given, proven, or an error."""
    if version:
        print(f"finetune {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        print("\nStart here: python -m finetune tiny_lora_fp8\nRecipes:    python -m finetune ls")


# ------------------------------------------------------------------------------------------ train


@app.command("run")
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    force: Annotated[bool, typer.Option(help="Train although memory seems too small.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe (the verb may be left out)."""
    checked = load_recipe(recipe, overrides or ())
    from finetune.training.trainer import train

    report = train(checked, out=out, force=force, console=Console(stderr=True) if as_json else None)
    if as_json:
        print(report.to_json())
    elif int(os.environ.get("RANK", "0")) == 0:
        Console(highlight=False).print(report)
    if report.interrupted:
        sys.exit(INTERRUPTED)


app.command("estimate")(estimate)
app.command("generate")(generate)
app.command("evaluate")(evaluate)
app.command("benchmark")(benchmark)
app.command("report")(write_report)
app.command("diagnose")(diagnose)
app.command("compare")(compare)


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    to: Annotated[str, typer.Option(help="adapter, merged, fp8 or nvfp4.")],
    force: Annotated[bool, typer.Option(help="Replace an earlier export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export a run's weights, and check that they say what the run's model says."""
    from finetune.export.export import export_run

    console = Console(stderr=True) if as_json else Console(highlight=False)
    done = export_run(run, to, out, force=force, console=console)
    print((done.folder / "export.json").read_text("utf-8") if as_json else f"export: {done.folder}")


# ---------------------------------------------------------------------------------------- recipes


def _row(name: str, config: RunConfig) -> dict[str, Any]:
    from finetune.estimator.closed_form.preview import preview

    lora, about = config.lora, preview(config)
    precision = config.precision
    fp8 = precision.compute == "fp8"
    return {
        "recipe": name,
        "model": config.model.name.rpartition("/")[2],
        "method": f"{'QLoRA' if config.model.storage else 'LoRA'} r={lora.r}" if lora else "full",
        "precision": f"fp8 {precision.scaling}" if fp8 else precision.compute,
        "length": str(config.train.get("max_length", "")),
        "data": (config.data.path or config.data.name or "").rpartition("/")[2],
        "preview_gib": None if about is None else round(about.peak_gib, 2),
    }


def _about(gib: float | None) -> str:
    """A preview of memory with as many digits as it is worth."""
    return "-" if gib is None else f"{gib:.0f}" if gib >= 10 else f"{gib:.1f}"


@app.command("ls")
def ls(
    runs: Annotated[bool, typer.Option("--runs", help="List runs instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --runs: folder of runs.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped recipes (≈GiB is a preview of peak memory on one GPU), or the runs."""
    if runs:
        from finetune.cli.runs import list_runs

        list_runs(out, as_json=as_json)
        return
    if out is not None:
        raise ConfigError("--out would change nothing", where="ls", fix="ls --runs --out FOLDER")
    rows = [_row(n, load_recipe(n, check_train=False).config) for n in list_recipes()]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    console = Console()
    columns = {k: k for k in rows[0] if k != "data"} | {"preview_gib": "≈GiB"}
    gap = 2 if console.width >= 86 else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for key, title in columns.items():
        table.add_column(title, no_wrap=True, justify="right" if key == "preview_gib" else "left")
    for row in rows:
        shown = row | {"preview_gib": _about(row["preview_gib"])}
        table.add_row(
            *(shown[key] for key in columns), style=None if "fp8" in row["precision"] else "dim"
        )
    console.print(table)


@app.command("cat")
def cat(
    recipe: RecipeName,
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option(help="Complete: every default, every override.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a recipe, as written or complete (a recipe itself)."""
    if resolved or overrides or as_json:
        checked = load_recipe(recipe, overrides or ())
        if as_json:
            print(json.dumps(checked.config.model_dump(mode="json"), indent=1))
        else:
            sys.stdout.write(checked.to_yaml())
    else:
        sys.stdout.write(read_text(find_recipe(recipe)))


@app.command("cp")
def cp(
    recipe: RecipeName,
    destination: Annotated[Path, typer.Argument(help="File or folder to copy it to.")],
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
) -> None:
    """Copy a recipe to edit it."""
    source = find_recipe(recipe)
    target = destination / source.name if destination.is_dir() else destination
    if target.suffix not in (".yaml", ".yml"):
        target = target.with_name(target.name + ".yaml")
    if target.exists() and not force:
        raise ConfigError(
            f"{target} is there already", where=str(target.resolve()), fix="choose another, --force"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {str(target.parent)!r}", where=str(target.resolve()))
    try:
        target.write_text(read_text(source), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
    print(f"{target}\nrun it: python -m finetune {_as_argument(target)}")


def _as_argument(path: Path) -> str:
    return shlex.quote(str(path) if len(path.parts) > 1 or path.suffix else f"./{path}")


@app.command("validate")
def validate(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and show its precision plan, without loading weights."""
    checked = load_recipe(recipe, overrides or ())
    from finetune.config.optimizers import check_here
    from finetune.estimator.memory_bound import bound, shards_of, why_too_small
    from finetune.hardware.device import resolve, this_device
    from finetune.hardware.extras import check_extras
    from finetune.training.model import sketch
    from finetune.training.preflight import check_settings, processes

    config, device = checked.config, this_device()
    model = sketch(config)
    the_plan = check_settings(config, model)
    shards, storage = shards_of(config, processes()), config.model.storage
    need = bound(model, the_plan, config.train, shards=shards, storage=storage)
    try:
        check_extras(config)
        check_here(config.train, device)
        resolution = resolve(config.precision, device)
        here = resolution.fallback or f"{resolution.label}: {resolution.reason}"
    except FinetuneError as error:
        here = f"not on this machine: {error.why or error.what}"
    short = why_too_small(config, need, device)
    if as_json:
        layers = [
            {
                "name": x.name,
                "shape": x.shape,
                "compute": x.compute,
                "held": x.held,
                "reason": x.reason,
            }
            for x in the_plan.layers
        ]
        facts = {"recipe": checked.name, "here": here, "memory": str(need), "short": short}
        facts["storage"] = config.model.storage or ""
        print(json.dumps({**facts, "trainable": need.trainable, "layers": layers}, indent=1))
        return
    print(f"{checked.name}: valid ({_origin(checked)})\n\n{the_plan}\n")
    held = f"; frozen base held in {config.model.storage}" if config.model.storage else ""
    print(f"parameters: {need.parameters:,}, trainable {need.trainable:,}{held}")
    print(f"memory:     at least {need}" + (f"; TOO SMALL HERE: {short}" if short else ""))
    print(f"here:       {here}")


def _origin(recipe: Recipe) -> str:
    return recipe.source.name if recipe.source.parent.name == "recipes" else str(recipe.source)


# ----------------------------------------------------------------------------------------- doctor


@app.command("doctor")
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can do in FP8, and why."""
    from finetune.analysis.doctor import examine

    findings = examine()
    if as_json:
        print(findings.to_json())
    else:
        Console(highlight=False).print(findings)
