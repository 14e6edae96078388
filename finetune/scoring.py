"""A model's scores on tasks of lm-eval, as it is in memory.

The metrics, their standard errors and the versions of the tasks are lm-eval's. Layers run in the
precision of evaluation, FP8 only with `precision.eval=fp8`, and the model and every random
generator are afterwards as before. What a score is worth is in its standard error: on 1,000 rows of
two equally likely outcomes it is 1.6 points.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Any

from finetune.config import RunConfig
from finetune.samples import autocast, undisturbed
from finetune.tasks import SEED, manager_of

if TYPE_CHECKING:
    from rich.console import Console

BOOTSTRAPS = 1000
"""Resamples behind a standard error that has no formula; lm-eval's 100,000 take minutes."""


def score(
    model: Any,
    tokenizer: Any,
    tasks: list[Any],
    config: RunConfig,
    console: Console | None = None,
) -> dict[str, dict[str, Any]]:
    """Score a model on tasks that `load_tasks` gave.

    Args:
        model: plain or with adapters, whole on this process.
        tokenizer: its own.
        tasks: loaded.
        config: the run's; its `eval` section and the compute precision.
        console: where to show the result.

    Returns:
        Task -> metric -> value, with `<metric>_stderr`, `n` rows, and the task's `version`.
    """
    import random

    import numpy as np
    import torch
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    around: Any = autocast(config.precision.compute, model.device.type)
    wanted, loaded = config.eval, manager_of(()).load(tasks)
    # Its progress bars cannot be switched off, and are lines upon lines in a log.
    bars = contextlib.nullcontext() if sys.stderr.isatty() else _bars_aside()
    with undisturbed(model), torch.no_grad(), bars:
        random.seed(0)  # the seeds of lm-eval's own command line
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        make: Any = HFLM
        scorer = make(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=wanted.batch_size,
            # It switches autocast off around each forward unless it is told a type here.
            mixed_precision_dtype=around.fast_dtype if isinstance(around, torch.autocast) else None,
        )
        score_all: Any = evaluate
        results = score_all(
            scorer,
            task_dict=loaded,
            limit=wanted.limit,
            apply_chat_template=wanted.chat_template,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    found = {name: _row(results, name) for name in results["results"]}
    for name, row in found.items() if console is not None else ():
        assert console is not None
        console.print(f"{name}: {describe(row)}", highlight=False, soft_wrap=True)
    return found


def _bars_aside() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stderr(io.StringIO())


def describe(row: dict[str, Any]) -> str:
    """`acc 0.520 ± 0.071, acc_norm 0.560 ± 0.071 (50 rows)`."""
    facts = []
    for metric, value in row.items():
        if metric in ("n", "version") or metric.endswith("_stderr"):
            continue
        spread = row.get(f"{metric}_stderr")
        facts.append(f"{metric} {value:.3f}" + (f" ± {spread:.3f}" if spread is not None else ""))
    return ", ".join(facts) + (f" ({row['n']:,} rows)" if "n" in row else "")


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
