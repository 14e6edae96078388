"""The `train` section: checked against the fields of its method's configuration, and converted.

That is `trl.SFTConfig`, or what `train.method` names (`finetune.config.methods`).
"""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from finetune.config.aliases import in_recipe
from finetune.config.methods import (
    METHODS,
    PATIENCE,
    PIXELS,
    REWARDS,
    THRESHOLD,
    Method,
    arguments,
    method_of,
)
from finetune.config.optimizers import check_name
from finetune.config.schema import RunConfig
from finetune.config.train_keys import OTHER_NAMES, TrainSection
from finetune.config.yaml import SPECIAL_FLOATS, KeyPath, PlainText, plain_data
from finetune.errors import ConfigError, did_you_mean, nearest, raise_all
from finetune.section import check_text

_COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
OWNED_BY_US = {
    "use_cpu": "FP8 and memory follow the device: CUDA_VISIBLE_DEVICES='' hides the GPUs",
    "output_dir": "the run folder holds it (use --out to choose the folder of runs)",
    "bf16": "precision.compute decides it",
    "fp16": "precision.compute decides it",
    "model_init_kwargs": "the model section decides it",
    "teacher_model_init_kwargs": "a teacher is loaded as the model is",
    "teacher_model_revision": "a teacher is loaded as the model is, from a folder for a revision",
    **dict.fromkeys(_COMPILING, "precision.compile decides it"),
}
"""Keys of TRL's configurations that a recipe may not set, and why."""
CHECKPOINTING = "gradient_checkpointing"
CHECKPOINT_ARGUMENTS = (
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
    "context_fn",
)
"""Of `torch.utils.checkpoint.checkpoint`, torch 2.10."""
OPEN = (CHECKPOINTING, "max_length", "pad_to_multiple_of")
"""Keys that may be `auto`, which we decide before a trainer sees them."""


def decides_checkpointing(config: RunConfig) -> bool:
    """True if `train.gradient_checkpointing` is `auto`: on where memory is too small without it."""
    return config.train.gradient_checkpointing == "auto"


def with_checkpointing(config: RunConfig, on: bool) -> RunConfig:
    """The same run with `train.gradient_checkpointing` decided, as TRL knows it."""
    return config.model_copy(update={"train": {**config.train, CHECKPOINTING: on}})


def refuse_open_length(
    train: TrainSection, *, streams: bool, where: Callable[[KeyPath], str] = ".".join
) -> None:
    """Reject `train.max_length: auto` where no row's length is known before training.

    Raises:
        ConfigError: rows of a stream, or text that is cut anywhere.
    """
    why = ""
    if streams:
        why = "a stream's rows are read while it trains"
    elif train.packing and train.packing_strategy == "wrapped":
        why = "packing_strategy=wrapped cuts text anywhere, and fills every row"
    if train.max_length == "auto" and why:
        raise ConfigError(
            "no longest row is known before training, for train.max_length=auto",
            where=where(("train", "max_length")),
            why=why,
            fix="train.max_length=2048, or what your longest row has",
        )


def steps_of_tokens(
    train: TrainSection, tokens: int, where: Callable[[KeyPath], str] = ".".join
) -> int:
    """Optimizer steps of a budget of tokens on the processes of this launch, rounded down.

    A row of `wrapped` packing has `max_length` tokens, but for the last one of each thousand
    documents. Example: 10e9 tokens in steps of 16 rows x 32 x 1 process x 1,024 are 19,073 steps.

    Raises:
        ConfigError: rows are of several lengths, less than one step, or `train.max_steps` differs.
    """
    length, rows = train.max_length, train.per_device_train_batch_size
    rows *= train.gradient_accumulation_steps
    # Read from the launcher, since nothing here may import torch.
    processes = os.environ.get("WORLD_SIZE", "1")
    each = int(rows) * int(length or 1) * (int(processes) if processes.isdigit() else 1)
    steps, given = tokens // each, int(train.max_steps or -1)
    why = f"a step has {each:,} tokens here: {tokens:,} are {steps:,} steps"
    if not (train.packing and train.packing_strategy == "wrapped" and length):
        what = "a number of tokens was given for rows of several lengths"
        why = "how many steps it is shows only when all rows were read"
        fix = "train.packing=true train.packing_strategy=wrapped; or train.max_steps=1000"
    elif not steps:
        what = f"{tokens:,} tokens are less than one step"
        fix = f"data.max_tokens={1000 * each}, or a smaller train.gradient_accumulation_steps"
    elif given not in (-1, steps):
        what = f"train.max_steps={given} and data.max_tokens={tokens} contradict each other"
        fix = "~train.max_steps, or ~data.max_tokens"
    else:
        return steps
    raise ConfigError(what, where=where(("data", "max_tokens")), why=why, fix=fix)


