"""The estimator's word in a run: refused before it loads, and said beside what was measured.

Three questions, each dearer and nearer to the truth than the one before:

    lower bound     weights, gradients and optimizer states, which have to be there whatever else
                    happens (activations come on top): a sum over the sketch, at once
    preview         the closed form; where it leaves half of the free memory there is nothing to ask
    rehearsal       a step on tensors without memory, some seconds, before minutes of loading would
                    end in a failure

After a run, what was measured stands beside what is predicted for the very batch that it was
measured with, which rows shorter than `train.max_length` make smaller than the largest possible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig, Storage
from finetune.errors import FinetuneError, MemoryShortError, PrecisionError, RehearsalError
from finetune.estimator.closed_form.preview import preview
from finetune.estimator.closed_form.static_memory import Parameters, StaticMemory, static_memory
from finetune.estimator.knobs import changes
from finetune.estimator.measure import Measured, changed, measure
from finetune.estimator.place import Place
from finetune.hardware.device import GIB, Device, available_gib
from finetune.hardware.gpus import find_gpu
from finetune.precision.layers import linear_shape
from finetune.storage.sizes import fp8_bytes, stored_bytes
from finetune.training.memory_meter import Batch
from finetune.training.model import is_published_fp8
from finetune.training.preflight import Preflight, processes

if TYPE_CHECKING:
    from torch import nn

    from finetune.precision.planner import PrecisionPlan

ROOM = 2
"""How many times the preview's memory has to be free for a rehearsal to be of no use."""
KINDS_IN_BOUND = ("base", "weights", "optimizer", "method")
"""Kinds of changes that lessen what the lower bound counts."""


class MemoryForecast:
    """A run's memory before and after it: `finetune.training.preflight.Forecast`."""

    def explain(
        self,
        error: PrecisionError,
        config: RunConfig,
        device: Device,
        model: nn.Module,
        plan: PrecisionPlan,
    ) -> PrecisionError:
        """Add to the error of a precision that cannot be had here that memory is short, too."""
        short = why_too_small(bound_of(config, model, plan), device)
        if not short:
            return error
        return type(error)(
            error.what,
            where=error.where,
            why=f"{error.why}. Besides, {short}",
            fix=f"an FP8 GPU with enough memory; or here: {advice(config, device)}",
        )

    def check(self, run: Preflight) -> None:
        """Refuse a run that cannot fit into the memory that is free now.

        One that cannot be rehearsed is let through.

        Raises:
            MemoryShortError: it cannot fit, with what to change.
        """
        config, device = run.config, run.device
        need = bound_of(config, run.sketch, run.plan)
        short = why_too_small(need, device)
        if short:
            raise _does_not_fit(config, device, need.parameters, why=short)
        free = available_gib(device)
        quick = preview(config, gpus=run.processes)
        if quick is not None and quick.peak_gib * ROOM < free:
            return
        try:
            expected = _rehearsed(_Question.of(run, config))
        except RehearsalError:  # of which nothing is known is not refused
            return
        held = expected.footprint
        if held.fit(int(free * GIB)) == "does not fit":
            raise _does_not_fit(
                config,
                device,
                expected.parameters,
                where=f"the peak, in {held.highest}"
                + (f", most of it in passing in {held.owner}" if held.owner else ""),
                why=f"a step holds {(held.allocated + held.outside) / GIB:.1f} GiB; {device.name} "
                f"has {free:.1f} GiB free",
            )

    def predicted(self, run: Preflight, batch: Batch | None) -> dict[str, Any]:
        """Predict the memory of the batch that was measured, as the receipt has it.

        Returns:
            `predicted_gib`, `predicted` (how, or why not) and on GPUs `predicted_reserved_gib`;
            empty without a batch.
        """
        if batch is None:
            return {}
        rows, length, padded = batch
        train = run.config.train
        if train.get("packing") and rows == 1:  # of all, but with `packing_strategy: wrapped`
            rows = int(train.get("per_device_train_batch_size", 1))
            length //= rows
        shape = {"per_device_train_batch_size": rows, "max_length": length}
        same = changed(run.config, train=shape)
        try:
            found = _rehearsed(_Question.of(run, same, padded=padded)).footprint
        except FinetuneError as error:
            return {"predicted": f"not predicted: {error.what}"}
        values: dict[str, Any] = {
            "predicted_gib": round(found.allocated / GIB, 6),
            "predicted": f"by rehearsal, for a batch of {rows} x {length} tokens"
            + (", some of them padding" if padded else ""),
        }
        if run.device.kind == "cuda":
            values["predicted_reserved_gib"] = round(found.reserved / GIB, 6)
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
        fix=advice(config, device) + force,
    )


