"""The report of a run: what it reached, how fast, and hints for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.config.methods import method_of
from finetune.config.train_keys import TrainerArguments
from finetune.runs.progress import figures
from finetune.runs.receipt import RunReport
from finetune.training.health.memory_meter import peak_memory_gib
from finetune.training.run.early_stopping import stopped_early
from finetune.training.run.hints import hints

if TYPE_CHECKING:
    from finetune.training.run.run import TrainingRun


def report_of(run: TrainingRun) -> RunReport:
    """The report of a run that has ended."""
    metrics, method = run.observers.metrics, method_of(run.config.train)
    rows = metrics.rows if "loss" in method.columns else []
    losses, held_out = ([r[k] for r in rows if k in r] for k in ("loss", "eval_loss"))
    # Without the first interval: it has the witnessed step, and compiling.
    speeds, steps = (sorted(metrics.values(k)[1:]) for k in ("tokens_per_s", "step_seconds"))
    return RunReport(
        folder=run.folder,
        receipt=run.receipt,
        first_loss=losses[0] if losses else None,
        final_loss=losses[-1] if losses else None,
        eval_loss=held_out[-1] if held_out else None,
        tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
        seconds=run.seconds,
        # Resets in between (a meter, a benchmark) must not hide a higher peak before them.
        peak_memory_gib=max(run.observers.meter.earlier_gib, peak_memory_gib()),
        samples=run.answers,
        tasks=run.scores,
        interrupted=run.interrupted,
        own=figures(metrics.rows, method),
        steps_per_s=1 / steps[len(steps) // 2] if steps else None,
        hints=[] if run.interrupted else list(_hints(run)),
    )


def _hints(run: TrainingRun) -> Iterator[str]:
    state = run.trainer.state
    if early := stopped_early(run.config.train, state):
        yield early
        return
    rate = float(TrainerArguments(run.trainer.args).learning_rate)
    yield from hints(run.config, run.observers.metrics.rows, steps=state.max_steps, rate=rate)
