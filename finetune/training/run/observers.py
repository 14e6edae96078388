"""What watches a run while it trains: logs, bar, samples, health, memory, checkpoints, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback

from finetune.config.methods import method_of
from finetune.config.train_keys import TrainerArguments
from finetune.hardware.energy import EnergyCounter
from finetune.runs.checkpoints import Checkpoint, history
from finetune.runs.receipt import Sample
from finetune.training.asking.evaluate import TaskScorer, score
from finetune.training.asking.rewards import RewardWatch
from finetune.training.asking.samples import SampleWriter, prompts_of
from finetune.training.checkpoints.writing import CheckpointKeeper
from finetune.training.health.callbacks import LossScaleLog, MetricsWriter, ProgressBar, StepTimer
from finetune.training.health.memory_meter import MemoryMeter
from finetune.training.health.monitor import HealthMonitor
from finetune.training.helper.session import Session
from finetune.training.run.early_stopping import stoppers
from finetune.training.run.interrupt import GracefulStop
from finetune.training.run.prepared import PreparedRun

if TYPE_CHECKING:
    from transformers import TrainerCallback


class Observers:
    """The callbacks of a run, in the order in which they are called.

    Attributes:
        stop: handler of Ctrl-C.
        keeper: writes checkpoints.
        judged: watches rewards, of a method that has them.
    """

    def __init__(self, run: PreparedRun, session: Session) -> None:
        config, kind, label = run.config, session.device.kind, session.resolution.label
        method = method_of(config.train)
        # Rows of the run until its checkpoint, so that one file has the whole curve.
        earlier = history(Checkpoint(run.resume)) if run.resume else ()
        counter = EnergyCounter(kind)
        self.metrics = MetricsWriter(run.folder / "metrics.jsonl", label, counter, earlier)
        self.bar = ProgressBar(run.console, self.metrics, method)
        self.stop = GracefulStop(run.console)
        self.meter = MemoryMeter(session)
        self.keeper = CheckpointKeeper(label, run.facts, run.resume, config.checkpoints)
        self.timer = StepTimer(kind, run.folder / "steps.jsonl")
        self.judged = RewardWatch(run.warn)
        reader, shared = run.reader, (self.metrics, run.console, self.meter)
        self.samples = SampleWriter(config, prompts_of(config, run.rows, reader), reader, *shared)
        self.scorer = TaskScorer(config, run.tasks, run.tokenizer, *shared)
        self.monitor: HealthMonitor
        self.callbacks: list[TrainerCallback] = [
            # Samples come before what measures speed.
            self.samples,
            self.metrics,
            self.bar,
            self.stop,
            self.keeper,
            self.meter,
            self.timer,
            self.judged,
            *stoppers(config.train, run.resume),
        ]

    def watch(self, trainer: Any, warn: Callable[[str], None], *, scales_loss: bool) -> None:
        """Begin with a trainer that has the callbacks already."""
        self.keeper.take_over(trainer)
        self.timer.trainer = trainer
        self.monitor = HealthMonitor(trainer, say=warn)
        trainer.add_callback(self.monitor)
        # Last: seconds of scoring would else count as training, and as health.
        trainer.add_callback(self.scorer)
        # Transformers adds one of them by itself, beside the bar or the lines of ours.
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        if scales_loss:  # a step that float16 skips is in the log of that step
            trainer.callback_handler.callbacks.insert(0, LossScaleLog())

    def close(self) -> None:
        """Restore what they have replaced."""
        # Also after an error: each has hooks on the model, or the terminal.
        for watcher in (self.meter, self.timer, self.bar, self.monitor):
            watcher.close()

    def was_just_evaluated(self) -> bool:
        """True if the last evaluation is of the weights at the end."""
        steps = [row["step"] for row in self.metrics.rows if "eval_loss" in row]
        return steps[-1:] == [self.metrics.rows[-1]["step"]] and not self.keeper.loaded_best

    def energy(self) -> dict[str, Any]:
        """`Receipt.energy`: of the steps, and tokens for it."""
        return self.metrics.energy(sum(row["tokens"] for row in self.timer.rows))

    def ask_and_score(self, run: PreparedRun, trainer: Any) -> tuple[list[Sample], dict[str, Any]]:
        """Answers of the trained model, and its scores on tasks; the first process asks."""
        if not run.is_main:
            return [], {}
        model, state = trainer.accelerator.unwrap_model(trainer.model), trainer.state
        loads_best = TrainerArguments(run.args).load_best_model_at_end
        answers = self.samples.at_end(model, state, changed=loads_best)
        if not run.tasks:
            return answers, {}
        scores = score(model, run.tokenizer, run.tasks, run.config)
        self.metrics.write({"step": state.global_step, "tasks": scores}, state)
        return answers, scores
