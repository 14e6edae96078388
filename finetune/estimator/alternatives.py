"""Does FP8 pay: a run beside itself in other precisions, storages and optimizers.

All are rehearsed alike, from the model's first layers, so that what two of them share cancels out:
a ratio is known better than either time (`scatter_ratio` of the table of efficiencies).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.config.schema import RunConfig
from finetune.errors import FinetuneError
from finetune.estimator.measure import Measured, changed, measure_fast
from finetune.estimator.place import Place
from finetune.estimator.speed.efficiency import shared
from finetune.estimator.speed.roofline import Interval
from finetune.estimator.speed.step_parts import StepPart
from finetune.estimator.speed.timing import Pace, spread

PLAIN: dict[str, Any] = {"compute": "bf16", "backend": "auto"}


@dataclass(frozen=True)
class Beside:
    """Another way to run the same.

    Attributes:
        label: what it is.
        change: overrides that make it so.
        measured: memory and time; None where it cannot be had.
        speed: how many times faster it is than the run asked about, where speed is known.
        memory: its allocated memory over that of the run asked about.
        why: reasons, in plain words; or why it cannot be had.
    """

    label: str
    change: tuple[str, ...]
    measured: Measured | None
    speed: Interval | None = None
    memory: float | None = None
    why: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        held = self.measured.footprint if self.measured else None
        pace = self.measured.pace if self.measured else None
        return {
            "label": self.label,
            "change": list(self.change),
            "possible": self.measured is not None,
            "allocated": held.allocated if held else None,
            "step_seconds": pace.seconds if pace else None,
            "speed": list(self.speed) if self.speed else None,
            "memory": self.memory,
            "why": list(self.why),
        }


def _without_fp8(config: RunConfig) -> dict[str, Any]:
    """A precision section of the same run in BF16: what belongs to FP8 alone is gone."""
    keep = {k: v for k, v in config.precision.map.items() if v != "fp8"}
    return {**_defaults(config), **PLAIN, "map": keep}


def _defaults(config: RunConfig) -> dict[str, Any]:
    fields = type(config.precision).model_fields
    return {name: field.default for name, field in fields.items() if name != "map"}


def twin_of(measured: Measured, place: Place) -> Beside | None:
    """The same run in BF16, or in FP8 where it is in BF16; None for other compute types.

    Where FP8 compiles its layers, because casts are slow otherwise, so does the BF16 twin: what
    compiling gains is not FP8's merit.
    """
    config = measured.config
    written: tuple[str, ...] = ()
    match config.precision.compute:
        case "fp8":
            label, precision = "BF16", _without_fp8(config)
            if measured.compiled:
                label, written = "BF16, compiled", ("precision.compile=on",)
                precision["compile"] = "on"
        case "bf16" if config.model.storage is None:
            label, precision = "FP8", _fp8(config, "rowwise" if config.lora else "tensorwise")
        case _:
            return None
    written = ("precision.compute=" + precision["compute"], *written)
    return _beside(label, written, measured, {"precision": precision}, place)


def _fp8(config: RunConfig, scaling: str, **more: Any) -> dict[str, Any]:
    kept = {"emulation": config.precision.emulation, "map": config.precision.map}
    return {**_defaults(config), **kept, "compute": "fp8", "scaling": scaling, **more}


def alternatives_of(measured: Measured, place: Place) -> Iterator[Beside]:
    """Other ways to run the same: engines and scalings, what is held small, the optimizer."""
    config = measured.config
    small = "train.optim=adamw_8bit"
    full = config.lora is None
    bf16 = _without_fp8(config)
    ways: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        ("BF16", ("precision.compute=bf16",), {"precision": bf16}),
        *(
            (
                f"FP8 torchao {scaling}",
                (
                    "precision.compute=fp8",
                    "precision.backend=torchao",
                    f"precision.scaling={scaling}",
                ),
                {"precision": _fp8(config, scaling, backend="torchao", frozen="bf16")},
            )
            for scaling in ("tensorwise", "rowwise")
        ),
        (
            "FP8 Transformer Engine delayed",
            ("precision.compute=fp8", "precision.backend=te", "precision.scaling=delayed"),
            {"precision": _fp8(config, "delayed", backend="te")},
        ),
    ]
    if full:
        ways.append(("this, 8-bit optimizer", (small,), {"train": {"optim": "adamw_8bit"}}))
        lora = {"r": 16, "alpha": 32}
        ways.append(("this, LoRA r=16", ("lora.r=16", "lora.alpha=32"), {"lora": lora}))
    else:
        frozen = {"precision": _fp8(config, "rowwise", frozen="fp8")}
        ways.append(("FP8 frozen base", ("precision.compute=fp8", "precision.frozen=fp8"), frozen))
        nf4 = {"precision": bf16, "model": {"storage": "nf4"}}
        ways.append(("QLoRA", ("precision.compute=bf16", "model.storage=nf4"), nf4))
    for label, written, sections in ways:
        yield _beside(label, written, measured, sections, place)


def _beside(
    label: str,
    written: tuple[str, ...],
    asked: Measured,
    sections: dict[str, dict[str, Any] | None],
    place: Place,
) -> Beside:
    try:
        other = measure_fast(changed(asked.config, **sections), place)
    except FinetuneError as error:
        return Beside(label, written, None, why=(error.why or error.what,))
    memory = other.footprint.allocated / asked.footprint.allocated
    if other.pace is None or asked.pace is None:
        return Beside(label, written, other, memory=memory)
    ratio = asked.pace.seconds / other.pace.seconds
    # The spread of ratios is that of published pairs, which differ in precision only.
    scatter = shared().scatter_ratio if set(sections) == {"precision"} else shared().scatter_time
    speed = spread(ratio, scatter) if not math.isclose(ratio, 1) else None
    fp8_first = asked.config.precision.compute == "fp8"
    fp8, plain = (asked.pace, other.pace) if fp8_first else (other.pace, asked.pace)
    one_of_each = (other.config.precision.compute == "fp8") != fp8_first
    why = explain(fp8, plain) if one_of_each else ()
    if one_of_each and asked.compiled != other.compiled:
        why += (
            "layers are compiled in FP8 only, whose casts need it; precision.compile=on would give "
            "BF16 its fused pointwise kernels too",
        )
    return Beside(label, written, other, speed, memory, why)


def explain(fp8: Pace, plain: Pace) -> tuple[str, ...]:
    """Why FP8 is faster or is not, part by part, in plain words."""
    words = []
    before, after = plain.classes.get(StepPart.LINEARS, 0.0), fp8.classes.get(StepPart.LINEARS, 0.0)
    if before and after:
        words.append(
            f"products of linear layers are {before / plain.seconds:.0%} of the BF16 step; FP8 "
            f"makes them {before / after:.2f} times as fast"
        )
    casts = fp8.share(StepPart.FP8_CASTS)
    if casts > 0.01:
        gained, cost = before - after, fp8.classes[StepPart.FP8_CASTS]
        of_it = "more than" if cost > gained else f"{cost / gained:.0%} of what"
        words.append(f"casts to FP8 take {casts:.0%} of the step, {of_it} the products gain")
    if (adapters := fp8.share(StepPart.ADAPTERS)) > 0.03:
        words.append(f"{adapters:.0%} of the step is adapter traffic, whatever the rank")
    sent = [p.classes.get(StepPart.COMMUNICATION, 0.0) for p in (fp8, plain)]
    if sent[1] - sent[0] > 0.03 * fp8.seconds:
        words.append(
            f"GPUs wait {sent[0] / fp8.seconds:.0%} of the step for each other, and "
            f"{sent[1] / plain.seconds:.0%} of the BF16 step: FP8 weights are half as much to send"
        )
    rest = {
        name: fp8.share(name)
        for name in (
            *(StepPart.ATTENTION, StepPart.POINTWISE, StepPart.HEAD, StepPart.OPTIMIZER),
            StepPart.DEQUANTIZE,
        )
        if fp8.share(name) > 0.05
    }
    if rest:
        shown = ", ".join(f"{name} {share:.0%}" for name, share in rest.items())
        words.append(f"what FP8 leaves as it is: {shown}")
    if (waiting := fp8.share(StepPart.WAITING)) > 0.05:
        words.append(f"the GPU waits for the host {waiting:.0%} of the step: too few tokens in one")
    return tuple(words)
