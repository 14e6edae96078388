"""Memory that a run stores from step to step: weights, gradients, optimizer states.

It is a lower bound of any run. `static_memory` is the sum over parameter tensors, of a model on the
meta device (`bound`) or of a shape without torch (`parameters_of`);
`tests/estimator/test_preview.py` checks that both agree for every recipe.

    weights      as stored: plain, FP8 codes and their scales, or four bits (`model.storage`,
                 `precision.frozen`); FP8 codes beside the plain ones with `precision.fp8_params`
    gradients    of trainable parameters, in their own dtype
    optimizer    moments as the optimizer stores them (`finetune.config.optimizers.state_bytes`);
                 0 for a paged one, whose states need no GPU memory

Adapters are float32, as PEFT makes them over a 16-bit base. There are no master weights besides the
parameters themselves (`model.dtype: float32`).

Limit: layers that `precision.map` or `keep` exclude from FP8 count as stored in FP8 if the base is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from finetune.config.optimizers import Optimizer, state_bytes
from finetune.config.schema import LoraSection, RunConfig
from finetune.config.section import matches
from finetune.estimator.closed_form.decoder import Decoder
from finetune.storage.sizes import fp8_bytes, stored_bytes
from finetune.units import MEMORY, size

FLOAT32 = 4


class Parameters(NamedTuple):
    """Identical parameter tensors.

    Attributes:
        itemsize: bytes per element, of its gradient too.
        embedding: weights of an `nn.Embedding`, which some optimizers treat apart.
        stored: bytes of one tensor as stored, if not `itemsize` per element.
    """

    shape: tuple[int, ...]
    itemsize: int
    trains: bool
    count: int = 1
    embedding: bool = False
    stored: float | None = None

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return math.prod(self.shape) * self.count

    @property
    def stored_bytes(self) -> float:
        """Bytes of all tensors as stored."""
        return self.numel * self.itemsize if self.stored is None else self.count * self.stored


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on one GPU, `largest` of the largest trainable tensor; element counts of the model."""

    weights: float
    gradients: float
    optimizer: float
    largest: float
    parameters: int
    trainable: int

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        total, weights, gradients, optimizer = (
            size(x, MEMORY) for x in (self.total, self.weights, self.gradients, self.optimizer)
        )
        return (
            f"{total} without activations "
            f"(weights {weights}, gradients {gradients}, optimizer {optimizer})"
        )


def static_memory(
    parameters: Iterable[Parameters], optimizer: Optimizer, shards: int
) -> StaticMemory:
    """Sum weights, gradients and optimizer states over `parameters`.

    `shards` is the number of GPUs that share one copy of everything (FSDP).
    """
    every = list(parameters)
    training = [p for p in every if p.trains and p.count]
    states = sum(
        p.count * state_bytes(optimizer, p.shape, p.itemsize, embedding=p.embedding)
        for p in training
    )
    sizes = (math.prod(p.shape) * p.itemsize for p in training)
    return StaticMemory(
        weights=sum(p.stored_bytes for p in every) / shards,
        gradients=sum(p.numel * p.itemsize for p in training) / shards,
        optimizer=0.0 if optimizer.paged else states / shards,
        largest=max(sizes, default=0) / shards,
        parameters=sum(p.numel for p in every),
        trainable=sum(p.numel for p in training),
    )


# -------------------------------------------------------------------------------------- of a shape


def parameters_of(decoder: Decoder, config: RunConfig) -> Iterator[Parameters]:
    """Parameters of a run's model, adapters included."""
    lora, itemsize = config.lora, itemsize_of(config)
    adapted = adapted_linears(decoder, lora) if lora else {}
    for weight in decoder.weights():
        shape, count = weight.shape, weight.count
        row = Parameters(shape, itemsize, lora is None, count, weight.kind == "embedding")
        if weight.kind == "linear":
            stored, layers = stored_linear(shape[0], shape[1], decoder, config)
            yield row._replace(count=layers, stored=stored)
            yield row._replace(count=count - layers)
        elif weight.path and lora and lora.bias != "none":  # a bias of the base
            trained = count if lora.bias == "all" else adapted.get(weight.path, 0)
            yield row._replace(count=trained, trains=True)
            yield row._replace(count=count - trained)
        else:
            yield row
    yield from added_parameters(decoder, config)


def added_parameters(decoder: Decoder, config: RunConfig) -> Iterator[Parameters]:
    """Adapters, and trainable copies of modules (`lora.modules_to_save`)."""
    lora = config.lora
    if lora is None:
        return
    adapted = adapted_linears(decoder, lora)
    for linear in decoder.linears:
        if count := adapted.get(linear.path):
            yield Parameters((lora.r, linear.k), FLOAT32, True, count)  # A
            yield Parameters((linear.n, lora.r), FLOAT32, True, count)  # B
            if lora.use_dora:
                yield Parameters((linear.n,), FLOAT32, True, count)  # magnitudes
    for name in lora.modules_to_save:
        if name in ("lm_head", "embed_tokens", "wte"):
            shape = decoder.vocabulary, decoder.hidden
            yield Parameters(shape, itemsize_of(config), True, embedding=name != "lm_head")


def itemsize_of(config: RunConfig) -> int:
    """Bytes per element of `model.dtype`."""
    return FLOAT32 if config.model.dtype == "float32" else 2


def stored_linear(n: int, k: int, decoder: Decoder, config: RunConfig) -> tuple[float, int]:
    """Bytes of a linear weight [n, k] as stored, and the number of layers that store it so."""
    precision, numel, itemsize = config.precision, n * k, itemsize_of(config)
    inner = max(0, decoder.layers - precision.first_n - precision.last_n)
    if config.model.storage:
        return stored_bytes(config.model.storage, n, k), decoder.layers
    if precision.compute == "fp8" and precision.frozen == "fp8" and config.lora:
        scales = None if precision.scaling == "rowwise" else 1
        return fp8_bytes(n, k, scales), inner
    if precision.fp8_params and not config.lora:  # codes beside the optimizer's master
        return numel * (itemsize + 1), inner
    return numel * itemsize, decoder.layers


def adapted_linears(decoder: Decoder, lora: LoraSection) -> dict[str, int]:
    """Path of a linear layer -> number of decoder layers in which PEFT adapts it, if any."""
    found: dict[str, int] = {}
    for linear in decoder.linears:
        names = [
            f"{decoder.prefix}{i}.{linear.path}"
            for i in lora.layers_to_transform or range(decoder.layers)
        ]
        names = [n for n in names if not any(matches(p, n) for p in lora.exclude_modules)]
        if lora.target_modules != "all-linear":
            names = [name for name in names if _is_target(name, lora.target_modules)]
        if names:
            found[linear.path] = len(names)
    return found


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """True if PEFT matches: a pattern on the whole name, a list item on its end."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith("." + target) for target in targets)
