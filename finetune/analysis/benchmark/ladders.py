"""Two ladders: from what libraries do by themselves to what this toolkit does, a step at a time.

Each step is the recipe that was asked for, its model, adapters, optimizer and batch, trained in
another way. `stock` is TRL and PEFT in BF16, `shipped` is accelerate's own FP8; the others are
precisions of this toolkit. Layers run eagerly unless a step's name says `compiled`: each under
`torch.compile`, which fuses casts. Liger's kernels take part in this toolkit's steps wherever they
can, and the row says where they could not.

LoRA: what a frozen base costs, from accelerate's conversion, which multiplies three times and
converts adapters of some ranks, to a base held in FP8 alone with FP8 forward and input gradient
(scales folded into it). Full: what each fusion and each scaling of FP8 brings over stock BF16.

Steps that cannot be taken here, or at all, are rows that say why: nothing is filled in.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.analysis.benchmark.grid import How
from finetune.config.schema import RunConfig
from finetune.errors import ConfigError, nearest

Ladder = Literal["lora", "full"]
FP8 = {"compute": "fp8", "backend": "torchao", "emulation": "allow", "compile": "off"}
ROWS = FP8 | {"frozen": "fp8", "scaling": "rowwise"}
BF16 = {"compute": "bf16", "compile": "off"}
ON = {"compile": "on"}


@dataclass(frozen=True)
class Step:
    """A way to train a recipe.

    Attributes:
        name: of its row.
        precision: the `precision` section; of `stock` and `shipped`, what is nearest.
        how: whose training it is.
        liger: as in `Job`.
        train: changes of the `train` section.
    """

    name: str
    precision: dict[str, Any] = field(default_factory=lambda: dict(BF16))
    how: How = "finetune"
    liger: Literal["", "wanted", "needed"] = "wanted"
    train: dict[str, Any] = field(default_factory=dict)

    def of(self, config: RunConfig) -> RunConfig:
        """The recipe trained so."""
        model = config.model.model_copy(update={"storage": None})
        train = config.train | self.train
        train.pop("use_liger_kernel", None)
        data = config.model_dump() | {"precision": self.precision, "train": train}
        return RunConfig.model_validate(data | {"model": model.model_dump()})


LORA = (
    Step("stock", BF16 | {"fused_adapters": False}, how="stock", liger=""),
    Step("fused"),
    Step("shipped", how="shipped", liger=""),
    Step(
        "flags kept",
        FP8 | {"frozen": "bf16", "scaling": "tensorwise", "fused_adapters": False},
        liger="",
    ),
    Step("fused, compiled", BF16 | ON),
    Step("FP8 weight", ROWS | {"high_gemms": ("dgrad",)}),
    Step("FP8 weight, compiled", ROWS | {"high_gemms": ("dgrad",)} | ON),
    Step("FP8 dgrad", ROWS),
    Step("FP8 dgrad, compiled", ROWS | ON),
    Step("FP8 dgrad per tensor, compiled", FP8 | {"frozen": "fp8", "scaling": "tensorwise"} | ON),
    Step("FP8 dgrad, x kept in BF16, compiled", ROWS | {"saved_input": "high"} | ON),
    Step("FP8 dgrad and head, compiled", ROWS | ON | {"map": {"output": "fp8"}}),
)
_PLAIN, _FUSED = {"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}
TENSORWISE = FP8 | {"scaling": "tensorwise"}
FULL = (
    Step("stock", how="stock", liger="", train=_PLAIN),
    Step("fused optimizer", how="stock", liger="", train=_FUSED),
    Step("fused kernels", how="stock", liger="needed", train=_FUSED),
    Step("BF16, compiled", BF16 | ON, train=_FUSED),
    Step("FP8 tensorwise", TENSORWISE, train=_FUSED),
    Step("FP8 tensorwise, compiled", TENSORWISE | ON, train=_FUSED),
    Step("FP8 rowwise, compiled", FP8 | {"scaling": "rowwise"} | ON, train=_FUSED),
    Step("FP8 delayed, Transformer Engine", FP8 | {"backend": "te", "scaling": "delayed"},
         train=_FUSED),
    Step("FP8 weights held, emulated", TENSORWISE | {"backend": "emulated", "fp8_params": True},
         train=_FUSED),
    Step("shipped", how="shipped", liger="", train=_FUSED),
)  # fmt: skip
STEPS: dict[Ladder, tuple[Step, ...]] = {"lora": LORA, "full": FULL}
REFERENCES: dict[Ladder, tuple[str, ...]] = {
    "lora": ("stock", "fused"),
    "full": ("stock", "fused kernels"),
}
"""What the other rows are compared with, of the same benchmark."""


def steps_of(
    ladder: str, config: RunConfig, only: Sequence[str] = ()
) -> tuple[list[Step], tuple[str, ...]]:
    """The steps to take, and the names of those that others are compared with, which come first.

    Args:
        ladder: `lora` or `full`.
        config: of the recipe that is trained.
        only: names, or parts of several; left out, all steps.

    Raises:
        ConfigError: no such ladder or step, or a recipe of the other method.
    """
    if ladder not in ("lora", "full"):
        hint = nearest(ladder, STEPS)
        raise ConfigError(
            f"there is no ladder {ladder!r}" + (f"; {hint}" if hint else ""),
            where=f"--ladder {ladder}",
            fix="--ladder lora or --ladder full",
        )
    if config.method != ladder:
        raise ConfigError(
            f"the {ladder} ladder was asked of a {config.method} recipe",
            where=f"--ladder {ladder}",
            fix="--ladder lora, or ~lora to train all weights"
            if config.lora
            else "--ladder full, or lora.r=16 for adapters",
        )
    steps, references = STEPS[ladder], REFERENCES[ladder]
    names = [step.name for step in steps]
    for part in only:
        if not any(part in name for name in names):
            close = difflib.get_close_matches(part, names, n=1, cutoff=0.3)
            raise ConfigError(
                f"no step of the ladder has {part!r} in its name"
                + (f"; did you mean {close[0]!r}?" if close else ""),
                where="--only",
                fix=f"steps are: {'; '.join(names)}",
            )
    asked = [step for step in steps if not only or _is_named(step.name, only, names)]
    first = [s for s in steps if s.name in references]
    return [*first, *(s for s in asked if s not in first)], references


def _is_named(name: str, only: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of `only` is the name, or part of it and no other step's whole name."""
    return any(part == name or (part in name and part not in names) for part in only)
