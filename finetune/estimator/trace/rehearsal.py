"""Rehearsal of a run: one step of its own trainer on tensors without memory.

Memory and time are decided by code that should not be modeled a second time: Transformers' layers,
PEFT's adapters, TRL's loss, Accelerate's autocast, the optimizer, our FP8 layers. So that code
runs. The model is made on the meta device with its adapters, gets fake parameters, is converted
by the target device's plan and trained by the stock trainer of its method for one step on a
synthetic batch of the maximum size. So the loss of DPO or KTO is TRL's own, with the reference that
it compares with: a copy of the model, or the model without its adapters. A method whose rows the
model writes begins with a generation (`finetune.estimator.trace.writing`). Packed rows consist of
full documents (see `DOCUMENTS`); other rows differ by one token of padding: the longest decides the
peak, and the difference makes Transformers pass a mask, at a cost.

The optimizer has stepped once before, on empty gradients, so its states exist as from the second
step on. With gradient accumulation the gradients stay too, as for every micro-batch but the first.

With FSDP2 (`sharded`), layers compute with weights in the gathered dtype and without autocast, as
in Accelerate; `finetune.estimator.memory.sharding` adds the memory of sharding from the visits of
the parameter groups.

Not rehearsed: verification in the first steps, training-health logs, evaluation, saving.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from finetune.config.methods import TEACHER, Method, arguments, method_of
from finetune.config.optimizers import chosen
from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import RunConfig
from finetune.config.sft import fsdp_settings, padding_free, settings_in, sft_config, shortened
from finetune.config.train_keys import TrainerArguments
from finetune.data.by_trl import as_they_are
from finetune.errors import FinetuneError, RehearsalError, first_line
from finetune.estimator.changes import length_of
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
from finetune.estimator.trace.stand_ins import (
    SteadyScale,
    as_four_bit,
    casts_to_fuse,
    clip_in_update,
    engine_maker,
    four_bit_weights,
    masters_apart,
    paged_states,
    settle_masters,
    store_base,
    torchao_updates,
)
from finetune.estimator.trace.trace import Phase, Recorder, Trace, layer_of
from finetune.estimator.trace.writing import PROMPT, nothing, settle, writing, written_beside
from finetune.hardware.device import Device, generators, starts_triton
from finetune.hardware.requirements import Resolution, compiles
from finetune.precision import convert
from finetune.precision.model.plan import PrecisionPlan
from finetune.precision.planner import plan as make_plan
from finetune.precision.stored.masters import Master, Masters
from finetune.precision.stored.trained import TrainedBackend
from finetune.storage.pretrained import load_shape
from finetune.training.helper import session
from finetune.training.helper.compute_types import AUTOCAST
from finetune.training.helper.optimizer import low_bit
from finetune.training.helper.references import References, layers_of
from finetune.training.model import (
    VARLEN,
    is_published_fp8,
    meta_model,
    resolve_attention,
    teacher_of,
)
from finetune.training.run.preflight import check_settings

DOCUMENTS = 8
"""Documents per packed row, where a mask keeps them apart: then their number costs nothing. Where
they cost only themselves, one fills its row, which is the most that it can take.
"""


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


def rehearse(
    config: RunConfig,
    device: Device,
    resolution: Resolution,
    *,
    layers: int | None = None,
    padded: bool | None = None,
    sharded: bool = False,
    plan: PrecisionPlan | None = None,
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
            trainer = _trainer(
                *(model, config, Path(folder), teacher), padded=padded, documents=documents
            )
        # Transformer Engine multiplies on GPUs alone, so a stand-in with its allocations does.
        if resolution.precision.engine.owns_weights:
            compiled = compiles(resolution.precision, device)
            engine = engine_maker(cast(Any, device.capability), compiled=compiled)  # a GPU's
            stack.enter_context(replaced([(convert, "make_backend", engine)]))
        hardware: Any = {"hardware": bool(device.has_fp8), "triton": starts_triton()}
        conversion = convert.apply(model, plan, **hardware)
        stack.callback(conversion.revert)
        reference: Any = getattr(trainer, "ref_model", None)
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
        if conversion.backend is not None:
            conversion.backend.begin_step()  # the first, which delayed scaling begins differently
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
            batch = _tensors(trainer.batches)
            waiting = [x.clone() for _ in range(trainer.micro_batches - 1) for x in batch]
        trainer.recorder = Recorder(
            model, [*batch, *waiting], beside=[other for other, _ in beside]
        )
        if isinstance(conversion.backend, TrainedBackend):
            trainer.masters = conversion.backend.masters
            # Nobody writes to a master between steps, and these have no numbers to compare.
            stack.enter_context(replaced([(Master, "_now", lambda _: (0, 0, []))]))
            if on_cuda:
                stack.enter_context(masters_apart(trainer.masters, trainer.recorder))
        if optimizer.paged and on_cuda:
            stack.enter_context(paged_states(trainer.recorder))
        groups = model_groups(model, layers=fsdp_settings(config.train).layers, stored=stored)
        trainer.visits = VisitRecorder(model, groups, trainer.recorder.trace)
        engine: Any = conversion.frozen or (conversion.backend if trainer.masters else None)
        fuses_casts = engine is None or not engine.how.own_cast
        if fuses_casts and compiles(resolution.precision, device):
            stack.enter_context(casts_to_fuse(trainer.recorder, model))
        with trainer.recorder:
            trainer.train()
    return Rehearsal(
        trace=trainer.recorder.trace,
        tokens=trainer.tokens,
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, trains in sizes if trains),
        groups=trainer.visits.groups,
        visits=trainer.visits.visits,
        accumulates=trainer.micro_batches > 1,
        compiles=any(layer_of(op.module) for op in trainer.recorder.trace.ops),
        answer=trainer.answer,
        generations=trainer.generations,
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


@contextlib.contextmanager
def isolated_process() -> Iterator[None]:
    """Run the block as a single process, and restore the state that the whole process shares.

    Training arguments reset Accelerate's global state to a CPU, which a trainer at work would then
    read. The environment of torchrun or `accelerate launch` would make the rehearsal join the run's
    processes, or create their group too early.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # Accelerate (1.15) has one dictionary for all instances of a class (the Borg pattern).
    shared = [cls._shared_state for cls in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    python, numbers = random.getstate(), np.random.get_state()
    launched = {key: os.environ[key] for key in list(os.environ) if _LAUNCHED.fullmatch(key)}
    for state in shared:
        state.clear()
    for key in launched:
        del os.environ[key]
    try:
        # A run that is checked before it trains must draw the numbers that it would have drawn
        # without.
        with torch.random.fork_rng(generators()), session.aside():
            yield
    finally:
        for key in [key for key in os.environ if _LAUNCHED.fullmatch(key)]:
            del os.environ[key]
        os.environ.update(launched)
        random.setstate(python)
        np.random.set_state(numbers)
        for state, values in zip(shared, before, strict=True):
            state.clear()
            state.update(values)


_LAUNCHED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_\w+"
    r"|ACCELERATE_\w+|FSDP_\w+|TORCHELASTIC_\w+"
)
"""Launcher variables that describe the process group and its sharding."""


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


