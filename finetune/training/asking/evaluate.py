"""`eval.tasks`: scores of a model on tasks of lm-eval.

    load_tasks   before training: whatever may fail fails there (the library, names, rows, columns)
    score        afterwards, on the model in memory
    TaskScorer   the same every `eval.tasks_every` steps

Prompt, metric, standard error and version are lm-eval's own, hence comparable. Only the source of
the rows can be replaced: `eval.data` substitutes local files for the hub's data set, and nothing is
downloaded. One task is packaged (`builtin:harbour_choice`).

Layers run in the precision of evaluation, FP8 only with `precision.eval=fp8`; model and random
generators are restored. The standard error is the resolution of a score: 1.6 points on 1,000 rows
of two equally likely outcomes.

Limits: lm-eval reads some 14,000 definitions to resolve a name, which takes several seconds unless
the name is a folder of them. One process scores; FSDP's sharded weights are rejected.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from transformers import TrainerCallback, TrainerState

from finetune.config.paths import ASSETS, user_path
from finetune.config.schema import EvalConfig, RunConfig
from finetune.config.sections import BUILTIN
from finetune.errors import (
    ConfigError,
    DataError,
    DataNotFoundError,
    did_you_mean,
    first_line,
    install_hint,
)
from finetune.hardware.requirements import require
from finetune.runs.receipt import describe
from finetune.training.health.callbacks import MetricsWriter, step_label
from finetune.training.health.memory_meter import MemoryMeter
from finetune.training.helper.compute_types import AUTOCAST
from finetune.training.helper.undisturbed import undisturbed, whole

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from rich.console import Console

PACKAGED = ASSETS / "tasks"
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Suffix of a file of rows -> builder of `datasets` that reads it."""
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
"""Keys of a task's definition that name its splits."""


def load_tasks(eval: EvalConfig) -> list[Any]:
    """Load the requested tasks and groups of lm-eval with their rows; `[]` if there are none.

    Raises:
        MissingExtraError, ConfigError: lm-eval, or a task of that name, is missing.
        DataNotFoundError, DataError: rows are missing, or without the task's columns.
    """
    if not eval.tasks:
        return []
    # Before the hub or a file is asked: the extra may be missing, which is said at once.
    require("eval.tasks", "lm_eval", install_hint("eval"))
    manager, tasks, local = manager_of(eval.tasks), [], set[str]()
    with tempfile.TemporaryDirectory() as folder:
        for asked in eval.tasks:
            rows = PACKAGED if asked.startswith(BUILTIN) else eval.data
            for task in _members(manager, asked):
                if rows is not None and task not in local:
                    _read_locally(manager.task_index[task], user_path(rows) / task, Path(folder))
                    local.add(task)
            tasks += _built(manager, asked.removeprefix(BUILTIN), eval, is_local=rows is not None)
    for name, task in manager.load(tasks)["tasks"].items() if eval.shots else ():
        _check_shots(name, task, eval.shots or 0)
    return tasks


def _check_shots(name: str, task: Any, shots: int) -> None:
    """Reject more examples than there are, which lm-eval finds out at the first question."""
    # 0 in a definition: its prompt has no place for examples. One row is the question itself, where
    # examples are of the split that is scored; of another split, lm-eval would take one more.
    bare = task.get_config("num_fewshot") == 0
    most = 0 if bare else len(list(task.fewshot_docs())) - 1
    if shots > most:
        raise ConfigError(
            f"{name} has no {shots:,} examples",
            where=f"eval.shots={shots}",
            why=f"besides a question itself, its rows are {most:,}"
            if most
            else "it is defined without examples",
            fix=f"eval.shots={most} (--shots {most}) or fewer" if most else "~eval.shots",
        )


# ------------------------------------------------------------------------------------- definitions


