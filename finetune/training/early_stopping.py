"""Early stopping, by Transformers' callback: when to ask for it, and that it happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.methods import EARLY_STOPPING, PATIENCE, THRESHOLD
from finetune.errors import ConfigError


def check_early_stopping(train: Mapping[str, Any]) -> None:
    """Reject early stopping that would never stop, or would keep weights that got worse."""
    keeps = train.get("load_best_model_at_end") and train.get("eval_strategy", "no") != "no"
    if not any(train.get(key) for key in EARLY_STOPPING) or (train.get(PATIENCE) and keeps):
        return
    fix = f"train.{PATIENCE}=3, or ~train.{THRESHOLD}"
    if train.get(PATIENCE):
        every = "train.{0}_strategy=steps train.{0}_steps=50"
        fix = f"train.load_best_model_at_end=true {every.format('eval')} {every.format('save')}"
    raise ConfigError(
        "early stopping needs a patience, evaluations, and their best checkpoint at the end",
        where=", ".join(f"train.{key}={train[key]}" for key in EARLY_STOPPING if key in train),
        why="it counts evaluations that are no better; the weights after them are not the best",
        fix=fix,
    )


def stoppers(train: Mapping[str, Any], resume: Path | None) -> list[Any]:
    """The callback, if it is asked for, with what a checkpoint had counted."""
    from transformers import EarlyStoppingCallback, TrainerState

    if not train.get(PATIENCE):
        return []
    found = EarlyStoppingCallback(train[PATIENCE], train.get(THRESHOLD) or 0.0)
    if resume is not None:
        state: Any = TrainerState.load_from_json(str(resume / "trainer_state.json"))
        counted = (state.stateful_callbacks or {}).get(type(found).__name__, {})
        vars(found).update(counted.get("attributes", {}))
    return [found]


def stopped_early(train: Mapping[str, Any], state: Any) -> str:
    """Line about a run that ended before its last step; empty of others."""
    if not train.get(PATIENCE) or state.global_step >= state.max_steps:
        return ""
    best = f"the weights are those of step {state.best_global_step:,}"
    return (
        f"stopped early at step {state.global_step:,} of {state.max_steps:,}: {train[PATIENCE]} "
        f"evaluations in a row were no better; {best}"
    )
