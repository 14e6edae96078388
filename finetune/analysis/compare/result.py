"""The result of a comparison, as stored in `comparison.json` and shown in a terminal.

`a` is the run in question (FP8), `b` the reference (BF16). A gap is `a / b - 1`: positive if `a`
ends at a higher loss. Ratios are `a / b`: speed above 1 is faster, memory below 1 is less.
Intervals are pairs (low, high) at `confidence`, absent with one seed; `equivalence_interval`, that
of the two one-sided tests, is narrower and has to lie inside the margin (`analysis/statistics.py`).

`runs` names the run folders relative to `comparison.json`, so that the folder can be moved.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from finetune.analysis.compare.margins import TASKS
from finetune.config.measures import LOSSES, MEASURES
from finetune.errors import ConfigError
from finetune.logging import plain_table
from finetune.runs.folder import COMPARISON, RunFolder, images_in, write_whole
from finetune.units import percent, plural, shortened

AGAIN = "compare again: python -m finetune compare RECIPE"
STYLES = {
    "equivalent": "bold green", "not equivalent": "bold red", "undecided": "bold yellow",
    "refused": "bold red",
}  # fmt: skip
SHOWN_CHARACTERS = 200
EMULATED = "FP8 was emulated: its speed is not representative of FP8 hardware"
"""Note of a comparison whose FP8 was emulated."""
Verdict = Literal["equivalent", "not equivalent", "undecided"]
Interval = tuple[float, float]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Side(_Part):
    """One side: the recipe as it was named, and its label (`FP8`, `BF16`)."""

    recipe: str
    label: str


class PairOfRuns(_Part):
    """The two run folders of one seed, relative to the folder of the comparison."""

    seed: int
    a: str
    b: str


class Difference(_Part):
    """A fairness condition in which the sides differ, with both values and the reason it matters.

    `where` is a setting of the recipes, or a key of a file in the run folders.
    """

    condition: str
    where: str = ""
    a: Any
    b: Any
    why: str


class Gap(_Part):
    """A gap between paired values, its intervals and the verdict (`analysis/statistics.py`).

    Attributes:
        interval: interval of the gap at `confidence`.
        equivalence_interval: interval of the gap at 1 - 2 (1 - `confidence`).
        verdict: none for a score without a margin.
    """

    unit: ClassVar[str]

    gap: float = 0.0
    interval: Interval | None = None
    equivalence_interval: Interval | None = None
    verdict: Verdict | None = None

    @property
    def pairs(self) -> list[float]:
        """A value a seed, whose mean is tested."""
        raise NotImplementedError

    @staticmethod
    def as_gap(value: float) -> float:
        """The gap that is shown for a mean of `pairs`."""
        return value

    @classmethod
    def shown(cls, value: float, digits: int | None = 2) -> str:
        """`+0.80 %`, or points of a score; a margin, without digits, has no sign."""
        text = percent(value, digits, sign=digits is not None, space=True)
        return text.replace("%", cls.unit)


class EndGap(Gap):
    """Where a measure ends; the gap is the mean of a - b.

    Attributes:
        a, b: one a seed, in the order of `seeds`.
    """

    unit = "pt"

    a: list[float]
    b: list[float]

    @property
    def pairs(self) -> list[float]:
        return [a - b for a, b in zip(self.a, self.b, strict=True)]

    @property
    def of_seeds(self) -> list[float]:
        """Gap of each seed."""
        return [self.as_gap(pair) for pair in self.pairs]


class LossGap(EndGap):
    """Final losses (nats per token); the gap is the geometric mean of a / b, less 1."""

    unit = "%"

    @property
    def pairs(self) -> list[float]:
        """ln(a / b) of each seed."""
        return [math.log(a / b) for a, b in zip(self.a, self.b, strict=True)]

    @staticmethod
    def as_gap(value: float) -> float:
        return math.expm1(value)


class SpeedRatio(_Part):
    """Tokens per second of `a` over tokens per second of `b`, tokens counted without padding.

    Attributes:
        a_steps_per_s, b_steps_per_s: optimizer steps.
    """

    ratio: float
    interval: Interval | None = None
    a_tokens_per_s: float
    b_tokens_per_s: float
    a_steps_per_s: float
    b_steps_per_s: float


class MemoryRatio(_Part):
    """Peak memory of a training step, GiB, the largest of the seeds."""

    ratio: float
    a_gib: float
    b_gib: float


class EnergyRatio(_Part):
    """Tokens per joule of `a` over `b`'s, geometric means over the seeds."""

    ratio: float
    a_tokens_per_joule: float
    b_tokens_per_joule: float


class TaskScore(Gap):
    """One metric of one downstream task, mean over seeds; `*_stderr` as the task reports it.

    Attributes:
        differences: a - b of each seed, whose mean is the gap; none in older files.
    """

    unit = "pt"

    metric: str
    a: float
    b: float
    a_stderr: float | None = None
    b_stderr: float | None = None
    differences: list[float] = Field(default_factory=list)

    @property
    def pairs(self) -> list[float]:
        return self.differences


