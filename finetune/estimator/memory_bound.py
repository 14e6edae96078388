"""A lower bound of the memory a run needs, before anything is loaded.

Weights, gradients and optimizer states have to be there whatever else happens; activations come on
top. So a run whose bound exceeds the memory at hand cannot work, and is refused before it loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config.optimizers import chosen, state_bytes
from finetune.config.schema import RunConfig, Storage
from finetune.errors import MemoryShortError
from finetune.estimator.knobs import changes
from finetune.hardware.device import GIB, Device, available_gib
from finetune.storage.held_layers import held_bytes, held_layers
from finetune.storage.sizes import fp8_bytes

if TYPE_CHECKING:
    from torch import nn

    from finetune.precision.planner import PrecisionPlan


@dataclass(frozen=True)
class MemoryBound:
    """Bytes that a run holds at least, per device.

    Attributes:
        weights, gradients, optimizer: their parts, in GiB.
        parameters, trainable: counts.
    """

    weights: float
    gradients: float
    optimizer: float
    parameters: int
    trainable: int

    @property
    def total(self) -> float:
        """GiB."""
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        return (
            f"{self.total:.1f} GiB without activations (weights {self.weights:.1f}, gradients "
            f"{self.gradients:.1f}, optimizer {self.optimizer:.1f})"
        )


def bound(
    model: nn.Module,
    the_plan: PrecisionPlan,
    train: dict[str, Any],
    *,
    shards: int = 1,
    storage: Storage | None = None,
) -> MemoryBound:
    """The bound of a model, also on the meta device.

    Args:
        model: with its adapters attached.
        the_plan: its precision plan, which says what is held in FP8.
        train: the recipe's `train` section; only `optim` matters.
        shards: processes that share one copy of everything (FSDP).
        storage: how the weights of the base will be held (`model.storage`), if not as `model`
            has them.
    """
    from torch import nn

    every = list(model.parameters())
    training = [p for p in every if p.requires_grad]
    optimizer = chosen(train)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    states = sum(
        state_bytes(optimizer, tuple(p.shape), p.element_size(), embedding=id(p) in embeddings)
        for p in training
    )
    weights = sum(p.numel() * p.element_size() for p in every)
    for layer in held_layers(model, storage).values():
        assert storage is not None
        weights += held_bytes(layer, storage) - layer.weight.numel() * layer.weight.element_size()
    for layer in the_plan.held:
        plain: Any = model.get_submodule(layer.name).weight
        scales = None if layer.held == "row" else 1
        weights += fp8_bytes(*layer.shape, scales) - plain.numel() * plain.element_size()
    return MemoryBound(
        weights=weights / GIB / shards,
        gradients=sum(p.numel() * p.element_size() for p in training) / GIB / shards,
        optimizer=0.0 if optimizer.paged else states / GIB / shards,
        parameters=sum(p.numel() for p in every),
        trainable=sum(p.numel() for p in training),
    )


def shards_of(config: RunConfig, processes: int) -> int:
    """How many processes share one copy of the weights."""
    return processes if config.train.get("fsdp") else 1


def why_too_small(config: RunConfig, need: MemoryBound, device: Device) -> str:
    """One sentence when the bound exceeds what is free, else an empty one."""
    free = available_gib(device)
    if need.total <= free:
        return ""
    return f"it needs at least {need}; {device.name} has {free:.1f} GiB free"


HELD = ("base", "weights", "optimizer", "method")
"""Kinds of changes that lessen what the bound counts."""


def advice(config: RunConfig, device: Device) -> str:
    """What to change when a run does not fit, unmeasured: what each frees is not known here."""
    steps = []
    for change in changes(config, device):
        if change.kind in HELD:
            hint = " (adapters: the recipe's _lora_ sibling)" if change.kind == "method" else ""
            steps.append(" ".join(change.typed) + hint)
    steps += ["shard over several GPUs (train.fsdp)", "a smaller model (`python -m finetune ls`)"]
    steps.append("`python -m finetune tiny_lora_fp8` runs anywhere")
    return "; ".join(steps)


def check_fits(config: RunConfig, need: MemoryBound, device: Device) -> None:
    """Raise `MemoryShortError` when the run cannot fit, with what it needs and what to change."""
    short = why_too_small(config, need, device)
    if short:
        raise MemoryShortError(
            f"{config.model.name} ({need.parameters / 1e9:.2f}B parameters, {config.method} "
            "fine-tuning) does not fit here",
            why=short,
            fix=advice(config, device),
        )
