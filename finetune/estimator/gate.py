"""Memory checks of a run: refusal before it loads, and the prediction beside the measurement.

Three checks of the device's memory on the model on the meta device, the first two instant:

    lower bound     weights, gradients and optimizer states, without activations: refuses
    upper bound     every activation that a step could keep, and more: accepts
    rehearsal       one step on tensors without memory: seconds, before minutes of loading

Host memory of masters (`precision.fp8_params`) is known to the byte. The driver pins it by itself:
`ulimit -l` bounds `mlock` alone.

After a run, the prediction is for the measured batch, which is smaller than the largest possible if
rows are shorter than `train.max_length`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.config.methods import method_of
from finetune.config.optimizers import chosen
from finetune.config.recipe import with_overrides
from finetune.config.schema import RunConfig, Storage
from finetune.config.sft import padding_free
from finetune.config.train_keys import TrainSection
from finetune.config.train_section import with_checkpointing
from finetune.errors import FinetuneError, MemoryShortError, PrecisionError, RehearsalError
from finetune.estimator.changes import as_typed, freeing, length_of, rows_of, with_length
from finetune.estimator.images import images_of
from finetune.estimator.memory.overheads import pinned_bytes
from finetune.estimator.predict import Prediction, predict_whole
from finetune.hardware.device import (
    EXPANDABLE,
    Device,
    available_gib,
    expand_segments,
    host_gib,
    processes,
)
from finetune.hardware.gpus import this_machine
from finetune.precision.model.layers import head_modules, linear_shape
from finetune.storage.nf4 import nf4_bytes
from finetune.training.health.memory_meter import Batch
from finetune.training.helper.optimizer.low_bit import bytes_of_states
from finetune.training.model import is_published_fp8
from finetune.training.run.preflight import Planned, Preflight
from finetune.units import GIB, MEMORY, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from finetune.precision.model.plan import PrecisionPlan

ACTIVATION_BYTES, SCORE_BYTES = 16, 8
"""Most bytes that a layer keeps of one input or output element of a matrix (copies on both sides of
a cast, an adapter's, its dropout mask), and of one score of attention that is not fused.
"""
KINDS_IN_BOUND = ("base", "weights", "optimizer", "masters", "method")
"""Kinds of changes that reduce the lower bound."""


HOST_BESIDE = GIB
"""Host memory that libraries and data take after the check: assumed."""


class MemoryForecast:
    """Memory check before a run and prediction after it: `Forecast` of `training.run.preflight`."""

    def explain(self, error: PrecisionError, run: Planned) -> PrecisionError:
        """Extend the error of an unavailable precision if memory is short, too."""
        short = why_too_small(
            bound_of(run.config, run.meta_model, run.plan, run.device), run.device
        )
        if not short:
            return error
        return type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}. Besides, {short}",
            fix=f"an FP8 GPU with enough memory; or here: {changes_to_fit(run.config, run.device)}",
        )

    def needs_checkpointing(self, run: Preflight) -> bool:
        """True unless a step that keeps all activations fits into free memory with its margin.

        Several processes go by the whole memory, so that all decide alike: under FSDP a process
        that computes its layers a second time gathers weights that the others do not send.
        """
        need = bound_of(run.config, run.meta_model, run.plan, run.device)
        if why_too_small(need, run.device):
            return True  # the check refuses it, unless it is overridden: no seconds for a rehearsal
        # The question is whether a step fits that keeps everything.
        config, device = with_checkpointing(run.config, False), run.device
        free = this_machine(device, run.processes).memory_bytes
        if run.processes == 1:
            free = int(available_gib(device) * GIB)
        # Most small models are decided here, in milliseconds and without a rehearsal.
        if most_bytes(config, run.meta_model, need) <= free:
            return False
        try:
            memory = _rehearsed(run, config).footprint
        except RehearsalError:
            return True
        return memory.fit(free) != "fits"

    def check(self, run: Preflight) -> None:
        """Refuse a run that cannot fit into the free memory; accept one that cannot be rehearsed.

        Raises:
            MemoryShortError: it cannot fit, with what to change.
        """
        config, device = run.config, run.device
        need = bound_of(config, run.meta_model, run.plan, device)
        short = why_too_small(need, device)
        if short:
            raise _does_not_fit(config, device, need.parameters, why=short)
        # Free memory, not all of it: another process may be on the same GPU.
        free = available_gib(device)
        if most_bytes(config, run.meta_model, need) <= free * GIB:
            return
        try:
            expected = _rehearsed(run, config)
        except RehearsalError:  # of which nothing is known is not refused
            return
        memory = expected.footprint
        # A tight run is let through: its margin is for errors of the estimate, which may be in its
        # favor.
        if memory.fit(int(free * GIB)) == "does not fit":
            raise _does_not_fit(
                config,
                device,
                expected.parameters,
                where=f"the peak, in {memory.highest}"
                + (f", most of it in passing in {memory.owner}" if memory.owner else ""),
                why=f"a step holds {(memory.allocated + memory.outside) / GIB:.1f} GiB; "
                f"{device.name} has {free:.1f} GiB free",
            )

    def how_to_shrink(self, run: Planned) -> str:
        """Changes for a run that memory was too small for: first those that train the same."""
        same = (c for c in freeing(run.config, run.device) if c.rank == "same")
        # Reversed: of several changes of one kind the first stays, which costs least.
        first = {change.kind: as_typed(change.typed) for change in reversed([*same])}
        nvidia = run.device.kind == "cuda" and not run.device.is_rocm
        # Fragments first: `expandable_segments` costs nothing. ROCm has none (`hardware.device`).
        before = [EXPANDABLE] if nvidia and not expand_segments() else []
        return "; ".join(
            [*before, *reversed(first.values()), changes_to_fit(run.config, run.device)]
        )

    def predicted(self, run: Preflight, batch: Batch | None) -> dict[str, Any]:
        """Predict the memory of the measured batch for the receipt.

        Returns:
            `predicted_gib`, `predicted` (method, or reason for none) and on GPUs
            `predicted_reserved_gib`; empty without a batch.
        """
        if batch is None:
            return {}
        rows, length, padded, prompt, arrays = batch
        train = run.config.train
        # A batch of pairs has two texts a row, and the recipe counts rows.
        rows //= method_of(train).texts
        if train.packing and rows == 1:  # of all, but with `packing_strategy: wrapped`
            rows, _ = rows_of(run.config)
            # Packed without padding, all rows of a micro-batch come as one long one.
            length //= rows
        shape = [f"train.per_device_train_batch_size={rows}"]
        # Where the model writes, rows are a prompt and an answer, of which the answer's length is a
        # setting.
        if prompt:  # answers may end before they have to
            shape.append(f"train.max_completion_length={max(1, length - prompt)}")
        config = with_overrides(run.config, shape)
        try:
            # The measured batch, not the largest possible: a comparison of both would show how
            # short the rows were, not how good the prediction is.
            found = _rehearsed(run, with_length(config, length), padded, arrays).footprint
        except FinetuneError as error:
            return {"predicted": f"not predicted: {error.what}"}
        values: dict[str, Any] = {
            "predicted_gib": round(found.allocated / GIB, 6),
            "predicted": f"by rehearsal, for a batch of {rows} x {length} tokens"
            + (", some of them padding" if padded else ""),
        }
        if run.device.kind == "cuda":
            values["predicted_reserved_gib"] = round(found.reserved / GIB, 6)
        if found.on_host:
            values["predicted_host_gib"] = round(found.on_host / GIB, 6)
        return values


def _does_not_fit(
    config: RunConfig, device: Device, parameters: int, *, why: str, where: str = ""
) -> MemoryShortError:
    force = "; --force tries it anyway" if where else ""  # a lower bound leaves nothing to try
    return MemoryShortError(
        f"{config.model.name} ({parameters / 1e9:.2f}B parameters, {config.method} "
        "fine-tuning) does not fit here",
        where=where,
        why=why,
        fix=changes_to_fit(config, device) + force,
    )


def changes_to_fit(config: RunConfig, device: Device) -> str:
    """Changes for a run that does not fit, without their effect."""
    hints = {"method": " (adapters: the recipe's _lora_ sibling)"}
    # The bound has no activations, so smaller batches or checkpointing could not help.
    offered = (c for c in freeing(config, device) if c.kind in KINDS_IN_BOUND)
    steps = [as_typed(change.typed) + hints.get(change.kind, "") for change in offered]
    steps += ["shard over several GPUs (train.fsdp)", "a smaller model (`python -m finetune ls`)"]
    return "; ".join([*steps, "`python -m finetune tiny_lora_fp8` runs anywhere"])


# ------------------------------------------------------------------------------------------ bounds


@dataclass(frozen=True)
class StaticMemory:
    """Bytes that one device stores from step to step, and element counts of the model.

    Attributes:
        pinned, pageable: bytes in host memory beside a GPU: masters and gradients, and states.
    """

    weights: float
    gradients: float
    optimizer: float
    parameters: int
    trainable: int
    pinned: float = 0.0
    pageable: float = 0.0

    @property
    def on_host(self) -> float:
        return self.pinned + self.pageable

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


def fp8_bytes(n: int, k: int, scales: int) -> int:
    """Bytes of a weight [N, K] in FP8: codes and float32 scales."""
    # One byte a code, four a scale.
    return n * k + 4 * scales


def bound(
    model: nn.Module,
    plan: PrecisionPlan,
    train: TrainSection,
    *,
    shards: int = 1,
    storage: Storage | None = None,
    apart: bool = False,
) -> StaticMemory:
    """Lower bound of a run's memory per device, for a model that may be on meta.

    Weights count as stored, gradients in their parameter's dtype, states as the optimizer stores
    them; those of a paged one need no memory of the device.

    Args:
        model: with its adapters attached.
        plan: precision plan, which decides what is stored in FP8.
        train: the recipe's `train` section; only `optim` matters.
        shards: processes that share one copy of everything (FSDP).
        storage: storage of the base weights (`model.storage`), if different from `model`'s.
        apart: host memory is not the device's.
    """
    from finetune.storage.loading import stored_layers

    stored: dict[int, float] = {}  # id -> bytes, of low-precision weights
    for layer in stored_layers(model, storage).values():
        shape = linear_shape(layer)
        assert storage is not None
        assert shape is not None
        n, k = shape
        stored[id(layer.weight)] = nf4_bytes(n * k) if storage == "nf4" else fp8_bytes(n, k, n)
    for row in plan.stored:
        owner: Any = model.get_submodule(row.owner)
        weight = owner.weight if row.kind == "linear" else getattr(owner, row.local)
        # Experts lie in one parameter: as many matrices as it has numbers over those of one.
        matrix = fp8_bytes(*row.shape, row.shape[0] if row.stored == "row" else 1)
        stored[id(weight)] = weight.numel() // math.prod(row.shape) * matrix
    every, away = list(model.parameters()), masters_of(model, plan) if apart else {}
    stored |= away
    training = [p for p in every if p.requires_grad]
    states, here = (bytes_of_states(model, train, without) for without in ((), away))
    return StaticMemory(
        # By identity: a tied head and embedding are one tensor, and counted once by `parameters()`.
        weights=sum(stored.get(id(p), p.nbytes) for p in every) / shards,
        gradients=sum(p.nbytes for p in training if id(p) not in away) / shards,
        optimizer=0.0 if chosen(train).paged else here / shards,
        parameters=sum(p.numel() for p in every),
        trainable=sum(p.numel() for p in training),
        pinned=sum(2 * pinned_bytes(p.nbytes) for p in every if id(p) in away),
        pageable=states - here,
    )


def masters_of(model: nn.Module, plan: PrecisionPlan) -> dict[int, float]:
    """Weights in host memory, by id, with the bytes of what stands for them on the device."""
    from torch import nn

    if not plan.precision.fp8_params:
        return {}
    found, heads = dict[int, float](), head_modules(model)
    for module in model.modules():
        weight = module._parameters.get("weight")
        is_table = isinstance(module, nn.Embedding) or module in heads
        if is_table and weight is not None and weight.requires_grad:
            found[id(weight)] = weight.nbytes
    for row in plan.fp8_layers:
        scales = row.shape[0] if plan.precision.facts.by_row else 1
        weight: Any = model.get_submodule(row.owner).weight
        found[id(weight)] = fp8_bytes(*row.shape, scales)
    return found


def bound_of(
    config: RunConfig, model: Any, plan: PrecisionPlan, device: Device | None = None
) -> StaticMemory:
    """Lower bound of one process of a run, from its meta model and plan.

    Args:
        device: whose memory is meant, if it may have one of its own.
    """
    apart = device is not None and device.kind == "cuda"
    storage = config.model.storage
    # Such a checkpoint is read into FP8 layers as it is, without a setting of the recipe.
    if storage is None and is_published_fp8(model.config):
        storage = "fp8"
    shards = processes() if config.train.fsdp else 1
    return bound(model, plan, config.train, shards=shards, storage=storage, apart=apart)


def why_too_small(need: StaticMemory, device: Device) -> str:
    """One sentence if the bound exceeds the free memory, else an empty string."""
    free, there = available_gib(device), host_gib() * GIB
    if need.total / GIB > free:
        return f"it needs at least {need}; {device.name} has {free:.1f} GiB free"
    if not need.on_host or need.on_host + HOST_BESIDE <= there:
        return ""
    return (
        f"precision.fp8_params takes {size(need.on_host, MEMORY)} of host memory "
        f"({size(need.pinned, MEMORY)} pinned for masters and gradients, "
        f"{size(need.pageable, MEMORY)} for optimizer states); {size(there, MEMORY)} are free"
    )


def most_bytes(config: RunConfig, model: Any, need: StaticMemory) -> float:
    """Upper bound of a step's memory, several times what it takes; infinite for rows without end.

    A layer keeps what goes into its matrices and what comes out. With 8 x 128 tokens, one matrix of
    64 x 256, two layers of 4 heads: 1024 (16 (64 + 256) + 8 x 2 x 4 x 128) bytes, and twice the
    lower bound.
    """
    from torch import nn

    length, (rows, times) = length_of(config), rows_of(config)
    # Teachers are of any size, and of an image a tower may keep more than a decoder.
    if length is None or config.train.teacher_model_name_or_path or images_of(config):
        return math.inf
    rows *= times if method_of(config.train).writes else 1  # written at once
    tokens = rows * method_of(config.train).texts * int(length)
    shape = model.config.get_text_config(decoder=True)
    layers = int(shape.num_hidden_layers)
    lists = [len(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    times = max(1, layers // max(lists, default=1))  # layers that share their weights
    # Of any matrix, embeddings and experts that no token meets included: it is an upper bound.
    widths = times * sum(sum(p.shape[-2:]) for p in model.parameters() if p.dim() > 1)
    scores = layers * getattr(shape, "num_attention_heads", 1)
    # Packed rows are one row for attention without a kernel for documents.
    scores *= tokens if padding_free(config.train) else int(length)
    # Twice what lasts, for what optimizer and casts make of it in passing; half a GiB for what no
    # tensor shows.
    return 2 * need.total + GIB / 2 + tokens * (ACTIVATION_BYTES * widths + SCORE_BYTES * scores)


def _rehearsed(
    run: Preflight,
    config: RunConfig,
    padded: bool | None = None,
    arrays: Mapping[str, Tensor] | None = None,
) -> Prediction:
    """Predict a run, or one with another batch, which leaves the precision plan as it is."""
    machine = this_machine(run.device, run.processes)
    known = run.resolution, run.plan
    return predict_whole(config, machine, padded=padded, known=known, arrays=arrays)
