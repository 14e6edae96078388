"""Sections of a recipe: their base, which checks any value, rows, evaluation, checkpoints, LoRA.

`finetune.config.schema` adds model and precision, and puts them together.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from finetune.section import RefusedError, Section
from finetune.units import amount

# -------------------------------------------------------------------- rows, evaluation, checkpoints

BUILTIN = "builtin:"
"""Prefix of models and data sets that ship inside the package, such as `builtin:tiny_llama`."""
Sources = str | tuple[str, ...] | dict[str, PositiveFloat]
"""One source of rows, several behind one another, or several mixed by weight."""


class DataConfig(Section):
    """Rows to train on. Exactly one of `path` and `name`."""

    path: Sources | None = Field(
        default=None,
        description="JSONL, JSON, CSV, TSV, Parquet, Arrow or text, also compressed (`.gz`, "
        "`.bz2`, `.xz`, `.zst`): a file, a folder, a glob (`rows/*.jsonl`), a list of these, or a "
        "mixture by weight, `{a.jsonl: 0.7, b.jsonl: 0.3}`: rows are drawn in these shares until "
        "each source was read once, so rows of the others are repeated",
    )
    name: str | None = Field(default=None, description="hub data set, or `builtin:harbour`")
    subset: Sources | None = Field(
        default=None,
        description="hub configuration name; a list of them, or a mixture by weight as in `path`",
    )
    split: str = Field(default="train", description="split to train on")
    streaming: bool = Field(
        default=False,
        description="read rows while training, without a copy on disk and with flat memory; needs "
        "`train.max_steps` or `max_tokens`. Rows start again when all were read; resuming reads "
        "skipped rows again",
    )
    shuffle_buffer: PositiveInt = Field(
        default=1000,
        description="streaming: rows kept in memory, of which the next is drawn at random; 1 keeps "
        "the order",
    )
    eval_path: str | None = Field(default=None, description="file, folder or glob of eval rows")
    eval_split: str | None = Field(
        default=None, description="hub split of eval rows; `held_out` of `builtin:pictures`"
    )
    eval_fraction: float = Field(
        default=0.05,
        ge=0.0,
        lt=1.0,
        description="share of the rows split off for evaluation when none are named, at least 16 "
        "or a fifth of them, of 320 rows and more 32; streaming: of the first 10,000 rows of each "
        "source, its first ones",
    )
    seed: NonNegativeInt | None = Field(
        default=None,
        description="draws which rows `eval_fraction` holds out; left out: `train.seed`. Runs of "
        "several seeds that share it share their eval rows",
    )
    max_rows: PositiveInt | None = Field(
        default=None, description="use only the first rows of each source"
    )
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="tokens to train on, such as `10B`, `500M` or `1e9`: gives `train.max_steps` "
        "by the batch and the number of GPUs; needs `train.packing_strategy=wrapped`, whose rows "
        "are full",
    )
    columns: dict[str, str] = Field(
        default={},
        description="names of columns, as a format has them -> as the rows have them, for instance "
        "`{prompt: ask, completion: reply}`",
    )
    image_folder: str | None = Field(
        default=None,
        description="folder in which paths of images in rows begin; left out: that of the rows' "
        "file",
    )
    image_urls: bool = Field(
        default=False,
        description="fetch images that rows give by URL, up to 64 MiB each; such rows are bad ones "
        "otherwise",
    )
    sample_by: Literal["line", "paragraph", "document"] = Field(
        default="line",
        description="text files: a row is a line, a paragraph (up to a blank line) or a whole file",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="a row that cannot be trained on ends the run, or is skipped and counted",
    )
    min_steps: PositiveInt | None = Field(
        default=None,
        description="where epochs over few rows make fewer optimizer steps than this, "
        "`train.gradient_accumulation_steps` is lowered, down to 1, then "
        "`train.per_device_train_batch_size`, and the length of packed rows, down to the longest "
        "row; left out, or where the first or a larger second is typed: they stay as they are",
    )
    images_per_row: NonNegativeInt | None = Field(
        default=None,
        description="images that `estimate` takes each row to have; left out: those of the first "
        "rows of files here, else 1 if `train` sizes images (`max_pixels`, `min_pixels`), or none",
    )
    image_size: str = Field(
        default="1024x768",
        pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$",
        description="pixels that `estimate` takes these images to have, width x height",
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="questions that the model answers at each evaluation and at the end"
    )

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _amount(cls, value: Any) -> Any:
        """`10B` and `1e9` as whole numbers; anything else as it is."""
        return value if value is None else amount(str(value)) or value

    @field_validator("path", "subset", mode="before")
    @classmethod
    def _by_weight(cls, value: Any, info: ValidationInfo) -> Any:
        """A list of `{path: ..., weight: ...}` is a mixture; one of names has each once."""
        if not isinstance(value, list | tuple):
            return value
        key = str(info.field_name)
        names = [x.get(key) if isinstance(x, dict) else x for x in value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RefusedError(
                f"{twice[0]!r} stands in the list more than once, and would be read once",
                f'{key}={{"a":2,"b":1}}',
            )
        if not any(isinstance(x, dict) for x in value):
            return value
        if not all(isinstance(x, dict) and {key} <= set(x) <= {key, "weight"} for x in value):
            raise RefusedError(
                f"each of a list of {key} and weight needs {key}, and nothing else is known",
                f'{key}=[{{"{key}":"a","weight":2}},{{"{key}":"b"}}]',
            )
        # Weights are relative: a source without one counts as 1.
        return {x[key]: x.get("weight", 1.0) for x in value}

    @property
    def sources(self) -> dict[str, float | None]:
        """Paths, or subsets of the data set `name`, and their weights; None where none is given."""
        given = self.path if self.path is not None else self.subset
        if isinstance(given, dict):
            return dict(given)
        return dict.fromkeys(given if isinstance(given, tuple) else (given or "",))

    @property
    def label(self) -> str:
        """Path or name of the rows, as it is shown."""
        return ", ".join(self.sources) if self.path is not None else self.name or ""

    @property
    def hub(self) -> str | None:
        """Name on the hub; None of files and of packaged rows."""
        return self.name if self.name is not None and not self.name.startswith(BUILTIN) else None

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.name is None):
            given, ways = "neither is given", ("path=mine.jsonl", "name=builtin:harbour")
            if self.path is not None:
                given, ways = "both are given", ("~path", "~name")
            what = f"exactly one of data.path and data.name is needed, and {given}"
            raise RefusedError(what, *ways)
        if self.seed is not None and (self.eval_path or self.eval_split or not self.eval_fraction):
            raise RefusedError(
                "seed draws the rows that eval_fraction sets aside: none here", "~seed"
            )
        for key in ("path", "subset"):
            given = getattr(self, key)
            if given is not None and not (self.sources and all(self.sources)):
                raise RefusedError(f"{key} is empty", f"{key}=NAME", f"~{key}")
        if not self.streaming and self._changed("shuffle_buffer"):
            raise RefusedError(
                "shuffle_buffer is about streaming; rows are shuffled whole without it",
                "~shuffle_buffer",
                "streaming=true",
            )
        return self


class EvalConfig(Section):
    """Evaluation besides the loss: answers while training, tasks of lm-eval after it."""

    at_start: bool = Field(
        default=True,
        description="eval loss, and samples, before the first step too, where `train` "
        "evaluates at all and does not say `eval_on_start` itself: a curve begins at its base",
    )
    samples: bool = Field(
        default=True,
        description="greedy answers to `data.prompts` (or to the first eval rows) at each "
        "evaluation and at the end",
    )
    max_new_tokens: PositiveInt = Field(
        default=48, description="longest answer of a sample, in tokens"
    )
    tasks: tuple[str, ...] = Field(
        default=(),
        description="tasks of lm-eval that the trained model is scored on (extra `eval`), such as "
        "`hellaswag`; `builtin:harbour_choice` is packaged and needs no hub",
    )
    tasks_every: PositiveInt | None = Field(
        default=None,
        description="optimizer steps between scores on `tasks` while training; left out: the "
        "trained model alone is scored",
    )
    data: str | None = Field(
        default=None,
        description="folder with the tasks' rows, `<task>/<split>.jsonl` or `.parquet` in the "
        "published columns, for instance `hellaswag/validation.jsonl`; left out: from the hub",
    )
    limit: PositiveInt | None = Field(
        default=None, description="use only the first rows of each task, for a quick look"
    )
    shots: NonNegativeInt | None = Field(
        default=None, description="examples in front of each question; left out: as the task says"
    )
    batch_size: PositiveInt = Field(default=8, description="rows at a time while scoring tasks")
    chat_template: bool = Field(
        default=False, description="put the questions of tasks into the model's chat template"
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """`eval.tasks=hellaswag,arc_easy` is easier to type than a list."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @model_validator(mode="after")
    def _nothing_idle(self) -> EvalConfig:
        of_tasks = ("tasks_every", "data", "limit", "shots", "batch_size", "chat_template")
        for name in () if self.tasks else self._changed(*of_tasks):
            raise RefusedError(
                f"{name} is about tasks, and none is named", "tasks=hellaswag", f"~{name}"
            )
        if not self.samples and self._changed("max_new_tokens"):
            raise RefusedError(
                "max_new_tokens is about samples, and samples=false", "~max_new_tokens", "~samples"
            )
        return self