def manager_of(names: Iterable[str]) -> TaskManager:
    """Index of packaged tasks and, for other names, of lm-eval's folders of these names, or of all.

    Without names it is the smallest: of packaged tasks, for tasks that are loaded already.
    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    stock = Path(lm_eval.tasks.__file__).parent
    # lm-eval (0.4.13) has most tasks in a folder of their name: one is read in milliseconds, all
    # 14,000 definitions in seconds.
    folders = [stock / name for name in names if not name.startswith(BUILTIN)]
    if all((folder / f"{folder.name}.yaml").is_file() for folder in folders):
        return TaskManager(include_defaults=False, include_path=[PACKAGED, *folders])
    return TaskManager(include_path=PACKAGED)


def _members(manager: TaskManager, asked: str) -> list[str]:
    """Tasks of a name: itself, or all of a group or a tag."""
    entry = manager.task_index.get(asked.removeprefix(BUILTIN))
    if entry is None:
        packaged = f"{BUILTIN}harbour_choice"
        raise ConfigError(
            f"there is no task {asked!r}{did_you_mean(asked, [packaged, *manager.all_tasks])}",
            where="eval.tasks",
            fix=f"`lm-eval ls tasks` lists them; {packaged} is packaged",
        )
    if entry.kind.name not in ("TAG", "GROUP"):
        return [entry.name]
    parts: Any = sorted(entry.tags) or (entry.cfg or {}).get("task", ())
    names = [p if isinstance(p, str) else p.get("task", p.get("group")) for p in parts]
    return [
        task
        for name in names
        if isinstance(name, str) and name in manager.task_index
        for task in _members(manager, name)
    ]


def _read_locally(entry: Any, rows: Path, folder: Path) -> None:
    """Let the entry of a task read a folder of rows, by a definition written to `folder`.

    All splits are read from files of one suffix, and those without a file are left out. Scored is
    the test split, or without its file the validation split: published tests often have no answers.
    """
    stock, task = entry.cfg or {}, entry.name
    splits = {key: str(stock[key]) for key in SPLITS if stock.get(key)}
    # As lm-eval chooses the split to score: the test rows, if there are any.
    wanted = splits.get("test_split") or splits.get("validation_split")
    published = [split for split in (wanted, splits.get("validation_split")) if split]
    suffix = next(
        (s for split in published for s in FORMATS if _has_rows(rows / f"{split}{s}")), None
    )
    if suffix is None:
        there = sorted(
            path.name + (" (empty)" if not _has_rows(path) else "") for path in rows.glob("*")
        )
        raise DataNotFoundError(
            f"there are no rows of {task} in {str(rows)!r}",
            where=f"eval.data: {rows.resolve()}",
            why=f"it holds {', '.join(there)}" if there else "no such folder, or nothing in it",
            fix=f"put {wanted}.jsonl or {wanted}.parquet there, in the columns of "
            f"{stock.get('dataset_path')} on the hub",
        )
    paths = {split: (rows / f"{split}{suffix}").resolve() for split in splits.values()}
    files = {split: str(path) for split, path in paths.items() if _has_rows(path)}
    definition = {
        # Prompt and metric stay lm-eval's; only where the rows come from is another.
        "include": str(entry.yaml_path),
        "task": task,
        "dataset_path": FORMATS[suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    } | {key: split if split in files else None for key, split in splits.items()}
    entry.yaml_path = folder / f"{task}.yaml"
    entry.yaml_path.write_text(yaml.safe_dump(definition), encoding="utf-8")


def _has_rows(file: Path) -> bool:
    """True for a file that is there and not empty."""
    return file.is_file() and file.stat().st_size > 0


def _built(manager: TaskManager, name: str, eval: EvalConfig, *, is_local: bool) -> list[Any]:
    """Load a task, a group, or the tasks under a tag, with their rows.

    Args:
        is_local: rows were to be read from a folder, whatever fails is an error in them.

    Raises:
        DataError, DataNotFoundError: rows that are local, or the hub's, cannot be read.
    """
    from datasets.exceptions import DatasetsError
    from jinja2.exceptions import UndefinedError

    try:
        built: Any = manager.load([name])
    # Whatever `datasets`, the hub and a task's own functions of rows raise.
    except (
        OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, DatasetsError,
        UndefinedError,
    ) as error:  # fmt: skip
        why = f"{type(error).__name__}: {first_line(error)}"
        if is_local:
            raise DataError(
                f"the rows of {name} are not what the task reads",
                where=f"eval.data: {eval.data}",
                why=why,
                fix="the published columns, for HellaSwag ctx_a, ctx_b, activity_label, endings, "
                "label, in each line of a .jsonl, or in a .parquet",
            ) from error
        raise DataNotFoundError(
            f"the rows of {name} could not be loaded",
            where=f"eval.tasks: {name}",
            why=why,
            fix="check your connection, or give a folder of rows: eval.data=FOLDER with "
            f"{name}/validation.jsonl",
        ) from error
    return [built["groups"][name]] if name in built["groups"] else list(built["tasks"].values())


# ------------------------------------------------------------------------------------------ scores

BOOTSTRAPS = 1000
"""Resamples for a standard error without a formula; lm-eval's 100,000 take minutes."""


