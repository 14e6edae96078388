"""What `train()` of `finetune.trainer` does and returns: a whole run, once, and its result."""

from __future__ import annotations

import atexit
import base64
import contextlib
import io
import math
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers.trainer_utils import TrainOutput

from finetune.errors import ConfigError, MissingExtraError, OrderError
from finetune.export.export import Export, export_run
from finetune.precision.model.layers import without_adapters
from finetune.runs.receipt import Receipt, RunReport
from finetune.scripting.keywords import speaks
from finetune.training.helper import session

WAITING = contextlib.ExitStack()
"""Holds the session of a trainer that was made and has not trained."""

TRAINED: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()
"""Model, inside of adapters -> folder of the run that has trained it last."""


def abandon() -> None:
    """End what a trainer holds that was made and never trained, and remove its empty folder."""
    with contextlib.suppress(KeyboardInterrupt), WAITING:
        raise KeyboardInterrupt


atexit.register(abandon)


class Run(TrainOutput):
    """Result of a run: a `TrainOutput` of Transformers, with what the run left behind.

    A notebook shows its losses and its receipt.

    Attributes:
        report: losses, speed, samples and scores.
    """

    report: RunReport

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.report.folder

    @property
    def receipt(self) -> Receipt:
        """What was requested, what ran, and on what evidence."""
        return self.report.receipt

    def export(self, to: str, out: Path | str, **options: Any) -> Export:
        """Export the trained weights and check them against the run's model.

        Args:
            to: a target of `python -m finetune export`, such as `adapter`, `merged` or `fp8`.
            out: folder to make.
            options: as of `finetune.export_run`: `force=True` replaces a folder.

        Raises:
            FinetuneError: the run has no trained weights, or the export is not what was trained.
        """
        return export_run(self.folder, to, out, **options)

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        report: Any = self.report  # rich's mixin knows itself as another protocol
        shown = report._repr_mimebundle_([], [])["text/html"]
        try:
            from finetune.analysis.report.curves import loss_plots, method_plots
            from finetune.analysis.report.figures import save_picture
            from finetune.analysis.report.run_source import RunSource
        except MissingExtraError:  # no picture
            return shown
        source, picture = [RunSource(self.folder, self.folder)], io.BytesIO()
        drawn = [plot for row in loss_plots(source) + method_plots(source) for plot in row.plots]
        if not drawn:
            return shown
        save_picture(drawn[0], picture)
        data = base64.b64encode(picture.getvalue()).decode()
        return f'<img alt="{drawn[0].title}" width="640" src="data:image/png;base64,{data}">{shown}'


class OneRun:
    """Mixin of a trainer whose `train()` is a run, from its first step to its report.

    Attributes:
        run: the run, begun.
        began: True from the first call on.
    """

    run: Any
    model: Any
    state: Any
    began = False

    def train(self, resume_from_checkpoint: Any = None) -> Any:
        """Train, and write receipt, report and model to the run folder.

        Ctrl-C, or a notebook's interrupt, ends the step, saves a checkpoint and returns.

        Returns:
            A `Run`.

        Raises:
            OrderError: it has trained, or another trainer or set-up took its place.
            FinetuneError: what ended the run.
        """
        # The run itself calls `train` once more, and then means the trainer's own.
        if self.began and session.in_force() is self.run.session:
            inner: Any = super()
            return inner.train(resume_from_checkpoint=resume_from_checkpoint)
        with speaks():
            self._refuse(resume_from_checkpoint)
            self.began = True
            TRAINED[without_adapters(self.model)] = self.run.folder
            with WAITING:
                report = self.run.train()
        output: Any = self.run.output or (self.state.global_step, math.nan, {})
        run = Run(*output)
        run.report = report
        if self.run.is_main:
            self.run.console.print(report.summary, crop=False)
        return run

    def _refuse(self, checkpoint: Any) -> None:
        again = "finetune.trainer(model, tokenizer, data=..."
        if checkpoint:
            raise ConfigError(
                "a checkpoint to resume from is named when the trainer is made",
                where="trainer.train(resume_from_checkpoint=...)",
                why="its settings and rows are compared with the run's first",
                fix=f"{again}, resume_from_checkpoint={str(checkpoint)!r}).train()",
            )
        if self.began or session.in_force() is not self.run.session:
            checkpoints = str(self.run.folder / "checkpoints")
            raise OrderError(
                "this trainer has trained"
                if self.began
                else "another trainer, run or set-up of FP8 came after this trainer was made",
                where=str(self.run.folder),
                why="a run folder is of one run, and its precision is no longer in effect",
                fix=f"{again}).train(): a run of its own, that trains the model further; with "
                f"resume_from_checkpoint={checkpoints!r} one that resumes an interrupted run",
            )
