"""A conversation with a model: its turns are kept, its answers printed word by word.

Transformers generates and streams. What is here is around it: the turns, as the chat template takes
them; lines that are typed or piped; Ctrl-C, which stops an answer and keeps what was said; the same
questions to the untrained model, whose own conversation goes beside.

A turn that would not fit into the context drops the oldest ones, which is said: the template would
cut nothing, and the model go on past the positions that it has learned. Without a chat template the
model continues the text so far; each line is put behind it.

Limits: every answer reads the conversation from its beginning; one that is long costs its length.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import TextStreamer, set_seed

from finetune.config.generation import generation
from finetune.data.answers import UNREADABLE, Answers
from finetune.data.chat import probe, without_system
from finetune.errors import ConfigError, did_you_mean
from finetune.logging import output, plain_table
from finetune.precision.settings import Compute
from finetune.section import is_text
from finetune.storage.pretrained import positions
from finetune.storage.processors import tokenizer_of
from finetune.training.asking.questions import (
    Question,
    encode,
    image_in,
    reads_images,
    refuse_images,
)
from finetune.training.asking.samples import check_room_for
from finetune.training.helper.undisturbed import autocast, undisturbed

COMMANDS = ("/image FILE", "/reset", "/exit")
LONGEST = 256
"""Tokens of an answer where nobody says how many, as in `transformers chat`."""


def chat(
    model: Any,
    reader: Any,
    *,
    system: str | None = None,
    base: Any = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    compute: Compute = "bf16",
) -> list[dict[str, Any]]:
    """Talk with a model, in a terminal or a notebook; lines of a pipe are a turn each.

    `/image FILE` puts an image before the next question, `/reset` forgets the conversation, `/exit`
    or the end of the input (Ctrl-D) leaves. Generators, training modes and scales of the model are
    afterwards as they were.

    Args:
        model: plain or with adapters, converted or not; not sharded.
        reader: its tokenizer, or the processor of one that takes images.
        system: text of the system turn.
        base: a model that answers beside; True: this one with its PEFT adapters off.
        max_new_tokens, temperature, top_p, top_k: as in Transformers; temperature 0 is greedy,
            and an answer has 256 tokens at most, or half of the model's context.
        seed: drawn again before each answer.
        compute: `precision.compute`, which decides the autocast type.

    Returns:
        The turns since the last reset: role and content.

    Raises:
        ConfigError: settings that contradict each other, or a piped line that leaves no room, or
            names no image.
    """
    words = generation(max_new_tokens, temperature, top_p, top_k, seed)
    sides = sides_of(model, reader, words, base, system=system, seed=seed, compute=compute)
    for _ in converse(sides, lines()):
        pass
    return sides["trained"].turns


class Conversation:
    """Turns with one model.

    Attributes:
        turns: role and content of each, the system's included.
        most: tokens of an answer.
        dropped: turns that the last question dropped.
    """

    def __init__(
        self, model: Any, reader: Any, words: dict[str, Any], *, system: str | None,
        seed: int | None, compute: Compute, without_adapters: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.reader, self.seed, self.dropped = model, reader, seed, 0
        self.tokenizer = tokenizer = tokenizer_of(reader)
        self.answers = Answers.of(tokenizer)
        self.compute: Compute = compute
        self.as_asked = model.disable_adapter if without_adapters else contextlib.nullcontext
        self.room = positions(model.config)
        # Half of a short context at most, so that the question has room as well.
        self.most = words.get("max_new_tokens", min(LONGEST, (self.room or 2 * LONGEST) // 2))
        self.words = words | {"max_new_tokens": self.most}
        if system and not tokenizer.chat_template:
            raise ConfigError(
                "there is no place for the system's text",
                where="system",
                why="the tokenizer has no chat template: the model continues text",
                fix="leave it out, or put it before the first line",
            )
        self.system = [{"role": "system", "content": system}] if system else []
        self.takes_system = not system or probe(tokenizer).system
        self.reset()

    def reset(self) -> None:
        self.turns = list(self.system)

    def ask(self, prompt: str, speech: Speech, images: Sequence[Any] = ()) -> str:
        """Answer a question; what was said until a Ctrl-C stays in the conversation.

        Args:
            images: opened, which stand before the question's text.

        Raises:
            ConfigError: the question alone leaves no room for an answer.
        """
        first, self.dropped = len(self.system), 0
        # Without a template nothing else stands between what was said and what comes next.
        glue = "" if self.tokenizer.chat_template or not self.turns else "\n"
        turns = [*self.turns, Question((*images, glue + prompt)).turn]
        while True:
            taken = turns if self.takes_system else without_system(turns)
            inputs = encode(self.reader, taken)
            length = inputs["input_ids"].shape[1] if prompt else 0
            # The question alone is not dropped: whether it fits is judged below, with an error.
            if self.room is None or length + self.most <= self.room or len(turns) == first + 1:
                break
            del turns[first : first + 2]
            self.dropped += 2
        check_room_for(prompt, length, self.most, self.room, "PROMPT")
        inputs = {key: value.to(self.model.device) for key, value in inputs.items()}
        if self.seed is not None:
            # Before each answer, so that it depends on the conversation alone.
            set_seed(self.seed)
        try:
            with self.as_asked(), autocast(self.compute, self.model.device.type), torch.no_grad():
                self.model.generate(**inputs, streamer=speech, **self.words)
        except KeyboardInterrupt:
            # Prints what the streamer still holds back, half a word perhaps.
            speech.end()
            raise
        finally:
            turn = speech.turn
            if turn["content"]:
                self.turns = [*turns, turn]
        return turn["content"].strip()


class Speech(TextStreamer):
    """Transformers' streamer, which also keeps the tokens, and prints the content if it `shows`.

    Thinking is printed only where nothing follows it (`finetune.data.answers`).
    """

    def __init__(self, answers: Answers, *, shows: bool) -> None:
        super().__init__(
            answers.tokenizer, skip_prompt=True, skip_special_tokens=answers.template is None
        )
        self.answers, self.shows, self.parser, self.printed = answers, shows, None, False
        self.prompt, self.tokens = list[int](), list[int]()

    def put(self, value: Any) -> None:
        if self.next_tokens_are_prompt:
            self.prompt = value.flatten().tolist()
            self.parser = self.answers.parser(self.prompt)
        else:
            self.tokens += value.flatten().tolist()
        super().put(value)

    @property
    def turn(self) -> dict[str, Any]:
        """The answer until now."""
        return self.answers.read(self.tokens, self.prompt)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.parser is not None:
            events: list[Any] = []
            # An answer that its template's parser cannot read is shown as text, not lost.
            with contextlib.suppress(*UNREADABLE):
                events += self.parser.feed(text)
                events += self.parser.finalize()[1] if stream_end else []
            text = "".join(e["text"] for e in events if "text" in e and e["field"] == "content")
            # Templates put a line break before the content, which `read` strips from the turn as
            # well.
            text = text if self.printed else text.lstrip()
            self.printed = self.printed or bool(text)
            if stream_end and not self.printed:
                text = self.turn["content"].strip()
        if self.shows:
            super().on_finalized_text(text, stream_end)


def sides_of(
    model: Any, reader: Any, words: dict[str, Any], base: Any = None, **settings: Any
) -> dict[str, Conversation]:
    """Conversations by name: with the untrained model, if there is one, and with the trained."""
    asked: Any = {} if base is None else {"base": (model, True) if base is True else (base, False)}
    return {
        name: Conversation(side, reader, words, without_adapters=off, **settings)
        for name, (side, off) in {**asked, "trained": (model, False)}.items()
    }


def converse(
    sides: dict[str, Conversation],
    prompts: Iterable[str],
    *,
    images: Sequence[Any] = (),
    keeps: bool = True,
    shows: bool = True,
) -> Iterator[dict[str, Any]]:
    """Put each prompt to each side; yield prompt, answers and seconds.

    Args:
        images: opened, which stand before the first prompt, or before each that begins its own.
        keeps: the prompts are turns of one conversation, otherwise each begins one.
        shows: print answers as they grow, or two of them in columns once both are there.
    """
    notes, typed, shown = output(stderr=True), keeps and is_typed(), [*images]
    if typed:
        known = COMMANDS[not reads_images(sides["trained"].reader) :]
        notes.print(f"{', '.join(known)}; Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
    if not sides["trained"].tokenizer.chat_template:
        notes.print("! no chat template: the model continues your text", style="yellow")
    with contextlib.ExitStack() as stack:
        for side in sides.values():
            # Once for the whole conversation: training state comes back when it ends.
            stack.enter_context(undisturbed(side.model))
        for prompt in prompts:
            if keeps and prompt == "/exit":
                return
            # Prompts of a file are questions of their own, not turns.
            if not keeps or prompt == "/reset":
                for side in sides.values():
                    side.reset()
            if keeps and prompt == "/reset":
                shown.clear()
                continue
            if keeps and prompt.split(maxsplit=1)[:1] == ["/image"]:
                with _lines_of_errors(notes, typed=typed):
                    shown.append(_image(sides, prompt.strip()[len("/image") :], notes, typed=typed))
                continue
            if typed and prompt.startswith("/") and " " not in prompt:
                guess = did_you_mean(prompt, COMMANDS)
                notes.print(f"! there is no command {prompt!r}{guess}", style="yellow")
                continue
            with _lines_of_errors(notes, typed=typed):
                # Also of a question that fails, lest a huge one stood before all that follow.
                asked, shown = shown, [] if keeps else shown
                yield _turn(sides, prompt, asked, shows, notes)


@contextlib.contextmanager
def _lines_of_errors(notes: Console, *, typed: bool) -> Iterator[None]:
    """Let a conversation that is typed go on behind a mistake, which is a line."""
    try:
        yield
    except (KeyboardInterrupt, ConfigError) as error:
        if not typed:
            raise
        why = f"! {error.what}: {error.why}" if isinstance(error, ConfigError) else ""
        notes.print(why or "stopped; Ctrl-C again leaves", style="yellow" if why else "dim")


def _image(sides: dict[str, Conversation], typed_name: str, notes: Console, *, typed: bool) -> Any:
    """The image that a line names, for the next question."""
    refuse_images(sides["trained"].reader)
    found = image_in(typed_name)
    if typed:
        notes.print(f"(an image, {found.width} x {found.height}: now the question)", style="dim")
    return found


def _turn(
    sides: dict[str, Conversation], prompt: str, images: Sequence[Any], shows: bool, notes: Console
) -> dict[str, Any]:
    """Ask each side; print the answers, what was dropped, and that one is cut."""
    started, said = time.perf_counter(), dict[str, str]()
    for name, side in sides.items():
        speech = Speech(side.answers, shows=shows and len(sides) == 1)
        said[name] = side.ask(prompt, speech, images)
        if side.dropped:
            line = f"! the oldest {side.dropped} turns were dropped"
            notes.print(f"{line}: the model has {side.room:,} positions", style="yellow")
        # In a pipe it would be a line between answers that a program reads.
        if len(speech.tokens) >= side.most and is_typed():
            notes.print(f"(cut at max_new_tokens={side.most})", style="dim")
    if shows and len(sides) > 1:
        _show(said)
    seconds = round(time.perf_counter() - started, 3)
    return {"prompt": prompt, "answer": said.pop("trained"), **said, "seconds": seconds}


def _show(said: dict[str, str]) -> None:
    """Print answers in columns; in a pipe behind one another, by name."""
    console = output()
    if not console.is_terminal and not console.is_jupyter:
        console.print(*(Text(f"{name}: {text}") for name, text in said.items()), sep="\n")
        return
    table = plain_table(*said, expand=True, fold=list(said))
    for column in table.columns:
        column.ratio = 1
    table.add_row(*said.values())
    console.print(table)


# ------------------------------------------------------------------------------------------- input


def is_typed() -> bool:
    """True if a person writes the lines: in a terminal, or in a notebook's field."""
    return "ipykernel" in sys.modules or (sys.stdin is not None and sys.stdin.isatty())


def lines() -> Iterator[str]:
    """Lines of the input that are not blank, to its end.

    Raises:
        ConfigError: a line that is no text.
    """
    if sys.stdin is None:  # closed: nobody asks
        return
    typed, notebook = is_typed(), "ipykernel" in sys.modules
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are said below
    with contextlib.suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  lets `input` edit and recall lines
    while True:
        try:
            line = input("> " if notebook or (typed and sys.stdout.isatty()) else "")
        except (EOFError, KeyboardInterrupt) as end:
            if typed:
                print(file=sys.stderr)  # behind the prompt
            if isinstance(end, EOFError):
                return
            raise
        if not is_text(line):
            raise ConfigError(
                "a prompt is not UTF-8 text",
                where=f"standard input: {line.strip()!a}",
                why=f"it has a NUL, or bytes that are no {sys.stdin.encoding}",
                fix="convert it (iconv -t utf-8), or PYTHONUTF8=1 where the locale is another",
            )
        if line.strip():
            yield line.strip()