def score(
    model: Any,
    tokenizer: Any,
    tasks: list[Any],
    config: RunConfig,
    console: Console | None = None,
) -> dict[str, dict[str, Any]]:
    """Score a whole model, plain or with adapters, on tasks from `load_tasks`.

    Args:
        config: of the run: its `eval` section, and the type that layers compute in.
        console: prints a line for each task; default none.

    Returns:
        Values by task and metric, with `<metric>_stderr`, `n` rows, and the task's `version`.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wanted = config.eval
    make: Any = HFLM
    score_all: Any = simple_evaluate  # with the seeds of lm-eval's own command line
    # lm-eval 0.4.13: its progress bars cannot be disabled, and would flood a log.
    errors = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with undisturbed(model), torch.no_grad(), contextlib.redirect_stderr(errors):
        scorer = make(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=wanted.batch_size,
            # lm-eval disables autocast around each forward unless it gets a type here.
            mixed_precision_dtype=AUTOCAST[config.precision.compute],
        )
        results = score_all(
            scorer,
            tasks=tasks,
            # Tasks are given as objects; without a manager lm-eval would read its index once more.
            task_manager=manager_of(()),
            num_fewshot=wanted.shots,
            limit=wanted.limit,
            apply_chat_template=wanted.chat_template,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    found = {name: _row(results, name) for name in results["results"]}
    if console is not None:
        for name, row in found.items():
            console.print(f"{name}: {describe(row)}")
    return found


@dataclass(eq=False)
class TaskScorer(TrainerCallback):
    """Scores the model every `eval.tasks_every` steps; follows the callbacks that measure speed.

    The last step is left to `score`, which scores the trained model anyway. Where memory is too
    short the run continues without.
    """

    config: RunConfig
    tasks: list[Any]
    tokenizer: Any
    metrics: MetricsWriter
    console: Console
    meter: MemoryMeter

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        step, every = state.global_step, self.config.eval.tasks_every
        if not self.tasks or not every or step % every or step >= state.max_steps:
            return
        with self.meter.aside(), self.metrics.aside():
            try:
                scores = score(whole(model), self.tokenizer, self.tasks, self.config)
            except torch.OutOfMemoryError:
                self.tasks = []
                torch.cuda.empty_cache()
                # A score is worth less than the run that it looks at.
                line = "! no memory is left to score tasks; training continues without"
                self.console.print(f"{line} (eval.batch_size=1)", style="yellow")
                return
        self.metrics.write({"step": step, "tasks": scores}, state)
        for name, row in scores.items():
            line = f"{step_label(state, self.console)} | {name}: {describe(row)}"
            self.console.print(line, highlight=False)


def _row(results: dict[str, Any], name: str) -> dict[str, Any]:
    """Values of one task; a metric of a filter other than lm-eval's `none` keeps it in its key."""
    row: dict[str, Any] = {}
    for key, value in results["results"][name].items():
        metric, _, kind = key.partition(",")
        if isinstance(value, float):
            row[metric if kind == "none" else key] = value
    if name in results.get("n-samples", {}):
        row["n"] = results["n-samples"][name]["effective"]
    version = results.get("versions", {}).get(name)
    return row | ({"version": version} if version is not None else {})
