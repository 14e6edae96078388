"""Arguments of Transformers and TRL that this package reads: one table, and two typed views by it.

    a recipe's `train` section, a mapping               TrainSection(...).max_length
    a trainer's arguments, such as a `trl.SFTConfig`    TrainerArguments(trainer.args).max_length

An argument has one name in recipes, texts and files of ours: the table's. A library's release
that calls it otherwise is a change in this file alone, `also=("max_tokens",)`, and both releases
work. A release whose name is not known is refused, where its configuration is taken up and where
the argument is read: `getattr(args, "max_length", None)` would be None without a word. Defaults and
configurations are the library's, to which tests compare them.

    >>> train = TrainSection(packing=True)
    >>> train.packing, train.max_length, dict(train)
    (True, 1024, {'packing': True})
"""

from __future__ import annotations

import copy
import importlib.metadata
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from pydantic_core import CoreSchema, core_schema

from finetune.config.paths import ASSETS
from finetune.errors import ConfigError, raise_all

BATCH = ("gradient_accumulation_steps", "per_device_train_batch_size")
"""What makes a step of several rows: keys of the trainer's arguments."""
T = TypeVar("T")
OURS, ALL = "", "TrainingArguments"
ROWS, PREPARED = "SFT DPO KTO ORPO Reward", "SFT DPO KTO Reward"
WRITTEN, REWARDED = "GRPO RLOO Distillation", "GRPO RLOO"
"""Configurations that have an argument: `SFT` is `trl.SFTConfig`."""


class Key(Generic[T]):
    """An argument, as an attribute of both views.

    Args:
        default: the library's, or what is meant where the section says nothing.
        nullable: True if null is a value of its own; else it is the default, too.
        of: configurations that have it; of `OURS` none.
        also: its names in other releases of the library.

    Attributes:
        without: what arguments have that have no such one.
    """

    def __init__(
        self, default: T, *, nullable: bool = False, of: str = ALL, also: tuple[str, ...] = ()
    ) -> None:
        self.default, self.nullable, self.of, self.also = default, nullable, of.split(), also
        self.without = False if isinstance(default, bool) else None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, view: None, owner: type) -> Key[T]: ...
    @overload
    def __get__(self, view: Arguments, owner: type) -> T: ...
    def __get__(self, view: Arguments | None, owner: type) -> Any:
        return self if view is None else view._read(self)

    def __set__(self, view: Arguments, value: T) -> None:
        view._write(self, value)

    def name_in(self, holder: Any) -> str:
        """The argument's name in arguments, or a class of them; empty where it is none of theirs.

        Raises:
            ConfigError: it is one of theirs, by a name that is not known.
        """
        fields = getattr(holder, "__dataclass_fields__", ())  # some have no default in the class
        for name in (self.name, *self.also):
            if name in fields or hasattr(holder, name):
                return name
        classes = (holder if isinstance(holder, type) else type(holder)).__mro__
        theirs = [one for one in classes if one.__name__.removesuffix("Config") in self.of]
        if not theirs:
            return ""
        library = (kind := theirs[-1]).__module__.partition(".")[0]
        tested = tomllib.loads((ASSETS / "tested.toml").read_text("utf-8"))["ran"][library][-1]
        raise ConfigError(
            f"{library}.{kind.__name__} has no argument {self.name}",
            where=f"{library} {importlib.metadata.version(library)}",
            why="it has another name in this release, or is gone: what it decides, of rows, steps "
            "or memory, would be passed over",
            fix=f"pip install {library}=={tested}",
        )


