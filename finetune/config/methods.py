"""Training methods: a row of a table for each value of `train.method`, and no branch anywhere else.

    sft, continue                 a loss on text itself
    dpo, kto, orpo, reward        preferences: answers that are better than others
    grpo, rloo, distill           answers that the model writes while it trains

A row names TRL's trainer and its configuration, which the `train` section is for, the rows that the
trainer reads, and what is usual. To add a trainer of TRL is to add a row.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.config.measures import LOSSES, MEASURES, Measure
from finetune.config.train_keys import OTHER_NAMES, TrainSection, for_library, refuse_renamed
from finetune.errors import ConfigError, did_you_mean
from finetune.units import perplexity

RowForm = Literal["answers", "text", "preference", "unpaired", "prompts"]
FORMS: dict[RowForm, str] = {
    "answers": "messages; prompt and completion; instruction, input and output (Alpaca); text",
    "text": "text",
    "preference": "chosen and rejected, with a prompt beside them or at the start of both",
    "unpaired": "prompt, completion and label (true for an answer to give)",
    "prompts": "prompt (or messages, of which the last answer is left out)",
}
"""Form of rows -> the columns that it has."""
PATIENCE, THRESHOLD = EARLY_STOPPING = ("early_stopping_patience", "early_stopping_threshold")
PIXELS = ("max_pixels", "min_pixels")
KEYS = ("method", "embedding_learning_rate", *PIXELS, *EARLY_STOPPING)
"""Keys of the `train` section that are ours, and no configuration of TRL has."""
REWARDS = "reward_funcs"
"""The same, of a method whose answers are rewarded; TRL's own command line has it, too."""
TEACHER = "teacher_model_name_or_path"
"""Key of a configuration of TRL whose trainer takes a second model to learn from."""


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        trainer, config: dotted names of TRL's classes (1.16).
        rows: forms of rows that it reads.
        rates: learning rates that are usual with all weights: lowest and highest.
        reference: True if it compares with the model that training began with.
        head: what the model gives: words, or one score of a text.
        writes: True if the model writes answers while it trains.
        prompts_train: True if the loss is on the prompt of an answer to give, too.
        prepared_by: method whose trainer makes token ids of its rows as soon as it is made (see
            `finetune.data.by_trl`); none: it reads texts.
        judged: measures that its runs are judged by (`finetune.config.measures`).
        images: True if rows may have images.
    """

    name: str
    trainer: str
    config: str
    rows: tuple[RowForm, ...]
    rates: tuple[float, float]
    reference: bool = False
    head: Literal["causal", "score"] = "causal"
    writes: bool = False
    judged: tuple[str, ...] = ()
    prepared_by: str = ""
    prompts_train: bool = False
    images: bool = False

    @property
    def key(self) -> str:
        """What chooses it, as typed."""
        return f"train.method={self.name}"

    @property
    def prepares(self) -> bool:
        """True if its own trainer makes the token ids that it trains on."""
        return self.prepared_by == self.name or self.is_text

    @property
    def rewarded(self) -> bool:
        """True if `train.reward_funcs` judges what the model writes."""
        return self.judged == REWARD

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of `metrics.jsonl` that say what was learned: a loss that does not is none."""
        return tuple(column for name in self.judged for column in MEASURES[name].columns)

    @property
    def evaluated(self) -> Measure:
        """What tells a better evaluation from a worse one."""
        return next(m for m in map(MEASURES.__getitem__, self.judged) if m.columns[0] != "loss")

    @property
    def texts(self) -> int:
        """Texts of a row that the model reads in one batch: of a pair both."""
        return 2 if self.rows[0] == "preference" else 1

    @property
    def needs(self) -> str:
        """The rows that it reads, for a person."""
        return "; or ".join(FORMS[form] for form in self.rows)

    @property
    def is_text(self) -> bool:
        """True if the loss is on text itself, whose rows can be packed: SFT's own step."""
        return bool({"answers", "text"} & {*self.rows})

    @functools.cached_property
    def trainer_class(self) -> Any:
        """TRL's trainer; imports trl (seconds)."""
        return _imported(self.trainer)

    @functools.cached_property
    def config_class(self) -> Any:
        """TRL's configuration, a dataclass; imports trl (seconds).

        Raises:
            ConfigError: it has no longer an argument that is read here.
        """
        kind = _imported(self.config)
        refuse_renamed(kind)
        return kind

    def words_of(self, key: str) -> tuple[str, ...]:
        """Words that an argument of TRL's can be; none: any.

        Those that it documents as choices, else those that the source of its trainer compares it
        with, which refuses others in the first step.
        """
        config = self.config_class
        (key,) = for_library(config, {key: None})
        field = config.__dataclass_fields__.get(key)
        if field is None or "choices" in field.metadata:
            return tuple(field.metadata["choices"]) if field else ()
        found = _compared(f"{config.__module__.removesuffix('config')}trainer", key)
        return found if len(found) > 1 else ()

    def loss_in_words(self, loss: float) -> str:
        """`3.2000 (perplexity 24.53)`; a loss that is not one of text alone has no perplexity."""
        shown = perplexity(loss) if self.is_text else ""
        return f"{loss:.4f}" + (f" (perplexity {shown})" if shown else "")

    def is_unusual(self, rate: float, *, lora: bool) -> bool:
        """True for a learning rate that is three times outside of what is usual."""
        low, high = (ADAPTERS * limit if lora else limit for limit in self.rates)
        return not low / 3 <= rate <= 3 * high


