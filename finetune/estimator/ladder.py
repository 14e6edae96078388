"""Ladder of a run: what each of its settings brings in speed, from the stock stack upwards.

    stock            BF16, attention under a mask, adapters as PEFT has them, nothing compiled,
                     gradient checkpointing
    a rung each      documents without a mask, fused adapters, compiled layers, no checkpointing
    the run itself   its low precision

Only settings that the run has make a rung. Each rung has all before it, so that gains multiply to
the run's. A rung is rehearsed with two layers, once, so that an answer takes seconds. With t(n) the
time of a micro-batch with n layers, where t(1) is t(2) without the kernels of the second,

    t(32) = t(2) + 30 (t(2) - t(1))

Optimizer and communication are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

from finetune.config.schema import RunConfig
from finetune.config.sft import CHECKPOINTING, padding_free
from finetune.errors import FinetuneError
from finetune.estimator.alternatives import Alternative, in_bf16
from finetune.estimator.knobs import setting
from finetune.estimator.measure import FEW, Measured, changed
from finetune.estimator.memory.sharding import shares_model
from finetune.estimator.place import resolve_there
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import compiles, roofline_at
from finetune.estimator.trace.compiled import as_compiled
from finetune.estimator.trace.fake_cuda import KERNELS
from finetune.estimator.trace.rehearsal import Rehearsal, rehearse
from finetune.estimator.trace.trace import layer_of
from finetune.logging import plain_table
from finetune.storage.pretrained import load_shape
from finetune.training.attention import resolve_attention
from finetune.training.model import sketch
from finetune.units import count


class _Setting(NamedTuple):
    """A setting of the run, and the stock values in its place."""

    label: str
    typed: str
    stock: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Rung:
    """Speed of all devices with a setting and those before it; `gain` is over the rung before."""

    label: str
    typed: str
    tokens_per_s: float
    gain: float

    def facts(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "setting": self.typed,
            "tokens_per_s": self.tokens_per_s,
            "gain": self.gain,
        }


def ladder_of(measured: Measured, twin: Alternative | None) -> tuple[Rung, ...]:
    """Rungs from the stock stack to the run; none where a speed is unknown.

    Args:
        twin: the run in the other precision, already measured.
    """
    settings = list(_settings(measured)) if measured.place.device.kind == "cuda" else []
    if not settings or measured.tokens_per_s is None:
        return ()
    speeds: list[float] = []
    seen: dict[str, Rehearsal] = {}
    try:
        for number in range(len(settings)):
            last = number == len(settings) - 1
            if last and _is_low(measured) and twin and twin.measured and twin.pace:
                speeds.append(twin.pace.tokens_per_s * measured.place.count)
                continue
            config = measured.config
            for later in reversed(settings[number:]):
                config = changed(config, **later.stock)
            speeds.append(_tokens_per_s(config, measured, seen))
    except FinetuneError:  # a rung that cannot run leaves no ladder
        return ()
    speeds.append(measured.tokens_per_s)
    rungs = [Rung("stock settings, BF16", "", speeds[0], 1.0)]
    for step, speed, before in zip(settings, speeds[1:], speeds, strict=False):
        rungs.append(Rung(step.label, step.typed, speed, speed / before))
    return tuple(rungs)


def table_of(rungs: tuple[Rung, ...]) -> Table:
    titles = ("what brings speed here", "tokens/s", "gain", "setting")
    table = plain_table(*titles, right=("tokens/s", "gain"))
    for number, rung in enumerate(rungs):
        gain = f"{rung.gain:.2f}x" if number else ""
        table.add_row(rung.label, count(rung.tokens_per_s), gain, rung.typed)
    return table


def _is_low(measured: Measured) -> bool:
    return measured.config.precision.compute == "fp8"


def _settings(measured: Measured) -> Iterator[_Setting]:
    """Settings of a run that differ from the stock stack, in the order of the rungs."""
    config, precision = measured.config, measured.config.precision
    model = sketch(config, layers=1)
    attention = resolve_attention(config, model, measured.place.device).implementation
    if attention in KERNELS and padding_free(config.train):
        stock = {"model": {"attention": "sdpa"}}
        yield _Setting("attention without a mask", f"model.attention={attention}", stock)
    if config.lora is not None and precision.fused_adapters and config.model.storage != "nf4":
        stock = {"precision": {"fused_adapters": False}}
        yield _Setting("fused adapters", "precision.fused_adapters=true", stock)
    if measured.compiled:
        stock = {"precision": {"compile": "off"}}
        yield _Setting("compiled layers", "precision.compile=on", stock)
    if not setting(config, CHECKPOINTING):
        stock = {"train": {CHECKPOINTING: True}}
        yield _Setting("no checkpointing", f"train.{CHECKPOINTING}=false", stock)
    if _is_low(measured):
        kept = {name: getattr(precision, name) for name in ("fused_adapters", "compile")}
        kept |= {"compile": "on"} if measured.compiled else {}
        # first among what is set back, so that settings of FP8 do not contradict the others
        stock = {"precision": {**in_bf16(config), **kept}}
        yield _Setting(measured.resolution.label, "precision.compute=fp8", stock)


def _tokens_per_s(config: RunConfig, run: Measured, seen: dict[str, Rehearsal]) -> float:
    """Speed of a variant on all devices of the run's place; compiled ones share a rehearsal."""
    place, few = run.place, FEW[0]
    resolution = resolve_there(config.precision, place)
    key = config.model_dump_json(exclude={"precision": {"compile"}})
    if key not in seen:
        sharded = shares_model(config, place)
        seen[key] = rehearse(config, place.device, resolution, layers=few, sharded=sharded)
    rehearsal, compiled = seen[key], compiles(resolution.precision, place)
    if compiled:
        rehearsal = as_compiled(rehearsal)
    roofline = roofline_at(place, compiled=compiled)
    assert roofline is not None
    assert run.pace is not None
    step, update = rehearsal.trace.since("step"), rehearsal.trace.since("optimizer")
    ops = step[: len(step) - len(update)]
    last = max(layer_of(op.module) for op in ops)
    inside = (lambda op: layer_of(op.module)) if compiled else None
    both, first = (
        roofline.step_time(each, compiled=inside).seconds
        for each in (ops, [op for op in ops if layer_of(op.module) != last])
    )
    layers = int(load_shape(config.model).get_text_config(decoder=True).num_hidden_layers)
    batches = int(config.train.get("gradient_accumulation_steps", 1))
    rest = sum(run.pace.classes.get(x, 0.0) for x in (StepPart.OPTIMIZER, StepPart.COMMUNICATION))
    seconds = batches * (both + (layers - few) * (both - first)) + rest
    return rehearsal.tokens * batches * place.count / seconds
