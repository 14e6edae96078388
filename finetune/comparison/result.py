"""What a comparison found, as `comparison.json` holds it. Knows no torch.

`a` is the run in question (FP8), `b` the reference (BF16); a gap is `a / b - 1`, so a positive gap
of losses says that `a` ended higher. A speed ratio above 1 says that `a` is faster, a memory ratio
below 1 that `a` takes less. Every interval is a pair (low, high) of such gaps or ratios, at
`confidence`; `equivalence_interval` is the narrower one of the two one-sided tests, which has to
lie inside the margin (`finetune/comparison/statistics.py`). With one seed there are no intervals.

`comparison.json` lies beside the run folders it speaks of; `runs` names them relative to it, so
that the folder can be moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from finetune.comparison.words import describe
from finetune.errors import ConfigError

FILE = "comparison.json"
EMULATED = "FP8 was emulated: its speed says nothing of FP8 hardware"
"""The note of a comparison whose FP8 no hardware ran."""
Verdict = Literal["equivalent", "not equivalent", "undecided"]
Interval = tuple[float, float]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Side(_Part):
    """One of the two: the recipe as it was named, and what to call it (`FP8`, `BF16`)."""

    recipe: str
    label: str


class PairOfRuns(_Part):
    """The two run folders of one seed, relative to the folder of the comparison."""

    seed: int
    a: str
    b: str


class Difference(_Part):
    """A fairness condition that the two sides do not share, where, the values, and why it matters.

    `where` is a setting of the recipes, or what of the runs' files.
    """

    condition: str
    where: str = ""
    a: Any
    b: Any
    why: str


class LossGap(_Part):
    """Final losses per seed (nats per token), their gap, and what can be said of it.

    Attributes:
        a, b: one loss a seed, in the order of `seeds`.
        gap: geometric mean of a / b over the seeds, less 1.
        interval: of the gap at `confidence`; None with one seed.
        equivalence_interval: of the gap at 1 - 2 (1 - `confidence`); None with one seed.
    """

    a: list[float]
    b: list[float]
    gap: float
    interval: Interval | None = None
    equivalence_interval: Interval | None = None
    verdict: Verdict


class SpeedRatio(_Part):
    """Tokens per second of `a` over those of `b`, tokens counted without padding."""

    ratio: float
    interval: Interval | None = None
    a_tokens_per_s: float
    b_tokens_per_s: float


class MemoryRatio(_Part):
    """Peak memory of a training step, GiB, the largest of the seeds."""

    ratio: float
    a_gib: float
    b_gib: float


class TaskScore(_Part):
    """One metric of one downstream task, mean over seeds; `*_stderr`: as the task reports it."""

    metric: str
    a: float
    b: float
    a_stderr: float | None = None
    b_stderr: float | None = None


class Comparison(JupyterMixin, _Part):
    """Everything that `compare` found.

    Attributes:
        folder: where it lies; not stored.
        margin: relative gap of losses below which the two count as the same, 0.01 for 1 %.
        confidence: of every `interval`.
        differences: fairness conditions that differ; with `allowed`, they were insisted on.
        notes: what was set on both sides to make them comparable, and what to know of the figures.
        losses: `train` (mean over the last part of the steps) and `eval` (held-out, at the end).
        band: relative spread, (max - min) / mean, of the final losses of `b` over the seeds.
        speed, memory: None where there is none to give, and `notes` says why.
        tasks: task -> its scores, where `eval.tasks` is set.
        verdict: of the whole: the worst of `losses`; `refused` where the pair is not fair.
        reasons: of the verdict, in plain words.
    """

    kind: Literal["comparison"] = "comparison"
    a: Side
    b: Side
    seeds: list[int]
    runs: list[PairOfRuns] = Field(default_factory=list)
    margin: float
    confidence: float
    differences: list[Difference] = Field(default_factory=list)
    allowed: bool = False
    notes: list[str] = Field(default_factory=list)
    losses: dict[str, LossGap] = Field(default_factory=dict)
    band: dict[str, float] = Field(default_factory=dict)
    speed: SpeedRatio | None = None
    memory: MemoryRatio | None = None
    tasks: dict[str, list[TaskScore]] | None = None
    verdict: Literal["equivalent", "not equivalent", "undecided", "refused"]
    reasons: list[str] = Field(default_factory=list)
    folder: Path | None = Field(default=None, exclude=True)

    def __rich__(self) -> RenderableType:
        return describe(self)

    @property
    def emulated(self) -> bool:
        """Whether the speeds are those of an emulation, which no claim can rest on."""
        return EMULATED in self.notes

    def to_json(self) -> str:
        """The comparison as indented JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)

    def save(self, folder: Path) -> Path:
        """Write `comparison.json` so that a reader never sees half a file; returns its path."""
        file = folder / FILE
        partial = file.with_suffix(".partial")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        partial.replace(file)
        self.folder = folder
        return file


def read_comparison(path: Path | str) -> Comparison:
    """The comparison in `path`, a `comparison.json` or the folder that holds one.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    where = str(file.resolve())
    if not file.is_file():
        raise ConfigError(
            f"{str(path)!r} holds no comparison",
            where=where,
            why=f"{FILE} is written when all runs of a comparison have ended",
            fix="compare the recipes: python -m finetune compare tiny_full_fp8",
        )
    try:
        found = Comparison.model_validate_json(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}", where=where) from None
    found.folder = file.parent
    return found
