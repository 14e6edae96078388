"""The trainer of a rehearsal: the stock one of the recipe's method, for one step of synthetic rows.

It takes batches as they are, steps once on empty gradients, so that optimizer states exist, and
is recorded from the first forward on:

    mark                 what follows
    step                 forward of the micro-batch
    backward             its backward
    optimizer            norm, clipping, the update (from the end of backward on)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from finetune.config.methods import Method, method_of
from finetune.config.optimizers import chosen
from finetune.config.paths import TINY_LLAMA
from finetune.config.schema import RunConfig
from finetune.config.sft import fsdp_settings, sft_config, shortened
from finetune.config.train_keys import TrainerArguments
from finetune.data.by_trl import as_they_are
from finetune.estimator.changes import length_of
from finetune.estimator.trace.batch import DOCUMENTS, Batch, collated, synthetic_rows, tokens_of
from finetune.estimator.trace.fsdp_groups import VisitRecorder
from finetune.estimator.trace.stand_ins import settle_masters
from finetune.estimator.trace.trace import Phase, Recorder
from finetune.estimator.trace.writing import PROMPT, nothing, settle, writing
from finetune.precision.stored.masters import Masters
from finetune.training.helper.optimizer import low_bit
from finetune.training.trainer import reference_copied


def rehearsal_trainer(
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
    method = method_of(config.train)
    if method.writes:
        settle(train, method, micro_batches)
    only = config.model_copy(update={"train": train})
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    args = sft_config(only, folder, settings, on_cpu=True)
    given = TrainerArguments(args)
    if padded is None:
        padded = not given.packing

    made = [PROMPT] if method.writes else synthetic_rows(given, padded=padded, documents=documents)
    rows, beside = as_they_are(Dataset.from_list(made)), dict[str, Any]()
    if method.reference and config.lora is None and not given.precompute_ref_log_probs:
        beside["ref_model"] = deepcopy(model)
    if method.rewarded:
        beside["reward_funcs"] = [nothing for _ in config.train.reward_funcs or [""]]
    if teacher is not None:
        beside["teacher_model"] = teacher
    with reference_copied(method, model):
        trainer: Any = _recorded(method)(
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
    trainer.batches = [collated(rows, trainer.data_collator)]
    trainer.tokens = tokens_of(trainer.batches[0])
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


def _recorded(method: Method) -> type[Any]:
    class RehearsalTrainer(method.trainer_class):
        """Recorded trainer that takes batches as they are and starts at the end of step one."""

        batches: list[Batch]
        tokens: int
        answer = generations = 0
        micro_batches: int
        recorder: Recorder
        visits: VisitRecorder
        masters: Masters | None = None
        unread: set[Tensor]

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
            # Gradients of masters go elsewhere.
            groups = (group["params"] for group in optimizer.param_groups)
            self.unread = {p for group in groups for p in group if id(p) not in buffers}
            for p in self.unread:
                p.register_post_accumulate_grad_hook(self.unread.discard)
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
            for p in self.unread:  # no gradient has come, in any step: there are no states either
                states: dict[str, Any] = self.optimizer.state[p]  # pyright: ignore
                held = [x for x in (p.grad, *states.values()) if isinstance(x, Tensor)]
                for storage in self.recorder.storages_of(held):
                    storage.unread = True
                p.grad = None
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
