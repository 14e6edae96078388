"""Predicted beside published speeds: step times, and how much faster FP8 was than BF16.

Each row that published.py can read is predicted (tokens per second and GPU); nothing is dropped
without a reason.

Pairs are rows of one source that ran the same on the same GPUs and differ in the precision of the
products; where a source gives several, each FP8 row meets the BF16 row of the nearest batch.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from finetune.errors import ConfigError
from finetune.estimator.memory.sharding import Fsdp2
from finetune.estimator.speed.roofline import roofline_of
from finetune.estimator.speed.timing import ring_of, sharded_traffic
from finetune.estimator.trace.fsdp_groups import Group
from tests.benchmarks.score.published import Case, Row, read_case
from tests.benchmarks.score.rows import held_out
from tests.benchmarks.score.workload import write_step

PUBLISHED_WITH = (2, 8, 0)
"""Version of torch of the published runs, whose row-wise scales CUTLASS multiplied."""


def predict(case: Case) -> float:
    """Tokens per second and GPU."""
    step = write_step(case.shape, case.setting)
    setting, stack = case.setting, case.stack
    roofline = roofline_of(case.gpu, stack.launched, stack.attention, PUBLISHED_WITH)
    micro = roofline.step_time(step.micro, compiled=stack.compiled)
    update = roofline.step_time(step.update)
    seconds = setting.accumulation * micro.seconds + update.seconds
    if setting.shards > 1:
        seconds += setting.accumulation * _waited(case, micro.seconds)
    return case.counted * setting.accumulation / seconds


def _waited(case: Case, seconds: float) -> float:
    """Seconds of a micro-batch that sharding adds: equal groups, a third of it forward."""
    setting, shape = case.setting, case.shape
    # FP8 weights that are cast on their shards are gathered in FP8
    bits = setting.base_bits / (2 if setting.cast_weights_once else 1)
    each = shape.parameters / shape.layers
    # Trained weights are counted as frozen ones of so many bits, and as gradients of BF16.
    trained = round(each) if setting.method == "full" else 0
    group = Group(frozen=round(each * bits / 8) - 2 * trained, trainable=trained)
    model = Fsdp2((group,) * shape.layers, case.gpus)
    computed = seconds / 3, seconds * 2 / 3
    return sharded_traffic(model, ring_of(case.gpu, case.gpus), computed).added


@dataclass(frozen=True)
class Scored:
    """One row predicted."""

    case: Case
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the step time: positive when predicted too long."""
        return self.case.published / self.predicted - 1


@dataclass(frozen=True)
class Pair:
    """FP8 over BF16, published and predicted."""

    fp8: Scored
    bf16: Scored

    @property
    def published(self) -> float:
        return self.fp8.case.published / self.bf16.case.published

    @property
    def predicted(self) -> float:
        return self.fp8.predicted / self.bf16.predicted


def score_rows(rows: Iterable[Row]) -> tuple[list[Scored], dict[str, str]]:
    """(rows predicted, reason by id of those that are not)."""
    scored, reasons = [], {}
    for row in rows:
        case = read_case(row)
        if isinstance(case, str):
            reasons[row["id"]] = case
            continue
        try:
            scored.append(Scored(case, predict(case)))
        except ConfigError as error:
            reasons[row["id"]] = error.what
    return scored, reasons


def pair_up(scored: Iterable[Scored]) -> list[Pair]:
    """FP8 rows with the BF16 row of the same source, model and GPUs that is nearest in batch."""
    groups: dict[tuple[str, ...], list[Scored]] = defaultdict(list)
    for one in scored:
        row = one.case.row
        if row["method"].startswith("full"):
            key = (row["source"], row["model"], row["gpu"], row["n_gpus"], row["seq_len"])
            groups[key].append(one)
    pairs = []
    for group in groups.values():
        plain = [one for one in group if one.case.setting.fp8 is None]
        for one in group:
            if one.case.setting.fp8 and plain:
                nearest = min(plain, key=lambda other: _distance(one, other))
                pairs.append(Pair(one, nearest))
    return pairs


def _distance(one: Scored, other: Scored) -> tuple[bool, float]:
    a, b = one.case, other.case
    eager = a.stack.launched != b.stack.launched
    return eager, abs(math.log(a.setting.batch / b.setting.batch))


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV of measurements."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]


@dataclass(frozen=True)
class SpeedBoard:
    """Published speeds of a file, predicted.

    Attributes:
        scored: rows.
        reasons: id of a row that is not -> why.
    """

    scored: list[Scored]
    reasons: dict[str, str]

    def part(self, *, apart: bool) -> dict[str, float]:
        """The figures of the rows looked at while developing, or of those held out.

        A pair belongs to the held-out ones when one of its rows does.
        """
        rows = [one for one in self.scored if held_out(one.case.row["id"]) is apart]
        pairs = [
            pair
            for pair in pair_up(self.scored)
            if any(held_out(one.case.row["id"]) for one in (pair.fp8, pair.bf16)) is apart
        ]
        return judge(rows, pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the figures, every row and every pair."""
        return {
            "developed_on": self.part(apart=False),
            "held_out": self.part(apart=True),
            "rows": [
                {
                    "id": one.case.row["id"],
                    "held_out": held_out(one.case.row["id"]),
                    "published": one.case.published,
                    "predicted": one.predicted,
                    "time_error": one.error,
                }
                for one in self.scored
            ],
            "pairs": [
                {
                    "fp8": pair.fp8.case.row["id"],
                    "bf16": pair.bf16.case.row["id"],
                    "published": pair.published,
                    "predicted": pair.predicted,
                }
                for pair in pair_up(self.scored)
            ],
            "unscored": self.reasons,
        }


def score_speeds(path: Path) -> SpeedBoard:
    """Predict the speeds that a file of measurements tells."""
    return SpeedBoard(*score_rows(read_rows(path)))


def judge(scored: list[Scored], pairs: list[Pair] | None = None) -> dict[str, float]:
    """The figures of the two criteria."""
    timed = [one for one in scored if one.case.timed]
    errors = [abs(one.error) for one in timed]
    pairs = pair_up(scored) if pairs is None else pairs
    logs = [math.log(one.predicted / one.case.published) for one in timed]
    ratios = [math.log(pair.predicted / pair.published) for pair in pairs]
    return {
        "rows": len(timed),
        "median_error": median(errors) if errors else math.nan,
        "scatter_time": _spread(logs),
        "pairs": len(pairs),
        "within_0.08": _share(abs(p.predicted - p.published) <= 0.08 for p in pairs),
        "sign_right": _share((p.predicted > 1) == (p.published > 1) for p in pairs),
        "scatter_ratio": _spread(ratios),
    }


def _spread(logs: list[float]) -> float:
    """The standard deviation whose 1.645-fold holds nine in ten, wild rows among the tenth."""
    if not logs:
        return math.nan
    return sorted(map(abs, logs))[math.ceil(0.9 * len(logs)) - 1] / 1.645


def _share(hits: Iterable[bool]) -> float:
    seen = list(hits)
    return sum(seen) / len(seen) if seen else math.nan
