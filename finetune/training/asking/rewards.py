"""Rewards of answers: functions of a recipe, by name, checked at each call and watched over a run.

    train.reward_funcs: [builtin:last_number]       packaged
                        [rewards.py:exact]          a function of a file
                        [my_rewards.exact]          a function of a module, here or installed
                        [think_format_reward]       one of `trl.rewards`
                        [me/reward-model]           a reward model of the hub, or a folder

A function is called as TRL calls it, `f(prompts, completions, **columns)`, with a column for each
column of the rows, and returns a number for each completion (None: it has nothing to say).

A method that compares answers to one prompt learns nothing from a group whose rewards are all
equal: each advantage is zero. TRL logs the share of these groups (`frac_reward_zero_std`) and
trains on; where all groups are so, first to last, `RewardWatch` says that nothing was learned;
where most are, a hint at the end of the run does (`finetune.training.run.hints`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import re
import reprlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from textwrap import shorten
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from finetune.config.paths import user_path
from finetune.config.sections import BUILTIN
from finetune.data.answers import Answers
from finetune.data.chat import rendered
from finetune.errors import ConfigError, DataError, FinetuneError, did_you_mean, first_line

WHERE = "train.reward_funcs"
UP_TO_TWENTY = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty
"""
NUMBERS = {word: value for value, word in enumerate(UP_TO_TWENTY.split())}
"""Numbers as words -> their values."""
_NUMBER = re.compile(rf"-?\d[\d,]*(?:\.\d+)?|\b(?:{'|'.join(NUMBERS)})\b")
_SENTENCE = re.compile(r"(?:[^.!?]|[.!?](?=\S))*[.!?]")


def text_of(completion: Any) -> str:
    """Text of a completion: as it is, or of its turns."""
    if isinstance(completion, str):
        return completion
    # TRL gives turns where prompts are turns, and texts where they are texts.
    return "\n".join(_content(turn.get("content") or "") for turn in completion)


def _content(content: Any) -> str:
    """Text of a turn's content, which is in parts beside images."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or f"<{part['type']}>" for part in content)


def last_number_of(text: str) -> float | None:
    """The last number of a text, in digits or, up to twenty, as a word; None without one.

    >>> last_number_of("Two plus three is five."), last_number_of("#### 1,450"), last_number_of("?")
    (5.0, 1450.0, None)
    """
    found = _NUMBER.findall(text.lower())
    if not found:
        return None
    # `1,234` is a number with a separator, as mathematical data sets write them.
    return float(NUMBERS[found[-1]] if found[-1] in NUMBERS else found[-1].replace(",", ""))


def last_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion whose last number is the one in column `answer`, else 0."""
    asked = [last_number_of(str(one)) for one in answer]
    given = [last_number_of(text_of(one)) for one in completions]
    return [float(a is not None and a == b) for a, b in zip(asked, given, strict=True)]


