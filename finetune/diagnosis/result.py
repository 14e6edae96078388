"""`Diagnosis`: what a diagnosed step says. Prints well, saves as JSON, shows in a notebook."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from finetune.diagnosis.cause import Cause
from finetune.diagnosis.facts import Facts
from finetune.diagnosis.groups import GEMMS, Group
from finetune.diagnosis.parts import PARTS, Part
from finetune.diagnosis.prediction import Prediction
from finetune.diagnosis.words import describe
from finetune.receipt import Receipt


@dataclass(frozen=True)
class Diagnosis(JupyterMixin):
    """What really ran in which precision, where the time went, and why.

    Attributes:
        name: of the recipe.
        receipt: of the run whose steps were looked at.
        facts: what was seen; layer groups and times are here.
        causes: why FP8 is or is not faster, the largest share first.
        verdict: the answer in a sentence or two.
        data: what the rows were.
        tokens: of one optimizer step on one device, padding left out.
        padding: share of a micro-batch that is padding, 0 to 1.
        step_seconds: of one optimizer step without a profile.
        steps: that were timed, and as many profiled.
        prediction: of the estimator, None where there is none.
        notes: what else to know.
    """

    name: str
    receipt: Receipt
    facts: Facts
    causes: tuple[Cause, ...]
    verdict: str
    data: str
    tokens: int
    padding: float
    step_seconds: float
    steps: int
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """Layers of one kind that ran alike; every linear layer is in exactly one."""
        return self.facts.groups

    @property
    def shares(self) -> dict[Part, float]:
        """Part -> its share of the step's time; they add up to one."""
        return {part: self.facts.share(self.facts.parts[part]) for part in PARTS}

    def to_json(self) -> str:
        """Everything, in seconds and shares from 0 to 1."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        facts, environment = self.facts, self.receipt.environment
        expected = self.prediction
        parts = [
            {
                "part": part,
                "seconds": facts.parts[part],
                "share": share,
                "predicted_share": expected.parts.get(part, 0.0) / expected.seconds
                if expected
                else None,
            }
            for part, share in self.shares.items()
        ]
        return {
            "kind": "diagnosis",
            "recipe": self.name,
            "headline": self.receipt.headline,
            "status": self.receipt.status,
            "precision": self.receipt.precision,
            "device": environment["device"],
            "versions": environment["versions"],
            "data": self.data,
            "steps": self.steps,
            "tokens_per_step": self.tokens,
            "padding": self.padding,
            "micro_batches": facts.micro_batches,
            "step_seconds": self.step_seconds,
            "profiled_step_seconds": facts.seconds,
            "tokens_per_s": self.tokens / self.step_seconds,
            "flop_share": self.receipt.flop_share,
            "groups": [_plain(group) for group in self.groups],
            "time": {
                "parts": parts,
                "recompute_share": facts.share(facts.recompute_seconds),
                "adapter_share": facts.share(facts.adapter_seconds),
            },
            "speed": {"now": facts.speed_now, "best": facts.speed_best},
            "verdict": self.verdict,
            "causes": [asdict(cause) for cause in self.causes],
            "prediction": asdict(expected) if expected else None,
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> Path:
        """Write `diagnosis.json` into a folder; the file."""
        file = folder / "diagnosis.json"
        partial = file.with_suffix(".part")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        partial.replace(file)
        return file

    def __rich__(self) -> RenderableType:
        return describe(self)


def _plain(group: Group) -> dict[str, Any]:
    """A group as plain data: kernels with their names, precisions under one key."""
    values = asdict(group)
    values["precision"] = {gemm: values.pop(gemm) for gemm in GEMMS}
    values["count"] = len(group.layers)
    values["kernels"] = [{"name": name, "seconds": seconds} for name, seconds in group.kernels]
    return values
