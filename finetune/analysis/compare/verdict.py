"""The verdict on finished pairs of runs, and the figures it rests on.

The verdict is the worse of those on the final training loss and on the final eval loss. A loss of A
alone that is not finite is `not equivalent`, without figures. Everything is read from the run
folders (`experiment.outcome`), so that a comparison can be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean, median

from finetune.analysis import statistics
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
from finetune.analysis.experiment.fairness import executed_differences
from finetune.analysis.experiment.outcome import Outcome
from finetune.analysis.statistics import SECTIONS, step_ratios, warm_up_steps
from finetune.runs.receipt import metrics_of
from finetune.units import percent

WORSE: tuple[Verdict, ...] = ("not equivalent", "undecided", "equivalent")
Pairs = Sequence[tuple[Outcome, Outcome]]
"""Runs of a and of b by seed."""


def judge(found: Comparison, pairs: Pairs) -> Comparison:
    """Add differences, figures, verdict and reasons."""
    a, b = zip(*pairs, strict=True)
    differences = [*found.differences, *_executed(pairs, found.differences)]
    refused = [
        f"a run is not proven ({o.run.name}: {o.receipt['status']})"
        for pair in pairs
        for o in pair
        if o.receipt["status"] != "proven"
    ]
    if not found.allowed:
        refused += [f"{d.condition}: {d.why}" for d in differences]
    ends = {name: [[getattr(o, name) for o in side] for side in (a, b)] for name in NAMES}
    if unheld := sum(loss is None for side in ends["eval"] for loss in side):
        del ends["eval"]
        if unheld < 2 * len(pairs):
            refused.append(f"{unheld} of {2 * len(pairs)} runs logged no eval loss")
    broken_a, broken_b = (  # have no ratio
        [
            f"{NAMES[name]}: {label}, seed {seed}, ends at {loss:g}"
            for name, sides in ends.items()
            for seed, loss in zip(found.seeds, sides[i], strict=True)
            if not (math.isfinite(loss) and loss > 0)
        ]
        for i, label in enumerate((found.a.label, found.b.label))
    )
    refused += broken_b
    found = found.model_copy(update={"differences": differences, "notes": list(found.notes)})
    if refused or broken_a:
        found.verdict = "refused" if refused else "not equivalent"
        found.reasons = refused or broken_a
        return found
    if "eval" not in ends:
        found.notes.append("there are no eval rows: the verdict is about the training loss alone")
    found.notes.append(f"the training loss is the mean of the last {len(a[0].losses)} steps")
    kept = {"margin": found.margin, "confidence": found.confidence}
    found.losses = {name: statistics.loss_gap(*sides, **kept) for name, sides in ends.items()}
    found.band = {k: statistics.band(g.b) for k, g in found.losses.items() if len(g.b) > 1}
    found.speed, found.memory = _speed(found, pairs), _memory(found, a, b)
    found.tasks = _tasks(found, (a, b)) or None
    verdicts: list[Verdict] = [gap.verdict for gap in found.losses.values()]
    found.verdict = next(v for v in WORSE if v in verdicts)
    found.reasons = [_reason(found, name, gap) for name, gap in found.losses.items()]
    return found


def _executed(pairs: Pairs, known: Sequence[Difference]) -> list[Difference]:
    """Differences that the runs show and the recipes do not, each condition once."""
    seen = {d.condition for d in known}
    found: list[Difference] = []
    for a, b in pairs:
        new = executed_differences(a.receipt, b.receipt, a.steps, b.steps)
        found += [difference for difference in new if difference.condition not in seen]
        seen |= {d.condition for d in found}
    return found


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
    if any(outcome.receipt["precision"].get("gemm") == "emulated" for outcome in pairs[0]):
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
    return round(geometric_mean(medians), 1)


def _memory(found: Comparison, a: Sequence[Outcome], b: Sequence[Outcome]) -> MemoryRatio | None:
    sides = [[outcome.receipt["memory"] for outcome in side] for side in (a, b)]
    missing = [memory for side in sides for memory in side if not memory.get("measured_gib")]
    if missing:
        found.notes.append(f"no ratio of peak memory: {missing[0].get('measured')}")
        return None
    most_a, most_b = (max(memory["measured_gib"] for memory in side) for side in sides)
    return MemoryRatio(ratio=most_a / most_b, a_gib=most_a, b_gib=most_b)


def _tasks(found: Comparison, sides: Sequence[Sequence[Outcome]]) -> dict[str, list[TaskScore]]:
    """Mean scores over seeds of the tasks and metrics that all runs have, by task."""
    scored: dict[str, list[TaskScore]] = {}
    for task in sides[0][0].tasks:
        if not all(task in run.tasks for side in sides for run in side):
            continue
        rows = {run.tasks[task].get("n") for side in sides for run in side}
        if len(rows) > 1:
            counts = " and ".join(map(str, sorted(rows, key=str)))
            found.notes.append(f"no scores of {task}: the runs were scored on {counts} rows")
            continue
        a, b = (_means(side, task) for side in sides)
        scored[task] = [
            TaskScore(metric=m, a=a[m][0], b=b[m][0], a_stderr=a[m][1], b_stderr=b[m][1])
            for m in a
            if m in b
        ]
    return scored


def _means(side: Sequence[Outcome], task: str) -> dict[str, tuple[float, float | None]]:
    """Metric of all runs of a side -> mean score, mean standard error where each has one."""
    found: dict[str, list[tuple[float, float | None]]] = {}
    for run in side:
        for metric, value, error in metrics_of(run.tasks[task]):
            found.setdefault(metric, []).append((value, error))
    means: dict[str, tuple[float, float | None]] = {}
    for metric, scores in found.items():
        values, errors = zip(*scores, strict=True)
        if len(values) == len(side):
            means[metric] = fmean(values), None if None in errors else fmean(errors)
    return means
