"""Host time between the backward of one step and the forward of the next, shortened or not.

    python -m tests.benchmarks.host_time [--layers 32] [--steps 60]

A LoRA run of many small layers on a CPU, in which the walks that
`finetune.training.helper.host_time` leaves out run in every second step. Printed are medians of the
CPU time of this process, in ms a step, and the ratio of steps beside each other. Products are tiny
and the walks are not: a GPU that has nothing queued waits for them as they are.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finetune import load_recipe
from finetune.config.paths import ASSETS
from finetune.training.health import monitor
from finetune.training.helper.host_time import shortened
from finetune.training.helper.replacing import replaced
from tests.run_folders import trained

WARM_UP = 6
WORDS = (
    "train.logging_steps=1000", "train.eval_strategy=no", "data.eval_fraction=0",
    "eval.samples=false", "train.per_device_train_batch_size=1",
)  # fmt: skip
PARTS = {
    "train": "training_step to the loss: model.train()",
    "flops": "floating_point_ops",
    "zero": "update to the end of the step: model.zero_grad()",
    "all": "backward to the next loss, the update included",
}


class Clock:
    """Milliseconds of parts of steps, alternately shortened and not."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.steps: list[dict[str, float]] = []
        self._trainer, self._model = trainer, model
        self._short, self._marks = ExitStack(), dict[str, float]()

    def wrapped(self, owner: Any, name: str, before: str = "", after: str = "") -> Any:
        """Context manager in which calls of a method leave marks of time."""
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before == "step":
                self._begin(args[1])
            self._marks[before] = time.process_time()
            found = plain(*args, **kwargs)
            self._marks[after] = time.process_time()
            return found

        return replaced(owner, name, call)

    def _begin(self, inputs: Any) -> None:
        """Close the last step, and shorten the next or not."""
        now, at = time.process_time(), self._marks
        if "step" in at:
            train = at["loss"] - at["step"]
            found = {
                "train": train, "flops": at["counted"] - at["count"],
                "zero": at["end"] - at["updated"], "all": train + now - at["backward"],
            }  # fmt: skip
            self.steps.append({part: 1e3 * seconds for part, seconds in found.items()})
        self._short.close()
        if len(self.steps) % 2:
            self._short.enter_context(shortened(self._trainer, self._model))
            self._trainer.floating_point_ops(inputs)  # what it counts once


def measured(words: list[str]) -> list[dict[str, float]]:
    """Parts of each step of a run, of which the first is as it is without `shortened`."""
    clocks: list[Clock] = []

    @contextmanager
    def alternating(trainer: Any, model: nn.Module) -> Iterator[None]:
        clock = Clock(trainer, model)
        clocks.append(clock)
        handler = trainer.callback_handler
        with ExitStack() as stack:
            for each in (
                (trainer, "training_step", "step", "backward"),
                (trainer, "compute_loss", "loss"),
                (trainer, "floating_point_ops", "count", "counted"),
                (handler, "on_optimizer_step", "", "updated"),
                (handler, "on_step_end", "end"),
            ):
                stack.enter_context(clock.wrapped(*each))
            yield
        clock._short.close()

    with replaced(monitor, "shortened", alternating), tempfile.TemporaryDirectory() as out:
        trained(load_recipe("tiny_lora_fp8", words), out=out, console=Console(quiet=True))
    return clocks[0].steps


def save_model(folder: str, layers: int) -> None:
    """A Llama of narrow layers, with the packaged tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_llama")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.layers)
        steps = measured([f"model.name={folder}", f"train.max_steps={args.steps}", *WORDS])
    plain, short = steps[WARM_UP::2], steps[WARM_UP + 1 :: 2]
    pairs = list(zip(plain, short, strict=False))
    print("| host time, ms a step | as Transformers has it | shortened | ratio |")
    print("|---|---|---|---|")
    for part, title in PARTS.items():
        before, after = (statistics.median(x[part] for x in each) for each in (plain, short))
        ratio = statistics.median(b[part] / a[part] for a, b in pairs)
        print(f"| {title} | {before:.2f} | {after:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
