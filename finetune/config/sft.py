"""TRL's configuration of a run, and what its `train` section means for others."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from finetune.config.aliases import is_off
from finetune.config.methods import EARLY_STOPPING, KEYS, REWARDS, arguments, method_of
from finetune.config.optimizers import OWN_NAMES
from finetune.config.schema import RunConfig
from finetune.config.train_keys import ARGUMENTS, TrainerArguments, TrainSection, for_library
from finetune.config.train_section import decides_checkpointing
from finetune.errors import ConfigError

_OF_LONG_RUNS = (
    "num_train_epochs",
    "eval_on_start",
    "eval_steps",
    "per_device_eval_batch_size",
    "save_steps",
    "save_total_limit",
    "load_best_model_at_end",
    "metric_for_best_model",
    "logging_steps",
    "logging_first_step",
    "resume_from_checkpoint",
    *EARLY_STOPPING,
)

LENGTHS = 128
"""What lengths of batches are multiples of on a GPU, unless a recipe says otherwise.

cuDNN makes a plan of attention for each new length, in 0.1 to 2 seconds. Multiples of 64 would be
as good, but at odd ones its backward under a mask of padding can give NaN on Hopper
(pytorch/pytorch, issue 196678; huggingface/trl, issue 7181).
"""


def without_effect(train: TrainSection) -> list[str]:
    """Keys that Transformers passes over in silence, where a checkpoint is lost by it.

    An interval of evaluations is none: `train.eval_strategy=no` over a recipe switches them off.

    >>> without_effect(TrainSection(save_strategy="no", save_steps=50))
    ['train.save_steps=50 has no effect, since train.save_strategy is no: no checkpoint is saved']
    """
    strategy, steps = str(train.save_strategy).lower(), train.save_steps
    if "save_steps" not in train or strategy == "steps":
        return []
    outcome = "no: no checkpoint is saved" if strategy in ("no", "false") else strategy
    return [f"train.save_steps={steps:g} has no effect, since train.save_strategy is {outcome}"]


def shortened(train: Mapping[str, Any], steps: int, without: Collection[str] = ()) -> TrainSection:
    """Train section of a run of `steps` steps that evaluates, saves and reports nothing."""
    silent = dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "no")
    kept = {k: value for k, value in train.items() if k not in (*_OF_LONG_RUNS, *without)}
    return TrainSection(kept | silent | {"report_to": "none", "max_steps": steps})


def sft_config(config: RunConfig, folder: Path, settings: dict[str, Any], *, on_cpu: bool) -> Any:
    """TRL's configuration of a run: the `train` section unchanged, and what others decide.

    Args:
        settings: settings that go with the data, unless the recipe sets them; those that the
            method's configuration has.

    Returns:
        A `trl.SFTConfig`, or the class of `train.method`, with `least_rows`, for `data.min_steps`.

    Raises:
        ConfigError: a combination that the configuration refuses.
    """
    method = method_of(config.train)
    assert not decides_checkpointing(config), "preflight decides it"
    ours = (*KEYS, REWARDS, "resume_from_checkpoint")
    train = TrainSection({k: v for k, v in config.train.items() if k not in ours})
    if train.optim in OWN_NAMES:
        del train["optim"]  # Transformers knows no such name: the class is given to the trainer
    if train.fsdp and on_cpu:
        refuse_sharding_on_cpu()
    if config.data.streaming and int(train.max_steps) <= 0:
        raise ConfigError(
            "streamed rows need a number of steps",
            where="data.streaming=true, and no train.max_steps",
            why="the length of a stream is not known before its end, nor are epochs of it",
            fix="train.max_steps=1000, or data.max_tokens=1B where rows are packed; or "
            "~data.streaming",
        )
    compute = config.precision.compute
    # Every parameter of a causal language model takes part; looking for idle ones costs time.
    settings = {"ddp_find_unused_parameters": False, **settings}
    known = arguments(method)
    settings = {key: value for key, value in settings.items() if key in known}
    if isinstance(own := train.accelerator_config, dict):  # others stay the rows'
        train["accelerator_config"] = {**settings.get("accelerator_config", {}), **own}
    with refused_by(method.config, train):
        args = method.config_class(
            output_dir=str(folder / "checkpoints"),
            bf16=compute in ("bf16", "fp8"),
            fp16=compute == "fp16",
            use_cpu=on_cpu,  # without it TRL refuses bf16 on a CPU
            disable_tqdm=True,
            **for_library(method.config_class, {**settings, **train}),
        )
    given = TrainerArguments(args)
    padded = "pad_to_multiple_of" in known and not method.writes
    if padded and not on_cpu and train.pad_to_multiple_of == "auto":
        # Up to the longest row, which may end with the model's positions.
        given.pad_to_multiple_of = math.gcd(LENGTHS, given.max_length or LENGTHS)
    # Of several GPUs one process takes one: nn.DataParallel copies layers past their preparation.
    args._n_gpu = min(args.n_gpu, 1)
    steps = config.data.min_steps if given.max_steps <= 0 else None
    # Packed rows that make the fewest steps that are wanted (`data.preparing.AccountedTrainer`).
    args.least_rows = math.ceil((steps or 0) * args.world_size / given.num_train_epochs)
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
    ValueError,
    TypeError,
    ImportError,
    KeyError,
    AttributeError,
    OSError,
    NotImplementedError,
)
"""Errors by which libraries refuse settings while they build something."""


def is_of_the_hub(error: Exception) -> bool:
    """True for errors of the hub's library and of the way to it (`train.push_to_hub`)."""
    return type(error).__module__.startswith(("huggingface_hub", "httpx", "requests"))