def advice(config: RunConfig, device: Device) -> str:
    """What to change when a run does not fit, unmeasured: what each frees is not known here."""
    steps = []
    for change in changes(config, device):
        if change.kind in KINDS_IN_BOUND:
            hint = " (adapters: the recipe's _lora_ sibling)" if change.kind == "method" else ""
            steps.append(" ".join(change.typed) + hint)
    steps += ["shard over several GPUs (train.fsdp)", "a smaller model (`python -m finetune ls`)"]
    steps.append("`python -m finetune tiny_lora_fp8` runs anywhere")
    return "; ".join(steps)


# -------------------------------------------------------------------------------------- lower bound


def bound(
    model: nn.Module,
    plan: PrecisionPlan,
    train: dict[str, Any],
    *,
    shards: int = 1,
    storage: Storage | None = None,
) -> StaticMemory:
    """What a run of a model holds at least, per device; the model may be on the meta device.

    Args:
        model: with its adapters attached.
        plan: its precision plan, which says what is held in FP8.
        train: the recipe's `train` section; only `optim` matters.
        shards: processes that share one copy of everything (FSDP).
        storage: how the weights of the base will be held (`model.storage`), if not as `model`
            has them.
    """
    from torch import nn

    from finetune.storage.loading import stored_layers

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    stored: dict[int, float] = {}  # bytes of weights that are held in few bits
    for layer in stored_layers(model, storage).values():
        shape = linear_shape(layer)
        assert storage is not None
        assert shape is not None
        stored[id(layer.weight)] = stored_bytes(storage, *shape)
    for row in plan.stored:
        weight: Any = model.get_submodule(row.name).weight
        stored[id(weight)] = fp8_bytes(*row.shape, None if row.stored == "row" else 1)
    tensors = (
        Parameters(
            tuple(p.shape),
            p.element_size(),
            p.requires_grad,
            embedding=id(p) in embeddings,
            stored=stored.get(id(p)),
        )
        for p in model.parameters()
    )
    return static_memory(tensors, chosen(train), shards)


def bound_of(config: RunConfig, model: Any, plan: PrecisionPlan) -> StaticMemory:
    """The bound of a run, of one of its processes.

    Args:
        config: the run.
        model: its sketch (`finetune.training.model.sketch`).
        plan: of that sketch.
    """
    storage = config.model.storage
    if storage is None and is_published_fp8(model.config):
        storage = "fp8"
    shards = processes() if config.train.get("fsdp") else 1
    return bound(model, plan, config.train, shards=shards, storage=storage)


def why_too_small(need: StaticMemory, device: Device) -> str:
    """One sentence when the bound exceeds what is free, else an empty one."""
    free = available_gib(device)
    if need.total / GIB <= free:
        return ""
    return f"it needs at least {need}; {device.name} has {free:.1f} GiB free"


# ---------------------------------------------------------------------------------------- rehearsal


@dataclass(frozen=True)
class _Question:
    """A run at a place; two that memory cannot tell apart are equal.

    Attributes:
        text: everything that memory depends on.
        padded: rows differ in length.
        run: what is known of it; the precision plan does not depend on the batch.
        config: of the run, or with another batch.
    """

    text: str
    padded: bool | None
    run: Preflight = field(compare=False)
    config: RunConfig = field(compare=False)

    @classmethod
    def of(cls, run: Preflight, config: RunConfig, *, padded: bool | None = None) -> _Question:
        without = ("learning_rate", "seed", "max_steps", "num_train_epochs", "logging_steps")
        train = {k: v for k, v in config.train.items() if k not in without}
        facts = config.model_dump(exclude={"data", "eval"}) | {"train": train}
        return cls(f"{run.processes} {run.device} {facts}", padded, run, config)


@functools.lru_cache(maxsize=32)
def _rehearsed(question: _Question) -> Measured:
    """Measure; runs of one process often ask the same."""
    run = question.run
    place = here(run.device, run.processes)
    known = (run.resolution, run.plan)
    return measure(question.config, place, padded=question.padded, known=known)


def here(device: Device, processes: int = 1) -> Place:
    """This machine, as a place to train at."""
    return Place(device, find_gpu(device), processes, here=True)
