"""Samples: greedy answers to a few prompts, also during training.

The prompts are fixed and the answers greedy, so changes between evaluations come from the model.
Questions of rows with images are asked with them; a small copy of each lies beside the metrics, in
`samples/`, where the report finds it.

Layers run in the precision of evaluation, `precision.eval`, the rest under training's autocast.

Sampling leaves training unchanged, bit by bit (`undisturbed`): it restores random generators and
module modes; no forward of evaluation moves a scale. Compiled decoder layers run eagerly: each
prompt length would recompile them until the compiler gives up, on the training step as well.
Tokens/s, utilization and measured memory exclude answers: `SampleWriter` comes before the callbacks
that measure.

Limits: one process generates, the others wait at their next exchange. With FSDP no process has
whole weights: nothing is generated, with a notice. If memory is too short, the run continues
without.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import TrainerCallback, TrainerState

from finetune.config.schema import RunConfig
from finetune.data.answers import Answers
from finetune.data.chat import BadRowError
from finetune.errors import ConfigError
from finetune.precision.settings import Compute
from finetune.runs.receipt import Sample
from finetune.storage.processors import tokenizer_of
from finetune.training.asking.questions import Question, encode, length_of, question_of
from finetune.training.health.callbacks import step_label
from finetune.training.health.memory_meter import MemoryMeter
from finetune.training.helper.undisturbed import autocast, undisturbed, whole
from finetune.units import shortened

if TYPE_CHECKING:
    from finetune.data.dataset import Rows
    from finetune.training.health.callbacks import MetricsWriter

PROMPTS, SEARCHED = 2, 64
"""Prompts taken from evaluation rows, and rows searched for them."""


def prompts_of(config: RunConfig, rows: Rows, reader: Any) -> list[Question]:
    """The recipe's prompts, or of the first evaluation rows those that leave room for an answer.

    Args:
        reader: the tokenizer, or the processor of a model that takes images.

    Raises:
        ConfigError: a prompt of the recipe is empty, or leaves no room.
    """
    from finetune.storage.pretrained import load_shape, positions

    if not config.eval.samples or config.model.head:
        return []
    most, room = config.eval.max_new_tokens, positions(load_shape(config.model))
    if config.data.prompts:
        for prompt in config.data.prompts:
            check_room_for(prompt, length_of(reader, prompt), most, room, "data.prompts")
        return [Question.of(prompt) for prompt in config.data.prompts]
    # 1024 is TRL's default.
    longest = int(config.train.max_length or 1024)  # training truncated longer rows
    few: Any = rows.eval  # a stream is not read for its first rows where there are others
    # Few rows, since each is tokenized before training begins.
    few = rows.first(SEARCHED) if few is None else few.select(range(min(SEARCHED, len(few))))
    longest = longest if room is None else min(longest, room - most)
    fits = (one for one in _distinct(few) if 0 < length_of(reader, one) <= longest)
    return list(itertools.islice(fits, PROMPTS))


def _distinct(rows: Iterable[Any]) -> Iterator[Question]:
    """Questions of rows, each once, their images opened; a row whose image is broken is counted."""
    seen = set()
    for asked in map(question_of, rows):
        if (key := asked.key) not in seen:
            seen.add(key)
            with contextlib.suppress(BadRowError):
                yield asked.opened()


def check_room_for(prompt: str, length: int, most: int, room: int | None, where: str) -> None:
    """Raise `ConfigError` for an empty prompt, or one that leaves no `room` for an answer."""
    if length == 0:
        raise ConfigError("a prompt is empty", where=where, fix="give a prompt, or leave it out")
    if room is not None and length + most > room:
        raise ConfigError(
            f"the prompt {shortened(prompt, 40)!r} leaves no room for an answer",
            where=where,
            why=f"it has {length:,} tokens, the answer up to {most:,}, and the model {room:,} "
            "positions (max_position_embeddings)",
            fix="a shorter prompt"
            + (
                f", or eval.max_new_tokens={room - length} (--max-new-tokens of generate)"
                if room > length
                else ""
            ),
        )


def answer(
    model: Any,
    reader: Any,
    prompts: Sequence[str | Question],
    max_new_tokens: int = 48,
    *,
    compute: Compute = "bf16",
    **generation: Any,
) -> list[Sample]:
    """Generate greedy answers in evaluation mode, one prompt at a time; restores training state.

    Args:
        model: plain or with adapters, converted or not, not sharded.
        reader: its tokenizer, or the processor of one that takes images.
        compute: the run's `precision.compute`, which decides the autocast type.
        generation: more arguments of `generate`.
    """
    samples, options = [], {"do_sample": False, "max_new_tokens": max_new_tokens, **generation}
    answers = Answers.of(tokenizer_of(reader))
    with undisturbed(model), autocast(compute, model.device.type), torch.no_grad():
        for asked in map(Question.of, prompts):
            inputs = {k: v.to(model.device) for k, v in encode(reader, asked).items()}
            prompt = inputs["input_ids"][0]
            tokens = model.generate(**inputs, **options)[0, len(prompt) :]
            turn = answers.read(tokens, prompt)
            said = turn["content"].strip()
            samples.append(Sample(asked.text, said, (), asked.expected, len(prompt)))
    return samples


# --------------------------------------------------------------------------------- during training

PROMPT, ANSWER = 40, 120
"""Longest prompt and answer in the terminal, in characters; `metrics.jsonl` has all of them."""


class SampleWriter(TrainerCallback):
    """Generates samples at each evaluation; must precede the callbacks that measure speed."""

    def __init__(
        self,
        config: RunConfig,
        prompts: list[Question],
        reader: Any,
        metrics: MetricsWriter,
        console: Console,
        meter: MemoryMeter,
    ) -> None:
        self.config, self.prompts, self.reader = config, prompts, reader
        self.metrics, self.console, self.meter = metrics, console, meter
        self.samples: list[Sample] = []
        self.copies: list[tuple[str, ...]] = []
        self._asked_at = -1
        self._why_not = ""
        if not config.eval.samples or not prompts:
            self._why_not = "switched off"
        elif config.train.fsdp:
            self._why_not = "weights are sharded"

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._why_not == "weights are sharded" and state.is_world_process_zero:
            self.console.print(
                "no samples while training: FSDP shards the weights over processes; "
                "`python -m finetune generate last` asks the finished run",
            )

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.ask(model, state)

    def at_end(self, model: Any, state: TrainerState, *, changed: bool) -> list[Sample]:
        """Answers of the trained model.

        Args:
            changed: its weights are not those of the last evaluation any more.
        """
        # The last step may have been evaluated already, and answers take time.
        if changed or self._asked_at != state.global_step:
            self.ask(model, state)
        return self.samples

    def ask(self, model: Any, state: TrainerState) -> None:
        """Answer all prompts; print, write and keep the answers."""
        # The others need not wait here: their next collective does.
        if self._why_not or not state.is_world_process_zero:
            return
        model = whole(model)
        most, compute = self.config.eval.max_new_tokens, self.config.precision.compute
        try:
            with self.meter.aside():
                said = answer(model, self.reader, self.prompts, most, compute=compute)
        except torch.OutOfMemoryError:
            self._why_not = "out of memory"
            torch.cuda.empty_cache()
            self.console.print(
                "! no memory is left to answer prompts; training continues without samples "
                "(eval.samples=false)",
                style="yellow",
            )
            return
        self._asked_at = state.global_step
        folder = self.metrics.path.parent
        self.copies = self.copies or [
            one.keep_copies(folder, str(i)) for i, one in enumerate(self.prompts, 1)
        ]
        pairs = zip(said, self.copies, strict=True)
        self.samples = [replace(one, images=images) for one, images in pairs]
        rows = [one.facts() for one in self.samples]
        self.metrics.write({"step": state.global_step, "samples": rows}, state)
        for one in self.samples:
            line = Text(f"{step_label(state, self.console)} | sample | ")
            asked, said = (" ".join(text.split()) for text in (one.prompt, one.answer))
            line.append(shortened(asked, PROMPT), style="italic").append(" | ")
            line.append(shortened(said, ANSWER) or "(empty answer)")
            self.console.print(line, no_wrap=True, overflow="ellipsis")  # metrics.jsonl has all
