"""Answers at each evaluation: on the terminal, in `metrics.jsonl`, the last ones in the report.

A loss says that something is learnt, an answer says what. The prompts are fixed and the answers
greedy, so what changes from one evaluation to the next is the model. They are asked after the
held-out loss and before anyone's clock goes on: neither tokens/s nor utilisation nor the measured
memory counts them (the callback comes before those in the trainer's list), and training goes on bit
by bit as without them (`finetune.samples`).

Limits: one process asks, the others wait at their next exchange. Weights that FSDP shards are not
whole on any process: nothing is asked, and that is said. Where the memory is too short to answer,
the run goes on without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import TrainerCallback, TrainerState

from finetune.config import RunConfig
from finetune.measured_memory import MemoryMeter
from finetune.samples import Sample, answer

if TYPE_CHECKING:
    from finetune.callbacks import MetricsWriter

PROMPT, ANSWER = 40, 120
"""Longest prompt and answer on the terminal, in characters; `metrics.jsonl` has them whole."""


class SampleWriter(TrainerCallback):
    """Asks a few prompts at each evaluation. Must come before the callbacks that measure speed.

    Attributes:
        samples: the last answers.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: list[str],
        tokenizer: Any,
        metrics: MetricsWriter,
        console: Console,
        meter: MemoryMeter,
    ) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, tokenizer
        self.metrics, self.console, self.meter = metrics, console, meter
        self.samples: list[Sample] = []
        self._asked_at = -1
        self._why_not = ""
        if not config.eval.samples or not prompts:
            self._why_not = "switched off"
        elif config.train.get("fsdp"):
            self._why_not = "weights are sharded"

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._why_not == "weights are sharded" and state.is_world_process_zero:
            self.console.print(
                "no samples while training: FSDP shards the weights over processes; "
                "`python -m finetune generate last` asks the finished run",
                highlight=False,
                soft_wrap=True,
            )

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.ask(model, state)

    def at_end(self, model: Any, state: TrainerState, *, anew: bool) -> list[Sample]:
        """The answers of the trained model: those of the last evaluation, if it is of this model.

        Args:
            model: the trained model.
            state: the trainer's.
            anew: weights have changed since the last evaluation (the best ones were taken back).
        """
        if anew or self._asked_at != state.global_step:
            self.ask(model, state)
        return self.samples

    def ask(self, model: Any, state: TrainerState) -> None:
        """Ask all prompts; print, write and keep the answers."""
        if self._why_not or not state.is_world_process_zero:
            return
        plain = (
            model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        )
        try:
            with self.meter.aside():
                self.samples = answer(
                    plain,
                    self.tokenizer,
                    self.prompts,
                    self.config.eval.max_new_tokens,
                    compute=self.config.precision.compute,
                )
        except torch.OutOfMemoryError:
            self._why_not = "out of memory"
            torch.cuda.empty_cache()
            self.console.print(
                "! no memory is left to answer prompts; training goes on without samples "
                "(eval.samples=false)",
                style="yellow",
                soft_wrap=True,
            )
            return
        self._asked_at = state.global_step
        said = [{"prompt": one.prompt, "answer": one.answer} for one in self.samples]
        self.metrics.write({"step": state.global_step, "samples": said}, state)
        for one in self.samples:
            prompt, reply = _short(one.prompt, PROMPT), _short(one.answer, ANSWER)
            line = Text(f"step {state.global_step}/{state.max_steps} | sample | ")
            line.append(prompt, style="italic").append(" | ").append(reply or "(nothing)")
            self.console.print(line, soft_wrap=True)


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
