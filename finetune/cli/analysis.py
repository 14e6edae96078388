"""Verbs that look at runs and at the machine: benchmark, compare, diagnose, report, doctor."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from finetune.cli import INTERRUPTED, MISUSE, AsJson, Overrides, Push, RecipeName, Yes, refuse
from finetune.config.paths import find_recipe, list_recipes, user_path
from finetune.errors import ConfigError, MissingExtraError
from finetune.hardware.device import rank
from finetune.logging import busy, output, whole

if TYPE_CHECKING:
    from finetune.analysis.benchmark.result import Benchmark

MOST_STEPS, MOST_ROUNDS = 100_000, 1000
NOTHING_MEASURED = 1
"""Exit status of a benchmark without a single measured point."""


def benchmark(
    recipe: RecipeName,
    overrides: Overrides = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(metavar="RECIPE", help="Another to compare it with; may be given again."),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(help='Micro-batches, lengths, GPUs: "batch=1,2 length=512,2048 gpus=1,2".'),
    ] = None,
    scaling: Annotated[
        Literal["weak", "strong"],
        typer.Option(help="On several GPUs, keep the rows of each, or the rows of a step."),
    ] = "weak",
    steps: Annotated[int, typer.Option(max=MOST_STEPS, help="Timed steps of each round.")] = 10,
    rounds: Annotated[
        int | None,
        typer.Option(
            max=MOST_ROUNDS, help="Processes for each point; 3 where something is compared, else 1."
        ),
    ] = None,
    all_points: Annotated[
        bool, typer.Option("--all", help="Also what is larger than one that did not fit.")
    ] = False,
    force: Annotated[bool, typer.Option(help="Also what is predicted far too large.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="The recipe from FP32 to NVFP4, beside what is said.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="--matrix: predict it for this GPU; nothing runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of benchmarks.")] = Path("runs/benchmark"),
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Measure speed and memory: random weights, synthetic tokens."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv were both asked for", fix="leave one of them out")
    find_recipe(recipe)  # before torch is imported
    from finetune.analysis.benchmark.benchmark import benchmark as measure

    progress = output(stderr=True)
    if matrix:
        given = {"--vs": vs, "--all": all_points, "--scaling strong": scaling != "weak"}
        fix = "leave it out, or measure it in a benchmark of its own"
        refuse(given, "does not go with --matrix", fix=fix)
    if gpu is not None and not matrix:
        fix = "--matrix --gpu H100; one recipe: python -m finetune estimate RECIPE --gpu H100"
        raise ConfigError("--gpu predicts a matrix, and a benchmark measures this machine", fix=fix)
    common: dict[str, Any] = {
        "overrides": overrides or (), "grid": grid, "steps": steps, "out": out, "force": force,
        "say": lambda line: progress.print(line, style="dim"),
    }  # fmt: skip
    if matrix:
        from finetune.analysis.benchmark.matrix_runs import matrix as measure_matrix

        with busy(progress, f"predicting {recipe}") if gpu else contextlib.nullcontext():
            found = measure_matrix(recipe, gpu=gpu, rounds=rounds or 1, **common)
    else:
        found = measure(
            recipe, vs=vs or (), rounds=rounds, all_points=all_points, scaling=scaling, **common
        )
    _show_benchmark(found, as_json=as_json, as_csv=as_csv)


def _show_benchmark(found: Benchmark, *, as_json: bool, as_csv: bool = False) -> None:
    """Print a benchmark or matrix, and end with its exit code."""
    if as_json:
        print(found.to_json())
    elif as_csv:
        print(found.to_csv(), end="")
    else:
        console = output()
        console.width = max(132, console.width)
        console.print(found)
        console.print(whole(f"rows: {found.folder}/benchmark.json and .csv"), crop=False)
        console.print(whole(f"next: python -m finetune report {found.folder}"), crop=False)
    progress = output(stderr=True)
    if found.interrupted:
        progress.print(f"interrupted; rows until then are in {found.folder}", style="yellow")
        sys.exit(INTERRUPTED)
    if not any(row.rounds or not row.error for row in found.rows):  # each row says why
        sys.exit(NOTHING_MEASURED)


# ------------------------------------------------------------------------------------------ compare

EQUIVALENT, NOT_EQUIVALENT = 0, 3
"""Exit statuses of a comparison; one that is refused has `MISUSE`."""


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
        float | None,
        typer.Option(help="Relative gap of losses that counts as none. [default: 0.01]"),
    ] = None,
    margins: Annotated[
        str | None,
        typer.Option(help="By name: train=2%,eval=3%,hellaswag=1pt; or `usual`, as guides say."),
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Of the intervals. [default: 0.95]")
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="One recipe from FP32 to NVFP4: memory, speed and losses."),
    ] = False,
    allow: Annotated[
        bool, typer.Option(help="Compare although the two do not train the same.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of runs. [default: runs]")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at once, on a CPU.")] = None,
    force: Annotated[bool, typer.Option(help="Train although memory seems too small.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train FP8 and BF16: do they end the same, and is it faster?"""
    from finetune.analysis.compare import compare as comparing

    names = [word for word in recipes if not _is_override(word)]
    overrides = [word for word in recipes if _is_override(word)]
    if not 1 <= len(names) <= 2:
        raise ConfigError(
            f"compare takes one recipe or two, and {len(names)} were given",
            where=" ".join(names) or "only settings",
            fix="python -m finetune compare tiny_full_fp8",
        )
    wanted = seeds or str(comparing.SEEDS)
    which = int(wanted) if wanted.isdecimal() else wanted.split(",")
    judging = {"margin": margin, "margins": margins, "confidence": confidence, "allow": allow}
    if matrix:
        fix = "leave it out; two precisions are judged by compare without --matrix"
        given = dict.fromkeys(names[1:], True) | {f"--{name}": x for name, x in judging.items()}
        refuse(given | {"--jobs": jobs}, "does not go with --matrix", fix=fix)
        from finetune.analysis.benchmark.matrix_runs import matrix as train_matrix

        progress = output(stderr=True)
        trained = train_matrix(
            names[0], overrides=overrides, seeds=which, out=(out or Path("runs")) / "compare",
            force=force, say=lambda line: progress.print(line, style="dim"),
        )  # fmt: skip
        return _show_benchmark(trained, as_json=as_json)
    folder = user_path(names[0])
    again = folder.is_dir() and names[0] not in list_recipes()  # of a comparison, as no recipe is
    if again:
        refuse(
            dict.fromkeys((*names[1:], *overrides), True)
            | {"--seeds": seeds, "--out": out, "--jobs": jobs, "--force": force},
            "would change nothing",
            where=names[0],
            why="the runs of this comparison are done; they are judged again",
            fix="leave it out; or compare the recipes again",
        )
        found = comparing.judge_again(folder, **judging)
    else:
        found = comparing.compare(
            *names,
            overrides=overrides,
            seeds=which,
            out=out or Path("runs"),
            jobs=jobs,
            force=force,
            console=output(stderr=True),
            **{name: given for name, given in judging.items() if given is not None},
        )
    assert found.folder is not None
    console = output()
    if as_json:
        print(found.to_json(), flush=True)
    else:
        console.print(found)
    page = _page_of(found.folder)  # last: the verdict is out should its page fail
    if not as_json:
        console.print(whole(f"report: {page}"), crop=False)
        if not again:
            shared = [item for item in overrides if item[:2] not in ("a.", "b.")]
            then = ["diagnose", names[0], *shared]
            if found.verdict == "undecided":
                count = which if isinstance(which, int) else len(which)
                then = ["compare", *recipes, "--seeds", str(max(comparing.SEEDS, 2 * count))]
            console.print(whole(f"next: python -m finetune {shlex.join(then)}"), crop=False)
    code = {"equivalent": EQUIVALENT, "refused": MISUSE}.get(found.verdict, NOT_EQUIVALENT)
    if code:
        sys.exit(code)


