"""Requirements of a run on this machine: optional libraries, and devices that an optimizer needs.

All are checked before anything is loaded. An optimizer that a library would quietly replace by
another (a paged one on a CPU) is an error that names what to use instead.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

from finetune.config.optimizers import cannot_have, chosen
from finetune.config.schema import RunConfig
from finetune.errors import MissingExtraError
from finetune.hardware.device import Device

TRACKERS = ("wandb", "trackio", "tensorboard")
EVAL_EXTRA = "pip install 'fp8-finetune[eval]'"


def needed(config: RunConfig) -> list[tuple[str, str, str]]:
    """(setting, module, how to install it) of every optional library that a run uses."""
    train: dict[str, Any] = config.train
    reports, pip = train.get("report_to") or [], "pip install 'fp8-finetune[{}]'".format
    found = [
        (f"train.report_to={name}", name, pip("tracking"))
        for name in ([reports] if isinstance(reports, str) else reports)
        if name in TRACKERS
    ]
    if config.model.storage == "nf4":
        found.append(("model.storage=nf4", "bitsandbytes", pip("bnb")))
    optimizer = chosen(train)
    if optimizer.install:
        found.append((f"train.optim={optimizer.name}", optimizer.library, optimizer.install))
    if train.get("use_liger_kernel"):
        found.append(("train.use_liger_kernel", "liger_kernel", pip("liger")))
    if config.eval.tasks:
        found.append(("eval.tasks", "lm_eval", EVAL_EXTRA))
    return found


def check_extras(config: RunConfig) -> None:
    """Raise `MissingExtraError` for a setting whose library is not installed."""
    for extra in needed(config):
        require(*extra)


def require(setting: str, module: str, install: str) -> None:
    """Raise `MissingExtraError` unless a module that a setting needs is installed."""
    if importlib.util.find_spec(module) is None:
        what = f"{setting} needs {module}, which is not installed"
        raise MissingExtraError(what, where=setting, fix=install)


BITSANDBYTES_ON_CPU = (0, 50)
"""First release whose optimizers step on CPUs (bitsandbytes changelog, 0.50)."""


def check_optimizer_here(train: dict[str, Any], device: Device) -> None:
    """Refuse an optimizer that cannot step on this device.

    Raises:
        ConfigError: names what to use instead.
    """
    facts = chosen(train)
    if device.kind == "cpu":
        why, instead = facts.not_on_cpu, facts.instead
        if not why and facts.library == "bitsandbytes":
            version, instead = metadata.version("bitsandbytes"), "adamw_torch_8bit"
            if tuple(int(part) for part in version.split(".")[:2]) < BITSANDBYTES_ON_CPU:
                why = (
                    f"bitsandbytes {version} steps on GPUs only; from 0.50 on it steps on a CPU "
                    "too (pip install -U 'fp8-finetune[bnb]')"
                )
        if why:
            raise cannot_have(facts, f"on {device.name}", why, instead)
    elif device.capability is not None and device.capability < facts.capability:
        needed, here = (".".join(map(str, x)) for x in (facts.capability, device.capability))
        why = f"its FP8 casts need compute capability {needed}; this GPU has {here}"
        raise cannot_have(facts, f"on {device.name}", why, facts.instead)