def refused(
    who: str, error: Exception, train: Mapping[str, Any] | None = None, *, fix: str = ""
) -> ConfigError:
    """The error of settings that `who`, such as `trl.SFTTrainer`, refuses.

    Left out, the fix takes back the settings of section `train` that the error names.
    """
    if (train or {}).get("push_to_hub") and is_of_the_hub(error):
        fix = "~train.push_to_hub, and `hf upload` of model/ later; or, online, `hf auth login`"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return ConfigError(
        f"{who} refuses this combination: {kind}{shorten(str(error), 400)}",
        where="section train",
        fix=fix or settings_in(str(error), train or {}),
    )


@contextlib.contextmanager
def refused_by(
    who: str, train: Mapping[str, Any] | None = None, *, fix: str = ""
) -> Iterator[None]:
    """Raise what a library refuses inside as the error of `refused`."""
    try:
        yield
    except REFUSALS as error:
        raise refused(who, error, train, fix=fix) from error


def settings_in(text: str, train: Mapping[str, Any]) -> str:
    """The settings that an error names, by themselves or by their value, as they are taken back."""
    named = []
    for key, value in train.items():
        is_word = isinstance(value, str) and len(value) > 2
        names = "|".join((key, *(ARGUMENTS[key].also if key in ARGUMENTS else ())))
        if re.search(rf"\b({names}|{re.escape(value) if is_word else key})\b", text):
            named.append(f"train.{key}=null" if f"{key}=None" in text else f"~train.{key}")
    return ", or ".join(named) or "change the settings that it names; ~train.KEY is TRL's default"


def padding_free(train: TrainSection) -> bool:
    """True if TRL puts the documents of a batch behind one another, without padding, by document.

    Its rule: `padding_free`, or packing by another strategy than `wrapped` (SFTTrainer, TRL 1.16).
    """
    whole = str(train.packing_strategy) in ("bfd", "bfd_split")
    return bool(train.padding_free or (train.packing and whole))


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


def fsdp_settings(train: TrainSection) -> FsdpSettings:
    """Settings of a `train` section, or of the JSON file that it names, with `fsdp_` or without.

    Raises:
        ConfigError: `fsdp_config` names a file that is not there or no JSON.
    """
    given = train.fsdp_config or {}
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"train.fsdp_config cannot be read: {error}",
                where="train.fsdp_config",
                fix="the name of a JSON file, or ~train.fsdp_config",
            ) from None
    words = str(train.fsdp).lower()  # `full_shard offload`, as older recipes have it
    found: dict[str, Any] = {"reshard_after_forward": "shard_grad_op" not in words}
    found |= {"cpu_offload": "offload" in words}
    found |= {key.removeprefix("fsdp_"): value for key, value in given.items()}
    layers = found.get("transformer_layer_cls_to_wrap")
    names = layers.split(",") if isinstance(layers, str) else layers
    return FsdpSettings(
        version=int(found.get("version", 2)),
        reshard=not is_off(found["reshard_after_forward"]),
        wrapping=str(found.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")),
        layers=None if names is None else tuple(names),
        checkpointing=not is_off(found.get("activation_checkpointing", False)),
        offload=not is_off(found["cpu_offload"]),
    )