class Arguments:
    """The table."""

    __slots__ = ()

    method = Key[str]("sft", of=OURS)  # finetune.config.methods

    # Rows. `max_length` is a number, `auto` (ours) or null; a method whose model writes has none.
    max_length = Key[Any](1024, nullable=True, of=ROWS)
    truncation_mode = Key("keep_start", of="SFT DPO")
    max_pixels = Key[int | None](None, of=OURS)  # of an image: storage.processors
    min_pixels = Key[int | None](None, of=OURS)
    packing = Key(False, of="SFT")
    packing_strategy = Key("bfd", of="SFT")
    eval_packing = Key[bool | None](None, of="SFT")
    padding_free = Key(False, of="SFT DPO")
    # `auto` on a GPU: `finetune.config.sft` fits it to the length of the rows.
    pad_to_multiple_of = Key[Any]("auto", nullable=True, of=f"{PREPARED} {WRITTEN}")
    assistant_only_loss = Key(False, of="SFT")
    completion_only_loss = Key[bool | None](None, of="SFT")
    chat_template_path = Key[str | None](None, of="SFT Reward")
    chat_template_kwargs = Key[Any](None, of=WRITTEN)
    eos_token = Key[str | None](None, of="SFT Reward")
    dataset_kwargs = Key[Any](None, of="SFT")
    dataset_num_proc = Key[int | None](None, of=ROWS)
    dataloader_drop_last = Key(False)
    train_sampling_strategy = Key("random")

    # Steps.
    per_device_train_batch_size = Key(8)
    per_device_eval_batch_size = Key(8)
    gradient_accumulation_steps = Key(1)
    max_steps = Key(-1)
    num_train_epochs = Key(3.0)
    seed = Key(42)
    data_seed = Key[int | None](None)
    learning_rate = Key[Any](None)  # each method has its own
    embedding_learning_rate = Key[float | None](None, of=OURS)
    lr_scheduler_type = Key[Any]("linear")
    lr_scheduler_kwargs = Key[Any](None)
    warmup_steps = Key[float](0)
    max_grad_norm = Key(1.0)
    optim = Key("adamw_torch_fused")
    optim_args = Key[Any](None)
    adam_beta1 = Key(0.9)
    adam_beta2 = Key(0.999)
    adam_epsilon = Key(1e-8)

    # Memory and devices.
    gradient_checkpointing = Key[Any](True)  # or `auto`, ours
    gradient_checkpointing_kwargs = Key[Any](None)
    activation_offloading = Key(False, of=PREPARED)
    fsdp = Key[Any](None)
    fsdp_config = Key[Any](None)
    deepspeed = Key[Any](None)
    accelerator_config = Key[Any](None)
    tf32 = Key[bool | None](None)
    use_liger_kernel = Key(False)
    liger_kernel_config = Key[Any](None)

    # Evaluation, checkpoints and logs.
    eval_strategy = Key[Any]("no")
    eval_steps = Key[Any](None)
    eval_on_start = Key(False)
    metric_for_best_model = Key[str | None](None)
    early_stopping_patience = Key[int | None](None, of=OURS)
    early_stopping_threshold = Key[float | None](None, of=OURS)
    output_dir = Key[Any](None)
    save_strategy = Key[Any]("steps")
    save_steps = Key[Any](500)
    save_total_limit = Key[int | None](None)
    save_only_model = Key(False)
    load_best_model_at_end = Key(False)
    resume_from_checkpoint = Key[Any](None)
    report_to = Key[Any]("none")
    push_to_hub = Key(False)
    logging_nan_inf_filter = Key(True)

    # Of single methods: the loss, a reference, rewards, a teacher, and what the model writes.
    loss_type = Key[Any](None, of="SFT DPO KTO GRPO")  # each method has its own
    label_smoothing_factor = Key(0.0)
    router_aux_loss_coef = Key[float | None](None, of=f"SFT DPO KTO {REWARDED}")
    precompute_ref_log_probs = Key(False, of="DPO KTO")
    sync_ref_model = Key(False, of=f"DPO KTO {REWARDED}")
    reward_funcs = Key[Any](None, of=OURS)
    teacher_model_name_or_path = Key[str | None](None, of="Distillation")
    max_completion_length = Key(512, of=f"ORPO {WRITTEN}")
    num_generations = Key[int | None](None, of=REWARDED)  # each method has its own
    num_iterations = Key(1, of=REWARDED)
    steps_per_generation = Key[int | None](None, of=REWARDED)
    generation_batch_size = Key[int | None](None, of=REWARDED)

    def _read(self, key: Key[Any]) -> Any:
        raise NotImplementedError

    def _write(self, key: Key[Any], value: Any) -> None:
        raise AttributeError(f"{key.name} cannot be set: a section is a mapping")


ARGUMENTS: dict[str, Key[Any]] = {k: v for k, v in vars(Arguments).items() if isinstance(v, Key)}
"""Name in the table -> argument."""
OTHER_NAMES = {other: name for name, key in ARGUMENTS.items() for other in key.also}
"""Name in some release of a library -> that in the table, where they differ."""


class TrainSection(Arguments, dict[str, Any]):
    """The section as written, with an attribute for each key that is read."""

    def _read(self, key: Key[Any]) -> Any:
        value = self.get(key.name, key.default)
        return value if value is not None or key.nullable else key.default

    @property
    def row_multiple(self) -> int:
        """What lengths of rows are a multiple of, as written; `auto` divides any length."""
        written = self.pad_to_multiple_of
        return 1 if written in (None, "auto") else int(written)

    @property
    def pixels(self) -> dict[str, int | None]:
        """The most and the least pixels of an image, by their keys; None: the model's own."""
        return {"max_pixels": self.max_pixels, "min_pixels": self.min_pixels}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, handler(dict[str, Any]))


class TrainerArguments(Arguments):
    """A trainer's arguments, or their class, by the names of the table.

    Reading one that they do not have gives None, or False of a switch; one that they should have is
    a `ConfigError`. What is no argument (`world_size`) is read from them as it is.
    """

    __slots__ = ("own",)

    def __init__(self, args: Any) -> None:
        self.own: Any = args.own if isinstance(args, TrainerArguments) else args

    def _read(self, key: Key[Any]) -> Any:
        name = key.name_in(self.own)
        return getattr(self.own, name) if name else key.without

    def _write(self, key: Key[Any], value: Any) -> None:
        if not (name := key.name_in(self.own)):
            raise AttributeError(f"{type(self.own).__name__} has no {key.name}")
        setattr(self.own, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __copy__(self) -> TrainerArguments:
        return TrainerArguments(copy.copy(self.own))


def refuse_renamed(kind: type) -> None:
    """Raise a `ConfigError` where a class of arguments lacks some that the table says it has."""

    def lacking() -> Iterator[ConfigError]:
        for key in ARGUMENTS.values():
            try:
                key.name_in(kind)
            except ConfigError as error:
                yield error

    raise_all([*lacking()])


def for_library(kind: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names of the table, as a class of arguments takes them."""
    keys = {name: ARGUMENTS[name].name_in(kind) for name in settings if name in ARGUMENTS}
    return {keys.get(name) or name: value for name, value in settings.items()}
