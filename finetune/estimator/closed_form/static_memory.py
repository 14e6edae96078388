"""What a run holds from step to step, in closed form: weights, gradients, states of the optimizer.

The same sum as `finetune.estimator.memory_bound.bound` makes over a model on the meta device, here
over a shape
without torch; `tests/estimator/test_preview.py` holds the two to be equal for every recipe.
Adapters are
float32, as PEFT makes them over a base in 16 bits. A frozen base is held as the recipe says: plain,
as FP8 codes (`precision.frozen`, `model.storage`) or in four bits.

Not in it: layers that `precision.map` or `keep` leave high in a base that is held in FP8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from finetune.config.optimizers import chosen, state_bytes
from finetune.config.schema import LoraSection, RunConfig
from finetune.estimator.closed_form.activations import FLOAT, HALF
from finetune.estimator.closed_form.decoder import Decoder, Linear, Weight
from finetune.storage.sizes import fp8_bytes, nf4_bytes


class Trainee(NamedTuple):
    """Tensors that train, and the bytes of one of their elements."""

    weight: Weight
    element: int

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.weight.numel * self.element


@dataclass(frozen=True)
class Held:
    """Bytes on one GPU, if not said otherwise.

    Attributes:
        weights, gradients, optimizer: the three parts.
        parameters: elements of all weights, adapters included, of the whole model.
        trained: tensors that train, of the whole model.
        added: elements of adapters and of copies that train in the place of frozen weights.
        adapted: paths of the linear layers with adapters.
        layer: of one decoder layer's linear weights, whole.
        shards: GPUs that share one copy of everything.
    """

    weights: float
    gradients: float
    optimizer: float
    parameters: int
    trained: tuple[Trainee, ...]
    added: int
    adapted: frozenset[str]
    layer: float
    shards: int

    @property
    def trainable(self) -> int:
        """Elements that train, of the whole model."""
        return sum(trainee.weight.numel for trainee in self.trained)

    @property
    def largest(self) -> float:
        """The largest tensor that trains."""
        sizes = (math.prod(t.weight.shape) * t.element for t in self.trained)
        return max(sizes, default=0.0) / self.shards


def element_bytes(config: RunConfig) -> int:
    """Bytes of an element of `model.dtype`."""
    return int(FLOAT if config.model.dtype == "float32" else HALF)


def held(decoder: Decoder, config: RunConfig, shards: int = 1) -> Held:
    """What a run of this shape holds.

    Args:
        decoder: shape of its model.
        config: of the run.
        shards: GPUs that share one copy of everything.

    Raises:
        ConfigError: there is no such optimizer.
    """
    lora, element, facts = config.lora, element_bytes(config), chosen(config.train)
    adapted = dict(_adapted(decoder, lora)) if lora else {}
    if lora is None:
        trained = tuple(Trainee(weight, element) for weight in decoder.weights())
        new: list[Trainee] = []
    else:
        new = list(_added(decoder, lora, adapted, element))
        trained = (*new, *_biases(decoder, lora, adapted, element))
    plain = sum(weight.numel for weight in decoder.weights()) * element
    of_layer, saving = 0.0, 0.0
    for linear in decoder.linears:
        size, layers = _as_held(linear, decoder, config, element)
        of_layer += size
        saving += layers * (linear.n * linear.k * element - size)
    states = sum(
        w.count * state_bytes(facts, w.shape, size, embedding=w.kind == "embedding")
        for w, size in trained
    )
    added = sum(trainee.weight.numel for trainee in new)
    return Held(
        weights=(plain - saving + sum(trainee.nbytes for trainee in new)) / shards,
        gradients=sum(trainee.nbytes for trainee in trained) / shards,
        optimizer=0.0 if facts.paged else states / shards,
        parameters=decoder.parameters + added,
        trained=trained,
        added=added,
        adapted=frozenset(adapted),
        layer=of_layer,
        shards=shards,
    )


def _as_held(
    linear: Linear, decoder: Decoder, config: RunConfig, element: int
) -> tuple[float, int]:
    """Bytes of one linear weight as it is held, and in how many layers it is."""
    precision, numel = config.precision, linear.n * linear.k
    inner = max(0, decoder.layers - precision.first_n - precision.last_n)
    if config.model.storage == "nf4":
        return nf4_bytes(numel), decoder.layers
    if config.model.storage == "fp8":
        return fp8_bytes(linear.n, linear.k), decoder.layers
    if precision.compute == "fp8" and precision.frozen == "fp8" and config.lora:
        scales = None if precision.scaling == "rowwise" else 1
        return fp8_bytes(linear.n, linear.k, scales), inner
    if precision.fp8_params and not config.lora:  # codes beside the optimizer's master
        return numel * (element + 1), inner
    return numel * element, decoder.layers


def _adapted(decoder: Decoder, lora: LoraSection) -> Iterator[tuple[str, int]]:
    """Path of a layer's linear, and in how many decoder layers PEFT adapts it."""
    for linear in decoder.linears:
        layers = range(decoder.layers)
        if lora.target_modules != "all-linear":
            full = (f"{decoder.prefix}{place}.{linear.path}" for place in layers)
            layers = [name for name in full if _is_target(name, lora.target_modules)]
        if layers:
            yield linear.path, len(layers)


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """As PEFT matches: a pattern is for the whole name, words of a list for its end."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == word or name.endswith("." + word) for word in targets)


def _added(
    decoder: Decoder, lora: LoraSection, adapted: dict[str, int], element: int
) -> Iterator[Trainee]:
    """Adapters, and copies of modules that train in full beside them."""
    adapter = int(FLOAT)
    for linear in decoder.linears:
        count = adapted.get(linear.path, 0)
        if count:
            yield Trainee(Weight((lora.r, linear.k), count, "linear"), adapter)
            yield Trainee(Weight((linear.n, lora.r), count, "linear"), adapter)
            if lora.use_dora:
                yield Trainee(Weight((linear.n,), count, "vector"), adapter)
    for name in lora.modules_to_save:
        if name in ("lm_head", "embed_tokens", "wte"):
            kind = "head" if name == "lm_head" else "embedding"
            yield Trainee(Weight((decoder.vocabulary, decoder.hidden), 1, kind), element)


def _biases(
    decoder: Decoder, lora: LoraSection, adapted: dict[str, int], element: int
) -> Iterator[Trainee]:
    """Biases of the base that train: `lora.bias`."""
    for linear in decoder.linears if lora.bias != "none" else ():
        count = decoder.layers if lora.bias == "all" else adapted.get(linear.path, 0)
        if linear.bias and count:
            yield Trainee(Weight((linear.n,), count, "vector"), element)
