"""Margins of a comparison: the gap that counts as none, for each loss and each task.

    train=2%,eval=3%,hellaswag=1pt     two losses, relative; one task, in points of its score
    usual                              what guides of FP8 training allow: `USUAL`

A loss without a margin of its own has `Comparison.margin`. A task is judged only if it has one;
`tasks` stands for all that are not named. A point is 0.01 of a score between 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from finetune.errors import ConfigError, did_you_mean

LOSSES, TASKS = ("train", "eval"), "tasks"
USUAL = "train=2%,eval=3%,tasks=1pt"
ADVISED, FAILED = 0.05, 0.10
"""Relative gaps of losses above which one looks for a cause, and above which a run has failed: the
guides' own limits. A margin above `FAILED` takes its place."""


def parse_margins(text: str, tasks: Collection[str]) -> dict[str, float]:
    """Margins by name: `train=2%` is {"train": 0.02}, `hellaswag=1pt` {"hellaswag": 0.01}.

    Args:
        tasks: those that the runs are scored on.

    Raises:
        ConfigError: another form, a margin that is none, or an unknown name.
    """
    found: dict[str, float] = {}
    for item in (USUAL if text.strip() == "usual" else text).split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        unit = "%" if name in LOSSES else "pt"
        number = re.fullmatch(rf"([0-9]{{0,3}}\.?[0-9]{{1,6}}) ?{unit}", value)
        known = (*LOSSES, TASKS, *tasks)
        if name not in known or name in found or not number or not 0 < float(number[1]) < 100:
            unscored = name not in known and value.endswith("pt") and not did_you_mean(name, known)
            raise ConfigError(
                f"{item.strip()!r} is no margin"
                + (did_you_mean(name, (*known, "usual")) if name not in known else ""),
                where=f"--margins {text}",
                why=f"the runs are scored on {', '.join(tasks) or 'no task'}"
                if unscored
                else "losses have relative margins in %, tasks margins in points (pt) of their "
                "score, each once",
                fix=f"eval.tasks=[{name}]" * unscored or f"--margins {USUAL}, or --margins usual",
            )
        found[name] = float(number[1]) / 100
    return found
