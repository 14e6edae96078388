"""The `train` section: checked against the fields of `trl.SFTConfig`, converted, and made one."""

from __future__ import annotations

import atexit
import gc
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from finetune.config.aliases import in_recipe
from finetune.config.optimizers import OWN_NAMES, check_name
from finetune.config.schema import RunConfig
from finetune.config.section import LARGEST, check_text
from finetune.config.yaml import SPECIAL_FLOATS, KeyPath, PlainText, plain_data
from finetune.errors import ConfigError, did_you_mean, nearest

if TYPE_CHECKING:
    from trl import SFTConfig

_COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
OWNED_BY_US = {
    "use_cpu": "FP8 and memory follow the device: CUDA_VISIBLE_DEVICES='' hides the GPUs",
    "output_dir": "the run folder holds it (use --out to choose the folder of runs)",
    "bf16": "precision.compute decides it",
    "fp16": "precision.compute decides it",
    "model_init_kwargs": "the model section decides it",
    **dict.fromkeys(_COMPILING, "precision.compile decides it"),
}
"""Keys of `trl.SFTConfig` that a recipe may not set, and why."""
CHECKPOINTING = "gradient_checkpointing"
CHECKPOINT_ARGUMENTS = (
    *("use_reentrant", "preserve_rng_state", "determinism_check"),
    *("debug", "early_stop", "context_fn"),
)
"""Of `torch.utils.checkpoint.checkpoint`, torch 2.10."""


def decides_checkpointing(config: RunConfig) -> bool:
    """True if `train.gradient_checkpointing` is `auto`: on where memory is too small without it."""
    return config.train.get(CHECKPOINTING) == "auto"


def with_checkpointing(config: RunConfig, on: bool) -> RunConfig:
    """The same run with `train.gradient_checkpointing` decided, as TRL knows it."""
    return config.model_copy(update={"train": {**config.train, CHECKPOINTING: on}})


_OF_LONG_RUNS = (
    *("num_train_epochs", "eval_on_start", "eval_steps", "per_device_eval_batch_size"),
    *("save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model"),
    *("logging_steps", "logging_first_step", "resume_from_checkpoint"),
)


def without_effect(train: Mapping[str, Any]) -> list[str]:
    """Keys that Transformers passes over in silence, where a checkpoint is lost by it.

    An interval of evaluations is none: `train.eval_strategy=no` over a recipe switches them off.

    >>> without_effect({"save_strategy": "no", "save_steps": 50})
    ['train.save_steps=50 has no effect, since train.save_strategy is no: no checkpoint is saved']
    """
    strategy, steps = str(train.get("save_strategy", "steps")).lower(), train.get("save_steps")
    if steps is None or strategy == "steps":
        return []
    outcome = "no: no checkpoint is saved" if strategy in ("no", "false") else strategy
    return [f"train.save_steps={steps:g} has no effect, since train.save_strategy is {outcome}"]


def shortened(
    train: Mapping[str, Any], steps: int, without: Collection[str] = ()
) -> dict[str, Any]:
    """Train section of a run of `steps` steps that evaluates, saves and reports nothing."""
    silent = dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "no")
    kept = {k: value for k, value in train.items() if k not in (*_OF_LONG_RUNS, *without)}
    return kept | silent | {"report_to": "none", "max_steps": steps}


def _import_config() -> type[SFTConfig]:
    """Import TRL, torch and Transformers with it, without a look for garbage in between or later.

    Modules stay, so each look at their millions of objects finds nothing, and takes half a second.
    """
    collects, no_tensors = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        from trl import SFTConfig

        if no_tensors:  # else some might be among the frozen, and keep their memory for ever
            gc.freeze()
            atexit.register(gc.unfreeze)  # or nanobind reports its functions as leaked
    finally:
        if collects:
            gc.enable()
    return SFTConfig


def sft_arguments() -> tuple[str, ...]:
    """Names of the arguments that `trl.SFTConfig` takes; imports trl (seconds)."""
    import dataclasses

    return tuple(f.name for f in dataclasses.fields(_import_config()) if f.init)


