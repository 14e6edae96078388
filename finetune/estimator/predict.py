"""Memory and speed of a configuration on a machine, rehearsed whole or from its first layers.

Identical decoder layers cost the same, so two and three layers give the cost of thirty-two, in one
second instead of five. A model is rehearsed whole if its layers differ. Functions raise the
`FinetuneError` with which the run itself would fail.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from finetune.config.methods import method_of
from finetune.config.schema import RunConfig
from finetune.config.train_section import check_batch, decides_checkpointing, with_checkpointing
from finetune.errors import ConfigError, FinetuneError, PlanError
from finetune.estimator.images import images_of
from finetune.estimator.memory import footprint as sizes
from finetune.estimator.memory.footprint import Fit, Footprint
from finetune.estimator.memory.sharding import device_footprint, shares_model
from finetune.estimator.speed import timing
from finetune.estimator.speed.timing import Timing, timing_of_one
from finetune.estimator.trace.compiled import as_compiled
from finetune.estimator.trace.rehearsal import Rehearsal, rehearse
from finetune.estimator.trace.trace import Trace
from finetune.hardware.gpus import Machine
from finetune.hardware.requirements import Resolution, compiles, resolve_there
from finetune.precision.model.plan import PrecisionPlan
from finetune.storage.pretrained import load_shape, positions

FEW = (2, 3)
"""Layers of the smaller models."""


@dataclass(frozen=True)
class Prediction:
    """Memory and speed of one configuration on one machine.

    Attributes:
        resolution: precision executed there.
        footprint: memory of one device, at the higher of its peaks in the first and later steps.
        timing: time of a step; None if the device's speed is unknown.
        parameters, trainable: element counts.
        compiled: decoder layers are compiled.
        first: memory of the first micro-step, which runs uncompiled while FP8 is proven. None where
            its layers are not compiled later, and without gradient checkpointing: then it alone has
            that (`finetune.precision.model.compiling.recomputed`), and holds less than the others.
        image_tokens: tokens of a row that are of images.
    """

    config: RunConfig
    machine: Machine
    resolution: Resolution
    footprint: Footprint
    timing: Timing | None
    parameters: int
    trainable: int
    compiled: bool
    first: Footprint | None = None
    image_tokens: int = 0

    @property
    def fit(self) -> Fit:
        return self.footprint.fit(self.machine.memory_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all devices."""
        return None if self.timing is None else self.timing.tokens_per_s * self.machine.count


def tried(make: Callable[..., Prediction], *args: Any) -> tuple[Prediction | None, str]:
    """What `make` predicts of a run, or why it cannot run."""
    try:
        return make(*args), ""
    except FinetuneError as error:
        return None, error.why or error.what


# ------------------------------------------------------------------------------------ whole or fast


def decided(config: RunConfig, machine: Machine) -> RunConfig:
    """The run with `train.gradient_checkpointing: auto` decided: off where a step fits without."""
    return _decided(config, machine)[0]


def _decided(config: RunConfig, machine: Machine) -> tuple[RunConfig, Prediction | None]:
    """The same, and its prediction if that decided."""
    if not decides_checkpointing(config):
        return config, None
    # Off first: computing layers twice costs a third of the step, and nothing else is gained by it.
    found = predict_fast(with_checkpointing(config, False), machine)
    if found.fit == "fits":
        return found.config, found
    return with_checkpointing(config, True), None


def predict(config: RunConfig, machine: Machine, *, whole: bool = False) -> Prediction:
    """Rehearse the first layers, or all layers if `whole`.

    Gradient checkpointing is decided first where the run leaves it open.
    """
    config, found = _decided(config, machine)
    return predict_whole(config, machine) if whole else found or predict_fast(config, machine)


def predict_whole(
    config: RunConfig,
    machine: Machine,
    *,
    padded: bool | None = None,
    known: tuple[Resolution, PrecisionPlan] | None = None,
    arrays: Mapping[str, Tensor] | None = None,
) -> Prediction:
    """Rehearse a whole model.

    Args:
        padded: rows differ in length; default: unless packed.
        known: the run's resolution and plan, if already made.
        arrays: of the images of a batch, as `rehearse` takes them.
    """
    resolution, plan = known or (resolve_there(config.precision, machine), None)
    whole = _rehearsed(config, machine, resolution, padded=padded, plan=plan, arrays=arrays)
    return _at_its_highest(_step(whole, config, machine, resolution))


