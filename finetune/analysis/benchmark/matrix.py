"""The precision matrix: one recipe in eight precisions, beside what guides say of them.

    measured     each a run of a benchmark (random rows), with the estimator's error for each figure
    trained      each the recipe itself over the same seeds: the loss at the end, too
    predicted    each for a GPU that need not be here, and nothing runs

A figure in circulation is a share of FP32's at the same point: *confirmed* within `NEAR` of it,
else *refuted*. Speed on a CPU is no claim about GPUs. What cannot run is a row with its reason.
`activations` is what a step holds at its peak besides weights and optimizer states: activations,
logits, gradients and temporaries. Imports no torch: `matrix_runs` measures and predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import yaml
from pydantic import ValidationError

from finetune.analysis.benchmark.result import Benchmark, Row
from finetune.config.paths import ASSETS
from finetune.errors import ConfigError
from finetune.runs.folder import json_of
from finetune.units import count, percent, size_of_gib

NEAR = 0.10
"""Relative distance from a figure in circulation within which it is confirmed."""


@dataclass(frozen=True)
class Entry:
    """A row of the matrix, of `assets/precision_matrix.yaml`, which describes the fields."""

    overrides: list[str]
    optimizer: float | None = None
    memory: float | None = None
    speed: float | None = None


_TABLE = yaml.safe_load((ASSETS / "precision_matrix.yaml").read_text("utf-8"))
MATRIX = {label: Entry(**facts) for label, facts in _TABLE.items()}
REFERENCE = "FP32"
NOT_HERE = "not measurable here"


class Matrix(Benchmark):
    """Rows of the matrix, and what they say of the figures in circulation.

    Attributes:
        recipe: its name; none in older files.
        gpu: predicted for it; empty where rows were measured.
    """

    recipe: str = ""
    gpu: str = ""

    @property
    def title(self) -> str:
        return f"{self.recipe or 'A recipe'} from {REFERENCE} to {[*MATRIX][-1]}"

    @property
    def headline(self) -> str:
        verdicts = [row[-1] for row in self.claims()]
        confirmed, refuted = verdicts.count("confirmed"), verdicts.count("refuted")
        how = f"predicted for {self.gpu}: " if self.gpu else ""
        return (
            f"{how}{confirmed} figures in circulation confirmed, {refuted} refuted, "
            f"{len(verdicts) - confirmed - refuted} {NOT_HERE}"
        )

    def tables(self) -> list[list[list[str]]]:
        losses = [("loss", "losses"), ("eval loss", "eval_losses")]
        shown = [pair for pair in losses if any(getattr(row, pair[1]) for row in self.rows)]
        head = ["", "batch x length", "optimizer", "weights", "activations", "total"]
        head += ["tokens/s", "steps/s", *(title for title, _ in shown)]
        head += ["fits" if self.gpu else "proven"]
        keys = [key for _, key in shown]
        rows = [[*self._figures(row), *self._losses(row, keys), _state(row)] for row in self._rows]
        said = ["", "batch x length", "of FP32's", "said", "here", "verdict"]
        return [[head, *rows], [said, *self.claims()]]

    @property
    def _rows(self) -> list[Row]:
        # From FP32 down, as the table is read, whatever was measured first.
        order = list(MATRIX)
        return sorted(self.rows, key=lambda r: (r.batch * r.length, order.index(r.label)))

    def _figures(self, row: Row) -> Iterator[str]:
        yield from (row.label, row.at)
        for measured, expected in zip(*_memory(row), strict=True):
            over = f" ({_off(measured, expected)})" if measured and expected else ""
            yield size_of_gib(measured or expected or 0) + over if measured or expected else "-"
        seconds = row.step_seconds or row.predicted_seconds
        yield from (count(row.tokens / seconds), f"{1 / seconds:.3g}") if seconds else "--"

    def _losses(self, row: Row, keys: Sequence[str]) -> Iterator[str]:
        """Means over seeds, and their distance from BF16's, or without it FP32's."""
        for key in keys:
            own = getattr(row, key)
            ends = {r.label: getattr(r, key) for r in self.rows}
            base = ends.get("BF16") or ends.get(REFERENCE)
            yield (
                f"{fmean(own):.4f}" + (f" ({_off(fmean(own), fmean(base))})" if base else "")
                if own
                else "-"
            )

    def claims(self) -> list[list[str]]:
        """Rows of what is said: label, point, of what, said, found here, and the verdict."""
        found = []
        base = {row.at: row for row in self.rows if row.label == REFERENCE}
        for row in self._rows:
            entry, at = MATRIX[row.label], base.get(row.at)
            sides = zip(_shares(row), _shares(at) if at else (None,) * 3, strict=True)
            here = [own / other if own and other else None for own, other in sides]
            said = (entry.optimizer, entry.memory, entry.speed)
            for what, claimed, value in zip(
                ("optimizer", "memory", "speed"), said, here, strict=True
            ):
                if claimed is not None:
                    # Speed on a CPU is no claim about GPUs; bytes of tensors are.
                    known = value if what != "speed" or self._times_gpus else None
                    texts = (_share(what, claimed), _share(what, value), _verdict(claimed, known))
                    found.append([row.label, row.at, what, *texts])
        return found

    @property
    def _times_gpus(self) -> bool:
        device = self.environment.get("device") or {}
        return bool(self.gpu) or device.get("kind") == "cuda"

    def notes(self) -> list[str]:
        said: dict[tuple[str, str], list[str]] = {}
        for row in self._rows:
            note = "" if row.note == _state(row) else row.note
            if why := row.error or note:
                said.setdefault((row.label, why), []).append(row.at)
        lines = [f"{label}, {' and '.join(points)}: {why}" for (label, why), points in said.items()]
        if self.gpu:
            lines.append(f"all figures are predicted for {self.gpu}: nothing was run")
        else:
            lines.append("in parentheses: measured over predicted")
        if self.alike:
            lines.append(self.alike)
        return lines


def _memory(row: Row) -> tuple[list[float | None], list[float | None]]:
    """Optimizer states, weights, the rest and all, GiB: as measured, and as predicted."""
    measured = [row.optimizer_gib, row.weights_gib, row.allocated_gib]
    expected = [row.predicted_optimizer_gib, row.predicted_weights_gib, row.predicted_gib]
    for parts in (measured, expected):
        optimizer, weights, total = parts
        # What is neither: activations, logits, gradients and temporaries at the peak.
        parts.insert(2, total - (optimizer or 0) - (weights or 0) if total else None)
    return measured, expected


def _shares(row: Row) -> tuple[float | None, float | None, float | None]:
    """Bytes of optimizer states, of all, and speed."""
    measured, expected = _memory(row)
    found = expected if row.step_seconds is None else measured
    seconds = row.step_seconds or row.predicted_seconds
    return found[0], found[-1], 1 / seconds if seconds else None


def _off(value: float, reference: float) -> str:
    return percent(value / reference - 1, 1, sign=True, space=True)


def _share(what: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" if what == "speed" else percent(value, 0, space=True)


def _verdict(said: float, value: float | None) -> str:
    if value is None:
        return NOT_HERE
    # Relative to what is said, since it is that figure which is on trial.
    return "confirmed" if abs(value / said - 1) <= NEAR else "refuted"


def _state(row: Row) -> str:
    return row.state or row.note or "yes"


def read_benchmark(file: Path) -> Benchmark:
    """Read `benchmark.json`, of a benchmark or of a matrix.

    Raises:
        ConfigError: it is not one.
    """
    data = json_of(file)
    try:
        found = (Matrix if data.get("kind") == "matrix" else Benchmark).model_validate(data)
    except ValidationError as error:
        said, fix = str(error).splitlines()[0], "measure again: python -m finetune benchmark RECIPE"
        raise ConfigError(f"{file.name} cannot be read: {said}", where=str(file), fix=fix) from None
    found.folder = file.parent
    return found
