"""The verdict on finished pairs of runs, and the figures it rests on.

The final training loss is the mean over the last tenth of the steps, at least ten: the loss of one
step is that of eight rows or so. It contains the rounding of the FP8 forward, a constant few
thousandths of a nat, which dominates where a run has memorized its rows. The final eval loss is the
last evaluation, in high precision unless `precision.eval` differs: it judges the learned weights.
The verdict is the worse of the two. A loss of A alone that is not finite is `not equivalent`,
without figures.

Everything is read from the run folders (`metrics.jsonl`, `steps.jsonl`, `receipt.json`), so that a
comparison can be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from finetune.analysis import statistics
from finetune.analysis.compare.fairness import executed_differences
from finetune.analysis.compare.result import (
    EMULATED,
    NAMES,
    Comparison,
    Difference,
    LossGap,
    MemoryRatio,
    SpeedRatio,
    TaskScore,
    Verdict,
    signed,
)
from finetune.analysis.statistics import SECTIONS, Step, step_ratios, warm_up_steps
from finetune.errors import ConfigError, RunFailedError
from finetune.runs.folder import Run
from finetune.units import percent

LAST_SHARE, LAST_LEAST = 0.1, 10
WORSE: tuple[Verdict, ...] = ("not equivalent", "undecided", "equivalent")
RECEIPT = ("status", "precision", "trainable", "environment", "memory", "conditions")
"""Keys of a receipt that this module and `finetune.analysis.compare.fairness` read."""


@dataclass(frozen=True)
class Outcome:
    """Figures of one finished run.

    Attributes:
        train: mean training loss of the last `train_steps` steps, nats per token.
        eval: last eval loss; None without evaluation rows.
        tasks: metrics and their scores by task.
    """

    run: Run
    train: float
    train_steps: int
    eval: float | None
    steps: list[Step]
    tasks: dict[str, dict[str, Any]]

    @property
    def receipt(self) -> dict[str, Any]:
        return self.run.receipt


def read_outcome(folder: Path) -> Outcome:
    """Read the figures of a finished run.

    Raises:
        ConfigError: a file of the run is missing or cannot be read.
        RunFailedError: the run logged no loss.
    """
    run = Run(folder)
    if unread := [name for name, rows in _files(run) if not rows]:
        raise ConfigError(
            "a run of the comparison cannot be read",
            where=str(folder),
            why=f"{' and '.join(unread)} is missing, or holds nothing whole",
            fix="compare again",
        )
    if missing := [key for key in RECEIPT if key not in run.receipt]:
        raise ConfigError(
            f"the receipt of a run has no {', '.join(missing)}",
            where=str(folder / "receipt.json"),
            why="another version wrote it, or training ended before it began",
            fix="compare again",
        )
    losses = [row["loss"] for row in run.rows if "loss" in row]
    if not losses:
        raise RunFailedError("a run logged no loss", where=str(folder / "metrics.jsonl"))
    last = min(len(losses), max(LAST_LEAST, round(len(losses) * LAST_SHARE)))
    held_out = [row["eval_loss"] for row in run.rows if "eval_loss" in row]
    tasks = [row["tasks"] for row in run.rows if "tasks" in row]
    return Outcome(
        run=run,
        train=math.fsum(losses[-last:]) / last,
        train_steps=last,
        eval=held_out[-1] if held_out else None,
        steps=[Step(row["step"], row["seconds"], row["tokens"]) for row in run.steps],
        tasks=tasks[-1] if tasks else {},
    )


def _files(run: Run) -> list[tuple[str, object]]:
    files = {"receipt.json": run.receipt, "metrics.jsonl": run.rows, "steps.jsonl": run.steps}
    return list(files.items())


Pairs = Sequence[tuple[Outcome, Outcome]]


def judge(found: Comparison, pairs: Pairs) -> Comparison:
    """Add differences, figures, verdict and reasons; `pairs` are the runs of a and b by seed."""
    differences = [*found.differences, *_executed(pairs, found.differences)]
    unproven = [
        f"{o.run.name}: {o.receipt['status']}"
        for pair in pairs
        for o in pair
        if o.receipt["status"] != "proven"
    ]
    found = found.model_copy(update={"differences": differences, "notes": list(found.notes)})
    refused = [f"a run is not proven ({line})" for line in unproven]
    if not found.allowed:
        refused += [f"{d.condition}: {d.why}" for d in differences]
    held_out = [outcome.eval is not None for pair in pairs for outcome in pair]
    if any(held_out) and not all(held_out):
        refused.append(f"{held_out.count(False)} of {len(held_out)} runs logged no held-out loss")
    broken_a, broken_b = _broken(found, pairs)
    refused += broken_b
    if refused:
        return found.model_copy(update={"verdict": "refused", "reasons": refused})
    if broken_a:
        return found.model_copy(update={"verdict": "not equivalent", "reasons": broken_a})
    losses = {"train": _gap(found, [(a.train, b.train) for a, b in pairs])}
    if all(held_out):
        losses["eval"] = _gap(found, [(a.eval, b.eval) for a, b in pairs])
    else:
        found.notes.append("no rows are held out: the verdict is about the training loss alone")
    last = pairs[0][0].train_steps
    found.notes.append(f"the training loss is the mean of the last {last} steps")
    found.losses = losses
    found.band = {k: statistics.band(g.b) for k, g in losses.items() if len(g.b) > 1}
    found.speed = _speed(found, pairs)
    found.memory = _memory(found, pairs)
    found.tasks = _tasks(pairs)
    verdicts: list[Verdict] = [gap.verdict for gap in losses.values()]
    found.verdict = next(v for v in WORSE if v in verdicts)
    found.reasons = [_reason(found, name, gap) for name, gap in losses.items()]
    return found


def _broken(found: Comparison, pairs: Pairs) -> tuple[list[str], list[str]]:
    """List the final losses of a, and of b, that have no ratio: NaN, infinite, or zero."""
    broken: tuple[list[str], list[str]] = ([], [])
    labels = (found.a.label, found.b.label)
    for seed, pair in zip(found.seeds, pairs, strict=True):
        for lines, label, outcome in zip(broken, labels, pair, strict=True):
            for name, loss in (("train", outcome.train), ("eval", outcome.eval)):
                if loss is not None and not (math.isfinite(loss) and loss > 0):
                    lines.append(f"{NAMES[name]}: {label}, seed {seed}, ends at {loss:g}")
    return broken


def _executed(pairs: Pairs, known: Sequence[Difference]) -> list[Difference]:
    """Differences that the runs show and the recipes do not, each condition once."""
    seen = {d.condition for d in known}
    found: list[Difference] = []
    for a, b in pairs:
        new = executed_differences(a.receipt, b.receipt, a.steps, b.steps)
        found += [difference for difference in new if difference.condition not in seen]
        seen |= {d.condition for d in found}
    return found


def _gap(found: Comparison, pairs: Sequence[tuple[float | None, float | None]]) -> LossGap:
    a, b = [float(x or 0) for x, _ in pairs], [float(y or 0) for _, y in pairs]
    return statistics.loss_gap(a, b, margin=found.margin, confidence=found.confidence)


def _reason(found: Comparison, name: str, gap: LossGap) -> str:
    what, margin = NAMES[name], percent(found.margin, None, space=True)
    if gap.equivalence_interval is None:
        return (
            f"{what}: {signed(gap.gap)} with one seed, which has no spread to judge by; two seeds "
            "give an interval, three or more a useful one"
        )
    low, high = gap.equivalence_interval
    at = f"{signed(low)} to {signed(high)} (two one-sided tests at {1 - found.confidence:.2g})"
    if gap.verdict == "equivalent":
        return f"{what}: the gap of {signed(gap.gap)}, {at}, lies within {margin}"
    if gap.verdict == "not equivalent":
        way = "higher" if gap.gap > 0 else "lower"
        return f"{what}: {found.a.label} ends {way} by more than {margin}: {signed(gap.gap)}, {at}"
    more = statistics.seeds_to_settle(gap, found.margin, found.confidence)
    seeds = (
        f"about {more} seeds would settle it"
        if more
        else f"more than {statistics.MOST_SEEDS} seeds would be needed: the gap is about the margin"
    )
    return f"{what}: the gap of {signed(gap.gap)}, {at}, straddles {margin}; {seeds}"


# -------------------------------------------------------------------------------- speed and memory


def _speed(found: Comparison, pairs: Pairs) -> SpeedRatio | None:
    warm_up = warm_up_steps(len(pairs[0][0].steps))
    ratios = [step_ratios(a.steps, b.steps, warm_up) for a, b in pairs]
    if min(len(steps) for steps in ratios) < SECTIONS:
        found.notes.append(
            f"no speed: after {warm_up} steps of warm-up fewer than {SECTIONS} are left"
        )
        return None
    ratio = statistics.speed_ratio(ratios, found.confidence)
    unit = "pairs of runs" if len(pairs) > 1 else "sections of one pair's steps"
    found.notes.append(
        f"speed: medians over steps, the first {warm_up} left out (witness, proof, compiling); "
        f"interval over {unit}"
    )
    engines = {pairs[0][i].receipt["precision"]["reason"] for i in (0, 1)}
    if any("emulation" in reason for reason in engines):
        found.notes.append(EMULATED)
    return SpeedRatio(
        ratio=ratio.value,
        interval=ratio.interval,
        a_tokens_per_s=_tokens_per_s([a for a, _ in pairs], warm_up),
        b_tokens_per_s=_tokens_per_s([b for _, b in pairs], warm_up),
    )


def _tokens_per_s(runs: Sequence[Outcome], warm_up: int) -> float:
    """Geometric mean over runs of the median over steps."""
    medians = [
        median(s.tokens / s.seconds for s in run.steps[warm_up:] if min(s.tokens, s.seconds) > 0)
        for run in runs
    ]
    return round(math.exp(math.fsum(map(math.log, medians)) / len(medians)), 1)


def _memory(found: Comparison, pairs: Pairs) -> MemoryRatio | None:
    sides = [[pair[i].receipt["memory"] for pair in pairs] for i in (0, 1)]
    peaks = [[memory.get("measured_gib") for memory in side] for side in sides]
    if not all(all(side) for side in peaks):
        why = next(
            str(memory.get("measured"))
            for side in sides
            for memory in side
            if not memory.get("measured_gib")
        )
        found.notes.append(f"no ratio of peak memory: {why}")
        return None
    a, b = max(peaks[0]), max(peaks[1])
    return MemoryRatio(ratio=a / b, a_gib=a, b_gib=b)


def _tasks(pairs: Pairs) -> dict[str, list[TaskScore]] | None:
    runs = [[pair[i].tasks for pair in pairs] for i in (0, 1)]
    common = [t for t in runs[0][0] if all(t in tasks for side in runs for tasks in side)]
    found = {}
    for task in common:
        scores = [[tasks[task] for tasks in side] for side in runs]
        metrics = [
            m
            for m, value in scores[0][0].items()
            if isinstance(value, int | float) and not m.endswith("_stderr")
        ]
        found[task] = [
            TaskScore(
                metric=m,
                a=_mean(scores[0], m),
                b=_mean(scores[1], m),
                a_stderr=_mean(scores[0], f"{m}_stderr", absent=None),
                b_stderr=_mean(scores[1], f"{m}_stderr", absent=None),
            )
            for m in metrics
        ]
    return found or None


def _mean(scores: Sequence[dict[str, Any]], metric: str, absent: Any = 0.0) -> Any:
    values = [score.get(metric) for score in scores]
    if not all(isinstance(value, int | float) for value in values):
        return absent
    return math.fsum(values) / len(values)  # pyright: ignore[reportArgumentType]
