"""The verdict on finished pairs of runs, and the figures it rests on.

The verdict is the worst of those on what the method is judged by (`config/measures.py`: the final
training and eval loss, a reward, an accuracy), and on the tasks that have a margin. A gap of losses
above `margins.FAILED` is `not equivalent` even where its interval decides nothing: that rule is a
convention, without an error rate. A loss of A alone that is not finite is `not equivalent`, without
figures. Everything is read from the run folders (`experiment.outcome`), so that a comparison can be
judged again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean, median

from finetune.analysis import statistics
from finetune.analysis.compare.margins import ADVISED, FAILED, TASKS
from finetune.analysis.compare.result import (
    EMULATED,
    Comparison,
    Difference,
    EndGap,
    EnergyRatio,
    Gap,
    LossGap,
    MemoryRatio,
    SpeedRatio,
    TaskScore,
    Verdict,
)
from finetune.analysis.experiment.fairness import executed_differences
from finetune.analysis.statistics import SECTIONS, step_ratios, warm_up_steps
from finetune.config.measures import LOSSES, MEASURES
from finetune.runs.folder import RunFolder
from finetune.runs.receipt import metrics_of

WORSE: tuple[Verdict, ...] = ("not equivalent", "undecided", "equivalent")
Pairs = Sequence[tuple[RunFolder, RunFolder]]
"""Runs of a and of b by seed."""
Scores = list[tuple[float, float | None]]
"""Score of each seed, and its standard error."""


def judge(found: Comparison, pairs: Pairs) -> Comparison:
    """Add differences, figures, verdict and reasons."""
    a, b = zip(*pairs, strict=True)
    # Recipes may agree and runs may not: a library that falls back shows in the receipts alone.
    differences = [*found.differences, *_executed(pairs, found.differences)]
    refused = [
        f"a run is not proven ({o.name}: {o.receipt['status']})"
        for pair in pairs
        for o in pair
        if o.receipt["status"] != "proven"
    ]
    # Differences that the user accepted are shown, and refuse nothing.
    if not found.allowed:
        refused += [f"{d.condition}: {d.why}" for d in differences]
    judging, ends = a[0].method.judged, dict[str, list[list[float]]]()
    for name in judging:
        every = [[MEASURES[name].end(o.rows) for o in side] for side in (a, b)]
        ends[name] = [[end for end in side if end is not None] for side in every]
        logged = sum(map(len, ends[name]))
        # Where some logged and others did not, a mean over the rest would be of other seeds on each
        # side. Where none did (a run without eval rows), the verdict rests on what is left.
        if 0 < logged < 2 * len(pairs):
            gone = f"{2 * len(pairs) - logged} of {2 * len(pairs)} runs"
            refused.append(f"{gone} logged no {MEASURES[name].name}")
        if logged < 2 * len(pairs):
            del ends[name]
    if not ends:
        refused.append(f"the runs logged no {' and no '.join(MEASURES[n].name for n in judging)}")
    # A gap of losses is relative, so a loss of zero or below has none; rewards may be negative.
    broken_a, broken_b = (  # have no ratio
        [
            f"{MEASURES[name].name}: {label}, seed {seed}, ends at {end:g}"
            for name, sides in ends.items()
            for seed, end in zip(found.seeds, sides[i], strict=True)
            if not (math.isfinite(end) and (end > 0 or name not in LOSSES))
        ]
        for i, label in enumerate((found.a.label, found.b.label))
    )
    # B is what A is judged by: a B that broke says nothing about A, an A that broke fails.
    refused += broken_b
    found = found.model_copy(update={"differences": differences, "notes": list(found.notes)})
    if refused or broken_a:
        found.verdict = "refused" if refused else "not equivalent"
        found.reasons = refused or broken_a
        return found
    if "eval" not in ends and "eval" in judging:
        found.notes.append("there are no eval rows: the verdict is about the training loss alone")
    found.notes += [
        f"the {MEASURES[name].name} is the mean of the last {last} steps"
        for name in ends
        if (last := len(MEASURES[name].last(a[0].rows))) > 1
    ]
    if len(pairs) > 1 and all(len(set(side)) == 1 for sides in ends.values() for side in sides):
        # A trainer that does not shuffle (TRL's KTO): equal runs have no spread to judge by.
        # Several equal runs would give an interval of no width, and a verdict that looks certain.
        ends = {name: [side[:1] for side in sides] for name, sides in ends.items()}
        found.notes.append(
            "the seeds changed nothing: runs of a side are equal, so one pair counts"
        )
    gaps = {name: _gap(found, name, *sides) for name, sides in ends.items()}
    found.losses = {name: gap for name, gap in gaps.items() if isinstance(gap, LossGap)}
    found.scores = {name: gap for name, gap in gaps.items() if name not in found.losses}
    found.band = {k: statistics.band(g.b) for k, g in found.losses.items() if len(g.b) > 1}
    found.band |= {k: max(g.b) - min(g.b) for k, g in found.scores.items() if len(g.b) > 1}
    found.speed, found.memory = _speed(found, pairs), _memory(found, a, b)
    found.energy = _energy(a, b)
    found.tasks = _tasks(found, (a, b)) or None
    scores = {(k, s.metric): s for k, v in (found.tasks or {}).items() for s in v if s.verdict}
    judged: dict[tuple[str, str], Gap] = {(k, MEASURES[k].name): g for k, g in gaps.items()}
    judged |= {(task, f"{task} {metric}"): score for (task, metric), score in scores.items()}
    # A margin that the user set and no score can be judged by must not pass in silence.
    missing = found.margins.keys() - {TASKS, *MEASURES} - {task for task, _ in scores}
    verdicts = [gap.verdict for gap in judged.values()]
    if missing:
        verdicts.append("undecided")
    found.verdict = next(v for v in WORSE if v in verdicts)
    found.reasons = [_reason(found, *names, gap) for names, gap in judged.items()]
    found.reasons += [f"{task}: no score between 0 and 1 of all runs" for task in sorted(missing)]
    # Whatever the verdict: above the guides' limit a gap has a cause that can be found.
    if any(abs(gap.gap) > ADVISED for gap in found.losses.values()):
        found.notes.append(
            f"a gap above {LossGap.shown(ADVISED, None)} has a cause: python -m finetune diagnose "
            f"{found.a.recipe} shows what each cast clips or rounds to zero; usual cures are "
            "precision.scaling=rowwise, precision.first_n=1 precision.last_n=1"
        )
    return found


def _gap(found: Comparison, name: str, a: Sequence[float], b: Sequence[float]) -> EndGap:
    kind, margin = LossGap if name in LOSSES else EndGap, found.margin_of(name) or 0.0
    gap = statistics.loss_gap(a, b, margin=margin, confidence=found.confidence, kind=kind)
    # A margin above `FAILED` was asked for on purpose, so it moves the limit.
    failed = kind is LossGap and abs(gap.gap) > max(FAILED, margin)
    return gap.model_copy(update={"verdict": "not equivalent"}) if failed else gap


def _executed(pairs: Pairs, known: Sequence[Difference]) -> list[Difference]:
    """Differences that the runs show and the recipes do not, each condition once."""
    seen = {d.condition for d in known}
    found: list[Difference] = []
    for a, b in pairs:
        # Where a model writes what it trains on, the number of tokens in a step follows from its
        # weights, which are what is compared.
        steps = [a.steps, b.steps] if not a.method.writes else []  # of answers of its own
        new = executed_differences(a.receipt, b.receipt, *steps)
        found += [difference for difference in new if difference.condition not in seen]
        seen |= {d.condition for d in found}
    return found


def _reason(found: Comparison, name: str, what: str, gap: Gap) -> str:
    allowed, signed, label = found.margin_of(name) or 0.0, gap.shown, found.a.label
    margin, way = gap.shown(allowed, None), "higher" if gap.gap > 0 else "lower"
    inner = gap.equivalence_interval
    # The sentence names whichever rule decided: the interval, or the convention of `FAILED`.
    decided = inner is not None and statistics.verdict_of(inner, allowed) == gap.verdict
    if gap.verdict == "not equivalent" and not decided:
        most = gap.shown(FAILED, None)
        return f"{what}: {label} ends {way} by {signed(gap.gap)}; above {most} it has failed"
    if inner is None:
        return (
            f"{what}: {signed(gap.gap)} with one seed, which has no spread to judge by; two seeds "
            "give an interval, three or more a useful one"
        )
    low, high = inner
    # Two one-sided tests (Schuirmann 1987): equivalent if the interval of confidence 1 - 2 alpha
    # lies within the margin.
    at = f"{signed(low)} to {signed(high)} (two one-sided tests at {1 - found.confidence:.2g})"
    if gap.verdict == "equivalent":
        return f"{what}: the gap of {signed(gap.gap)}, {at}, lies within {margin}"
    if gap.verdict == "not equivalent":
        return f"{what}: {label} ends {way} by more than {margin}: {signed(gap.gap)}, {at}"
    more = statistics.seeds_to_settle(gap, allowed, found.confidence)
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
    # Steps of one run correlate (a clock drifts), so a single pair's interval comes from sections
    # of them, each of which needs a step.
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
    (a_tokens, a_steps), (b_tokens, b_steps) = (
        _speeds(side, warm_up) for side in zip(*pairs, strict=True)
    )
    return SpeedRatio(
        ratio=ratio.value,
        interval=ratio.interval,
        a_tokens_per_s=round(a_tokens, 1),
        b_tokens_per_s=round(b_tokens, 1),
        a_steps_per_s=a_steps,
        b_steps_per_s=b_steps,
    )


def _speeds(runs: Sequence[RunFolder], warm_up: int) -> tuple[float, float]:
    """Tokens and steps per second: geometric means over runs of medians over steps."""
    timed = [[s for s in r.steps[warm_up:] if min(s["tokens"], s["seconds"]) > 0] for r in runs]
    # Medians, since a checkpoint or another process makes single steps long; geometric means, since
    # speeds are compared by their ratio, which is then the same whichever side is divided.
    tokens = geometric_mean(median(s["tokens"] / s["seconds"] for s in steps) for steps in timed)
    return tokens, geometric_mean(median(1 / s["seconds"] for s in steps) for steps in timed)


def _memory(
    found: Comparison, a: Sequence[RunFolder], b: Sequence[RunFolder]
) -> MemoryRatio | None:
    sides = [[outcome.receipt["memory"] for outcome in side] for side in (a, b)]
    missing = [memory for side in sides for memory in side if not memory.get("measured_gib")]
    if missing:
        found.notes.append(f"no ratio of peak memory: {missing[0].get('measured')}")
        return None
    # The largest of all seeds: memory has to suffice for the worst of them.
    most_a, most_b = (max(memory["measured_gib"] for memory in side) for side in sides)
    return MemoryRatio(ratio=most_a / most_b, a_gib=most_a, b_gib=most_b)


def _energy(*sides: Sequence[RunFolder]) -> EnergyRatio | None:
    each = [[o.receipt.get("energy", {}).get("tokens_per_joule") for o in side] for side in sides]
    # Without a meter on one machine (None), or with one that read nothing, there is no fair ratio.
    if not all(map(all, each)):
        return None
    a, b = map(geometric_mean, each)
    return EnergyRatio(ratio=a / b, a_tokens_per_joule=a, b_tokens_per_joule=b)


def _tasks(found: Comparison, sides: Sequence[Sequence[RunFolder]]) -> dict[str, list[TaskScore]]:
    """Mean scores over seeds of the tasks and metrics that all runs have, by task."""
    scored: dict[str, list[TaskScore]] = {}
    for task in sides[0][0].tasks:
        if not all(task in run.tasks for side in sides for run in side):
            continue
        rows = {run.tasks[task].get("n") for side in sides for run in side}
        # Scores on other numbers of rows have other spreads, and other rows.
        if len(rows) > 1:
            counts = " and ".join(map(str, sorted(rows, key=str)))
            found.notes.append(f"no scores of {task}: the runs were scored on {counts} rows")
            continue
        a, b = (_scores(side, task) for side in sides)
        scored[task] = [_score(found, task, m, a[m], b[m]) for m in a if m in b]
    return scored


def _score(found: Comparison, task: str, metric: str, a: Scores, b: Scores) -> TaskScore:
    """Means over seeds, and the verdict where the task has a margin and scores are shares."""
    (of_a, a_errors), (of_b, b_errors) = (zip(*side, strict=True) for side in (a, b))
    pairs = [x - y for x, y in zip(of_a, of_b, strict=True)]
    score = TaskScore(
        metric=metric,
        a=fmean(of_a),
        b=fmean(of_b),
        a_stderr=None if None in a_errors else fmean(a_errors),
        b_stderr=None if None in b_errors else fmean(b_errors),
        gap=fmean(pairs),
        differences=pairs,
    )
    margin = found.margin_of(task)
    # Margins of tasks are points of a share; a perplexity or a count of tokens has another unit.
    if margin is None or not 0 <= min(*of_a, *of_b) <= max(*of_a, *of_b) <= 1:
        return score
    kept = {"margin": margin, "confidence": found.confidence}
    return score.model_copy(update=statistics.tested(score, **kept))


def _scores(side: Sequence[RunFolder], task: str) -> dict[str, Scores]:
    """Metric of all runs of a side -> score and standard error, if it has one, of each."""
    found: dict[str, Scores] = {}
    for run in side:
        for metric, value, error in metrics_of(run.tasks[task]):
            found.setdefault(metric, []).append((value, error))
    return {metric: scores for metric, scores in found.items() if len(scores) == len(side)}
