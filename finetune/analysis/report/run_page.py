"""Pages of one run and of several: verdict, key figures and tables that the templates show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from finetune.analysis.report.curves import (
    curve,
    gradients_and_speed,
    health,
    loss_plot,
    overlay,
    side_by_side,
)
from finetune.analysis.report.elements import (
    CONFIG,
    METRICS,
    MISSING,
    RECEIPT,
    REPORT,
    Cell,
    Num,
    Page,
    Source,
    Table,
    Tone,
    figure,
    fixed,
    is_number,
    signed,
)
from finetune.runs.folder import Run
from finetune.runs.receipt import LayerReceipt, Receipt, group_layers
from finetune.units import count, elapsed, percent, size_of_gib

SHOWN_ANSWERS = 6
"""Evaluations whose answers are shown: the first, the last, and some between."""
LOW = ("FP8", "FP4")
PEAKS = (
    ("predicted", "predicted_gib", "predicted"),
    ("measured", "measured_gib", "measured"),
    ("predicted, reserved by the allocator", "predicted_reserved_gib", ""),
    ("reserved by the allocator", "reserved_gib", ""),
)


class Course(NamedTuple):
    """First and last value of a metric, linked, and all finite ones."""

    first: Num
    last: Num
    values: list[float]


@dataclass(frozen=True)
class RunSource(Source):
    """A run folder, with the figures and tables that pages show."""

    # ------------------------------------------------------------------------------------- verdict

    @property
    def requested(self) -> str:
        return str(self.facts("precision.asked") or "").upper()

    @property
    def executed(self) -> str:
        return str(self.facts("precision.ran") or "").upper()

    @property
    def is_low(self) -> bool:
        return self.executed in LOW

    @property
    def fell_back(self) -> bool:
        """True if FP8 was requested and did not run."""
        return self.requested in LOW and not self.is_low

    @property
    def status(self) -> str:
        return str(self.facts("status") or "")

    @property
    def engine(self) -> Num:
        p = self.facts("precision") or {}
        how = f"{p.get('backend')}/{p.get('scaling')}, {p.get('format')}"
        return self.num(how, RECEIPT, "precision.effective")

    @property
    def verdict(self) -> tuple[str, Tone]:
        """Headline on the proof of the precision, and its tone."""
        if not self.run.receipt:
            return "Not proven", "plain" if self.run.state == "running" else "bad"
        if self.fell_back:
            return f"Not {self.requested}", "bad"
        if not self.run.proven:
            return f"{self.executed}, not proven", "bad"
        if self.is_low:
            return f"{self.executed}, proven", "good"
        return f"{self.executed}, as asked", "plain"

    # ------------------------------------------------------------------------------------- figures

    @property
    def last_step(self) -> Num:
        return self.num(f"{self.run.last_step:,}", METRICS, "step")

    @property
    def not_finite(self) -> Iterator[tuple[str, Num]]:
        """Losses that were not finite, each with its first such step."""
        for key in ("loss", "eval_loss"):
            if broken := curve(self.run.rows, key).broken:
                yield key, self.num(f"step {broken[0]:,.0f}", METRICS, key)

    @property
    def skipped(self) -> Num | None:
        found = self._last("skipped_steps")
        return self.num(figure(found, count), METRICS, "skipped_steps") if found else None

    @property
    def mfu(self) -> Num | None:
        found = self._last("health/mfu")
        return self.num(figure(found, percent), METRICS, "health/mfu") if found else None

    def _last(self, key: str) -> Any:
        return next((row[key] for row in reversed(self.run.rows) if row.get(key)), None)

    def course(self, key: str) -> Course:
        x, y, _ = curve(self.run.rows, key)
        if not len(y):
            return Course(Num(MISSING), Num(MISSING), [])
        first, last = (
            self.num(fixed(float(y[i])), METRICS, f"{key} at step {x[i]:.0f}") for i in (0, -1)
        )
        return Course(first, last, y.tolist())

    @property
    def speed(self) -> Num:
        """Median tokens per second."""
        value, file = self.run.report.get("tokens_per_s"), REPORT
        if value is None:
            speeds = curve(self.run.rows, "tokens_per_s").y.tolist()
            value, file = (median(speeds[1:] or speeds) if speeds else None), METRICS
        return self.num(figure(value, count), file, "tokens_per_s")

    @property
    def memory(self) -> Num:
        """Measured peak of a step, else of the process."""
        if is_number(self.facts("memory.measured_gib")):
            return self.receipt("memory.measured_gib", size_of_gib)
        peak = figure(self.run.report.get("peak_memory_gib"), size_of_gib)
        return self.num(peak, REPORT, "peak_memory_gib")

    @property
    def memory_note(self) -> Num | str:
        """Prediction of the peak, or how far the measured one is from it."""
        measured: Any = self.facts("memory.measured_gib")
        predicted: Any = self.facts("memory.predicted_gib")
        if not is_number(predicted) or not predicted:
            return ""
        text = size_of_gib(predicted)
        if is_number(measured):
            over = signed(measured / predicted - 1, 1)
            text = "as predicted" if over == "+0.0%" else f"{over} of the prediction"
        return self.num(text, RECEIPT, "memory.predicted_gib")

    @property
    def time(self) -> Num:
        seconds, file = self.run.report.get("seconds"), REPORT
        if seconds is None:
            seconds, file = (self.run.rows[-1].get("seconds") if self.run.rows else None), METRICS
        return self.num(figure(seconds, elapsed), file, "seconds")

    @property
    def role_share(self) -> dict[str, Num]:
        shares = self._receipt.role_share.items()
        return {r: self.num(figure(x, percent), RECEIPT, f"role_share.{r}") for r, x in shares}

    @property
    def state_bytes(self) -> Num | None:
        """Bytes of optimizer state per parameter."""
        t = self.facts("trainable") or {}
        state, owned = t.get("optimizer_state_bytes"), t.get("in_optimizer")
        if not state or not owned:
            return None
        return self.num(f"{state / owned:.2f}", RECEIPT, "trainable.optimizer_state_bytes")

    # -------------------------------------------------------------------------------------- tables

    @cached_property
    def _receipt(self) -> Receipt:
        """The receipt without keys unknown to this version."""
        data = self.run.receipt
        known = {f.name for f in fields(Receipt)} - {"layers"}
        empty = {"status": "", "precision": {}}
        receipt = Receipt(**empty | {k: data[k] for k in known & data.keys()})
        inside = [f.name for f in fields(LayerReceipt)]
        for layer in data.get("layers") or []:
            if all(name in layer for name in inside):
                receipt.layers.append(LayerReceipt(**{name: layer[name] for name in inside}))
        return receipt

    @property
    def layers(self) -> Table:
        """Layers by group with the precision of each GEMM."""
        layers = self._receipt.layers
        total = sum(layer.flops for layer in layers) or 1
        rows, shares = [], []
        for number, names, *gemms, share, reason in group_layers(layers):
            ran = [self.num(g.upper(), RECEIPT, "layers[]") if g != "-" else MISSING for g in gemms]
            flops = self.num(share, RECEIPT, f"layers[].flops of {total:,}")
            why = self.num(reason, RECEIPT, "layers[].reason")
            rows.append((names, self.num(number, RECEIPT, "layers[].name"), *ran, flops, why))
            shares.append(float(share.rstrip("%")) / 100)
        head = ("layers", "count", "fprop", "dgrad", "wgrad", "FLOPs", "reason")
        return Table(head, rows, numeric=(1, 5), shares={5: shares})

    @property
    def peaks(self) -> Table:
        """Predicted and measured memory, as bars of one scale."""
        m = self.facts("memory") or {}
        found = [peak for peak in PEAKS if is_number(m.get(peak[1]))]
        rows = [
            (label, self.receipt(f"memory.{key}", size_of_gib), self.receipt(f"memory.{why}"))
            for label, key, why in found
        ]
        most = max((m[key] for _, key, _ in found), default=0) or 1
        bars = [m[key] / most for _, key, _ in found]
        return Table(("", "peak", "of what"), rows, (1,), {1: bars})

    @property
    def tasks(self) -> Table:
        rows = []
        for row in self.run.rows:
            for task, scores in (row.get("tasks") or {}).items():
                for metric, value in scores.items():
                    if metric.endswith("_stderr") or not is_number(value):
                        continue
                    key = f"tasks.{task}.{metric} at step {row['step']}"
                    error = scores.get(f"{metric}_stderr")
                    step = self.num(f"{row['step']:,}", METRICS, "step")
                    spread = self.num(f"± {error:.4f}", METRICS, key) if is_number(error) else ""
                    score = self.num(fixed(value), METRICS, key)
                    rows.append((task, metric, step, score, spread))
        return Table(("task", "metric", "step", "score", "standard error"), rows, (2, 3, 4))

    @property
    def config(self) -> str:
        try:
            return (self.folder / CONFIG).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    @property
    def environment(self) -> Table:
        return Table(("", ""), [(name, self.num(*where)) for name, *where in self._environment()])

    def _environment(self) -> Iterator[tuple[str, str, str, str]]:
        e = self.facts("environment") or {}
        if device := e.get("device"):
            size = device.get("memory_gib")
            text = f"{device.get('name')}" + (f", {size:.1f} GiB" if is_number(size) else "")
            yield "device", text, RECEIPT, "environment.device"
        for key in ("processes", "seed"):
            if key in e:
                yield key, str(e[key]), RECEIPT, f"environment.{key}"
        for library, version in (e.get("versions") or {}).items():
            yield library, str(version), RECEIPT, f"environment.versions.{library}"
        if e.get("patches"):
            yield "patched", ", ".join(map(str, e["patches"])), RECEIPT, "environment.patches"
        if command := self.run.start.get("command"):
            yield "command", " ".join(map(str, command)), "run.json", "command"
        for key, value in (self.facts("conditions") or {}).items():
            text = value if isinstance(value, str) else json.dumps(value)
            yield key.replace("_", " "), text, RECEIPT, f"conditions.{key}"

    # ------------------------------------------------------------------------------------- answers

    def answers_of(self, number: int) -> Iterator[tuple[str, str, str, str, int]]:
        """Yield (prompt, answer, file, key, step) of one evaluation; -1 is the last."""
        found = self.run.samples
        step, pairs = found[number]
        final = found[number] is found[-1] and pairs == self.run.report.get("samples")
        file, key = (REPORT, "samples") if final else (METRICS, f"samples at step {step}")
        for pair in pairs:
            yield str(pair.get("prompt", "")), str(pair.get("answer", "")), file, key, step

    @property
    def answers(self) -> dict[str, list[tuple[Cell, str]]]:
        """Answers to each prompt in the course of training, (when, answer)."""
        prompts: dict[str, list[tuple[Cell, str]]] = {}
        for number in range(len(self.run.samples)):
            for prompt, answer, file, key, step in self.answers_of(number):
                when = self.num("trained" if file == REPORT else f"step {step:,}", file, key)
                prompts.setdefault(prompt, []).append((when, answer))
        shown = {}
        for prompt, said in prompts.items():
            at = np.linspace(0, len(said) - 1, min(len(said), SHOWN_ANSWERS)).round().astype(int)
            shown[prompt] = [said[i] for i in at]
        return shown


def run_page(s: RunSource) -> Page:
    shown = {"loss_plot": loss_plot(s), "health": health(s), "speed_plots": gradients_and_speed(s)}
    return Page(s.run.recipe, *s.verdict, "run.j2", {"s": s} | shown)


# ------------------------------------------------------------------------------------ several runs


def several_page(runs: Sequence[RunSource]) -> Page:
    """One table, shared plots, and differences of the configurations."""
    proven = sum(s.run.proven for s in runs)
    head = ("run", "precision", "verdict", "state", "steps", "loss", "held out", "tokens/s")
    unit, half = "nats per token", {"from_zero": True, "size": "half"}
    losses = (
        overlay(runs, "loss", "loss", "Training loss", unit, size="wide"),
        overlay(runs, "eval_loss", "held_out_loss", "Eval loss", unit, size="wide"),
    )
    shown = {
        "table": Table((*head, "memory"), [*map(_row, runs)], numeric=(4, 5, 6, 7, 8)),
        "losses": tuple(plot for plot in losses if plot is not None),
        "speed_plots": side_by_side(
            overlay(runs, "grad_norm", "gradient_norm", "Gradient norm", "L2", **half),
            overlay(runs, "tokens_per_s", "speed", "Speed", "tokens per second", **half),
        ),
        "differences": _differences(runs),
    }
    title = " · ".join(dict.fromkeys(s.run.recipe for s in runs))
    verdict = ("All proven", "good") if proven == len(runs) else ("Not all proven", "bad")
    return Page(title, *verdict, "several.j2", {"runs": runs, "proven": proven} | shown)


def names_of(runs: Sequence[Run]) -> list[str]:
    """Name runs on a page: the recipe, with seed or id where names repeat."""
    names = [run.recipe for run in runs]
    seeds = [f"seed {run.config.get('train', {}).get('seed', 42)}" for run in runs]
    for extra in (seeds, [run.name.rpartition("-")[2] for run in runs]):
        longer = [
            f"{name}, {more}" if names.count(name) > 1 else name
            for name, more in zip(names, extra, strict=True)
        ]
        if len(set(longer)) > len(set(names)):
            names = longer
    return names


def _row(s: RunSource) -> tuple[Cell, ...]:
    verdict = s.verdict[0]
    return (
        s.link(s.label),
        s.num(s.run.precision, RECEIPT, "precision"),
        s.num(verdict, RECEIPT, "status") if s.run.receipt else verdict,
        *(s.run.state, s.last_step, s.course("loss").last, s.course("eval_loss").last),
        *(s.speed, s.memory),
    )


def _differences(runs: Sequence[RunSource]) -> Table:
    flat = [_flat(s.run.config) for s in runs]
    rows = [
        (key, *(s.num(str(one.get(key, MISSING)), CONFIG, key)
                for one, s in zip(flat, runs, strict=True)))
        for key in dict.fromkeys(k for one in flat for k in one)
        if len({str(one.get(key)) for one in flat}) > 1
    ]  # fmt: skip
    return Table(("key", *(s.label for s in runs)), rows)


def _flat(data: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        nested = isinstance(value, dict) and value
        found |= _flat(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return found
