"""Early stopping, by Transformers' callback: when to ask for it, and that it happened."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from finetune.config.methods import EARLY_STOPPING, PATIENCE, THRESHOLD
from finetune.config.train_keys import TrainerArguments, TrainSection
from finetune.config.train_section import EVERY
from finetune.errors import ConfigError


def check_early_stopping(train: TrainSection) -> None:
    """Reject early stopping that would never stop, or would keep weights that got worse."""
    off = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    against = [key for key, value in off.items() if (key, value) in train.items()]
    patience, threshold = train.early_stopping_patience, train.early_stopping_threshold
    if not (patience or threshold) or (patience and not against):
        return
    shown = (*EARLY_STOPPING, *against)
    raise ConfigError(
        "early stopping needs a patience, evaluations, and their best checkpoint at the end",
        where=", ".join(f"train.{key}={train[key]}" for key in shown if key in train),
        why="it counts evaluations that are no better; the weights after them are not the best",
        fix=" ".join(f"~train.{key}" for key in against)
        if patience
        else f"train.{PATIENCE}=3, or ~train.{THRESHOLD}",
    )


def stopping(train: TrainSection) -> str:
    """Line about when a run evaluates, saves and would stop early; empty without a patience."""
    if not (patience := train.early_stopping_patience):
        return ""
    every: Any = train.eval_strategy
    if every == "steps":
        every = train.eval_steps
        every = f"{every:.0%} of the steps" if every < 1 else f"{every:g} steps"
    return (
        f"early stopping: evaluates and saves every {every}, ends after {patience} "
        "evaluations that are no better, and keeps the best"
    )


def never_stops(train: TrainSection, args: TrainerArguments, steps: int) -> str:
    """Line where a run has too few evaluations to be stopped by them; empty of others."""
    every, patience = args.eval_steps or 0, train.early_stopping_patience
    if not patience or args.eval_strategy != "steps":
        return ""
    # Below 1 it is a share of the steps, as Transformers has it.
    found = steps // (math.ceil(steps * every) if every < 1 else every)
    if found > patience:
        return ""
    return (
        f"early stopping has no effect: {found:.0f} evaluations in {steps:,} steps, and a patience "
        f"of {patience}; train.eval_steps={EVERY} train.save_steps={EVERY} makes more"
    )


def stoppers(train: TrainSection, resume: Path | None) -> list[Any]:
    """The callback, if it is asked for, with what a checkpoint had counted."""
    from transformers import EarlyStoppingCallback, TrainerState

    if not train.early_stopping_patience:
        return []
    found = EarlyStoppingCallback(
        train.early_stopping_patience, train.early_stopping_threshold or 0.0
    )
    if resume is not None:
        # Transformers (5.23) restores callbacks only if `restore_callback_states_from_checkpoint`
        # is set, and then all of them.
        state: Any = TrainerState.load_from_json(str(resume / "trainer_state.json"))
        counted = (state.stateful_callbacks or {}).get(type(found).__name__, {})
        vars(found).update(counted.get("attributes", {}))
    return [found]


def stopped_early(train: TrainSection, state: Any) -> str:
    """Line about a run that ended before its last step; empty of others."""
    patience = train.early_stopping_patience
    if not patience or state.global_step >= state.max_steps:
        return ""
    best = f"the weights are from step {state.best_global_step:,}"
    return (
        f"stopped early at step {state.global_step:,} of {state.max_steps:,}: {patience} "
        f"evaluations in a row were no better; {best}"
    )
