"""The `train` section: a mapping for TRL, and a typed view of the keys that are read here.

TRL's configuration takes the section as it is written. What this package reads of it stands in one
table, with the defaults of Transformers and TRL, to which a test compares them: an argument that
has another default there is a change in this file. One that is renamed is one more where a
trainer's own arguments are read, and in texts.

    >>> train = TrainSection(packing=True)
    >>> train.packing, train.max_length, dict(train)
    (True, 1024, {'packing': True})
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from pydantic_core import CoreSchema, core_schema

BATCH = ("gradient_accumulation_steps", "per_device_train_batch_size")
"""What makes a step of several rows: keys of the trainer's arguments."""
T = TypeVar("T")


class Key(Generic[T]):
    """A key of the section, as an attribute: its value, or a default.

    Args:
        default: that of the library, or what is meant where the section says nothing.
        nullable: True if null is a value of its own; else it is the default, too.
    """

    def __init__(self, default: T, *, nullable: bool = False) -> None:
        self.default, self.nullable = default, nullable

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, section: None, owner: type) -> Key[T]: ...
    @overload
    def __get__(self, section: TrainSection, owner: type) -> T: ...
    def __get__(self, section: TrainSection | None, owner: type) -> Any:
        if section is None:
            return self
        value = section.get(self.name, self.default)
        return value if value is not None or self.nullable else self.default


class TrainSection(dict[str, Any]):
    """The section as written, with an attribute for each key that is read."""

    method = Key[str]("sft")  # ours: finetune.config.methods

    # Rows. `max_length` is a number, `auto` (ours) or null; a method whose model writes has none.
    max_length = Key[Any](1024, nullable=True)
    packing = Key(False)
    packing_strategy = Key("bfd")
    padding_free = Key(False)
    # `auto` on a GPU: `finetune.config.sft` fits it to the length of the rows.
    pad_to_multiple_of = Key[Any]("auto", nullable=True)
    chat_template_path = Key[str | None](None)

    # Steps.
    per_device_train_batch_size = Key(8)
    gradient_accumulation_steps = Key(1)
    max_steps = Key(-1)
    num_train_epochs = Key(3.0)
    seed = Key(42)
    learning_rate = Key[float | None](None)  # each method has its own
    embedding_learning_rate = Key[float | None](None)  # ours
    optim = Key("adamw_torch_fused")
    optim_args = Key[Any](None)

    # Memory and devices.
    gradient_checkpointing = Key[Any](True)  # or `auto`, ours
    gradient_checkpointing_kwargs = Key[Any](None)
    fsdp = Key[Any](None)
    fsdp_config = Key[Any](None)
    deepspeed = Key[Any](None)
    accelerator_config = Key[Any](None)
    tf32 = Key[bool | None](None)
    use_liger_kernel = Key(False)

    # Evaluation and checkpoints.
    eval_strategy = Key[Any]("no")
    eval_steps = Key[Any](None)
    metric_for_best_model = Key[str | None](None)
    early_stopping_patience = Key[int | None](None)  # ours, as the next
    early_stopping_threshold = Key[float | None](None)
    save_strategy = Key[Any]("steps")
    save_steps = Key[Any](500)
    save_total_limit = Key[int | None](None)
    save_only_model = Key(False)
    load_best_model_at_end = Key(False)
    resume_from_checkpoint = Key[Any](None)
    report_to = Key[Any]("none")
    push_to_hub = Key(False)

    # What single methods have: the loss, rewards, a teacher, and answers that the model writes.
    loss_type = Key[Any](None)  # each method has its own
    label_smoothing_factor = Key(0.0)
    router_aux_loss_coef = Key[float | None](None)
    reward_funcs = Key[Any](None)
    teacher_model_name_or_path = Key[str | None](None)
    max_completion_length = Key(512)
    num_generations = Key[int | None](None)  # each method has its own
    steps_per_generation = Key[int | None](None)

    @property
    def row_multiple(self) -> int:
        """What lengths of rows are a multiple of, as written; `auto` divides any length."""
        written = self.pad_to_multiple_of
        return 1 if written in (None, "auto") else int(written)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, handler(dict[str, Any]))
