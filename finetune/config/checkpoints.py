"""Settings of checkpoints: which are kept, and what may differ when training goes on from one."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from finetune.config.section import RefusedError, Section


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
                *("keep_last=2", "~keep_best"),
            )
        return self


class ResumeConfig(Section):
    """Going on from a checkpoint (`train.resume_from_checkpoint`, or the verb `resume`)."""

    allow: tuple[str, ...] = Field(
        default=(),
        description="settings that may differ from those of the checkpoint although they change "
        "what is trained, such as `train.max_steps`; an error names them",
    )
