"""Rows of a benchmark, as a table, JSON and CSV. Imports no torch.

A row stores measurements (seconds of each step by round, GiB) and predictions; medians, tokens/s
and ratios are computed from it, and written to the files for other tools. A point that did not
fit, crashed or was skipped is a row with the reason.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, computed_field
from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from finetune.analysis.compare.result import Interval
from finetune.analysis.statistics import Ratio, speed_ratio
from finetune.config.measures import MEASURES
from finetune.logging import plain_table
from finetune.runs.folder import write_whole
from finetune.runs.receipt import Receipt
from finetune.units import GIB, count, size_of_gib

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder

BENCHMARK = "benchmark.json"
OUT_OF_MEMORY = "out of memory"
STATES = (OUT_OF_MEMORY, "skipped", "failed", "not proven")
RIGHT = (
    "tokens/s",
    "tokens/J",
    "peak",
    "predicted",
    "efficiency",
    "waits",
    "memory",
    "optimizer",
    "weights",
    "activations",
    "total",
    "steps/s",
    "said",
    "here",
)
WARM_UP = 5
"""Steps before timing: the first has the witness, the second completes the proof and compiles, on
a CPU the third counts its tensors, and two are for autotuning.
"""


class Row(BaseModel):
    """One point of one recipe.

    Attributes:
        batch, length, tokens: rows of a micro-batch; tokens of a row, of an optimizer step of all
            processes.
        gpus: processes that trained together.
        precision, backend, scaling, compile: as executed, from the receipt.
        proven: status of the receipts; of the first round that is not proven if one is not.
        rounds: seconds of each timed step, a list for each round (run).
        exchange, waited: median seconds of a round in which gradients were on their way, and in
            which a step did nothing else (`StepTimer`).
        allocated_gib, reserved_gib: highest peaks of the rounds.
        optimizer_gib, weights_gib: optimizer states, and parameters with buffers.
        losses, eval_losses: at the end of each seed, where real rows were trained on.
        memory: method of measuring them.
        prediction: reason for a missing prediction.
        error: reason for a missing or incomplete measurement.
        tokens_per_joule: of the last round's timed steps, or of the whole run that trained; None
            where energy was not measured.
        note: what the receipt remarks on the run.
    """

    label: str
    batch: int
    length: int
    gpus: int = 1
    tokens: int
    precision: str = ""
    backend: str = ""
    scaling: str = ""
    compile: str = ""
    proven: str = ""
    fp8_share: float | None = None
    rounds: list[list[float]] = []
    exchange: list[float] = []
    waited: list[float] = []
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    memory: str = ""
    optimizer_gib: float | None = None
    weights_gib: float | None = None
    losses: list[float] = []
    eval_losses: list[float] = []
    predicted_gib: float | None = None
    predicted_optimizer_gib: float | None = None
    predicted_weights_gib: float | None = None
    predicted_reserved_gib: float | None = None
    predicted_seconds: float | None = None
    predicted_waited: float | None = None
    prediction: str = ""
    error: str = ""
    out_of_memory: bool = False
    tokens_per_joule: float | None = None
    note: str = ""

    @property
    def at(self) -> str:
        several = f", gpus={self.gpus}" if self.gpus > 1 else ""
        return f"{self.batch} x {self.length}{several}"

    @property
    def seconds(self) -> list[float]:
        return [value for values in self.rounds for value in values]

    @computed_field
    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step."""
        return _median(self.seconds)

    @computed_field
    @property
    def step_seconds_q1(self) -> float | None:
        return self._quartile(0)

    @computed_field
    @property
    def step_seconds_q3(self) -> float | None:
        return self._quartile(2)

    def _quartile(self, number: int) -> float | None:
        if len(self.seconds) < 2:
            return None
        return statistics.quantiles(self.seconds, n=4, method="inclusive")[number]

    @computed_field
    @property
    def tokens_per_s(self) -> float | None:
        return self.step_seconds and self.tokens / self.step_seconds

    @computed_field
    @property
    def seconds_over_predicted(self) -> float | None:
        return _over(self.step_seconds, self.predicted_seconds)

    @computed_field
    @property
    def gib_over_predicted(self) -> float | None:
        return _over(self.allocated_gib, self.predicted_gib)

    @property
    def state(self) -> str:
        """Outcome: `proven`, `not proven`, `out of memory`, `skipped` or `failed`."""
        if not self.error:
            return self.proven.partition(":")[0]
        if self.out_of_memory:
            return OUT_OF_MEMORY
        return "skipped" if self.error.startswith("skipped") else "failed"

    @property
    def explanation(self) -> str:
        """Full error or status, if `state` shortens it."""
        text = self.error or self.proven
        return "" if text == self.state else text

    def predict(self, found: Any) -> float:
        """Take over a `Prediction`; returns the GiB that the device has to have."""
        memory, timing, device = found.footprint, found.timing, found.machine.device
        self.predicted_gib = memory.allocated / GIB
        self.predicted_optimizer_gib = memory.kinds["optimizer"] / GIB
        self.predicted_weights_gib = memory.kinds["weights"] / GIB
        self.predicted_reserved_gib = memory.reserved / GIB if device.kind == "cuda" else None
        self.predicted_seconds = None if timing is None else timing.seconds
        self.predicted_waited = timing.traffic.added if timing and timing.traffic else None
        if timing is None:
            self.prediction = f"the speed of {device.name} is not known"
        return (memory.allocated + memory.outside) / GIB

    def add(self, run: RunFolder, *, trained: bool = False) -> None:
        """Add a run, `trained` on real rows: proven is what all are, and a peak the highest."""
        # A step of other size (padding, a short last batch) is another measurement: it is refused,
        # rather than divided by the wrong number.
        tokens = {step["tokens"] for step in run.steps} - {self.tokens}
        if trained:
            self.tokens = round(statistics.median(step["tokens"] for step in run.steps))
            for ends, name in ((self.losses, "train"), (self.eval_losses, "eval")):
                said = {*MEASURES[name].columns} & {*run.method.columns}
                ends += [end] if said and (end := MEASURES[name].end(run.rows)) is not None else []
        elif tokens:
            self.error = f"a step had {tokens.pop()} tokens, and {self.tokens} were requested"
            return
        receipt = Receipt.read(run.receipt)
        memory, executed = receipt.memory, receipt.precision
        # The run's own prediction is for the batch that came: with or without padding.
        self.predicted_gib = memory.get("predicted_gib") or self.predicted_gib
        self.weights_gib = memory.get("weights_gib")
        self.optimizer_gib = receipt.trainable.get("optimizer_state_bytes", 0) / GIB
        # The first round that is not proven counts, whatever later ones say.
        if self.proven in ("", "proven"):
            self.proven = receipt.status
        self.precision = f"{run.precision}{receipt.emulated}"
        self.backend, self.scaling = executed.get("backend") or "", executed.get("scaling") or ""
        self.compile, self.fp8_share = executed.get("compile") or "", receipt.fp8_flop_share
        self.memory, self.note = memory["measured"], "; ".join(receipt.notes)
        self.tokens_per_joule = receipt.energy.get("tokens_per_joule")
        drawn = {row["step"]: row["joules"] for row in run.rows if "joules" in row}
        if not trained and {WARM_UP, len(run.steps)} <= drawn.keys():  # compiling left out
            joules = drawn[len(run.steps)] - drawn[WARM_UP]
            tokens = self.tokens * (len(run.steps) - WARM_UP)
            self.tokens_per_joule = tokens / joules if joules else None
        self.allocated_gib = _most(self.allocated_gib, memory["measured_gib"])
        self.reserved_gib = _most(self.reserved_gib, memory.get("reserved_gib"))
        self.rounds = [*self.rounds, [step["seconds"] for step in run.steps[WARM_UP:]]]
        sampled = [step for step in run.steps[WARM_UP:] if "waited" in step]
        for name, medians in (("exchange", self.exchange), ("waited", self.waited)):
            medians += [statistics.median(step[name] for step in sampled)] if sampled else []


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _most(*peaks: float | None) -> float | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def _over(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured and predicted else None


class Against(NamedTuple):
    """Ratios of a row to a reference: above 1 is faster, or more memory."""

    speed: float
    interval: Interval | None
    predicted_speed: float | None
    memory: float | None


class Benchmark(JupyterMixin, BaseModel):
    """All rows of a benchmark.

    Attributes:
        references: labels of the rows that others are compared with, at the same point.
        differences: conditions besides precision in which recipes differ from the first.
        alike: settings that were made the same on all sides, for a fair comparison.
        scaling: what several GPUs keep: `weak` the rows of each, `strong` the rows of a step.
        environment: versions, device, seed, as in the receipt.
        folder: folder of `benchmark.json` and `benchmark.csv`; None if nothing was written.
    """

    kind: Literal["benchmark", "matrix"] = "benchmark"
    references: list[str] = []
    differences: list[str] = []
    alike: str = ""
    scaling: Literal["weak", "strong"] = "weak"
    environment: dict[str, Any] = {}
    command: list[str] = []
    started: str = ""
    interrupted: bool = False
    folder: Path | None = None
    rows: list[Row] = []

    def against(self, row: Row) -> dict[str, Against]:
        """A row over each of the references that was measured at the same point."""
        found = {}
        for other in self.rows:
            if other.label in self.references and other.at == row.at and other is not row:
                medians = [[statistics.median(r) for r in one.rounds] for one in (other, row)]
                # Rounds are paired: both recipes met the same clock in one. One that was
                # interrupted may lack its partner.
                logs = [[math.log(a / b)] for a, b in zip(*medians, strict=False)]
                if logs:
                    predicted = _over(other.predicted_seconds, row.predicted_seconds)
                    memory = _over(row.allocated_gib, other.allocated_gib)
                    found[other.label] = Against(*speed_ratio(logs), predicted, memory)
        return found

    def efficiency(self, row: Row, seconds: str = "step_seconds") -> float | None:
        """tokens/s over one GPU's times the number of GPUs; None where these were not measured.

        Args:
            seconds: `predicted_seconds` for the efficiency that is predicted.
        """
        # The same micro-batch on one GPU, which weak and strong scaling both start from.
        at = (row.label, row.batch, row.length, 1)
        one = next((r for r in self.rows if (r.label, r.batch, r.length, r.gpus) == at), None)
        speeds = [r.tokens / s if r and (s := getattr(r, seconds)) else 0.0 for r in (row, one)]
        return speeds[0] / (row.gpus * speeds[1]) if all(speeds) else None

    # -------------------------------------------------------------------------------------- files

    def to_json(self) -> str:
        data = self.model_dump(mode="json")
        for row, written in zip(self.rows, data["rows"], strict=True):
            written["efficiency"] = self.efficiency(row)
            written["against"] = {n: one._asdict() for n, one in self.against(row).items()}
        return json.dumps(data, indent=1)

    def to_csv(self) -> str:
        """A line for each row; ratios are to the first reference."""
        out = io.StringIO()
        lines = [self._csv_line(row) for row in self.rows]
        writer = csv.DictWriter(out, list(lines[0]) if lines else [*Row.model_fields])
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()

    def _csv_line(self, row: Row) -> dict[str, Any]:
        first = self.against(row).get(self.references[0]) if self.references else None
        low, high = (first and first.interval) or (None, None)
        return row.model_dump(exclude={"losses", "eval_losses"}) | {
            "rounds": len(row.rounds),
            "steps": len(row.seconds),
            "exchange": _median(row.exchange),
            "waited": _median(row.waited),
            "efficiency": self.efficiency(row),
            "speed": first and first.speed,
            "speed_low": low,
            "speed_high": high,
            "predicted_speed": first and first.predicted_speed,
        }

    def save(self, folder: Path) -> None:
        """Write `benchmark.json` and `benchmark.csv` atomically."""
        self.folder = folder
        write_whole(folder / BENCHMARK, self.to_json() + "\n")
        write_whole(folder / "benchmark.csv", self.to_csv())

    # ------------------------------------------------------------------------------------- display

    @property
    def title(self) -> str:
        """What was measured."""
        return " · ".join(dict.fromkeys(row.label for row in self.rows))

    @property
    def headline(self) -> str:
        done = sum(row.state == "proven" for row in self.rows)
        return f"{done} of {len(self.rows)} points measured and verified"

    def tables(self) -> list[list[list[str]]]:
        """Tables for a terminal and a page: a head, and rows of texts."""
        against = [title for name in self.references for title in (f"over {name}", "memory")]
        head = ["", "batch x length", "ms a step (quartiles)", "tokens/s", "peak", "predicted"]
        several = any(row.gpus > 1 for row in self.rows)
        if self._has_energy:
            head.append("tokens/J")
        if several:
            head += ["efficiency", "waits"]
        head += [*against, "precision", "proven"]
        return [[head, *(self._cells_of(row, several) for row in self.rows)]]

    def shown_tables(self) -> Iterator[list[list[str]]]:
        """The tables without the column of points where there is one point."""
        for lines in self.tables():
            if "batch x length" in lines[0] and len({row.at for row in self.rows}) < 2:
                at = lines[0].index("batch x length")
                lines = [[*line[:at], *line[at + 1 :]] for line in lines]
            yield lines

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for head, *rows in self.shown_tables():
            table = plain_table(*head, right=RIGHT, whole=("", "precision", "proven"), fold=head)
            for cells in rows:
                table.add_row(*cells, style="yellow" if cells[-1] in STATES else None)
            parts += [table, Text()]
        return Group(*parts[:-1], *(Text(f"! {note}", "yellow") for note in self.notes()))

    @property
    def _has_energy(self) -> bool:
        return any(row.tokens_per_joule for row in self.rows)

    def _cells_of(self, row: Row, several: bool) -> list[str]:
        low, high = row.step_seconds_q1, row.step_seconds_q3
        within = f" ({_ms(low)} to {_ms(high)})" if low and high else ""
        ratios, found = list[str](), self.against(row)
        for one in map(found.get, self.references):
            memory = one and one.memory
            ratios += [str(Ratio(*one[:2])) if one else "", f"{memory:.2f}x" if memory else ""]
        return [
            row.label,
            row.at,
            _ms(row.step_seconds) + within if row.step_seconds else "-",
            count(row.tokens_per_s) if row.tokens_per_s else "-",
            *("-" if x is None else size_of_gib(x) for x in (row.allocated_gib, row.predicted_gib)),
            *([f"{row.tokens_per_joule or math.nan:.3g}"] if self._has_energy else []),
            *(self._scaling_of(row) if several else ()),
            *ratios,
            row.precision or "-",
            row.state,
        ]

    def _scaling_of(self, row: Row) -> Iterator[str]:
        """Efficiency, and what a step waits for communication, in ms and as its share."""
        reached, expected = self.efficiency(row), self.efficiency(row, "predicted_seconds")
        predicted = f" (predicted {expected:.0%})" if expected and row.gpus > 1 else ""
        yield f"{reached:.0%}{predicted}" if reached else "-"
        waited, took = _median(row.waited), row.step_seconds
        yield f"{_ms(waited)} ({waited / took:.0%})" if waited is not None and took else "-"

    def notes(self) -> list[str]:
        lines = list[str]()
        for row in self.rows:
            who = f"{row.label}, {row.at}"
            lines += [f"{who}: {text}" for text in (row.explanation, row.note) if text]
            for name, one in [*self.against(row).items()][:1]:
                if one.predicted_speed:
                    expected = f"predicted {one.predicted_speed:.2f}x"
                    lines.append(f"{who}: {Ratio(*one[:2])} over {name}, {expected}")
        if any(row.gpus > 1 for row in self.rows):
            kept = {"weak": "each GPU has the rows of one", "strong": "a step keeps its rows"}
            lines.append(f"{self.scaling} scaling: {kept[self.scaling]}")
        if self.references and max((len(row.rounds) for row in self.rows), default=0) == 1:
            lines.append("one round has no interval: --rounds 3 measures one")
        lines += [f"not a pair that differs in precision only: {line}" for line in self.differences]
        lines += [self.alike] if self.alike else []
        lines += sorted({row.prediction for row in self.rows if row.prediction})
        if self.interrupted:
            lines.append("interrupted: what was measured until then is kept")
        return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"
