"""What training health costs, as a share of step time.

    python -m tests.benchmarks.health_overhead [--backend emulated] [--scaling tensorwise]

One run of the stock `Trainer`, in which every second step is looked into: a pair of neighbours is
slowed alike by a noisy machine. Printed are the median of the pairwise ratios, the share of the
check that is made in every step, and what both come to at the default interval; the goal is 3 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune import HealthMonitor
from finetune.hardware.device import this_device
from finetune.precision.settings import PrecisionConfig
from finetune.training.helper import session
from tests.benchmarks.step_overhead import make_model

DEFAULT = PrecisionConfig().health_every


class TimedMonitor(HealthMonitor):
    """Remembers how long the check of every step takes, in seconds."""

    checks: list[float]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        started = _now()
        super().on_pre_optimizer_step(*args, **kwargs)
        if not self._due:
            self.checks.append(_now() - started)


class Stopwatch(TrainerCallback):
    """Seconds of each step, from the end of one to the end of the next, health row included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last = _now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = _now()
        self.seconds.append(now - self._last)
        self._last = now


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(precision: PrecisionConfig, steps: int, hidden: int, layers: int):
    """Pairwise ratios of a step looked into over its plain neighbour, and shares of the check."""
    session.install(precision)
    ids = torch.randint(1, 1024, (64, 128)).tolist()
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=2 * steps + 8, per_device_train_batch_size=8, bf16=True,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        use_cpu=this_device().kind == "cpu",
    )  # fmt: skip
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    trainer = Trainer(model=make_model(hidden, layers), args=args, train_dataset=rows)
    monitor, watch = TimedMonitor(trainer, every=2, say=lambda _: None), Stopwatch()
    monitor.checks = []
    trainer.add_callback(monitor)
    trainer.add_callback(watch)
    trainer.train()
    plain, looked = watch.seconds[8::2], watch.seconds[9::2]
    ratios = [b / a for a, b in zip(plain, looked, strict=True)]
    checks = [c / a for a, c in zip(plain, monitor.checks[4:], strict=True)]
    return ratios, checks


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--backend", default="emulated")
    parser.add_argument("--scaling", default="tensorwise")
    parser.add_argument("--compute", default="fp8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    fp8 = {"backend": args.backend, "scaling": args.scaling, "emulation": "allow"}
    values = {"compute": args.compute} | (fp8 if args.compute == "fp8" else {})
    precision = PrecisionConfig.model_validate(values)
    ratios, checks = measure(precision, args.steps, args.hidden, args.layers)
    low, ratio, high = statistics.quantiles(ratios, n=4)
    check = statistics.median(checks)
    print(f"a step that is looked into: {ratio:.2f} of a plain one ({low:.2f} to {high:.2f})")
    print(f"the check of every step: {check:.2%}")
    print(f"at health_every={DEFAULT}: {(ratio - 1) / DEFAULT + check:.2%} of step time")


if __name__ == "__main__":
    main()
