"""A run: from a checked recipe to a run folder with weights, metrics and a receipt.

    preflight ─> rows, folder ─> session ─> model and trainer ─> train ─> receipt, report

A stock trainer of TRL trains (`finetune.config.methods`), through the session that a user's own
script would install.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from finetune.config import sft
from finetune.config.methods import TEACHER, arguments, method_of
from finetune.config.optimizers import chosen
from finetune.config.recipe import Recipe
from finetune.config.reward_names import code_of, reward_names
from finetune.config.schema import RunConfig
from finetune.config.sft import sft_config, without_effect
from finetune.config.train_keys import BATCH
from finetune.config.train_section import decides_checkpointing
from finetune.config.yaml import shown
from finetune.data.dataset import refuse_no_eval_rows, rows_for
from finetune.data.masks import answer_end
from finetune.errors import FinetuneError, ProofError
from finetune.hardware.device import rank, this_device
from finetune.hardware.energy import EnergyCounter
from finetune.hardware.requirements import emulates
from finetune.logging import busy, counting_rows, keeps_going, output, whole
from finetune.precision.layers import without_adapters
from finetune.precision.stored import stored_weights
from finetune.runs.checkpoints import Checkpoint, find_checkpoint, history
from finetune.runs.last_model import saved_whole
from finetune.runs.lookup import LAST
from finetune.runs.progress import figures
from finetune.runs.receipt import Receipt, RunReport, Sample
from finetune.storage import nf4
from finetune.storage.ends import stop_at
from finetune.storage.pretrained import fit_trl, keep_generation, load_tokenizer, refuse_other_words
from finetune.training import scope
from finetune.training.asking.evaluate import TaskScorer, load_tasks, score
from finetune.training.asking.rewards import RewardWatch, rewards_of
from finetune.training.asking.samples import prompts_of
from finetune.training.checkpoints import resume
from finetune.training.faults import explained, write_failure
from finetune.training.helper.evidence import refuse_disagreement, standstill
from finetune.training.helper.optimizer import low_bit
from finetune.training.helper.scaling_state import save_scaling
from finetune.training.helper.session import Session, session_of
from finetune.training.helper.varlen import fix_documents
from finetune.training.model import VARLEN, Attention, load_model, take_model, teacher_of
from finetune.training.run.early_stopping import never_stops, stopped_early, stoppers, stopping
from finetune.training.run.hints import hints
from finetune.training.run.preflight import Forecast, Preflight, how_to_shrink, preflight
from finetune.training.run.run_folder import (
    check_disk,
    discarded_unless_begun,
    name_folder,
    start_folder,
    write_card,
)
from finetune.training.run.schedule import schedule_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from transformers.trainer_utils import TrainOutput

    from finetune.precision.planner import LayerPlan


@contextmanager
def begun(
    recipe: Recipe,
    *,
    forecast: Forecast | None = None,
    out: Path | str = "runs",
    force: bool = False,
    console: Console | None = None,
    given: tuple[Any, Any] | None = None,
) -> Iterator[_Run]:
    """Context manager for a run that is ready to train, and is in effect until the end of it.

    Args:
        recipe: from `finetune.load_recipe`.
        forecast: checks and predicts memory; neither is done without it.
        out: folder of runs.
        force: train even if memory is expected to be too small.
        console: console for progress output; a quiet one for notebooks and tests.
        given: model, with the recipe's adapters, and tokenizer that a script has loaded.

    Raises:
        FinetuneError: any error that the user can fix, see `finetune.errors`.
    """
    console = console or output(quiet=rank() > 0)
    with keeps_going(console, prints=given is None) as shown:  # a script's output is its own
        with busy(console, f"checking {recipe.name}"):
            ahead = preflight(recipe.config, this_device(), forecast=forecast, force=force)
        less = partial(how_to_shrink, forecast, ahead)
        with explained(Path(out), less):
            run = _Run(recipe, ahead, Path(out), console, force=force, given=given)
        run.forecast = forecast
        guarded = partial(explained, run.folder, less)
        begins = session_of(ahead.resolution, run.console)
        with discarded_unless_begun(run.folder), begins as session, guarded():
            shown.say_in(run.folder)
            run.load(session)
            yield run


class _Run:
    """One run, from its rows to its report: made, `load`, train, `close`, `save_model`, `report`.

    Attributes:
        folder: run folder, the same on every process.
        is_main: True on the process that writes.
        rows: training and evaluation rows.
        args: trainer arguments.
        tasks: loaded lm-eval tasks.
        resume: checkpoint to resume from.
        stop: handler of Ctrl-C.
        until: step after which it stops.
        stopped, interrupted: the error that ended the run, if any; or that a signal did.
        still: the error if it came to its end, and not one number has changed.
        forecast: checks and predicts memory.
        output: what the trainer returned; None if training was cut short.
        receipt: made by `close`.
    """

    receipt: Receipt
    until: int | None = None
    still: ProofError | None = None
    forecast: Forecast | None = None
    output: TrainOutput | None = None

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
        state = PartialState(cpu=on_cpu)
        self.is_main = state.is_main_process
        self.console = console
        self.folder = name_folder(out, recipe.name, ahead.resolution.label)
        template = config.train.chat_template_path
        self.model = given and given[0]
        loaded = (given[1], "") if given else load_tokenizer(config.model, template)
        self.tokenizer, note = loaded
        sign = counting_rows(self.console, f"reading {config.data.label}")
        with state.main_process_first(), sign:
            self.rows = rows_for(config, self.tokenizer)
        settings = {"run_name": f"{recipe.name}-{self.folder.name}", **self.rows.settings}
        self.args = sft_config(config, self.folder, settings, on_cpu=on_cpu)
        refuse_no_eval_rows(self.rows, self.args)
        if self.args.max_steps > 0:  # by epochs: once rows are packed
            schedule_of(self.args, None).check()
        self._choose_checkpoint(out, state.num_processes)
        if not force and self.resume is None:  # a run that resumes makes fewer than it was asked
            check_disk(ahead, out)
        starts_anew = self.rows.eval is not None and self.resume is None
        if "eval_on_start" not in config.train and starts_anew:
            self.args.eval_on_start = config.eval.at_start and self.args.eval_strategy != "no"
        self.tasks = load_tasks(config.eval) if self.is_main else []
        self.answers = list[Sample]()
        self.scores: dict[str, dict[str, Any]] = {}
        if self.is_main:
            start_folder(self.folder, recipe, out)
        self._introduce(ahead)
        self.console.print(whole(f"run folder: {self.folder}"), crop=False)
        self.console.print(f"data: {self.rows.description}")
        for line in filter(None, (*without_effect(config.train), *self.rows.notes, note)):
            self._warn(line)

    def _warn(self, line: str) -> None:
        self.console.print(f"! {line}", style="yellow", markup=False)

    def _choose_checkpoint(self, out: Path, processes: int) -> None:
        """Set the checkpoint to resume from, if any, and what its manifest says of this run."""
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
            self._warn(f"{path.name} is passed over: {problem}")
        self.console.print(whole(f"resuming from {checkpoint.folder}"), crop=False)
        if not checkpoint.manifest:
            self._warn("it has no manifest: its settings are not compared")
        loud = {key: pair for key, pair in self.changed.items() if resume.changes_training(key)}
        for key, (before, now) in loud.items():
            self._warn(f"{key}: {before} in the checkpoint, {now} now")
        if others := [key for key in self.changed if key not in loud]:
            self.console.print(f"changed, without an effect on training: {', '.join(others)}")

    def _introduce(self, ahead: Preflight) -> None:
        """Print model, method, precision, engine and device."""
        config, p = self.config, ahead.resolution.precision
        lora, stored = config.lora, config.model.storage
        method = "full fine-tuning" if lora is None else f"{'Q' * bool(stored)}LoRA r={lora.r}"
        held = f", {stored.upper()} base" if stored else ""
        emulated = emulates(p, ahead.device)
        facts = f": {config.model.name}, {method}{held}, {ahead.resolution.described}"
        facts += f"{', emulated' * emulated} on {ahead.device.name}"
        self.console.print(Text.assemble((self.recipe.name, "bold"), facts))
        if emulated and ahead.device.has_fp8:
            self._warn(ahead.resolution.reason)
        if decides_checkpointing(self.recipe.config):
            on = config.train.gradient_checkpointing
            why = "on, memory is too small without" if on else "off, memory is enough without"
            self.console.print(f"gradient checkpointing: {why}")
        if code := code_of(reward_names(config.train)):
            self.console.print(whole(f"rewards run the code of {', '.join(map(shown, code))}"))
        for note in filter(None, (*self.notes, stopping(config.train))):
            self.console.print(whole(note), crop=False)

    def train(self, *, save: bool = True) -> RunReport:
        """Train, and write what a run leaves behind.

        Args:
            save: save the trained model.
        """
        guarded = partial(explained, self.folder, partial(how_to_shrink, self.forecast, self.ahead))
        try:
            self.stop.until = self.until
            with self.stop, guarded():
                resume = str(self.resume) if self.resume else None
                self.output = self.trainer.train(resume_from_checkpoint=resume)
                evaluates = self.args.eval_strategy != "no" and not self.was_just_evaluated()
                if evaluates and not self.stop.asked:
                    self.trainer.evaluate()
        except BaseException as error:
            self.close(after=error)
            raise
        self.close()
        if save and not self.stop.asked:
            self.save_model()
        if not self.stop.is_cut_short:  # after the weights are safe
            refuse_disagreement(self.receipt)
        if not self.stop.asked:
            self.ask_and_score()
        if self.forecast is not None and self.is_main and not self.stop.asked:
            self.receipt.memory |= self.forecast.predicted(self.ahead, self.meter.batch)
            self.receipt.save(self.folder / "receipt.json")
        report = self.report()
        if self.still is not None:
            raise self.still
        return report

    def load(self, session: Session) -> None:
        """Load the model; build the trainer and its observers."""
        from transformers import set_seed
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        from finetune.data.counting import count, whole_ledger
        from finetune.training.asking.samples import SampleWriter
        from finetune.training.checkpoints.writing import CheckpointKeeper, refuse_unreadable
        from finetune.training.health.callbacks import (
            LossScaleLog,
            MetricsWriter,
            ProgressBar,
            StepTimer,
        )
        from finetune.training.health.finiteness import refuse_broken_weights
        from finetune.training.health.memory_meter import MemoryMeter
        from finetune.training.health.monitor import HealthMonitor
        from finetune.training.run.interrupt import GracefulStop

        config, console, folder = self.config, self.console, self.folder
        self.session, method = session, method_of(config.train)
        counter = EnergyCounter(session.device.kind)
        label = session.resolution.label
        earlier = history(Checkpoint(self.resume)) if self.resume else ()
        self.metrics = MetricsWriter(folder / "metrics.jsonl", label, counter, earlier)
        self.bar = ProgressBar(console, self.metrics, method)
        self.stop = GracefulStop(console)
        self.meter = MemoryMeter(session)
        self.keeper = CheckpointKeeper(
            session.resolution.label, self.facts, self.resume, config.checkpoints
        )
        self.timer = StepTimer(session.device.kind, folder / "steps.jsonl")
        self.judged = RewardWatch(self._warn)
        prompts = prompts_of(config, self.rows, self.tokenizer)
        self.samples = SampleWriter(
            config, prompts, self.tokenizer, self.metrics, console, self.meter
        )
        set_seed(self.args.seed)
        what = f"loading {config.model.name}, tokenizing {self.rows.description}"
        with counting_rows(console, what):
            self.trainer = make_trainer(
                config,
                self.args,
                train=self.rows.train,
                held_out=self.rows.eval,
                tokenizer=self.tokenizer,
                stored=self.stored,
                attention=self.attention,
                given=self.model,
                callbacks=[
                    *(self.samples, self.metrics, self.bar, self.stop),
                    *(self.keeper, self.meter, self.timer, self.judged),
                    *stoppers(config.train, self.resume),
                ],
            )
        refuse_unreadable(self.resume)
        refuse_broken_weights(without_adapters(self.trainer.model), config.model.name)
        self._fit_to_rows()
        self.keeper.take_over(self.trainer)
        self.timer.trainer = self.trainer
        self.ledgers = dict(self.trainer.ledgers)
        if self.rows.sample is None:
            self.ledgers["train"] = whole_ledger(
                self.ledgers["train"], self.rows, self.trainer.args, method
            )
        else:
            self.trainer.given = self.rows.sample
            counted = count(self.rows, self.trainer.args, self.tokenizer, method)
            self.ledgers["train"] = counted.ledger
        if new := stop_at(self.trainer.model, self.ledgers["train"].ends):
            names = ", ".join(repr(self.tokenizer.decode([token])) for token in new)
            console.print(f"      answers end with {names}: added to generation_config.json")
        keep_generation(without_adapters(self.trainer.model))
        for name, ledger in self.ledgers.items():
            for warns, line in ledger.lines("eval " * (name == "eval")):
                self._warn(line) if warns else console.print(f"      {line}")
        self.monitor = HealthMonitor(self.trainer, say=self._warn)
        self.trainer.add_callback(self.monitor)
        shared = (self.tokenizer, self.metrics, console, self.meter)
        self.trainer.add_callback(TaskScorer(config, self.tasks, *shared))
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.remove_callback(ProgressCallback)
        if session.precision.compute == "fp16":
            self.trainer.callback_handler.callbacks.insert(0, LossScaleLog())
        self._started = time.perf_counter()

    def _fit_to_rows(self) -> None:
        """Make steps of less where rows are few; refuse a learning rate that stays near zero."""
        from transformers.trainer_utils import has_length

        args, rows = self.trainer.args, self.trainer.train_dataset
        each = getattr(args, "num_generations", 1)  # a row is as many as it has answers
        count = each * len(rows) if has_length(rows) else None
        ledger = self.trainer.ledgers.get("train")  # of a stream there is none
        found = schedule_of(
            *(args, count, self.config.data.min_steps),
            method=method_of(self.config.train),
            length=ledger and ledger.max_length,
            kept=self.fitted.get("batch"),
        )
        found.check()
        batch = [getattr(found.args, key) for key in BATCH]
        args.gradient_accumulation_steps, args.per_device_train_batch_size = batch
        self.trainer._train_batch_size = args.train_batch_size
        self.facts["fitted"] = {"least_rows": self.args.least_rows, "batch": batch}
        if found.lowered:
            self.notes = [*self.notes, found.lowered]
            self.console.print(found.lowered, crop=False, highlight=False)
        for line in filter(None, (found.few, never_stops(self.config.train, args, found.steps))):
            self._warn(line)

    def was_just_evaluated(self) -> bool:
        """True if the last evaluation is of the weights at the end, or no rows are there for it."""
        if self.rows.eval is None:
            return True
        steps = [row["step"] for row in self.metrics.rows if "eval_loss" in row]
        return steps[-1:] == [self.metrics.rows[-1]["step"]] and not self.keeper.loaded_best

    def close(self, after: BaseException | None = None) -> None:
        """Close the observers and write the receipt, however training ended.

        Args:
            after: the error that ended training; it stays the one shown, whatever fails here.

        Raises:
            CheckpointError: the receipt cannot be written, and nothing had failed before.
        """
        self.stopped = after.what if isinstance(after, FinetuneError) else ""
        # A launcher ends the processes that outlive another by a signal, too.
        self.interrupted = self.stop.asked and after is None
        try:
            self._close(ended=after is None and not self.interrupted)
        except Exception as error:
            if after is not None:
                self._warn(f"no receipt could be written: {error}")
                return
            if not isinstance(error, OSError):
                raise
            what = "the receipt could not be written"
            raise write_failure(error, self.folder, what) from error

    def _close(self, *, ended: bool) -> None:
        for watcher in (self.meter, self.timer, self.bar, self.monitor):
            watcher.close()
        self.receipt = self.session.receipt()
        equal = self.judged.learned_nothing
        self.receipt.notes = [*self.notes, equal] if equal else self.notes
        self.receipt.memory = self.meter.reading()
        self.receipt.energy = self.metrics.energy(sum(row["tokens"] for row in self.timer.rows))
        self.receipt.conditions = self.session.conditions(self.trainer)
        if late := sum(map(int, self.rows.late)):
            self.ledgers["train"] = replace(self.ledgers["train"], late=late)
            self._warn(f"{late:,} rows of the stream cannot be trained on and were skipped")
        self.receipt.data = {name: found.as_json() for name, found in self.ledgers.items()}
        if ended and self.resume is None:  # the last steps of a run may change nothing
            self.still = standstill(self.receipt, equal)
            self.stopped = self.still.what if self.still else ""
        self.receipt.run = {
            "name": self.recipe.name,
            "method": method_of(self.config.train).name,
            "folder": str(self.folder),
            "interrupted": self.interrupted,
            **({"exit_code": 128 + self.stop.number} if self.interrupted else {}),
            "stopped": self.stopped,
            "model_files": self.facts["model_files"],  # for those who read the base again
        }
        if self.resume is not None:
            self.receipt.run["resumed"] = {"from": str(self.resume), "changed": self.changed}
        self.seconds = time.perf_counter() - self._started
        if self.is_main:
            self.receipt.save(self.folder / "receipt.json")

    def save_model(self) -> None:
        """Save the trained model."""
        with saved_whole(self.folder, writes=self.is_main) as place:
            self.trainer.save_model(str(place))
        if self.is_main and self.config.precision.eval == "fp8":
            conversion = self.session.conversion  # `generate` casts with these scales
            save_scaling(conversion.backend if conversion else None, self.folder)

    def ask_and_score(self) -> None:
        """Sample and score the trained model."""
        if not self.is_main:
            return
        model, state = self.trainer.accelerator.unwrap_model(self.trainer.model), self.trainer.state
        self.answers = self.samples.at_end(model, state, anew=self.args.load_best_model_at_end)
        if self.tasks:
            self.scores = score(model, self.tokenizer, self.tasks, self.config)
            self.metrics.write({"step": state.global_step, "tasks": self.scores}, state)

    def _hints(self) -> Iterator[str]:
        state, train = self.trainer.state, self.config.train
        if early := stopped_early(train, state):
            yield early
            return
        rate = float(self.trainer.args.learning_rate)
        yield from hints(self.config, self.metrics.rows, steps=state.max_steps, rate=rate)

    def report(self) -> RunReport:
        """Build the report; the main process writes `report.json`."""
        from finetune.training.health.memory_meter import peak_memory_gib

        metrics, method = self.metrics, method_of(self.config.train)
        rows = metrics.rows if "loss" in method.columns else []
        losses, held_out = ([r[k] for r in rows if k in r] for k in ("loss", "eval_loss"))
        speeds, paces = (sorted(metrics.values(k)[1:]) for k in ("tokens_per_s", "step_seconds"))
        report = RunReport(
            folder=self.folder,
            receipt=self.receipt,
            first_loss=losses[0] if losses else None,
            final_loss=losses[-1] if losses else None,
            eval_loss=held_out[-1] if held_out else None,
            tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
            seconds=self.seconds,
            peak_memory_gib=max(self.meter.earlier_gib, peak_memory_gib()),
            samples=self.answers,
            tasks=self.scores,
            interrupted=self.interrupted,
            own=figures(metrics.rows, method),
            steps_per_s=1 / paces[len(paces) // 2] if paces else None,
            hints=[] if self.interrupted else list(self._hints()),
        )
        if self.is_main:
            (self.folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
            write_card(self.folder, self.config, report)
        return report


def make_trainer(
    config: RunConfig,
    args: Any,
    *,
    train: Dataset | IterableDataset,
    held_out: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    stored: Sequence[LayerPlan],
    attention: Attention,
    callbacks: list[TrainerCallback],
    kind: Any = None,
    given: Any = None,
) -> Any:
    """Load a recipe's model and build the trainer around it, under the current session.

    Training and measuring share it, so that measured speeds are those of the trained assembly.

    Args:
        args: trainer arguments (`finetune.config.sft`).
        train, held_out: rows in one of TRL's formats.
        stored: plan rows of weights that are stored in FP8 from the start.
        attention: resolved `model.attention`.
        kind: trainer class, default that of `train.method` with a ledger of its rows.
        given: model with the run's adapters, in place of the one that would be loaded.

    Raises:
        FinetuneError: the model cannot be loaded, or adapters do not fit it.
    """
    from finetune.training.trained import trainer_of

    method, beside = method_of(config.train), dict[str, Any]()
    if method.rewarded:
        beside["reward_funcs"] = rewards_of(reward_names(config.train), tokenizer)
    if TEACHER in arguments(method):
        refuse_other_words(tokenizer, teacher_of(config), f"train.{TEACHER}")
        beside["teacher_model"] = load_model(teacher_of(config), ())
    named = config.model.model_copy(update={"attention": attention.implementation})
    model: Any = load_model(named, stored) if given is None else take_model(given, named, stored)
    fit_trl(without_adapters(model))
    if method.writes and (end := answer_end(tokenizer)) is not None:
        stop_at(without_adapters(model), [end])  # what is written ends there, and is counted so
    scope.freeze(without_adapters(model), config)
    adapters = scope.lora_config(model, config) if given is None else None
    if adapters is not None and stored_weights(model):  # the trainer would cast new adapters
        model, adapters = scope.attach(model, config), None
    optimizer = chosen(config.train)
    if optimizer.library == "bitsandbytes":
        low_bit.forget_overrides()
    own = low_bit.class_and_kwargs if optimizer.library == "torchao" else lambda *_: None
    if method.reference and config.lora is None and not args.precompute_ref_log_probs:
        beside["ref_model"] = deepcopy(model)  # TRL would read another revision from the hub
    try:
        with nf4.masters_kept(model), scope.false_warnings_ignored():
            trainer = (kind or trainer_of(method))(
                model=model,
                args=args,
                train_dataset=train,
                eval_dataset=held_out,
                processing_class=tokenizer,
                peft_config=adapters,
                callbacks=callbacks,
                **beside,
            )
        trainer.optimizer_cls_and_kwargs = own(config.train, args)
        trainer.embedding_learning_rate = config.train.embedding_learning_rate
        if given is None and "ref" in getattr(model, "peft_config", ()):
            model.delete_adapter("ref")  # TRL's copy of new adapters, which add nothing as well
    except Exception as error:
        refusal = isinstance(error, sft.REFUSALS) or sft.is_of_the_hub(error)
        if isinstance(error, FinetuneError) or not refusal:
            raise
        raise sft.refused(method.trainer, error, config.train) from error
    if attention.implementation == VARLEN:
        fix_documents(trainer)
    return trainer