def predict_fast(config: RunConfig, machine: Machine) -> Prediction:
    """Estimate the result of `predict_whole` from the model's first layers, in about a second.

    The whole model is rehearsed if it is shallower than these, or if its layers differ.
    """
    shape, resolution = load_shape(config.model), resolve_there(config.precision, machine)
    layers = int(shape.get_text_config(decoder=True).num_hidden_layers)
    # Two points make a line, which is exact where each further layer adds the same.
    if layers > FEW[1] + _more_at_first(shape) and are_alike(shape) and are_treated_alike(config):
        # A rule for a late layer (keep, map, last_n) is rejected in a model without that layer.
        with contextlib.suppress(PlanError):
            depths = [n + _more_at_first(shape) for n in FEW]
            few, more = (_rehearsed(config, machine, resolution, layers=n) for n in depths)
            if few.parameters < more.parameters:  # else layers share their weights
                few, more = (_step(r, config, machine, resolution) for r in (few, more))
                times = (layers - depths[0]) / (depths[1] - depths[0])
                return _at_its_highest(_extrapolated(few, more, times))
    return predict_whole(config, machine)


# --------------------------------------------------------------------------------------- rehearsals


@dataclass(frozen=True)
class _Wanted:
    """A rehearsal; two of one `key` are the same."""

    key: str
    make: Callable[[], Rehearsal] = field(compare=False)


@functools.lru_cache(maxsize=16)
def _made(wanted: _Wanted) -> Rehearsal:
    return wanted.make()


_compiled = functools.lru_cache(maxsize=16)(as_compiled)
"""The same rehearsals serve many GPUs of a search, and a run's checks repeat some."""


def _rehearsed(
    config: RunConfig,
    machine: Machine,
    resolution: Resolution,
    *,
    layers: int | None = None,
    padded: bool | None = None,
    plan: PrecisionPlan | None = None,
    arrays: Mapping[str, Tensor] | None = None,
) -> Rehearsal:
    """Rehearse a run, once for all machines with one kind of GPU, whatever its number and memory.

    Compiled and uncompiled layers are rehearsed alike, but for casts to FP8.
    """
    device, sharded = machine.device, shares_model(config, machine)
    if sharded and resolution.precision.fp8_params:  # a limit says so
        off = {"fp8_params": False}
        config = config.model_copy(update={"precision": config.precision.model_copy(update=off)})
        resolution = replace(resolution, precision=resolution.precision.model_copy(update=off))
        plan = None
    # Runs that differ in these alone share a rehearsal, such as the seeds of a comparison.
    train = {key: value for key, value in config.train.items() if key not in _SAME_STEP}
    given = config.model_copy(update={"train": train})
    precision = resolution.precision
    key = (
        device.kind, device.capability, bool(device.has_fp8), device.is_rocm,
        sharded, layers, padded, precision.compute == "fp8" and compiles(precision, device),
        precision.model_dump_json(exclude={"compile"}),
        given.model_dump_json(exclude={"data": True, "eval": True, "precision": {"compile"}}),
        images_of(config) if arrays is None else repr(arrays),
        # A key of text: configurations are not hashable, and equal ones of two calls shall be one
        # rehearsal. Whatever a rehearsal reads has to be in it, or a search would answer for
        # another run.
        load_shape(config.model).to_json_string(),  # a folder may have changed since
    )  # fmt: skip
    make = functools.partial(
        rehearse, config, device, resolution, layers=layers, padded=padded, sharded=sharded,
        plan=plan, arrays=arrays,
    )  # fmt: skip
    return _made(_Wanted(repr(key), make))


_SAME_STEP = ("learning_rate", "seed", "max_steps", "num_train_epochs", "logging_steps")
"""Settings that change nothing in a rehearsed step."""


def _step(
    rehearsal: Rehearsal, config: RunConfig, machine: Machine, resolution: Resolution
) -> Prediction:
    """What is read off one rehearsal, with its first micro-step still apart."""
    compiled, first = rehearsal.compiles and compiles(resolution.precision, machine.device), None
    if compiled:
        # Without checkpointing the first step is never the higher one (`Prediction.first`).
        if any(op.phase == "recompute" for op in rehearsal.trace.ops):
            eager = replace(rehearsal, trace=in_eager_kernels(rehearsal.trace))
            first = device_footprint(eager, config, machine)
        rehearsal = _compiled(rehearsal)
    memory = device_footprint(rehearsal, config, machine)
    timing = timing_of_one(rehearsal, config, machine, compiled=compiled)
    counts, images = (rehearsal.parameters, rehearsal.trainable), rehearsal.image_tokens
    return Prediction(config, machine, resolution, memory, timing, *counts, compiled, first, images)


