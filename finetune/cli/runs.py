"""Verbs about run folders: `ls --runs` (without torch) and `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from finetune.cli import AsJson
from finetune.logging import output
from finetune.runs.folder import COMPARISON
from finetune.runs.lookup import find_comparisons, find_runs
from finetune.units import size_of_gib

DEFAULT_OUT = Path("runs")
_STATES = {"finished": "", "running": "cyan", "interrupted": "yellow"}
_TITLES = {
    "step": "steps",
    "eval_loss": "held out",
    "tokens_per_s": "tok/s",
    "memory_gib": "memory",
}
_COLUMNS = (
    *("recipe", "run", "precision", "proven", "state"),
    *("step", "loss", "eval_loss", "tokens_per_s", "memory_gib"),
)
_WIDE_ONLY = _COLUMNS[-2:]
"""Left out below `WIDE` columns of terminal, where precision is shortened to its first word too."""
WIDE = 112


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
        console.print(_table_of(runs, console.width))
    if compared:
        console.print(_comparisons(compared, gap=bool(runs)))


def _table_of(runs: list[dict[str, Any]], width: int) -> Table:
    wide = width >= WIDE
    keys = [key for key in _COLUMNS if wide or key not in _WIDE_ONLY]
    titles = _TITLES if wide else _TITLES | {"eval_loss": "eval"}
    columns = [
        Column(
            titles.get(key, key),
            justify="right" if key in _COLUMNS[5:] else "left",
            no_wrap=key != "recipe",
            overflow="fold",
        )
        for key in keys
    ]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    for run in runs:
        gib = run["memory_gib"]
        cells = run | {
            "precision": run["precision"] if wide else run["precision"].partition(" ")[0],
            "proven": Text("yes") if run["proven"] else Text("no", style="bold red"),
            "state": Text(run["state"], style=_STATES.get(run["state"], "red")),
            "step": f"{run['step']}/{run['steps'] or '?'}",
            "loss": _shown(run["loss"], ".3f"),
            "eval_loss": _shown(run["eval_loss"], ".3f"),
            "tokens_per_s": _shown(run["tokens_per_s"], ",.0f"),
            "memory_gib": "-" if gib is None else size_of_gib(gib),
        }
        table.add_row(*(cells[key] for key in keys))
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _comparison(folder: Path) -> dict[str, Any]:
    """A comparison in a line; one that cannot be read says so instead of a verdict."""
    try:
        found = json.loads((folder / COMPARISON).read_text("utf-8"))
    except (OSError, ValueError):
        found = {}
    gaps = {name: part.get("gap") for name, part in (found.get("losses") or {}).items()}
    return {
        "folder": str(folder),
        "a": (found.get("a") or {}).get("recipe"),
        "b": (found.get("b") or {}).get("recipe"),
        "seeds": len(found.get("seeds") or []),
        "verdict": found.get("verdict", "cannot be read"),
        "gap": gaps,
        "speed": (found.get("speed") or {}).get("ratio"),
    }


def _comparisons(compared: list[dict[str, Any]], *, gap: bool) -> Table:
    titles = ("verdict", "a against b", "seeds", "loss", "held out", "speed", "folder")
    table = Table(
        *(Column(title, overflow="fold") for title in titles),
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left",
        title="\ncomparisons" if gap else None, title_style="bold",
    )  # fmt: skip
    for one in compared:
        table.add_row(
            Text(one["verdict"], style="" if one["verdict"] == "equivalent" else "yellow"),
            f"{one['a']} against {one['b']}",
            str(one["seeds"]),
            *(_shown(one["gap"].get(name), "+.2%") for name in ("train", "eval")),
            _shown(one["speed"], ".2f") + "x" * (one["speed"] is not None),
            one["folder"],
        )
    return table


# ----------------------------------------------------------------------------------------- export


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    to: Annotated[str, typer.Option(help="adapter, merged, fp8 or nvfp4.")],
    force: Annotated[bool, typer.Option(help="Replace an earlier export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export weights, checked: adapter, merged, FP8, NVFP4."""
    from finetune.export.export import export_run

    console = output(stderr=as_json)
    done = export_run(run, to, out, force=force, console=console)
    print((done.folder / "export.json").read_text("utf-8") if as_json else f"export: {done.folder}")
