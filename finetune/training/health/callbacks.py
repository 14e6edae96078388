"""Callbacks that record and show a running training: `metrics.jsonl`, `steps.jsonl`, a bar."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from finetune.config.methods import Method
from finetune.config.train_keys import TrainerArguments
from finetune.hardware.device import synchronize
from finetune.hardware.energy import EnergyCounter
from finetune.runs.folder import finite
from finetune.runs.progress import log_line
from finetune.training.health.memory_meter import peak_memory_gib
from finetune.training.helper.compute_types import refuse_vanished_scale
from finetune.units import plural


def summed(numbers: Tensor) -> Tensor:
    """Numbers of this process, summed over all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return numbers
    # NCCL reduces tensors of GPUs alone.
    numbers = numbers.cuda() if dist.get_backend() == "nccl" else numbers
    dist.all_reduce(numbers)
    return numbers


class TimeAndEnergy(NamedTuple):
    """Seconds and joules until now; joules are NaN where nothing counts them."""

    seconds: float
    joules: float

    def __sub__(self, other: TimeAndEnergy) -> TimeAndEnergy:
        return TimeAndEnergy(self.seconds - other.seconds, self.joules - other.joules)


class MetricsWriter(TrainerCallback):
    """Writes every log of the trainer to `metrics.jsonl`, one JSON object per line.

    Seconds and joules of steps are of training alone, without evaluations. Joules are of the
    GPUs of all processes.

    Attributes:
        rows: written rows, newest last; in a resumed run they begin with what was logged before.
        resumed: number of these.
        trained: seconds and joules of training until the last log; in all once it has ended.
    """

    def __init__(
        self, path: Path, precision: str, counter: EnergyCounter | None = None,
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        self.path, self.precision = path, precision
        self.counter = counter or EnergyCounter("cpu")
        self.rows, self.resumed, self._written = [*earlier], len(earlier), 0
        # A resumed run goes on counting where its log ended, or curves over time would fold back.
        self._before = max((finite(row.get("seconds")) or 0.0 for row in earlier), default=0.0)
        self.trained = TimeAndEnergy(0.0, 0.0)
        self._last = self._now()
        self._started = self._last.seconds
        self._evaluating: TimeAndEnergy | None = None
        self._last_tokens, self._last_step = 0.0, 0

    def _now(self) -> TimeAndEnergy:
        return TimeAndEnergy(time.perf_counter(), self.counter.joules())

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._last = self._now()
        self._started = self._last.seconds
        self._last_step = state.global_step  # a resumed run does not begin at 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Power is sampled, and summed between samples: each step is one.
        if self.counter.integrates:
            self.counter.joules()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        since = round(self._before + time.perf_counter() - self._started, 3)
        row = {"step": state.global_step, "seconds": since, **(logs or {})}
        if "loss" in row:
            seconds, joules = self._count()
            if (tokens := row.get("num_tokens")) is not None:
                row["tokens_per_s"] = round((tokens - self._last_tokens) / seconds)
                self._last_tokens = tokens
            if steps := state.global_step - self._last_step:
                row["step_seconds"] = round(seconds / steps, 6)
            self._last_step = state.global_step
            row["peak_memory_gib"] = round(peak_memory_gib(), 4)
            if math.isfinite(joules):
                row |= {"watts": round(joules / seconds, 1), "joules": round(self.trained.joules)}
        row["precision"] = self.precision
        self.write(row, state)

    def _count(self) -> TimeAndEnergy:
        """Seconds and joules since the last count, which are added to training's."""
        now = self._now()
        spent, self._last = now - self._last, now
        # In float64: a run of days draws more joules than float32 has digits for.
        joules = summed(torch.tensor([spent.joules], dtype=torch.float64)).item()
        # Two logs at one moment divide by no zero.
        spent = TimeAndEnergy(max(spent.seconds, 1e-9), joules)
        self.trained = TimeAndEnergy(*map(operator.add, self.trained, spent))
        return spent

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._count()

    def energy(self, tokens: int) -> dict[str, Any]:
        """Receipt entries: `joules`, `tokens_per_joule`, `mean_watts` (None if unmeasured), how.

        Args:
            tokens: tokens of all steps, over all processes.
        """
        seconds, joules = self.trained
        if not (math.isfinite(joules) and joules > 0):
            nothing = dict.fromkeys(("joules", "tokens_per_joule", "mean_watts"))
            return nothing | {"measured": self.counter.how}
        return {
            "joules": round(joules, 1),
            "tokens_per_joule": tokens / joules,
            "mean_watts": round(joules / seconds, 1),
            "measured": f"{self.counter.how}, training without evaluations",
        }

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the block from the seconds and joules of steps."""
        began = self._now()
        yield
        self._exclude(began)

    def _exclude(self, began: TimeAndEnergy) -> None:
        now = self._now()
        # As if the block had taken no time.
        self._last = now - (began - self._last)

    def write(self, row: dict[str, Any], state: TrainerState) -> None:
        """Add a row of another kind, with its step."""
        self.rows.append(row)
        if state.is_world_process_zero:
            # All processes keep the rows, the first one writes them.
            new, self._written = self.rows[self._written :], len(self.rows)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in new)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._evaluating is None:  # the first batch of an evaluation
            self._evaluating = self._now()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Evaluation is no training time, and right behind a log nothing else has happened.
        began = self._evaluating if state.global_step != self._last_step else None
        self._exclude(began or self._last)
        self._evaluating = None

    def values(self, key: str) -> list[float]:
        """All values that this process wrote under `key`, oldest first."""
        return [row[key] for row in self.rows[self.resumed :] if key in row]


def step_label(state: TrainerState, console: Console) -> str:
    """`step 20/400`; in a terminal, where a bar shows the last step, `step 20`."""
    last = "" if console.is_terminal else f"/{state.max_steps}"
    return f"step {state.global_step}{last}"


def extent(args: Any, state: TrainerState, loader: Any) -> str:
    """How often a run reads its rows; empty for a stream, which has no length.

    50 steps of 4 micro-batches, where the rows make 400: half an epoch. Where they make 13 of them,
    an epoch ends with a step of one: 10 steps of 3 micro-batches are two epochs.
    """
    if loader is None or not has_length(loader) or not len(loader):
        return ""
    args = TrainerArguments(args)
    batches, each = len(loader), args.gradient_accumulation_steps
    # Transformers (5.23) ends an epoch with a step of fewer micro-batches, so steps per epoch are
    # rounded up.
    whole, rest = divmod(state.max_steps, math.ceil(batches / each))
    epochs = whole + rest * each / batches
    shown = f"{epochs:.2g}"
    line = f"{plural(state.max_steps, 'step')} = {shown} {'epoch' if shown == '1' else 'epochs'}"
    if args.max_steps <= 0 or epochs >= 0.995:
        return line
    unread = f"{1 - epochs:.0%} of your rows are never read"
    return f"{line}; {unread}. To read all: train.num_train_epochs=1"


class ProgressBar(TrainerCallback):
    """Step, loss or rewards, tokens/s, time left and precision, as a terminal bar or as lines."""

    def __init__(self, console: Console, metrics: MetricsWriter, method: Method) -> None:
        self.console, self.metrics, self.method = console, metrics, method
        self._bar: Progress | None = None
        self._task: Any = None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        if state.is_world_process_zero and (line := extent(args, state, train_dataloader)):
            self.console.print(line, highlight=False)
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            TextColumn(self.metrics.precision, style="bold"),
            console=self.console,
        )
        self._task = self._bar.add_task("train", total=state.max_steps, facts="")
        self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not self.metrics.rows:
            return
        row, left = self.metrics.rows[-1], state.max_steps - state.global_step
        if self._bar is not None and "loss" in row:  # it shows the time left, too
            self._bar.update(self._task, facts=f"{row.get('tokens_per_s', 0):,} tok/s")
            left = None
        step, width = step_label(state, self.console), self.console.width
        if line := log_line(row, step, self.method, left, width):
            # In a pipe nothing wraps: without the search for words to wrap between it is half the
            # time.
            self.console.print(line, highlight=False, soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()


class LossScaleLog(TrainerCallback, ExportableState):
    """Adds the loss scale and the number of skipped steps to every log of an FP16 run.

    Must precede the callbacks that write logs. Counts continue after resuming.
    """

    def __init__(self) -> None:
        self.skipped = 0

    def state(self) -> dict[str, Any]:
        """State stored in `trainer_state.json`."""
        return {"args": {}, "attributes": {"skipped": self.skipped}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        stored: Any = state.stateful_callbacks or {}
        if type(self).__name__ in stored:
            self.skipped = stored[type(self).__name__]["attributes"]["skipped"]

    def on_optimizer_step(self, *args: Any, optimizer: Any = None, **_: Any) -> None:
        if optimizer.step_was_skipped:
            self.skipped += 1
            refuse_vanished_scale(optimizer.scaler.get_scale(), self.skipped)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if "loss" in logs:
            logs["loss_scale"] = optimizer.scaler.get_scale()
            logs["skipped_steps"] = self.skipped


# ------------------------------------------------------------------------------------- step times


def mark(device: str) -> Any:
    """This moment on a device: an event on a GPU's stream, else host time."""
    if device == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)  # events of other accelerators cannot be read without a wait
    return time.perf_counter()