EVERY = 0.05
"""Share of the steps behind which early stopping evaluates, where no interval is given."""


def with_stopping(train: TrainSection) -> TrainSection:
    """A section with what its early stopping needs beside a patience; what it says itself stays.

    The trainer counts evaluations, and keeps the best of the checkpoints that are saved with them:
    one is enough beside the newest. Rewarded answers are judged by their reward.
    """
    if not train.early_stopping_patience:
        return train
    strategies = ("eval_strategy", "save_strategy")
    given = [train[key] for key in strategies if key in train]
    # `best` saves at evaluations, and says nothing of when these are.
    strategy = next((str(one) for one in given if one not in (None, "best")), "steps")
    needed: dict[str, Any] = dict.fromkeys(strategies, strategy)
    needed |= {"load_best_model_at_end": True, "save_total_limit": 2}
    if strategy == "steps":
        every = train.eval_steps or (train.save_steps if "save_steps" in train else EVERY)
        needed |= {"eval_steps": every, "save_steps": every}
    if method_of(train).rewarded:
        needed["metric_for_best_model"] = "reward"
    return TrainSection(needed | train)


def fields_of(section: str) -> dict[str, Any]:
    """Fields of a section, whose annotation may be optional."""
    annotation: Any = RunConfig.model_fields[section].annotation
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next(kind for kind in kinds if isinstance(kind, type)).model_fields


def elsewhere(key: str, value: object = "...") -> str:
    """The fix for a key that is not where it was written: of another tool, or another section.

    Empty where nothing has that name: what a guess is good for is not said with a value.
    """
    if fix := in_recipe(key, value):
        return fix
    if key in OTHER_NAMES:
        return f"write train.{OTHER_NAMES[key]}={value}"
    ours = [name for name in RunConfig.model_fields if name != "train" and key in fields_of(name)]
    if not ours and key in arguments(METHODS["sft"]):
        ours = [] if key in OWNED_BY_US else ["train"]
    return "write " + " or ".join(f"{name}.{key}={value}" for name in ours) if ours else ""


def convert_train(
    train: dict[str, Any],
    where: Callable[[KeyPath], str] = ".".join,
    method: Method | None = None,
) -> TrainSection:
    """Check keys of the `train` section against its configuration, and convert values by type.

    Args:
        train: key -> value as read (text for plain scalars).
        where: from a path such as `("train", "optim")` to `file:line` for messages.
        method: the run's, where `train` is a part of its section.

    Raises:
        ConfigError: an unknown or reserved key, or a value of the wrong type; others with it.
    """
    method = method_of(train, where(("train", "method"))) if method is None else method
    fields, types = arguments(method), _types(method.config_class)

    def converted(key: str, value: Any, at: str) -> Any:
        if key in OWNED_BY_US:
            raise ConfigError(
                f"train.{key} cannot be set here: {OWNED_BY_US[key]}",
                where=at,
                fix=f"~train.{key}, or delete that line of the recipe",
            )
        if key not in fields:
            raise _no_argument(key, value, method, at)
        if key in OPEN and str(value) == "auto":
            return "auto"
        found = _convert(key, plain_data(value), types[key], at)
        check_range(key, found, at)
        check_words(key, found, method, at)
        if key == f"{CHECKPOINTING}_kwargs":
            _check_checkpointing(found, at)
        if key == "optim":
            check_name(str(found), at)
        return found

    result, errors = TrainSection(), list[ConfigError]()
    for key, value in train.items():
        try:
            result[key] = converted(key, value, where(("train", key)))
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    losses, weights = result.get("loss_type"), result.get("loss_weights")
    count = len(losses) if isinstance(losses, list) else 1
    if weights is not None and len(weights) != count:
        raise ConfigError(
            f"train.loss_weights has {len(weights)}, and train.loss_type {count}",
            where=where(("train", "loss_weights")),
            fix="a number for each loss; ~train.loss_weights weighs them alike",
        )
    return result


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """Argument of a configuration of TRL, or of ours -> its type."""
    hints = typing.get_type_hints(kind)
    types = {OTHER_NAMES.get(name, name): hint for name, hint in hints.items()}
    types |= {"method": str | None, "embedding_learning_rate": float | None}
    types |= dict.fromkeys(PIXELS, int | None)
    types |= {PATIENCE: int | None, THRESHOLD: float | None}
    types[REWARDS] = list[str]
    types["pad_to_multiple_of"] = int | None  # TRL's words are `auto`, and `none` for null
    return types


