"""Microseconds that each of a run's callbacks takes, a step.

    python -m tests.benchmarks.callback_cost [--steps 100] [RECIPE] [OVERRIDES ...]

A recipe is trained in this process, its rows logged at every step; default is a tiny model in BF16.
Printed is the CPU time of the thread that trains, of each callback and of a whole step, the first
steps left out: what a run costs beside the stock trainer is the sum of these, and the sentinel
(`tests.benchmarks.sentinel_overhead`). Health rows, one in 50 steps, are among them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

SKIPPED = 10
"""Steps at the beginning, in which the proof looks on."""
OF_A_STEP = (
    *("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_step_end", "on_log"),
)
"""Events of each step, unlike those of evaluations and checkpoints."""


class Clock:
    """CPU seconds by callback, of a `CallbackHandler` whose calls it makes.

    Attributes:
        seconds: callback -> seconds.
        step: seconds of a whole step, on average.
    """

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        self.step = self._begun = 0.0
        self._steps = 0

    def call_event(
        self, handler: Any, event: str, args: Any, state: Any, control: Any, **more: Any
    ):
        """`CallbackHandler.call_event`, timed."""
        names = ("model", "processing_class", "optimizer", "lr_scheduler")
        more |= {name: getattr(handler, name) for name in names}
        more |= {name: getattr(handler, name) for name in ("train_dataloader", "eval_dataloader")}
        for callback in handler.callbacks:
            began = time.thread_time()
            result = getattr(callback, event)(args, state, control, **more)
            if state.global_step >= SKIPPED and event in OF_A_STEP:
                self.seconds[type(callback).__name__] += time.thread_time() - began
            control = control if result is None else result
        if event == "on_step_end" and state.global_step >= SKIPPED:
            now, steps = time.thread_time(), state.global_step - SKIPPED
            self._begun = self._begun or now
            self.step, self._steps = (now - self._begun) / max(steps, 1), steps
        return control

    def rows(self) -> list[tuple[str, float]]:
        """(Callback, microseconds a step), the most first."""
        return [(name, s / max(self._steps, 1) * 1e6) for name, s in self.seconds.most_common()]


def main() -> None:
    """Train and print a line for each callback."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("words", nargs="*", default=["tiny_full_bf16"], metavar="RECIPE")
    given = parser.parse_args()
    from transformers.trainer_callback import CallbackHandler

    from finetune.api import train
    from finetune.config.recipe import load_recipe

    recipe, *overrides = given.words
    overrides += [f"train.max_steps={given.steps}", "train.logging_steps=1"]
    overrides += ["train.eval_strategy=no", "train.save_strategy=no"]
    clock = Clock()
    CallbackHandler.call_event = lambda handler, *args, **more: clock.call_event(
        handler, *args, **more
    )
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w") as log:
        train(load_recipe(recipe, overrides), out=folder, console=Console(file=log, width=1000))
    for name, us in clock.rows():
        print(f"{us:8.0f} us  {name}")
    total = sum(us for _, us in clock.rows())
    print(f"{total:8.0f} us  all callbacks, {total / clock.step / 1e6:.2%} of a step's CPU time")


if __name__ == "__main__":
    main()
