"""What is written and shown while a run trains."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from finetune.training.compute_types import refuse_vanished_scale
from finetune.training.session import Session


def scaling_state(process: int) -> str:
    """Name of a process's file of scaling state in a checkpoint."""
    return f"fp8_scaling{f'_{process}' if process else ''}.safetensors"


class MetricsWriter(TrainerCallback):
    """Writes every log of the trainer to `metrics.jsonl`, one JSON object a line.

    Attributes:
        rows: what was written, newest last.
    """

    def __init__(self, path: Path, precision: str) -> None:
        self.path, self.precision = path, precision
        self.rows: list[dict[str, Any]] = []
        self._started = self._last = time.perf_counter()
        self._last_tokens = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._started = self._last = time.perf_counter()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        now = time.perf_counter()
        row = {"step": state.global_step, "seconds": round(now - self._started, 3), **(logs or {})}
        tokens = row.get("num_tokens")
        if "loss" in row and tokens is not None:
            row["tokens_per_s"] = round((tokens - self._last_tokens) / max(now - self._last, 1e-9))
            self._last, self._last_tokens = now, tokens
        row["precision"] = self.precision
        self.write(row, state)

    def write(self, row: dict[str, Any], state: TrainerState) -> None:
        """Add a row of another kind, which says its step."""
        self.rows.append(row)
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()  # evaluation is not training time

    def values(self, key: str) -> list[float]:
        """All values written under `key`, oldest first."""
        return [row[key] for row in self.rows if key in row]


class ProgressBar(TrainerCallback):
    """Step, loss, tokens/s, time left and the precision in force, on a terminal or as lines."""

    def __init__(self, console: Console, metrics: MetricsWriter) -> None:
        self.console, self.metrics = console, metrics
        self._bar: Progress | None = None
        self._task: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            TextColumn(self.metrics.precision, style="bold"),
            console=self.console,
        )
        self._task = self._bar.add_task("train", total=state.max_steps, facts="")
        self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not self.metrics.rows:
            return
        row = self.metrics.rows[-1]
        if "loss" in row:
            facts = f"loss {row['loss']:.4f}  {row.get('tokens_per_s', 0):,} tok/s"
            if self._bar is not None:
                self._bar.update(self._task, facts=facts)
            else:
                norm, rate = row.get("grad_norm", float("nan")), row.get("learning_rate", 0.0)
                self.console.print(
                    f"step {state.global_step}/{state.max_steps} | {facts} | lr {rate:.2e} | "
                    f"norm {norm:.3f} | {self._time_left(state)} left | {self.metrics.precision}",
                    highlight=False,
                    soft_wrap=True,
                )
        elif "eval_loss" in row:
            self.console.print(
                f"step {state.global_step}/{state.max_steps} | "
                f"held-out loss {row['eval_loss']:.4f}",
                highlight=False,
            )

    def _time_left(self, state: TrainerState) -> str:
        per_step = self.metrics.rows[-1]["seconds"] / max(state.global_step, 1)
        minutes, seconds = divmod(round(per_step * (state.max_steps - state.global_step)), 60)
        return f"{minutes}:{seconds:02d}"

    def close(self) -> None:
        """Leave the terminal as it was, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()


class GracefulStop(TrainerCallback):
    """First Ctrl-C (or SIGTERM): finish the step, save a checkpoint, stop. Second: at once.

    Attributes:
        asked: a stop was asked for.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.asked = console, False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.console.print("stopping after this step and saving; Ctrl-C again stops at once")

    def on_step_end(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.asked:
            control.should_save = control.should_training_stop = True


class ScalingStateKeeper(TrainerCallback):
    """Stores FP8 scaling state beside each checkpoint and takes it back on resuming.

    Weights stay plain Hugging Face weights; the amax history of delayed scaling, or the state of
    stochastic rounding's generator, lies beside them. Processes may differ in either (without
    `reduce_amax`; by the lengths of their rows), so each has a file.
    """

    def __init__(self, session: Session, resume_from: Path | None) -> None:
        self.session, self.resume_from = session, resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _, conversion = self.session.training
        if self.resume_from is None or conversion is None or conversion.backend is None:
            return
        own, first = (self.resume_from / scaling_state(i) for i in (args.process_index, 0))
        file = own if own.is_file() else first  # resumed by more processes than it was saved by
        conversion.backend.load_state_tensors(load_file(file) if file.is_file() else {})

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        self.save_to(
            Path(str(args.output_dir)) / f"checkpoint-{state.global_step}", args.process_index
        )

    def save_to(self, folder: Path, process: int = 0) -> None:
        """Store the state as it is now, if there is one."""
        _, conversion = self.session.training
        if conversion is None or conversion.backend is None:
            return
        tensors = conversion.backend.state_tensors()
        if tensors:
            plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
            folder.mkdir(parents=True, exist_ok=True)
            save_file(plain, folder / scaling_state(process))


class LossScaleLog(TrainerCallback, ExportableState):
    """Adds the loss scale and the steps skipped so far to every log of an FP16 run.

    Must come before what writes logs. Counts go on after resuming.

    Attributes:
        skipped: optimizer steps that were skipped since the run began.
    """

    def __init__(self) -> None:
        self.skipped = 0

    def state(self) -> dict[str, Any]:
        """What the trainer stores in `trainer_state.json`."""
        return {"args": {}, "attributes": {"skipped": self.skipped}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        stored: Any = state.stateful_callbacks or {}
        if type(self).__name__ in stored:
            self.skipped = stored[type(self).__name__]["attributes"]["skipped"]

    def on_optimizer_step(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if optimizer.step_was_skipped:
            self.skipped += 1
            refuse_vanished_scale(optimizer.scaler.get_scale(), self.skipped)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if "loss" in logs:
            logs["loss_scale"] = optimizer.scaler.get_scale()
            logs["skipped_steps"] = self.skipped


def peak_memory_gib() -> float:
    """Peak of memory allocated by torch on the GPU, or of this process on the host. GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
