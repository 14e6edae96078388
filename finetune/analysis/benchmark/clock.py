"""Times of optimizer steps as the device has them, from the end of one step to the end of the next.

On a GPU an event is recorded where each step ends, and read when all are done: nothing waits, so
steps follow each other as they do in training, data loading included. Elsewhere work is done when
the call returns, and the host's clock tells.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """Marks the end of each step.

    Args:
        kind: of the device, as torch names it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._marks: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.kind == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            if self.kind == "mps":
                torch.mps.synchronize()
            self._marks.append(time.perf_counter())

    def seconds(self, warm_up: int) -> list[float]:
        """Of each step after the first `warm_up` ones, at least one of them. Waits for the end."""
        marks = self._marks[warm_up - 1 :]
        pairs = itertools.pairwise(marks)
        if self.kind != "cuda":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]
