"""Margins of a comparison: the gap that counts as none, for each measure and each task.

    train=2%,eval=3%,hellaswag=1pt     two losses, relative; one task, in points of its score
    reward=5pt,accuracy=2pt            of other methods (`config/measures.py`)
    usual                              what guides of FP8 training allow, and the measures' own

A loss without a margin of its own has `Comparison.margin`, another measure its row's. A task
is judged only if it has one; `tasks` stands for all that are not named. A point is 0.01 of a score
between 0 and 1, or of a reward.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from finetune.config.measures import MEASURES
from finetune.errors import ConfigError, did_you_mean

TASKS, OF_TASKS = "tasks", 0.01
ADVISED, FAILED = 0.05, 0.10
"""Relative gaps of losses above which one looks for a cause, and above which a run has failed: the
guides' own limits. A margin above `FAILED` takes its place."""


def parse_margins(text: str, judged: Collection[str], tasks: Collection[str]) -> dict[str, float]:
    """Margins by name: `train=2%` is {"train": 0.02}, `hellaswag=1pt` {"hellaswag": 0.01}.

    Args:
        judged: measures of the method.
        tasks: those that the runs are scored on.

    Raises:
        ConfigError: another form, a margin that is none, or an unknown name.
    """
    found: dict[str, float] = {}
    own = {name: MEASURES[name] for name in judged}
    usual = {name: measure.margin for name, measure in own.items()} | {TASKS: OF_TASKS}
    units = {name: measure.unit for name, measure in own.items()}
    if text.strip() == "usual":
        return usual
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        unit, known = units.get(name, "pt"), (*own, TASKS, *tasks)
        number = re.fullmatch(rf"([0-9]{{0,3}}\.?[0-9]{{1,6}}) ?{unit}", value)
        if name not in known or name in found or not number or not 0 < float(number[1]) < 100:
            unscored = name not in known and value.endswith("pt") and not did_you_mean(name, known)
            example = ",".join(f"{n}={x * 100:g}{units.get(n, 'pt')}" for n, x in usual.items())
            raise ConfigError(
                f"{item.strip()!r} is no margin"
                + (did_you_mean(name, (*known, "usual")) if name not in known else ""),
                where=f"--margins {text}",
                why=f"the runs are scored on {', '.join(tasks) or 'no task'}"
                if unscored
                else "losses have relative margins in %, tasks and other measures margins in "
                f"points (pt) of their score, each once; these runs are judged by {', '.join(own)}",
                fix=f"eval.tasks=[{name}]"
                if unscored
                else f"--margins {example}, or --margins usual",
            )
        found[name] = float(number[1]) / 100
    return found
