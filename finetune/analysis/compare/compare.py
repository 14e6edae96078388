"""`compare(a, b)`: check both recipes, train them over paired seeds, and judge the runs.

Twins differ in the end of their names: `x_fp8` and `x_bf16`. The reference is the side that
computes in BF16, else the second. Set on both sides, and listed in the result's notes:

* `train.logging_steps=1`: the final loss is a mean over the losses of single steps.
* `train.seed` for each pair, and one `data.seed` for all: every seed is evaluated on the same rows,
  so that the spread between seeds contains no spread between evaluation sets.
* `precision.compile` where it is `auto` (`fairness.settle_compile`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from finetune.analysis.compare.margins import parse_margins
from finetune.analysis.compare.result import (
    Comparison,
    Difference,
    PairOfRuns,
    Side,
    as_text,
    read_comparison,
)
from finetune.analysis.compare.verdict import judge
from finetune.analysis.experiment.fairness import requested_differences, settle
from finetune.analysis.experiment.jobs import (
    LabeledRecipe,
    Watcher,
    jobs_at_once,
    plan_jobs,
    refuse_processes,
    run_jobs,
)
from finetune.analysis.experiment.outcome import read_outcome
from finetune.config.methods import method_of
from finetune.config.paths import find_recipe, is_path, list_recipes
from finetune.config.recipe import Recipe, with_overrides
from finetune.config.schema import RunConfig
from finetune.data.auto_length import load_recipe
from finetune.errors import ConfigError, RecipeNotFoundError, UnfairPairError, writing
from finetune.hardware.device import Device, cores, this_device
from finetune.hardware.requirements import resolve
from finetune.logging import output, whole
from finetune.runs.folder import RunFolder, new_folder

MARGIN, CONFIDENCE, SEEDS = 0.01, 0.95, 3
ENDS = {"_fp8": "_bf16", "_bf16": "_fp8"}
_EXECUTED = ("receipt.json: ", "steps.jsonl: ")
"""Prefixes of `Difference.where` for differences between the runs, which are read again."""
_AGAIN = "the margin was chosen after the runs"
_BEFORE = (
    "eval rows are",
    "precision.compile=",
    "train.gradient_checkpointing=",
    _AGAIN,
)
"""Prefixes of notes written before the runs, which judging again keeps."""


def compare(
    a: str,
    b: str | None = None,
    overrides: Sequence[str] = (),
    *,
    seeds: int | Sequence[int | str] = SEEDS,
    margin: float = MARGIN,
    margins: str | None = None,
    confidence: float = CONFIDENCE,
    allow: bool = False,
    out: Path | str = "runs",
    jobs: int | None = None,
    force: bool = False,
    console: Console | None = None,
) -> Comparison:
    """Train two recipes over the same seeds, each run in its own process, and compare them.

    Args:
        a, b: names or paths; `b` defaults to the twin of `a`. The one that computes in BF16 is the
            reference; if neither or both do, `b`.
        overrides: `section.key=value` for both; prefixed `a.` or `b.` for one of them.
        seeds: number of seeds, counted up from the recipe's own, or a list of seeds.
        margin: relative gap of final losses that counts as none.
        margins: others by loss and task, `train=2%,eval=3%,hellaswag=1pt` or `usual`.
        confidence: of the intervals; the verdict on a loss errs in at most 1 - confidence of the
            cases.
        allow: compare although training settings differ; the result lists the differences.
        out: folder of runs; the comparison is in `out/compare/<a>-vs-<b>/<time>`.
        jobs: concurrent runs on a CPU; default two where there are two cores.
        force: train even if the memory bound exceeds the device.

    Raises:
        UnfairPairError: training settings differ, and `allow` is not set.
        RunFailedError: a run ended without a result.
        FinetuneError: any other error that the user can correct.
        KeyboardInterrupt: Ctrl-C; the runs have saved a checkpoint.
    """
    device = this_device()
    console = console or output(stderr=True)
    # Runs are processes of their own; under torchrun each rank would start all of them.
    refuse_processes("compare")
    _check_numbers(margin, confidence)
    at_once, threads = jobs_at_once(device, jobs, cores())
    pair = make_pair(a, b, overrides, seeds, device)
    both = [side.recipe.config for side in (pair.a, pair.b)]
    tasks = [task for config in both for task in config.eval.tasks]
    judged = method_of(both[0].train).judged
    by_name = parse_margins(margins, judged, tasks) if margins is not None else {}
    differences = check_pair(pair, device, allow=allow, force=force)
    names = [side.recipe.name for side in (pair.a, pair.b)]
    folder = new_folder(Path(out) / "compare" / "-vs-".join(names), out)
    planned = plan_jobs((pair.a, pair.b), pair.seeds, folder, force=force)
    console.print(whole(f"{len(planned)} runs, {at_once} at a time -> {folder}"), crop=False)
    watcher = Watcher(console, len(planned))
    try:
        with watcher.bars:
            run_jobs(planned, at_once, threads, watcher)
    except KeyboardInterrupt:
        console.print(f"interrupted; {watcher.finished} of {len(planned)} runs are complete")
        console.print(whole(f"they are in {folder}; another call starts again"), crop=False)
        raise
    a, b = (side.label for side in (pair.a, pair.b))
    # Relative, so that a comparison can be moved or packed as a whole.
    where = {(job.variant.label, job.seed): job.run.folder.relative_to(folder) for job in planned}
    found = Comparison(
        a=Side(recipe=names[0], label=a),
        b=Side(recipe=names[1], label=b),
        seeds=list(pair.seeds),
        runs=[PairOfRuns(seed=s, a=str(where[a, s]), b=str(where[b, s])) for s in pair.seeds],
        margin=margin,
        margins=by_name,
        confidence=confidence,
        differences=differences,
        allowed=allow,
        notes=list(pair.notes),
        verdict="undecided",
        folder=folder,
    )
    return _judged(found, _outcomes(found))


def judge_again(
    folder: Path | str,
    *,
    margin: float | None,
    margins: str | None = None,
    confidence: float | None,
    allow: bool,
) -> Comparison:
    """Judge the finished runs of a comparison again, with other margins or with `allow`.

    Raises:
        ConfigError: no finished comparison in `folder`, or the folder is read-only.
    """
    found = read_comparison(folder)
    pairs = _outcomes(found)
    tasks = [task for pair in pairs for side in pair for task in side.tasks]
    judged = pairs[0][0].method.judged
    by_name = parse_margins(margins, judged, tasks) if margins is not None else found.margins
    margin = found.margin if margin is None else margin
    confidence = found.confidence if confidence is None else confidence
    _check_numbers(margin, confidence)
    # Notes about the verdict belong to the old one, and are written again.
    notes = [note for note in found.notes if note.startswith(_BEFORE)]
    changed = (margin, by_name) != (found.margin, found.margins)
    # Choosing a margin after seeing the gap makes any pair equivalent: said once, and for good.
    if changed and not any(note.startswith(_AGAIN) for note in notes):
        notes.append(f"{_AGAIN}; while they trained the margin was {found.within}")
    changes = {
        "margin": margin, "margins": by_name, "confidence": confidence,
        "allowed": found.allowed or allow,
        "differences": [d for d in found.differences if not d.where.startswith(_EXECUTED)],
        "notes": notes, "losses": {}, "scores": {}, "band": {}, "speed": None, "memory": None,
        "tasks": None,
    }  # fmt: skip
    return _judged(found.model_copy(update=changes), pairs)


def _outcomes(found: Comparison) -> list[tuple[RunFolder, RunFolder]]:
    folder = found.folder
    assert folder is not None
    return [(read_outcome(folder / run.a), read_outcome(folder / run.b)) for run in found.runs]


def _judged(found: Comparison, pairs: Sequence[tuple[RunFolder, RunFolder]]) -> Comparison:
    folder = found.folder
    assert folder is not None
    result = judge(found, pairs)
    fix = "make room or give leave to write there, and judge the folder again"
    with writing("the comparison cannot be written", where=str(folder.resolve()), fix=fix):
        result.save(folder)
    return result


def _check_numbers(margin: float, confidence: float) -> None:
    if not 0 < margin < 1:
        raise ConfigError(
            f"a margin of {margin:g} is none",
            where="--margin",
            why="it is the relative gap of losses that counts as none",
            fix="--margin 0.01 is one percent",
        )
    if not 0.5 < confidence < 1:
        raise ConfigError(
            f"a confidence of {confidence:g} is none", where="--confidence", fix="--confidence 0.95"
        )


# -------------------------------------------------------------------------------------------- pair


@dataclass(frozen=True)
class RecipePair:
    """Two recipes to compare.

    Attributes:
        a, b: the recipe in question and the reference, final except for `train.seed`.
        notes: settings that were made the same on both sides.
    """

    a: LabeledRecipe
    b: LabeledRecipe
    seeds: tuple[int, ...]
    notes: tuple[str, ...]


def twin_of(name: str) -> str:
    """Find the recipe that differs from `name` in precision alone, by its name.

    Raises:
        RecipeNotFoundError: no such recipe, or it has no twin.
    """
    source = find_recipe(name)
    stem = re.sub("_(fp8|bf16)$", lambda end: ENDS[end[0]], source.stem)
    twin = str(source.with_name(stem + source.suffix)) if is_path(name) else stem
    if stem != source.stem and (Path(twin).is_file() or twin in list_recipes()):
        return twin
    raise RecipeNotFoundError(
        f"{name} has no twin" + (f" {twin!r}" if stem != source.stem else ""),
        where="compare with one recipe",
        why="twins are called x_fp8 and x_bf16, and differ in precision alone",
        fix=f"name the other one: python -m finetune compare {shlex.quote(name)} OTHER",
    )


def make_pair(
    first: str,
    second: str | None,
    overrides: Sequence[str],
    seeds: Sequence[int | str] | int,
    device: Device,
) -> RecipePair:
    """Load both recipes and make their shared settings the same; arguments as in `compare`.

    Raises:
        FinetuneError: an unreadable recipe or override, no twin, or no seeds.
    """
    shared = [item for item in overrides if item[:2] not in ("a.", "b.")]
    sides = []
    for letter, name in (("a.", first), ("b.", second or twin_of(first))):
        own = [item.removeprefix(letter) for item in overrides if item.startswith(letter)]
        try:
            sides.append(load_recipe(name, [*shared, *own]))
        except ConfigError as error:
            if not shared:
                raise
            one = "an override behind a. or b., such as a.precision.format=e4m3, is for the first "
            fix = (f"{error.fix}; " if error.fix else "") + one + "or the second recipe alone"
            what = f"{name}: {error.what}"
            raise type(error)(what, where=error.where, why=error.why, fix=fix) from None
    a, b = sides
    if a.config.precision.compute == "bf16" != b.config.precision.compute:
        a, b = b, a
    configs, notes = settle((a.config, b.config), device)
    chosen = chosen_seeds(seeds, a.config)
    alike = alike_over_seeds(configs, chosen)
    if len(alike) > 2:
        notes.append(f"eval rows are the same for all seeds (data.seed={chosen[0]})")
    a, b = (
        LabeledRecipe(label, Recipe(recipe.name, recipe.source, with_overrides(config, alike)))
        for label, recipe, config in zip(_labels(a, b), (a, b), configs, strict=True)
    )
    return RecipePair(a, b, chosen, tuple(notes))


def alike_over_seeds(configs: Sequence[RunConfig], seeds: Sequence[int]) -> list[str]:
    """Overrides that log each step and, where rows are drawn for it, evaluate on the same ones."""
    # Where rows are given, or the recipe has a seed for them, all runs have the same ones already.
    drawn = all(map(_draws_held_out_rows, configs))
    return ["train.logging_strategy=steps", "train.logging_steps=1"] + (
        [f"data.seed={seeds[0]}"] if drawn else []
    )


def _draws_held_out_rows(config: RunConfig) -> bool:
    data = config.data
    drawn = not data.eval_path and not data.eval_split and data.eval_fraction > 0
    return drawn and data.seed is None


def chosen_seeds(seeds: Sequence[int | str] | int, config: RunConfig) -> tuple[int, ...]:
    """Seeds as they are given, or as many as are asked for, from the recipe's own on.

    Raises:
        ConfigError: none, one twice, or one that is no seed.
    """
    first = int(config.train.seed)
    # From the recipe's own seed on, so that the first run is the one that the recipe would be.
    given = range(first, first + seeds) if isinstance(seeds, int) else seeds
    chosen = tuple(int(seed) for seed in given if str(seed).strip().isdecimal())
    # numpy's generators take 32 bits (`numpy.random.seed`), which Transformers seeds with the same.
    if not 0 < len(given) == len(set(chosen)) or max(chosen) >= 2**32:
        raise ConfigError(
            "a comparison needs one seed or more, each of them once, from 0 to 2**32 - 1",
            where=f"--seeds {seeds if isinstance(seeds, int) else ','.join(map(str, seeds))}",
            fix="--seeds 3, or --seeds 42,43,44",
        )
    return chosen


def _labels(a: Recipe, b: Recipe) -> tuple[str, str]:
    first, second = (
        (p.low if p.compute == "fp8" else p.compute).upper()
        for p in (a.config.precision, b.config.precision)
    )
    if first != second:
        return first, second
    return (a.name, b.name) if a.name != b.name else (f"{a.name} (a)", f"{b.name} (b)")


def check_pair(
    pair: RecipePair, device: Device, *, allow: bool, force: bool = False
) -> list[Difference]:
    """Raise before any run if the pair is unfair or cannot run; return the differences allowed.

    Raises:
        UnfairPairError: settings differ, and `allow` is not set.
        FinetuneError: one side cannot run here, or its data or model are missing.
    """
    from finetune.data.dataset import rows_for
    from finetune.estimator.gate import MemoryForecast
    from finetune.storage.pretrained import load_tokenizer
    from finetune.training.asking.evaluate import load_tasks
    from finetune.training.run.preflight import preflight

    recipes = (pair.a.recipe, pair.b.recipe)
    differences = requested_differences(*(r.config for r in recipes), on_cpu=device.kind == "cpu")
    if differences and not allow:
        raise _unfair(differences)
    for recipe in recipes:
        # A pair of which FP8 falls back to BF16 would be equivalent for the wrong reason.
        if fallback := resolve(recipe.config.precision, device).fallback:
            raise UnfairPairError(
                f"{recipe.name} would not run in the precision it is compared for",
                where="precision.on_unsupported=bf16",
                why=fallback,
                fix="an FP8 GPU; or precision.emulation=allow, which shows what FP8 does to a loss",
            )
        # Both sides before either: what fails after hours of the first run should fail now.
        preflight(recipe.config, device, forecast=MemoryForecast(), force=force)
        tokenizer, _ = load_tokenizer(recipe.config.model, recipe.config.train.chat_template_path)
        rows_for(recipe.config, tokenizer)
        load_tasks(recipe.config.eval)
    return differences


def _unfair(differences: Sequence[Difference]) -> UnfairPairError:
    first = differences[0]
    more = [f"{d.condition}: {d.where} {d.a} and {d.b}" for d in differences[1:]]
    return UnfairPairError(
        f"{first.condition} differ: {first.where} is {first.a} and {first.b}"
        + (f" (and {len(more)} more)" if more else ""),
        where="; ".join([f"{first.where}: {first.a}, {first.b}", *more]),
        why=first.why,
        fix=f"give both the same: {first.where}={as_text(first.b)} on the command line sets both; "
        "--allow overrides the check, and the result then lists what differs",
    )