def exchange_of(model: Any) -> tuple[int, dict[str, float]]:
    """What DDP measured of the last backward that it sampled: the number of that, and seconds.

    `exchange` is from the first bucket of gradients that is sent to the last that is summed,
    `waited` the part of it after backward has computed all: waiting for slower processes, too.
    Reading a sample waits for its backward, as DDP (torch 2.13) itself does in the next forward.
    """
    if not isinstance(model, DistributedDataParallel) or model.logger is None:
        return 0, {}
    model.logger.set_runtime_stats_and_log()
    found: dict[str, Any] = model._get_ddp_logging_data()
    span, hidden = (found.get(f"backward_{k}_time") or 0 for k in ("comm", "compute_comm_overlap"))
    times = {"exchange": span, "waited": span - hidden}
    return found.get("iteration", 0), {key: round(ns / 1e9, 6) for key, ns in times.items()}


class StepTimer(TrainerCallback):
    """Times every optimizer step, and writes `steps.jsonl` if it has a path.

    A row of the file is `{"step": 7, "seconds": 0.31, "tokens": 902}`. A step begins when its
    batches are ready and ends when weights are updated, without fetching rows, evaluating, saving
    and logging. Tokens are of its micro-batches, over all processes, without padding; packed
    rows have padding only at their end, and count whole if there is no mask.

    On a GPU a host clock would time kernel launches. Events are recorded on the stream instead, and
    read at the trainer's next log, which has already synchronized, so timing adds no wait.

    Several processes with a copy of the model each (DDP) have `exchange` and `waited` in the steps
    that DDP samples, the first ten and every hundredth: see `exchange_of`.

    Attributes:
        rows: (step, seconds, tokens) of each finished step, in order.
        trainer: the trainer, whose wrapped model says what its processes exchange.
    """

    def __init__(self, device: str, path: Path | None = None) -> None:
        self.device, self.path = device, path
        self.trainer: Any = None
        self._exchanged = 0
        self.rows: list[dict[str, Any]] = []
        self._begin: Any = None
        self._tokens: list[Tensor | int] = []
        self._finished: list[tuple[dict[str, Any], Any, Any, list[Tensor | int]]] = []
        self._undo = contextlib.ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.close()

        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # Without gradients it writes answers, or is its own reference.
            if not (module.training and torch.is_grad_enabled()) or self._begin is None:
                return
            mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
            # Without padding: what is counted as speed is what is learned from.
            if isinstance(mask, Tensor) and mask.dim() == 2:
                # On a GPU a device scalar, to avoid a wait.
                self._tokens.append(mask.sum() if self.device == "cuda" else int(mask.sum()))
            else:
                self._tokens.append(ids.numel() if isinstance(ids, Tensor) else 0)

        self._undo.callback(model.register_forward_pre_hook(count, with_kwargs=True).remove)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tokens = []
        self._begin = mark(self.device)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._begin is not None:
            end = mark(self.device)
            iteration, times = exchange_of(getattr(self.trainer, "model_wrapped", None))
            # DDP measures some backwards only; between them it returns the last one again.
            row = {"step": state.global_step} | (times if iteration > self._exchanged else {})
            self._finished.append((row, self._begin, end, self._tokens))
            self._begin, self._exchanged = None, iteration

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):  # the trainer has read the loss of the steps so far
            self._read(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._read(state)
        self.close()

    def close(self) -> None:
        """Stop counting. Idempotent."""
        self._undo.close()

    def _read(self, state: TrainerState) -> None:
        """Add newly finished steps to rows and file."""
        finished, self._finished = self._finished, []
        if not finished:
            return
        # Events of a GPU have times only once it has reached them.
        synchronize(self.device)
        totals = summed(torch.tensor([sum(int(n) for n in tokens) for *_, tokens in finished]))
        new: list[dict[str, Any]] = []
        for (row, begin, end, _), tokens in zip(finished, totals.tolist(), strict=True):
            seconds = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            new.append(row | {"seconds": round(seconds, 6), "tokens": tokens})
        self.rows += new
        if self.path is not None and state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