def _no_argument(key: str, value: Any, method: Method, where: str) -> ConfigError:
    """The error for a key that the method's configuration does not have."""
    replacement = elsewhere(key, value)
    if replacement in ("", f"write train.{key}={value}"):
        others = ", ".join(name for name, other in METHODS.items() if key in arguments(other))
        replacement = f"~train.{key}; it belongs to train.method={others}" if others else ""
    meant = None if replacement else nearest(key, arguments(method))
    guess = f"train.{meant}=..., if that is meant; else " if meant else ""
    chosen = f" (train.method={method.name})" if method.name != "sft" else ""
    return ConfigError(
        f"{method.config} has no argument {key!r}"
        + (f"; did you mean {meant!r}?" if meant else ""),
        where=where,
        why=f"the train section is handed unchanged to {method.config}{chosen}",
        fix=replacement
        or f"{guess}leave it out (TRL's page on {method.config.rpartition('.')[2]} has all "
        "arguments)",
    )


def _check_checkpointing(given: Any, where: str) -> None:
    """Reject arguments that `torch.utils.checkpoint` would refuse in the first forward."""
    for name in given if isinstance(given, dict) else ():
        if name not in CHECKPOINT_ARGUMENTS:
            raise ConfigError(
                f"torch.utils.checkpoint has no argument {name!r}"
                + did_you_mean(name, CHECKPOINT_ARGUMENTS),
                where=where,
                fix=f"known: {', '.join(CHECKPOINT_ARGUMENTS)}; "
                f"~train.{CHECKPOINTING}_kwargs takes the defaults",
            )


_NUMBERS = {kind: TypeAdapter(kind) for kind in (bool, int, float)}


def _convert(key: str, value: Any, annotation: Any, where: str) -> Any:
    kinds = _members(annotation)
    try:
        check_text(value if isinstance(value, str) else ())
    except ValueError as error:
        raise ConfigError(
            f"train.{key}: {error}", where=where, fix=f"~train.{key} takes TRL's default"
        ) from None
    if not isinstance(value, PlainText):
        if type(value) not in kinds:
            raise _wrong_kind(key, _in_words(kinds), value, where)
        numbers = "list[float]" in str(annotation)  # of weights; other lists are of names
        item: Any = (int, float) if numbers else str
        if isinstance(value, list) and not all(isinstance(one, item) for one in value):
            raise _wrong_kind(key, f"a list of {'numbers' if numbers else 'names'}", value, where)
        return value
    text = SPECIAL_FLOATS.get(value, str(value)) if float in kinds else str(value)
    if text in ("true", "false") and bool not in kinds and str in kinds:
        return text == "true"  # fields such as `fsdp: str | None` take a truth value too
    if str in kinds and not kinds & {int, float, bool}:
        return text
    for kind, read in _NUMBERS.items():
        if kind in kinds and not (kind is bool and int in kinds and text in ("0", "1")):
            try:
                return read.validate_python(text)
            except ValidationError:
                continue
    if str in kinds or not kinds & {bool, int, float}:
        return text
    raise _wrong_kind(key, _in_words(kinds), text, where)


def _wrong_kind(key: str, names: str, value: Any, where: str) -> ConfigError:
    names += " or auto" if key in OPEN else ""
    what = f"train.{key} must be {names}, not {value!r}"
    what += did_you_mean(str(value), ("auto",) if key in OPEN else ())
    return ConfigError(what, where=where, fix=f"~train.{key} takes TRL's default")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_KINDS |= {str: "text", list: "a list", dict: "a mapping"}


def _in_words(kinds: set[type]) -> str:
    return " or ".join(words for kind, words in _KINDS.items() if kind in kinds)