def convert_train(
    train: dict[str, Any], where: Callable[[KeyPath], str] = ".".join
) -> dict[str, Any]:
    """Check keys of the `train` section against `trl.SFTConfig` and convert values by field type.

    Args:
        train: key -> value as read (text for plain scalars).
        where: from a path such as `("train", "optim")` to `file:line` for messages.

    Raises:
        ConfigError: an unknown or reserved key, or a value of the wrong type.
    """
    import dataclasses
    import typing

    config_class = _import_config()
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.init}
    types = typing.get_type_hints(config_class)
    result: dict[str, Any] = {}
    for key, value in train.items():
        at = ("train", key)
        if key in OWNED_BY_US:
            raise ConfigError(
                f"train.{key} cannot be set here: {OWNED_BY_US[key]}",
                where=where(at),
                fix=f"~train.{key}, or delete that line of the recipe",
            )
        if key not in fields:
            replacement, remove = in_recipe(key, value), f"~train.{key}"
            meant = None if replacement else nearest(key, fields)
            if meant:
                replacement = f"write train.{meant}={value} instead"
            raise ConfigError(
                f"trl.SFTConfig has no argument {key!r}"
                + (f"; did you mean {meant!r}?" if meant else ""),
                where=where(at),
                why="the train section is handed unchanged to trl.SFTConfig",
                fix=replacement
                or f"{remove}, or delete that line of the recipe (TRL's page on SFTConfig has all "
                "arguments)",
            )
        if key == CHECKPOINTING and str(value) == "auto":  # a value of ours
            result[key] = "auto"
            continue
        result[key] = _convert(key, plain_data(value), types[key], where(at))
        check_range(key, result[key], where(at))
        if key == f"{CHECKPOINTING}_kwargs":
            _check_checkpointing(result[key], where(at))
        if key == "optim":
            check_name(str(result[key]), where(at))
    return result


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
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise _wrong_kind(key, "a list of names", value, where)  # it has no other lists
        return value
    text = SPECIAL_FLOATS.get(value, str(value)) if float in kinds else str(value)
    if text in ("true", "false") and bool not in kinds and str in kinds:
        return text == "true"  # fields such as `fsdp: str | None` take a truth value too
    if str in kinds and not kinds & {int, float, bool}:
        return text
    for kind in (bool, int, float):
        if kind in kinds and not (kind is bool and int in kinds and text in ("0", "1")):
            try:
                return TypeAdapter(kind).validate_python(text)
            except ValidationError:
                continue
    if str in kinds or not kinds & {bool, int, float}:
        return text
    raise _wrong_kind(key, _in_words(kinds), text, where)


def _wrong_kind(key: str, names: str, value: Any, where: str) -> ConfigError:
    fix = f"~train.{key} takes TRL's default"
    return ConfigError(f"train.{key} must be {names}, not {value!r}", where=where, fix=fix)


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


