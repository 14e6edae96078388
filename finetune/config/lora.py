"""The section `lora` of a run's configuration."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from finetune.config.section import RefusedError, Section

_BY_SVD = Literal["pissa", "pissa_niter_4", "pissa_niter_16", "loftq"]
LoraInit = Literal["default", "gaussian", "orthogonal", "olora", _BY_SVD]
FROM_DATA = ("corda", "eva", "lora_ga", "mica")
"""Initializations of PEFT that read batches of data; MiCA's adapters are trained by half."""


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
        "`orthogonal`: A and B orthogonal (an even rank); `pissa`, `olora`: as the base's largest "
        "singular directions or the first of QR, which the base then lacks (`pissa_niter_16`: "
        "faster); `loftq`: as the rounding error of a stored base; files have rank 2r",
    )
    use_rslora: bool = Field(default=False, description="scale by alpha / sqrt(r) instead")
    use_dora: bool = Field(default=False, description="weight-decomposed adapters (DoRA)")
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="which biases train"
    )

    @model_validator(mode="before")
    @classmethod
    def _begins_without_data(cls, values: Any) -> Any:
        given = str(values.get("init_lora_weights", "")) if isinstance(values, dict) else ""
        if given.lower().startswith(FROM_DATA):
            what = f"init_lora_weights={given} belongs to scripts, where peft attaches the adapters"
            what += " (it needs batches, or trains half of each), and then the helper takes them"
            raise RefusedError(what, "init_lora_weights=pissa", "~init_lora_weights")
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
