"""The configuration of a run: frozen, complete, and plain data.

The sections of a `RunConfig` are described field by field here and in `finetune.config.sections`,
but for `train`, which is handed unchanged to TRL's configuration, whose documentation describes it.
Nothing here imports torch, so that listing and checking recipes stays instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from finetune.config.methods import METHODS, REWARDS
from finetune.config.sections import (
    CheckpointsConfig,
    DataConfig,
    EvalConfig,
    LoraSection,
    ResumeConfig,
)
from finetune.config.train_keys import TrainSection
from finetune.precision.facts import STORED_SCALINGS
from finetune.precision.settings import PrecisionConfig
from finetune.section import Section

Storage = Literal["nf4", "fp8"]


class ModelConfig(Section):
    """The model, and how its weights are stored between steps."""

    name: str = Field(description="hub id, local folder, or `builtin:tiny_llama`")
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="`random` builds the shape only: no hub, for planning and speed",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="type of the stored weights; with `float32` the optimizer updates full "
        "precision masters while matmuls run in `precision.compute`",
    )
    storage: Storage | None = Field(
        default=None,
        description="storage of a frozen base's weights while adapters train in BF16: left "
        "out, plain, in `dtype`; `nf4`: 4-bit NormalFloat with double quantization, dequantized "
        "before each BF16 matmul (QLoRA, extra `bnb`); `fp8`: E4M3 codes with a scale per output "
        "channel, dequantized likewise. `dtype` is then that of embeddings, norms and the output "
        "head",
    )
    attention: str | None = Field(
        default="auto",
        description="`varlen`: packed documents without a mask; `auto`: that where rows are packed "
        "by document, else the model's own; or a name of Transformers (`sdpa`, `eager`, ...)",
    )
    pad_token: str | None = Field(
        default=None,
        description="padding token of the tokenizer; one that is not its end-of-text token keeps "
        "models from learning never to stop",
    )
    head: Literal["score"] | None = Field(
        default=None,
        description="follows train.method: `score` where a text gets one number (reward), with a "
        "new output layer on a model of words; left out: words",
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        description="patterns of modules and parameters that do not train and get no adapter, as "
        "in `precision.keep`; towers for images and sound are frozen anyway, but for "
        "`model.train_vision`",
    )
    train_vision: Literal["none", "projector", "all"] = Field(
        default="none",
        description="what trains of a model's way for images: nothing; `projector`, the weights "
        "between its tower and the decoder, in full, under adapters too; `all`, the tower as well, "
        "by the adapters of `lora.target_modules` where there is a section `lora`",
    )
    revision: str | None = Field(default=None, description="hub revision (branch, tag or commit)")
    trust_remote_code: bool = Field(default=False, description="allow hub model code to run")


PARTS = ("train", "model")
TRAIN: dict[str, Any] = {
    "method": {
        "enum": [*METHODS],
        "default": "sft",
        "description": "training method: the trainer of TRL, whose configuration the other keys "
        "of the section are for",
    },
    "max_length": {
        "type": ["integer", "string", "null"],
        "description": "tokens of the longest row, behind which rows are cut; `auto`: the fewest "
        "that cut nothing that is trained on, or only one very long row of 200, within the "
        "positions of the model; `python -m finetune data RECIPE` shows it, and what others cost",
    },
    "embedding_learning_rate": {
        "type": "number",
        "description": "learning rate of embeddings and output head, where they train; left out: "
        "train.learning_rate",
    },
    "max_pixels": {
        "type": "integer",
        "description": "rows with images: the most pixels of an image, which is made smaller; the "
        "fewer, the fewer tokens; left out: as the model's files have it",
    },
    "min_pixels": {
        "type": "integer",
        "description": "rows with images: the fewest pixels of an image, which is made larger",
    },
    REWARDS: {
        "type": ["array", "string"],
        "items": {"type": "string"},
        "description": "method grpo or rloo: what judges the answers: `rewards.py:exact` (a "
        "function of a file), `my_rewards.exact` (of a module), `builtin:last_number` (packaged), "
        "`think_format_reward` (of TRL), `me/reward-model`; several are added up by "
        "`train.reward_weights`",
    },
}
"""Keys of the `train` section that are ours."""


class RunConfig(Section):
    """One run, complete. `train` is for TRL; `finetune.config.recipe` checks it."""

    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    lora: LoraSection | None = None
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    resume: ResumeConfig = ResumeConfig()
    train: TrainSection = Field(default=TrainSection(), json_schema_extra={"properties": TRAIN})

    @model_validator(mode="before")
    @classmethod
    def _head_of_the_method(cls, values: Any) -> Any:
        """Give the model the output layer that the training method needs."""
        train, model = (values.get(key) if isinstance(values, dict) else None for key in PARTS)
        method = METHODS.get(str((train or {}).get("method"))) if isinstance(train, dict) else None
        if isinstance(model, dict) and method and method.head == "score":
            return values | {"model": model | {"head": "score"}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _store_a_frozen_base_in_fp8(cls, values: Any) -> Any:
        """Store the base in FP8 where an FP8 run does not train it and the scaling allows."""
        precision = values.get("precision") if isinstance(values, dict) else None
        if not isinstance(precision, dict) or not values.get("lora"):
            return values
        # An explicit `frozen` stays; the codes of a frozen base are E4M3 alone.
        stored = (
            precision.get("compute") == "fp8"
            and precision.get("frozen") is None
            and precision.get("format") in (None, "e4m3")
            and precision.get("scaling", "tensorwise") in STORED_SCALINGS
        )
        return values | {"precision": precision | {"frozen": "fp8"}} if stored else values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same with other sections; a plain `train` section becomes one that is typed."""
        changed = dict(update or {})
        if "train" in changed:
            changed["train"] = TrainSection(changed["train"])
        return super().model_copy(update=changed, deep=deep)

    @property
    def method(self) -> Literal["full", "lora"]:
        """`lora` when adapters are trained, else `full`."""
        return "full" if self.lora is None else "lora"
