"""A run: from a checked recipe to a run folder with weights, metrics and a receipt.

    preflight ─> rows, folder ─> session ─> model and trainer ─> train ─> receipt, report
                 (prepared)                 (trainer, observers)

A stock trainer of TRL trains (`finetune.config.methods`), through the session that a user's own
script would install.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finetune.config.methods import method_of
from finetune.config.recipe import Recipe
from finetune.config.train_keys import TrainerArguments
from finetune.data.counting import ledgers_of
from finetune.errors import FinetuneError, ProofError
from finetune.hardware.device import rank, this_device
from finetune.logging import busy, counting_rows, keeps_going, output
from finetune.precision.model.layers import without_adapters
from finetune.runs.last_model import saved_whole
from finetune.runs.receipt import Receipt, RunReport, Sample
from finetune.storage.ends import stop_at
from finetune.storage.pretrained import keep_generation
from finetune.storage.processors import processor_files
from finetune.training.checkpoints.writing import refuse_unreadable
from finetune.training.faults import explained, write_failure
from finetune.training.health.finiteness import refuse_broken_weights
from finetune.training.helper.evidence import refuse_disagreement, standstill
from finetune.training.helper.scaling_state import save_scaling
from finetune.training.helper.session import Session, session_of
from finetune.training.run.observers import Observers
from finetune.training.run.preflight import Forecast, how_to_shrink, preflight
from finetune.training.run.prepared import PreparedRun
from finetune.training.run.report import report_of
from finetune.training.run.run_folder import (
    discarded_unless_begun,
    write_card,
)
from finetune.training.trainer import make_trainer

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput


@contextmanager
def begun(
    recipe: Recipe,
    *,
    forecast: Forecast | None = None,
    out: Path | str = "runs",
    force: bool = False,
    console: Console | None = None,
    given: tuple[Any, Any] | None = None,
) -> Iterator[TrainingRun]:
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
    # One process of several speaks; errors come from each.
    console = console or output(quiet=rank() > 0)
    with keeps_going(console, prints=given is None) as shown:  # a script's output is its own
        with busy(console, f"checking {recipe.name}"):
            ahead = preflight(recipe.config, this_device(), forecast=forecast, force=force)
        less = partial(how_to_shrink, forecast, ahead)
        with explained(Path(out), less):
            run = TrainingRun(recipe, ahead, Path(out), console, force=force, given=given)
        run.forecast = forecast
        guarded = partial(explained, run.folder, less)
        begins = session_of(ahead.resolution, run.console)
        # The folder goes last, when nothing of the session can write into it any more.
        with discarded_unless_begun(run.folder), begins as session, guarded():
            shown.say_in(run.folder)
            run.load(session)
            yield run


class TrainingRun(PreparedRun):
    """One run, from its rows to its report: made, `load`, train, `close`, `save_model`, `report`.

    Attributes:
        observers: what watches it, Ctrl-C too.
        until: step after which it stops.
        stopped, interrupted: the error that ended the run, if any; or that a signal did.
        still: the error if it came to its end, and not one number has changed.
        forecast: checks and predicts memory.
        output: what the trainer returned; None if training was cut short.
        receipt: made by `close`.
        answers, scores: of the trained model, to prompts and on tasks.
    """

    observers: Observers
    receipt: Receipt
    until: int | None = None
    still: ProofError | None = None
    forecast: Forecast | None = None
    output: TrainOutput | None = None

    def train(self, *, save: bool = True) -> RunReport:
        """Train, and write what a run leaves behind.

        Args:
            save: save the trained model.
        """
        stop = self.observers.stop
        guarded = partial(explained, self.folder, partial(how_to_shrink, self.forecast, self.ahead))
        try:
            stop.until = self.until
            with stop, guarded():
                resume = str(self.resume) if self.resume else None
                self.output = self.trainer.train(resume_from_checkpoint=resume)
                # The report has an eval loss of the weights that are saved, not of some steps
                # before.
                strategy = TrainerArguments(self.args).eval_strategy
                can = strategy != "no" and self.rows.eval is not None
                if can and not self.observers.was_just_evaluated() and not stop.asked:
                    self.trainer.evaluate()
        except BaseException as error:
            self.close(after=error)
            raise
        self.close()
        if save and not stop.asked:
            self.save_model()
        if not stop.is_cut_short:  # after the weights are safe
            refuse_disagreement(self.receipt)
        if not stop.asked:
            self.answers, self.scores = self.observers.ask_and_score(self, self.trainer)
        # After training, since it is made for the batch that was measured.
        if self.forecast is not None and self.is_main and not stop.asked:
            self.receipt.memory |= self.forecast.predicted(self.ahead, self.observers.meter.batch)
            self.receipt.save(self.folder / "receipt.json")
        report = self.report()
        # Raised last: the folder is complete, and says why the run counts as failed.
        if self.still is not None:
            raise self.still
        return report

    def load(self, session: Session) -> None:
        """Load the model; build the trainer and its observers."""
        from transformers import set_seed

        config, console = self.config, self.console
        self.session, self.observers = session, Observers(self, session)
        self.answers, self.scores = list[Sample](), dict[str, dict[str, Any]]()
        # Before the model: random weights and adapters are drawn as it is built.
        set_seed(TrainerArguments(self.args).seed)
        what = f"loading {config.model.name}, tokenizing {self.rows.description}"
        with counting_rows(console, what):
            self.trainer = make_trainer(
                config,
                self.args,
                train=self.rows.train,
                held_out=self.rows.eval,
                reader=self.reader,
                stored=self.stored,
                attention=self.attention,
                given=self.model,
                callbacks=self.observers.callbacks,
            )
        if self.reader is self.tokenizer:
            self.trainer.processor_files = processor_files(config.model)
        # Before anything is unpickled; the trainer was built without reading the checkpoint.
        refuse_unreadable(self.resume)
        plain = without_adapters(self.trainer.model)
        refuse_broken_weights(plain, config.model.name)
        self._check_images(self.trainer.train_dataset)
        self._fit_to_rows(self.trainer)
        self.ledgers = ledgers_of(self.trainer, self.rows, self.reader, method_of(config.train))
        if new := stop_at(self.trainer.model, self.ledgers["train"].ends):
            names = ", ".join(repr(self.tokenizer.decode([token])) for token in new)
            console.print(f"      answers end with {names}: added to generation_config.json")
        keep_generation(plain)
        for name, ledger in self.ledgers.items():
            for warns, line in ledger.lines("eval " if name == "eval" else ""):
                self.warn(line) if warns else console.print(f"      {line}")
        scales_loss = session.precision.compute == "fp16"
        self.observers.watch(self.trainer, self.warn, scales_loss=scales_loss)
        self._started = time.perf_counter()

    def close(self, after: BaseException | None = None) -> None:
        """Close the observers and write the receipt, however training ended.

        Args:
            after: the error that ended training; it stays the one shown, whatever fails here.

        Raises:
            CheckpointError: the receipt cannot be written, and nothing had failed before.
        """
        self.stopped = after.what if isinstance(after, FinetuneError) else ""
        # A launcher ends the processes that outlive another by a signal, too.
        self.interrupted = self.observers.stop.asked and after is None
        try:
            self._close(ended=after is None and not self.interrupted)
        # A receipt that cannot be written must not hide the error that ended training.
        except Exception as error:
            if after is not None:
                self.warn(f"no receipt could be written: {error}")
                return
            if not isinstance(error, OSError):
                raise
            what = "the receipt could not be written"
            raise write_failure(error, self.folder, what) from error

    def _close(self, *, ended: bool) -> None:
        self.observers.close()
        self.receipt = self.session.receipt()
        equal = self.observers.judged.learned_nothing
        self.receipt.notes = [*self.notes, equal] if equal else self.notes
        self.receipt.memory = self.observers.meter.reading()
        self.receipt.energy = self.observers.energy()
        self.receipt.conditions = self.session.conditions(self.trainer)
        # Only now: a stream's bad rows are met while it is read.
        if late := sum(map(int, self.rows.late)):
            self.ledgers["train"] = replace(self.ledgers["train"], late=late)
            self.warn(f"{late:,} rows of the stream cannot be trained on and were skipped")
        self.receipt.data = {name: found.as_json() for name, found in self.ledgers.items()}
        if ended and self.resume is None:  # the last steps of a run may change nothing
            self.still = standstill(self.receipt, equal)
            self.stopped = self.still.what if self.still else ""
        self.receipt.run = {
            "name": self.recipe.name,
            "method": method_of(self.config.train).name,
            "folder": str(self.folder),
            "interrupted": self.interrupted,
            **({"exit_code": 128 + self.observers.stop.number} if self.interrupted else {}),
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
        with saved_whole(self.folder, writes=self.is_main) as folder:
            self.trainer.save_model(str(folder))
        if self.is_main and self.config.precision.eval == "fp8":
            conversion = self.session.conversion  # `generate` casts with these scales
            save_scaling(conversion.engine if conversion else None, self.folder)

    def report(self) -> RunReport:
        """Build the report; the main process writes `report.json`."""
        report = report_of(self)
        if self.is_main:
            (self.folder / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
            write_card(self.folder, self.config, report)
        return report