def one_sentence(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion that is a sentence and nothing else, such as a greeting, else 0."""
    return [float(bool(_SENTENCE.fullmatch(text_of(one).strip()))) for one in completions]


PACKAGED: dict[str, Callable[..., list[float]]] = {
    BUILTIN + one.__name__: one for one in (last_number, one_sentence)
}


def rewards_of(names: Sequence[str], tokenizer: Any = None, *, images: bool = False) -> list[Any]:
    """The functions of `train.reward_funcs`, checked at each call; reward models by their name.

    Args:
        names: as of `reward_names`.
        tokenizer: reads completions as turns where TRL's decoding loses the template's marks.
        images: prompts have some.

    Raises:
        ConfigError: there is none, or no such function, or its file cannot be run; or a reward
            model would score answers to images.
    """
    if not names:
        raise ConfigError(
            "answers need a reward to be compared by, and none is named",
            where=WHERE,
            fix=f"{WHERE}=[rewards.py:exact] for a function of yours, [my_rewards.exact] for one "
            f"of a module, [{next(iter(PACKAGED))}] for a packaged one",
        )
    answers = None if tokenizer is None else Answers.of(tokenizer)
    found = [_found(name, answers) for name in names]
    if images and (models := [one for one in found if isinstance(one, str)]):
        raise ConfigError(
            "a reward model would score answers without the images that they are about",
            where=f"{WHERE}: {models[0]}",
            why="TRL (1.16) hands it the text of prompt and answer alone",
            fix=f"{WHERE}=[rewards.py:exact], a function, which gets the images, too",
        )
    return found


def _found(name: str, answers: Answers | None) -> Any:
    source, _, function = name.partition(":")
    if name.startswith(BUILTIN):
        function, known = name, PACKAGED
    elif source.endswith(".py"):
        known = _names_in(source, name)
    elif "/" in name or user_path(name).is_dir():
        return name  # a reward model, which TRL loads
    else:
        module, _, function = name.rpartition(".")
        # A name alone is one of TRL's, as its own command line has them.
        known = _names_in(module, name) if module else PACKAGED | _names_in("trl.rewards", name)
    return checked(name, _of_names(function, known, name), answers)


def _names_in(source: str, name: str) -> dict[str, Any]:
    """Names of a file, or of a module of the folder that the command was typed in or installed."""
    if "" not in sys.path:
        # As `python -m` has it: a console script does not look into the folder that it is typed in.
        sys.path.insert(0, "")
    try:
        if source.endswith(".py"):
            return runpy.run_path(str(user_path(source)))
        found = importlib.import_module(source)
    # Code of a user may raise anything, and `sys.exit` in it would end the run without a word.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the reward {name!r} cannot be imported",
            where=WHERE,
            why=_told(error),
            fix=f"{WHERE}=[FILE.py:FUNCTION], or [MODULE.FUNCTION] of a module that this folder "
            "has",
        ) from error
    names = (n for n in getattr(found, "__all__", None) or vars(found) if not n.startswith("_"))
    return {n: getattr(found, n, None) for n in names}


def _of_names(wanted: str, known: dict[str, Any], name: str) -> Callable[..., Any]:
    functions = {key: one for key, one in known.items() if callable(one)}
    if wanted in functions:
        return functions[wanted]
    raise ConfigError(
        f"there is no reward {name!r}{did_you_mean(wanted, functions)}",
        where=WHERE,
        fix=f"one of {', '.join(sorted(functions)[:12]) or 'none: it has no functions'}; a file: "
        f"{WHERE}=[FILE.py:FUNCTION]",
    )


# -------------------------------------------------------------------------------- at each call


def checked(
    name: str, function: Callable[..., Any], answers: Answers | None = None
) -> Callable[..., Any]:
    """A reward that raises `DataError` where it fails, or gives something that is no reward.

    TRL would end with a traceback, or train on NaN and infinity. Completions come as TRL decodes
    them, `<think>` of Qwen 3 included, unless special tokens part thinking from content: these are
    lost in decoding, and `answers` reads the turns.
    """

    def read(prompts: Sequence[Any], completions: Sequence[Any], columns: Any) -> Sequence[Any]:
        # TRL decodes answers without special tokens, which loses marks that some templates are read
        # by.
        if answers is None or not answers.hides or any(isinstance(c, str) for c in completions):
            return completions
        begun = {"add_generation_prompt": True}
        asked = (rendered(turns, [], answers.tokenizer, **begun) for turns in prompts)
        written = zip(completions, asked, columns["completion_ids"], strict=True)
        cut = {"role": "assistant", "content": ""}  # in its thinking: as TRL's own parser has it
        return [[cut | answers.parsed(ids, at)] if len(c) == 1 else c for c, at, ids in written]

    def check(prompts: Sequence[Any], completions: Sequence[Any], given: Any) -> list[float | None]:
        if not hasattr(given, "__len__") or len(given) != len(completions):
            count = len(given) if hasattr(given, "__len__") else f"{given!r}, not a list"
            what = f"the reward {name!r} gave {count} for {len(completions)} completions"
            raise _refused(what, prompts, completions, "return one number for each of them")
        found: list[float | None] = []
        for i, value in enumerate(given):
            try:
                # None is TRL's way to say that a reward does not apply; what else there is must be
                # a number.
                number = None if value is None else float(value)
            except Exception:  # noqa: BLE001  an object's own conversion
                number = math.inf
            if number is not None and not abs(number) <= MOST:
                seen = number if isinstance(value, int) else reprlib.repr(value)  # 5,000 digits
                what = f"the reward {name!r} gave {seen}: a reward is a finite float32"
                fix = "return a number, or None where it has nothing to say of an answer"
                raise _refused(what, prompts[i:], completions[i:], fix)
            found.append(number)
        return found

    @contextlib.contextmanager
    def checking(prompts: Any, completions: Any, columns: Any) -> Iterator[Callable[..., Any]]:
        # Gradients recording is a switch of the thread: a reward that leaves it off would train
        # nothing from here on, without an error.
        records = torch.is_grad_enabled()
        if log := columns.get("log_metric"):
            columns["log_metric"] = functools.partial(_logged, log)
        try:
            yield functools.partial(check, prompts, completions)
        except FinetuneError:
            raise
        except (Exception, SystemExit) as error:
            said = _told(error)
            beside = [key for key in columns if key not in OF_TRL]
            fix = f"correct it; columns beside the prompt: {', '.join(beside) or 'none'}"
            if isinstance(error, TypeError):
                # A TypeError is most often an argument that the rows lack, or a column that the
                # function does not take.
                fix += "; name yours by 'data.columns={answer: NAME}', and end with **kwargs"
            what = f"the reward {name!r} failed"
            raise _refused(what, prompts, completions, fix, said) from error
        if torch.is_grad_enabled() != records:
            torch.set_grad_enabled(records)
            what = f"the reward {name!r} left torch.set_grad_enabled({not records})"
            raise _refused(what, prompts, completions, "`with torch.no_grad():` there")

    @functools.wraps(function)
    async def later(prompts: Any, completions: Any, **columns: Any) -> Any:
        completions = read(prompts, completions, columns)
        with checking(prompts, completions, columns) as rewards:
            return rewards(await function(prompts=prompts, completions=completions, **columns))

    @functools.wraps(function)
    def now(prompts: Any, completions: Any, **columns: Any) -> Any:
        completions = read(prompts, completions, columns)
        with checking(prompts, completions, columns) as rewards:
            return rewards(function(prompts=prompts, completions=completions, **columns))

    # TRL awaits what is declared `async`, all rewards at once.
    return later if inspect.iscoroutinefunction(function) else now


OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL (1.16) hands to a reward beside the columns of the rows."""


OF_TRAINER = ("loss", "grad_norm", "learning_rate", "epoch", "step", "reward", "reward_std")
"""What the trainer logs itself: a reward's metric of such a name would overwrite it."""
MOST = 3.4e38
"""Largest float32, nearly: TRL adds rewards in it, where more is infinite."""


def _logged(log: Callable[[str, Any], None], key: str, value: Any) -> None:
    """TRL's `log_metric` (1.16), but for names of the trainer's own."""
    # Logged later than the trainer's own, it would stand in its row instead.
    if key in OF_TRAINER:
        raise ValueError(f"log_metric({key!r}, ...) would replace the trainer's own {key}")
    log(key, value)


def _told(error: BaseException) -> str:
    """What code of others raised, and where."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else first_line(error)
    return f"{type(error).__name__}: {said} ({at.filename}:{at.lineno})"


def _refused(
    what: str, prompts: Sequence[Any], completions: Sequence[Any], fix: str, why: str = ""
) -> DataError:
    """The error of a call, with its first prompt and completion, if it had any."""
    for prompt, completion in zip(prompts[:1], completions[:1], strict=True):
        asked, said = (shorten(text_of(x), 200) for x in (prompt, completion))
        row = f"prompt {asked!r}, completion {said!r}"
        why = f"{why}; {row}" if why else row
    return DataError(what, where=WHERE, why=why, fix=fix)


# ---------------------------------------------------------------------------------- over a run

FLAT = "frac_reward_zero_std"
"""TRL's log (1.16): share of groups whose rewards are all equal."""
MAKE_DIFFER = (
    "easier or harder prompts, a reward in degrees, a higher train.temperature or more "
    "train.num_generations make them differ"
)
EARLY = 10
"""Logs without a group that could be learned from, after which a run says so."""


class RewardWatch(TrainerCallback):
    """Says where rewards do not differ, so that nothing is learned.

    Attributes:
        flat: shares of groups with equal rewards, of each log.
        rewards: mean rewards, of each log.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.flat: list[float] = []
        self.rewards: list[float] = []

    @property
    def learned_nothing(self) -> str:
        """Why no group could be learned from; empty where one could, or nothing was logged."""
        # One group that differed is enough to have learned something.
        if not self.flat or min(self.flat) < 1:
            return ""
        ends = {f"{end(self.rewards):g}": 0 for end in (min, max)} if self.rewards else ["None"]
        seen = " to ".join(ends)
        return (
            f"the rewards of every group were equal (mean {seen}): every advantage was zero, and "
            f"nothing was learned from them: {MAKE_DIFFER}"
        )

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any):
        if FLAT not in (logs or {}):
            return
        scored = [] if logs["reward"] is None else [logs["reward"]]  # else all were None
        self.flat.append(logs[FLAT] if scored else 1.0)
        self.rewards += scored
        if len(self.flat) == EARLY and self.learned_nothing:
            self.say(f"step {state.global_step}: {self.learned_nothing}")
