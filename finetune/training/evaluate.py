"""`eval.tasks`: scores of a model on tasks of lm-eval.

    load_tasks   before training: whatever may fail fails there (the library, names, rows, columns)
    score        afterwards, on the model in memory

Prompt, metric, standard error and version are lm-eval's own, hence comparable. Only the source of
the rows can be replaced: `eval.data` substitutes local files for the hub's data set, and nothing is
downloaded. One task is packaged (`builtin:harbour_choice`).

Layers run in the precision of evaluation, FP8 only with `precision.eval=fp8`; model and random
generators are restored. The standard error is the resolution of a score: 1.6 points on 1,000 rows
of two equally likely outcomes.

Limits: lm-eval reads some 14,000 definitions to resolve a name, which takes several seconds unless
the name is that of a folder of them. One process scores; FSDP's sharded weights are rejected.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.config.paths import ASSETS, user_path
from finetune.config.schema import BUILTIN, EvalConfig, RunConfig
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
from finetune.training.compute_types import AUTOCAST
from finetune.training.samples import undisturbed

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from rich.console import Console

PACKAGED = ASSETS / "tasks"
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
SEED = 1234
"""Seed of lm-eval's own command line, for the choice of examples and for draws."""


def load_tasks(eval: EvalConfig) -> list[Any]:
    """Load the requested tasks and groups of lm-eval with their rows; `[]` if there are none.

    Raises:
        MissingExtraError, ConfigError: lm-eval, or a task of that name, is missing.
        DataNotFoundError, DataError: rows are missing, or without the task's columns.
    """
    if not eval.tasks:
        return []
    if eval.data is not None and all(name.startswith(BUILTIN) for name in eval.tasks):
        raise ConfigError(
            "eval.data would change nothing",
            where=f"eval.data: {eval.data}",
            why=f"{', '.join(eval.tasks)} has its rows in the package",
            fix="leave it out, or name a task whose rows are in that folder",
        )
    require("eval.tasks", "lm_eval", install_hint("eval"))
    names = [name.removeprefix(BUILTIN) for name in eval.tasks]
    with tempfile.TemporaryDirectory() as folder:
        manager = manager_of(eval.tasks)
        local = _local_definitions(eval, manager, names)
        for task, definition in local.items():
            (Path(folder) / f"{task}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
        if local:
            manager = manager_of(eval.tasks, [Path(folder)])
        tasks = [task for name in names for task in _built(manager, name, local, eval)]
    for name, task in manager_of(()).load(tasks)["tasks"].items():
        own = task.get_config("num_fewshot")
        if eval.shots and own == 0:
            raise ConfigError(
                f"{name} is defined without examples",
                where=f"eval.shots={eval.shots}",
                why="its prompt has no place for them",
                fix="~eval.shots",
            )
        most = len(list(task.fewshot_docs())) - 1 if eval.shots else 0  # besides the question
        if eval.shots and eval.shots > most:
            raise ConfigError(
                f"{name} has no {eval.shots:,} examples",
                where=f"eval.shots={eval.shots}",
                why=f"besides a question itself, its rows are {most:,}",
                fix=f"eval.shots={most} (--shots {most}) or fewer",
            )
        task.set_config(key="num_fewshot", value=(own or 0) if eval.shots is None else eval.shots)
        task.set_fewshot_seed(seed=SEED)
    return tasks


# ------------------------------------------------------------------------------------- definitions


def manager_of(names: Iterable[str], more: Iterable[Path] = ()) -> TaskManager:
    """Index of these names: of packaged tasks, of one of lm-eval's folders, or of all."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    stock = Path(lm_eval.tasks.__file__).parent
    packaged, folders = {path.name for path in PACKAGED.iterdir()}, [PACKAGED]
    for name in names:
        if name.startswith(BUILTIN):
            if name.removeprefix(BUILTIN) not in packaged:
                known = sorted(BUILTIN + task for task in packaged)
                raise ConfigError(
                    f"there is no packaged task {name!r}{did_you_mean(name, known)}",
                    where="eval.tasks",
                    fix=f"packaged tasks: {', '.join(known)}; others by lm-eval's name",
                )
        elif (stock / name / f"{name}.yaml").is_file():
            folders.append(stock / name)
        else:
            return TaskManager(include_path=[PACKAGED, *more])
    return TaskManager(include_defaults=False, include_path=[*folders, *more])


def _leaves(manager: TaskManager, name: str) -> list[str]:
    """Tasks of a name: itself, or those of a group or a tag."""
    entry = manager.task_index.get(name)
    if entry is None:
        raise ConfigError(
            f"lm-eval has no task {name!r}{did_you_mean(name, manager.all_tasks)}",
            where="eval.tasks",
            fix=f"`lm-eval ls tasks` lists them; {BUILTIN}harbour_choice is packaged",
        )
    if entry.kind.name == "TAG":
        return [leaf for tag in sorted(entry.tags) for leaf in _leaves(manager, tag)]
    if entry.kind.name != "GROUP":
        return [name]
    found: list[str] = []
    for member in (entry.cfg or {}).get("task", ()):
        inner = member if isinstance(member, str) else member.get("task") or member.get("group")
        if isinstance(inner, str) and inner in manager.task_index:
            found += _leaves(manager, inner)
    return found


def _local_definitions(
    eval: EvalConfig, manager: TaskManager, names: list[str]
) -> dict[str, dict[str, Any]]:
    """Definitions with local rows: packaged tasks, and all others with `eval.data`."""
    definitions = {}
    for name, asked in zip(names, eval.tasks, strict=True):
        folder = PACKAGED if asked.startswith(BUILTIN) else eval.data
        if folder is None:
            continue
        for leaf in _leaves(manager, name):
            entry, rows = manager.task_index[leaf], user_path(folder) / leaf
            definitions[leaf] = _with_files(leaf, entry.cfg or {}, entry.yaml_path, rows)
    return definitions


def _with_files(
    task: str, stock: dict[str, Any], source: Path | None, rows: Path
) -> dict[str, Any]:
    wanted = stock.get("test_split") or stock.get("validation_split")
    files = {
        split: path
        for split in sorted({str(stock[key]) for key in SPLITS if stock.get(key)})
        for suffix in FORMATS
        if (path := rows / f"{split}{suffix}").is_file()
    }
    if wanted not in files and stock.get("validation_split") in files:
        wanted = stock["validation_split"]  # published tests often have no answers
    if source is None or wanted not in files:
        there = sorted(path.name for path in rows.glob("*")) if rows.is_dir() else []
        raise DataNotFoundError(
            f"there are no rows of {task} in {str(rows)!r}",
            where=f"eval.data: {rows.resolve()}",
            why=f"it holds {', '.join(there)}" if there else "no such folder",
            fix=f"put {wanted}.jsonl or {wanted}.parquet there, in the columns of "
            f"{stock.get('dataset_path')} on the hub",
        )
    for path in files.values():
        if not path.stat().st_size:
            raise DataError(f"{path.name} is empty", where=str(path.resolve()), fix="add rows")
    kinds = {FORMATS[path.suffix] for path in files.values()}
    if len(kinds) > 1:
        raise DataError(
            f"the rows of {task} are of two formats", where=str(rows), fix="all .jsonl, or .parquet"
        )
    kept = {key: stock[key] for key in SPLITS if stock.get(key)}
    return {
        "include": str(source),
        "task": task,
        "dataset_path": kinds.pop(),
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {k: str(v.resolve()) for k, v in files.items()}},
    } | {key: split if split in files else None for key, split in kept.items()}


def _built(manager: TaskManager, name: str, local: dict[str, Any], eval: EvalConfig) -> list[Any]:
    """A task, a group, or the tasks under a tag."""
    from datasets.exceptions import DatasetGenerationError
    from jinja2.exceptions import UndefinedError

    _leaves(manager, name)  # raises for an unknown name
    try:
        built: Any = manager.load([name])
    except (DatasetGenerationError, UndefinedError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"the rows of {name} are not what the task reads",
            where=f"eval.data: {eval.data}" if local else "eval.tasks",
            why=f"{type(error).__name__}: {error}",
            fix="the published columns, for HellaSwag ctx_a, ctx_b, activity_label, endings, label",
        ) from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        why = first_line(error)
        if local:
            raise DataError(
                f"the rows of {name} cannot be read",
                where=f"eval.data: {eval.data}",
                why=why,
                fix="a row of the published columns in each line of a .jsonl, or a .parquet",
            ) from error
        raise DataNotFoundError(
            f"the rows of {name} could not be had",
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

    Returns:
        Values by task and metric, with `<metric>_stderr`, `n` rows, and the task's `version`.
    """
    import random

    import numpy as np
    import torch
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    wanted, loaded = config.eval, manager_of(()).load(tasks)
    make: Any = HFLM
    score_all: Any = evaluate
    # lm-eval 0.4.13: its progress bars cannot be disabled, and would flood a log.
    errors = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with undisturbed(model), torch.no_grad(), contextlib.redirect_stderr(errors):
        random.seed(0)  # the seeds of lm-eval's own command line
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        scorer = make(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=wanted.batch_size,
            # lm-eval disables autocast around each forward unless it gets a type here.
            mixed_precision_dtype=AUTOCAST[config.precision.compute],
        )
        results = score_all(
            scorer,
            task_dict=loaded,
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


def _row(results: dict[str, Any], name: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in results["results"][name].items():
        metric, _, kind = key.partition(",")
        if isinstance(value, float):
            row[metric if kind == "none" else key] = value
    if name in results.get("n-samples", {}):
        row["n"] = results["n-samples"][name]["effective"]
    version = results.get("versions", {}).get(name)
    return row | ({"version": version} if version is not None else {})
