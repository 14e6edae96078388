"""Rows of a benchmark, as a table, JSON, CSV and Markdown. Imports no torch.

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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from finetune.analysis.statistics import Ratio, speed_ratio
from finetune.logging import plain_table
from finetune.runs.folder import write_whole
from finetune.units import count, size_of_gib


@dataclass
class Row:
    """One point of one recipe.

    Attributes:
        batch, length, tokens: rows of a micro-batch; tokens of a row, of an optimizer step.
        precision, backend, scaling, compile: as executed, from the receipt.
        proven: status of the receipts, that of the first round which is not proven if one is not;
            without receipts, an observation of the run.
        rounds: seconds of each timed step, a list for each round (process).
        allocated_gib, reserved_gib: highest peaks of the rounds.
        memory: method of measuring them.
        prediction: reason for a missing prediction.
        error: reason for a missing or incomplete measurement.
    """

    label: str
    batch: int
    length: int
    tokens: int
    precision: str = ""
    backend: str = ""
    scaling: str = ""
    compile: str = ""
    proven: str = ""
    fp8_share: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    memory: str = ""
    predicted_gib: float | None = None
    predicted_reserved_gib: float | None = None
    predicted_seconds: float | None = None
    prediction: str = ""
    error: str = ""
    out_of_memory: bool = False
    note: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.batch, self.length

    @property
    def seconds(self) -> list[float]:
        return [value for values in self.rounds for value in values]

    @property
    def step(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        if len(self.seconds) < 2:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def state(self) -> str:
        """Outcome: `proven`, `not proven`, `out of memory`, `skipped`, `not run` or `failed`."""
        if not self.error:
            return self.proven.partition(":")[0]
        kind = self.error.partition(":")[0]
        return kind if kind in ("out of memory", "skipped", "not run") else "failed"

    @property
    def explanation(self) -> str:
        """Full error or status, if `state` shortens it."""
        text = self.error or self.proven
        return "" if text == self.state else text

    def facts(self) -> dict[str, Any]:
        """Figures computed from the row, for the files."""
        step, quartiles = self.step, self.quartiles
        return {
            "step_seconds": step,
            "step_seconds_q1": quartiles and quartiles[0],
            "step_seconds_q3": quartiles and quartiles[1],
            "tokens_per_s": step and self.tokens / step,
            "seconds_over_predicted": _over(step, self.predicted_seconds),
            "gib_over_predicted": _over(self.allocated_gib, self.predicted_gib),
        }

    def add(self, line: dict[str, Any]) -> None:
        match line["kind"]:
            case "forecast":
                self.predicted_gib = line.get("allocated_gib")
                self.predicted_reserved_gib = line.get("reserved_gib")
                self.predicted_seconds = line.get("step_seconds")
                self.prediction = line.get("why", "")
            case "result":
                before = replace(self)
                known = {f.name for f in fields(self)} - {"rounds"}
                for name in known & line.keys():
                    setattr(self, name, line[name])
                if before.rounds:  # proven is what all rounds are, a peak the highest of them
                    if before.proven != "proven":
                        self.proven = before.proven
                    self.allocated_gib = _most(before.allocated_gib, self.allocated_gib)
                    self.reserved_gib = _most(before.reserved_gib, self.reserved_gib)
                self.rounds.append(list(line["seconds"]))
            case _:
                self.error = line["error"]
                self.out_of_memory = bool(line.get("out_of_memory"))


def _most(*peaks: float | None) -> float | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def _over(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured and predicted else None


@dataclass
class Benchmark(JupyterMixin):
    """All rows of a benchmark.

    Attributes:
        references: labels of the rows that others are compared with, at the same point.
        differences: conditions besides precision in which recipes differ from the first.
        alike: settings that were made the same on all sides, for a fair comparison.
        environment: versions, device, threads.
        folder: folder of `benchmark.json` and `benchmark.csv`; None if nothing was written.
    """

    rows: list[Row] = field(default_factory=list)
    references: tuple[str, ...] = ()
    differences: list[str] = field(default_factory=list)
    alike: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    started: str = ""
    interrupted: bool = False
    folder: Path | None = None

    def ratio(self, row: Row, reference: str) -> Ratio | None:
        """Speed of a row over that of the reference at the same point."""
        other = self._at(row, reference)
        rounds = zip(other.rounds, row.rounds, strict=False) if other else ()
        logs = [
            math.log(statistics.median(slow) / statistics.median(fast))
            for slow, fast in rounds
            if slow and fast
        ]
        return speed_ratio([[log] for log in logs]) if logs else None

    def predicted_ratio(self, row: Row, reference: str) -> float | None:
        """The same ratio as the estimator predicts it."""
        other = self._at(row, reference)
        return _over(other.predicted_seconds, row.predicted_seconds) if other else None

    def memory_ratio(self, row: Row, reference: str) -> float | None:
        other = self._at(row, reference)
        return _over(row.allocated_gib, other.allocated_gib) if other else None

    def _at(self, row: Row, reference: str) -> Row | None:
        found = (r for r in self.rows if r.label == reference and r.key == row.key)
        return next((r for r in found if r is not row), None)

    # -------------------------------------------------------------------------------------- files

    def to_json(self) -> str:
        data = {k: v for k, v in asdict(self).items() if k != "rows"}
        data["folder"] = str(self.folder) if self.folder else None
        rows = [asdict(r) | r.facts() | {"against": self._against(r)} for r in self.rows]
        return json.dumps({"kind": "benchmark", **data, "rows": rows}, indent=1)

    def _against(self, row: Row) -> dict[str, Any]:
        return {
            name: {
                "speed": ratio.value,
                "interval": ratio.interval and list(ratio.interval),
                "predicted_speed": self.predicted_ratio(row, name),
                "memory": self.memory_ratio(row, name),
            }
            for name in self.references
            if (ratio := self.ratio(row, name))
        }

    @classmethod
    def from_json(cls, text: str) -> Benchmark:
        data = json.loads(text)
        known = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in r.items() if k in known}) for r in data["rows"]]
        own = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        folder = Path(data["folder"]) if data.get("folder") else None
        return cls(**own | {"rows": rows, "references": tuple(own["references"]), "folder": folder})

    def to_csv(self) -> str:
        """A line for each row; ratios are to the first reference."""
        out = io.StringIO()
        lines = [self._csv_line(row) for row in self.rows]
        names = list(lines[0]) if lines else [f.name for f in fields(Row)]
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()

    def _csv_line(self, row: Row) -> dict[str, Any]:
        plain = {k: v for k, v in asdict(row).items() if k != "rounds"}
        reference = self.references[0] if self.references else ""
        ratio = self.ratio(row, reference)
        low, high = ratio.interval if ratio and ratio.interval else (None, None)
        return plain | {
            "rounds": len(row.rounds),
            "steps": len(row.seconds),
            **row.facts(),
            "speed": ratio and ratio.value,
            "speed_low": low,
            "speed_high": high,
            "predicted_speed": self.predicted_ratio(row, reference),
        }

    def save(self, folder: Path) -> None:
        """Write `benchmark.json` and `benchmark.csv` atomically."""
        self.folder = folder
        write_whole(folder / "benchmark.json", self.to_json() + "\n")
        write_whole(folder / "benchmark.csv", self.to_csv())

    # ------------------------------------------------------------------------------------- display

    def cells(self) -> list[list[str]]:
        head = ["", "batch x length", "ms a step (quartiles)", "tokens/s", "peak"]
        against = [title for name in self.references for title in (f"over {name}", "memory")]
        head += ["predicted", *against, "precision", "proven"]
        rows = [self._cells_of(row) for row in self.rows]
        drop = set() if len({row.key for row in self.rows}) > 1 else {1}
        return [[c for i, c in enumerate(cells) if i not in drop] for cells in (head, *rows)]

    def _cells_of(self, row: Row) -> list[str]:
        facts, quartiles, step = row.facts(), row.quartiles, row.step
        within = f" ({_ms(quartiles[0])} to {_ms(quartiles[1])})" if quartiles else ""
        ratios = [cell for name in self.references for cell in self._ratio_cells(row, name)]
        peaks = (row.allocated_gib, row.predicted_gib)
        return [
            row.label,
            f"{row.batch} x {row.length}",
            _ms(step) + within if step else "-",
            count(facts["tokens_per_s"]) if step else "-",
            *("-" if gib is None else size_of_gib(gib) for gib in peaks),
            *(*ratios, row.precision or "-", row.state),
        ]

    def _ratio_cells(self, row: Row, name: str) -> list[str]:
        ratio, memory = self.ratio(row, name), self.memory_ratio(row, name)
        return [str(ratio) if ratio else "", f"{memory:.2f}x" if memory else ""]

    def notes(self) -> list[str]:
        lines = [
            f"{row.label}, {row.batch} x {row.length}: {row.explanation}"
            for row in self.rows
            if row.explanation
        ]
        for note in dict.fromkeys(row.note for row in self.rows if row.note):
            labels = dict.fromkeys(row.label for row in self.rows if row.note == note)
            lines.append(f"{'; '.join(labels)}: {note}")
        first = self.references[0] if self.references else ""
        for row in self.rows:
            predicted, measured = self.predicted_ratio(row, first), self.ratio(row, first)
            if predicted and measured:
                lines.append(
                    f"{row.label}, {row.batch} x {row.length}: {measured} over {first}, predicted "
                    f"{predicted:.2f}x"
                )
        if self.references and max((len(row.rounds) for row in self.rows), default=0) == 1:
            lines.append("one round has no interval: --rounds 3 measures one")
        lines += [f"not a pair that differs in precision only: {line}" for line in self.differences]
        lines += [self.alike] if self.alike else []
        lines += sorted({row.prediction for row in self.rows if row.prediction})
        if self.interrupted:
            lines.append("interrupted: what was measured until then is kept")
        return list(dict.fromkeys(lines))

    def to_markdown(self) -> str:
        rows = [[cell.replace("|", "/") for cell in cells] for cells in self.cells()]
        rows.insert(1, ["---"] * len(rows[0]))
        notes = "".join(f"\n\n{note}" for note in self.notes())
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + notes + "\n"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def __rich__(self) -> RenderableType:
        head, *rows = self.cells()
        right = ("tokens/s", "peak", "predicted", "memory")
        table = plain_table(*head, right=right, whole=("", "precision", "proven"), fold=head)
        for cells, row in zip(rows, self.rows, strict=True):
            table.add_row(*cells, style=None if row.state == "proven" else "yellow")
        return Group(table, *(Text(f"! {note}", "yellow") for note in self.notes()))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"
