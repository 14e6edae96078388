"""Rehearsal of a run: one step of its own trainer on tensors without memory.

Memory and time are decided by code that should not be modeled a second time: Transformers' layers,
PEFT's adapters, TRL's loss, Accelerate's autocast, the optimizer, our FP8 layers. So that code
runs. The model is made on the meta device with its adapters, gets fake parameters, is converted
by the target device's plan and trained by the stock trainer of its method (`.rehearsal_trainer`)
for one step on a synthetic batch of the maximum size (`.batch`). So the loss of DPO or KTO is
TRL's own, with the reference that it compares with: a copy of the model, or the model without its
adapters. A method whose rows the model writes begins with a generation (`.writing`).

The optimizer has stepped once before, on empty gradients, so its states exist as from the second
step on. With gradient accumulation the gradients stay too, as for every micro-batch but the first.

With FSDP2 (`sharded`), layers compute with weights in the gathered dtype and without autocast, as
in Accelerate; `finetune.estimator.memory.sharding` adds the memory of sharding from the visits of
the parameter groups.

Not rehearsed: verification in the first steps, training-health logs, evaluation, saving.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from finetune.config.methods import TEACHER, arguments, method_of
from finetune.config.optimizers import chosen
from finetune.config.schema import RunConfig
from finetune.config.sft import fsdp_settings, padding_free, settings_in
from finetune.errors import FinetuneError, RehearsalError, first_line
from finetune.estimator.trace.batch import DOCUMENTS, copied, tensors_of
from finetune.estimator.trace.fake_cuda import (
    KERNELS,
    choose_attention,
    on_gpu,
    replaced,
    to_fake,
    without_memory,
)
from finetune.estimator.trace.fsdp_groups import (
    GroupVisit,
    ModelGroups,
    VisitRecorder,
    cast_to,
    model_groups,
)
from finetune.estimator.trace.images import with_images
from finetune.estimator.trace.isolation import isolated_process
from finetune.estimator.trace.rehearsal_trainer import rehearsal_trainer
from finetune.estimator.trace.stand_ins import (
    SteadyScale,
    as_four_bit,
    casts_to_fuse,
    clip_in_update,
    engine_maker,
    four_bit_weights,
    masters_apart,
    paged_states,
    store_base,
    torchao_updates,
)
from finetune.estimator.trace.trace import Recorder, Trace, layer_of
from finetune.hardware.device import Device, starts_triton
from finetune.hardware.requirements import Resolution, compiles
from finetune.precision import convert
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.planner import plan as make_plan
from finetune.precision.stored.masters import Master
from finetune.precision.stored.trained import TrainedEngine
from finetune.storage.pretrained import load_shape
from finetune.training.helper.compute_types import AUTOCAST
from finetune.training.helper.references import References, layers_of
from finetune.training.model import (
    VARLEN,
    is_published_fp8,
    meta_model,
    resolve_attention,
    teacher_of,
)
from finetune.training.run.preflight import check_settings


@dataclass(frozen=True, eq=False)  # one is like no other: caches go by identity
class Rehearsal:
    """One rehearsed step of a run.

    Attributes:
        trace: forward and backward of a micro-batch, and the optimizer's step.
        tokens: tokens of a micro-batch on one device.
        parameters, trainable: element counts.
        groups: groups of parameters that FSDP2 would gather together.
        visits: when each group computes; `step` begins with the first.
        accumulates: gradients of several micro-batches are summed.
        compiles: it has layers that `torch.compile` takes, with numbers of their own.
        answer: tokens of an answer that the model writes first, 0 if it writes none.
        generations: how often it writes in an optimizer step.
        image_tokens: tokens of a row that are of images.
    """

    trace: Trace
    tokens: int
    parameters: int
    trainable: int
    groups: ModelGroups
    visits: list[GroupVisit]
    accumulates: bool
    compiles: bool = True
    answer: int = 0
    generations: float = 0.0
    image_tokens: int = 0


def rehearse(
    config: RunConfig,
    device: Device,
    resolution: Resolution,
    *,
    layers: int | None = None,
    padded: bool | None = None,
    sharded: bool = False,
    plan: PrecisionPlan | None = None,
    arrays: Mapping[str, Tensor] | None = None,
) -> Rehearsal:
    """Run one step of a recipe on tensors without memory.

    Args:
        device: target device; its kind decides which code path libraries take.
        resolution: precision of the run on that device.
        layers: number of first layers to rehearse, all by default. Fewer are faster, and show the
            cost of one more.
        padded: rows differ in length, so attention gets a mask; default: unless packed.
        sharded: with weights as FSDP2 gathers them.
        plan: plan of the model on the meta device, if already made.
        arrays: of the images of a batch, those on meta without values; default: of images as the
            run's settings say (`finetune.estimator.images`).

    Raises:
        FinetuneError: any error of the run itself: no such model, adapters that match no layer.
        RehearsalError: the model's code depends on values.
    """
    optimizer, on_cuda = chosen(config.train), device.kind == "cuda"
    before, reading = None, contextlib.nullcontext
    if config.model.storage == "nf4":
        before, reading = as_four_bit, four_bit_weights
    # DoRA reads a base's weights when it is attached, which bitsandbytes could not dequantize on
    # meta.
    with reading():
        model: nn.Module = meta_model(config, before, layers=layers)
        teacher = _meta_teacher(config, layers)
    attention = resolve_attention(config, model, device)
    if plan is None or before is not None:  # the rows of a four-bit base say so
        plan = check_settings(config, model, resolution.precision)
    gathered_as = AUTOCAST[resolution.precision.compute] if sharded else None
    stored = cast_to(model, gathered_as) if gathered_as is not None else {}
    with (
        _rehearsal_errors(config),
        isolated_process(),
        without_memory(),
        reading(),
        ExitStack() as stack,
    ):
        stack.enter_context(warnings.catch_warnings())
        # torch 2.13 warns of each pointer of a fake tensor that is read, in passing, by many
        # libraries.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        for each in filter(None, (model, teacher)):
            to_fake(each)
        if on_cuda:
            stack.enter_context(on_gpu(device.capability or (9, 0)))
        name = attention.implementation
        # Rows with padding have no boundaries of documents, which varlen kernels take.
        masked = name == VARLEN and not padding_free(config.train)  # as padded rows run
        choose_attention(model, "sdpa" if masked else name, device.capability or (9, 0))
        # Before the base is stored: packed codes have half as many elements.
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        published = is_published_fp8(cast(Any, model).config)  # left there if codes are held
        store_base(model, "fp8" if published else config.model.storage)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        documents = 1 if name in KERNELS else DOCUMENTS
        with replaced([(nn.Module, "to", lambda module, *_, **__: module)]):  # they cannot move
            trainer = rehearsal_trainer(
                model, config, Path(folder), teacher, padded=padded, documents=documents
            )
        image_tokens = with_images(trainer, model, config, arrays)
        # Transformer Engine multiplies on GPUs alone, so a stand-in with its allocations does.
        if resolution.precision.engine.owns_weights:
            compiled = compiles(resolution.precision, device)
            engine = engine_maker(cast(Any, device.capability), compiled=compiled)  # a GPU's
            stack.enter_context(replaced([(convert, "make_engine", engine)]))
        conversion, beside = _converted(
            stack, (model, getattr(trainer, "ref_model", None), teacher), plan, resolution, device
        )
        if conversion.engine is not None:
            conversion.engine.begin_step()  # the first, which delayed scaling begins differently
        if optimizer.by_torchao:
            stack.enter_context(torchao_updates(kernels=on_cuda))
            # With a loss scale gradients are unscaled before they are clipped, so the update cannot
            # do both.
            if on_cuda and config.precision.compute != "fp16":
                trainer.accelerator.clip_grad_norm_ = clip_in_update
        if config.precision.compute == "fp16":  # which Accelerate leaves out on a CPU
            trainer.accelerator.native_amp, trainer.accelerator.scaler = True, SteadyScale()
        if gathered_as is not None:  # which Accelerate leaves to FSDP2
            trainer.accelerator.native_amp = False
        # Real ids: their values decide what a collator and a loss do.
        with unset_fake_temporarily():  # the trainer fetches all micro-batches before the first
            batch = tensors_of(trainer.batches)
        waiting = [copied(x) for _ in range(trainer.micro_batches - 1) for x in batch]
        trainer.recorder = Recorder(model, [*batch, *waiting], beside=beside)
        if isinstance(conversion.engine, TrainedEngine):
            trainer.masters = conversion.engine.masters
            # Nobody writes to a master between steps, and these have no numbers to compare.
            stack.enter_context(replaced([(Master, "_now", lambda _: (0, 0, []))]))
            if on_cuda:
                stack.enter_context(masters_apart(trainer.masters, trainer.recorder))
        if optimizer.paged and on_cuda:
            stack.enter_context(paged_states(trainer.recorder))
        groups = model_groups(model, layers=fsdp_settings(config.train).layers, stored=stored)
        trainer.visits = VisitRecorder(model, groups, trainer.recorder.trace)
        engine: Any = conversion.frozen or (conversion.engine if trainer.masters else None)
        fuses_casts = engine is None or not engine.how.own_cast
        if fuses_casts and compiles(resolution.precision, device):
            stack.enter_context(casts_to_fuse(trainer.recorder, model))
        with trainer.recorder:
            trainer.train()
    return Rehearsal(
        trace=trainer.recorder.trace.only(lambda storage: not storage.unread),
        tokens=trainer.tokens,
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, trains in sizes if trains),
        groups=trainer.visits.groups,
        visits=trainer.visits.visits,
        accumulates=trainer.micro_batches > 1,
        compiles=any(layer_of(op.module) for op in trainer.recorder.trace.ops),
        answer=trainer.answer,
        generations=trainer.generations,
        image_tokens=image_tokens,
    )


@contextlib.contextmanager
def _rehearsal_errors(config: RunConfig) -> Iterator[None]:
    """Convert any error of third-party code on fake tensors into one of ours."""
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        said = first_line(error)
        raise RehearsalError(
            f"{config.model.name} cannot be rehearsed: {said}",
            where="the rehearsal of a training step, on tensors without memory",
            why="the trainer takes no such settings, or code reads values, which are not there",
            fix=settings_in(str(error), config.train)
            + "; or train it: its receipt has the measured memory",
        ) from error


def _converted(
    stack: ExitStack,
    models: tuple[nn.Module, nn.Module | None, nn.Module | None],
    plan: PrecisionPlan,
    resolution: Resolution,
    device: Device,
) -> tuple[convert.Conversion, list[nn.Module]]:
    """Convert the model, and those that compute beside it.

    Args:
        stack: what undoes it.
        models: the model that trains, its reference, its teacher.
    """
    model, reference, teacher = models
    hardware: Any = {"hardware": bool(device.has_fp8), "triton": starts_triton()}
    conversion = convert.apply(model, plan, **hardware)
    stack.callback(conversion.revert)
    beside = [(reference, plan)] if reference is not None else []
    if teacher is not None:
        asked = References.precision_of(resolution.precision, hardware=bool(device.has_fp8))
        beside.append((teacher, make_plan(teacher, asked)))
    for other, its in beside:
        # As `training.helper.references` decides it: a model beside that is as the policy is
        # computes in FP8, too.
        if layers_of(its) == layers_of(plan) or its.precision.eval == "fp8":
            made = convert.apply(other, its, **hardware)
            made.follows = lambda: True  # it computes as the policy does, in FP8
            stack.callback(made.revert)
    return conversion, [other for other, _ in beside]


def _meta_teacher(config: RunConfig, layers: int | None) -> nn.Module | None:
    """The model that a method learns from; one as deep as the policy with as few layers."""
    if TEACHER not in arguments(method_of(config.train)):
        return None
    model = teacher_of(config)
    shapes = (load_shape(each).get_text_config(decoder=True) for each in (config.model, model))
    # A line through two depths is right for both only if both models grow by the same layers.
    alike = len({shape.num_hidden_layers for shape in shapes}) == 1
    only = config.model_copy(update={"model": model, "lora": None})
    return meta_model(only, layers=layers if alike else None)
