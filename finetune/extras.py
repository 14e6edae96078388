"""Optional libraries: which setting needs which, checked before anything is loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

from finetune.config import RunConfig
from finetune.errors import MissingExtraError

TRACKERS = {
    "wandb": ("wandb", "tracking"),
    "trackio": ("trackio", "tracking"),
    "tensorboard": ("tensorboard", "tracking"),
}


def needed(config: RunConfig) -> list[tuple[str, str, str]]:
    """(setting, module, extra) of every optional library that a run uses."""
    train: dict[str, Any] = config.train
    found = []
    reports = train.get("report_to") or []
    for name in [reports] if isinstance(reports, str) else reports:
        if name in TRACKERS:
            found.append((f"train.report_to={name}", *TRACKERS[name]))
    optimizer = str(train.get("optim", ""))
    if any(mark in optimizer for mark in ("8bit", "bnb", "paged", "lion")):
        found.append((f"train.optim={optimizer}", "bitsandbytes", "bnb"))
    if train.get("use_liger_kernel"):
        found.append(("train.use_liger_kernel", "liger_kernel", "liger"))
    return found


def check_extras(config: RunConfig) -> None:
    """Raise `MissingExtraError` for a setting whose library is not installed."""
    for setting, module, extra in needed(config):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"{setting} needs {module}, which is not installed",
                where=setting,
                fix=f"pip install 'fp8-finetune[{extra}]'",
            )
