"""Conditions that both sides of a fair pair share, checked twice from one list (`CONDITIONS`).

*Before* the runs, on the configurations: both `train` sections are first made a `trl.SFTConfig`, so
that a default left out equals the same value written out. A field in no condition and not in `FREE`
is an `other training setting`, so that fields new in TRL are compared too. *After* them, on what
was executed: the receipts, the linear layers of the proof, and the tokens of every step, which are
equal only if both sides saw the same rows in the same order.

Precision may differ, except `compile` (kernels) and `health_every` (logging).
Frozen weights stored in FP8 (`precision.frozen`) are part of the precision; `model.storage` is not:
a base in NF4 is another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from finetune.analysis.compare.result import Difference
from finetune.analysis.statistics import Steps
from finetune.config.methods import method_of
from finetune.config.paths import ASSETS
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig
from finetune.config.train_keys import OTHER_NAMES
from finetune.config.train_section import CHECKPOINTING, decides_checkpointing, with_checkpointing
from finetune.estimator.predict import decided
from finetune.hardware.device import Device
from finetune.hardware.gpus import Machine, this_machine
from finetune.hardware.requirements import compiles, resolve, resolve_there
from finetune.runs.receipt import Receipt


@dataclass(frozen=True)
class Condition:
    """One condition of a fair pair, of `assets/fair_pair.yaml`, which describes the fields.

    `name` is also the condition's key in the receipts' `conditions`.
    """

    name: str
    why: str
    settings: tuple[str, ...] = ()
    receipt: str = ""

    def executed(self, receipt: dict[str, Any]) -> Any:
        """Value of a receipt, for a condition outside its `conditions`."""
        if self.receipt in _READERS:
            return _READERS[self.receipt](receipt)
        section, key = self.receipt.split(".")
        return (receipt.get(section) or {}).get(key)


def _shapes(receipt: dict[str, Any]) -> dict[str, Any]:
    layers = Receipt.read(receipt).layers
    return {str(layer.name): layer.shape for layer in layers if layer.role != "other"}


def _device(receipt: dict[str, Any]) -> dict[str, Any]:
    device = receipt["environment"].get("device", {})
    return {key: device.get(key) for key in ("kind", "name", "capability")}


def _stored(receipt: dict[str, Any]) -> dict[str, int]:
    """Count layers in few bits for another reason than FP8 compute: NF4, or FP8 in a BF16 run."""
    stored, asked = receipt["precision"]["storage"], receipt["precision"]["asked"]
    return {k: n for k, n in stored.items() if (k, asked) != ("fp8", "fp8")}


_READERS = {"layers": _shapes, "environment.device": _device, "precision.storage": _stored}
_TABLE = yaml.safe_load((ASSETS / "fair_pair.yaml").read_text("utf-8"))
CONDITIONS = tuple(
    Condition(name, **facts | {"settings": tuple(facts.get("settings", ()))})
    for name, facts in _TABLE["conditions"].items()
)
FREE = frozenset(_TABLE["free"])
"""Fields of `trl.SFTConfig` that affect neither loss nor step time."""

_OF_SETTING = {setting: condition for condition in CONDITIONS for setting in condition.settings}
_BY_NAME = {condition.name: condition for condition in CONDITIONS}
_OTHER = _BY_NAME["other training settings"]


# ------------------------------------------------------------------------------------ before a run


def settle(
    configs: Sequence[RunConfig], device: Device, there: Machine | None = None
) -> tuple[list[RunConfig], list[str]]:
    """Decide what is `auto` alike for all configurations, with a note on each such setting.

    Args:
        there: a machine that is predicted, which may have what is not installed here.
    """
    configs, compiling = settle_compile(configs, device, there)
    configs, checkpointing = settle_checkpointing(configs, device)
    return configs, [note for note in (compiling, checkpointing) if note]


def settle_compile(
    configs: Sequence[RunConfig], device: Device, there: Machine | None = None
) -> tuple[list[RunConfig], str]:
    """Set the same `precision.compile` where it is `auto`; returns a note if anything was set.

    As in a long run, also of a single configuration: `auto` compiles nothing in a short one.
    """
    # What one side asks for holds for all: else the ratio would be compiling's.
    requested = [config.precision.compile_requested for config in configs]
    explicit = [value for value in requested if value != "auto"]
    if "auto" not in requested:
        return list(configs), ""
    # Elsewhere `auto` compiles nothing, and FP8 that cannot run here is an error of its run.
    fp8 = [config.precision for config in configs if config.precision.compute == "fp8"]
    executed = (
        (resolve_there(x, there) if there else resolve(x, device)).precision
        for x in fp8
        if device.kind == "cuda"
    )
    if not explicit and not any(compiles(x, device) for x in executed):
        return list(configs), ""  # none compiles, so `auto` means the same for all
    setting = f"precision.compile={explicit[0] if explicit else 'on'}"
    sides = "both sides" if len(configs) == 2 else "all sides"
    note = f"{setting} on {sides}, so that compiling is not FP8's gain" if len(configs) > 1 else ""
    return [
        with_overrides(config, [setting]) if value == "auto" else config
        for config, value in zip(configs, requested, strict=True)
    ], note


def settle_checkpointing(
    configs: Sequence[RunConfig], device: Device
) -> tuple[list[RunConfig], str]:
    """Decide gradient checkpointing where it is `auto`: on for all if one needs it, with a note."""
    open_ones = [config for config in configs if decides_checkpointing(config)]
    if not open_ones:
        return list(configs), ""
    # On for all: a side that computes its layers twice is slower for a reason that is not its
    # precision.
    on = any(decided(config, this_machine(device)).train[CHECKPOINTING] for config in open_ones)
    setting = f"train.{CHECKPOINTING}={str(on).lower()}"
    alike = " on all sides, so that memory is spent alike" if len(configs) > 1 else ""
    return [
        with_checkpointing(config, on) if decides_checkpointing(config) else config
        for config in configs
    ], setting + (alike or ", as the recipe's own batch needs it here")


def requested_differences(one: RunConfig, other: RunConfig, *, on_cpu: bool) -> list[Difference]:
    """List, in the order of `CONDITIONS`, the settings in which two configurations differ.

    `precision.compile` is settled before (`settle_compile`).

    Raises:
        FinetuneError: a configuration makes no valid `SFTConfig`.
    """
    first, second = (dict(_settings(config, on_cpu=on_cpu)) for config in (one, other))
    found = []
    for where in first:
        # Compared as executed: both sides were made a trainer's arguments before.
        if first[where] != second.get(where):  # another method has other settings
            section, _, name = where.partition(".")
            known = (name if section == "train" else where, f"{section}.")
            condition = next((_OF_SETTING[key] for key in known if key in _OF_SETTING), _OTHER)
            a, b = _unequal(first[where], second.get(where))
            if isinstance(a, dict) and isinstance(b, dict):
                found += [_difference(condition, f"{where}.{key}", a[key], b[key]) for key in a]
            else:
                found.append(_difference(condition, where, a, b))
    return sorted(found, key=lambda d: CONDITIONS.index(_BY_NAME[d.condition]))


def _settings(config: RunConfig, *, on_cpu: bool) -> Iterator[tuple[str, Any]]:
    """Yield (dotted setting, value), the same settings in the same order for any configuration."""
    from finetune.config.sft import sft_config

    for section in ("model", "data", "eval"):
        for name, value in getattr(config, section).model_dump(mode="json").items():
            if name != "prompts":
                yield f"{section}.{name}", value
    yield "lora", config.lora and config.lora.model_dump(mode="json")
    for name in ("compile", "health_every"):
        yield f"precision.{name}", getattr(config.precision, name)
    # With all defaults, so that one left out equals the same one written.
    given: dict[str, Any] = sft_config(config, Path("runs"), {}, on_cpu=on_cpu).to_dict()
    train = config.train
    args = {OTHER_NAMES.get(name, name): given[name] for name in given}
    args["method"] = method_of(train).name
    args["resume_from_checkpoint"] = train.resume_from_checkpoint
    args["optim"] = train.optim  # SFTConfig has none of our own optimizers
    plain = (bool, int, float, str, dict, list, type(None))
    for name in sorted(name for name in args.keys() - FREE if name[0] != "_"):
        yield f"train.{name}", args[name] if isinstance(args[name], plain) else str(args[name])


# -------------------------------------------------------------------------------------- after them


def executed_differences(
    a: dict[str, Any],
    b: dict[str, Any],
    steps_a: Steps = (),
    steps_b: Steps = (),
) -> list[Difference]:
    """List the conditions in which two finished runs of one seed differ, by their run folders."""
    first, second = _executed(a), _executed(b)
    found = [
        _difference(
            _BY_NAME.get(key[0]) or replace(_OTHER, name=key[0]),
            f"receipt.json: {key[1]}",
            *_unequal(first.get(key), second.get(key)),
        )
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    ]
    steps, tokens = _BY_NAME["steps"], [[s["tokens"] for s in side] for side in (steps_a, steps_b)]
    # Step by step: equal sums could hide other rows, or another order.
    lines = enumerate(zip(*tokens, strict=False), 1)
    if other := next(((n, x, y) for n, (x, y) in lines if x != y), None):
        found.append(_difference(steps, f"steps.jsonl: line {other[0]}", *other[1:]))
    if len(steps_a) != len(steps_b):
        found.append(_difference(steps, "steps.jsonl: lines", len(steps_a), len(steps_b)))
    return found


def _executed(receipt: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """(condition, key of the receipt) -> its value."""
    found = {(name, "conditions"): x for name, x in receipt.get("conditions", {}).items()}
    return found | {(c.name, c.receipt): c.executed(receipt) for c in CONDITIONS if c.receipt}


def _unequal(a: Any, b: Any) -> tuple[Any, Any]:
    """Drop equal entries of two mappings: {r: 8, s: 1}, {r: 16, s: 1} -> {r: 8}, {r: 16}."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
        return {key: a.get(key) for key in keys}, {key: b.get(key) for key in keys}
    return a, b


def _difference(condition: Condition, where: str, a: Any, b: Any) -> Difference:
    return Difference(condition=condition.name, where=where, a=a, b=b, why=condition.why)