def sft_config(
    config: RunConfig, folder: Path, settings: dict[str, Any], *, on_cpu: bool
) -> SFTConfig:
    """`trl.SFTConfig` of a run: the `train` section unchanged, and what other sections decide.

    Args:
        settings: settings that go with the data, unless the recipe sets them.

    Raises:
        ConfigError: a combination that SFTConfig refuses.
    """
    from trl import SFTConfig

    assert not decides_checkpointing(config), "preflight decides it"
    train = {k: v for k, v in config.train.items() if k != "resume_from_checkpoint"}
    if train.get("optim") in OWN_NAMES:
        del train["optim"]  # Transformers knows no such name: the class is given to the trainer
    if train.get("fsdp") and on_cpu:
        refuse_sharding_on_cpu()
    if config.data.streaming and int(train.get("max_steps") or -1) <= 0:
        raise ConfigError(
            "streamed rows need a number of steps",
            where="data.streaming=true, and no train.max_steps",
            why="the length of a stream is not known before its end, nor are epochs of it",
            fix="train.max_steps=1000, or ~data.streaming",
        )
    compute = config.precision.compute
    # Every parameter of a causal language model takes part; looking for idle ones costs time.
    settings = {"ddp_find_unused_parameters": False, **settings}
    try:
        args = SFTConfig(
            output_dir=str(folder / "checkpoints"),
            bf16=compute in ("bf16", "fp8"),
            fp16=compute == "fp16",
            use_cpu=on_cpu,  # without it SFTConfig refuses bf16 on a CPU
            disable_tqdm=True,
            **{**settings, **train},
        )
    except REFUSALS as error:
        raise refused("trl.SFTConfig", error, train) from error
    # Of several GPUs one process takes one: nn.DataParallel copies layers past their preparation.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def refuse_sharding_on_cpu() -> None:
    """Reject `train.fsdp`; tests, which let Accelerate take CPUs for GPUs, replace this."""
    raise ConfigError(
        "train.fsdp was requested on a CPU",
        where="train.fsdp",
        why="accelerate shards on GPUs only, and would run plain data parallelism silently",
        fix="~train.fsdp ~train.fsdp_config, or run on GPUs with torchrun",
    )


REFUSALS = (
    *(ValueError, TypeError, ImportError, KeyError, AttributeError, OSError, NotImplementedError),
)
"""Errors by which libraries refuse settings while they build something."""


def is_of_the_hub(error: Exception) -> bool:
    """True for errors of the hub's library and of the way to it (`train.push_to_hub`)."""
    return type(error).__module__.startswith(("huggingface_hub", "httpx", "requests"))


def refused(
    who: str, error: Exception, train: Mapping[str, Any] | None = None, *, fix: str = ""
) -> ConfigError:
    """The error of settings that `who`, such as `trl.SFTTrainer`, refuses.

    Left out, the fix is to take those of section `train` back that the error names.
    """
    if (train or {}).get("push_to_hub") and is_of_the_hub(error):
        fix = "~train.push_to_hub, and `hf upload` of model/ later; or, online, `hf auth login`"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return ConfigError(
        f"{who} refuses this combination: {kind}{shorten(str(error), 400)}",
        where="section train",
        fix=fix or _settings_in(str(error), train or {}),
    )


def _settings_in(text: str, train: Mapping[str, Any]) -> str:
    """The settings that an error names, by themselves or by their value, as they are taken back."""
    named = []
    for key, value in train.items():
        is_word = isinstance(value, str) and len(value) > 2
        if re.search(rf"\b({key}|{re.escape(value) if is_word else key})\b", text):
            named.append(f"train.{key}=null" if f"{key}=None" in text else f"~train.{key}")
    return ", or ".join(named) or "change the settings that it names; ~train.KEY is TRL's default"


def padding_free(train: Mapping[str, Any]) -> bool:
    """True if TRL puts the documents of a batch behind one another, without padding, by document.

    Its rule: `padding_free`, or packing by another strategy than `wrapped` (SFTTrainer, TRL 1.16).
    """
    whole = str(train.get("packing_strategy", "bfd")) in ("bfd", "bfd_split")
    return bool(train.get("padding_free") or (train.get("packing") and whole))


@dataclass(frozen=True)
class FsdpSettings:
    """Sharding of a run; defaults of Transformers 5.14 (`TrainingArguments._process_fsdp_args`).

    Attributes:
        reshard: True if gathered weights are freed after forward.
        wrapping: policy that chooses the modules gathered together.
        layers: class names of decoder layers; None: those that the model names.
        checkpointing: True with FSDP's own activation checkpointing.
    """

    version: int = 2
    reshard: bool = True
    wrapping: str = "TRANSFORMER_BASED_WRAP"
    layers: tuple[str, ...] | None = None
    checkpointing: bool = False
    offload: bool = False


