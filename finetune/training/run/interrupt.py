"""Signals during training: Ctrl-C, SIGTERM, SIGHUP (a closed terminal), SIGUSR1 (Slurm).

    first       the step ends, a checkpoint is saved, training stops, on all processes; output that
                nobody reads any more (`| head`, a `tee` that died) counts as SIGHUP
    second      training stops at once
    after training, in the last evaluation: it stops at once

In each case the run folder gets a receipt and a report that state it, the model is not saved as
finished, and the command exits with 128 + the signal's number (130 after Ctrl-C). Go on with
`python -m finetune resume`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl

from finetune.hardware.device import processes


class GracefulStop(TrainerCallback):
    """Context manager around training that Ctrl-C ends; also a callback of the trainer.

    Attributes:
        asked: training was stopped, or will be after this step.
        is_cut_short: it was stopped inside a step, maybe in this process alone.
        until: step after which training stops without a signal.
    """

    SIGNALS = tuple(
        getattr(signal, name)
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
        if hasattr(signal, name)  # Windows has the first two
    )

    def __init__(self, console: Console, until: int | None = None) -> None:
        self.console, self.asked, self.number = console, False, int(signal.SIGINT)
        self.until, self.is_cut_short = until, False
        self._has_trained = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():  # only it can set handlers
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        self.console.on_broken_pipe = self._on_closed_output
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self._restore()
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        # A process that fails is followed by torchrun's SIGTERM to all of them, this one included.
        if kind is not None and not interrupted:
            self._outlast_launcher()
        self.is_cut_short = interrupted
        # A second Ctrl-C breaks the step off where it stands.
        self.asked = self.asked or interrupted
        return interrupted

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        vars(self.console).pop("on_broken_pipe", None)

    def _outlast_launcher(self) -> None:
        """Let one SIGTERM pass by a process of several that has failed.

        `torchrun` sends it to all others at once when one is gone: before they have left a receipt
        and said why they end and how to resume.
        """
        if processes() > 1 and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, before))

    def _on_closed_output(self) -> None:
        """Save and stop; rich would end the process where it stands."""
        self.console.quiet = True
        if self.console.file is sys.stdout:  # for what else prints
            # The descriptor, not the object: libraries in C write to it as well.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not self.asked:
            self._on_signal(getattr(signal, "SIGHUP", signal.SIGTERM), None)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.number = number
        # Behind training there is no step whose end could be waited for.
        if self._has_trained:
            raise KeyboardInterrupt
        self.asked = True
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        line = f"{name}: stopping after this step and saving; again stops at once"
        if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun (2.13)
            line += "; torchrun kills what has not ended 30 s later (its --shutdown-timeout)"
        self.console.print(line)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._agree(args)
        self.asked = self.asked or (self.until is not None and state.global_step == self.until)
        if self.asked:
            control.should_save = control.should_training_stop = True

    def _agree(self, args: Any) -> None:
        """Stop on all processes at one step: one that saved alone would wait for the others."""
        import torch
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # The number of the signal, so that all processes exit with the same code.
            vote = torch.tensor(float(self.number if self.asked else 0), device=args.device)
            dist.all_reduce(vote, op=dist.ReduceOp.MAX)
            self.asked = bool(vote)
            self.number = int(vote) or self.number

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._has_trained = True
