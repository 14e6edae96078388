"""Which optimizer a recipe names, and whether it can act here with the arguments it is given.

All of it is asked before anything is loaded. An optimizer that a library would quietly replace by
another (a paged one on a CPU), or arguments that it would not read, are errors that say what to do.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, nearest
from finetune.optimizers import OPTIMIZERS, Optimizer

if TYPE_CHECKING:
    from finetune.device import Device

BITSANDBYTES_ON_CPU = (0, 50)


def chosen(train: dict[str, Any]) -> Optimizer:
    """The optimizer of a `train` section; `adamw_torch_fused` when it names none.

    Raises:
        ConfigError: there is none of that name.
    """
    name = str(train.get("optim") or "adamw_torch_fused")
    check_name(name)
    return OPTIMIZERS[name]


def check_name(name: str, where: str = "train.optim") -> None:
    """Raise `ConfigError` with the nearest name unless there is such an optimizer."""
    if name not in OPTIMIZERS:
        hint = nearest(name, [known for known, facts in OPTIMIZERS.items() if not facts.refused])
        raise ConfigError(
            f"there is no optimizer {name!r}" + (f"; {hint}" if hint else ""),
            where=where,
            fix="adamw_torch_fused is the usual one; adamw_8bit and adamw_torch_4bit need less "
            "memory (README, Optimizers, lists all)",
        )


def check_optimizer(train: dict[str, Any]) -> None:
    """Refuse an optimizer that cannot be had anywhere, and arguments that would not act.

    Raises:
        ConfigError: names what to use instead.
    """
    facts = chosen(train)
    if facts.refused:
        raise _cannot(facts, "anywhere", facts.refused, facts.instead)
    for key in arguments(train) if "*" not in facts.arguments else ():
        if key not in facts.arguments:
            hint = nearest(key, facts.arguments)
            known = ", ".join(facts.arguments)
            raise ConfigError(
                f"{facts.name} has no argument {key!r}" + (f"; {hint}" if hint else ""),
                where="train.optim_args",
                why="it would be ignored",
                fix=f"known: {known}" if known else "~train.optim_args",
            )


def check_here(train: dict[str, Any], device: Device) -> None:
    """Refuse an optimizer that cannot step on this device.

    Raises:
        ConfigError: names what to use instead.
    """
    facts = chosen(train)
    if device.kind == "cpu":
        why, instead = facts.not_on_cpu, facts.instead
        if not why and facts.library == "bitsandbytes":
            why, instead = _why_too_old(metadata.version("bitsandbytes")), "adamw_torch_8bit"
        if why:
            raise _cannot(facts, f"on {device.name}", why, instead)
    elif device.capability is not None and device.capability < facts.capability:
        needed, here = (".".join(map(str, x)) for x in (facts.capability, device.capability))
        why = f"its FP8 casts need compute capability {needed}; this GPU has {here}"
        raise _cannot(facts, f"on {device.name}", why, facts.instead)


def _cannot(facts: Optimizer, place: str, why: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{facts.name} cannot be had {place}",
        where=f"train.optim={facts.name}",
        why=why,
        fix=f"train.optim={instead}",
    )


def _why_too_old(version: str) -> str:
    if tuple(int(part) for part in version.split(".")[:2]) >= BITSANDBYTES_ON_CPU:
        return ""
    return (
        f"bitsandbytes {version} steps on GPUs only; from 0.50 on it steps on a CPU too "
        "(pip install -U 'fp8-finetune[bnb]')"
    )


def arguments(train: dict[str, Any]) -> dict[str, str]:
    """`train.optim_args`, written `key=value,key=value`, as a mapping.

    Raises:
        ConfigError: not of that form.
    """
    text = str(train.get("optim_args") or "").replace(" ", "")
    pairs = [item.partition("=") for item in text.split(",") if item]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise ConfigError(
                f"train.optim_args cannot be {text!r}",
                where="train.optim_args",
                fix="write key=value,key=value",
            )
    return {key: value for key, _, value in pairs}