class CheckpointsConfig(Section):
    """Which checkpoints are kept. When one is saved is `train.save_strategy` and `save_steps`."""

    keep_last: PositiveInt | None = Field(
        default=None,
        description="newest checkpoints to keep; left out: `train.save_total_limit`, else all",
    )
    keep_best: NonNegativeInt = Field(
        default=1,
        description="keep_last: checkpoints of the lowest eval loss to keep besides, among those "
        "whose step was evaluated",
    )
    first_step: bool = Field(
        default=True,
        description="where `train` saves at all, save after the first step too, so that a disk "
        "that is full shows at once; deleted when the next checkpoint is whole",
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> CheckpointsConfig:
        if self.keep_last is None and self._changed("keep_best"):
            raise RefusedError(
                "keep_best is about checkpoints that keep_last would delete, and it is not given",
                "keep_last=2",
                "~keep_best",
            )
        return self


class ResumeConfig(Section):
    """Resuming from a checkpoint (`train.resume_from_checkpoint`, or the verb `resume`)."""

    allow: tuple[str, ...] = Field(
        default=(),
        description="settings that may differ from the checkpoint's although they change "
        "what is trained, such as `train.max_steps`; an error names them",
    )


# ----------------------------------------------------------------------------------------- adapters

LoraInit = Literal["default", "gaussian", "orthogonal"]
OF_SCRIPTS = ("corda", "eva", "lora_ga", "mica", "pissa", "olora", "loftq")
"""Initializations of PEFT that read batches or the base's weights, or train half (MiCA)."""


class LoraSection(Section):
    """Low-rank adapters, handed to `peft.LoraConfig`. Without this section all weights train."""

    r: PositiveInt = Field(default=8, description="rank")
    alpha: PositiveInt = Field(
        default=16, description="scale: adapters are multiplied by alpha / r"
    )
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="dropout on the adapters' input"
    )
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear", description="`all-linear`, or names of the linear layers to adapt"
    )
    exclude_modules: tuple[str, ...] = Field(
        default=(),
        description="patterns of linear layers that get none, as in `precision.keep`; layers on "
        "which adapters cannot work are left out anyway",
    )
    target_parameters: tuple[str, ...] = Field(
        default=(),
        description="ends of names of parameters to adapt that are no linear layers, such as "
        "`experts.gate_up_proj` and `experts.down_proj`",
    )
    layers_to_transform: tuple[NonNegativeInt, ...] = Field(
        default=(), description="numbers of the decoder blocks to adapt; left out: all"
    )
    modules_to_save: tuple[str, ...] = Field(
        default=(), description="modules trained in full beside them"
    )
    init_lora_weights: LoraInit = Field(
        default="default",
        description="how adapters begin: `default`: A uniform, B zero; `gaussian`: A normal; "
        "`orthogonal`: A and B orthogonal (an even rank)",
    )
    use_rslora: bool = Field(default=False, description="scale by alpha / sqrt(r) instead")
    use_dora: bool = Field(default=False, description="weight-decomposed adapters (DoRA)")
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="which biases train"
    )

    @model_validator(mode="before")
    @classmethod
    def _begins_by_chance(cls, values: Any) -> Any:
        given = str(values.get("init_lora_weights", "")) if isinstance(values, dict) else ""
        if given.lower().startswith(OF_SCRIPTS):
            what = f"init_lora_weights={given} belongs to scripts, where peft attaches the adapters"
            what += " (it reads weights or batches), and then the helper takes them"
            raise RefusedError(what, "~init_lora_weights")
        return values

    @field_validator("target_modules")
    @classmethod
    def _is_a_pattern(cls, value: Any) -> Any:
        try:
            re.compile(value if isinstance(value, str) else "")
        except re.error as error:
            what = f"this text is no regular expression ({error}); names are a list, [q_proj]"
            raise ValueError(what) from None
        return value

    @model_validator(mode="after")
    def _even_rank(self) -> LoraSection:
        if self.init_lora_weights == "orthogonal" and self.r % 2:
            what = f"init_lora_weights=orthogonal divides the rank by two, and r is {self.r}"
            raise RefusedError(what, f"r={self.r + 1}", "~init_lora_weights")
        return self
