"""A run before its model is loaded: rows, folder, arguments and the checkpoint that it resumes.

All that can fail without a model fails here, and leaves no run folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from finetune.config.methods import method_of
from finetune.config.recipe import Recipe
from finetune.config.reward_names import code_of, reward_names
from finetune.config.sft import sft_config, without_effect
from finetune.config.train_keys import BATCH, TrainerArguments
from finetune.config.train_section import decides_checkpointing
from finetune.config.yaml import shown
from finetune.data.dataset import reader_for, refuse_no_eval_rows, rows_for
from finetune.hardware.requirements import emulates
from finetune.logging import busy, counting_rows, whole
from finetune.runs.checkpoints import Checkpoint, find_checkpoint
from finetune.runs.lookup import LAST
from finetune.storage.pretrained import load_tokenizer
from finetune.training.asking.evaluate import load_tasks
from finetune.training.checkpoints import resume
from finetune.training.run.early_stopping import never_stops, stopping
from finetune.training.run.preflight import Preflight
from finetune.training.run.run_folder import (
    check_disk,
    name_folder,
    start_folder,
)
from finetune.training.run.schedule import schedule_of


class PreparedRun:
    """A run that is ready to load its model.

    Attributes:
        folder: run folder, the same on every process.
        is_main: True on the process that writes.
        rows: training and evaluation rows.
        reader: makes their token ids: the tokenizer, or the processor of rows with images.
        args: trainer arguments.
        tasks: loaded lm-eval tasks.
        resume: checkpoint to resume from.
        notes: lines for the receipt.
    """

    def __init__(
        self, recipe: Recipe, ahead: Preflight, out: Path, console: Console, *, force: bool,
        given: tuple[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """Load everything but the model, then make the run folder: a failure here leaves none."""
        from accelerate import PartialState

        self.recipe, self.ahead = recipe, ahead
        self.config, self.attention = ahead.config, ahead.attention
        self.notes, self.stored = ahead.notes, ahead.plan.stored
        config, on_cpu = ahead.config, ahead.device.kind == "cpu"
        # Before anything is printed or written: it says which process this is.
        state = PartialState(cpu=on_cpu)
        self.is_main = state.is_main_process
        self.console = console
        self.folder = name_folder(out, recipe.name, ahead.resolution.label)
        template = config.train.chat_template_path
        self.model = given and given[0]
        loaded = (given[1], "") if given else load_tokenizer(config.model, template)
        self.tokenizer, note = loaded
        sign = counting_rows(self.console, f"reading {config.data.label}")
        # The others find in the cache of `datasets` what the first has prepared.
        with state.main_process_first(), sign:
            self.rows = rows_for(config, self.tokenizer)
        self.reader = reader_for(config, self.rows, self.tokenizer)
        settings = {"run_name": f"{recipe.name}-{self.folder.name}", **self.rows.settings}
        self.args = sft_config(config, self.folder, settings, on_cpu=on_cpu)
        refuse_no_eval_rows(self.rows, self.args)
        # Before the model is loaded, which takes minutes.
        args = TrainerArguments(self.args)
        if args.max_steps > 0:  # by epochs: once rows are packed
            schedule_of(self.args, None).check()
        self._choose_checkpoint(out, state.num_processes)
        if not force and self.resume is None:  # a run that resumes makes fewer than it was asked
            check_disk(ahead, out)
        first_start = self.rows.eval is not None and self.resume is None
        if "eval_on_start" not in config.train and first_start:
            args.eval_on_start = config.eval.at_start and args.eval_strategy != "no"
        # One process scores, and one download is enough.
        self.tasks = load_tasks(config.eval) if self.is_main else []
        if self.is_main:
            start_folder(self.folder, recipe, out)
        self._introduce(ahead)
        self.console.print(whole(f"run folder: {self.folder}"), crop=False)
        self.console.print(f"data: {self.rows.description}")
        for line in filter(None, (*without_effect(config.train), *self.rows.notes, note)):
            self.warn(line)

    def warn(self, line: str) -> None:
        self.console.print(f"! {line}", style="yellow", markup=False)

    def _choose_checkpoint(self, out: Path, processes: int) -> None:
        """Set the checkpoint to resume from, if any, and what its manifest says of this run."""
        # In each run, since each may be resumed one day.
        rows = resume.rows_hash(self.rows.train, self.rows.eval, fingerprint=self.rows.fingerprint)
        self.facts = resume.facts_of(self.config, rows, processes)
        self.resume, self.changed = None, dict[str, tuple[Any, Any]]()
        self.fitted = dict[str, Any]()
        value = self.config.train.resume_from_checkpoint
        if not value:
            return
        name = LAST if value in (True, "true") else str(value)
        with busy(self.console, "checking the checkpoint"):
            checkpoint, broken = find_checkpoint(name, out)
            self.changed = resume.check_resume(checkpoint, self.config, self.facts)
        self.resume = checkpoint.folder
        self.fitted = resume.fitted_of(checkpoint.manifest, self.facts)
        self.args.least_rows = self.fitted.get("least_rows", self.args.least_rows)
        self.notes = [*self.notes, *resume.moved_rows(checkpoint, self.facts)]
        for path, problem in broken.items():
            self.warn(f"{path.name} is passed over: {problem}")
        self.console.print(whole(f"resuming from {checkpoint.folder}"), crop=False)
        if not checkpoint.manifest:
            self.warn("it has no manifest: its settings are not compared")
        self._say(self.changed)

    def _say(self, changed: dict[str, tuple[Any, Any]]) -> None:
        """Lines on settings that differ from those of the checkpoint, and may."""
        loud = {key: pair for key, pair in changed.items() if resume.changes_training(key)}
        for key, (before, now) in loud.items():
            self.warn(f"{key}: {before} in the checkpoint, {now} now")
        if others := [key for key in changed if key not in loud]:
            self.console.print(f"changed, without an effect on training: {', '.join(others)}")

    def _check_images(self, rows: Any) -> None:
        """Note the images of prepared rows for checkpoints; refuse others than one has."""
        self.facts["images"] = resume.images_of(rows)
        if self.resume is not None:
            changed = resume.check_images(Checkpoint(self.resume), self.config, rows)
            self._say(changed)
            self.changed |= changed

    def _fit_to_rows(self, trainer: Any) -> None:
        """Make steps of less where rows are few; refuse a learning rate that stays near zero."""
        from transformers.trainer_utils import has_length

        args, rows = TrainerArguments(trainer.args), trainer.train_dataset
        each = args.num_generations or 1  # a row is as many as it has answers
        count = each * len(rows) if has_length(rows) else None
        ledger = trainer.ledgers.get("train")  # of a stream there is none
        found = schedule_of(
            args,
            count,
            self.config.data.min_steps,
            method=method_of(self.config.train),
            length=ledger and ledger.max_length,
            kept=self.fitted.get("batch"),
        )
        found.check()
        batch = [getattr(found.args, key) for key in BATCH]
        args.gradient_accumulation_steps, args.per_device_train_batch_size = batch
        # Transformers (5.23) reads this copy of the argument, which it made when it was built.
        trainer._train_batch_size = args.train_batch_size
        # For a resumed run, whose rows may be more: it has to keep the steps that it began with.
        self.facts["fitted"] = {"least_rows": self.args.least_rows, "batch": batch}
        if found.lowered:
            self.notes = [*self.notes, found.lowered]
            self.console.print(found.lowered, crop=False, highlight=False)
        for line in filter(None, (found.few, never_stops(self.config.train, args, found.steps))):
            self.warn(line)

    def _introduce(self, ahead: Preflight) -> None:
        """Print model, method, precision, engine and device."""
        config, p = self.config, ahead.resolution.precision
        lora, stored = config.lora, config.model.storage
        method = "QLoRA" if stored else "LoRA"
        method = "full fine-tuning" if lora is None else f"{method} r={lora.r}"
        base = f", {stored.upper()} base" if stored else ""
        emulated = emulates(p, ahead.device)
        facts = f": {config.model.name}, {method}{base}, {ahead.resolution.described}"
        facts += f"{', emulated' if emulated else ''} on {ahead.device.name}"
        self.console.print(Text.assemble((self.recipe.name, "bold"), facts))
        if emulated and ahead.device.has_fp8:
            self.warn(ahead.resolution.reason)
        if decides_checkpointing(self.recipe.config):
            on = config.train.gradient_checkpointing
            why = "on, memory is too small without" if on else "off, memory is enough without"
            self.console.print(f"gradient checkpointing: {why}")
        if code := code_of(reward_names(config.train)):
            self.console.print(whole(f"rewards run the code of {', '.join(map(shown, code))}"))
        for note in filter(None, (*self.notes, stopping(config.train))):
            self.console.print(whole(note), crop=False)
