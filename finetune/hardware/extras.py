"""Optional libraries: which setting needs which, checked before anything is loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig
from finetune.errors import MissingExtraError
from finetune.hardware.device import Device, Verdict

TRACKERS = ("wandb", "trackio", "tensorboard")
EVAL_EXTRA = "pip install 'fp8-finetune[eval]'"


def needed(config: RunConfig) -> list[tuple[str, str, str]]:
    """(setting, module, how to install it) of every optional library that a run uses."""
    train: dict[str, Any] = config.train
    found = []
    reports = train.get("report_to") or []
    for name in [reports] if isinstance(reports, str) else reports:
        if name in TRACKERS:
            found.append((f"train.report_to={name}", name, "pip install 'fp8-finetune[tracking]'"))
    if config.model.storage == "nf4":
        found.append(("model.storage=nf4", "bitsandbytes", "pip install 'fp8-finetune[bnb]'"))
    optimizer = chosen(train)
    if optimizer.install:
        found.append((f"train.optim={optimizer.name}", optimizer.library, optimizer.install))
    if train.get("use_liger_kernel"):
        found.append(
            ("train.use_liger_kernel", "liger_kernel", "pip install 'fp8-finetune[liger]'")
        )
    if config.eval.tasks:
        found.append(("eval.tasks", "lm_eval", EVAL_EXTRA))
    return found


def check_extras(config: RunConfig) -> None:
    """Raise `MissingExtraError` for a setting whose library is not installed."""
    for setting, module, install in needed(config):
        require(setting, module, install)


def require(setting: str, module: str, install: str) -> None:
    """Raise `MissingExtraError` unless a module that a setting needs is installed."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"{setting} needs {module}, which is not installed",
            where=setting,
            fix=install,
        )


def has_liger(device: Device) -> Verdict:
    """Whether Liger's kernels can run here."""
    if device.kind == "cpu":
        return Verdict(False, "Liger's kernels are written in Triton, which compiles for GPUs")
    if importlib.util.find_spec("liger_kernel") is None:
        return Verdict(False, "not installed: pip install 'fp8-finetune[liger]'")
    return Verdict(True, "liger-kernel is installed")
