"""`HealthMonitor`: a callback that logs training health, and stops a nonfinite run.

It wraps the trainer's `training_step`, since callbacks see neither the loss nor the inputs of a
micro-batch.

*Every `every` steps* it observes one step: the operands of its first micro-batch (`operands`), the
optimizer's moments and the update (`moments`). The row goes through the trainer's log to
`metrics.jsonl` and every tracker; a bad reading is a warning, once per group and kind.

*Every step* it checks losses and gradients before the optimizer uses them, and weights before they
are saved; a nonfinite value ends the run (`finiteness`).

*At the start* it says how many rows several processes train on once more, and rejects unequal
numbers of batches (`repeats`) and packed rows whose documents see each other (`isolation`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from finetune.config.train_keys import TrainerArguments
from finetune.data.repeats import refuse_no_batch, refuse_uneven, repeats_line
from finetune.errors import in_words
from finetune.hardware.unpromised import stands
from finetune.precision.convert import conversion_of
from finetune.precision.model.tree import named_trainable
from finetune.precision.settings import PrecisionConfig
from finetune.runs.progress import OPERANDS
from finetune.training.health.finiteness import LEAST_SCALE, Finiteness
from finetune.training.health.first_batches import check_first_batches
from finetune.training.health.isolation import refuse_leaks
from finetune.training.health.learning_rate import LEAST_SHARE, reached
from finetune.training.health.moments import (
    SummedRatio,
    gradient_snr,
    ratio_row,
    sample,
    update_ratio,
)
from finetune.training.health.operands import GroupSums, OperandWatch, health_row, merge_sums
from finetune.training.helper import session
from finetune.training.helper.host_time import shortened
from finetune.training.helper.replacing import replaced

Ratios = dict[str, SummedRatio]
OVERFLOW_WARNING = 0.01
"""Share of saturated values above which a group gets a warning: amax scaling leaves none."""
SNR_WARNING_DB = 15.0
"""Ratio below what common recipes have: Gaussian values read 31 dB in E4M3, 25 in E5M2, about 20 in
NVFP4 and 17 with its stochastic rounding."""


class HealthMonitor(TrainerCallback):
    """Logs health every `every` steps; ends a run whose loss or gradients are not finite.

        trainer.add_callback(HealthMonitor(trainer))

    Runs of `finetune.train` and of `setup_fp8_mixed_precision_training` have one already.

    Args:
        trainer: the `Trainer` it is added to.
        every: optimizer steps between health rows, 0 for none; default `precision.health_every`.
        say: called with each warning, one line; default `warnings.warn`.
    """

    def __init__(
        self, trainer: Any, every: int | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.trainer, self.every = trainer, every
        self._say = say or (lambda line: warnings.warn(in_words(line), stacklevel=3))
        self._undo = contextlib.ExitStack()
        self._warned: set[str] = set()
        self._period = 0
        self._due = False  # this step is observed
        self._first = True  # its next micro-batch is the first
        self._precision: PrecisionConfig
        self._watch: OperandWatch
        self._unwrapped: nn.Module
        self._finiteness: Finiteness
        self._before: dict[str, Tensor] = {}
        self._snr: Ratios = {}
        self._update: Ratios = {}
        self._scale = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # Unwrapping looks at every module for compiled ones, so it is done once.
        model: nn.Module = self.trainer.accelerator.unwrap_model(self.trainer.model)
        conversion = conversion_of(model)
        self._precision = conversion.plan.precision if conversion else PrecisionConfig()
        self._period = self._precision.health_every if self.every is None else self.every
        self._watch = OperandWatch(model, conversion)
        self.close()
        self._finiteness = Finiteness(self.trainer, model, conversion)
        self._unwrapped = model
        wrappers: dict[str, Any] = {"training_step": self._training_step}
        if stands("whole checkpoints"):
            wrappers["_save_checkpoint"] = self._save
        for name, wrapper in wrappers.items():
            wrapped = partial(wrapper, getattr(self.trainer, name))
            self._undo.enter_context(replaced(self.trainer, name, wrapped))
        self._undo.enter_context(shortened(self.trainer, model))
        loader, args = more.get("train_dataloader"), TrainerArguments(args)
        each = args.gradient_accumulation_steps
        # Whether compiling pays depends on how many micro-batches are left to run.
        if running := session.in_force():
            running.micro_batches = state.max_steps * each
        # Here, not before training: Accelerate has prepared model and loader by now, as they will
        # be used.
        refuse_leaks(self.trainer)
        check_first_batches(self.trainer)
        refuse_no_batch(loader, args)
        refuse_uneven(loader, args.max_steps * each if args.max_steps > 0 else float("inf"))
        line = repeats_line(loader, state.max_steps * each)
        if line and state.is_world_process_zero:
            self._warn_once("repeats", line)
        if (share := reached(self.trainer.lr_scheduler, state.max_steps)) < LEAST_SHARE:
            self._warn_once(
                "learning rate",
                f"the learning rate gets to {share:.0%} of its value in {state.max_steps:,} steps "
                "(fewer train.warmup_steps, or a share of the steps: train.warmup_steps=0.1)",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()
        self._finiteness.judge_weights(state.global_step)

    def close(self) -> None:
        """Restore the trainer's methods. Idempotent."""
        self._undo.close()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        running = session.in_force()
        proof = running.proof if running is not None else None
        # The first micro-step, whose GEMMs the proof counts, is not observed.
        witnessed = proof is not None and proof.is_open and not proof.layers
        is_due = self._period > 0 and (state.global_step + 1) % self._period == 0
        self._due, self._first = is_due and not witnessed, True

    def _training_step(
        self, plain: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        # One micro-batch of a step is enough: operands of the others have the same scales and
        # shapes.
        looks, self._first = self._due and self._first, False
        call = partial(plain, model, inputs, *args, **kwargs)
        with self._watch.watching() if looks else contextlib.nullcontext():
            loss = call()
        self._finiteness.note(loss)
        return loss

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        scaler = self.trainer.accelerator.scaler
        self._scale = scaler.get_scale() if scaler is not None else 0.0
        # Above the least scale torch's scaler skips the step by itself, which is how it finds its
        # scale.
        self._finiteness.judge_step(state.global_step + 1, gradients=self._scale <= LEAST_SCALE)
        if self._due:
            self._before = {name: sample(p) for name, p in named_trainable(self._unwrapped).items()}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        scaler = self.trainer.accelerator.scaler
        # Accelerate's flag for a skipped step misses fused optimizers, which skip inside.
        if not self._due or (scaler is not None and scaler.get_scale() < self._scale):
            return
        named = named_trainable(self._unwrapped)
        groups = {name: self._watch.groups[name.rpartition(".")[0]] for name in named}
        self._snr = gradient_snr(named, self.trainer.optimizer, groups)
        self._update = update_ratio(self._before, named, groups)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._before.clear()
        self._finiteness.forget()
        if self._due:
            self._log(control)

    def _save(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        self._finiteness.judge_weights(self.trainer.state.global_step)
        return plain(*args, **kwargs)

    def _log(self, control: TrainerControl) -> None:
        sums, snr, update = _of_all_processes(self._watch.sums, self._snr, self._update)
        row = health_row(sums) | ratio_row(snr, update)
        self._snr, self._update = {}, {}
        should_log = control.should_log
        # Bypass overrides of `log`: TRL's would reset the averages meant for its next own row.
        Trainer.log(self.trainer, row)
        # `Trainer.log` resets it, and the trainer's own row of this step would be lost.
        control.should_log = should_log
        if self.trainer.state.is_world_process_zero:
            self._warn_of(sums)

    def _warn_of(self, groups: GroupSums) -> None:
        for (group, operand), sums in sorted(groups.items()):
            share = sums.overflow / sums.elements if sums.elements else 0.0
            worst, layer = sums.worst
            what = f"{OPERANDS[operand]} of {group}"
            if share > OVERFLOW_WARNING:
                lags = self._precision.facts.has_history
                fix = "precision.margin, or a scaling without history" if lags else "precision.map"
                self._warn_once(
                    f"overflow of {what}",
                    f"{share:.1%} of the {what} overflow and are saturated: the scales are too "
                    f"large for them ({fix})",
                )
            if worst < SNR_WARNING_DB:
                self._warn_once(
                    f"noise of {what}",
                    f"the cast of the {what} keeps {worst:.0f} dB signal over noise in {layer}: "
                    f"below {SNR_WARNING_DB:.0f} dB little of it is left (precision.keep)",
                )

    def _warn_once(self, key: str, line: str) -> None:
        # Once a run: a bad reading is there at every interval, and would fill the log.
        if key not in self._warned:
            self._warned.add(key)
            self._say(line)


def watch_trainers(running: session.Session) -> None:
    """Add a monitor to every trainer of a session that has none."""

    def make(original: Any) -> Any:
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            present = trainer.callback_handler.callbacks
            watched = any(isinstance(callback, HealthMonitor) for callback in present)
            added = [] if watched else [HealthMonitor(trainer)]
            for callback in added:
                trainer.add_callback(callback)
            try:
                return original(trainer, *args, **kwargs)
            except BaseException as error:
                # Also for Ctrl-C: hooks of a proof that is left open would watch the next run in a
                # notebook.
                running.stop(error)
                raise
            finally:
                for callback in added:
                    trainer.remove_callback(callback)
                    callback.close()

        return train

    running.patches.replace(Trainer, "train", make)


def _of_all_processes(
    sums: GroupSums, snr: Ratios, update: Ratios
) -> tuple[GroupSums, Ratios, Ratios]:
    everyone = gather_object([(sums, snr, update)])
    merged: tuple[Ratios, Ratios] = ({}, {})
    for _, *ratios in everyone:
        for whole, part in zip(merged, ratios, strict=True):
            for group, ratio in part.items():
                whole[group] = whole.get(group, SummedRatio()) + ratio
    return merge_sums(one[0] for one in everyone), *merged
