"""Verbs about run folders: `ls --runs`, `checkpoints` (without torch), `export`; and `import`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from finetune.cli import AsJson, Push, RunName, RunsFolder, TrustCode, Yes
from finetune.config.measures import LOSSES
from finetune.errors import ConfigError
from finetune.logging import output, print_rows, whole
from finetune.runs.checkpoints import CHECKPOINTS, Checkpoint, checkpoints_in, resume_command
from finetune.runs.folder import Run
from finetune.runs.lookup import LAST, find_comparisons, find_run, find_runs
from finetune.units import size, size_of_gib

DEFAULT_OUT = Path("runs")
_STATES = {"finished": "", "running": "cyan", "stopped": "yellow"}


def list_runs(out: Path | None, *, as_json: bool) -> None:
    """Print the runs below `out`, newest first, and the comparisons apart.

    Raises:
        ConfigError: a folder was named and is not there.
    """
    folder = DEFAULT_OUT if out is None else out
    nothing = out is None and not folder.is_dir()
    runs = [] if nothing else [run.summary() for run in find_runs(folder)]
    compared = [] if nothing else [_comparison(path) for path in find_comparisons(folder)]
    if as_json:
        print(json.dumps({"runs": runs, "comparisons": compared}, indent=1))
        return
    if not runs and not compared:
        print(f"no runs in {folder}/ yet: python -m finetune tiny_lora_fp8 makes one")
        return
    console = output()
    if runs:
        right = ("steps", "loss", "eval loss", "tok/s", "memory")
        scored = any(run["scores"] for run in runs)
        print_rows(console, [_row(run, scored=scored) for run in runs], right=right, least=5)
    if compared:
        console.print(Text("\ncomparisons" if runs else "comparisons", style="bold"))
        scored = any(one["gap"].keys() - {*LOSSES} for one in compared)
        print_rows(console, [_comparison_row(one, scored=scored) for one in compared])


def _row(run: dict[str, Any], *, scored: bool) -> dict[str, Any]:
    """A run in a line, what matters most first: its name has its precision at the end."""
    ended = "" if run["state"] == "finished" else f" {run['state']}"
    return {
        "run": f"{run['recipe']}/{run['run']}",
        "verified": _verified(run),
        "steps": Text(
            f"{run['step']}/{run['steps'] or '?'}{ended}", style=_STATES.get(run["state"], "red")
        ),
        "loss": _shown(run["loss"], ".3f"),
        "eval loss": _shown(run["eval_loss"], ".3f"),
        **({"score": _scores(run["scores"])} if scored else {}),
        "precision": run["precision"],
        "tok/s": _shown(run["tokens_per_s"], ",.0f"),
        "memory": "-" if run["memory_gib"] is None else size_of_gib(run["memory_gib"]),
    }


def _scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items()) or "-"


def _verified(run: dict[str, Any]) -> Text:
    if run["fallback"]:  # BF16 is verified, and is not what was requested
        return Text("fell back", style="bold yellow")
    return Text("yes", style="green") if run["proven"] else Text("no", style="bold red")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _comparison(folder: Path) -> dict[str, Any]:
    """A comparison in a line; one that cannot be read says so instead of a verdict."""
    from finetune.analysis.compare.result import read_comparison

    try:
        found = read_comparison(folder)
    except ConfigError:
        nothing = {"a": None, "b": None, "seeds": 0, "verdict": "cannot be read"}
        return {"folder": str(folder), **nothing, "gap": {}, "speed": None}
    return {
        "folder": str(folder),
        "a": found.a.recipe,
        "b": found.b.recipe,
        "seeds": len(found.seeds),
        "verdict": found.verdict,
        "gap": {name: gap.gap for name, gap in found.gaps.items()},
        "speed": found.speed and found.speed.ratio,
    }


def _comparison_row(one: dict[str, Any], *, scored: bool) -> dict[str, Any]:
    points = {
        name: f"{gap * 100:+z.2f} pt" for name, gap in one["gap"].items() if name not in LOSSES
    }
    scores = ", ".join(f"{name} {gap}" for name, gap in points.items()) or "-"
    return {
        "folder": one["folder"],
        "verdict": Text(one["verdict"], style="" if one["verdict"] == "equivalent" else "yellow"),
        "a against b": f"{one['a']} against {one['b']}",
        "seeds": str(one["seeds"]),
        "loss": _shown(one["gap"].get("train"), "+z.2%"),
        "eval loss": _shown(one["gap"].get("eval"), "+z.2%"),
        **({"score": scores} if scored else {}),
        "speed": _shown(one["speed"], ".2f") + "x" * (one["speed"] is not None),
    }


# ------------------------------------------------------------------------------------ checkpoints


def checkpoints(
    run: RunName = LAST,
    verify: Annotated[bool, typer.Option(help="Read every file and compare its SHA-256.")] = False,
    out: RunsFolder = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: step, loss, size, complete or damaged."""
    folder = find_run(run, out)
    found = [Checkpoint(path) for path in checkpoints_in(folder / CHECKPOINTS).values()]
    rows = [_checkpoint(one, one.problem(contents=verify)) for one in found]
    if as_json:
        print(json.dumps({"run": str(folder), "checkpoints": rows}, indent=1))
        return
    console = output()
    if not rows:
        console.print(whole(f"no checkpoint in {folder}"), crop=False)
        console.print("train.save_strategy=steps train.save_steps=100 saves one every 100 steps")
        return
    shown = [
        {
            "step": str(row["step"]),
            "loss": _shown(row["loss"], ".3f"),
            "eval loss": _shown(row["eval_loss"], ".3f"),
            "precision": row["precision"],
            "size": size(row["bytes"]),
            "state": Text("complete", style="green")
            if not row["problem"]
            else Text(row["problem"], style="bold red"),
        }
        for row in rows
    ]
    print_rows(console, shown)
    command = resume_command(folder)
    if Run(folder).state == "finished":  # no step is left
        sound = [f" --checkpoint {row['step']}" for row in rows if not row["problem"]]
        command = f'python -m finetune generate {shlex.quote(str(folder))} "..."'
        command += "".join(sound[-1:])
    console.print(whole(f"next: {command}"), crop=False)