def _members(annotation: Any) -> set[type]:
    args, origin = (getattr(annotation, name, None) for name in ("__args__", "__origin__"))
    if origin in (list, dict, tuple):
        return {origin}
    if args:
        return set().union(*(_members(a) for a in args))
    return {annotation} if isinstance(annotation, type) else set()


# ------------------------------------------------------------------------------------------ ranges

# `trl.SFTConfig` takes numbers as they come: a NaN, an infinite or a negative one trains nothing,
# trains everything, or ends in a traceback minutes later.
AT_LEAST_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "max_pixels",
    "min_pixels",
    "dataset_num_proc",
    "torch_empty_cache_steps",
    "eval_accumulation_steps",
    "ddp_bucket_cap_mb",
    "dataloader_prefetch_factor",
    "pad_to_multiple_of",
    "ddp_timeout",
    "max_completion_length",
    "num_iterations",
    "steps_per_generation",
    "generation_batch_size",
    "ref_model_sync_steps",
    "precompute_ref_batch_size",
    PATIENCE,
)
ABOVE_ZERO = ("temperature", "repetition_penalty", "discopop_tau")
SHARES = ("label_smoothing_factor", "ld_alpha", "min_p", "ref_model_mixup_alpha")
SHARES += ("top_entropy_quantile",)
RANGES: dict[str, Any] = {
    **dict.fromkeys(AT_LEAST_ONE, Annotated[FiniteFloat, Field(ge=1)]),
    **dict.fromkeys(("seed", "data_seed"), Annotated[int, Field(ge=0, lt=2**32)]),  # of numpy
    **dict.fromkeys(("max_steps", "local_rank"), Annotated[int, Field(ge=-1)]),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Annotated[float, Field(ge=0, lt=1)]),
    **dict.fromkeys(("num_train_epochs", *ABOVE_ZERO), Annotated[FiniteFloat, Field(gt=0)]),
    **dict.fromkeys(SHARES, Annotated[float, Field(ge=0, le=1)]),
    "top_p": Annotated[float, Field(gt=0, le=1)],
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],  # chance of a flipped pair
    "dataloader_num_workers": Annotated[int, Field(ge=0, le=4096)],
    "max_grad_norm": Annotated[
        float, Field(ge=0)
    ],  # infinite: gradients are measured, and not clipped
}
"""Setting -> the numbers that it can be; others are finite, and zero or more."""
MOST_TOKENS = 2**24
"""Tokens of a micro-batch: a hundred times what the largest GPUs hold of the smallest models."""


def check_batch(train: TrainSection) -> None:
    """Reject a micro-batch of more than `MOST_TOKENS`, before it is planned or simulated."""
    rows = train.per_device_train_batch_size
    length = 1024 if train.max_length is None else train.max_length
    if int(rows) * int(length) > MOST_TOKENS:
        raise ConfigError(
            f"a micro-batch of {rows:,} rows of {length:,} tokens fits no machine",
            where="train.per_device_train_batch_size and train.max_length",
            why=f"{MOST_TOKENS:,} tokens are the most that is planned for",
            fix="train.per_device_train_batch_size=8 train.max_length=1024; "
            "train.gradient_accumulation_steps makes a larger batch of small ones",
        )


def check_words(key: str, value: Any, method: Method, where: str) -> None:
    """Reject words that the argument does not have, alone or in a list.

    TRL refuses them in the first step; Transformers takes any other for the first, without a word.
    """
    given = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
    known = method.words_of(key) if given else ()
    for word in given if known else ():
        if word not in known:
            raise ConfigError(
                f"train.{key} cannot be {word!r}{did_you_mean(word, known)}",
                where=where,
                fix=f"one of {', '.join(known)}; ~train.{key} takes TRL's default",
            )


@functools.cache  # to make it takes hundreds of readings
def _range(key: str) -> TypeAdapter[Any]:
    return TypeAdapter(RANGES.get(key, Annotated[FiniteFloat, Field(ge=0)]))


def check_range(key: str, value: Any, where: str) -> None:
    """Reject a NaN, or a number out of the setting's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    try:
        _range(key).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Input should be ")
        said = said if said.startswith("a ") else f"a number {said}"
        raise ConfigError(
            f"train.{key} cannot be {value}",
            where=where,
            fix=f"{said}; ~train.{key} takes TRL's default",
        ) from None
