"""Verbs about run folders: `checkpoints` (without torch), `export`; and `import`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from finetune.cli import AsJson, Push, RunName, RunsFolder, TrustCode, Yes
from finetune.cli.listing import DEFAULT_OUT, figure
from finetune.errors import ConfigError
from finetune.logging import output, print_rows, whole
from finetune.runs.checkpoints import (
    CHECKPOINTS,
    KEPT,
    Checkpoint,
    checkpoints_in,
    resume_command,
)
from finetune.runs.folder import RunFolder
from finetune.runs.last_model import MODEL
from finetune.runs.lookup import LAST, find_run
from finetune.units import size

# ------------------------------------------------------------------------------------ checkpoints


def checkpoints(
    run: RunName = LAST,
    keep: Annotated[
        list[str] | None,
        typer.Argument(metavar="[keep STEP...]", help="Keep these, whatever rotation deletes."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Read every file and compare its SHA-256.")] = False,
    out: RunsFolder = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints: step, loss, size, complete or damaged.

    `checkpoints RUN keep STEP` keeps one for good, whatever rotation deletes.
    """
    if run == "keep":  # of the newest run
        run, keep = LAST, [run, *(keep or ())]
    folder = find_run(run, out)
    found = [Checkpoint(path) for path in checkpoints_in(folder / CHECKPOINTS).values()]
    if keep:
        _keep(keep, found)
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
            **{key.replace("_", " "): figure(row[key], ".3f") for key in one.columns},
            "precision": row["precision"],
            "size": size(row["bytes"]),
            "state": Text("complete, kept" if row["kept"] else "complete", style="green")
            if not row["problem"]
            else Text(row["problem"], style="bold red"),
        }
        for one, row in zip(found, rows, strict=True)
    ]
    print_rows(console, shown)
    command = resume_command(folder)
    if RunFolder(folder).state == "finished":  # no step is left
        sound = [f" --checkpoint {row['step']}" for row in rows if not row["problem"]]
        command = f'python -m finetune generate {shlex.quote(str(folder))} "..."'
        command += "".join(sound[-1:])
    console.print(whole(f"next: {command}"), crop=False)


def _keep(words: list[str], found: list[Checkpoint]) -> None:
    """Mark checkpoints, by the words `keep STEP...`, as ones that no rotation deletes.

    Raises:
        ConfigError: other words, a step that has no checkpoint, or a damaged one.
    """
    steps, saved = words[1:], {str(one.step): one for one in found}
    said = f"checkpoints RUN {' '.join(words)}"
    if words[0] != "keep" or not steps:
        raise ConfigError(
            f"there is no `{said}`", fix="checkpoints RUN keep STEP, or checkpoints RUN"
        )
    for step in steps:
        if step not in saved:
            have = ", ".join(saved) or "none"
            raise ConfigError(f"no checkpoint of step {step}", where=said, fix=f"there are: {have}")
        if problem := saved[step].problem(contents=True):
            fix = "keep another one"
            raise ConfigError(f"checkpoint {step} is damaged", where=said, why=problem, fix=fix)
        (saved[step].folder / KEPT).touch()


def _checkpoint(one: Checkpoint, problem: str) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "step": one.step,
        "precision": str(one.manifest.get("precision", "")),
        **{key: one.logged(key) for key in one.columns},
        "bytes": one.nbytes,
        "kept": one.is_kept,
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
    folder = find_run(run, holding=MODEL)
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
    from finetune.cli.listing import rows
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
    # Those of other methods need rows of their own.
    supervised = [name for name in fitting if name.split("_")[-2:] == ["full", "fp8"]]
    recipe, name = min(supervised, key=len, default="RECIPE"), shlex.quote(str(folder))
    line = f"next: python -m finetune {recipe} model.name={name} model.weights=pretrained"
    console.print(whole(line), crop=False)
