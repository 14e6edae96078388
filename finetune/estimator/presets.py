"""Presets of `cp`: settings for one end, chosen for a recipe, each with its reason. No torch.

A preset keeps what is trained: method, data, learning rate, rows of a step. `bf16`, `no-fp8` and
`debug` alone change the precision of matmuls, `smoke` and `debug` alone how long a run is. What the
recipe has already is left out.

`no-fp8` and `debug` are what guides to FP8 training recommend under these names: BF16 with 8-bit
AdamW for GPUs without FP8, and FP32 with plain AdamW to look for a mistake.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from finetune.config.methods import method_of
from finetune.config.optimizers import chosen
from finetune.config.recipe import apply_overrides, checked
from finetune.config.schema import RunConfig
from finetune.config.train_section import CHECKPOINTING, decides_checkpointing, with_checkpointing
from finetune.config.yaml import parse_yaml, plain_data, with_values
from finetune.errors import ConfigError, did_you_mean
from finetune.estimator.changes import COMPILED, Change, free_of_charge, freeing, longest
from finetune.hardware.device import Device
from finetune.precision.facts import FASTEST
from finetune.precision.settings import PrecisionConfig

FP8_GPU = Device("cuda", "H100", (9, 0), 80.0)
STEPS, LENGTH = 10, 128
"""Of a `smoke` or `debug` run."""
ANY_PRECISION = ("compute", "map", "compile", "health_every")
"""Keys of `precision` that a BF16 run has too."""


def _fastest(config: RunConfig) -> Iterator[Change]:
    precision, train = config.precision, config.train
    # `kernels=eager` and `compile=on` contradict each other, and are refused.
    if precision.kernels != "eager":
        yield Change(
            "compile", (COMPILED,), "joins chains of small kernels; the first step takes minutes"
        )
    slow = precision.scaling != FASTEST and not precision.facts.own_scales
    if precision.compute == "fp8" and config.lora is None and slow:
        overrides = (f"precision.scaling={FASTEST}", "~precision.format")
        yield Change("scaling", overrides, "predicted the fastest where all weights train")
    if train.gradient_checkpointing is True and not train.fsdp:
        why = "nothing is computed twice where memory allows"
        yield Change("checkpointing", (f"train.{CHECKPOINTING}=auto",), why)
    if not train.packing and method_of(train).is_text:
        yield Change("packing", ("train.packing=true",), "full rows: a step has more tokens")
    # As it will be with the change above: what is free of charge depends on packing.
    packed = config.model_copy(update={"train": train | {"packing": True}})
    yield from free_of_charge(packed, FP8_GPU)


def _least_memory(config: RunConfig) -> Iterator[Change]:
    """All at once that `estimate` predicts one by one; of one kind the furthest."""
    if decides_checkpointing(config):
        # So that checkpointing is among the changes, rather than left to what one GPU has free.
        config = with_checkpointing(config, False)
    sharded, compute = config.train.fsdp, f"precision.compute={config.precision.compute}"
    found: dict[str, Change] = {}
    for change in freeing(config, FP8_GPU):
        other = {x for x in change.overrides if x.startswith("precision.compute=")} - {compute}
        in_four_bits = "model.storage=nf4" in change.overrides  # which nothing shards
        # What masters need is not freed but elsewhere, in a host's memory that nobody knows here.
        cuts = change.kind in ("length", "masters") or change.rank not in ("same", "otherwise")
        if not (cuts or other or (in_four_bits and sharded)):
            # Changes of a kind come from the mildest to the furthest, of which the last stays.
            found[change.kind] = change
    yield from found.values()


def _in(compute: str, config: RunConfig, why: str) -> Iterator[Change]:
    """The run in another precision, without what only FP8 has."""
    if config.precision.compute != compute:
        given = [k for k in PrecisionConfig.model_fields if k in config.precision.model_fields_set]
        # Settings of FP8 are refused beside another precision, so they leave with it.
        rest = (f"~precision.{key}" for key in given if key not in ANY_PRECISION)
        yield Change("precision", (f"precision.compute={compute}", *rest), why)


def _bf16(config: RunConfig) -> Iterator[Change]:
    if config.precision.compute == "fp8":
        yield from _in("bf16", config, "the same run in BF16; what only FP8 has goes")


def _no_fp8(config: RunConfig) -> Iterator[Change]:
    yield from _bf16(config)
    optimizer = chosen(config.train)
    if config.lora is None and (optimizer.library, optimizer.kind[:5]) == ("torch", "AdamW"):
        why = "moments in 8 bits: a quarter of float32's, half of BF16's"
        yield Change("optimizer", ("train.optim=adamw_torch_8bit",), why)


def _smoke(config: RunConfig) -> Iterator[Change]:
    train = config.train
    yield Change("steps", (f"train.max_steps={STEPS}",), "enough for the proof, seconds to wait")
    (key, length), what = longest(config), "answers" if method_of(train).writes else "rows"
    if not isinstance(length, int) or length > LENGTH:  # null, or auto
        yield Change("length", (f"train.{key}={LENGTH}",), f"short {what}: memory and time")
    yield Change("saving", ("train.save_strategy=no",), "no checkpoint is written")
    shown = ("train.logging_steps=1", "precision.health_every=1", "train.report_to=none")
    yield Change("logging", shown, "loss and health of every step, on this machine alone")
    if train.eval_strategy == "steps":
        yield Change("eval", (f"train.eval_steps={STEPS // 2}",), "evaluation runs twice")
    if config.precision.compute == "fp8":
        yield Change("emulation", ("precision.emulation=allow",), "runs without an FP8 GPU, slowly")


def _debug(config: RunConfig) -> Iterator[Change]:
    """FP32, so that what is still wrong is not the precision; a base in 4 bits needs BF16."""
    if config.model.storage is None:
        yield from _in("fp32", config, "float32 products: what is still wrong is not the precision")
        yield Change("dtype", ("model.dtype=float32",), "float32 weights")
    if (moments := chosen(config.train).moments) is None or moments.blockwise:
        yield Change("optimizer", ("train.optim=adamw_torch",), "float32 moments")
    yield from (change for change in _smoke(config) if change.kind != "emulation")


class Preset(NamedTuple):
    """Other names that people guess, and the changes that a recipe needs."""

    also: tuple[str, ...]
    changes: Callable[[RunConfig], Iterator[Change]]


PRESETS = {
    "fastest": Preset(("fast", "speed", "quick", "performance", "throughput"), _fastest),
    "least-memory": Preset(("memory", "low-memory", "low-vram", "vram", "small"), _least_memory),
    "bf16": Preset(("twin", "baseline"), _bf16),
    "no-fp8": Preset(("without-fp8", "fp8-off", "compatible"), _no_fp8),
    "smoke": Preset(("test", "smoke-test", "dry-run", "try"), _smoke),
    "debug": Preset(("debugging", "fp32"), _debug),
}


def preset_named(typed: str) -> str:
    """The preset that a user means.

    Raises:
        ConfigError: there is none of that name; names the nearest.
    """
    names = {also: name for name, one in PRESETS.items() for also in (name, *one.also)}
    word = typed.strip().lower().replace("_", "-")
    if word not in names:
        raise ConfigError(
            f"there is no preset {typed!r}{did_you_mean(word, names)}",
            where=f"--preset {typed}",
            fix=f"one of {', '.join(PRESETS)}",
        )
    return names[word]


def with_preset(recipe: str, text: str, preset: str) -> tuple[str, list[str]]:
    """The text of a recipe with a preset's settings, and a line for each change.

    Args:
        recipe: name or path, for the header.
        text: of the recipe.
        preset: a key of `PRESETS`.
    """
    written: dict[str, Any] = parse_yaml(text, recipe)[0]
    # Checks of `train` load torch and TRL; copying a text should take no seconds.
    config = checked(written, ".".join, check_train=False)
    config = config.model_copy(update={"train": plain_data({"": config.train})[""]})
    made, lines = [], []
    for change in PRESETS[preset].changes(config):
        if new := [item for item in change.overrides if not _is_there(written, item)]:
            made += new
            lines.append(f"{' '.join(new)}: {change.why}")
    data = apply_overrides(written, made)
    named = {item.lstrip("~").partition("=")[0] for item in made}
    # What `apply_overrides` took back because the new settings exclude it has to be said, too.
    gone = [
        f"{section}.{key}"
        for section, values in written.items()
        for key in values or ()
        if key not in (data[section] or {}) and f"{section}.{key}" not in named
    ]
    lines += [f"~{', ~'.join(gone)}: does not go with these"] if gone else []
    header = [f"Preset {preset} of {recipe}:", *(f"  {line}" for line in lines)]
    wrap = {"width": 100, "initial_indent": "# ", "subsequent_indent": "#     "}
    top = "\n".join(textwrap.fill(line, **wrap, drop_whitespace=True) for line in header)
    return f"{top}\n{with_values(text, data)}", lines


def _is_there(written: dict[str, Any], override: str) -> bool:
    path, equals, value = override.removeprefix("~").partition("=")
    section, _, key = path.partition(".")
    has = written.get(section) or {}
    return str(has.get(key)) == value if equals else key not in has
