"""Settings of rows: which to train on, and how the model is evaluated on others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from finetune.config.refusal import RefusedError
from finetune.config.section import Section


class DataConfig(Section):
    """Rows to train on. Exactly one of `path` and `name`."""

    path: str | None = Field(default=None, description="JSONL, JSON, CSV or Parquet file")
    name: str | None = Field(default=None, description="hub data set, or `builtin:harbour`")
    subset: str | None = Field(default=None, description="hub configuration name")
    split: str = Field(default="train", description="split to train on")
    eval_path: str | None = Field(default=None, description="file of eval rows")
    eval_split: str | None = Field(default=None, description="hub split of eval rows")
    eval_fraction: float = Field(
        default=0.05,
        ge=0.0,
        lt=1.0,
        description="share of the rows split off for evaluation when none are named",
    )
    seed: NonNegativeInt | None = Field(
        default=None,
        description="draws which rows `eval_fraction` holds out; left out: `train.seed`. Runs of "
        "several seeds that share it share their eval rows",
    )
    max_rows: PositiveInt | None = Field(default=None, description="use only the first rows")
    columns: dict[str, str] = Field(
        default={},
        description="names of columns, as a format has them -> as the rows have them, for instance "
        "`{prompt: ask, completion: reply}`",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="a row that cannot be trained on ends the run, or is skipped and counted",
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="questions that the model answers at each evaluation and at the end"
    )

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.name is None):
            given = "both are given" if self.path else "neither is given"
            ways = ("~path", "~name") if self.path else ("path=mine.jsonl", "name=builtin:harbour")
            what = f"exactly one of data.path and data.name is needed, and {given}"
            raise RefusedError(what, *ways)
        if self.seed is not None and (self.eval_path or self.eval_split or not self.eval_fraction):
            raise RefusedError(
                "seed draws the rows that eval_fraction sets aside: none here", "~seed"
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
        of_tasks = ("data", "limit", "shots", "batch_size", "chat_template")
        for name in () if self.tasks else self._changed(*of_tasks):
            raise RefusedError(
                f"{name} is about tasks, and none is named", "tasks=hellaswag", f"~{name}"
            )
        if not self.samples and self._changed("max_new_tokens"):
            raise RefusedError(
                "max_new_tokens is about samples, and samples=false", "~max_new_tokens", "~samples"
            )
        return self
