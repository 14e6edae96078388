"""Device time of every optimizer step: `steps.jsonl`.

A step is timed twice, from marks at its two ends:

    step            begin ───────── end     begin ───────── end
    `rows`            |── seconds ──|          |── seconds ──|      weights are updated
    `intervals`                     |───────── interval ─────|      data loading included

A row of the file is `{"step": 7, "seconds": 0.31, "tokens": 902}`. A step begins when its batches
are ready and ends when weights are updated, without fetching rows, evaluating, saving and logging.
Tokens are those of its micro-batches, over all processes, without padding. Packed rows have padding
only at their end, and count whole if there is no mask.

On a GPU a host clock would time kernel launches. Events are recorded on the stream instead, and
read at the trainer's next log, which has already synchronized, so timing adds no wait.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState

STEPS_FILE = "steps.jsonl"


def mark(device: str) -> Any:
    """Mark this moment on a device (`cuda`, `mps`, ...): an event on a GPU's stream, else host
    time.
    """
    if device == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    if device == "mps":  # its events cannot be read without a wait
        torch.mps.synchronize()
    return time.perf_counter()


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds between two marks; GPU marks must be complete."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000


class StepTimer(TrainerCallback):
    """Times every optimizer step, and writes `steps.jsonl` if it has a path.

    Attributes:
        rows: (step, seconds, tokens) of each finished step, in order.
        intervals: seconds from the end of a step to the end of the next, one fewer than steps.
    """

    def __init__(self, device: str, path: Path | None = None) -> None:
        """Time the steps of one training on a device of this type; append to the file."""
        self.device, self.path = device, path
        self.rows: list[dict[str, Any]] = []
        self.intervals: list[float] = []
        self._begin: Any = None
        self._last_end: Any = None
        self._tokens: list[Tensor | int] = []
        self._finished: list[tuple[int, Any, Any, list[Tensor | int]]] = []
        self._undo = contextlib.ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.close()

        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if not module.training or self._begin is None:
                return
            mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
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
            self._finished.append((state.global_step, self._begin, end, self._tokens))
            self._begin = None

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
        """Add newly finished steps to rows, intervals and file."""
        finished, self._finished = self._finished, []
        if not finished:
            return
        if self.device == "cuda":
            torch.cuda.synchronize()
        totals = torch.tensor([sum(int(n) for n in tokens) for *_, tokens in finished])
        if dist.is_initialized() and dist.get_world_size() > 1:
            totals = totals.cuda() if dist.get_backend() == "nccl" else totals
            dist.all_reduce(totals)
        new: list[dict[str, Any]] = []
        for (step, begin, end, _), tokens in zip(finished, totals.tolist(), strict=True):
            seconds = round(seconds_between(begin, end), 6)
            new.append({"step": step, "seconds": seconds, "tokens": tokens})
            if self._last_end is not None:
                self.intervals.append(seconds_between(self._last_end, end))
            self._last_end = end
        self.rows += new
        if self.path is not None and state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
