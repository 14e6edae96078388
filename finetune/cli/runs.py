"""The command line's `ls --runs`: what ran, how far it came, and what it left. Knows no torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.errors import ConfigError
from finetune.runs.folder import COMPARISON, Run, find_comparisons, find_run, find_runs

DEFAULT_OUT = Path("runs")
_STATES = {"finished": "", "running": "cyan", "interrupted": "yellow"}
_TITLES = {
    "step": "steps",
    "eval_loss": "held out",
    "tokens_per_s": "tok/s",
    "memory_gib": "memory",
}
_COLUMNS = (
    "recipe", "run", "precision", "proven", "state", "step", "loss", "eval_loss",
    "tokens_per_s", "memory_gib",
)  # fmt: skip
_WIDE_ONLY = ("tokens_per_s", "memory_gib")
"""Left out below `WIDE` columns of terminal, where precision is shortened to its first word too."""
WIDE = 112
_RIGHT = ("step", "loss", "eval_loss", "tokens_per_s", "memory_gib")


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
    console = Console()
    if runs:
        console.print(_table_of(runs, console.width))
    if compared:
        console.print(_comparisons(compared, gap=bool(runs)))


def _table_of(runs: list[dict[str, Any]], width: int) -> Table:
    wide = width >= WIDE
    columns = [key for key in _COLUMNS if wide or key not in _WIDE_ONLY]
    titles = _TITLES if wide else _TITLES | {"eval_loss": "eval"}
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    for key in columns:
        justify = "right" if key in _RIGHT else "left"
        table.add_column(
            titles.get(key, key), justify=justify, no_wrap=key != "recipe", overflow="fold"
        )
    for run in runs:
        cells = {
            "recipe": run["recipe"],
            "run": run["run"],
            "precision": run["precision"] if wide else run["precision"].partition(" ")[0],
            "proven": Text("yes") if run["proven"] else Text("no", style="bold red"),
            "state": Text(run["state"], style=_STATES.get(run["state"], "red")),
            "step": f"{run['step']}/{run['steps'] or '?'}",
            "loss": _shown(run["loss"], ".3f"),
            "eval_loss": _shown(run["eval_loss"], ".3f"),
            "tokens_per_s": _shown(run["tokens_per_s"], ",.0f"),
            "memory_gib": _memory(run["memory_gib"]),
        }
        table.add_row(*(cells[key] for key in columns))
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _memory(gib: float | None) -> str:
    from finetune.runs.receipt import in_units

    return "-" if gib is None else in_units(gib)


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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    if gap:
        table.title, table.title_style = "\ncomparisons", "bold"
    for column in ("verdict", "a against b", "seeds", "loss", "held out", "speed", "folder"):
        table.add_column(column, overflow="fold")
    for one in compared:
        good = one["verdict"] == "equivalent"
        table.add_row(
            Text(one["verdict"], style="" if good else "yellow"),
            f"{one['a']} against {one['b']}",
            str(one["seeds"]),
            _shown(one["gap"].get("train"), "+.2%"),
            _shown(one["gap"].get("eval"), "+.2%"),
            "-" if one["speed"] is None else f"{one['speed']:.2f}x",
            one["folder"],
        )
    return table


# ------------------------------------------------------------------------------------------
# The command line's `generate`: ask the model of a run.


STDIN = "-"


def generate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder, `last`, or a recipe's name.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Left out, or `-`: lines of the input."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; left out: eval.max_new_tokens.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws, with a temperature.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A step, or `last`; left out: the run's end.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Ask the model of a run, as it was trained."""
    if seed is not None and temperature == 0:
        raise ConfigError(
            "--seed would change nothing",
            where="--seed",
            why="without a temperature nothing is drawn",
            fix="--temperature 0.7, or leave it out",
        )
    folder = find_run(run, out)
    from finetune.training.reload import loaded, open_trained

    trained = open_trained(folder, checkpoint)
    notes = Console(stderr=True, highlight=False)
    if notes.is_terminal:
        notes.print(f"loading {trained.weights}", style="dim", soft_wrap=True)
    given = [] if prompts in (None, [STDIN]) else list(prompts or ())
    answers = []
    with loaded(trained) as (model, tokenizer):
        ask = _Asking(model, tokenizer, trained.config, max_new_tokens, temperature, seed)
        for prompt in given or _lines(notes):
            if len(given) != 1 and not as_json:
                print_prompt(prompt)
            answers.append(ask(prompt, stream=not as_json))
    if as_json:
        print(json.dumps({"run": str(folder), "answers": answers}, indent=1, ensure_ascii=False))


def print_prompt(prompt: str) -> None:
    """Where several are asked, or lines are read, say which is answered."""
    if not _is_typed() or not sys.stdout.isatty():
        Console(highlight=False).print(Text("> ") + Text(prompt), style="dim", soft_wrap=True)


class _Asking:
    """Asks one prompt at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: Any,
        max_new_tokens: int | None,
        temperature: float,
        seed: int | None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.most = max_new_tokens or config.eval.max_new_tokens
        self.options: dict[str, Any] = {}
        if temperature > 0:
            self.options = {"do_sample": True, "temperature": temperature}
        self.seed = seed

    def __call__(self, prompt: str, *, stream: bool) -> dict[str, Any]:
        """One answer; on the terminal as it grows."""
        from transformers import TextStreamer, set_seed

        from finetune.training.samples import answer, check_room_for, length_of, positions

        length, room = length_of(self.tokenizer, prompt), positions(self.model.config)
        check_room_for(prompt, length, self.most, room, "PROMPT")
        if self.options and self.seed is not None:
            set_seed(self.seed)
        options = dict(self.options)
        if stream:
            options["streamer"] = TextStreamer(
                self.tokenizer, skip_prompt=True, skip_special_tokens=True
            )
        started = time.perf_counter()
        (sample,) = answer(
            self.model,
            self.tokenizer,
            [prompt],
            self.most,
            compute=self.config.precision.compute,
            **options,
        )
        seconds = round(time.perf_counter() - started, 3)
        return {"prompt": prompt, "answer": sample.answer, "seconds": seconds}


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines(notes: Console) -> Iterator[str]:
    """Prompts from the input, a line each; typed ones until Ctrl-D."""
    if sys.stdin is None:  # closed: nobody asks
        return
    typed = _is_typed()
    if typed:
        notes.print("a prompt a line; Ctrl-D leaves", style="dim")
    while True:
        if typed:
            notes.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


# ------------------------------------------------------------------------------------------
# The command line's `evaluate`: score the model of a finished run on tasks of lm-eval.


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
    from finetune.config.schema import BUILTIN, EvalConfig
    from finetune.training.reload import loaded, open_trained

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
    from finetune.training.evaluate import load_tasks, score

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