def fsdp_settings(train: Mapping[str, Any]) -> FsdpSettings:
    """Settings of a `train` section, or of the JSON file that it names, with `fsdp_` or without.

    Raises:
        ConfigError: `fsdp_config` names a file that is not there or no JSON.
    """
    given = train.get("fsdp_config") or {}
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"train.fsdp_config cannot be read: {error}",
                where="train.fsdp_config",
                fix="the name of a JSON file, or ~train.fsdp_config",
            ) from None
    found = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    layers = found.get("transformer_layer_cls_to_wrap")
    names = layers.split(",") if isinstance(layers, str) else layers
    reshard = str(found.get("reshard_after_forward", True)).lower()
    return FsdpSettings(
        version=int(found.get("version", 2)),
        reshard=reshard not in ("false", "no_shard", "shard_grad_op"),
        wrapping=str(found.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")),
        layers=None if names is None else tuple(names),
        checkpointing=str(found.get("activation_checkpointing", False)).lower() == "true",
        offload=str(found.get("cpu_offload", False)).lower() == "true",
    )


# ------------------------------------------------------------------------------------------ ranges

# `trl.SFTConfig` takes numbers as they come: a NaN, an infinite or a negative one trains nothing,
# trains everything, or ends in a traceback minutes later.
AT_LEAST_ONE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("max_length", "dataset_num_proc", "torch_empty_cache_steps", "eval_accumulation_steps"),
    *("ddp_bucket_cap_mb", "dataloader_prefetch_factor", "pad_to_multiple_of", "ddp_timeout"),
)
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(AT_LEAST_ONE, (1, LARGEST)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),  # of numpy
    **dict.fromkeys(("max_steps", "local_rank"), (-1, LARGEST)),
    "label_smoothing_factor": (0, 1),
    "dataloader_num_workers": (0, 4096),
    "max_grad_norm": (0, math.inf),  # infinite: gradients are measured, and not clipped
}
"""Setting -> smallest and largest value; others are zero or more."""
BELOW_ONE = ("adam_beta1", "adam_beta2")
ABOVE_ZERO = ("num_train_epochs",)
CHOICES = {
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
}
"""Words of which Transformers takes any other for the first, without a word."""

MOST_TOKENS = 2**24
"""Tokens of a micro-batch: a hundred times what the largest GPUs hold of the smallest models."""


def check_batch(train: Mapping[str, Any]) -> None:
    """Reject a micro-batch of more than `MOST_TOKENS`, before it is planned or simulated."""
    rows = train.get("per_device_train_batch_size", 8)
    length = 1024 if train.get("max_length", 1024) is None else train.get("max_length", 1024)
    if int(rows) * int(length) > MOST_TOKENS:
        raise ConfigError(
            f"a micro-batch of {rows:,} rows of {length:,} tokens fits no machine",
            where="train.per_device_train_batch_size and train.max_length",
            why=f"{MOST_TOKENS:,} tokens are the most that is planned for",
            fix="train.per_device_train_batch_size=8 train.max_length=1024; "
            "train.gradient_accumulation_steps makes a larger batch of small ones",
        )


def check_range(key: str, value: Any, where: str) -> None:
    """Reject a NaN, a number out of the setting's range, or a word that it does not have."""
    if key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(
            f"train.{key} cannot be {value!r}{did_you_mean(str(value), CHOICES[key])}",
            where=where,
            fix=f"one of {', '.join(CHOICES[key])}; ~train.{key} takes TRL's default",
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = RANGES.get(key, (0, LARGEST))
    inside = low <= value <= high  # False of NaN
    if key in BELOW_ONE:
        inside, high = inside and value < 1, 1
    if key in ABOVE_ZERO:
        inside = inside and value > 0
    if not inside:
        least = "more than 0" if key in ABOVE_ZERO else f"{low:g} or more"
        end = "below" if key in BELOW_ONE else "at most"
        most = "" if high >= LARGEST else f", {end} {high:.15g}"
        raise ConfigError(
            f"train.{key} cannot be {value}",
            where=where,
            fix=f"a number of {least}{most}; ~train.{key} takes TRL's default",
        )