ADAPTERS = 10
"""Adapters train with ten times the learning rate of all weights (TRL's documentation, PEFT)."""


def _row(
    name: str, trainer: str, rows: tuple[RowForm, ...], rates: tuple[float, float], **own: Any
) -> Method:
    module, _, short = trainer.rpartition(".")
    config = f"{module}.{short.removesuffix('Trainer')}Config"
    if not own.get("writes"):
        own.setdefault("prepared_by", "sft" if {*rows} <= {"answers", "text"} else name)
    own.setdefault("judged", LOSSES if {*rows} <= {"answers", "text"} else ("loss",))
    return Method(name, trainer, config, rows, rates, **own)


PAIRS, REWARD = ("loss", "accuracy"), ("reward",)
"""Measures: of pairs of answers, and of rewarded ones, whose loss says nothing."""
_REWARDED: dict[str, Any] = {"writes": True, "judged": REWARD}
_PREFERRED: dict[str, Any] = {"reference": True, "judged": PAIRS, "images": True}
_ODDS: dict[str, Any] = {"judged": PAIRS, "prompts_train": True, "prepared_by": "dpo"}
_ORPO, _SCORER = "trl.experimental.orpo.ORPOTrainer", "trl.RewardTrainer"

# Rates: TRL's own defaults are among them (SFT 2e-5, DPO, KTO, ORPO, GRPO, RLOO 1e-6, reward 1e-4,
# which its examples lower to 1e-5), and its example scripts'.
METHODS = {
    row.name: row
    for row in (
        _row("sft", "trl.SFTTrainer", ("answers",), (5e-6, 5e-5), images=True),
        _row("continue", "trl.SFTTrainer", ("text",), (5e-6, 6e-4)),
        _row("dpo", "trl.DPOTrainer", ("preference",), (5e-7, 5e-6), **_PREFERRED),
        _row("kto", "trl.KTOTrainer", ("unpaired", "preference"), (5e-7, 5e-6), reference=True),
        # A causal loss on all of the answer to give, beside the odds of both.
        _row("orpo", _ORPO, ("preference",), (1e-6, 1e-5), **_ODDS),
        _row("reward", _SCORER, ("preference",), (5e-6, 1e-4), head="score", judged=PAIRS),
        _row("grpo", "trl.GRPOTrainer", ("prompts",), (5e-7, 5e-6), images=True, **_REWARDED),
        _row("rloo", "trl.RLOOTrainer", ("prompts",), (5e-7, 5e-6), **_REWARDED),
        _row("distill", "trl.DistillationTrainer", ("prompts",), (1e-6, 2e-5), writes=True),
    )
}
_OF_PAIRS = ("rewards/accuracies", "rewards/margins", "accuracy", "margin")
SHOWN = {
    "reward": ("reward", ".3f"),
    **{key: (key, ".3g") for key in _OF_PAIRS},
    "completions/mean_length": ("length", ".3g"),
    "kl": ("KL", ".3g"),
    "completions/clipped_ratio": ("clipped answers", ".0%"),
}
"""Metrics of TRL that say most of what is learned, by any method -> name, form of a value."""


def _imported(dotted: str) -> Any:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # ORPO is there, and warns of it
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


_WORD = r"[\"']([\w-]+)[\"']"


@functools.cache
def _compared(module: str, name: str) -> tuple[str, ...]:
    """Words that the source of a module, not imported, compares a name with."""
    source = importlib.util.find_spec(module)
    # Read rather than imported: a trainer's module imports its libraries, which takes seconds.
    text = Path(str(source.origin)).read_text("utf-8") if source else ""
    sides = re.findall(rf"\b{name} (?:==|!=|not in|in) (\[[^\]]*\]|{_WORD})", text)
    return tuple(dict.fromkeys(word for side, _ in sides for word in re.findall(_WORD, side)))


def method_of(train: Mapping[str, Any], where: str = "train.method") -> Method:
    """The method of a `train` section; `sft` where it names none.

    Raises:
        ConfigError: there is no such method.
    """
    name = str(TrainSection(train).method)
    if name in METHODS:
        return METHODS[name]
    raise ConfigError(
        f"there is no training method {name!r}{did_you_mean(name, METHODS)}",
        where=where,
        fix=f"train.method={', '.join(METHODS)}",
    )


def method_in(config: Mapping[str, Any]) -> Method:
    """The method of a recipe as plain data, of whatever version; `sft` where none is known."""
    return METHODS.get(str((config.get("train") or {}).get("method")), METHODS["sft"])


def arguments(method: Method) -> tuple[str, ...]:
    """Keys that the `train` section takes: of TRL's configuration, and ours."""
    import dataclasses

    own = (*KEYS, REWARDS) if method.rewarded else KEYS
    theirs = [f.name for f in dataclasses.fields(method.config_class) if f.init]
    return (*own, *(OTHER_NAMES.get(name, name) for name in theirs))