def _page_of(folder: Path) -> str:
    """Where the page of a comparison lies, or why there is none."""
    try:
        from finetune.analysis.report.report import write_report
    except MissingExtraError as error:
        return f"none: {error.what}; {error.fix}"
    return str(write_report(folder).html)


def _is_override(word: str) -> bool:
    """True for `key=value`, `~key` and, of one side, `a.~key`; not for a path that exists."""
    setting = "=" in word or word.startswith("~") or word[2:].startswith("~")
    return setting and not Path(word).exists()  # a folder may be called lr=1e-3


# ----------------------------------------------------------------------------------------- diagnose


def diagnose(
    recipe: RecipeName,
    overrides: Overrides = None,
    weights: Annotated[
        Literal["random"] | None,
        typer.Option(help="random: no hub, no data; random weights, rows of random tokens."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(max=MOST_STEPS, help="Steps to time, and to profile.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for diagnosis.json and trace.json.gz; left out: nothing is kept."
        ),
    ] = None,
    force: Annotated[bool, typer.Option(help="Run although memory seems too small.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs in FP8, where the time goes, and why."""
    from finetune.data.auto_length import load_recipe
    from finetune.runs.folder import make_folder

    checked = load_recipe(recipe, overrides or ())
    if out is not None:
        make_folder(out, out)
    from finetune.analysis.diagnose.diagnose import diagnose as look

    main_process = rank() == 0
    progress = output(stderr=True, quiet=not main_process)
    trace = out / "trace.json.gz" if out is not None and main_process else None
    found = look(checked, weights=weights, steps=steps, force=force, console=progress, trace=trace)
    if not main_process:
        return
    if as_json:
        print(found.to_json())
    else:
        console = output()
        console.print(found)
        again = checked.name if Path(recipe).is_dir() else recipe  # of a run
        again = shlex.join([again, *(overrides or ())])
        console.print(whole(f"next: python -m finetune compare {again}"), crop=False)
    if out is not None:
        progress.print(whole(f"diagnosis: {found.save(out)}; trace: {trace}"), crop=False)


# ------------------------------------------------------------------------------------------- report


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folder of a run or comparison, recipe, or `last`."),
    ],
    to: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    push: Push = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write one page about runs: HTML, plots."""
    from finetune.analysis.report.report import write_report
    from finetune.export import hub

    if push:
        hub.check_name(push)

    done = write_report(runs, to)
    if as_json:
        print(json.dumps(done.facts(), indent=1))
        return
    print(f"{done.verdict}\nreport: {done.html}")
    if push:
        print(hub.pushed(done.html, push, yes=yes))


# ------------------------------------------------------------------------------------------- doctor


def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can do in FP8, and why."""
    with busy(output(stderr=True), "examining this machine"):
        from finetune.analysis.doctor import examine

        findings = examine()
    if as_json:
        print(findings.to_json())
    else:
        output().print(findings)