class Comparison(JupyterMixin, _Part):
    """Result of `compare`.

    Attributes:
        folder: folder of the comparison; not stored.
        margin: relative gap of losses below which the two count as the same, 0.01 for 1 %.
        margins: others by loss or task (`compare/margins.py`); none in older files.
        differences: fairness conditions that differ; with `allowed`, the user accepted them.
        notes: settings that were made the same on both sides, and remarks on the figures.
        losses: `train` (mean over the last part of the steps) and `eval` (at the end).
        scores: other measures of the method (`config/measures.py`); none in older files.
        band: spread, max - min, of the ends of `b` over the seeds; of losses over their mean.
        speed, memory: ratios; None with the reason in `notes`.
        energy: ratio; None where a run did not measure it, as its receipt says.
        tasks: scores by task, where `eval.tasks` is set.
        verdict: the worst of `losses`; `refused` where the pair is not fair.
    """

    kind: Literal["comparison"] = "comparison"
    a: Side
    b: Side
    seeds: list[int]
    runs: list[PairOfRuns] = Field(default_factory=list)
    margin: float
    margins: dict[str, float] = Field(default_factory=dict)
    confidence: float
    differences: list[Difference] = Field(default_factory=list)
    allowed: bool = False
    notes: list[str] = Field(default_factory=list)
    losses: dict[str, LossGap] = Field(default_factory=dict)
    scores: dict[str, EndGap] = Field(default_factory=dict)
    band: dict[str, float] = Field(default_factory=dict)
    speed: SpeedRatio | None = None
    memory: MemoryRatio | None = None
    energy: EnergyRatio | None = None
    tasks: dict[str, list[TaskScore]] | None = None
    verdict: Literal["equivalent", "not equivalent", "undecided", "refused"]
    reasons: list[str] = Field(default_factory=list)
    folder: Path | None = Field(default=None, exclude=True)

    @property
    def emulated(self) -> bool:
        """True if FP8 was emulated: no claim can rest on such speeds."""
        return EMULATED in self.notes

    def margin_of(self, name: str) -> float | None:
        """Margin of a measure, or of a task; None for a task that is not judged."""
        if (measure := MEASURES.get(name)) is None:
            return self.margins.get(name, self.margins.get(TASKS))
        return self.margins.get(name, self.margin if measure.unit == "%" else measure.margin)

    @property
    def gaps(self) -> dict[str, EndGap]:
        """Gaps of all measures, by name."""
        return self.losses | self.scores

    @property
    def within(self) -> str:
        """`1 %`, or `2 % (train), 3 % (eval), 1 pt (tasks)`."""
        if not self.margins and not self.scores:
            return LossGap.shown(self.margin, None)
        margins = {n: self.margin_of(n) or 0.0 for n in self.gaps or LOSSES} | self.margins
        kinds = ((LossGap if name in LOSSES else EndGap, name, x) for name, x in margins.items())
        return ", ".join(f"{kind.shown(x, None)} ({name})" for kind, name, x in kinds)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)

    def save(self, folder: Path) -> Path:
        """Write `comparison.json` atomically; returns its path."""
        file = folder / COMPARISON
        write_whole(file, self.to_json() + "\n")
        self.folder = folder
        return file

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        a, b, n = self.a.label, self.b.label, len(self.seeds)
        margin, seeds = self.within, plural(n, "seed")
        lines = {
            "equivalent": f"{a} ends where {b} ends, within {margin}, over {seeds}",
            "not equivalent": f"{a} does not end where {b} ends, within {margin}, over {seeds}",
            "undecided": f"{seeds} {'does' if n == 1 else 'do'} not show whether {a} ends where "
            f"{b} ends, within {margin}",
            "refused": f"{a} and {b} cannot be compared",
        }
        return lines[self.verdict]

    def __rich__(self) -> RenderableType:
        parts = [self._differences()]
        if self.gaps:
            parts += [[self._loss_table()], self._ratios()]
        notes = [Text(f"  {note}", style="dim") for note in self.notes]
        parts += [self._task_table(), self._samples(), notes]
        lines: list[RenderableType] = [
            Text(f"{self.verdict}: {self.sentence}", style=STYLES[self.verdict])
        ]
        lines += [Text(f"  {reason}") for reason in self.reasons]
        for part in parts:
            lines += [Text(""), *part] if part else []
        return Group(*lines)

    def _differences(self) -> list[RenderableType]:
        if not self.differences:
            return []
        title = "not the same on both sides" + (", allowed" if self.allowed else "")
        lines: list[RenderableType] = [Text(f"! {title}:", style="bold red")]
        for d in self.differences:
            a, b = (shortened(as_text(value), SHOWN_CHARACTERS) for value in (d.a, d.b))
            lines.append(Text(f"  {d.condition} ({d.where}): {a} and {b}"))
            lines.append(Text(f"    {d.why}", style="dim"))
        return lines

    def _loss_table(self) -> Table:
        """Losses and other measures per seed, and their means; column `seeds` is `band`."""
        level = percent(self.confidence, 0, space=True)
        right = (self.a.label, self.b.label, "gap", f"{level} interval", "seeds")
        title = "at the end" if self.scores else "final loss"
        table = plain_table(title, *right, "verdict", right=right, gap=1)
        for name, gap in self.gaps.items():
            for seed, a, b, own in zip(self.seeds, gap.a, gap.b, gap.of_seeds, strict=False):
                cells = (f"  seed {seed}", f"{a:.4f}", f"{b:.4f}", gap.shown(own))
                table.add_row(*cells, style="dim")
            low_high, band = gap.interval, self.band.get(name)
            table.add_row(
                MEASURES[name].name,
                *(f"{fmean(side):.4f}" for side in (gap.a, gap.b)),
                gap.shown(gap.gap),
                f"{low_high[0] * 100:+z.2f} to {gap.shown(low_high[1])}" if low_high else "-",
                "-" if band is None else f"{band * 100:.1f} {gap.unit}",
                _verdict(gap),
            )
        return table

    def _ratios(self) -> list[RenderableType]:
        (a, b), lines = (self.a.label, self.b.label), []
        if (s := self.speed) is not None:
            between = f" ({s.interval[0]:.3f} to {s.interval[1]:.3f})" if s.interval else ""
            lines.append(
                f"speed: {a} runs at {s.ratio:.3f}x the speed of {b}{between}; "
                f"{s.a_tokens_per_s:,.0f} and {s.b_tokens_per_s:,.0f} tok/s, "
                f"{s.a_steps_per_s:.3g} and {s.b_steps_per_s:.3g} steps/s"
                + (", emulated" if self.emulated else "")
            )
        if (m := self.memory) is not None:
            peaks = f"{m.a_gib:.3f} and {m.b_gib:.3f} GiB"
            lines.append(f"peak memory: {a} takes {m.ratio:.3f}x as much as {b}; {peaks}")
        if (e := self.energy) is not None:
            each = f"{e.a_tokens_per_joule:.3g} and {e.b_tokens_per_joule:.3g} tokens per joule"
            lines.append(f"energy: {a} trains {e.ratio:.3f}x the tokens of {b} per joule; {each}")
        return [Text(line) for line in lines]

    def _task_table(self) -> list[RenderableType]:
        right = (self.a.label, self.b.label, "difference")
        table = plain_table("task", *right, "verdict", right=right)
        for task, scores in (self.tasks or {}).items():
            for s in scores:
                a, b = (
                    f"{score:.4f}" + (f" ± {error:.4f}" if error is not None else "")
                    for score, error in ((s.a, s.a_stderr), (s.b, s.b_stderr))
                )
                table.add_row(f"{task} {s.metric}", a, b, f"{s.a - s.b:+z.4f}", _verdict(s))
        return [table] if self.tasks else []

    def _samples(self) -> list[RenderableType]:
        if not self.runs or self.folder is None or self.verdict == "refused":
            return []
        first = self.runs[0]
        a, b = (_answers(RunFolder(self.folder / run)) for run in (first.a, first.b))
        width = max(len(self.a.label), len(self.b.label))
        lines: list[RenderableType] = [Text(f"samples, seed {first.seed}", style="bold")]
        for asked in (one for one in a if one in b):
            lines.append(Text("> ", style="dim") + Text(" ".join(asked), style="italic"))
            for label, answer in ((self.a.label, a[asked]), (self.b.label, b[asked])):
                lines.append(Text(f"  {label:{width}s}  ", style="dim") + Text(answer))
        return lines if len(lines) > 1 else []


def read_comparison(path: Path | str) -> Comparison:
    """Read a comparison from `path`: a `comparison.json`, or its folder.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    file = Path(path)
    if file.is_dir():
        file = file / COMPARISON
    where = str(file.absolute())
    if not file.is_file():
        raise ConfigError(
            f"{str(path)!r} holds no comparison",
            where=where,
            why=f"{COMPARISON} is written when all runs of a comparison have ended",
            fix=AGAIN,
        )
    try:
        found = Comparison.model_validate_json(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"{file.name} cannot be read: {said}", where=where, fix=AGAIN) from None
    found.folder = file.parent
    return found


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _verdict(gap: Gap) -> Text:
    return Text(gap.verdict or "-", style=STYLES.get(gap.verdict or "", ""))


def _answers(run: RunFolder) -> dict[tuple[str, ...], str]:
    """Answers by prompt and the copies of its images: one question may be asked of several."""
    _, samples = run.samples[-1] if run.samples else (0, [])
    return {(s["prompt"], *images_in(s)): s["answer"][:SHOWN_CHARACTERS] for s in samples}
