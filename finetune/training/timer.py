"""The time of every optimizer step, as the device saw it: `steps.jsonl`.

A row is `{"step": 7, "seconds": 0.31, "tokens": 902}`: from the step's beginning (its batches are
there) to its end (weights are updated), so fetching rows, evaluating, saving and logging are not in
it; and the tokens that its micro-batches held, over all processes, padding not counted. Rows that
are packed into one hold padding only at their end, and are counted whole where no mask says which.

On a GPU the host runs ahead of the device, and a host clock would time the launching of kernels.
Events are recorded on the stream instead, and read when the trainer next logs, which has waited for
the device by then, so that timing adds no wait of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState

FILE = "steps.jsonl"


class StepClock(TrainerCallback):
    """Writes `steps.jsonl`.

    Attributes:
        rows: what was written, oldest first.
    """

    def __init__(self, path: Path, device: str) -> None:
        """Time the steps of one training.

        Args:
            path: file to append to.
            device: `cuda`, or any other kind, whose steps end when the host's do.
        """
        self.path, self.on_gpu = path, device == "cuda"
        self.rows: list[dict[str, Any]] = []
        self._pending: list[tuple[int, Callable[[], float], list[Tensor | int]]] = []
        self._begin: Any = None
        self._tokens: list[Tensor | int] = []
        self._hook: RemovableHandle | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.close()

        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if module.training and self._begin is not None:
                self._tokens.append(_tokens_of(kwargs, self.on_gpu))

        self._hook = model.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens = []
        self._begin = self._now()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._begin is None:
            return
        begin, end, self._begin = self._begin, self._now(), None

        def seconds() -> float:
            return begin.elapsed_time(end) / 1000 if self.on_gpu else end - begin

        self._pending.append((state.global_step, seconds, self._tokens))

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if "loss" in (logs or {}):  # the trainer has read the loss of the steps so far
            self._write(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write(state)
        self.close()

    def close(self) -> None:
        """Stop counting. Harmless when already done."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self, state: TrainerState) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        totals = torch.tensor([sum(int(n) for n in tokens) for _, _, tokens in pending])
        if dist.is_initialized() and dist.get_world_size() > 1:
            totals = totals.cuda() if dist.get_backend() == "nccl" else totals
            dist.all_reduce(totals)
        rows = [
            {"step": step, "seconds": round(seconds(), 6), "tokens": tokens}
            for (step, seconds, _), tokens in zip(pending, totals.tolist(), strict=True)
        ]
        self.rows += rows
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


def _tokens_of(inputs: dict[str, Any], on_gpu: bool) -> Tensor | int:
    """Tokens of a micro-batch; on a GPU a scalar there, so that nothing waits for it."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.sum() if on_gpu else int(mask.sum())
    return ids.numel() if isinstance(ids, Tensor) else 0