def in_eager_kernels(trace: Trace) -> Trace:
    """The trace with empty storages for what only passes through a kernel of an eager step."""
    passing = {n: replace(s, nbytes=0) for n, s in trace.storages.items() if s.passing}
    events = [e._replace(nbytes=0) if e.storage in passing else e for e in trace.events]
    return replace(trace, events=events, storages=trace.storages | passing)


def _extrapolated(few: Prediction, more: Prediction, times: float) -> Prediction:
    """The step of a model with as many layers more than `few` as `more` has, `times` over."""

    def grown(a: int, b: int) -> int:
        return round(a + times * (b - a))

    return replace(
        more,
        footprint=sizes.extrapolated(few.footprint, more.footprint, times),
        first=few.first and more.first and sizes.extrapolated(few.first, more.first, times),
        timing=few.timing and more.timing and timing.extrapolated(few.timing, more.timing, times),
        parameters=grown(few.parameters, more.parameters),
        trainable=grown(few.trainable, more.trainable),
    )


def _at_its_highest(found: Prediction) -> Prediction:
    """The prediction at the higher of its peaks in the first and later micro-steps."""
    if found.first is None:
        return found
    return replace(found, footprint=sizes.with_first(found.footprint, found.first))


def are_alike(shape: PretrainedConfig) -> bool:
    """True if all decoder layers cost the same, as far as the architecture's config shows."""
    text = shape.get_text_config(decoder=True)
    # Such as `layer_types`: a list as long as the model has layers says what each of them is.
    lists = [v for v in vars(text).values() if isinstance(v, (list, tuple))]
    mixed = any(len(v) == text.num_hidden_layers and len(set(map(str, v))) > 1 for v in lists)
    uneven = any(getattr(text, name, None) for name in _UNEVEN)
    # A period of 1 means that all layers are of the kind.
    turns = any(int(getattr(text, name, None) or 1) > 1 for name in _IN_TURN)
    return not (mixed or uneven or turns)


def _more_at_first(shape: PretrainedConfig) -> int:
    """First decoder layers that are added something of an image, as by Qwen3-VL's tower."""
    tower = getattr(shape, "vision_config", None)
    return len(getattr(tower, "deepstack_visual_indexes", None) or ())


_UNEVEN = ("first_k_dense_replace", "mlp_only_layers", "moe_layer_freq", "num_kv_shared_layers")
"""Config keys that make some layers differ."""
_IN_TURN = (
    "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period",
    "attn_layer_period", "full_attention_interval", "global_attn_every_n_layers",
)  # fmt: skip
"""Config keys that set the period of a layer kind."""


def are_treated_alike(config: RunConfig) -> bool:
    """True if a run treats all decoder layers alike, except some at the ends.

    Patterns that name layers by number, such as `layers.[0-3]`, match others in a shallower model.
    """
    lora, precision = config.lora, config.precision
    patterns, names = [*precision.keep, *precision.map, *config.model.freeze], []
    if lora is not None:
        targets = lora.target_modules
        # PEFT takes a text as a pattern, and a list as ends of names.
        (patterns if isinstance(targets, str) else names).extend(
            [targets] if isinstance(targets, str) else targets
        )
        patterns += lora.exclude_modules
        names += (*lora.modules_to_save, *lora.target_parameters)
        # Numbers of layers, of which a model of two or three has fewer.
        if lora.layers_to_transform:
            return False
    matched = any(re.search(r"[0-9]|\\d", pattern) for pattern in patterns)
    numbered = any(part.isdigit() for name in names for part in name.split("."))
    return not (matched or numbered or precision.first_n + precision.last_n > FEW[0])


# ------------------------------------------------------------------------------------ configuration


def check_sizes(config: RunConfig) -> None:
    """Validate batch size and sequence length.

    Raises:
        ConfigError: a batch or length below one, or rows longer than the model accepts.
    """
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"):
        value = getattr(config.train, key)
        if value is not None and int(value) < 1:
            raise ConfigError(f"train.{key} is {value}", where=f"train.{key}", fix="1 or more")
    check_batch(config.train)
    if method_of(config.train).writes:  # its rows have no such limit
        return
    length = config.train.max_length
    limit = positions(load_shape(config.model))
    if length is None:
        raise ConfigError(
            "rows have no greatest length, so their memory has no end",
            where="train.max_length: null",
            fix=f"train.max_length={min(2048, limit or 2048)}, or what your longest row has",
        )
    if limit is not None and length > limit:
        raise ConfigError(
            f"rows of {length} tokens are longer than {config.model.name} can take",
            where=f"train.max_length={length}",
            why=f"it has {limit} positions (max_position_embeddings)",
            fix=f"train.max_length={limit} or less",
        )