def _trainer(
    model: nn.Module,
    config: RunConfig,
    folder: Path,
    teacher: nn.Module | None = None,
    *,
    padded: bool | None = None,
    documents: int = DOCUMENTS,
) -> Any:
    """The recipe's trainer over synthetic rows, for one step, saving nothing."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    train = shortened(config.train, 1, _NOT_REHEARSED)
    # One micro-batch is rehearsed; how many there are is arithmetic (`speed.timing`).
    micro_batches = int(train.pop("gradient_accumulation_steps", 1))
    if config.train.fsdp and fsdp_settings(config.train).checkpointing:
        train["gradient_checkpointing"] = True  # FSDP's own, of the same layers
    method, own = method_of(config.train), contextlib.nullcontext()
    if method.writes:
        settle(train, method, micro_batches)
        own = written_beside(method, model)
    only = config.model_copy(update={"train": train})
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    args = sft_config(only, folder, settings, on_cpu=True)
    given = TrainerArguments(args)
    if padded is None:
        padded = not given.packing

    made = [PROMPT] if method.writes else _rows(given, padded=padded, documents=documents)
    rows, beside = as_they_are(Dataset.from_list(made)), dict[str, Any]()
    if method.reference and config.lora is None and not given.precompute_ref_log_probs:
        beside["ref_model"] = deepcopy(model)
    if method.rewarded:
        beside["reward_funcs"] = [nothing for _ in config.train.reward_funcs or [""]]
    if teacher is not None:
        beside["teacher_model"] = teacher
    with own:
        trainer: Any = _rehearsal_trainer(method)(
            model=model,
            args=args,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(TINY_LLAMA),
            **beside,
        )
    if "ref" in getattr(model, "peft_config", ()):
        cast(Any, model).delete_adapter("ref")  # as in training
    if chosen(config.train).by_torchao:
        trainer.optimizer_cls_and_kwargs = low_bit.class_and_kwargs(config.train, args)
    trainer.remove_callback(PrinterCallback)
    # Accelerate would move what it prepares, which fake tensors cannot do.
    trainer.accelerator.device_placement = False
    trainer.place_model_on_device = False  # fake parameters cannot be moved
    trainer.accelerator.free_memory = lambda *objects: objects  # nothing to free, and it takes long
    trainer.micro_batches = micro_batches
    if method.writes:
        trainer.begin(length_of(config), config.train.max_completion_length, padded=padded)
        return trainer
    with unset_fake_temporarily():
        found = trainer.data_collator(list(rows))
        trainer.batches = [{k: v for k, v in found.items() if isinstance(v, Tensor | int)}]
    trainer.tokens = sum(x.numel() for name, x in trainer.batches[0].items() if name in _TRAINED)
    return trainer


_NOT_REHEARSED = (
    "assistant_only_loss",
    "completion_only_loss",
    "fsdp",
    "fsdp_config",
    "tf32",
    "use_liger_kernel",
)
"""Settings that need values, processes, a GPU or an extra here."""


def _rows(args: TrainerArguments, *, padded: bool, documents: int) -> list[dict[str, Any]]:
    """A batch of the maximum length; with padding only the first row has it.

    With packing a row is filled by documents of equal length. Each has the columns of all methods,
    as their trainers make them of rows of any form.
    """
    rows = []
    ones = [1] * args.max_length  # one list for all rows: there may be many
    shorter = ones[:-1] if padded else ones
    for i in range(args.per_device_train_batch_size):
        # The first row alone has the full length: the longest decides the shape of a padded batch.
        ids = shorter if i else ones
        length, row = len(ids), {**dict.fromkeys(_COLUMNS, ids), "label": i % 2 == 0}
        row |= {"prompt_ids": ids[:0]}
        if args.packing:
            count = min(documents, length)
            lengths = [length // count] * count
            # What does not divide goes to the last document, so that the row is full.
            lengths[-1] += length - sum(lengths)
            row["seq_lengths"] = lengths
        rows.append(row)
    return rows


_TRAINED = ("input_ids", "chosen_input_ids", "rejected_input_ids")
"""Inputs of a model in batches of any method, whose tokens count."""
_COLUMNS = (
    "input_ids", "labels", "completion_ids", "KL_completion_ids", "chosen_ids", "rejected_ids",
    *(f"{of}_{what}" for of in ("prompt", "chosen", "rejected") for what in
      ("input_ids", "attention_mask", "labels")),
)  # fmt: skip


def _rehearsal_trainer(method: Method) -> type[Any]:
    class RehearsalTrainer(method.trainer_class):
        """Recorded trainer that takes batches as they are and starts at the end of step one."""

        batches: list[Any]
        tokens: int
        answer = generations = 0
        micro_batches: int
        recorder: Recorder
        visits: VisitRecorder
        masters: Masters | None = None

        def get_train_dataloader(self) -> Any:
            return self.batches

        def create_optimizer(self, *args: Any) -> Any:
            optimizer = super().create_optimizer(*args)
            if low_bit.steps_by_parts(optimizer):
                from finetune.training.helper.optimizer.adamw import Update

                Update(optimizer).attach()
            return optimizer

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            recorder: Recorder = self.recorder
            optimizer: Any = self.optimizer.optimizer  # pyright: ignore[reportOptionalMemberAccess]
            each = self.masters.each if self.masters is not None else ()
            buffers = {id(one.parameter): one.gradient_buffer for one in each}
            with recorder.during("optimizer"):
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        # Empty gradients are enough for a step that makes states of the right
                        # shapes.
                        p.grad = buffers[id(p)]() if id(p) in buffers else torch.empty_like(p)
                recorder.sort_gradients()
                optimizer.step()
                # With accumulation a micro-batch finds gradients of the ones before, and adds to
                # them.
                if self.micro_batches == 1:
                    optimizer.zero_grad()
            if self.masters is not None:
                with recorder.during("load"):
                    settle_masters(self.masters, optimizer, recorder)
            recorder.mark("step")
            _record(self.accelerator, "backward", recorder, "backward", then=self._begin_update)
            _record(self.optimizer, "step", recorder, "optimizer")
            self.visits.begin()
            return super().training_step(*args, **kwargs)

        def _begin_update(self) -> None:
            """Count what follows, from the norm of gradients on, once per optimizer step."""
            self.visits.move("optimizer")
            # From the end of backward on: the norm and clipping come before `optimizer.step`.
            self.recorder.phase = "optimizer"

    return writing(RehearsalTrainer) if method.writes else RehearsalTrainer


def _record(
    owner: Any,
    name: str,
    recorder: Recorder,
    phase: Phase,
    then: Callable[[], Any] = lambda: None,
) -> None:
    """Make the recorder enter a phase while `owner.name` runs, and call `then` after it."""
    function = getattr(owner, name)

    @functools.wraps(function)  # learning rate schedules mark a step that they have seen
    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder.mark(phase)
        recorder.sort_gradients()
        with recorder.during(phase):
            result = function(*args, **kwargs)
        then()
        return result

    setattr(owner, name, recorded)


def _tensors(batches: list[dict[str, Any]]) -> list[Tensor]:
    """Tensors of batches; rows that the model writes are none yet."""
    found = (value for batch in batches if isinstance(batch, dict) for value in batch.values())
    return [value for value in found if isinstance(value, Tensor)]