def _checkpoint(one: Checkpoint, problem: str) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "step": one.step,
        "precision": str(one.manifest.get("precision", "")),
        "loss": one.logged("loss"),
        "eval_loss": one.logged("eval_loss"),
        "bytes": one.nbytes,
        "problem": problem,
    }


# ----------------------------------------------------------------------------------------- export


def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    to: Annotated[str, typer.Option(help="adapter, merged, fp8, nvfp4, gguf or gguf-q8.")],
    force: Annotated[bool, typer.Option(help="Replace an earlier export.")] = False,
    push: Push = None,
    yes: Yes = False,
    trust_remote_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Export weights, checked: adapter, merged, FP8, NVFP4, GGUF."""
    from finetune.config.paths import user_path
    from finetune.export import hub
    from finetune.export.export import export_run
    from finetune.export.serving import commands

    if push:
        hub.check_name(push)
    console = output(stderr=as_json)
    folder = find_run(run)
    if not (push and hub.is_pushable(out, to, folder)):
        export_run(
            folder, to, out, force=force, trust_remote_code=trust_remote_code, console=console
        )
    out = user_path(out).resolve()
    if as_json:
        print((out / "export.json").read_text("utf-8"))
    else:
        served = "\n  or: ".join(commands(out, to))
        output().print(whole(f"export: {out}"), whole(f"next: {served}"), crop=False)
    if push:
        console.print(whole(hub.pushed(out, push, yes=yes)), crop=False)


# ----------------------------------------------------------------------------------------- import


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What torch.save wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="Model folder to make.")],
    model: Annotated[
        str,
        typer.Option("--as", metavar="MODEL", help="Architecture: hub id, folder or builtin:NAME."),
    ],
    as_json: AsJson = False,
) -> None:
    """Take over another trainer's weights (`latest.pt`) as a model folder."""
    from finetune.cli.recipes import rows
    from finetune.storage.torch_checkpoint import import_checkpoint

    done = import_checkpoint(file, model, folder)
    if as_json:
        print(json.dumps(done, indent=1))
        return
    console = output()
    console.print(whole(f"model folder: {folder}"), crop=False)
    console.print(f"{done['parameters']:,} parameters, in the layout of {done['layout']}")
    for note in done["notes"]:
        console.print(f"! {note}", style="yellow")
    short = model.rpartition("/")[2]
    fitting = [r["recipe"] for r in rows() if (r["model"], r["method"]) == (short, "full")]
    recipe, place = max(fitting, default="RECIPE"), shlex.quote(str(folder))
    line = f"next: python -m finetune {recipe} model.name={place} model.weights=pretrained"
    console.print(whole(line), crop=False)
