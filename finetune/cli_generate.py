"""The command line's `generate`: ask the model of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from finetune.errors import ConfigError
from finetune.run_lookup import find_run

STDIN = "-"


def generate(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder, `last`, or a recipe's name.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Left out, or `-`: lines of the input."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; left out: eval.max_new_tokens.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws, with a temperature.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A step, or `last`; left out: the run's end.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Ask the model of a run, as it was trained."""
    if seed is not None and temperature == 0:
        raise ConfigError(
            "--seed would change nothing",
            where="--seed",
            why="without a temperature nothing is drawn",
            fix="--temperature 0.7, or leave it out",
        )
    folder = find_run(run, out)
    from finetune.trained import loaded, open_trained

    trained = open_trained(folder, checkpoint)
    notes = Console(stderr=True, highlight=False)
    if notes.is_terminal:
        notes.print(f"loading {trained.weights}", style="dim", soft_wrap=True)
    given = [] if prompts in (None, [STDIN]) else list(prompts or ())
    answers = []
    with loaded(trained) as (model, tokenizer):
        ask = _Asking(model, tokenizer, trained.config, max_new_tokens, temperature, seed)
        for prompt in given or _lines(notes):
            if len(given) != 1 and not as_json:
                print_prompt(prompt)
            answers.append(ask(prompt, stream=not as_json))
    if as_json:
        print(json.dumps({"run": str(folder), "answers": answers}, indent=1, ensure_ascii=False))


def print_prompt(prompt: str) -> None:
    """Where several are asked, or lines are read, say which is answered."""
    if not _is_typed() or not sys.stdout.isatty():
        Console(highlight=False).print(Text("> ") + Text(prompt), style="dim", soft_wrap=True)


class _Asking:
    """Asks one prompt at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: Any,
        max_new_tokens: int | None,
        temperature: float,
        seed: int | None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.most = max_new_tokens or config.eval.max_new_tokens
        self.options: dict[str, Any] = {}
        if temperature > 0:
            self.options = {"do_sample": True, "temperature": temperature}
        self.seed = seed

    def __call__(self, prompt: str, *, stream: bool) -> dict[str, Any]:
        """One answer; on the terminal as it grows."""
        from transformers import TextStreamer, set_seed

        from finetune.samples import answer, check_room_for, length_of, positions

        length, room = length_of(self.tokenizer, prompt), positions(self.model.config)
        check_room_for(prompt, length, self.most, room, "PROMPT")
        if self.options and self.seed is not None:
            set_seed(self.seed)
        options = dict(self.options)
        if stream:
            options["streamer"] = TextStreamer(
                self.tokenizer, skip_prompt=True, skip_special_tokens=True
            )
        started = time.perf_counter()
        (sample,) = answer(
            self.model,
            self.tokenizer,
            [prompt],
            self.most,
            compute=self.config.precision.compute,
            **options,
        )
        seconds = round(time.perf_counter() - started, 3)
        return {"prompt": prompt, "answer": sample.answer, "seconds": seconds}


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines(notes: Console) -> Iterator[str]:
    """Prompts from the input, a line each; typed ones until Ctrl-D."""
    if sys.stdin is None:  # closed: nobody asks
        return
    typed = _is_typed()
    if typed:
        notes.print("a prompt a line; Ctrl-D leaves", style="dim")
    while True:
        if typed:
            notes.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
